"""`ftkit.Experiments`: each setting is planned, run and shown beside the one before."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from browser import CHROMIUM, browser
from command import ROOT
from messages import key_words
from plugins import write_documented

import ftkit
from ftkit.errors import UserError
from ftkit.extensions.notebook.experiments import Difference, changed_keys, experiment_as_html
from ftkit.runs.state import RunState, look
from ftkit.strategies.step_memory import CATEGORIES

RECIPE = ROOT / "recipes/tiny-llama-full.yaml"
LORA = ROOT / "recipes/tiny-llama-lora.yaml"
SMALL = {"checkpoint_dir": "embedded:quickstart", "train.max_seq_length": 32}
HERE = {
    **SMALL,
    "accelerator": "cpu",
    "data": "JSON",
    "data.json_path": "embedded:quickstart",
    "train.max_steps": 2,
    "train.lr_warmup_steps": 1,
    "eval.interval": 0,
    "checkpoint.save": False,
}


@pytest.fixture(scope="module")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> ftkit.Experiments:
    directory = tmp_path_factory.mktemp("experiments")
    out_dir = directory / "out"
    plugin = write_documented(directory / "my.py", "A metric")
    made = ftkit.Experiments(out_dir, gpu="a100-80gb", here=HERE)
    keys = {"train.global_batch_size": 8, "train.micro_batch_size": 8}
    made.run("batch-8", RECIPE, command="finetune_full", **keys)
    made.run(
        "bf16",
        RECIPE,
        command="finetune_full",
        precision="bf16-true",
        here={"seed": 1},
        plugin=plugin,
        **keys,
    )
    return made


@pytest.mark.slow
def test_a_plugin_is_that_of_one_experiment(experiments: ftkit.Experiments) -> None:
    with_plugin = [one.name for one in experiments if (one.run.out_dir / "plugin.py").exists()]
    assert with_plugin == ["bf16"]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            f"ftkit.finetune_full({str(RECIPE)!r}, **keys, out_dir='out/two')",
            id="a run",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ftkit.Experiments('out').run("
            f"'one', {str(RECIPE)!r}, command='finetune_full', **keys)",
            id="an experiment",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_runs_that_are_dropped_leave_no_open_file(line: str, tmp_path: Path) -> None:
    keys = HERE | {"train.global_batch_size": 8, "train.micro_batch_size": 8}
    program = f"import ftkit\nkeys = {keys!r}\n{line}\n"
    run = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.slow
def test_what_is_predicted_is_of_the_recipe_and_what_runs_has_the_keys_of_here(
    experiments: ftkit.Experiments,
) -> None:
    batch_8, bf16 = experiments
    assert batch_8.plan.base_model.startswith("TinyLlama")
    assert batch_8.planned.total == batch_8.plan.memory.peak_bytes > 20 * 2**30
    assert batch_8.report.outcome == "completed"
    assert batch_8.report.resolved and batch_8.report.resolved.base_model == "quickstart"
    assert 0 < batch_8.measured.total < 2**30
    assert bf16.planned.optimizer_state < 0.51 * batch_8.planned.optimizer_state
    assert (batch_8.report.recipe["seed"], bf16.report.recipe["seed"]) == (1337, 1)
    assert bf16.differences == [Difference("precision", "32-true", "bf16-true")]
    assert experiments["bf16"].run.out_dir.name == "bf16"


@pytest.mark.slow
def test_its_view_has_what_is_new_and_a_line_each_for_prediction_and_measurement(
    experiments: ftkit.Experiments,
) -> None:
    page = experiments["bf16"]._repr_html_()
    visible = re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL)
    for words in (
        "precision",
        "32-true",
        "bf16-true",
        "predicted, a100-80gb",
        "measured here",
        "quickstart in place of TinyLlama",
        "tokens/s",
    ):
        assert words in visible
    assert visible.count("shares of the peak") == 2
    assert "script" not in page
    assert "<svg" not in page  # JupyterLab removes it from notebooks that somebody else has run
    assert page.count("<details>") == 2


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_its_view_shows_bars_and_long_values_also_in_a_narrow_window(
    experiments: ftkit.Experiments, tmp_path: Path
) -> None:
    """JupyterLab's style sheet lets no image be wider than its cell, which the image widens."""
    shown = experiment_as_html(
        "narrow",
        [Difference("checkpoint_dir", "a/long/path/" * 8, "another/long/path/" * 8)],
        experiments["bf16"].plan,
        look(experiments["bf16"].run.out_dir),
    )
    page = tmp_path / "page.html"
    page.write_text(f"<style>img {{ max-width: 100% }}</style>{shown}")
    with browser(tmp_path / "profile") as seen:
        seen.open(page.as_uri())
        seen.wait_for("[...document.images].filter(i => i.naturalWidth).length >= 2")
        seen.resize(700)
        assert seen.value("Math.min(...[...document.images].map(i => i.clientWidth))") > 50
        change = "document.querySelector('table')"
        assert seen.value(f"{change}.scrollWidth <= {change}.parentNode.clientWidth")


