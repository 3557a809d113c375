"""Results: adapters, models and checkpoints, found by path, hub name or run.

Looks at names, settings and metadata alone, without torch;
`ftkit.evaluation.loading` reads the weights.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from ftkit.checkpoint.metadata import (
    ADAPTER,
    METADATA,
    RECIPE,
    CheckpointError,
    Metadata,
    is_shard,
    read_metadata,
)
from ftkit.checkpoint.store import Store, check_files, problem_of, step_of
from ftkit.errors import UserError
from ftkit.models.chat_templates.template import CHAT_TEMPLATE, template_of
from ftkit.models.pretrained.model_files import (
    missing_files,
    read_json,
    scores_of_model,
    weight_files,
)
from ftkit.models.pretrained.places import ROOT, find_or_download, find_single_file
from ftkit.models.pretrained.single_file import single_file
from ftkit.recipe.implementations import HF, layout_in
from ftkit.recipe.objectives import ScoreLabels, scores_of
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.peft_adapter import (
    adapter_scores,
    base_fingerprint,
    noted_tokens,
    peft_settings,
)
from ftkit.recipe.peft_names import CONFIG as ADAPTER_CONFIG
from ftkit.recipe.recipe import LoraRecipe, Method, Precision, Quantization, Recipe
from ftkit.recipe.recipe_sections import rounding_of, without_rounding
from ftkit.runs.checkpoints import find, misnamed
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.report import Report, read_report
from ftkit.runs.url_runs import fetch_result, fetch_without_shards
from ftkit.utils.names import nearest_directory
from ftkit.utils.url_files import lies_elsewhere
from ftkit.utils.urls import is_url


@dataclass(frozen=True, kw_only=True)
class Result:
    """A model that can answer: an adapter, a model directory or a checkpoint."""

    name: str
    """The name or path that it was found by."""
    kind: Literal["adapter", "model", "checkpoint"]
    """adapter: a PEFT adapter on a base model. model: a Hugging Face or LitGPT directory.
    checkpoint: a full fine-tune, whose weights lie in the shards of a checkpoint."""
    directory: Path
    """Directory of the adapter, the model or the checkpoint."""
    base: str | None = None
    """The base model as `open_base` takes it; None: not known, or the result is itself one."""
    recipe: Recipe | None = None
    """Recipe of its run."""
    metadata: Metadata | None = None
    """Metadata of the chosen checkpoint, or of the newest one of its run."""
    precision: Precision | None = None
    """Number format in which its run computed."""
    noted_fingerprint: str | None = None
    """Fingerprint of the base model in the files of an adapter."""
    template_directory: Path | None = None
    """Directory with the chat template and end tokens of its training; None: an older result, or a
    model, which has only its own."""

    @property
    def method(self) -> Method | None:
        """Training method; None: unknown."""
        if self.recipe is not None:
            return self.recipe.method
        return "lora" if self.kind == "adapter" else None

    @property
    def trains_part(self) -> bool:
        """Whether its run trained a part of the base model, which has the rest of the weights."""
        return self.recipe is not None and self.recipe.train.trains_part

    @property
    def scores(self) -> ScoreLabels | None:
        """The scores that it gives sequences; None: it predicts tokens."""
        if self.recipe is not None:
            return scores_of(self.recipe.objective)
        if self.kind == "adapter":
            return adapter_scores(self.directory)
        settings = read_json(self.directory / "config.json")
        return scores_of_model(self.directory, settings, self.name)

    @property
    def added_tokens(self) -> Sequence[str]:
        """Tokens that were added to the vocabulary of its base model."""
        if self.recipe is not None:
            return self.recipe.added_tokens
        return noted_tokens(self.directory) if self.kind == "adapter" else ()

    @property
    def quantize(self) -> Quantization | None:
        """Quantisation of the frozen base model in its run."""
        return self.recipe.quantize if isinstance(self.recipe, LoraRecipe) else None

    @property
    def rounding(self) -> str | None:
        """What the weights were rounded to in its run, and will be where they are served."""
        return None if self.recipe is None else rounding_of(self.recipe, trains=False)

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the base model that it was trained from; None: not recorded."""
        return self.metadata.base.fingerprint if self.metadata else self.noted_fingerprint

    @property
    def step(self) -> int | None:
        """Optimizer steps of its training, if known."""
        report = report_of(self)
        if report is not None and report.result is not None:
            return report.result.step
        return None if self.metadata is None else self.metadata.step


