"""Plugins: what one defines, how recipes name it, and how mistakes are reported."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from messages import message_of, says
from plugins import documented, opened, plugin_of

from ftkit.data.sources import data_source
from ftkit.errors import UserError
from ftkit.extensions.preference.preference import Paired
from ftkit.models.loss import Head
from ftkit.objectives.objective import make_objective
from ftkit.recipe.devices import Devices
from ftkit.recipe.objectives import (
    OBJECTIVES,
    ObjectiveRules,
    check_objective,
    objective_options,
    objective_rules,
)
from ftkit.recipe.own_metric import LoadedMetric, own_metrics
from ftkit.recipe.parsing import read_recipe, to_yaml
from ftkit.recipe.plugin import Plugin, open_plugin, plugin_in_use, using
from ftkit.recipe.recipe import Component
from ftkit.runs.job import Job
from ftkit.strategies.optimizers import base_learning_rate, resolve_optimizer

OWN = """
from typing import Literal
import ftkit, torch
from ftkit.extensions.preference.preference import Paired, Dpo as _Dpo
from ftkit.objectives.supervised import Supervised

class Mine(Supervised):
    def __init__(self, *, weight: float = 1.0, kind: Literal["a", "b"] = "a", n: int | None = None,
                 anything=3, **others):
        self.weight = weight
        if weight < 0:
            raise ValueError("weight below 0")

class Compared(_Dpo):
    def __init__(self, needed: str): super().__init__()

class Unfinished(ftkit.Objective):
    def amounts(self, samples): return {}

class _Private(Supervised): pass

class Sgd(torch.optim.SGD):
    def __init__(self, params, lr): super().__init__(params, lr=lr)

class Note(ftkit.Callback):
    def __init__(self, often=3): self.often = often

class Rows:
    def __len__(self): return 2
    def __getitem__(self, index): return {"text": str(index)}

class Pair(tuple): pass

