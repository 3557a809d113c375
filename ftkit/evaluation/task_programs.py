"""Tasks on which a model is evaluated: found before a run starts, and run by their program."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ftkit.errors import UserError
from ftkit.utils.progress import OnProgress
from ftkit.utils.registry import Registry, imported

if TYPE_CHECKING:
    from ftkit.models.chat_templates.template import ChatTemplate
    from ftkit.models.generation import Context
    from ftkit.models.language_model import LanguageModel
    from ftkit.models.pretrained.tokenizer import Tokenizer
    from ftkit.runs.report.answers import TaskResult


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Options for the prompts of tasks."""

    limit: int | None = None
    """Records of each task; None: all."""
    num_fewshot: int | None = None
    """Examples in each prompt; None: as a task says."""
    chat_template: "ChatTemplate | None" = None
    """Template for prompts; None: they are plain text."""


class EvaluationAborted(Exception):
    """The evaluation is to end early, on all ranks at once."""


class Scorer(Protocol):
    """What tasks ask of a model, seen from one of its ranks."""

    progress: OnProgress
    """Called with (batches done, batches in all) of the current request."""

    def serve(self) -> None:
        """Compute along with rank 0 until that releases this rank.

        Raises:
            EvaluationAborted: the evaluation ends early.
        """

    def restore(self) -> None:
        """Leave the model as it was before."""


class LoadedTasks(Protocol):
    """Tasks with their data, ready to be evaluated."""

    @property
    def names(self) -> list[str]:
        """Names of the tasks and groups."""

    def evaluate(self, scorer: Scorer) -> "list[TaskResult]":
        """Evaluate a model on them.

        Args:
            scorer: of `make_scorer`.
        """


@dataclass(frozen=True, kw_only=True)
class TaskProgram:
    """A program that has tasks."""

    name: str
    find: str
    """MODULE:FUNCTION as `FoundTasks.find`, without the libraries that tasks need to run."""
    load: str
    """MODULE:CLASS as `FoundTasks.load`, of what was found, imported when tasks run."""
    scorer: str
    """MODULE:CLASS as `make_scorer`."""


TASK_PROGRAMS: Registry[TaskProgram] = Registry("task_programs", (TaskProgram,), core=())


@dataclass(frozen=True)
class FoundTasks:
    """Tasks whose files were checked."""

    program: TaskProgram
    found: Any
    """What the program has found."""

    @staticmethod
    def find(names: Sequence[str], *, key: str, trusted: Path | None = None) -> "FoundTasks | None":
        """Find tasks and check their files, without running code; None: none are named.

        Args:
            names: of tasks, or paths of their files.
            key: option or key of a recipe that names them, for messages.
            trusted: the directory whose code may run.

        Raises:
            UserError: a task is not there, or cannot run.
        """
        if not names:
            return None
        program = next(iter(TASK_PROGRAMS), None)
        if program is None:
            raise UserError(f"{key} names tasks, but no extension of ftkit has any. Remove it.")
        return FoundTasks(program, imported(program.find)(names, key=key, trusted=trusted))

    def load(self, options: TaskOptions, context_length: int) -> LoadedTasks:
        """Load the tasks with their data, which takes seconds.

        Args:
            options: for their prompts.
            context_length: most tokens of a prompt with its answer.

        Raises:
            UserError: their data cannot be loaded.
        """
        loaded: LoadedTasks = imported(self.program.load)(self.found, options, context_length)
        return loaded


def make_scorer(
    model: "LanguageModel",
    tokenizer: "Tokenizer",
    *,
    stop_ids: frozenset[int],
    world_size: int,
    rows_of: Callable[[int], int],
    context: "Context",
    stopped: Callable[[], object] = lambda: False,
) -> Scorer:
    """Wrap a model for the tasks that were found.

    Args:
        model: in evaluation mode.
        tokenizer: of its base model.
        stop_ids: tokens that end an answer.
        world_size: number of ranks with a part or a copy of the model.
        rows_of: sequences per forward pass, by their length in tokens.
        context: context manager for every forward pass.
        stopped: whether to end early; a collective with one answer for all ranks.
    """
    program = next(iter(TASK_PROGRAMS))
    made: Scorer = imported(program.scorer)(
        model,
        tokenizer,
        stop_ids=stop_ids,
        world_size=world_size,
        rows_of=rows_of,
        context=context,
        stopped=stopped,
    )
    return made
