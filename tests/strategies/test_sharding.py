"""Messages between ranks, seen from one of two whose messages go nowhere."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import make_llama
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from ftkit.evaluation.validation import validation_loss
from ftkit.models.language_model import LanguageModel, outline
from ftkit.models.load_weights import Sharding, Whole, fill
from ftkit.models.pretrained.base_model import open_base
from ftkit.objectives.supervised import Supervised
from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plan import Plan, make_plan
from ftkit.strategies.fsdp import Fsdp
from ftkit.strategies.fully_shard import FullyShard
from ftkit.strategies.strategy import Ddp, parameter_dtype

LAYERS = 2


class Messages(TorchDispatchMode):
    """The collectives that were called, with the number format of what they carry."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        if function.namespace == "c10d":
            self.sent.append((function.__name__, arguments[0].dtype))
        return function(*arguments, **(options or {}))

    def of(self, words: str) -> list[torch.dtype]:
        return [dtype for name, dtype in self.sent if words in name]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Tied or not."""
    directory = tmp_path_factory.mktemp("bases")
    return {
        tied: make_llama(directory / str(tied), tie_word_embeddings=tied) for tied in (True, False)
    }


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def make(base_dir: Path, sharding: Any, **keys: str) -> tuple[LanguageModel, Plan]:
    """A full fine-tune on one of two ranks; `sharding` is made of the plan."""
    pairs = {"checkpoint_dir": str(base_dir), "devices": "2"} | {
        key.replace("__", "."): value for key, value in keys.items()
    }
    recipe = read_recipe([], list(pairs.items()), method="full")
    plan = make_plan(recipe, Devices(accelerator="cpu", count=2))
    base = open_base(str(base_dir))
    model = outline(base, recipe, parameter_dtype(plan))
    found: Sharding = sharding(plan)
    fill(
        model,
        base,
        sharding=found,
        device=torch.device("cpu"),
        rope_length=16,
        seed=0,
        progress=lambda done, total: None,
    )
    return model, plan


def forward(model: Any) -> Any:
    ids = torch.ones(1, 4, dtype=torch.long)
    return model(ids, torch.arange(4), torch.zeros(4, dtype=torch.long))


def micro_step(model: Any) -> None:
    forward(model).backward()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("sharding", "of_each_block"), [("FULL_SHARD", 2), ("SHARD_GRAD_OP", 1)])
def test_the_head_is_gathered_once_for_both_passes(
    bases: dict[bool, Path], mesh: Any, tied: bool, sharding: str, of_each_block: int
) -> None:
    model, _ = make(
        bases[tied],
        lambda plan: FullyShard(plan, mesh),
        strategy="fsdp",
        strategy__sharding=sharding,
        precision="32-true",
    )
    micro_step(model)
    with Messages() as messages:
        micro_step(model)
    root_and_head = 1 if tied else 2
    assert len(messages.of("gather")) == LAYERS * of_each_block + root_and_head
    assert len(messages.of("scatter")) == LAYERS + root_and_head


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_parameters_are_gathered_ahead(bases: dict[bool, Path], mesh: Any, ahead: int) -> None:
    """Each part of a model gathers the next ones before it computes."""
    model, _ = make(
        bases[False],
        lambda plan: FullyShard(plan, mesh),
        strategy="fsdp",
        strategy__prefetch=str(ahead),
        precision="32-true",
    )
    micro_step(model)
    parts = [model, *model.body.blocks, model.head]
    found: list[list[int]] = []
    for part in parts:
        part.register_forward_pre_hook(lambda *_: found.append(gathered(parts)))
    forward(model)
    last = len(parts) - 1
    expected = [list(range(min(index + ahead, last) + 1)) for index in range(len(parts))]
    assert [now[-1] for now in found] == [now[-1] for now in expected]


def gathered(parts: list[Any]) -> list[int]:
    """Parts that have all their parameters, or are gathering them."""
    groups = [part._get_fsdp_state()._fsdp_param_group for part in parts]
    return [i for i, g in enumerate(groups) if g.is_unsharded or g._all_gather_result is not None]


@pytest.mark.parametrize(("every", "messages"), [("true", 2), ("false", 1)])
def test_gradients_are_added_up_in_every_micro_step_or_once(
    bases: dict[bool, Path], mesh: Any, every: str, messages: int
) -> None:
    strategies: list[Fsdp] = []

    def sharding(plan: Plan) -> FullyShard:
        strategies.append(Fsdp(plan))
        return FullyShard(plan, mesh)

    model, _ = make(
        bases[False],
        sharding,
        strategy="fsdp",
        strategy__sync_every_micro_step=every,
        precision="bf16-true",
    )
    (strategy,) = strategies
    kept = []
    with Messages() as sent:
        for is_last in (False, True):
            whole = strategy.keeps_whole_gradients(model, is_last=is_last)
            micro_step(model)
            kept.append((whole, {g.dtype for g in strategy.whole_gradients(model)}))
    assert len(sent.of("scatter")) == messages * (LAYERS + 2)
    waiting = (False, set()) if every == "true" else (True, {torch.float32})
    assert kept == [waiting, (False, set())]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_fsdp_adds_up_gradients_in_float32(
    bases: dict[bool, Path], mesh: Any, precision: str
) -> None:
    model, plan = make(
        bases[False],
        lambda plan: FullyShard(plan, mesh),
        strategy="fsdp",
        precision=precision,
    )
    with Messages() as messages:
        micro_step(model)
    assert set(messages.of("scatter")) == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {
        parameter_dtype(plan)
    }


def test_ddp_sends_no_tables(
    bases: dict[bool, Path], mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = make(bases[False], lambda plan: Whole(), strategy="ddp", precision="32-true")
    strategy: Any = Ddp(plan)._fabric_strategy(model)
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.cluster_environment = None
    parallel = strategy.setup_module(model)
    sent = []
    monkeypatch.setattr(dist, "_broadcast_coalesced", lambda *words: sent.append(words))
    for _ in range(2):
        forward(parallel)
    assert sent == []


def test_a_validation_asks_every_tenth_batch_whether_to_stop() -> None:
    """Each question is a message, for which the host waits."""
    tensors = {name: torch.zeros(1) for name in ("input_ids", "label_indices", "labels")}
    divisors = {"label_tokens": torch.ones(())}
    batch = tensors | {"source": 0, "sequence_lengths": None, "divisors": divisors}
    asked: list[int] = []
    done: list[int] = []

    def validate(answers: list[bool]) -> float | None:
        asked.clear()
        done.clear()

        def stopped() -> bool:
            asked.append(len(done))
            return answers[len(asked) - 1]

        class Model:
            body = SimpleNamespace(exchange=None)

            def __call__(self, *_: object, **__: object) -> torch.Tensor:
                return torch.tensor(2.0)

        model: Any = Model()
        batches: Any = [batch] * 25
        validated = validation_loss(
            model,
            Supervised(),
            batches,
            torch.device("cpu"),
            sources=1,
            context=nullcontext,
            stopped=stopped,
            progress=lambda count, total: done.append(count),
        )
        return validated and validated.loss

    assert validate([False, False, False]) == 2.0
    assert (asked, len(done)) == ([0, 10, 20], 25)
    assert validate([False, True]) is None
    assert (asked, len(done)) == ([0, 10], 10)


def test_a_simulation_that_fails_leaves_no_process_group(
    bases: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one in this process would take it for the group of a run."""
    pairs = [("checkpoint_dir", str(bases[False])), ("devices", "2"), ("strategy", "fsdp")]
    plan = make_plan(read_recipe([], pairs, method="full"), Devices(accelerator="cpu", count=2))

    def fail(*_: object) -> None:
        raise RuntimeError("no mesh")

    with monkeypatch.context() as patched:
        patched.setattr("torch.distributed.device_mesh.init_device_mesh", fail)
        with pytest.raises(RuntimeError, match="no mesh"), Fsdp(plan).simulated():
            pass
    assert not dist.is_initialized()
    with Fsdp(plan).simulated():
        assert dist.get_world_size() == 2
    assert not dist.is_initialized()
