"""The mesh: neighbouring ranks share rows, and together are one rank of the data."""

import itertools

import pytest

from ftkit.recipe.mesh import WHOLE, Mesh, Piece


@pytest.mark.parametrize(
    ("context", "data_ranks", "pieces"),
    [
        (1, [0, 1, 2, 3], [0, 0, 0, 0]),
        (2, [0, 0, 1, 1], [0, 1, 0, 1]),
        (4, [0, 0, 0, 0], [0, 1, 2, 3]),
    ],
)
def test_neighbours_have_pieces_of_the_same_rows(
    context: int, data_ranks: list[int], pieces: list[int]
) -> None:
    mesh = Mesh(world_size=4, context=context)
    assert mesh.data_ranks == 4 // context == len({*data_ranks})
    assert [mesh.data_rank(rank) for rank in range(4)] == data_ranks
    assert [mesh.piece(rank) for rank in range(4)] == [
        Piece(index=i, count=context) for i in pieces
    ]


@pytest.mark.parametrize(("tokens", "count"), [*itertools.product((1, 5, 8, 9), (1, 2, 4))])
def test_pieces_are_equal_and_follow_each_other(tokens: int, count: int) -> None:
    spans = [Piece(index=index, count=count).span(tokens) for index in range(count)]
    places = [place for span in spans for place in range(span.start, span.stop)]
    assert places == list(range(len(places))) and 0 <= len(places) - tokens < count
    assert len({span.stop - span.start for span in spans}) == 1
    assert WHOLE.span(tokens) == slice(0, tokens)
