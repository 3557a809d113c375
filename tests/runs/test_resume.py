"""Resuming: the checkpoint that is used, refusals, and files that are set aside."""

import csv
import dataclasses
import fcntl
import io
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpoints import save, some_metadata
from command import NO_TORCH, Command
from command_table import COMMANDS
from messages import key_words, message_of, says
from runs import content
from saved_runs import LAST, ended, recipe, save_run, write_rows

from ftkit.checkpoint.metadata import BaseIdentity
from ftkit.checkpoint.store import Store
from ftkit.cli.parser import parse
from ftkit.errors import Completed, UserError
from ftkit.launch.conclude import conclude
from ftkit.launch.supervisor import prepare_run
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.recipe import Method, Recipe
from ftkit.runs.job import Job, RankError, StopAfter
from ftkit.runs.lock import claim
from ftkit.runs.report.report import OutcomeName, Progress, read_report, write_report
from ftkit.runs.resume import Start, find_start, ready_to_go_on, verify_start
from ftkit.runs.unfinished import (
    continue_command,
    exit_summary,
    follow_moved,
    resumes_in_place,
)
from ftkit.utils.console.display import Display


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def steps_in(file: Path) -> list[int]:
    return [int(row["step"]) for row in csv.DictReader(io.StringIO(file.read_text()))]


def found(new_recipe: Recipe) -> Start:
    start = find_start(new_recipe)
    assert start is not None
    return start


def refusal(new_recipe: Recipe) -> str:
    return message_of(find_start, new_recipe)


def damage(file: Path) -> None:
    values = bytearray(file.read_bytes())
    values[len(values) // 2] ^= 1
    file.write_bytes(values)


# --- Which checkpoint ---------------------------------------------------------------------------


def test_without_resume_a_run_begins(out: Path) -> None:
    save_run(recipe(out), 5)
    assert find_start(recipe(out)) is None


@pytest.mark.parametrize("resume", ["true", "auto"])
def test_the_newest_checkpoint_is_taken(out: Path, resume: str) -> None:
    store = save_run(recipe(out), 5, 10)
    start = found(recipe(out, resume=resume))
    assert (start.checkpoint, start.metadata.step) == (store.path(10).resolve(), 10)
    assert start.in_place and start.changes == ()


def test_a_step_is_taken(out: Path) -> None:
    save_run(recipe(out), 5, 10)
    start = found(recipe(out, resume=5))
    assert start.metadata.step == 5 and start.in_place


@pytest.mark.parametrize("where", [".", "checkpoints", "checkpoints/step-00000010"])
def test_a_path_is_a_run_its_checkpoints_or_one_of_them(
    out: Path, tmp_path: Path, where: str
) -> None:
    store = save_run(recipe(out), 5, 10)
    start = found(recipe(tmp_path / "other", resume=out / where))
    assert start.checkpoint == store.path(10).resolve()
    assert not start.in_place
    assert found(recipe(out, resume=out / where)).in_place


def test_a_checkpoint_may_be_renamed_and_lie_anywhere(out: Path, tmp_path: Path) -> None:
    save_run(recipe(out), 5).path(5).rename(tmp_path / "copy")
    start = found(recipe(out, resume=tmp_path / "copy"))
    assert start.metadata.step == 5 and not start.in_place


def test_auto_begins_a_run_without_checkpoints(out: Path) -> None:
    assert find_start(recipe(out, resume="auto")) is None
    save_run(recipe(out))
    assert find_start(recipe(out, resume="auto")) is None


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("saved", "keys", "message"),
    [
        ([], {"resume": "true"}, "checkpoint ... --resume auto"),
        ([], {"resume": 5}, "resume is 5 ... {out} ... none"),
        ([], {"resume": "atuo"}, "resume is 'atuo' ... directory"),
        ([], {"resume": "hf://b/x"}, "s3://, gs://, az://"),
        ([], {"resume": "ftp://b/x"}, "s3://, gs://, az://"),
        ([5, 10], {"resume": 7}, "5, 10 ... Try --resume 10"),
        (
            [5],
            {"resume": "auto", "lora_r": 8, "seed": 1},
            "seed 1337 -> 1, lora_r 16 -> 8 ... checkpoint's value ... another --out_dir",
        ),
    ],
    ids=str,
)
def test_a_start_that_is_not_possible_is_refused_and_changes_nothing(
    out: Path, saved: list[int], keys: dict[str, Any], message: str
) -> None:
    out.mkdir()
    if saved:
        save_run(recipe(out), *saved)
    before = content(out)
    assert says(refusal(recipe(out, **keys)), message.format(out=out))
    assert content(out) == before


def test_a_directory_without_a_checkpoint_is_refused(out: Path, tmp_path: Path) -> None:
    save_run(recipe(out))
    assert says(refusal(recipe(tmp_path / "b", resume=out)), "no checkpoint in it")


