"""Means of gradients over the ranks, taken once all passes of a step are done."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

_AT_ONCE = 2**24
"""Numbers that are sent together: 64 MiB, which is enough for links between devices."""


@torch.no_grad()
def average_gradients(
    parameters: Sequence[torch.nn.Parameter], send: Callable[[Tensor], object], ranks: int
) -> None:
    """Replace gradients by their means over the ranks, added in float32.

    One that a rank does not have counts there as zeros; one that no rank has stays None.

    Args:
        parameters: trained ones, whole, in the same order on every rank.
        send: adds up a tensor over the ranks, in place.
        ranks: number of them.
    """
    missing = [place for place, p in enumerate(parameters) if p.grad is None]
    found = torch.ones(len(parameters), device=parameters[0].device)
    for place in missing:
        found[place].zero_()
    send(found)
    if missing:  # else the host needs no answer, and waits for none
        counts = found.tolist()
        for place in missing:
            if counts[place]:
                parameters[place].grad = torch.zeros_like(parameters[place])
    for parts in _together([p.grad for p in parameters if p.grad is not None]):
        sizes = [part.numel() for part in parts]
        flat = torch.empty(sum(sizes), dtype=torch.float32, device=parts[0].device)
        torch._foreach_copy_(flat.split(sizes), parts)
        send(flat)
        torch._foreach_copy_(parts, flat.div_(ranks).split(sizes))


def _together(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield neighbouring parts of gradients, flat, that are sent together."""
    parts: list[Tensor] = []
    room = _AT_ONCE
    for gradient in gradients:
        rest = gradient.view(-1)
        while rest.numel():
            part, rest = rest[:room], rest[room:]
            parts.append(part)
            room -= part.numel()
            if not room:
                yield parts
                parts, room = [], _AT_ONCE
    if parts:
        yield parts
