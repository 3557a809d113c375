"""An objective of a plugin keeps ftkit's promises: on any strategy, and resumed anywhere."""

from pathlib import Path

import pytest
from plugins import write_documented
from rank_jobs import HAS_DEEPSPEED, NO_EVALUATION, Case, Outcome, Run, make_run

from ftkit.training.callbacks import read_state

OTHERS = ("ddp", "fsdp", *(["deepspeed"] if HAS_DEEPSPEED else []))
LIMIT = "limit, decay = 5.7, 0.5"
"""The loss falls from 6.0 to below 5.6 in 6 steps."""
OBSERVER = """
import ftkit
from ftkit.objectives.objective import sequence_sums


class Alike(ftkit.Objective):
    terms = (ftkit.Term(name="loss", divisor="labels"),)
    observes = "own"
    of_sequences = True

    def amounts(self, samples):
        return {"labels": samples.label_counts}

    def output(self, batch):
        return ftkit.LogProbabilities()

    def observed(self, output, batch):
        return sequence_sums(output, batch)[:, None]

    def of_step(self, observed):
        return observed.mean()

    def sums(self, output, batch):
        found = sequence_sums(output, batch)
        distances = (found - batch["of_step"]) ** 2
        return (((0.1 * distances - found) * batch["is_real_sequence"]).sum(),)
"""
"""An objective whose loss of a sequence depends on all others of the step."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plugin") / "my.py"
    write_documented(file, "An objective", "An optimizer", "A callback")
    text = file.read_text()
    assert "limit, decay = 0.2, 0.9" in text
    file.write_text(text.replace("limit, decay = 0.2, 0.9", LIMIT))
    return file


def case(strategy: str, plugin: Path, **others: object) -> Case:
    changes = (
        *NO_EVALUATION,
        ("objective", "Focal"),
        ("objective.gamma", 1.5),
        ("optimizer", "Lion"),
        ("optimizer.lr", 5e-4),
    )
    return Case(strategy, "full", changes=changes, plugin=plugin, **others)


def observer(strategy: str, plugin: Path, size: int = 4) -> Case:
    file = plugin.with_name("alike.py")
    file.write_text(OBSERVER)
    changes = (("objective", "Alike"), ("train.micro_batch_size", size), ("train.epochs", 1))
    return Case(strategy, "full", changes=(*NO_EVALUATION, *changes), plugin=file)


@pytest.fixture(scope="module")
def single(run: Run, plugin: Path) -> Outcome:
    (found,) = run(1, [case("single", plugin)]).values()
    return found


@pytest.fixture(scope="module")
def several(run: Run, plugin: Path) -> dict[str, Outcome]:
    cases = {name: case(name, plugin) for name in OTHERS}
    cases["half"] = case("fsdp", plugin, stop_after=3)
    asks = plugin.with_name("asks.py")
    asks.write_text(
        "import ftkit\nclass Asks(ftkit.Callback):\n    def on_step(self, run, record):\n"
        "        if run.rank == 1 and record.step == 2:\n            run.stop('rank 1 wants to')\n"
    )
    cases["rank 1"] = Case("ddp", "full", changes=NO_EVALUATION, plugin=asks)
    cases["alike"] = observer("fsdp", plugin)
    found = run(2, list(cases.values()))
    return {name: found[one] for name, one in cases.items()}


@pytest.mark.slow
def test_a_callback_ends_the_run_before_its_last_step(single: Outcome) -> None:
    assert 3 < len(single.rows) < 9
    assert single.losses[-1] < single.losses[0] - 0.1
    assert single.report.exit_reason.startswith("mean loss of 5.")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", OTHERS)
def test_an_objective_of_a_plugin_learns_the_same_under_every_strategy(
    several: dict[str, Outcome], single: Outcome, strategy: str
) -> None:
    found = several[strategy]
    assert found.losses == pytest.approx(single.losses, rel=1e-5)
    assert found.report.exit_reason == single.report.exit_reason


@pytest.mark.slow
def test_an_objective_of_a_plugin_observes_whole_steps(
    run: Run, plugin: Path, several: dict[str, Outcome]
) -> None:
    (whole,) = run(1, [observer("single", plugin, size=11)]).values()
    found = several["alike"]
    assert len(found.losses) == len(whole.losses) > 3
    assert found.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.slow
def test_all_ranks_end_if_one_asks(several: dict[str, Outcome]) -> None:
    found = several["rank 1"]
    assert len(found.rows) == 2
    assert found.report.exit_reason == "rank 1 wants to"


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("ddp", 2), (OTHERS[-1], 2)])
def test_it_resumes_elsewhere_with_the_state_of_its_callbacks(
    run: Run,
    plugin: Path,
    several: dict[str, Outcome],
    single: Outcome,
    strategy: str,
    world_size: int,
) -> None:
    half = several["half"]
    assert len(half.rows) == 3
    state = read_state(half.checkpoint)["StopWhenGood"]
    assert 5.7 < state["mean"] < single.losses[0]
    assert (half.checkpoint / "plugin.py").read_text() == plugin.read_text()
    (found,) = run(world_size, [case(strategy, plugin, start=half.out_dir)]).values()
    assert found.losses == pytest.approx(single.losses, rel=1e-5)
    # It depends on all losses since the first step.
    assert found.report.exit_reason == single.report.exit_reason
