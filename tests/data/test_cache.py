"""The cache: what is tokenised once is found again, whole and never stale, by every process."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from messages import says
from tiny import make_tokenizer

from ftkit.data import cache, dataset
from ftkit.data.cache import SampleCache, cache_directory, file_digest
from ftkit.data.dataset import DataSets, load_data, load_held_out
from ftkit.data.prepare import prepare_records
from ftkit.models.chat_templates.prompt_styles import PromptStyle, resolve_prompt_style
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Component


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(tokenizer_directory: Path) -> Tokenizer:
    return Tokenizer(tokenizer_directory)


def records(count: int, word: str = "red") -> str:
    return json.dumps([{"instruction": f"{i}?", "output": f"{word} " * 5} for i in range(count)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.json"
    path.write_text(records(40))
    return path


Load = Callable[..., tuple[DataSets, bool]]


@pytest.fixture
def load(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Gives data, and whether records were tokenised for them."""

    def load_(path: Path, most: int = 200, known: Any = tokenizer, **options: Any) -> Any:
        made = []

        def noted(*arguments: Any) -> Any:
            made.append(arguments)
            return prepare_records(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(dataset, "prepare_records", noted)
            component = Component(class_path="JSON", init_args={"path": str(path), **options})
            return load_data(component, known, most), bool(made)

    return load_


def entries() -> list[Path]:
    return sorted(cache_directory().glob("*/*/entry.json"))


def samples(data: DataSets) -> list[Any]:
    return [
        [split[i].ids.tolist() + split[i].trained.tolist() for i in range(len(split))]
        for split in (data.train, data.val)
    ]


def test_data_are_tokenised_once(load: Load, file: Path) -> None:
    first, made = load(file)
    again, made_again = load(file)
    assert (made, made_again) == (True, False)
    assert samples(first) == samples(again)
    assert first.fingerprint == again.fingerprint
    assert first.counts == again.counts
    assert first.questions[:] == again.questions[:]
    assert first.takes == again.takes
    assert first.train.lengths.tolist() == again.train.lengths.tolist()
    assert first.train.label_counts.tolist() == again.train.label_counts.tolist()


def test_the_cache_names_the_keys_that_are_not_used(load: Load, file: Path) -> None:
    rows = json.loads(records(40))
    file.write_text(json.dumps([row | {"id": i, "source": "web"} for i, row in enumerate(rows)]))
    summaries = [load(file)[0].parts[0].part.summary for _ in range(2)]
    assert summaries[0] == summaries[1]
    assert summaries[0].endswith("; not used: id, source")


def test_a_copy_elsewhere_is_the_same_data(load: Load, file: Path, tmp_path: Path) -> None:
    load(file)
    (tmp_path / "elsewhere").mkdir()
    copy = shutil.copy(file, tmp_path / "elsewhere")
    assert not load(Path(copy))[1]


@pytest.mark.extensions
def test_what_decides_samples_decides_the_address(
    load: Load, file: Path, tmp_path: Path, tokenizer_directory: Path
) -> None:
    load(file)
    other = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_directory, other)
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": False}))
    for changes in (
        {"most": 199},
        {"mask_prompt": True},
        {"prompt_style": "phi-2"},
        {"seed": 3},
        {"val_split_fraction": 0.5},
        {"overlong": "drop"},
        {"min_tokens": 3},
        {"drop_equal": True},
        {"known": Tokenizer(other)},
    ):
        assert load(file, **changes)[1], changes
        assert not load(file, **changes)[1], changes
    assert not load(file, num_workers=0)[1]
    file.write_text(records(40, "blue"))
    assert load(file)[1]