def require_answers(result: Result, wanted: str) -> None:
    """Refuse a model with scores for what needs one that predicts tokens.

    Args:
        result: from `find_result`.
        wanted: what it is refused for: "ftkit chat".

    Raises:
        UserError: it is one.
    """
    if (scores := result.scores) is not None:
        raise UserError(
            f"{result.name} is {scores.noun}, which gives sequences scores and predicts no "
            f"tokens, but {wanted} needs a model that does. Try ftkit evaluate {result.name}, "
            "or the model that it was trained from."
        )


def find_result(name: str) -> Result:
    """Find the result that a name or path stands for.

    Args:
        name: a run (its result, or its newest checkpoint if it has none), its checkpoints or one
            of them, a PEFT adapter, a Hugging Face or LitGPT directory, a GGUF file, a hub name
            (converted or downloaded if need be) or ``embedded:NAME``.

    Raises:
        UserError: it is none of these, or damaged.
    """
    path = fetch_result(name) if is_url(name) else Path(name).expanduser()
    if path.is_dir():
        # Path(".").parent is "." again, so that the run around such a path would not be found.
        return _in_directory(name, path.resolve() if path.name in ("", "..") else path)
    if path.is_file() and single_file(path) is not None:
        return Result(name=name, kind="model", directory=find_or_download(name))
    # ORG/NAME is a misspelt path and no hub name if a directory ORG is here.
    is_local = path.exists() or path.is_absolute() or Path(path.parts[0]).is_dir()
    if is_local and not _is_downloaded(name):
        what = (
            "holds nothing" if is_url(name) else "is a file" if path.exists() else "does not exist"
        )
        raise UserError(
            f"{name} {what}. Name the out_dir of a run, such as out/finetune/lora, one of its "
            f"checkpoints, an adapter, or a model.{nearest_directory(name)}"
        )
    return Result(name=name, kind="model", directory=find_or_download(name))


def report_of(result: Result) -> Report | None:
    """Read the report of the run around a result; None: it does not lie in a run."""
    run = _run_around(result.directory)
    return None if run is None else _report(run)


def base_result(result: Result, base: str | None = None) -> Result:
    """Return the base model of a result, to be used with the prompts of its run.

    Args:
        result: from `find_result`.
        base: where the base model is, if not where the run had it.

    Raises:
        UserError: it is not known, or not there.
    """
    name = base or result.base
    if name is None:
        raise UserError(
            f"{result.name} does not say which base model it was made from. Try --base PATH."
        )
    directory = find_or_download(name)
    # It was not trained to be rounded.
    recipe = None if result.recipe is None else without_rounding(result.recipe)
    return dataclasses.replace(
        result, name=name, kind="model", directory=directory, base=None, recipe=recipe
    )


def _is_downloaded(name: str) -> bool:
    """Return whether a name is a hub name below the download directory: checkpoints/..."""
    return Path(name).parts[0] == str(ROOT) and not Path(name).exists()


def _in_directory(name: str, directory: Path) -> Result:
    # An adapter or a model by itself comes first, then the result of a run, then its checkpoints.
    if (directory / ADAPTER_CONFIG).exists():
        return _adapter(name, directory, _run_around(directory))
    if _is_model(directory):
        return _model(name, directory, _run_around(directory))
    place = find(directory)
    run = RunDirectory(directory)
    # A checkpoint has a recipe too, but also metadata.
    if run.recipe.exists() and not (directory / METADATA).exists():
        final = run.final
        if (final / ADAPTER_CONFIG).exists():
            return _adapter(name, final, directory)
        if _is_model(final):
            return _model(name, final, directory)
    # Last, a directory with a single file.
    if not place.directories():
        if find_single_file(str(directory)) is not None:
            return Result(name=name, kind="model", directory=find_or_download(str(directory)))
        raise UserError(
            f"{name} holds neither a result nor a checkpoint yet. Name a run that has saved one."
        )
    return _checkpoint(name, place.chosen(None))


def _is_model(directory: Path) -> bool:
    """Return whether a directory is meant as a model: complete, or nearly so."""
    # An incomplete model counts, so that the message names its missing files.
    has_settings = (directory / "config.json").is_file()
    return layout_in(directory) != HF or bool(weight_files(directory)) or has_settings


