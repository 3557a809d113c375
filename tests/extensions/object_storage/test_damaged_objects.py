"""Objects of a checkpoint that are not what they were: nobody goes on from them."""

import dataclasses
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import some_metadata
from messages import says
from object_servers import Bucket, Proxy
from remote_runs import Ftkit, ended, learned

from ftkit.checkpoint.file_checks import describe_file, hash_file
from ftkit.checkpoint.metadata import (
    DamagedPart,
    Metadata,
    read_metadata,
    write_metadata,
)
from ftkit.checkpoint.shards import Piece, write_shard
from ftkit.checkpoint.stored_state import StoredState
from ftkit.utils.urls import local_path

pytestmark = pytest.mark.usefixtures("s3")
SHARD = "shard-00000-of-00001.safetensors"
BLOCK = 4096
Damage = Callable[[bytes], bytes]


def swapped(content: bytes) -> bytes:
    """Two parts of the numbers have changed places."""
    middle, length = len(content) // 2, len(content) // 8
    first, second = content[middle - length : middle], content[middle : middle + length]
    return content[: middle - length] + second + first + content[middle + length :]


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def noisy(content: bytes) -> bytes:
    middle, length = len(content) // 2, len(content) // 8
    noise = random.Random(1).randbytes(length)
    return content[: middle - length] + noise + content[middle:]


def with_other_header(content: bytes) -> bytes:
    """The numbers of two tensors that are as long have changed names."""
    return (
        content.replace(b'"a@0":{"dt', b'"#@0":{"dt')
        .replace(b'"b@0":{"dt', b'"a@0":{"dt')
        .replace(b'"#@0":{"dt', b'"b@0":{"dt')
    )


OF_THE_SAME_SIZE: list[Damage] = [swapped, flipped, noisy]
OF_ANOTHER_SIZE: list[Damage] = [lambda content: content[:-1], lambda content: content + b"\0"]


@pytest.fixture
def numbers() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    sizes = {"a": 5000, "b": 5000, "c": 7, "d": 3000}
    return {name: torch.rand(size, generator=draw) for name, size in sizes.items()}


@pytest.fixture
def stored(bucket: Bucket, numbers: dict[str, torch.Tensor]) -> tuple[Path, Metadata]:
    """A checkpoint whose shard lies at its url alone, and what it says about itself."""
    directory = local_path("s3://bucket/parts/checkpoints/step-00000005")
    directory.mkdir(parents=True)
    shard = directory / SHARD
    write_shard(
        shard, (Piece(name=n, shape=t.shape, start=0, values=t) for n, t in numbers.items())
    )
    bucket.write(f"parts/checkpoints/step-00000005/{SHARD}", shard.read_bytes())
    entry = describe_file(shard, BLOCK)
    shard.unlink()
    return directory, some_metadata(5, files={SHARD: entry})


def damage_object(bucket: Bucket, name: str, damage: Damage) -> None:
    content = bucket.read(name)
    assert damage(content) != content
    bucket.write(name, damage(content))


@pytest.mark.slow
@pytest.mark.parametrize("damage", [*OF_THE_SAME_SIZE, *OF_ANOTHER_SIZE, with_other_header])
def test_numbers_from_a_damaged_object_are_never_taken(
    stored: tuple[Path, Metadata], numbers: dict[str, torch.Tensor], bucket: Bucket, damage: Damage
) -> None:
    """Whoever reads sound blocks alone gets what was saved."""
    whole = StoredState.in_checkpoint(*stored)
    for name, values in numbers.items():
        assert torch.equal(whole[name].read(0, len(values)), values)
    damage_object(bucket, f"parts/checkpoints/step-00000005/{SHARD}", damage)
    refused = []
    try:
        state = StoredState.in_checkpoint(*stored)
    except DamagedPart as error:
        refused.append(error)
    else:
        for name, values in numbers.items():
            for start in range(0, len(values), 500):
                part = values[start : start + 500]
                try:
                    assert torch.equal(state[name].read(start, start + len(part)), part)
                except DamagedPart as error:
                    refused.append(error)
    assert refused
    assert all(error.file == stored[0] / SHARD for error in refused)
    assert re.search(f"s3://bucket/parts/.*{SHARD} is damaged: ", str(refused[0]))


def test_a_rank_reads_and_verifies_no_more_than_the_blocks_that_it_needs(
    stored: tuple[Path, Metadata], numbers: dict[str, torch.Tensor], s3: Proxy
) -> None:
    """And none of them twice, if it reads one tensor after the other."""
    state = StoredState.in_checkpoint(*stored)

    def fetched() -> int:
        ranges = [r.headers["Range"] for r in s3.requests if "Range" in r.headers]
        s3.requests.clear()
        pairs = [tuple(map(int, text.removeprefix("bytes=").split("-"))) for text in ranges]
        return sum(last + 1 - first for first, last in pairs)

    size = stored[1].files[SHARD].size_bytes
    assert fetched() == BLOCK  # with the header
    assert torch.equal(state["b"].read(2000, 2500), numbers["b"][2000:2500])
    assert 2000 <= fetched() <= 2 * BLOCK
    for _ in range(2):
        state = StoredState.in_checkpoint(*stored)
        for name, values in numbers.items():
            for start in range(0, len(values), 1500):
                part = values[start : start + 1500]
                assert torch.equal(state[name].read(start, start + len(part)), part)
        assert fetched() <= size + BLOCK


