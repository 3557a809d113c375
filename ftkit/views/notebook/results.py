"""`ftkit.evaluate`, `merge`, `export` and `push`: what is done with a result, from Python."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from ftkit.views.notebook.commands import option_words, output_of
from ftkit.views.notebook.run_view import short

_Tasks = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured on held-out data."""

    loss: float
    """Mean of the label tokens, in nats."""
    perplexity: float
    records: int
    label_tokens: int
    exact_match: float | None
    """Share of the answers that are exactly the expected ones; None: none was asked for."""
    values: dict[str, Any] = field(repr=False)
    """All that `ftkit evaluate --format json` says."""


@dataclass(frozen=True, kw_only=True)
class TaskEvaluation:
    """What tasks of the lm-evaluation-harness have measured."""

    scores: dict[str, dict[str, float]]
    """Of each task by its metrics: `scores["arc_easy"]["acc"]`. A metric of which a task has
    several filters has theirs in its name, as the harness writes it: "exact_match,strict-match"."""
    values: dict[str, Any] = field(repr=False)
    """All that `ftkit evaluate --format json` says: standard errors and numbers of records too."""


@overload
def evaluate(
    result: str | os.PathLike[str], /, *, tasks: None = None, **options: Any
) -> Evaluation: ...
@overload
def evaluate(
    result: str | os.PathLike[str], /, *, tasks: _Tasks, **options: Any
) -> TaskEvaluation: ...
def evaluate(
    result: str | os.PathLike[str],
    /,
    *,
    tasks: _Tasks | None = None,
    **options: Any,
) -> Evaluation | TaskEvaluation:
    """Measure a result on held-out data, or by tasks, as `ftkit evaluate`.

    ::

        ftkit.evaluate(run).loss
        ftkit.evaluate(run, data="JSON", **{"data.path": "held_out.json"}).exact_match
        ftkit.evaluate(run, tasks=["arc_easy", "my_task.yaml"], limit=100).scores

    Args:
        result: a run, a checkpoint, an adapter, a model or a hub name.
        tasks: names, task files or directories of them.
        options: of the command, with dots as they are there.

    Raises:
        UserError: as the command would.
    """
    words = ["evaluate", os.fspath(result), "--format=json", *option_words(options)]
    if tasks is not None:
        names = [tasks] if isinstance(tasks, str | os.PathLike) else tasks
        asked = ",".join(os.fspath(name) for name in names)
        values = json.loads(output_of([*words, f"--tasks={asked}"]))
        return TaskEvaluation(scores=_scores(values["tasks"]), values=values)
    values = json.loads(output_of(words))
    matches = values["exact_match"]
    return Evaluation(
        loss=values["loss"],
        perplexity=values["perplexity"],
        records=values["records"],
        label_tokens=values["label_tokens"],
        exact_match=None if matches is None else matches["share"],
        values=values,
    )


def _scores(measured: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    scores: dict[str, dict[str, float]] = {}
    for one in measured:
        metric = ",".join(filter(None, (one["metric"], one["filter"])))
        scores.setdefault(one["task"], {})[metric] = one["value"]
    return scores


def merge(result: str | os.PathLike[str], /, out: str | os.PathLike[str], **options: Any) -> Path:
    """Make an adapter and its base one model, as `ftkit merge`; the model's directory.

    Prints what the command prints: what became of the logits.

    ::

        model = ftkit.merge(run, "out/merged", dtype="bfloat16")

    Args:
        result: a LoRA run, its checkpoint or an adapter.
        out: the directory to write.
        options: of the command: base="original", overwrite=True.

    Raises:
        UserError: as the command would.
    """
    name = os.fspath(result)
    if Path(name).is_absolute():
        name = str(short(Path(name)))
    words = ["merge", name, f"--out={os.fspath(out)}", *option_words(options)]
    print(output_of(words), end="")
    return Path(out)


def export(
    result: str | os.PathLike[str],
    /,
    out: str | os.PathLike[str],
    *,
    format: str,  # noqa: A002 - the option of the command
    **options: Any,
) -> Path:
    """Write a result for other programs, as `ftkit export`; the directory it is in.

    ::

        ftkit.export("out/merged", "out/gguf", format="gguf", quantization="q8_0")

    Args:
        result: a run, a checkpoint, an adapter or a model.
        out: the directory to write.
        format: hf, litgpt, peft or gguf.
        options: of the command: dtype="bfloat16", overwrite=True.

    Raises:
        UserError: as the command would.
    """
    words = ["export", os.fspath(result), f"--out={os.fspath(out)}", f"--format={format}"]
    output_of([*words, *option_words(options)])
    return Path(out)


def push(result: str | os.PathLike[str], repo_id: str, /, **options: Any) -> str:
    """Upload a result with its model card, as `ftkit push`; its url. Private, unless public=True.

    ::

        ftkit.push(run, "me/my-adapter")

    Args:
        result: a run, or what merge and export have written.
        repo_id: the repository on the hub, such as me/my-model.
        options: of the command: message="Trained longer.". A token is better left to $HF_TOKEN.

    Raises:
        UserError: as the command would.
    """
    words = ["push", os.fspath(result), repo_id, "--format=json", *option_words(options)]
    url: str = json.loads(output_of(words))["url"]
    return url