def score(answer, expected, record, strict=False): return 0.5
def helper(answer): return 1
answer = 42
"""


@pytest.fixture
def own(tmp_path: Path) -> Plugin:
    return plugin_of(tmp_path, OWN)


def component(class_path: str, **init_args: Any) -> Component:
    return Component(class_path=class_path, init_args=init_args)


def test_what_ftkit_uses_of_a_file_is_found_by_what_it_is(own: Plugin) -> None:
    assert [(one["kind"], one["name"]) for one in own.definitions] == [
        ("objective", "Mine"),
        ("objective", "Compared"),
        ("objective", "Unfinished"),
        ("optimizer", "Sgd"),
        ("callback", "Note"),
        ("data", "Rows"),
        ("metric", "score"),
    ]
    assert Plugin.from_json(json.loads(json.dumps(own.to_json()))) == own
    assert own.sha256 == hashlib.sha256(OWN.encode()).hexdigest()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("x = 1", "--plugin my.py ... defines nothing ... ftkit.Objective ... metric"),
        ("import no_such_package", "my.py cannot be executed ... no_such_package ... line 1"),
        ("x = 1\n\nraise SystemExit('no')", "SystemExit: no ... line 3 ... leave out --plugin"),
        ("import ftkit\nclass sft(ftkit.Objective): pass", "objective sft ... Rename"),
        ("import torch\nclass Adam(torch.optim.Adam): pass", "optimizer Adam ... Rename"),
        (
            "class Alpaca:\n  def __len__(self): ...\n  def __getitem__(self, i): ...",
            "data Alpaca ... Rename",
        ),
        (
            "import ftkit\nclass C(ftkit.Callback):\n  def __init__(self, often): pass",
            "C ... without arguments ... often ... defaults",
        ),
        (
            "class D:\n  def __init__(self, my_api_key=''): ...\n  __len__ = __getitem__ = len",
            "D has the option my_api_key ... stored with the run ... environment",
        ),
    ],
)
def test_a_plugin_that_cannot_be_used_is_one_clear_error(
    content: str, words: str, tmp_path: Path
) -> None:
    assert says(message_of(plugin_of, tmp_path, content), words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "--plugin ... there is no such file"),
        (b"x = (\n", "my.py, line 1 is not Python"),
        (b"# coding: latin-1\nx = '\xe9'\n", "UTF-8"),
        (b"#" * (2**20 + 1), "1,048,577 bytes ... at most 1,048,576"),
    ],
)
def test_a_file_that_is_no_plugin_is_refused_without_executing_it(
    content: bytes | None, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "my.py"
    if content is not None:
        file.write_bytes(content)
    assert says(message_of(open_plugin, str(file)), words)
    assert open_plugin(None) is None


def test_recipes_name_classes_of_the_plugin_in_use(own: Plugin) -> None:
    keys = [
        ("checkpoint_dir", "base"),
        ("objective", "Mine"),
        ("objective.weight", "2"),
        ("optimizer", "Sgd"),
        ("data", "Rows"),
    ]
    with using(own):
        recipe = read_recipe([], keys, method="lora")
    assert recipe.objective == component("plugin.Mine", weight=2)
    assert recipe.optimizer["class_path"] == "plugin.Sgd"
    assert recipe.data["class_path"] == "plugin.Rows"
    alone = read_recipe([], keys, method="lora")
    assert alone.objective["class_path"] == "Mine"
    assert alone.optimizer["class_path"] == "torch.optim.Sgd"
    # A stored recipe is read without the plugin: only its use needs that.
    assert "class_path: plugin.Mine" in to_yaml(recipe)


@pytest.mark.parametrize(
    ("name", "use"),
    [("objective", objective_rules), ("optimizer", base_learning_rate), ("data", data_source)],
)
def test_nothing_that_a_recipe_names_is_executed(name: str, use: Any, own: Plugin) -> None:
    chosen = component("plugin.Missing")
    assert says(message_of(use, chosen), f"{name} is plugin.Missing ... --plugin FILE.py")
    with using(own):
        assert says(message_of(use, chosen), f"--plugin my.py ... {name} plugin.Missing")
        with using(None):
            assert says(message_of(use, chosen), "--plugin FILE.py")
        assert plugin_in_use() is own
    assert plugin_in_use() is None


@pytest.mark.parametrize(
    ("name", "use", "written", "meant"),
    [
        ("objective", objective_rules, "Mein", "Mine"),
        ("optimizer", base_learning_rate, "torch.optim.Sgdd", "Sgd"),
        ("data", data_source, "Row", "Rows"),
    ],
)
def test_a_misspelt_class_of_the_plugin_is_suggested(
    name: str, use: Any, written: str, meant: str, own: Plugin
) -> None:
    with using(own):
        assert says(message_of(use, component(written)), written, f"--{name} {meant}")


def test_the_key_plugin_of_a_recipe_is_refused() -> None:
    keys = [("checkpoint_dir", "base"), ("plugin", "my.py")]
    assert says(message_of(read_recipe, [], keys), "plugin ... --plugin FILE.py ... command")


@pytest.mark.parametrize(
    ("init_args", "words"),
    [
        ({"weigth": 1}, "objective.weigth ... objective.weight"),
        ({"weight": "x"}, "objective.weight is 'x' ... a number ... --objective.weight 1.0"),
        ({"weight": True}, "objective.weight is True"),
        ({"kind": "c"}, "'c' ... one of: a, b ... --objective.kind a"),
        ({"n": 1.5}, "1.5 ... a whole number or empty"),
    ],
)
def test_an_option_is_checked_by_its_annotation(
    init_args: dict[str, Any], words: str, own: Plugin
) -> None:
    with using(own):
        assert says(message_of(objective_options, component("plugin.Mine", **init_args)), words)


def test_an_objective_is_made_with_its_options(own: Plugin) -> None:
    with using(own):
        made: Any = make_objective(
            component("plugin.Mine", weight=2, kind="b", n=None, anything="")
        )
        assert made.weight == 2
        assert objective_rules(component("plugin.Mine")).preference is None
        assert objective_rules(component("plugin.Compared")).preference == "pairs"
        missing = message_of(make_objective, component("plugin.Compared"))
        assert says(missing, "objective.needed is missing ... --objective.needed")
        assert isinstance(make_objective(component("plugin.Compared", needed="x")), Paired)
        negative = message_of(make_objective, component("plugin.Mine", weight=-1))
        assert says(negative, "--plugin my.py: Mine ... ValueError: weight below 0 (line 12)")
        unfinished = message_of(make_objective, component("plugin.Unfinished"))
        assert says(unfinished, "Unfinished lacks output, sums")


@pytest.mark.parametrize("name", [row.name for row in OBJECTIVES if row.scores is None])
def test_an_objective_derived_from_ftkits_own_has_its_rules(name: str, tmp_path: Path) -> None:
    base = type(make_objective(component(name)))
    source = f"from {base.__module__} import {base.__name__} as _B\nclass Mine(_B): pass\n"
    with using(plugin_of(tmp_path, source)):
        rules = objective_rules(component("plugin.Mine"))
    known = OBJECTIVES.get(name)
    for field in dataclasses.fields(ObjectiveRules):
        assert getattr(rules, field.name) == getattr(known, field.name), field.name


SMOOTHED = """
import ftkit
from ftkit.objectives.supervised import Dft, Supervised

class Derived(Supervised): pass
class OtherSums(Derived):
    def sums(self, output, batch): return (2 * output,)
class OtherOutput(Derived):
    def output(self, batch): return ftkit.LogProbabilities()
class OutputThatIsSmoothed(OtherOutput):
    is_smoothed = True
    def output(self, batch): return ftkit.SummedLoss()
