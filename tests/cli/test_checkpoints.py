"""ftkit checkpoints: what people see of the checkpoints of a run, and what they can remove."""

import fcntl
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import FILES, RECIPE, save, write_partial
from messages import message_of, says

from ftkit.checkpoint.store import Store
from ftkit.cli import checkpoints as manage
from ftkit.cli.app import run
from ftkit.errors import UserError
from ftkit.runs import checkpoints as survey
from ftkit.runs.checkpoints import CheckpointEntry
from ftkit.utils.console.formatting import utc_now
from ftkit.utils.console.terminal import plain_text


@pytest.fixture
def out_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with three checkpoints, by a path as people write it."""
    monkeypatch.chdir(tmp_path)
    out_dir = Path("out/lora")
    for step, loss in ((500, 0.5), (1000, 0.75), (1500, None)):
        save(store_of(out_dir), step, validation_loss=loss, saved_at=utc_now())
    (out_dir / "recipe.yaml").write_text(RECIPE)
    return out_dir


def store_of(out_dir: Path) -> Store:
    return Store(out_dir / "checkpoints")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Exit code and output of a command: `code, out = said("list", out_dir)`."""

    def run_(*argv: object) -> tuple[int, str]:
        code = run(["checkpoints", *map(str, argv)])
        out, err = capsys.readouterr()
        assert err == ""
        return code, out

    return run_


@pytest.fixture
def at_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ages are the same in two lists made one after the other."""
    now = time.time()
    monkeypatch.setattr(manage, "time", SimpleNamespace(time=lambda: now))


@pytest.fixture
def values(said: Callable[..., tuple[int, str]]) -> Callable[..., Any]:
    """JSON that a command prints."""

    def run_(*argv: object, code: int = 0) -> object:
        found, out = said(*argv, "--format", "json")
        assert found == code
        return json.loads(out)

    return run_


def mistake(*argv: object) -> str:
    return message_of(run, ["checkpoints", *map(str, argv)])


def rows(out: str) -> list[list[str]]:
    """A table as words, the header apart."""
    return [line.split() for line in out.splitlines()[1:]]


def everything(directory: Path) -> dict[Path, bytes | None]:
    return {p: p.read_bytes() if p.is_file() else None for p in directory.rglob("*")}


def flip_in_the_middle(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def at_work(out_dir: Path) -> Iterator[None]:
    """The run's lock, as a supervisor holds it."""
    (out_dir / ".run").mkdir()
    with (out_dir / ".run/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- list -----------------------------------------------------------------------------------------


def test_a_list_has_a_row_for_each_checkpoint(
    said: Callable[..., tuple[int, str]], out_dir: Path
) -> None:
    code, out = said("list", out_dir)
    assert code == 0
    heads = ["step", "epoch", "loss", "val loss", "size", "age", "layout", "state"]
    assert re.split("  +", out.splitlines()[0].strip()) == heads
    for row, step, epoch, loss in zip(
        rows(out),
        ["500", "1,000", "1,500"],
        ["0.50", "1.00", "1.50"],
        [["0.5000"], ["0.7500"], []],
        strict=True,
    ):
        assert row[:3] == [step, epoch, "1.2500"]
        assert row[3 : 3 + len(loss)] == loss
        assert row[-3:] == ["fsdp", "x2", "complete"]
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(("width", "apart"), [(60, 1), (80, 2), (200, 2)])
def test_columns_of_a_list_move_together_before_they_are_torn(width: int, apart: int) -> None:
    table = manage._table("step", "epoch", "loss", "val loss", "size", "age", "layout", "state")
    row = ["1,500", "1.50", "1.2500", "0.5000", "212 MiB", "23 min", "fsdp x2", "complete"]
    table.add_row(*row)
    head, line = plain_text(table, width).splitlines()
    assert line == (" " * apart).join(
        cell.rjust(width) if place < 6 else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(row, (5, 5, 6, 8, 7, 6, 7, 8), strict=True))
    )
    assert len(head) <= width


@pytest.mark.parametrize("path", ["out/lora/", "out/lora/checkpoints", "~/out/lora"])
def test_a_run_or_its_checkpoints_can_be_named(
    said: Callable[..., tuple[int, str]],
    out_dir: Path,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    at_one_moment: None,
) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd()))
    assert said("list", path) == said("list", out_dir)


