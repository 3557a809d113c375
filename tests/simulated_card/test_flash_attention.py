"""Flash attention over sequences in a row gives the numbers of torch's public function."""

import pytest
from command import command_environment
from simulated_card.build import needs_card
from simulated_card.machine import cards, machine, with_cards

pytestmark = needs_card


@pytest.mark.slow
def test_a_row_has_the_numbers_of_torchs_function_without_its_fills() -> None:
    def body() -> list[list[object]]:
        from typing import Any

        import torch
        from launches import Count
        from torch.nn.attention.varlen import varlen_attn

        from ftkit.models.bodies import attention
        from ftkit.models.bodies.attention import Scores, Sequences, attend

        lengths = (3, 1, 7)
        starts = torch.tensor([0, 3, 4, 11], dtype=torch.int32).cuda()
        found: list[list[object]] = []
        for groups, window in ((4, None), (2, None), (2, 3)):
            generator = torch.Generator().manual_seed(0)
            q, k, v, outer = (
                torch.randn(11, heads, 8, generator=generator).bfloat16().cuda()
                for heads in (4, groups, groups, 4)
            )
            inputs = [part.requires_grad_() for part in (q, k, v)]
            options: dict[str, Any] = {"scale": 0.4}
            options["window_size"] = (-1 if window is None else window - 1, 0)
            if groups != 4 and attention._takes_groups():
                options["enable_gqa"] = True
            elif groups != 4:
                k, v = (part.repeat_interleave(2, 1) for part in (k, v))
            expected = varlen_attn(q, k, v, starts, starts, 7, 7, **options)
            wanted = (expected, *torch.autograd.grad(expected, inputs, outer))
            sequences, scores = Sequences(lengths, "flash", starts), Scores(0.4, window=window)
            count = Count()
            with count:
                result = attend(inputs[0], inputs[1], inputs[2], sequences, scores)
                gradients = torch.autograd.grad(result, inputs, outer)
            ours = (result, *gradients)
            same = all(a.cpu().equal(b.cpu()) for a, b in zip(ours, wanted, strict=True))
            calls = count.calls.items()
            found.append([same, {n: c for n, c in calls if "flash" in n or "zero" in n}])
        return found

    once = {"_flash_attention_forward": 1, "_flash_attention_backward": 1}
    with machine(with_cards(command_environment(), cards("h100"))) as card:
        assert card.run(body) == [[True, once]] * 3, "no zeros"
