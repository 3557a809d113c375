"""Pieces of tensors: any cut is written, any range is read, and nothing is ever made up."""

import itertools
import json
import os
import pickle
import random
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import create_dynamic_map, dequantize_blockwise, quantize_blockwise
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ftkit.checkpoint.metadata import CheckpointError, shard_name
from ftkit.checkpoint.shards import (
    Piece,
    share_of,
    write_shard,
    write_shard_in_portions,
)
from ftkit.checkpoint.stored_state import StoredState
from ftkit.recipe.optimizers import BLOCK
from ftkit.utils.safetensors_files import save_tensors

SHAPE = torch.Size((7, 5))
TENSOR = torch.arange(35, dtype=torch.float32).view(SHAPE)


def write(directory: Path, *shards: list[Piece]) -> list[Path]:
    paths = [directory / shard_name(rank, len(shards)) for rank in range(len(shards))]
    for path, pieces in zip(paths, shards, strict=True):
        write_shard(path, pieces)
    return paths


def piece(start: int, stop: int, tensor: torch.Tensor = TENSOR, name: str = "w") -> Piece:
    return Piece(
        name=name, shape=tensor.shape, start=start, values=tensor.flatten()[start:stop].clone()
    )


@pytest.mark.parametrize("seed", range(12))
def test_any_range_is_read_from_any_cut(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    borders = [0, *sorted(draw.sample(range(1, 35), draw.randrange(7))), 35]
    pieces = [piece(a, b) for a, b in itertools.pairwise(borders)]
    stored = StoredState(write(tmp_path, pieces[::2], pieces[1::2]))["w"]
    for start in range(36):
        for stop in range(start, 36):
            assert torch.equal(stored.read(start, stop), TENSOR.flatten()[start:stop])
    for first in range(8):
        assert torch.equal(stored[first:], TENSOR[first:])
    assert torch.equal(stored[:], TENSOR)


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    tensors, notes = {"ä": TENSOR}, {"b": '{"x": "ü\\n"}', "a": "\u2028/", "c": ""}
    files = [tmp_path / str(number) for number in range(16)]  # save_file has 24 orders of four keys
    for file in files:
        save_tensors(tensors, file, notes)
    assert len({file.read_bytes() for file in files}) == 1
    with safe_open(files[0], framework="pt") as stored:
        assert stored.metadata() == {"format": "pt"} | notes
        assert torch.equal(stored.get_tensor("ä"), TENSOR)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 10_000])
def test_replicated_tensors_are_written_once_in_equal_shares(world_size: int, numel: int) -> None:
    shares = [share_of(rank, world_size, numel) for rank in range(world_size)]
    assert shares[0][0] == 0
    assert shares[-1][1] == numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(shares))
    assert all(first % BLOCK == 0 for first, last in shares if first < last)
    sizes = [last - first for first, last in shares]
    assert max(sizes) - min(sizes) <= 2 * BLOCK


def test_number_formats_are_kept(tmp_path: Path) -> None:
    tensors = {
        name: torch.randn(3, 4).to(dtype)
        for name, dtype in (("a", torch.bfloat16), ("b", torch.float16), ("c", torch.float64))
    }
    stored = StoredState(write(tmp_path, [piece(0, 12, t, n) for n, t in tensors.items()]))
    assert stored.names() == list(tensors)
    for name, tensor in tensors.items():
        assert stored[name].shape == tensor.shape
        assert torch.equal(stored[name].read(0, 12), tensor.flatten())


def test_files_are_safetensors_that_others_can_read_too(tmp_path: Path) -> None:
    (path,) = write(tmp_path, [piece(0, 35)])
    assert torch.equal(load_file(path)["w@0"], TENSOR.flatten())
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


