"""Media of micro-batches are read ahead, across steps, and never more than a few at a time."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from ftkit.data.media import AHEAD, Coming, Pending, with_media
from ftkit.data.records.media import MEDIA


class Noted(Pending):
    """Media that note when they begin to be read."""

    def __init__(self, number: int, begun: list[int]) -> None:
        super().__init__(lambda: {"number": number})
        self._number, self._all = number, begun

    def begin(self) -> None:
        if self._number not in self._all:
            self._all.append(self._number)
        super().begin()


def micro_batches(begun: list[int], sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Micro-batches of steps with these numbers of them; every third has no media."""
    number = 0
    for size in sizes:
        for place in range(size):
            batch: dict[str, Any] = {"is_last": place == size - 1, "place": number}
            yield batch if number % 3 == 2 else {**batch, MEDIA: Noted(number, begun)}
            number += 1


def step_of(batches: Coming) -> list[dict[str, Any]]:
    found = []
    for batch in batches:
        found.append(batch)
        if batch["is_last"]:
            break
    return found


@pytest.mark.parametrize("sizes", [[1] * 6, [2] * 4, [5, 1, 4], [3, 2, 1]])
def test_media_of_the_next_micro_batches_are_begun_across_steps(sizes: list[int]) -> None:
    begun: list[int] = []
    coming = Coming(micro_batches(begun, sizes))
    taken = 0
    for _ in sizes:
        for batch in with_media(step_of(coming), coming.following()):
            assert batch["place"] == taken
            if MEDIA in batch:
                assert batch[MEDIA] == {"number": taken}
            taken += 1
            reach = min(taken + AHEAD, sum(sizes))
            assert begun == [number for number in range(reach) if number % 3 != 2]
    assert taken == sum(sizes)


def test_what_was_seen_comes_in_its_order() -> None:
    coming = Coming({"place": number} for number in range(5))
    assert [one["place"] for one in islice(coming.following(), 2)] == [0, 1]
    assert next(coming)["place"] == 0
    assert [one["place"] for one in islice(coming.following(), 3)] == [1, 2, 3]
    assert [one["place"] for one in coming] == [1, 2, 3, 4]
