"""The lm-evaluation-harness on a model in memory: its tasks, its prompts and its numbers.

Everything that computes is `Scorer`; how texts become tokens, what is asked and what the answers
are worth is the harness's own, of version 0.4.13.
"""

import importlib.util
import io
import logging
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import lm_eval.utils
import numpy as np
import torch
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from lm_eval.api.group import Group
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean, mean_stderr
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import metric_registry
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from ftkit.data.records.hub import READ_BUILDERS
from ftkit.errors import UserError
from ftkit.evaluation.tasks.files import Code
from ftkit.evaluation.tasks.finding import Definition, TaskDefinition
from ftkit.evaluation.tasks.scoring import Prompted, Scorer
from ftkit.models.chat_templates.template import ChatTemplate, TemplateRefusal
from ftkit.models.generation import Sampling
from ftkit.runs.report.answers import TaskResult

FEW_SHOT_SEED = 1234
"""Of the drawing of examples, and of numpy and torch: the harness's own, as is 0 for Python's."""
_GENERATION = ("do_sample", "max_gen_toks", "temperature", "top_k", "top_p", "until")
"""Keys of generation_kwargs that mean something here."""
_MAY_LOAD = ("data_dir", "data_files", "revision")


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How tasks are asked."""

    limit: int | None = None
    """Records of each task; None: all."""
    num_fewshot: int | None = None
    """Examples in each prompt; None: as a task says."""
    chat_template: ChatTemplate | None = None
    """In which a prompt is written; None: as plain text."""


class TaskSet:
    """Tasks with their data, ready to be asked."""

    def __init__(
        self, definitions: Sequence[Definition], asking: Asking, context_length: int
    ) -> None:
        """Load what the tasks ask.

        Args:
            definitions: from `find_tasks`, whose checks they passed.
            asking: how they are asked.
            context_length: most tokens that the model takes.

        Raises:
            UserError: a task cannot be set up.
        """
        self._asking, self._context_length = asking, context_length
        self._tasks: dict[str, Task] = {}
        self._groups: dict[str, Group] = {}
        _run_templates_in_a_sandbox()
        with _quietly(), _seeded():
            for definition in definitions:
                self._add(definition)
        for name, task in self._tasks.items():
            _check_generation(name, task, context_length)

    @property
    def names(self) -> list[str]:
        """Of the tasks, without groups."""
        return list(self._tasks)

    def results(self, scorer: Scorer) -> list[TaskResult]:
        """Ask a model everything; only rank 0 calls this, the others serve.

        Raises:
            AskingEnded: somebody wishes to end.
        """
        model = _ModelInMemory(scorer, self._asking.chat_template, self._context_length)
        loaded = {"tasks": self._tasks, "groups": self._groups, "group_map": {}}
        for task in self._tasks.values():
            task._instances = None
            task.set_fewshot_seed(seed=FEW_SHOT_SEED)
        with _quietly(), _seeded():
            found = evaluate(
                model,
                loaded,
                limit=self._asking.limit,
                bootstrap_iters=0,
                apply_chat_template=self._asking.chat_template is not None,
                fewshot_as_multiturn=self._asking.chat_template is not None,
            )
        scorer.dismiss()
        assert found is not None
        return list(self._read(found))

    def _add(self, definition: Definition) -> Task | Group:
        """Set a task or group up, with the tasks in it."""
        if isinstance(definition, TaskDefinition):
            task = _made(definition)
            if self._asking.num_fewshot is not None and task.get_config("num_fewshot") != 0:
                task.set_config(key="num_fewshot", value=self._asking.num_fewshot)
            elif task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            self._tasks[definition.name] = task
            return task
        group = Group.from_config({**definition.settings, "group": definition.name})
        for member in definition.members:
            group.add(self._add(member))
        self._groups[definition.name] = group
        return group

    def _read(self, found: Mapping[str, Any]) -> Iterator[TaskResult]:
        """The numbers of tasks and groups, in their order."""
        for name, values in {**found["results"], **found.get("groups", {})}.items():
            of_tasks = [name] if name in self._tasks else self._groups[name].get_all_tasks()
            names = [one if isinstance(one, str) else one.task_name for one in of_tasks]
            samples = sum(found["n-samples"][one]["effective"] for one in names)
            for key, value in values.items():
                metric, comma, filter_name = key.partition(",")
                is_number = isinstance(value, int | float | np.number)
                if not comma or metric.endswith("_stderr") or not is_number:
                    continue
                higher = {found["higher_is_better"].get(one, {}).get(metric) for one in names}
                yield TaskResult(
                    task=name,
                    metric=metric,
                    filter=None if filter_name == "none" else filter_name,
                    samples=samples,
                    value=float(value),
                    stderr=self._stderr(found, name, metric, filter_name),
                    higher_is_better=higher.pop() if len(higher) == 1 else None,
                )

    def _stderr(
        self, found: Mapping[str, Any], name: str, metric: str, filter_name: str
    ) -> float | None:
        """The standard error of a mean; of what is no mean, it would take many drawings."""
        task = self._tasks.get(name)
        if task is None or task.aggregation().get(metric) is not mean:
            return None
        kept = [one for one in found["samples"][name] if one["filter"] == filter_name]
        values = [float(one[metric]) for one in kept if metric in one]
        return float(mean_stderr(values)) if len(values) > 1 else None


class _LoadedTask(ConfigurableTask):  # type: ignore[misc]
    """A task of the harness whose data are of a kind that runs nothing."""

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        """Load the data.

        Raises:
            UserError: they are of another kind.
        """
        if callable(self.config.custom_dataset):
            super().download(dataset_kwargs)
            return
        given = {key: (dataset_kwargs or {}).get(key) for key in _MAY_LOAD}
        builder = datasets.load_dataset_builder(self.DATASET_PATH, self.DATASET_NAME, **given)
        kind = type(builder).__module__.rpartition(".")[2]
        if kind not in READ_BUILDERS:
            raise UserError(
                f"The task {self.config.task} has data of the kind {kind}, which is not read. "
                f"Give them as one of {', '.join(READ_BUILDERS)}."
            )
        super().download(dataset_kwargs)


def _made(definition: TaskDefinition) -> Task:
    """A task with its data."""
    settings = _with_code(dict(definition.settings))
    name = definition.name
    for metric in settings.get("metric_list") or ():
        known = metric.get("metric")
        is_named = isinstance(known, str) and not settings.get("process_results")
        if is_named and known not in metric_registry:
            raise UserError(
                f"The task {name} has the metric {known}, which the harness does not have: it "
                "would run a program of a hub. Name one of its own, such as acc or exact_match."
            )
    try:
        if (own_class := settings.get("class")) is not None:
            made: Task = own_class(config=settings)
            return made
        return _LoadedTask(config=settings)
    except UserError:
        raise
    except Exception as error:  # whatever is wrong in a task file
        reason = " ".join(str(error).split()) or "no reason given"
        raise UserError(
            f"The task {name} cannot be set up: {type(error).__name__}: {reason}. "
            "Mend its file, or leave it out."
        ) from error


def _with_code(value: Any) -> Any:
    """The same with functions where `!function` names them, whose files are trusted."""
    if isinstance(value, Code):
        return _imported(value)
    if isinstance(value, dict):
        return {key: _with_code(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_code(item) for item in value]
    return value


def _imported(code: Code) -> Any:
    """What a Python file beside a task file has under a name.

    Raises:
        UserError: it cannot be imported, or has no such name.
    """
    own = Path(lm_eval.utils.__file__).parent.parent
    module_name = f"ftkit_task_code_{abs(hash(code.file))}"
    if code.file.is_relative_to(own):  # files of the harness import each other
        module_name = ".".join(code.file.relative_to(own).with_suffix("").parts)
    try:
        if module_name not in sys.modules:
            spec = importlib.util.spec_from_file_location(module_name, code.file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module
            spec.loader.exec_module(module)
        return getattr(sys.modules[module_name], code.name.rpartition(".")[2])
    except Exception as error:  # whatever code raises
        sys.modules.pop(module_name, None)
        raise UserError(
            f"!function {code.name} of {code.written_in} cannot be had: {type(error).__name__}: "
            f"{error}. Mend {code.file}, or install what it needs."
        ) from error


def _check_generation(name: str, task: Task, context_length: int) -> None:
    """Refuse a task that asks for answers of a kind or length that cannot be given."""
    if task.get_config("output_type") != "generate_until":
        return
    asked = normalize_gen_kwargs(task.get_config("generation_kwargs") or {})
    if unknown := sorted(asked.keys() - set(_GENERATION)):
        raise UserError(
            f"The task {name} has {unknown[0]} in generation_kwargs, which ftkit does not have. "
            f"It knows {', '.join(_GENERATION)}."
        )
    if asked["max_gen_toks"] >= context_length:
        raise UserError(
            f"The task {name} has answers of {asked['max_gen_toks']:,} tokens (max_gen_toks), but "
            f"the model takes {context_length:,} with the prompt. Leave the task out."
        )


class _ModelInMemory(TemplateLM):  # type: ignore[misc]
    """What the harness asks, as it asks models of transformers."""

    def __init__(self, scorer: Scorer, template: ChatTemplate | None, context_length: int) -> None:
        super().__init__()
        self._scorer, self._template, self._context_length = scorer, template, context_length
        self._tokenizer = scorer.tokenizer

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        bos = self._tokenizer.named_bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self._tokenizer.model_name)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        ids: list[int] = self._tokenizer.encode(string, bos=add_special_tokens).tolist()
        return ids

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Texts that are too long lose their beginnings."""
        most = self._context_length + 1
        return self._scorer.likelihoods(
            [((before + after)[-most:], len(after)) for _, before, after in requests]
        )

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        windows, owners = [], []
        for number, request in enumerate(requests):
            rolling = lm_eval.utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._context_length,
                context_len=1,
            )
            for before, after in map(lm_eval.utils.make_disjoint_window, rolling):
                windows.append((None, before, after))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += total
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        answers = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(number)
        for numbers in alike.values():
            given = normalize_gen_kwargs(requests[numbers[0]].args[1])
            eos = self._tokenizer.token_text(self.eot_token_id)
            longest = given["max_gen_toks"]
            room = self._context_length - longest
            sampling = Sampling(
                temperature=given.get("temperature", 0.0) if given["do_sample"] else 0.0,
                top_k=given.get("top_k"),
                top_p=given.get("top_p", 1.0),
                seed=FEW_SHOT_SEED,
            )
            prompts = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
            found = self._scorer.answers(
                Prompted(
                    prompts=prompts,
                    until=handle_stop_sequences(given["until"], eos),
                    max_new_tokens=longest,
                    sampling=sampling,
                )
            )
            for number, answer in zip(numbers, found, strict=True):
                answers[number] = answer
        return answers

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as a prompt; what an assistant has begun to say goes on."""
        assert self._template is not None
        try:
            text = self._template.render(chat_history, add_generation_prompt=add_generation_prompt)
        except TemplateRefusal as refusal:
            raise UserError(
                f"The chat template {self._template.name} does not take what a task asks: "
                f"{refusal}. Leave out apply_chat_template."
            ) from None
        if add_generation_prompt:
            return text
        begun = chat_history[-1]["content"].strip()
        return text[: text.rindex(begun) + len(begun)]


def _run_templates_in_a_sandbox() -> None:
    """Have templates of task files rendered where they reach no code.

    The harness renders them in a plain environment, in which a template can call anything; the
    settings are those of that one.
    """
    sandbox = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    sandbox.filters["regex_replace"] = lm_eval.utils.regex_replace
    lm_eval.utils.env = sandbox


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep the harness's bars and messages from the terminal."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        yield


@contextmanager
def _seeded() -> Iterator[None]:
    """Draw as the harness's own command does, and leave the training's random numbers alone."""
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    random.seed(0)
    np.random.seed(FEW_SHOT_SEED)
    torch.default_generator.manual_seed(FEW_SHOT_SEED)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])
