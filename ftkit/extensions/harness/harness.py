"""The lm-evaluation-harness on a model in memory.

Tasks, groups, prompts, metrics and their means are the harness's own, of version 0.4.13. `Scorer`
computes what it requests of a model.
"""

import io
import logging
import random
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks._factory
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
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Entry, Kind

from ftkit.errors import UserError
from ftkit.evaluation.task_programs import TaskOptions
from ftkit.extensions.harness.scorer import PromptBatch, Scorer
from ftkit.extensions.harness.tasks import TaskFiles, check_supported
from ftkit.models.chat_templates.template import ChatTemplate, TemplateRefusal
from ftkit.models.generation import Sampling
from ftkit.recipe.hubs import READ_BUILDERS
from ftkit.runs.report.answers import TaskResult

FEW_SHOT_SEED = 1234
"""Default of the harness for examples in prompts, numpy and torch; its seed for Python is 0."""
_GENERATION = ("do_sample", "max_gen_toks", "temperature", "top_k", "top_p", "until")
"""Keys of generation_kwargs that are supported."""
_MAY_LOAD = ("data_dir", "data_files", "revision")
"""Keys of dataset_kwargs that decide which builder reads the data."""


class TaskSet:
    """Tasks with their data, ready to be evaluated."""

    def __init__(self, found: TaskFiles, options: TaskOptions, context_length: int) -> None:
        """Have the harness set the tasks up, and load their data; see `FoundTasks.load`.

        `find_tasks` has checked every file that is read here.
        """
        self._options, self._context_length = options, context_length
        self._tasks: dict[str, Task] = {}
        self._groups: dict[str, Group] = {}
        _confine_harness()
        # Without its own index: see `ftkit.extensions.harness.tasks`.
        manager = TaskManager(include_defaults=False)
        for name, file in found.files.items():
            kind = Kind.GROUP if name in found.groups else Kind.TASK
            manager.task_index[name] = Entry(name=name, kind=kind, yaml_path=file)
        for tag, names in found.tags.items():
            entry = Entry(name=tag, kind=Kind.TAG, yaml_path=None, tags={*names})
            manager.task_index.setdefault(tag, entry)
        with _quietly(), _seeded():
            for name in found.names:
                loaded = _load(manager, name)
                self._tasks |= loaded["tasks"]
                self._groups |= loaded.get("groups", {})
        # Version 0.4.13 gives the members of a group that is named by task: its own name.
        if odd := sorted(self._tasks.keys() ^ set(found.tasks)):
            raise UserError(
                f"The harness does not read {odd[0]} as a task of its own. Name groups inside a "
                "group by group: NAME."
            )
        for name, task in self._tasks.items():
            # Only now, because groups change settings of their tasks.
            _set_few_shot(task, options.num_fewshot)
            _check_generation(name, task, context_length)

    @property
    def names(self) -> list[str]:
        """Names of the tasks, without groups."""
        return list(self._tasks)

    def evaluate(self, scorer: Scorer) -> list[TaskResult]:
        """Evaluate a model on all tasks; rank 0 calls this while the others serve.

        Raises:
            EvaluationAborted: the run is to stop.
            UserError: the harness cannot use what a task gives it.
        """
        model = _ModelInMemory(scorer, self._options.chat_template, self._context_length)
        loaded = {"tasks": self._tasks, "groups": self._groups, "group_map": {}}
        for task in self._tasks.values():
            # Without the requests and answers of an earlier evaluation.
            task._instances = None
            # The same examples in the prompts before and after training.
            task.set_fewshot_seed(seed=FEW_SHOT_SEED)
        uses_template = self._options.chat_template is not None
        with _quietly(), _seeded(), _faults_of_tasks(self.names):
            # Bootstrapping starts processes, for metrics whose error is not reported here.
            found = evaluate(
                model,
                loaded,
                limit=self._options.limit,
                bootstrap_iters=0,
                apply_chat_template=uses_template,
                fewshot_as_multiturn=uses_template,
            )
        scorer.release()
        assert found is not None
        return list(self._read(found))

    def _read(self, found: Mapping[str, Any]) -> Iterator[TaskResult]:
        # Keys of scores are METRIC,FILTER; others have no comma: name, alias, number of samples.
        for name, values in {**found["results"], **found.get("groups", {})}.items():
            of_tasks = [name] if name in self._tasks else self._groups[name].get_all_tasks()
            names = [one if isinstance(one, str) else one.task_name for one in of_tasks]
            samples = sum(found["n-samples"][one]["effective"] for one in names)
            for key, value in values.items():
                metric, comma, filter_name = key.partition(",")
                is_number = isinstance(value, int | float | np.number)
                if not comma or metric.endswith("_stderr") or not is_number:
                    continue
                # Tasks of a group may disagree; then the direction is unknown.
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
        """Standard error of a mean; other statistics would need bootstrapping."""
        task = self._tasks.get(name)
        if task is None or task.aggregation().get(metric) is not mean:
            return None
        kept = [one for one in found["samples"][name] if one["filter"] == filter_name]
        values = [float(one[metric]) for one in kept if metric in one]
        return float(mean_stderr(values)) if len(values) > 1 else None