@pytest.mark.slow
def test_all_of_them_are_one_table_of_plans_and_one_comparison(
    experiments: ftkit.Experiments,
) -> None:
    assert [plan.name for plan in experiments.plans] == ["batch-8", "bf16"]
    assert {run.name for run in experiments.compare().runs} == {"batch-8", "bf16"}


@pytest.mark.slow
def test_differences_are_listed_by_key_and_full_from_lora_by_the_method() -> None:
    full = ftkit.plan(RECIPE, optimizer="SGD", **SMALL).plan.recipe
    lora = ftkit.plan(LORA, **SMALL).plan.recipe
    changes = {difference.key: difference for difference in changed_keys(full, lora)}
    assert changes["method"] == Difference("method", "full", "lora")
    assert changes["optimizer"] == Difference("optimizer", "torch.optim.SGD", "torch.optim.AdamW")
    assert changes["train.micro_batch_size"] == Difference("train.micro_batch_size", 16, 4)
    assert not {"out_dir", "access_token", "lora_r", "seed"} & changes.keys()
    assert changed_keys(full, full) == []


def test_a_run_that_was_killed_has_its_prediction_and_no_measurement(tmp_path: Path) -> None:
    killed = RunState(out_dir=tmp_path, state="killed", report=None)
    page = experiment_as_html("<b>", [], ftkit.plan(RECIPE, gpu="a100-80gb"), killed)
    assert "&lt;b&gt;" in page and "killed" in page
    assert "predicted, a100-80gb" in page and "measured" not in page


@pytest.mark.parametrize("columns", ["host_memory_bytes,host_cpu_utilization", "GPU"])
@pytest.mark.parametrize(("samples", "busy"), [(0, ""), (4, "54.5 %"), (40, "72.3 %")])
def test_memory_and_use_over_time_are_curves_where_there_are_samples_enough(
    samples: int, busy: str, columns: str, tmp_path: Path
) -> None:
    device, memory = ("CPU", "host memory"), "host_memory_bytes,host_cpu_utilization"
    if columns == "GPU":
        device = ("GPU", "GPU memory")
        memory += ",device0_memory_bytes,device0_utilization"
    beside = ",1048576,0.1" if columns == "GPU" else ""
    # A busy sample counts for three times as long as an idle one, and a night for a moment.
    times = [i + (i % 2) / 2 + (i > 1) * 30_000 for i in range(samples)]
    rows = [f"{i},{times[i]}{beside},{2**30},{i % 2}" for i in range(samples)]
    (tmp_path / "system.csv").write_text("\n".join([f"step,time_s,{memory}", *rows, ""]))
    state = RunState(out_dir=tmp_path, state="killed", report=None)
    page = experiment_as_html("x", [], ftkit.plan(RECIPE, gpu="a100-80gb", **SMALL), state)
    assert page.count(' over time" style') == (2 if samples == 40 else 0)
    labels = [f"{device[1]}: at most 1.0 GiB", f"{device[0]} busy: {busy} on average"]
    assert all((text in page) == (samples > 0) for text in labels)
    # 20 times 1.5 s, 18 times 0.5 s, and 2.5 s in place of the night.
    assert page.count("<span>0 s</span><span> time </span><span>41.5 s</span>") == (
        2 if samples == 40 else 0
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"command": "train"}, "command is 'train' ... finetune"),
        pytest.param({"than": "a"}, "than is 'a' ... none", marks=pytest.mark.slow),
        ({"plugin": "absent.py"}, "absent.py"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    keys: dict[str, str], message: str, tmp_path: Path
) -> None:
    experiments = ftkit.Experiments(tmp_path / "out")
    with pytest.raises(UserError, match=key_words(message)):
        experiments.run("x", RECIPE, **SMALL, **keys)
    assert len(experiments) == 0 and not (tmp_path / "out").exists()


def test_every_part_of_the_memory_has_a_name_and_a_colour(tmp_path: Path) -> None:
    planned = ftkit.plan(RECIPE, gpu="a100-80gb")
    for category in CATEGORIES:
        planned.memory.breakdown_bytes[category] = 2**30
    state = RunState(out_dir=tmp_path, state="killed", report=None)
    page = experiment_as_html("x", [], planned, state)
    assert len(set(re.findall(r"color:(#\w+)\" aria-hidden", page))) == len(CATEGORIES)