@pytest.mark.parametrize(
    ("resume", "in_place"),
    [
        ("false", False),
        ("true", True),
        ("auto", True),
        ("5", True),
        ("{out}", True),
        ("{out}/checkpoints", True),
        ("{out}/checkpoints/step-00000005", True),
        ("{out}/nested-run", False),
        ("{out}/../other", False),
    ],
)
def test_a_run_continues_in_its_own_directory(out: Path, resume: str, in_place: bool) -> None:
    value = recipe(out, resume=resume.format(out=out)).resume
    assert resumes_in_place(value, out) is in_place


# --- What is compared ---------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "now"), [("lora", "full"), ("full", "lora")])
def test_a_checkpoint_of_another_method_is_refused(out: Path, saved: str, now: str) -> None:
    save_run(recipe(out, saved), 5)
    assert f"method {saved} -> {now}" in refusal(recipe(out, now, resume="auto"))


def test_tunable_values_are_noted(out: Path) -> None:
    save_run(recipe(out), 5)
    start = found(recipe(out, resume="auto", train__epochs=3, optimizer__lr=1e-3))
    assert start.changes == ("train.epochs 2 -> 3", "optimizer.lr not set -> 0.001")


def test_setting_a_resolved_default_is_not_a_change(out: Path) -> None:
    save_run(recipe(out), 5)
    new_recipe = recipe(out, resume="auto", precision="bf16-mixed", train__max_seq_length=512)
    assert found(new_recipe).changes == ()
    new_recipe = recipe(out, resume="auto", precision="32-true")
    assert found(new_recipe).changes == ("precision bf16-mixed -> 32-true",)


def test_a_run_keeps_its_precision_unless_one_is_named(out: Path) -> None:
    save_run(recipe(out), 5, carried={"loss": {}})
    start = found(recipe(out, resume="auto"))
    assert (start.kept, start.changes) == ({"precision": "bf16-mixed"}, ())
    start = found(recipe(out, resume="auto", precision="32-true"))
    assert (start.kept, start.changes) == ({}, ("precision bf16-mixed -> 32-true",))


@pytest.mark.parametrize("saved", [{}, {"precision": "bf16-true"}])
def test_an_imported_run_has_the_precision_of_its_recipe(out: Path, saved: dict[str, str]) -> None:
    """Its checkpoint was written without a step."""
    save_run(recipe(out, **saved), 5)
    assert found(recipe(out, resume="auto")).kept == saved


@pytest.mark.parametrize("begun", [100, 3])
def test_a_warm_up_that_no_key_names_is_not_a_change(out: Path, begun: int) -> None:
    """Earlier versions wrote 100 into every recipe that named none."""
    save_run(recipe(out, train__lr_warmup_steps=begun), 5)
    assert found(recipe(out, resume="auto")).changes == ()
    new_recipe = recipe(out, resume="auto", train__lr_warmup_steps=7)
    assert found(new_recipe).changes == (f"train.lr_warmup_steps {begun} -> 7",)


@pytest.mark.parametrize("saved", [{}, {"reference": "models/base"}], ids=["earlier", "named"])
def test_a_reference_in_memory_may_lie_elsewhere_and_be_named_later(
    out: Path, saved: dict[str, str]
) -> None:
    """Earlier versions held the base model where none was named; its fingerprint is compared."""
    known = BaseIdentity(name="models/base", fingerprint="r" * 16)
    keys = {"method": "full", "objective": "kto"}
    save_run(recipe(out, **keys, **saved), 5, beside=known)
    start = found(recipe(out, **keys, reference="moved/base", resume="true"))
    assert start.changes == ()


def test_a_reference_that_was_computed_before_training_stays(out: Path) -> None:
    keys = {"method": "full", "objective": "dpo"}
    save_run(recipe(out, **keys), 5)
    text = refusal(recipe(out, **keys, reference="other", resume="true"))
    assert says(text, "reference not set -> other")


# --- Complete runs ------------------------------------------------------------------------------


def completion(new_recipe: Recipe) -> str:
    with pytest.raises(Completed) as end:
        find_start(new_recipe)
    return str(end.value)


@pytest.mark.parametrize("resume", ["true", "auto"])
def test_a_complete_run_is_reported_with_the_option_that_prolongs_it(
    out: Path, resume: str
) -> None:
    save_run(recipe(out), LAST)
    ended(out, "completed", LAST, result=True)
    text = completion(recipe(out, resume=resume))
    assert says(text, f"{out} is complete at step 2,000 ... {out / 'final'}")
    command = text.rpartition("to train longer: ")[2]
    assert command == f"{continue_command(out, 'lora')} --train.epochs 3"
    options = parse(COMMANDS["finetune"], shlex.split(command)[2:])
    assert found(read_recipe(options.config, options.keys, method="lora")).metadata.step == LAST