class _CheckedTask(ConfigurableTask):  # type: ignore[misc]
    """A task of the harness that runs no program for its metrics or data.

    `find_tasks` has checked each file alone; this checks settings after those of groups are merged.
    """

    def __init__(self, *arguments: Any, config: dict[str, Any] | None = None, **more: Any) -> None:
        values = config or {}
        check_supported(str(values.get("task")), values)
        for metric in values.get("metric_list") or ():
            name = metric.get("metric")
            is_named = isinstance(name, str) and not values.get("process_results")
            if is_named and name not in metric_registry:
                raise UserError(
                    f"The task {values.get('task')} has the metric {name}, which the harness does "
                    "not have: it would run a program from a hub. Name one of its own, such as acc "
                    "or exact_match."
                )
        super().__init__(*arguments, config=config, **more)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        """Load the data, if they are of a kind that runs no code."""
        # Code of a trusted directory: find_tasks has refused any other.
        if callable(self.config.custom_dataset):
            super().download(dataset_kwargs)
            return
        # The builder is only resolved here, before `super().download` reads with it.
        given = {key: (dataset_kwargs or {}).get(key) for key in _MAY_LOAD}
        builder = datasets.load_dataset_builder(self.DATASET_PATH, self.DATASET_NAME, **given)
        kind = type(builder).__module__.rpartition(".")[2]
        if kind not in READ_BUILDERS:
            raise UserError(
                f"The task {self.config.task} has data of the kind {kind}, which is not read. "
                f"Give them as one of {', '.join(READ_BUILDERS)}."
            )
        super().download(dataset_kwargs)


def _load(manager: TaskManager, name: str) -> Any:
    try:
        return manager.load([name])
    except UserError:
        raise
    except Exception as error:  # whatever is wrong in a task file or its code
        reason = " ".join(str(error).split()) or "no reason given"
        raise UserError(
            f"The task {name} cannot be set up: {type(error).__name__}: {reason}. "
            "Correct its file, or leave the task out."
        ) from error


def _set_few_shot(task: Task, count: int | None) -> None:
    """Set the examples in each prompt, by the harness's rule: a task that has 0 keeps it."""
    own = task.get_config("num_fewshot")
    if own is None or (count is not None and own != 0):
        task.set_config(key="num_fewshot", value=count or 0)


def _check_generation(name: str, task: Task, context_length: int) -> None:
    """Refuse a task whose answers would be sampled or bounded in a way that is not supported."""
    if task.get_config("output_type") != "generate_until":
        return
    requested = normalize_gen_kwargs(task.get_config("generation_kwargs") or {})
    if unknown := sorted(requested.keys() - set(_GENERATION)):
        raise UserError(
            f"The task {name} has {unknown[0]} in generation_kwargs, which ftkit does not support. "
            f"It knows {', '.join(_GENERATION)}."
        )
    if requested["max_gen_toks"] >= context_length:
        raise UserError(
            f"The task {name} has answers of {requested['max_gen_toks']:,} tokens (max_gen_toks), "
            f"but the model's context is {context_length:,} tokens, including the prompt. Leave "
            "the task out."
        )