def test_the_present_directory_can_be_named(
    said: Callable[..., tuple[int, str]],
    out_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    at_one_moment: None,
) -> None:
    monkeypatch.chdir(out_dir)
    expected = said("list", ".")
    monkeypatch.chdir("checkpoints")
    assert said("list", ".") == expected
    monkeypatch.chdir("step-00000500/adapter")
    assert said("show", "..")[0] == 0


def test_copied_checkpoints_are_listed_under_any_name(
    values: Callable[..., Any], out_dir: Path
) -> None:
    shutil.copytree(out_dir / "checkpoints", "backup")
    assert [entry["step"] for entry in values("list", "backup")] == [500, 1000, 1500]


def test_json_is_all_that_is_known(values: Callable[..., Any], out_dir: Path) -> None:
    entries = values("list", out_dir)
    assert [entry["step"] for entry in entries] == [500, 1000, 1500]
    first = entries[0]
    path = out_dir / "checkpoints/step-00000500"
    assert (first["path"], first["state"], first["problems"]) == (str(path), "complete", [])
    assert first["size_bytes"] == sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    written = json.loads((path / "metadata.json").read_text())
    assert first["metadata"] == {k: v for k, v in written.items() if k != "checksum"}


def test_a_damaged_checkpoint_is_listed_with_what_is_wrong(
    said: Callable[..., tuple[int, str]], values: Callable[..., Any], out_dir: Path
) -> None:
    (out_dir / "checkpoints/step-00000500/recipe.yaml").unlink()
    (out_dir / "checkpoints/step-00001000/metadata.json").write_text("{")
    code, out = said("list", out_dir)
    assert code == 0
    assert [row[-1] for row in rows(out)[:3]] == ["damaged", "damaged", "complete"]
    assert f"{out_dir}/checkpoints/step-00000500/recipe.yaml is missing.\n" in out
    assert f"{out_dir}/checkpoints/step-00001000/metadata.json is damaged: " in out
    first, second, third = values("list", out_dir)
    assert (first["state"], second["state"], third["state"]) == ("damaged", "damaged", "complete")
    assert (second["step"], second["metadata"]) == (1000, None)


def test_leftovers_of_a_crash_are_listed(
    said: Callable[..., tuple[int, str]], values: Callable[..., Any], out_dir: Path
) -> None:
    write_partial(store_of(out_dir), 2000)
    assert rows(said("list", out_dir)[1])[-1][0] == "2,000"
    assert rows(said("list", out_dir)[1])[-1][-1] == "leftover"
    assert values("list", out_dir)[-1]["state"] == "leftover"


@pytest.mark.usefixtures("at_work")
def test_what_a_run_at_work_is_writing_is_listed_as_such(
    values: Callable[..., Any], out_dir: Path
) -> None:
    write_partial(store_of(out_dir), 2000)
    assert values("list", out_dir)[-1]["state"] == "being_written"


def test_a_run_without_checkpoints_has_an_empty_list(
    said: Callable[..., tuple[int, str]], values: Callable[..., Any], out_dir: Path
) -> None:
    shutil.rmtree(out_dir / "checkpoints")
    assert said("list", out_dir) == (0, f"{out_dir} holds no checkpoint\n")
    assert values("list", out_dir) == []


@pytest.mark.parametrize("forbidden", ["out/lora", "out/lora/checkpoints"])
def test_a_directory_that_may_not_be_read_is_a_mistake(
    out_dir: Path, monkeypatch: pytest.MonkeyPatch, forbidden: str
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != Path(forbidden))
    assert says(mistake("list", out_dir), f"{forbidden} ... Check who owns")