@pytest.mark.parametrize(
    ("before", "now", "goes_on"),
    [
        ({}, {"train__epochs": 3}, True),
        ({}, {"train__epochs": 1}, False),
        ({}, {"train__max_steps": LAST + 5}, False),
        ({"train__max_steps": LAST}, {"train__max_steps": LAST + 5, "train__epochs": 3}, True),
        ({"train__max_steps": LAST}, {"train__max_steps": LAST, "train__epochs": 3}, False),
        ({"train__max_time": 60}, {"train__max_time": 60}, False),
    ],
)
def test_a_complete_run_continues_if_it_is_prolonged(
    out: Path, before: dict[str, Any], now: dict[str, Any], goes_on: bool
) -> None:
    save_run(recipe(out, **before), LAST)
    ended(out, "completed", LAST, result=True)
    new_recipe = recipe(out, resume="auto", **now)
    if goes_on:
        assert found(new_recipe).metadata.step == LAST
    else:
        assert "is complete" in completion(new_recipe)


def test_a_run_that_its_time_ended_is_complete_until_it_gets_more(out: Path) -> None:
    save_run(recipe(out, train__max_time=60), 10)
    ended(out, "completed", 10, result=True)
    text = completion(recipe(out, resume="auto", train__max_time=60))
    assert text.endswith("--train.max_time 120")
    assert found(recipe(out, resume="auto", train__max_time=120))
    assert found(recipe(out, resume="auto"))


def test_a_run_that_was_out_of_patience_is_complete_until_it_gets_more(out: Path) -> None:
    since_best = {"loss": {"validation_best": 1.5, "validations_since_best": 3}}
    save_run(recipe(out, eval__patience=3), 10, carried=since_best)
    ended(out, "completed", 10, result=True)
    text = completion(recipe(out, resume="auto", eval__patience=3))
    assert text.endswith("--eval.patience 6")
    longer = recipe(out, resume="auto", eval__patience=3, train__epochs=9)
    assert "is complete" in completion(longer)
    assert found(recipe(out, resume="auto", eval__patience=4))
    assert found(recipe(out, resume="auto"))


def test_a_run_whose_result_is_missing_is_not_complete(out: Path) -> None:
    save_run(recipe(out), LAST)
    assert found(recipe(out, resume="auto")).metadata.step == LAST
    ended(out, "completed", LAST)
    assert found(recipe(out, resume="auto")).metadata.step == LAST


def test_a_run_that_writes_no_result_is_complete_without_one(out: Path) -> None:
    new_recipe = recipe(out, checkpoint_dir="random:pythia-14m", resume="auto")
    save_run(new_recipe, LAST)
    assert "is complete at step 2,000\n" in completion(new_recipe)


def test_the_report_of_an_earlier_session_does_not_count(out: Path) -> None:
    save_run(recipe(out), 5, 10)
    ended(out, "completed", 5, result=True)
    assert found(recipe(out, resume="auto")).metadata.step == 10


def test_a_complete_run_without_checkpoints_is_not_repeated(out: Path) -> None:
    save_run(recipe(out))
    ended(out, "completed", 7, result=True)
    assert says(completion(recipe(out, resume="auto")), "no checkpoint")


@pytest.mark.parametrize("outcome", ["interrupted", "failed", "out_of_memory"])
def test_an_incomplete_run_continues(out: Path, outcome: OutcomeName) -> None:
    save_run(recipe(out), 5)
    ended(out, outcome, 5)
    assert found(recipe(out, resume="auto")).metadata.step == 5


# --- Damage -------------------------------------------------------------------------------------


def test_damage_is_reported_and_a_sound_checkpoint_is_offered(out: Path) -> None:
    store = save_run(recipe(out), 5, 10, 15)
    (store.path(10) / "recipe.yaml").unlink()
    file = store.path(15) / "shard-00000-of-00001.safetensors"
    file.write_bytes(b"")
    message = refusal(recipe(out, resume="true"))
    assert says(message, f"{store.path(15)} ... {file} has 0 bytes")
    assert says(message, "--resume auto")
    message = refusal(recipe(out, resume=15))
    assert says(message, "one before ... --resume 5")
    assert found(recipe(out, resume=5))


def test_resume_auto_continues_from_the_newest_sound_checkpoint(out: Path, tmp_path: Path) -> None:
    store = save_run(recipe(out), 5, 10, 15, 20)
    (store.path(20) / "recipe.yaml").unlink()
    damage(store.path(15) / "adapter/adapter_model.safetensors")
    damage(store.path(10) / "metadata.json")
    new_recipe = recipe(out, resume="auto")
    with Display(tmp_path) as display:
        start = verify_start(found(new_recipe), new_recipe, display)
    assert start.metadata.step == 5
    said = [re.sub(r" cannot be continued from: .*", "", why) for why in start.passed_over]
    assert said == [str(store.path(step)) for step in (20, 15, 10)]


def test_without_a_sound_checkpoint_each_problem_is_reported(out: Path) -> None:
    store = save_run(recipe(out), 5, 10)
    for step in (5, 10):
        (store.path(step) / "recipe.yaml").unlink()
    newer, older = refusal(recipe(out, resume="auto")).splitlines()
    assert newer.startswith(f"{store.path(10)} cannot") and older.startswith(f"{store.path(5)} can")
    assert says(older, "--overwrite without --resume")