def describe_again(
    bucket: Bucket, prefix: str, place: Path, describe: Callable[[Path], object]
) -> None:
    """Have metadata at a url say of each file what `describe` says of it."""
    for directory in (bucket.fetch(prefix, place) / "checkpoints").glob("step-*"):
        metadata = read_metadata(directory)
        files = {name: describe(directory / name) for name in metadata.files}
        write_metadata(dataclasses.replace(metadata, files=files), directory)
        content = (directory / "metadata.json").read_bytes()
        bucket.write(f"{prefix}/checkpoints/{directory.name}/metadata.json", content)


def in_small_blocks(file: Path) -> object:
    """As a shard of gigabytes has many."""
    return describe_file(file, BLOCK)


def of_another_step(bucket: Bucket, prefix: str) -> None:
    """Which has the same size."""
    other = bucket.read(f"{prefix}/checkpoints/step-00000002/{SHARD}")
    assert len(other) == len(bucket.read(f"{prefix}/checkpoints/step-00000004/{SHARD}"))
    bucket.write(f"{prefix}/checkpoints/step-00000004/{SHARD}", other)


def change(name: str, damage: Damage) -> Callable[[Bucket, str], None]:
    return lambda bucket, prefix: damage_object(
        bucket, f"{prefix}/checkpoints/step-00000004/{name}", damage
    )


SLOW = pytest.mark.slow
MATRIX = pytest.mark.matrix


@pytest.mark.parametrize(
    ("damage", "describe", "layout", "found_by"),
    [
        pytest.param(
            change(SHARD, swapped), in_small_blocks, (), "rank", id="swapped", marks=MATRIX
        ),
        pytest.param(
            change(SHARD, noisy),
            in_small_blocks,
            ("--devices", "2", "--strategy", "fsdp"),
            "rank",
            id="noise-two-ranks",
            marks=SLOW,
        ),
        pytest.param(of_another_step, in_small_blocks, (), "start", id="other-step", marks=MATRIX),
        pytest.param(
            change(SHARD, flipped), hash_file, (), "start", id="old-version", marks=MATRIX
        ),
        pytest.param(
            change("base/config.json", flipped),
            in_small_blocks,
            (),
            "start",
            id="companion",
            marks=MATRIX,
        ),
        *(
            pytest.param(change(name, damage), in_small_blocks, (), "start", id=word, marks=MATRIX)
            for name, damage, word in (
                (SHARD, OF_ANOTHER_SIZE[0], "cut"),
                (SHARD, OF_ANOTHER_SIZE[1], "extended"),
                ("metadata.json", flipped, "metadata"),
            )
        ),
    ],
)
def test_another_machine_continues_from_the_newest_sound_checkpoint_at_a_url(
    put: Callable[..., None],
    run: Callable[..., str],
    whole: Callable[[str], Path],
    bucket: Bucket,
    tmp_path: Path,
    damage: Callable[[Bucket, str], None],
    describe: Callable[[Path], object],
    layout: tuple[str, ...],
    found_by: str,
) -> None:
    """It ends as if nothing had been damaged, and says why it went back."""
    prefix, full = f"damaged/{tmp_path.name}", {"command": "finetune_full"}
    url = f"s3://bucket/{prefix}"
    put(prefix, "--stop_after", "4", **full)
    describe_again(bucket, prefix, tmp_path / "described", describe)
    damage(bucket, prefix)
    said = run("b", url, "--resume", "auto", *layout, **full)
    why = f"{url}/checkpoints/step-00000004 cannot be continued from: "
    assert why in said and "continuing from step 2" in said
    assert ("Reading all of it" in said) == (found_by == "rank")
    copy = bucket.fetch(prefix, tmp_path / "copy")
    found, expected = learned(copy), learned(whole("finetune_full"))
    assert [row[0] for row in found] == [row[0] for row in expected]
    losses = [[float(row[2]) for row in rows] for rows in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert bucket.steps(prefix) == [2, 4, 5]


@pytest.mark.slow
def test_a_damaged_checkpoint_given_by_its_step_is_refused(
    begin: Ftkit, put: Callable[..., None], bucket: Bucket, tmp_path: Path
) -> None:
    url, full = "s3://bucket/refused", {"command": "finetune_full"}
    put("refused", "--stop_after", "4", **full)
    describe_again(bucket, "refused", tmp_path / "described", in_small_blocks)
    change(SHARD, swapped)(bucket, "refused")
    code, said = ended(begin("b", url, "--resume", "4", **full))
    assert code == 2, said
    assert f"{SHARD} is damaged" in said and "--resume auto" in said and "Traceback" not in said
    before = bucket.names("refused")
    code, said = ended(begin("b", url, "--resume", "4", **full))  # which reads all of it first
    assert code == 2 and "--resume 2" in said
    assert bucket.names("refused") == before


@pytest.mark.matrix
def test_lost_rows_at_a_url_are_reported_and_the_run_continues(
    run: Callable[..., str], bucket: Bucket, tmp_path: Path
) -> None:
    url = "s3://bucket/rows"
    run("a", url, "--stop_after", "4")
    lines = bucket.read("rows/metrics.csv").splitlines(keepends=True)
    bucket.write("rows/metrics.csv", b"".join(lines[:3]) + lines[3][:4])
    said = run("b", url, "--resume", "auto")
    assert says(said, f"{url}/metrics.csv ... steps 3 to 4 ... lost")
    assert [row[0] for row in learned(bucket.fetch("rows", tmp_path / "copy"))] == ["1", "2", "5"]
