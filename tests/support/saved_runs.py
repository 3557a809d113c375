"""Directories of runs with checkpoints, made without any training."""

from pathlib import Path

from checkpoints import safetensors, save

from ftkit.checkpoint.store import Store
from ftkit.recipe.parsing import read_recipe, to_yaml
from ftkit.recipe.recipe import Method, Recipe
from ftkit.runs.report.report import OutcomeName, Progress, Report, write_report

LAST = 2000
"""Steps of a run of two epochs, as `checkpoints.some_metadata` has them."""


def recipe(out: Path, method: Method = "lora", **keys: object) -> Recipe:
    """A recipe of the run in out; dots are written as two underscores."""
    values = {"checkpoint_dir": "base", "out_dir": out, "train__epochs": 2} | keys
    pairs = [(key.replace("__", "."), str(value)) for key, value in values.items()]
    return read_recipe([], pairs, method=method)


def save_run(saved: Recipe, *steps: int, **changes: object) -> Store:
    """Checkpoints and rows of a run, as it leaves them."""
    out = saved.out_dir
    store = Store(out / "checkpoints")
    files = {
        "recipe.yaml": to_yaml(saved).encode(),
        "shard-00000-of-00001.safetensors": safetensors(1000),
        "adapter/adapter_model.safetensors": safetensors(100),
    }
    if saved.method == "full":
        files["base/config.json"] = b"{}"
    out.mkdir(exist_ok=True)
    for step in steps:
        save(store, step, files, method=saved.method, **changes)
    (out / "recipe.yaml").write_text(to_yaml(saved))
    (out / "run.log").write_text("log\n")
    write_rows(out, range(1, max(steps, default=0) + 3))
    return store


def write_rows(out: Path, steps: range) -> None:
    lines = ["step,samples,loss,lr,grad_norm,tokens,tokens_per_s"]
    lines += [f"{step},{step * 16},1.0,0.1,,5,6.0" for step in steps]
    (out / "metrics.csv").write_text("\n".join(lines) + "\n")
    (out / "validation.csv").write_text("step,samples,val_loss,perplexity\n2,32,1.0,2.7\n")


def ended(out: Path, outcome: OutcomeName, steps: int, *, result: bool = False) -> None:
    """The report of a run, and its result."""
    report = Report(
        outcome=outcome,
        exit_reason="train.epochs of 2 reached",
        exit_code=0,
        phase="saving",
        started_at="2026-01-02T03:04:05Z",
        finished_at="2026-01-02T03:04:05Z",
        progress=Progress(steps=steps),
    )
    write_report(report, out)
    if result:
        (out / "final").mkdir()
        (out / "final/model").write_text("result")