def _run_around(directory: Path) -> Path | None:
    """Find the run or checkpoint that a result lies in; None: it lies in none."""
    inside = directory.resolve()
    run = RunDirectory(inside.parent)
    is_part = inside in (run.final, run.path / ADAPTER) and run.recipe.is_file()
    return directory.parent if is_part else None


def _adapter(name: str, directory: Path, run: Path | None) -> Result:
    recorded = peft_settings(directory).get("base_model_name_or_path")
    noted = base_fingerprint(directory)
    result = Result(
        name=name,
        kind="adapter",
        directory=directory,
        noted_fingerprint=noted,
        template_directory=None if template_of(directory) is None else directory,
    )
    result = _of_run(result, run)
    # A foreign file must not have ftkit ask a server with the keys of this user.
    if not isinstance(recorded, str) or not recorded or is_url(recorded):
        return result
    # The recipe may name it relative to another directory; the adapter has where it was found.
    known = result.base
    if known is not None and not known.startswith("embedded:") and Path(recorded).is_dir():
        known = recorded
    return dataclasses.replace(result, base=known or recorded)


def _model(name: str, directory: Path, run: Path | None) -> Result:
    if missing := missing_files(directory):
        raise UserError(
            f"{directory} is not a complete model: {', '.join(missing[:3])} "
            f"{'is' if len(missing) == 1 else 'are'} missing. Name a complete one."
        )
    report = None if run is None else _report(run)
    # The tokenizer of the base model may have brought a template that nothing was trained in.
    has_template = report is not None and report.resolved and report.resolved.chat_template
    result = Result(
        name=name,
        kind="model",
        directory=directory,
        template_directory=directory if has_template else None,
    )
    return _of_run(result, run)


def _checkpoint(name: str, directory: Path) -> Result:
    """Find a checkpoint, and check names and sizes of its files, and checksums of the small ones.

    Blocks of shards at a url are verified when they are read; a shard without checksums of its
    blocks is read and verified as a whole here.
    """
    fetch_without_shards(directory)
    problems = misnamed(directory) or check_files(directory)
    if not problems:
        metadata = read_metadata(directory)
        problems = [
            problem
            for file, entry in metadata.files.items()
            if not is_shard(file)
            # Of a LoRA checkpoint only the adapter is read, which is not in shards.
            or (metadata.method == "full" and lies_elsewhere(directory / file))
            if (problem := problem_of(directory, file, entry, fetching=False))
        ]
    if problems:
        raise UserError(f"{directory} is damaged: {' '.join(problems)} {_other(directory)}")
    metadata = read_metadata(directory)
    if metadata.method == "lora":
        return _adapter(name, directory / ADAPTER, directory)
    has_template = (directory / CHAT_TEMPLATE).is_file()
    result = Result(
        name=name,
        kind="checkpoint",
        directory=directory,
        template_directory=directory if has_template else None,
    )
    return _of_run(result, directory)


def _of_run(result: Result, run: Path | None) -> Result:
    """Complete a result from its run or checkpoint."""
    if run is None:
        return result
    metadata = _metadata(run)
    method: Method = "lora" if result.kind == "adapter" else "full"
    recipe = read_recipe([run / RECIPE], method=method)
    precision = recipe.precision
    if metadata is not None:
        # The recipe may leave the precision to the device.
        precision = cast(Precision, metadata.layout.precision)
    elif (report := _report(run)) is not None and report.resolved is not None:
        precision = cast(Precision, report.resolved.precision)
    return dataclasses.replace(
        result, base=recipe.checkpoint_dir, recipe=recipe, metadata=metadata, precision=precision
    )


def _metadata(run: Path) -> Metadata | None:
    """Metadata of a checkpoint, or of the newest intact one of a run; None: there is none."""
    directories = [run]
    if not (run / METADATA).exists():
        store = RunDirectory(run).store
        directories = [store.path(step) for step in reversed(store.steps())]
    for directory in directories:
        with contextlib.suppress(CheckpointError):
            return read_metadata(directory)
    return None


def _report(run: Path) -> Report | None:
    # A result can be used without its report.
    with contextlib.suppress(UserError):
        return read_report(RunDirectory(run).report)
    return None


def _other(directory: Path) -> str:
    """Suggest a checkpoint of the run in place of a damaged one."""
    step, store = step_of(directory.name), Store(directory.parent)
    sound = [s for s in store.steps() if s != step and not store.check_files(s)]
    if not sound:
        return "There is no other checkpoint beside it."
    return f"Try {store.path(sound[-1])}."
