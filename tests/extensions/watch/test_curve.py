"""A curve in a terminal: every value has its place, at any size."""

import math

import pytest

from ftkit.extensions.watch.watch import curve


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right() -> None:
    assert curve([4.0, 3.0, 2.0, 1.0], 10, 4, ascii_only=True) == [
        "4 **",
        "    **",
        "      **",
        "1       **",
    ]


def test_braille_has_two_columns_and_four_rows_in_a_character() -> None:
    assert curve([4.0, 3.0, 2.0, 1.0], 10, 4) == [
        "4 ⠑⢄",
        "    ⠑⢄",
        "      ⠑⢄",
        "1       ⠑⢄",
    ]
    assert curve([1.0, 2.0], 4, 2) == ["2  ⡜", "1 ⡰⠁"]


def test_a_steep_curve_has_no_gap_and_a_wide_range_a_logarithmic_scale() -> None:
    assert curve([2.0, 2.0, 1.0, 1.0], 6, 4, ascii_only=True) == [
        "2 **",
        "    *",
        "    *",
        "1   **",
    ]
    assert curve([1000.0, 100.0, 10.0, 1.0], 9, 4, ascii_only=True) == [
        "1000 *",
        "      *",
        "       *",
        "   1    *",
    ]


def test_equal_values_have_one_label() -> None:
    assert curve([1.0, 1.0], 4, 2, ascii_only=True) == ["", "1 **"]


def test_of_more_values_than_columns_means_are_drawn() -> None:
    values = [4.0, 2.0] * 20 + [2.0, 0.0] * 20
    assert curve(values, 6, 3, ascii_only=True) == ["4 **", "    *", "0   **"]


def test_without_values_there_is_no_curve() -> None:
    assert curve([], 80, 8) == []


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("count", [1, 2, 7, 100, 5000])
@pytest.mark.parametrize(("width", "height"), [(80, 8), (20, 2), (9, 3)])
def test_every_column_has_a_dot_and_no_line_is_too_long(
    count: int, width: int, height: int, ascii_only: bool
) -> None:
    values = [2 + math.sin(i / 5) for i in range(count)]
    lines = curve(values, width, height, ascii_only=ascii_only)
    assert len(lines) == height
    assert max(map(len, lines)) <= width
