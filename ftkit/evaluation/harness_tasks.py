"""`ftkit evaluate --tasks`: what tasks of the lm-evaluation-harness say of a result."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.evaluation.result import Result
from ftkit.evaluation.session import put_to_use
from ftkit.evaluation.tasks.finding import find_tasks
from ftkit.evaluation.tasks.scoring import Scorer
from ftkit.models.bodies.attention import attention_kernel
from ftkit.recipe.options import EvaluateOptions
from ftkit.runs.report.answers import TaskResult, score_text
from ftkit.utils.console.display import Display
from ftkit.utils.console.terminal import labelled_grid
from ftkit.utils.remote.urls import display_path

ROWS = 8
"""Sequences of a forward pass, where nothing is said."""


def evaluate_tasks(result: Result, options: EvaluateOptions) -> int:
    """Ask a result the tasks that are named, and show what came out; the exit code.

    Args:
        result: what is asked.
        options: which tasks, and how it computes.

    Raises:
        UserError: a task is missing, needs code, or cannot be set up.
    """
    assert options.tasks is not None
    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    if not names:
        raise UserError("--tasks is empty: which tasks? Try --tasks arc_easy.")
    definitions = find_tasks(names, key="--tasks", trusted=options.trust_task_code)
    in_use = put_to_use(result, options)
    loaded = in_use.loaded
    loaded.model.kernel = attention_kernel(loaded.base.architecture.attention, in_use.plan)
    from ftkit.evaluation.tasks.harness import Asking, TaskSet  # seconds, for those who ask tasks

    asking = Asking(
        limit=options.limit,
        num_fewshot=options.num_fewshot,
        chat_template=loaded.prompting.template if options.apply_chat_template else None,
    )
    with Display(None, stream=sys.stderr) as display:
        with display.phase("loading tasks", brief=True):
            tasks = TaskSet(definitions, asking, loaded.base.architecture.context_length)
        scorer = Scorer(
            loaded.model,
            loaded.base.tokenizer,
            stop_ids=loaded.prompting.stop_ids(loaded.base.tokenizer),
            world_size=1,
            rows_of=lambda _: options.micro_batch_size or ROWS,
            context=in_use.context,
        )
        title = "1 task" if len(tasks.names) == 1 else f"{len(tasks.names)} tasks"
        with display.phase(f"asking {title}", brief=True) as phase:
            scorer.progress = phase.advance
            found = tasks.results(scorer)
    base = loaded.base.name
    if result.kind == "model" and result.base is not None:
        base = Path(result.base).name
    values = {
        "result": result.name,
        "directory": display_path(result.directory),
        "step": result.metadata.step if result.metadata else None,
        "base_model": base,
        "precision": in_use.plan.precision,
        "quantize": in_use.quantize,
        "limit": options.limit,
        "num_fewshot": options.num_fewshot,
        "chat_template": None if asking.chat_template is None else asking.chat_template.name,
        "tasks": [dataclasses.asdict(one) for one in found],
    }
    if options.format == "json":
        print(json.dumps(values, indent=2))
    else:
        _show(values, found)
    return 0


def _show(values: dict[str, Any], found: list[TaskResult]) -> None:
    step = "" if values["step"] is None else f" (step {values['step']:,})"
    quantize = f", {values['quantize']}" if values["quantize"] else ""
    rows = [
        ("result", f"{values['directory']}{step}"),
        ("base model", f"{values['base_model']}, {values['precision']}{quantize}"),
    ]
    for one in found:
        error = "" if one.stderr is None else f" ± {score_text(one.stderr)}"
        text = f"{one.name} {score_text(one.value)}{error}"
        rows.append((one.task, f"{text} of {one.samples:,} records"))
    with Display(None) as display:
        display.show(labelled_grid(rows))