def test_checkpoints_deleted_meanwhile_are_not_listed(
    values: Callable[..., Any], out_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry_of(path: Path) -> CheckpointEntry:
        if path.name == "step-00000500":
            shutil.rmtree(path)
        return survey.entry_of(path)

    monkeypatch.setattr(manage, "entry_of", entry_of)
    assert [entry["step"] for entry in values("list", out_dir)] == [1000, 1500]


def test_a_list_of_one_checkpoint_is_a_mistake(out_dir: Path) -> None:
    path = out_dir / "checkpoints/step-00000500"
    for argv in (["list", path], ["clean", path, "--keep_last", 1]):
        message = f"{path} is one checkpoint, not a run. Try ftkit checkpoints show {path}."
        assert mistake(*argv) == message


def test_looking_changes_nothing(said: Callable[..., tuple[int, str]], out_dir: Path) -> None:
    write_partial(store_of(out_dir), 2000)
    before = everything(Path("out"))
    for argv in (["list", out_dir], ["show", out_dir], ["verify", out_dir]):
        said(*argv)
    said("clean", out_dir, "--keep_last", "1", "--dry_run")
    assert everything(Path("out")) == before


# --- show -----------------------------------------------------------------------------------------


def test_show_describes_the_newest_checkpoint(
    said: Callable[..., tuple[int, str]], out_dir: Path
) -> None:
    code, out = said("show", out_dir)
    assert code == 0
    assert out.startswith(f"{out_dir}/checkpoints/step-00001500 ---")
    for words in (
        "state complete",
        "strategy fsdp x2",
        "step 1,500 of 2,000",
        "samples 24,000",
        "training time 12 min",
        "learning rate 0.0001",
        "optimizer torch.optim.AdamW",
        "max seq length 512",
        "base name base/tiny, fingerprint bbbbbbbbbbbbbbbb",
        "versions ftkit 1.0",
    ):
        assert words in " ".join(out.split())
    for name in FILES:
        assert name in out


def test_show_leaves_out_what_is_empty(
    said: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    carried = {"loss": {"first": 4.5}, "sources": {}, "scores": [], "sets": {"code": {}}}
    save(store_of(tmp_path), 500, carried=carried)
    assert re.search("^report so far +loss first 4.5$", said("show", tmp_path)[1], re.MULTILINE)


@pytest.mark.parametrize("step", ["500", "00500", "step-00000500"])
def test_show_takes_a_step(values: Callable[..., Any], out_dir: Path, step: str) -> None:
    assert values("show", out_dir, step)["step"] == 500


def test_show_takes_the_directory_of_a_checkpoint_under_any_name(
    values: Callable[..., Any], out_dir: Path
) -> None:
    path = out_dir / "checkpoints/step-00000500"
    assert values("show", path)["step"] == 500
    shutil.copytree(path, "best")
    assert values("show", "best")["metadata"] == values("show", path)["metadata"]
    assert "Leave the step 500 out." in mistake("show", "best", 500)


def test_show_in_json_is_the_entry_of_the_list(values: Callable[..., Any], out_dir: Path) -> None:
    assert values("show", out_dir) == values("list", out_dir)[-1]


def test_show_says_what_is_wrong(said: Callable[..., tuple[int, str]], out_dir: Path) -> None:
    (out_dir / "checkpoints/step-00001500/recipe.yaml").unlink()
    code, out = said("show", out_dir)
    assert code == 0
    assert "damaged" in out and "is missing." in out
    (out_dir / "checkpoints/step-00001500/metadata.json").write_text("{")
    message = mistake("show", out_dir)
    assert "step-00001500/metadata.json is damaged" in message
    assert f"ftkit checkpoints list {out_dir}/checkpoints" in message


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_missing_step_is_refused(out_dir: Path, command: str) -> None:
    message = mistake(command, out_dir, 700)
    assert says(message, f"{out_dir} ... step 700 ... 500, 1000, 1500")
    assert says(mistake(command, out_dir, "last"), "STEP is 'last' ... Try 1500")
    shutil.rmtree(out_dir / "checkpoints")
    assert mistake(command, out_dir).startswith(f"{out_dir} holds no checkpoint.")


def test_control_characters_do_not_reach_the_terminal(
    said: Callable[..., tuple[int, str]], out_dir: Path
) -> None:
    changes = ["train.epochs: \x1b[31m1 -> 2"]
    save(store_of(out_dir), 2000, {"a\x1b[31m": b""} | FILES, changes=changes)
    assert "\x1b" not in said("show", out_dir)[1]


# --- verify ---------------------------------------------------------------------------------------


def test_verify_finds_all_sound(
    said: Callable[..., tuple[int, str]], values: Callable[..., Any], out_dir: Path
) -> None:
    code, out = said("verify", out_dir)
    assert code == 0
    assert out == "step-00000500  intact\nstep-00001000  intact\nstep-00001500  intact\n"
    assert values("verify", out_dir, 500) == [
        {
            "step": 500,
            "path": str(out_dir / "checkpoints/step-00000500"),
            "sound": True,
            "problems": [],
        }
    ]


@pytest.mark.parametrize("name", [*FILES, "metadata.json"])
def test_verify_finds_a_flipped_byte_and_ends_with_1(
    said: Callable[..., tuple[int, str]], values: Callable[..., Any], out_dir: Path, name: str
) -> None:
    path = out_dir / "checkpoints/step-00001000"
    file = path / name
    flip_in_the_middle(file)
    code, out = said("verify", out_dir)
    assert code == 1
    assert f"step-00001000  damaged\n  {file} is damaged: " in out
    assert [found["sound"] for found in values("verify", out_dir, code=1)] == [True, False, True]
    assert said("verify", out_dir, 500)[0] == 0
    assert said("verify", out_dir, 1000)[0] == said("verify", path)[0] == 1


def test_verify_finds_a_checkpoint_under_the_name_of_another_step(
    said: Callable[..., tuple[int, str]], out_dir: Path
) -> None:
    store = store_of(out_dir)
    store.path(500).rename(store.path(600))
    code, out = said("verify", store.path(600))
    assert code == 1
    assert says(out, "checkpoint of step 500")


def test_verify_passes_over_what_a_run_deletes_meanwhile(
    values: Callable[..., Any], out_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(directory: Path, progress: object) -> list[str]:
        if directory.name == "step-00000500":
            shutil.rmtree(directory)
            return ["it is gone"]
        return []

    monkeypatch.setattr("ftkit.checkpoint.store.verify", verify)
    assert [found["step"] for found in values("verify", out_dir)] == [1000, 1500]


def test_verify_shows_how_far_it_is_if_it_takes_long(
    out_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(directory: Path, progress: Any) -> list[str]:
        progress(1, 10)
        time.sleep(0.01)
        return []

    monkeypatch.setattr("ftkit.checkpoint.store.verify", verify)
    monkeypatch.setattr("ftkit.utils.console.display.LINE_INTERVAL_S", 0)
    argv = ["checkpoints", "verify", str(out_dir), "--format", "json"]
    assert run(argv) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(manage, "PROGRESS_AFTER_S", 0)
    assert run(argv) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)) == 3
    assert err.startswith("verifying 3 checkpoints ... 0 %")


# --- clean ----------------------------------------------------------------------------------------


def test_clean_keeps_the_newest_and_says_what_it_removes(
    said: Callable[..., tuple[int, str]], out_dir: Path
) -> None:
    store = store_of(out_dir)
    write_partial(store, 2000)
    store.path(500).rename(store.directory / ".step-00000500.deleted")
    sizes = "8 KiB"
    expected = [
        f"removed .step-00000500.deleted ({sizes})",
        "removed .step-00002000.partial (5 KiB)",
        f"removed step-00001000 ({sizes})",
        "freed 21 KiB; kept: 1,500",
    ]
    dry = [
        line.replace("removed", "would remove").replace("freed", "would free") for line in expected
    ]
    argv = ["clean", out_dir, "--keep_last", "1"]
    assert said(*argv, "--dry_run") == (0, "\n".join(dry) + "\n")
    assert store.steps() == [1000, 1500]
    assert said(*argv) == (0, "\n".join(expected) + "\n")
    assert names_in(store.directory) == ["latest", "step-00001500"]
    assert names_in(out_dir) == ["checkpoints", "recipe.yaml"]
    assert said(*argv) == (0, "freed 0 B; kept: 1,500\n")


@pytest.mark.parametrize(
    ("rule", "kept", "words"),
    [
        ("{}", [1500], ""),
        ("{keep_every: 1000}", [1000, 1500], "keep_every 1000"),
        ("{keep_best: 1}", [500, 1500], "keep_best 1"),
        ("{keep_best: 1, keep_every: 1000}", [500, 1000, 1500], "keep_every 1000 and keep_best 1"),
        ("{keep_every: null, keep_best: 0}", [1500], ""),
    ],
)
@pytest.mark.parametrize("place", ["run", "checkpoint"])
def test_clean_keeps_the_checkpoints_that_the_recipe_keeps(
    said: Callable[..., tuple[int, str]],
    out_dir: Path,
    rule: str,
    kept: list[int],
    words: str,
    place: str,
) -> None:
    recipe = f"{RECIPE}checkpoint: {rule}\n"
    store = store_of(out_dir)
    if place == "run":
        (out_dir / "recipe.yaml").write_text(recipe)
    else:
        (out_dir / "recipe.yaml").unlink()
        save(store, 1500, FILES | {"recipe.yaml": recipe.encode()})
    code, out = said("clean", out_dir, "--keep_last", 1)
    assert code == 0
    assert store.steps() == kept
    assert out.endswith(f" (the recipe has {words})\n" if words else "kept: 1,500\n")


@pytest.mark.parametrize("content", ["{", "checkpoint: {keep_every: often}\n"])
def test_clean_removes_nothing_under_a_recipe_that_it_cannot_read(
    out_dir: Path, content: str
) -> None:
    (out_dir / "recipe.yaml").write_text(content)
    before = everything(Path("out"))
    assert "recipe" in mistake("clean", out_dir, "--keep_last", 1)
    assert everything(Path("out")) == before


def test_clean_leaves_a_damaged_checkpoint_and_says_so(
    said: Callable[..., tuple[int, str]], out_dir: Path
) -> None:
    store = store_of(out_dir)
    (store.path(500) / "recipe.yaml").unlink()
    code, out = said("clean", out_dir, "--keep_last", 1)
    assert code == 0
    assert store.steps() == [500, 1500]
    assert says(out, "step-00000500 is damaged")


@pytest.mark.usefixtures("at_work")
@pytest.mark.parametrize("switches", [[], ["--dry_run"]])
def test_clean_leaves_a_run_at_work_alone(out_dir: Path, switches: list[Any]) -> None:
    write_partial(store_of(out_dir), 2000)
    before = everything(Path("out"))
    message = mistake("clean", out_dir, "--keep_last", 1, *switches)
    assert says(message, f"{out_dir} ... running ... Wait")
    assert everything(Path("out")) == before


@pytest.mark.usefixtures("at_work")
@pytest.mark.parametrize("linked", ["link", "checkpoints"])
def test_clean_finds_the_run_at_work_through_a_link(out_dir: Path, linked: str) -> None:
    if linked == "link":
        Path("link").symlink_to(out_dir / "checkpoints")
    else:
        (out_dir / "checkpoints").rename("elsewhere")
        (out_dir / "checkpoints").symlink_to(Path("elsewhere").resolve())
    path = Path("link") if linked == "link" else out_dir
    assert "still running" in mistake("clean", path, "--keep_last", 1)


def test_clean_follows_a_link(said: Callable[..., tuple[int, str]], out_dir: Path) -> None:
    (out_dir / "checkpoints").rename("elsewhere")
    (out_dir / "checkpoints").symlink_to(Path("elsewhere").resolve())
    assert said("clean", out_dir, "--keep_last", 1)[0] == 0
    assert store_of(out_dir).steps() == [1500]
    assert names_in(out_dir) == ["checkpoints", "recipe.yaml"]
    assert not Path(".run").exists()


def test_no_run_starts_while_clean_is_at_work(
    said: Callable[..., tuple[int, str]], out_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftkit.runs.lock import claim

    delete = Store.delete
    refused = []

    def delete_(store: Store, step: int) -> None:
        with pytest.raises(UserError, match="still running"), claim(out_dir, "overwrite"):
            pass
        refused.append(step)
        delete(store, step)

    monkeypatch.setattr(Store, "delete", delete_)
    said("clean", out_dir, "--keep_last", 1)
    assert refused == [500, 1000]
    assert store_of(out_dir).steps() == [1500]


def test_clean_works_on_what_a_killed_run_left(
    said: Callable[..., tuple[int, str]], out_dir: Path
) -> None:
    (out_dir / ".run").mkdir()
    (out_dir / ".run/lock").touch()
    (out_dir / ".run/job.json").write_text("{}")
    assert said("clean", out_dir, "--keep_last", 1)[0] == 0
    assert (out_dir / ".run/job.json").exists()


def test_clean_writes_nothing_beside_a_copy(
    said: Callable[..., tuple[int, str]], out_dir: Path
) -> None:
    shutil.copytree(out_dir / "checkpoints", "copies/backup")
    Path("copies").chmod(0o555)
    try:
        assert said("clean", "copies/backup", "--keep_last", 1)[0] == 0
    finally:
        Path("copies").chmod(0o755)
    assert names_in(Path("copies")) == ["backup"]


def test_clean_puts_back_a_checkpoint_that_was_about_to_be_replaced(
    said: Callable[..., tuple[int, str]], out_dir: Path
) -> None:
    store = store_of(out_dir)
    store.path(1500).rename(store.directory / ".step-00001500.replaced")
    said("clean", out_dir, "--keep_last", 1)
    assert store.steps() == [1500]


def test_clean_says_what_it_cannot_remove(out_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(store: Store, step: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Store, "delete", failing)
    message = mistake("clean", out_dir, "--keep_last", 1)
    assert says(message, "step-00000500 ... Permission denied")
    assert not (out_dir / ".run").exists()


# --- diff -----------------------------------------------------------------------------------------


@pytest.fixture
def other(out_dir: Path) -> Path:
    """A run with another recipe."""
    recipe = RECIPE.replace("0.0002", "1e-3").replace("devices: 2", "devices: auto")
    recipe += "seed: null\nlora_r: 16\nlog: {run: '[red]'}\n"
    save(store_of(Path("out/lora-2")), 100, FILES | {"recipe.yaml": recipe.encode()})
    return Path("out/lora-2")


def test_diff_shows_the_fields_that_differ(
    said: Callable[..., tuple[int, str]], values: Callable[..., Any], out_dir: Path, other: Path
) -> None:
    a, b = f"{out_dir}/checkpoints/step-00001500", f"{other}/checkpoints/step-00000100"
    code, out = said("diff", out_dir, other)
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["A:", a],
        ["B:", b],
        ["field", "A", "B"],
        ["devices", "2", "auto"],
        ["optimizer.init_args.lr", "0.0002", "0.001"],
        ["lora_r", "not", "set", "16"],
        ["log.run", "not", "set", "[red]"],
    ]
    assert values("diff", out_dir, other) == {
        "a": a,
        "b": b,
        "differences": [
            {"key": "devices", "a": 2, "b": "auto"},
            {"key": "optimizer.init_args.lr", "a": 0.0002, "b": 0.001},
            {"key": "lora_r", "a": None, "b": 16},
            {"key": "log.run", "a": None, "b": "[red]"},
        ],
    }


def test_diff_shows_no_tokens_and_passwords(
    said: Callable[..., tuple[int, str]], values: Callable[..., Any], out_dir: Path
) -> None:
    for name, secret in (("a", "1234"), ("b", "5678")):
        recipe = RECIPE + f"access_token: t-{secret}\ndata.path: s3://me:{secret}@host/x\n"
        save(store_of(Path(name)), 1, FILES | {"recipe.yaml": recipe.encode()})
    _, out = said("diff", "a", "b")
    found = values("diff", "a", "b")["differences"]
    assert {one["key"]: (one["a"], one["b"]) for one in found} == {
        "access_token": ("***", "***"),
        "data.path": ("s3://***@host/x", "s3://***@host/x"),
    }
    assert "access_token" in out and "1234" not in out and "5678" not in out


def test_diff_takes_checkpoints_too_and_says_that_nothing_differs(
    said: Callable[..., tuple[int, str]], values: Callable[..., Any], out_dir: Path
) -> None:
    paths = [f"{out_dir}/checkpoints/step-00000500", f"{out_dir}/checkpoints/step-00001000"]
    code, out = said("diff", *paths)
    assert code == 0
    assert out == f"A: {paths[0]}\nB: {paths[1]}\ntheir recipes are equal\n"
    assert values("diff", *paths)["differences"] == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: flip_in_the_middle(path / "recipe.yaml"), "recipe.yaml is damaged: "),
        (lambda path: (path / "recipe.yaml").unlink(), "recipe.yaml is missing."),
        (lambda path: (path / "metadata.json").unlink(), "metadata.json is missing."),
        (lambda path: shutil.rmtree(path), "holds no checkpoint."),
    ],
    ids=["changed", "missing", "no metadata", "no checkpoint"],
)
def test_diff_compares_no_recipe_that_is_damaged(
    out_dir: Path, other: Path, damage: Callable[..., Any], message: str
) -> None:
    damage(other / "checkpoints/step-00000100")
    assert message in mistake("diff", out_dir, other)


def test_diff_needs_recipes(out_dir: Path) -> None:
    save(store_of(Path("out/none")), 5, {"a": b""})
    assert "step-00000005 records no recipe." in mistake("diff", out_dir, "out/none")