class Weighted(Dft): pass
"""


@pytest.mark.parametrize(
    ("name", "is_smoothed"),
    [
        ("Derived", True),
        ("OtherSums", True),
        ("OtherOutput", False),
        ("OutputThatIsSmoothed", True),
        ("Weighted", False),
    ],
)
def test_labels_are_smoothed_where_the_output_is_that_of_supervised_tuning(
    name: str, is_smoothed: bool, tmp_path: Path
) -> None:
    keys = [("checkpoint_dir", "base"), ("train.label_smoothing", "0.1")]
    with using(plugin_of(tmp_path, SMOOTHED)):
        recipe = read_recipe([], [*keys, ("objective", name)], method="lora")
        if is_smoothed:
            check_objective(recipe)
        else:
            refused = message_of(check_objective, recipe)
            assert says(refused, "train.label_smoothing is 0.1", name, "--train.label_smoothing 0")


def test_a_class_derived_from_supervised_tuning_has_its_loss_and_its_z_loss(
    tmp_path: Path,
) -> None:
    with using(plugin_of(tmp_path, SMOOTHED)):
        plain = make_objective(component("plugin.Derived"))
        with_z = make_objective(component("plugin.Derived", z_loss=0.5))
    head = Head(torch.nn.Linear(4, 7, bias=False), softcap=None)
    head.label_smoothing = 0.1
    rows, labels = torch.randn(3, 4), torch.tensor([1, 0, 6])
    (loss,), (_, cross_entropy, squares) = (
        one.sums(one.output({}).compute(head, rows, labels, on_cpu=True), {})
        for one in (plain, with_z)
    )
    logits = head.lm_head(rows)
    expected = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(cross_entropy, expected)
    torch.testing.assert_close(squares, (logits.logsumexp(1) ** 2).sum())
    assert [term.name for term in with_z.reported] == ["cross_entropy", "z_loss"]


def test_an_objective_with_two_other_models_is_refused(tmp_path: Path) -> None:
    source = (
        "from ftkit.extensions.distillation.distillation import Distill\n"
        "class Mine(Distill): needs_reference = True\n"
    )
    message = message_of(plugin_of, tmp_path, source)
    assert says(message, "Mine sets needs_teacher and needs_reference ... Remove one")


def test_an_optimizer_is_found_with_its_arguments(own: Plugin) -> None:
    with using(own):
        kind, arguments = resolve_optimizer(component("plugin.Sgd", lr=0.5), may_fuse=True)
        assert (kind.__name__, arguments) == ("Sgd", {"lr": 0.5})
        assert says(
            message_of(base_learning_rate, component("plugin.Sgd")), "optimizer.lr is missing"
        )


def test_the_metrics_of_a_plugin_score_beside_those_of_the_command(
    own: Plugin, tmp_path: Path
) -> None:
    other = tmp_path / "other.py"
    other.write_text("def score(answer, expected, record): return 1\n")
    with using(own):
        (metric,) = own_metrics(())
        assert str(metric) == "--plugin my.py:score"
        assert LoadedMetric(metric).score("", "", {}, 0) == 0.5
        assert says(message_of(own_metrics, [f"{other}:score"]), "score already ... Rename")
    assert own_metrics(()) == ()


def test_what_is_executed_is_the_content_that_was_read(tmp_path: Path) -> None:
    plugin = plugin_of(tmp_path, "value = 1\ndef score(answer, expected, record): return value\n")
    (tmp_path / "my.py").unlink()
    assert plugin.module.value == 1
    assert plugin.module is plugin.module


def test_every_example_of_the_document_is_a_plugin(tmp_path: Path) -> None:
    kinds = set()
    for heading, code in documented().items():
        (one,) = plugin_of(tmp_path, code).definitions
        assert one["kind"] in heading or heading == "A data set"
        kinds.add(one["kind"])
    assert len(kinds) == len(documented())


def test_the_job_of_a_run_has_the_plugin_for_ranks_on_other_hosts(
    own: Plugin, tmp_path: Path
) -> None:
    keys = [("checkpoint_dir", "base"), ("objective", "Mine"), ("accelerator", "cpu")]
    with using(own):
        recipe = read_recipe([], keys, method="lora")
    job = Job(
        recipe=recipe,
        devices=Devices(accelerator="cpu", count=1),
        base="base",
        command=(),
        started_at_s=0.0,
        plugin=own,
    )
    job.write(tmp_path / "job.json")
    (tmp_path / "my.py").unlink()
    found = Job.read(tmp_path / "job.json")
    assert found.plugin == own
    with using(found.plugin):
        assert type(make_objective(found.recipe.objective)).__name__ == "Mine"


def test_an_error_of_the_user_inside_a_plugin_keeps_its_words(tmp_path: Path) -> None:
    source = "import ftkit\nraise ftkit.UserError('own words')\n"
    with pytest.raises(UserError, match="own words"):
        opened(plugin_file(tmp_path, source))


def plugin_file(directory: Path, source: str) -> Path:
    file = directory / "my.py"
    file.write_text(source)
    return file
