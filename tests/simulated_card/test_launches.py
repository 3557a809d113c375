"""Launches and bytes of a step on a GPU: another operation in each layer fails a test."""

from collections.abc import Iterator

import pytest
from command import command_environment
from rank_jobs import layouts
from simulated_card.build import needs_card
from simulated_card.machine import Machine, cards, machine, with_cards

pytestmark = needs_card

MOST = {
    "full, TinyLlama 1.1B": (1325, 56, 93.4),
    "LoRA of all layers, Llama 2 7B": (4328, 133, 393.7),
    "LoRA of all layers without dropout, Llama 2 7B": (3146, 96, 282.0),
    "QLoRA nf4 of all layers, Llama 2 7B": (4549, 140, 400.9),
    "experts, LoRA of attention, Qwen3 MoE": (3251, 130, 268.1),
    "windows, full, Gemma 3 text": (2084, 74, 256.4),
    "generation, TinyLlama 1.1B": (799, 36, 2.34),
}
"""Launches of a step and of a layer in it, and gigabytes that it reads and writes."""
OFTEN = [
    ("full, TinyLlama 1.1B",),
    ("QLoRA nf4 of all layers, Llama 2 7B",),
    ("experts, LoRA of attention, Qwen3 MoE",),
    ("generation, TinyLlama 1.1B",),
]
"""Outside the matrix."""


@pytest.fixture(scope="module")
def h100() -> Iterator[Machine]:
    with machine(with_cards(command_environment(), cards("h100"))) as found:
        yield found


def work_of(name: str) -> list[tuple[int, float]]:
    from launches import CASES
    from launches import work_of as counted

    return [
        (work.launches, (work.product_bytes + work.other_bytes) / 1e9)
        for work in counted(CASES[name])
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", layouts([(name,) for name in MOST], OFTEN))
def test_a_step_launches_and_moves_no_more_than_before(name: str, h100: Machine) -> None:
    step, of_layer = h100.run(work_of, name)
    most_launches, most_in_layer, most_gigabytes = MOST[name]
    assert step[0] <= most_launches and of_layer[0] <= most_in_layer
    assert step[1] <= most_gigabytes * 1.01
    # A number that is far too high would notice nothing.
    assert step[0] > 0.95 * most_launches and step[1] > 0.95 * most_gigabytes


@pytest.mark.slow
def test_reads_writes_and_products_are_counted_and_views_are_free(h100: Machine) -> None:
    def body() -> list[list[int]]:
        import torch
        from launches import Count

        a, b = torch.ones(2, 3, device="cuda"), torch.ones(3, 4, device="cuda")
        table, chosen = torch.ones(100, 3, device="cuda"), torch.zeros(2, dtype=torch.long).cuda()
        found = []
        for operation in (
            lambda: a @ b,
            lambda: a.t().reshape(3, 2)[1:],
            lambda: torch.empty(5, device="cuda"),
            lambda: a.add_(1),
            lambda: a.zero_(),
            lambda: torch.add(a, a, out=torch.empty_like(a)),
            lambda: torch.nn.functional.embedding(chosen, table),
            lambda: torch.ones(9) + 1,
        ):
            count = Count()
            with count:
                operation()
            work = count.work
            found.append([work.launches, work.flops, work.product_bytes, work.other_bytes])
        return found

    assert h100.run(body) == [
        [1, 2 * 2 * 3 * 4, 4 * (6 + 12 + 8), 0],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
        [1, 0, 0, 4 * (6 + 6)],
        [1, 0, 0, 4 * 6],
        [1, 0, 0, 4 * (6 + 6)],  # one tensor is both terms
        [1, 0, 0, 4 * (6 + 6) + 8 * 2],
        [0, 0, 0, 0],  # on the host
    ]


@pytest.mark.slow
def test_the_host_waits_once_for_each_generated_token(h100: Machine) -> None:
    def body() -> list[int]:
        import torch
        from simulated_card import counts

        from ftkit.models.generation import Sampling, answer_in_tokens
        from ftkit.models.language_model import outline_plain
        from ftkit.models.pretrained.base_model import open_base
        from ftkit.planning.simulate import with_layers

        base = with_layers(open_base("random:pythia-14m"), 1)
        model = outline_plain(base, torch.float32, tied=False).to_empty(device="cuda").eval()
        model.body.build_rope_cache(torch.device("cuda"), 64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.01)
        answers = answer_in_tokens(
            model, torch.ones(3), stop_ids=(), max_new_tokens=9, sampling=Sampling()
        )
        next(answers)
        found = []
        for _ in range(2):
            counts.forget()
            next(answers)
            kinds = counts.counted()
            found.append(sum(n for (kind, _), n in kinds.items() if kind in counts.WAITS))
        return found

    assert h100.run(body) == [1, 1]


def test_the_slower_one_of_gpu_and_host_decides_the_speed() -> None:
    from launches import Work, header, row

    # 1 ms of the GPU, and 1 ms of a host that takes 10 us for a launch.
    work = Work(launches=100, other_bytes=round(3.35e12 * 0.8 * 1e-3))
    name, times_us = "full, TinyLlama 1.1B", (2, 20)
    titles = [cell.strip() for cell in header(times_us).splitlines()[0].split("|")]
    cells = [cell.strip() for cell in row(name, work, Work(launches=4), times_us).split("|")]
    assert dict(zip(titles[4:-1], cells[4:-1], strict=True))["GPU"] == "1.0 ms"
    assert titles[6:-1] == ["host, 2 us", "tokens/s", "host, 20 us", "tokens/s"]
    assert cells[6:-1] == ["0.2 ms", "4,096,000", "2.0 ms", "2,048,000"]
    assert header(times_us).splitlines()[1].count("|") == len(titles) - 1