class TestEightBits:
    numbers = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    code = create_dynamic_map()

    def quantized(self, start: int, stop: int) -> Piece:
        """State of bitsandbytes on a rank that holds this range."""
        values = self.numbers.flatten()[start:stop]
        codes, state = quantize_blockwise(values, self.code, blocksize=BLOCK)
        return Piece(
            name="m",
            shape=self.numbers.shape,
            start=start,
            values=codes,
            scales=state.absmax,
            code=self.code,
        )

    def test_they_are_read_exactly_where_blocks_agree(self, tmp_path: Path) -> None:
        whole = self.quantized(0, 1200)
        stored = StoredState(write(tmp_path, [whole]))["m"]
        for start, stop in ((0, 1200), (512, 1200), (256, 512), (256, 700)):
            found = stored.read_quantized(start, stop, self.code)
            assert found is not None
            assert whole.scales is not None
            assert torch.equal(found[0], whole.values[start:stop])
            assert torch.equal(found[1], whole.scales[start // 256 : -(-stop // 256)])

    def test_blocks_of_neighbouring_ranks_make_a_whole(self, tmp_path: Path) -> None:
        whole = self.quantized(0, 1200)
        stored = StoredState(write(tmp_path, [self.quantized(0, 512)], [self.quantized(512, 1200)]))
        found = stored["m"].read_quantized(0, 1200, self.code)
        assert found is not None
        assert whole.scales is not None
        assert torch.equal(found[0], whole.values)
        assert torch.equal(found[1], whole.scales)

    def test_other_blocks_are_read_as_numbers(self, tmp_path: Path) -> None:
        parts = [self.quantized(0, 300), self.quantized(300, 1200)]
        stored = StoredState(write(tmp_path, *[[part] for part in parts]))["m"]
        assert stored.quantized
        assert stored.read_quantized(0, 1200, self.code) is None
        assert stored.read_quantized(300, 1200, self.code) is not None
        expected = torch.cat(
            [
                dequantize_blockwise(p.values, absmax=p.scales, code=p.code, blocksize=BLOCK)
                for p in parts
            ]
        )
        for start, stop in ((0, 1200), (299, 301), (310, 900), (1199, 1200)):
            assert torch.equal(stored.read(start, stop), expected[start:stop])


@pytest.mark.parametrize(("levels", "block"), [(16, 128), (256, 64), (16, 256)])
def test_codes_of_any_width_and_block_are_read_as_numbers_and_as_codes(
    tmp_path: Path, levels: int, block: int
) -> None:
    generator = torch.Generator().manual_seed(2)
    code, scales = torch.randn(levels), torch.rand(1024 // block, generator=generator)
    codes = torch.randint(levels, (1024,), generator=generator, dtype=torch.uint8)
    numbers = code[codes.long()] * scales.repeat_interleave(block)
    packed = codes if levels == 256 else (codes[::2] << 4) | codes[1::2]
    in_byte = len(codes) // len(packed)

    def part(start: int, stop: int) -> Piece:
        return Piece(
            name="m",
            shape=torch.Size((4, 256)),
            start=start,
            values=packed[start // in_byte : stop // in_byte],
            scales=scales[start // block : stop // block],
            code=code,
            block=block,
        )

    stored = StoredState(write(tmp_path, [part(0, 256)], [part(256, 1024)]))["m"]
    for start, stop in ((0, 1024), (7, 8), (255, 257), (301, 766)):
        assert stored.read(start, stop).equal(numbers[start:stop])
    found = stored.read_quantized(0, 1024, code, block)
    assert found is not None
    assert found[0].equal(packed) and found[1].equal(scales)
    for other in ((code, 2 * block), (code + 1, block), (torch.ones(272 - levels), block)):
        assert stored.read_quantized(0, 1024, *other) is None, "they would mean other numbers"


class TestDamage:
    def test_a_gap_or_an_overlap_is_refused(self, tmp_path: Path) -> None:
        for pieces in (
            [piece(0, 10), piece(11, 35)],
            [piece(0, 11), piece(10, 35)],
            [piece(0, 34)],
            [piece(1, 35)],
        ):
            with pytest.raises(CheckpointError, match="w is incomplete"):
                StoredState(write(tmp_path, pieces))

    def test_ranks_that_disagree_on_a_shape_are_refused(self, tmp_path: Path) -> None:
        paths = write(tmp_path, [piece(0, 20)], [piece(20, 35, TENSOR.view(5, 7))])
        with pytest.raises(CheckpointError, match="shape of w differs"):
            StoredState(paths)

    def test_a_missing_tensor_is_named(self, tmp_path: Path) -> None:
        stored = StoredState(write(tmp_path, [piece(0, 35)]))
        assert "v" not in stored
        with pytest.raises(CheckpointError, match="no v"):
            stored["v"]

    def test_a_file_that_is_not_a_shard_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "shard-00000-of-00001.safetensors"
        for content in (b"", b"{}", b"\0" * 100):
            path.write_bytes(content)
            with pytest.raises(CheckpointError, match="damaged"):
                StoredState([path])
        save_file({"w": TENSOR}, path)
        with pytest.raises(CheckpointError, match="damaged"):
            StoredState([path])
        places = {"w": {"name": "w", "shape": [7, 5], "start": "0"}}
        save_file({"w": TENSOR.flatten()}, path, metadata={"pieces": json.dumps(places)})
        with pytest.raises(CheckpointError):
            StoredState([path])
        with pytest.raises(CheckpointError, match="missing"):
            StoredState([tmp_path / "nothing"])

    def test_a_pickle_is_refused_and_nothing_runs(self, tmp_path: Path) -> None:
        path = tmp_path / "shard-00000-of-00001.safetensors"
        path.write_bytes(pickle.dumps(_Payload(tmp_path / "ran")))
        with pytest.raises(CheckpointError, match="damaged"):
            StoredState([path])
        assert not (tmp_path / "ran").exists()


class _Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.target),)


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def test_a_shard_that_goes_through_little_memory_is_the_same_file(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)
    pieces = []
    for number, dtype in enumerate(dtypes):
        values = torch.arange(1000).to(dtype)
        is_coded = dtype is torch.uint8
        scales, code = (torch.ones(4), torch.ones(256)) if is_coded else (None, None)
        name = f"exp_avg/é{9 - number}"
        pieces.append(
            Piece(name=name, shape=values.shape, start=0, values=values, scales=scales, code=code)
        )
    write_shard(tmp_path / "whole", pieces)
    for portion_bytes in (1, 100, 10**9):
        write_shard_in_portions(tmp_path / "rolled", pieces, portion_bytes)
        assert (tmp_path / "rolled").read_bytes() == (tmp_path / "whole").read_bytes()