class _ModelInMemory(TemplateLM):  # type: ignore[misc]
    """The harness's interface to models, with the choices of its class for transformers."""

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
        self._tokenizer.require_embedded(ids, "A text of a task")
        return ids

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        # As in the harness: texts that are too long lose their beginnings.
        # One more than the context: the last token is only predicted and never an input.
        most = self._context_length + 1
        return self._scorer.log_likelihoods(
            [((before + after)[-most:], len(after)) for _, before, after in requests]
        )

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        windows, owners = [], []
        for number, request in enumerate(requests):
            # Windows as the harness's own class for transformers cuts them, so that perplexities
            # agree.
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
        # Only requests with the same settings can share a batch.
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(number)
        for numbers in alike.values():
            given = normalize_gen_kwargs(requests[numbers[0]].args[1])
            eos = self._tokenizer.token_text(self.eot_token_id)
            longest = given["max_gen_toks"]
            # As in the harness: prompts that are too long lose their beginnings.
            room = self._context_length - longest
            sampling = Sampling(
                temperature=given.get("temperature", 0.0) if given["do_sample"] else 0.0,
                top_k=given.get("top_k"),
                top_p=given.get("top_p", 1.0),
                seed=FEW_SHOT_SEED,
            )
            prompts = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
            found = self._scorer.answers(
                PromptBatch(
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
        """Write a conversation as a prompt; an answer that has begun is continued."""
        assert self._template is not None
        try:
            text = self._template.render(chat_history, add_generation_prompt=add_generation_prompt)
        except TemplateRefusal as refusal:
            raise UserError(
                f"The chat template {self._template.name} refuses the prompt of a task: "
                f"{refusal}. Leave out apply_chat_template."
            ) from None
        if add_generation_prompt:
            return text
        # Templates close the last turn; cut behind its text, the model goes on with it.
        begun = chat_history[-1]["content"].strip()
        return text[: text.rindex(begun) + len(begun)]


def _confine_harness() -> None:
    """Have the harness make checked tasks, and render templates in a sandbox.

    Its own Jinja environment lets a template call anything; this one has the same settings.
    """
    # The factory has no parameter for the class, so that its name there is replaced.
    lm_eval.tasks._factory.ConfigurableTask = _CheckedTask
    sandbox = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    sandbox.filters["regex_replace"] = lm_eval.utils.regex_replace
    lm_eval.utils.env = sandbox


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep progress bars and messages of the harness from the terminal."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    # Task code prints, and standard output may be JSON that another program reads.
    with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        yield


@contextmanager
def _faults_of_tasks(names: list[str]) -> Iterator[None]:
    """Say which tasks are meant where the harness fails on what one of them gives it."""
    try:
        yield
    except Exception as error:
        # A task is at fault only if the harness's own code fails.
        innermost = traceback.extract_tb(error.__traceback__)[-1]
        if "lm_eval" not in Path(innermost.filename).parts:
            raise
        which = f"task {names[0]}" if len(names) == 1 else f"one of the tasks {', '.join(names)}"
        raise UserError(
            f"The lm-evaluation-harness cannot evaluate {which}: {type(error).__name__}: {error}, "
            f"in its {innermost.name}. Check what doc_to_target and doc_to_choice of its file give "
            "for every record: of several choices the target is the number of the right one, from "
            "0."
        ) from error


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed as the harness's command does, and restore the random states of the training."""
    # Evaluations run between training steps, which must not depend on them.
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    random.seed(0)
    np.random.seed(FEW_SHOT_SEED)
    # torch.manual_seed would also seed the devices, whose states are not restored below.
    torch.default_generator.manual_seed(FEW_SHOT_SEED)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])