def test_a_complete_run_does_not_go_back_by_itself(out: Path) -> None:
    store = save_run(recipe(out), 5, 10)
    ended(out, "completed", 10, result=True)
    (store.path(10) / "recipe.yaml").unlink()
    assert refusal(recipe(out, resume="auto")).endswith("--resume 5.")


@pytest.mark.parametrize("name", ["metadata.json", "recipe.yaml"])
def test_files_that_are_read_first_are_checked_first(out: Path, name: str) -> None:
    store = save_run(recipe(out), 5)
    damage(store.path(5) / name)
    message = refusal(recipe(out, resume="auto"))
    assert str(store.path(5) / name) in message
    assert says(message, "--overwrite without --resume")


def test_a_file_that_cannot_be_read_is_named(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    store = save_run(recipe(out), 5)
    monkeypatch.setattr("ftkit.runs.resume.hash_file", fail)
    message = refusal(recipe(out, resume="auto"))
    assert says(message, f"{store.path(5) / 'recipe.yaml'} ... Permission denied")


def test_a_changed_byte_anywhere_is_detected_before_ranks_start(out: Path, tmp_path: Path) -> None:
    store = save_run(recipe(out), 5, 10)
    damage(store.path(10) / "adapter/adapter_model.safetensors")
    for new_recipe, option in (
        (recipe(out, resume=10), "--resume 5."),
        (recipe(tmp_path / "b", resume=out), f"--resume {store.path(5).resolve()}."),
    ):
        start = found(new_recipe)
        with Display(tmp_path) as display, pytest.raises(UserError) as error:
            verify_start(start, new_recipe, display)
        assert "adapter_model.safetensors is damaged" in str(error.value)
        assert str(error.value).endswith(option)


def test_the_check_ends_when_the_run_is_to_end(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = save_run(recipe(out), 5)
    damage(store.path(5) / "adapter/adapter_model.safetensors")
    monkeypatch.setattr("ftkit.checkpoint.store.PROGRESS_INTERVAL_S", 0)
    monkeypatch.setattr("ftkit.checkpoint.store.hash_file", lambda *_: time.sleep(0.1))
    new_recipe = recipe(out, resume="auto")
    with Display(tmp_path) as display:
        verify_start(found(new_recipe), new_recipe, display, interrupted=lambda: True)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(out: Path) -> None:
    store = save_run(recipe(out), 5)
    store.path(5).rename(store.path(6))
    assert says(refusal(recipe(out, resume="auto")), "checkpoint of step 5")


def test_a_pickle_is_refused_and_does_not_run(out: Path, tmp_path: Path) -> None:
    import os
    import pickle

    trap = tmp_path / "trap"

    class Payload:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
            return os.mkdir, (str(trap),)

    store = save_run(recipe(out), 5)
    for file in [f for f in store.path(5).rglob("*") if f.is_file()]:
        before = file.read_bytes()
        file.write_bytes(pickle.dumps(Payload()))
        assert str(file) in refusal(recipe(out, resume="auto"))
        file.write_bytes(before)
    assert not trap.exists()


@pytest.mark.parametrize("name", ["metrics.csv", "validation.csv", "system.csv", "run.log"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_a_run_does_not_continue_in_what_is_no_file(out: Path, name: str, kind: str) -> None:
    """To copy a pipe or a device never ends."""
    resumed = recipe(out, resume="auto")
    save_run(resumed, 5)
    path = out / name
    path.unlink(missing_ok=True)
    make: dict[str, Callable[[], None]] = {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "directory": path.mkdir,
    }
    make[kind]()
    before = sorted(out.rglob("*"))
    with (
        pytest.raises(UserError, match=key_words(name, "not a regular file")),
        claim(out, "go_on") as run,
        ready_to_go_on(run, found(resumed)),
    ):
        pass
    assert sorted(out.rglob("*")) == before


# --- Messages -----------------------------------------------------------------------------------


def test_the_exit_summary_shows_what_is_saved_and_how_to_continue(out: Path) -> None:
    assert says(exit_summary(out, "lora", 0), "before the first step ... nothing was saved")
    assert says(exit_summary(out, "lora", 3), "step 3 ... nothing was saved")
    store = save_run(recipe(out), 5, 1500)
    go_on = f"\ncontinue with: ftkit finetune --config {out / 'recipe.yaml'} --resume auto"
    where = store.path(1500)
    assert says(exit_summary(out, "lora", 1500), f"step 1,500 ... {where}{go_on}")
    assert exit_summary(out, "lora", 1502) == (
        f"stopped after step 1,502; the newest checkpoint is of step 1,500: {where}{go_on}"
    )


def test_the_command_to_continue_is_that_of_the_method_and_quoted() -> None:
    assert continue_command(Path("a b"), "full") == (
        "ftkit finetune_full --config 'a b/recipe.yaml' --resume auto"
    )


# --- Moved runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resume", "name", "follows"),
    [
        ("auto", "recipe.yaml", True),
        ("true", "recipe.yaml", True),
        ("5", "recipe.yaml", True),
        ("false", "recipe.yaml", False),
        ("/some/run", "recipe.yaml", False),
        ("auto", "other.yaml", False),
    ],
)
def test_a_moved_run_continues_where_its_recipe_is(
    out: Path, tmp_path: Path, resume: str, name: str, follows: bool
) -> None:
    save_run(recipe(out), 5)
    moved = out.rename(tmp_path / "moved")
    found = follow_moved(recipe(out, resume=resume).resume, out, moved / name)
    assert found == (moved if follows else out)


def test_a_recipe_next_to_base_models_keeps_its_out_dir(out: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "org").mkdir(parents=True)
    assert follow_moved("auto", out, tmp_path / "recipe.yaml") == out


# --- The supervisor's part ----------------------------------------------------------------------


@pytest.fixture
def make_recipe(tiny_base: Path, tiny_data: Path, out: Path) -> Callable[..., Recipe]:
    """A recipe that could run here."""

    def make(method: Method = "lora", **keys: object) -> Recipe:
        values = {
            "checkpoint_dir": tiny_base,
            "accelerator": "cpu",
            "precision": "bf16-mixed",
            "data": "JSON",
            "data__json_path": tiny_data,
        }
        directory = Path(str(keys.pop("out_dir", out)))
        return recipe(directory, method, **values | keys)

    return make


@contextmanager
def prepared(
    recipe: Recipe, *, overwrite: bool = False, stop_after: StopAfter | None = None
) -> Iterator[Any]:
    with prepare_run(recipe, ["ftkit"], overwrite, 0.0, stop_after, began_s=0.0) as job:
        yield job


def mistake(recipe: Recipe, **options: bool) -> str:
    with pytest.raises(UserError) as error, prepared(recipe, **options):
        pass
    return str(error.value)


def test_the_job_has_the_start_and_the_stop(
    make_recipe: Callable[..., Recipe], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = save_run(make_recipe(), 5)
    stop = StopAfter(seconds=60)
    with prepared(make_recipe(resume="auto", train__epochs=3), stop_after=stop) as job:
        assert Job.read(out / ".run/job.json") == job
        assert (job.start, job.start_step) == (str(store.path(5).resolve()), 5)
        assert (job.stop_after, job.changes) == (stop, ("train.epochs 2 -> 3",))
        assert "resume: false" in (out / "recipe.yaml").read_text()
    going_on, changed, *beginning = capsys.readouterr().out.splitlines()
    assert going_on == f"continuing from step 5: {store.path(5).resolve()}"
    assert changed == "changed: train.epochs 2 -> 3"
    assert len(beginning) == 4 and beginning[0].startswith("starting 1 process on ")


@pytest.mark.parametrize("size", [1, "auto"])
def test_a_precision_that_this_machine_lacks_is_refused_with_one_to_name(
    make_recipe: Callable[..., Recipe], out: Path, size: int | str
) -> None:
    keys = {"precision": "null", "train__micro_batch_size": size}
    layout = some_metadata(5).layout
    layout = dataclasses.replace(layout, precision="16-mixed", accelerator="cuda")
    save_run(make_recipe(**keys), 5, layout=layout, carried={"loss": {}})
    before = content(out)
    text = mistake(make_recipe(**keys, resume="auto"))
    assert says(
        text, "precision is 16-mixed ... CUDA ... --precision ... step-00000005 ... 16-mixed"
    )
    assert content(out) == before
    with prepared(make_recipe(**keys | {"precision": "32-true"}, resume="auto")) as job:
        assert (job.plan.precision, job.changes) == ("32-true", ("precision 16-mixed -> 32-true",))


def test_a_run_continues_in_place_and_keeps_everything_up_to_its_start(
    make_recipe: Callable[..., Recipe], out: Path
) -> None:
    save_run(make_recipe(), 5, 10)
    (out / "notes.txt").write_text("mine")
    with prepared(make_recipe(resume="auto")) as job:
        assert job.recipe.out_dir == out
        assert Store(out / "checkpoints").steps() == [5, 10]
        assert steps_in(out / "metrics.csv") == list(range(1, 11))
        assert steps_in(out / "set_aside/1/metrics.csv") == [11, 12]
        assert steps_in(out / "validation.csv") == [2]
        assert sorted(p.name for p in (out / "set_aside/1").iterdir()) == ["metrics.csv"]
        assert (out / "notes.txt").read_text() == "mine"


def test_files_later_than_a_step_are_set_aside_and_never_deleted(
    make_recipe: Callable[..., Recipe], out: Path
) -> None:
    store = save_run(make_recipe(), 5, 10, 15)
    ended(out, "completed", 15, result=True)
    with prepared(make_recipe(resume=5)):
        assert store.steps() == [5]
        assert steps_in(out / "metrics.csv") == [1, 2, 3, 4, 5]
        assert not (out / "final").exists() and not (out / "report.json").exists()
    backup = out / "set_aside/1"
    assert Store(backup / "checkpoints").steps() == [10, 15]
    assert steps_in(backup / "metrics.csv") == list(range(6, 18))
    assert (backup / "final/model").read_text() == "result" and (backup / "report.json").exists()
    save(store, 10)
    with prepared(make_recipe(resume=5)):
        assert Store(out / "set_aside/2/checkpoints").steps() == [10]
    assert steps_in(backup / "metrics.csv") == list(range(6, 18))


def test_an_attempt_that_saved_nothing_is_set_aside_and_the_directory_is_used_again(
    make_recipe: Callable[..., Recipe], out: Path
) -> None:
    save_run(make_recipe())
    ended(out, "failed", 2)
    (out / "slurm.out").write_text("of the scheduler")
    with prepared(make_recipe(resume="auto")) as job:
        assert job.recipe.out_dir == out and job.start is None
        there = sorted(path.name for path in out.iterdir())
        assert there == [".run", "recipe.yaml", "run.log", "set_aside", "slurm.out"]
    assert sorted(path.name for path in (out / "set_aside/1").iterdir()) == [
        *("metrics.csv", "recipe.yaml", "report.json", "run.log", "validation.csv")
    ]


def test_a_damaged_newest_checkpoint_is_kept_beside_the_continued_run(
    make_recipe: Callable[..., Recipe], out: Path
) -> None:
    store = save_run(make_recipe(), 5, 10)
    damage(store.path(10) / "adapter/adapter_model.safetensors")
    with prepared(make_recipe(resume="auto")) as job:
        assert (job.start_step, store.steps()) == (5, [5])
        assert steps_in(out / "metrics.csv") == [1, 2, 3, 4, 5]
    assert Store(out / "set_aside/1/checkpoints").steps() == [10]
    log = (out / "run.log").read_text()
    assert re.search(rf"warning: {store.path(10)} cannot .* its checksum differs\. It is kept", log)


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (10, ""),
        (12, ""),
        (9, "steps 10 to 10 ... lost"),
        (3, "steps 4 to 10 ... lost"),
        (0, "steps 1 to 10 ... lost"),
        (None, "steps 1 to 10 ... lost"),
    ],
)
def test_lost_rows_are_reported_and_the_run_continues(
    make_recipe: Callable[..., Recipe], out: Path, left: int | None, said: str
) -> None:
    save_run(make_recipe(), 10, carried={"tokens": 1})
    if left is None:
        (out / "metrics.csv").unlink()
    else:
        write_rows(out, range(1, left + 1))
    with (out / "metrics.csv").open("a") as file:
        file.write("11,1" if left else "")
    with prepared(make_recipe(resume="auto")) as job:
        assert job.start_step == 10
    log = (out / "run.log").read_text()
    assert says(log, said) and ("metrics.csv was cut" in log) == bool(said)


def test_auto_takes_a_new_directory_as_it_is(make_recipe: Callable[..., Recipe], out: Path) -> None:
    with prepared(make_recipe(resume="auto")) as job:
        assert job.recipe.out_dir == out and job.start is None
        assert not (out / "set_aside").exists()


def test_leftovers_of_a_crash_are_removed_first(
    make_recipe: Callable[..., Recipe], out: Path
) -> None:
    store = save_run(make_recipe(), 5)
    store.path(5).rename(store.directory / ".step-00000005.replaced")
    store.partial(10).mkdir()
    with prepared(make_recipe(resume="auto")) as job:
        assert job.start_step == 5
        assert sorted(p.name for p in store.directory.glob(".*")) == []


@pytest.mark.extensions
@pytest.mark.parametrize("keys", [{"resume": "auto"}, {"resume": 5}, {"resume": 10}], ids=str)
def test_a_later_mistake_leaves_everything_as_it_was(
    make_recipe: Callable[..., Recipe], out: Path, keys: dict[str, Any]
) -> None:
    save_run(make_recipe(), 5, 10)
    ended(out, "completed", 10, result=True)
    before = content(out)

    def fail() -> None:
        with prepared(make_recipe(train__epochs=3, **keys)):
            (out / "metrics.csv").write_text("")
            (out / "run.log").write_text("more")
            (out / "tensorboard").mkdir()
            raise UserError("x")

    with pytest.raises(UserError, match="x"):
        fail()
    assert content(out) == before
    assert not (out / "tensorboard").exists()


def test_a_failure_while_later_things_are_set_aside_is_undone(
    make_recipe: Callable[..., Recipe], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    save_run(make_recipe(), 5, 10)
    ended(out, "completed", 10, result=True)
    before = content(out)
    monkeypatch.setattr("ftkit.runs.resume.cut_rows", fail)
    assert says(mistake(make_recipe(resume=5)), "No space left")
    assert content(out) == before


def test_a_failure_after_training_takes_nothing_back(
    make_recipe: Callable[..., Recipe], out: Path
) -> None:
    store = save_run(make_recipe(), 5, 10)

    def fail() -> None:
        with prepared(make_recipe(resume=5)) as job:
            leave(job, 7)
            save(store, 7)
            write_rows(out, range(1, 8))
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fail()
    assert store.steps() == [5, 7] and steps_in(out / "metrics.csv")[-1] == 7
    assert Store(out / "set_aside/1/checkpoints").steps() == [10]


def test_a_mistake_leaves_an_attempt_that_saved_nothing_as_it_was(
    make_recipe: Callable[..., Recipe], out: Path
) -> None:
    save_run(make_recipe())
    before = content(out)

    def fail() -> None:
        with prepared(make_recipe(resume="auto")):
            (out / "report.json").write_text("new")
            raise UserError("x")

    with pytest.raises(UserError, match="x"):
        fail()
    assert content(out) == before


@pytest.mark.parametrize(
    "keys",
    [{"resume": 7}, {"resume": "auto", "lora_r": 2}, {"checkpoint_dir": "no-where"}],
    ids=str,
)
def test_an_immediate_mistake_changes_nothing(
    make_recipe: Callable[..., Recipe], out: Path, keys: dict[str, Any]
) -> None:
    save_run(make_recipe(), 5)
    before = content(out)
    mistake(make_recipe(**{"resume": "auto"} | keys))
    assert content(out) == before


def test_a_damaged_file_changes_nothing_either(
    make_recipe: Callable[..., Recipe], out: Path
) -> None:
    store = save_run(make_recipe(), 5, 10)
    damage(store.path(5) / "adapter/adapter_model.safetensors")
    before = content(out)
    assert "is damaged" in mistake(make_recipe(resume=5))
    assert content(out) == before


def test_a_run_that_does_not_exist_leaves_no_directory(
    make_recipe: Callable[..., Recipe], out: Path
) -> None:
    assert "has no checkpoint" in mistake(make_recipe(resume="true"))
    assert not out.exists()


def test_a_complete_run_is_left_alone(make_recipe: Callable[..., Recipe], out: Path) -> None:
    save_run(make_recipe(), LAST)
    ended(out, "completed", LAST, result=True)
    before = content(out)
    with pytest.raises(Completed), prepared(make_recipe(resume="auto")):
        pass
    assert content(out) == before


# --- Directories --------------------------------------------------------------------------------


def test_an_unfinished_run_is_not_overwritten(
    make_recipe: Callable[..., Recipe], out: Path
) -> None:
    save_run(make_recipe(), 5)
    before = content(out)
    message = mistake(make_recipe())
    assert says(message, f"{out} ... stopped at step 5")
    assert continue_command(out, "lora") in message and "--overwrite" in message
    assert content(out) == before


def test_an_unfinished_run_is_overwritten_on_request(
    make_recipe: Callable[..., Recipe], out: Path
) -> None:
    save_run(make_recipe(), 5)
    with prepared(make_recipe(), overwrite=True) as job:
        assert job.recipe.out_dir == out and Store(out / "checkpoints").steps() == []


@pytest.mark.parametrize("outcome", ["completed", None])
def test_a_new_run_goes_beside_a_complete_one_or_one_that_saved_nothing(
    make_recipe: Callable[..., Recipe], out: Path, outcome: str | None
) -> None:
    save_run(make_recipe(), *([5] if outcome else []))
    if outcome:
        ended(out, outcome, 5)
    with prepared(make_recipe()) as job:
        assert job.recipe.out_dir == out.with_name("out-2")


def test_overwriting_and_going_on_exclude_each_other(
    make_recipe: Callable[..., Recipe], out: Path
) -> None:
    save_run(make_recipe(), 5)
    assert "--overwrite would remove" in mistake(make_recipe(resume="auto"), overwrite=True)


def test_the_directory_of_a_run_at_work_is_refused_or_left_alone(
    make_recipe: Callable[..., Recipe], out: Path
) -> None:
    save_run(make_recipe(), 5)
    (out / ".run").mkdir()
    with (out / ".run/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = content(out)
        assert "still running" in mistake(make_recipe(resume="auto"))
        with prepared(make_recipe()) as job:
            assert job.recipe.out_dir == out.with_name("out-2")
        assert content(out) == before


def test_a_branch_gets_a_directory_of_its_own_with_the_rows_so_far(
    make_recipe: Callable[..., Recipe], out: Path, tmp_path: Path
) -> None:
    save_run(make_recipe(), 5, 10)
    before = content(out)
    other = tmp_path / "other"
    path = out / "checkpoints/step-00000005"
    with prepared(make_recipe(resume=path, out_dir=other)) as job:
        assert job.recipe.out_dir == other
        assert (job.start, job.start_step) == (str(path.resolve()), 5)
        assert steps_in(other / "metrics.csv") == [1, 2, 3, 4, 5]
        assert steps_in(other / "validation.csv") == [2]
    assert content(out) == before


def test_a_branch_never_takes_the_place_of_a_run(
    make_recipe: Callable[..., Recipe], out: Path, tmp_path: Path
) -> None:
    save_run(make_recipe(), 5)
    other = make_recipe(out_dir=tmp_path / "other", resume=out)
    save_run(other, 6)
    assert "can be continued" in mistake(other)
    ended(tmp_path / "other", "completed", 6)
    with prepared(other) as job:
        assert job.recipe.out_dir == tmp_path / "other-2"


# --- Base models --------------------------------------------------------------------------------


def test_a_full_fine_tune_continues_without_its_base_model(
    make_recipe: Callable[..., Recipe], out: Path
) -> None:
    save_run(make_recipe("full"), 5)
    with prepared(make_recipe("full", checkpoint_dir="no-where", resume="auto")) as job:
        assert job.base == str(out / ".run/base")
        assert (Path(job.base) / "config.json").read_text() == "{}"


def test_lora_needs_its_base_model_and_names_it(
    make_recipe: Callable[..., Recipe], out: Path
) -> None:
    save_run(make_recipe(), 5)
    message = mistake(make_recipe(checkpoint_dir="no-where", resume="auto"))
    assert says(message, "checkpoint_dir no-where")
    assert says(message, "base/tiny ... --checkpoint_dir")


# --- The end of a session -----------------------------------------------------------------------


def leave(job: Job, steps: int, error: RankError | None = None, **changes: object) -> None:
    """Write the files that rank 0 leaves for the supervisor."""
    state = job.directory.rank(0)
    state.path.mkdir()
    job.directory.log.touch()
    report = dataclasses.replace(job.new_report(), progress=Progress(steps=steps), **changes)
    write_report(report, state.path)
    if error is not None:
        error.write(state)


def test_an_interrupted_session_shows_how_to_continue(
    make_recipe: Callable[..., Recipe], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = save_run(make_recipe(), 5)
    with prepared(make_recipe(resume="auto")) as job:
        leave(job, 7, RankError(kind="interrupted", message="SIGINT", happened_at_s=1.0))
        save(store, 7)
        assert conclude(job, [signal.SIGINT]) == 130
    text = capsys.readouterr().out
    assert text.endswith(
        f"stopped after step 7, saved to {store.path(7)}\n"
        f"continue with: {continue_command(out, 'lora')}\n"
    )
    assert text.splitlines()[-1] in (out / "run.log").read_text()
    assert read_report(out).outcome == "interrupted"


def test_a_session_has_a_report_though_its_start_was_deleted_before_a_rank_left_one(
    make_recipe: Callable[..., Recipe], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = save_run(make_recipe(), 5)
    with prepared(make_recipe(resume="auto")) as job:
        job.directory.log.touch()
        shutil.rmtree(store.path(5))
        assert conclude(job, []) == 1
    assert read_report(out).outcome == "failed"
    assert "without an error message" in capsys.readouterr().out


def test_a_session_stopped_by_stop_after_is_not_a_failure(
    make_recipe: Callable[..., Recipe], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = save_run(make_recipe(), 5)
    with prepared(make_recipe(resume="auto"), stop_after=StopAfter(steps=2)) as job:
        leave(job, 7, outcome="stopped", exit_code=0, exit_reason=str(job.stop_after))
        save(store, 7)
        assert conclude(job, []) == 0
    report = read_report(out)
    assert (report.outcome, report.exit_reason) == ("stopped", "--stop_after 2")
    assert "continue with: " in capsys.readouterr().out


def test_a_complete_run_is_not_continued(
    make_recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    with prepared(make_recipe()) as job:
        leave(job, 7, outcome="completed", exit_code=0, exit_reason="train.epochs of 2 reached")
        assert conclude(job, []) == 0
    assert "continue with" not in capsys.readouterr().out


def test_a_mistake_that_a_rank_finds_before_its_first_step_changes_nothing(
    make_recipe: Callable[..., Recipe], out: Path
) -> None:
    save_run(make_recipe(), 5)
    before = content(out)

    def fail() -> None:
        with prepared(make_recipe(resume="auto")) as job:
            leave(job, 5, RankError(kind="user", message="other data", happened_at_s=1.0))
            conclude(job, [])

    with pytest.raises(UserError, match="other data"):
        fail()
    assert content(out) == before


# --- The command --------------------------------------------------------------------------------


def test_the_command_on_a_complete_run_ends_well_and_imports_no_torch(
    ftkit: Command, common: list[str], out: Path
) -> None:
    words = [*common, "--out_dir", str(out), "--resume", "auto"]
    save_run(read_recipe([], parse(COMMANDS["finetune"], words).keys, method="lora"), 5)
    ended(out, "completed", 5, result=True)
    end = ftkit("finetune", *words, before=NO_TORCH, cold=True)
    assert (end.returncode, end.stderr) == (0, "imported: []\n")
    assert end.stdout == (
        f"{out} is complete at step 5; the result is in {out / 'final'}\n"
        f"to train longer: {continue_command(out, 'lora')} --train.max_steps 10\n"
    )
