"""Tasks on which a model is evaluated: found before a run starts, and run by their program."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ftkit.errors import UserError
from ftkit.utils.registry import Registry

if TYPE_CHECKING:
    from ftkit.evaluation.scorer import Scorer
    from ftkit.models.chat_templates.template import ChatTemplate
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


class LoadedTasks(Protocol):
    """Tasks with their data, ready to be evaluated."""

    @property
    def names(self) -> list[str]:
        """Names of the tasks and groups."""

    def evaluate(self, scorer: "Scorer") -> "list[TaskResult]":
        """Evaluate a model on them.

        Args:
            scorer: computes what they request of the model.
        """


@dataclass(frozen=True, kw_only=True)
class TaskProgram:
    """A program that has tasks."""

    name: str
    find: str
    """MODULE:FUNCTION as `FoundTasks.find`, without the libraries that tasks need to run."""
    load: str
    """MODULE:CLASS as `FoundTasks.load`, of what was found, imported when tasks run."""


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
        return FoundTasks(program, _named(program.find)(names, key=key, trusted=trusted))

    def load(self, options: TaskOptions, context_length: int) -> LoadedTasks:
        """Load the tasks with their data, which takes seconds.

        Args:
            options: for their prompts.
            context_length: most tokens of a prompt with its answer.

        Raises:
            UserError: their data cannot be loaded.
        """
        loaded: LoadedTasks = _named(self.program.load)(self.found, options, context_length)
        return loaded


def _named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