def test_a_changed_file_is_never_stale_whatever_its_time_and_size(load: Load, file: Path) -> None:
    before, _ = load(file)
    status = file.stat()
    file.write_text(records(40, "dog"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    after, made = load(file)
    assert made and after.fingerprint != before.fingerprint


def test_a_changed_prompt_style_is_never_stale(
    load: Load, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _ = load(file)
    apply = PromptStyle.apply
    monkeypatch.setattr(
        PromptStyle, "apply", lambda *args, **kwargs: apply(*args, **kwargs) + " now"
    )
    after, made = load(file)
    assert made and after.fingerprint != before.fingerprint
    assert resolve_prompt_style("alpaca")


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    tokenizer: Tokenizer, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written_meanwhile(*arguments: Any) -> Any:
        file.write_text(records(41))
        return prepare_records(*arguments)

    monkeypatch.setattr(dataset, "prepare_records", written_meanwhile)
    load_data(Component(class_path="JSON", init_args={"path": str(file)}), tokenizer, 200)
    assert entries() == []


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
@pytest.mark.parametrize(
    "name", ["tokens", "offsets", "spans", "span_offsets", "records.jsonl", "entry.json"]
)
def test_a_damaged_entry_is_noticed_and_rebuilt(
    load: Load, file: Path, name: str, damage: Callable[[Path], None]
) -> None:
    before, _ = load(file)
    expected = samples(before)
    (entry,) = cache_directory().glob("*/val")
    damage(entry / name)
    after, made = load(file)
    assert made and samples(after) == expected
    (notice,) = after.parts[0].notices
    assert notice.startswith("A damaged entry of the data cache is rebuilt: ")
    again, made_again = load(file)
    assert not made_again and again.parts[0].notices == ()


def test_a_cache_that_cannot_be_written_stops_nothing(
    load: Load, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = samples(load(file)[0])
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "taken"))
    data, made = load(file)
    assert made and samples(data) == expected
    (notice,) = data.parts[0].notices
    assert "cannot be written" in notice and "FTKIT_CACHE_DIR" in notice


def test_a_full_disk_stops_nothing_and_leaves_nothing(
    load: Load, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(cache, "_write_records", full)
        data, made = load(file)
    assert made and len(data.train) == 38
    assert says(data.parts[0].notices[0], "No space left")
    assert [entry.parent.name for entry in entries()] == ["train"]
    assert load(file)[1]


def test_an_evaluation_takes_the_validation_samples_of_a_run(
    load: Load, file: Path, tokenizer: Tokenizer
) -> None:
    data, _ = load(file)
    reports: list[Any] = []
    component = Component(class_path="JSON", init_args={"path": str(file)})
    held_out = load_held_out(component, tokenizer, 200, progress=lambda *all_: reports.append(all_))
    assert reports == []
    assert [sample.ids.tolist() for sample in map(held_out.samples.__getitem__, range(2))] == [
        data.val[i].ids.tolist() for i in range(2)
    ]


@pytest.mark.extensions
def test_the_records_of_a_module_that_cannot_name_its_files_are_the_address(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = Path("data/alpaca/alpaca_data_cleaned_archive.json")
    place.parent.mkdir(parents=True)
    component = Component(
        class_path="litgpt.data.Alpaca", init_args={"val_split_fraction": 0.1, "mask_prompt": True}
    )
    found, tokenised = [], []
    for content in (records(30), records(30), records(30, "blue")):
        place.write_text(content)
        reports: list[Any] = []
        report = partial(list.append, reports)
        data = load_data(component, tokenizer, 200, progress=lambda *all_, r=report: r(all_))
        tokenised.append(bool(reports))
        found.append(data)
    assert tokenised == [True, False, True]
    assert found[0].fingerprint == found[1].fingerprint != found[2].fingerprint
    assert found[1].prompt_source.part.rules.prompt_style is not None


OPEN = """
import json, sys
from ftkit.models.chat_templates.prompt_styles import PromptStyle, resolve_prompt_style
from ftkit.recipe.recipe import Component
from ftkit.data import dataset
from ftkit.data.dataset import load_data
from ftkit.models.pretrained.tokenizer import Tokenizer
from pathlib import Path
made = []
prepare_records = dataset.prepare_records
dataset.prepare_records = lambda *arguments: made.append(1) or prepare_records(*arguments)
tokenizer = Tokenizer(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
component = Component(class_path="JSON", init_args={"path": sys.argv[2]})
data = load_data(component, tokenizer, 200)
print(json.dumps([len(made), data.fingerprint]))
"""


@pytest.mark.slow
def test_of_processes_that_start_together_one_tokenises(
    file: Path, tokenizer_directory: Path
) -> None:
    command = [sys.executable, "-c", OPEN, str(tokenizer_directory), str(file)]
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ)
        for _ in range(3)
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    found = [json.loads(process.communicate(timeout=60)[0]) for process in started]
    assert sorted(made for made, _ in found) == [0, 0, 2]
    assert len({fingerprint for _, fingerprint in found}) == 1


def test_who_waits_sees_how_far_the_other_is(
    load: Load, file: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And makes the samples if the other does not."""
    monkeypatch.setattr(cache, "_REPORT_INTERVAL_S", 0.01)
    component = Component(class_path="JSON", init_args={"path": str(file)})
    addresses: list[str] = []
    building = SampleCache.building

    def noted(self: SampleCache, address: str, on_waiting: Any) -> Any:
        addresses.append(address)
        return building(self, address, on_waiting)

    with monkeypatch.context() as patched:
        patched.setattr(SampleCache, "building", noted)
        load(file)
    shutil.rmtree(cache_directory())
    reports: list[Any] = []
    waits = threading.Event()

    def progress(*all_: Any) -> None:
        reports.append(all_)
        waits.set()

    with SampleCache(cache_directory()).building(addresses[0], print) as other:
        other.report("train", 7, 38)
        thread = threading.Thread(
            target=load_data, args=(component, tokenizer, 200), kwargs={"progress": progress}
        )
        thread.start()
        assert waits.wait(60)
    thread.join(60)
    assert reports[0] == ("train", 7, 38)
    assert reports[-1] == ("val", 2, 2)
    assert len(entries()) == 2


def test_the_checksum_of_a_file_covers_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_PIECE_BYTES", 10)
    digests = set()
    for content in (b"", b"x", b"x" * 10, b"x" * 20, b"x" * 21, b"x" * 20 + b"y", b"y" + b"x" * 20):
        (tmp_path / "file").write_bytes(content)
        digests.add(file_digest(tmp_path / "file"))
    assert len(digests) == 7


def test_the_cache_lies_where_the_variable_says_or_at_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FTKIT_CACHE_DIR")
    assert cache_directory() == Path.home() / ".cache/ftkit/samples"
