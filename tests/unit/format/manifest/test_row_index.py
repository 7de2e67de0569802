"""Finding coordinates: by arithmetic, by binary search, beyond 63 bits; and sets of them."""

from __future__ import annotations

from itertools import pairwise, product
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.format.manifest.row_index import RowIndex, rows_in
from tests.unit.format.samples import any_coords, coordinates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from icechunk_async.format.manifest.chunk import Coordinates

RANKS = st.integers(0, 4)
FAR = 2**32 - 2


def matrix(
    rows: Sequence[Coordinates], rank: int
) -> np.ndarray[tuple[int, int], np.dtype[np.uint32]]:
    """Return rows as the columns they are kept in."""
    return np.array(rows, np.uint32).reshape(len(rows), rank)


def test_a_full_box_is_found_by_arithmetic() -> None:
    """No keys are kept for it."""
    rows = list(product(range(2, 5), range(7, 9), range(3)))
    index = RowIndex.of(matrix(rows, 3))
    assert index.full
    assert index.keys is None
    assert [index.find(row) for row in rows] == list(range(len(rows)))


def test_sparse_rows_are_found_by_their_place_in_the_box() -> None:
    """One number a row."""
    rows = [(0, 5), (2, 1), (2, 3), (9, 0)]
    index = RowIndex.of(matrix(rows, 2))
    assert not index.full
    assert index.keys is not None
    assert index.keys.shape == (4,)
    assert [index.find(row) for row in rows] == [0, 1, 2, 3]
    assert index.find((2, 2)) is None
    assert index.find((9, 5)) is None


def test_a_box_beyond_63_bits_is_searched_row_by_row() -> None:
    """Three axes of 32 bits do not fit a number."""
    rows = [(0, 0, 0), (0, 1, FAR), (1, 0, 0), (FAR, FAR, FAR)]
    index = RowIndex.of(matrix(rows, 3))
    assert index.keys is None
    assert not index.full
    assert index.ascending
    assert [index.find(row) for row in rows] == [0, 1, 2, 3]
    assert index.find((0, 1, 0)) is None
    assert index.find((1, FAR, FAR)) is None


@pytest.mark.parametrize("bits", [*range(28, 37), *range(60, 70)])
def test_boxes_around_32_and_64_bits_are_searched_rightly(bits: int) -> None:
    """Numbers that are a little too large must not wrap around."""
    last = (2 ** (bits // 3) - 1, 2 ** (bits // 3) - 1, 2 ** (bits - 2 * (bits // 3)) - 1)
    middle = tuple(at // 2 for at in last)
    rows = sorted({(0, 0, 0), (0, 0, last[2]), (0, last[1], 0), middle, (last[0], 0, 0), last})
    index = RowIndex.of(matrix(rows, 3))
    assert index.ascending
    assert [index.find(row) for row in rows] == list(range(len(rows)))
    assert [index.find((at[0], at[1], at[2] ^ 1)) for at in rows] == [None] * len(rows)


def test_rows_out_of_order_do_not_fill_a_box() -> None:
    """Though there are as many."""
    for rows in ([(1,), (0,)], [(0, 1), (0, 0), (1, 0), (1, 1)]):
        index = RowIndex.of(matrix(rows, len(rows[0])))
        assert not index.full
        assert not index.ascending


@pytest.mark.parametrize("far", [1, FAR])
def test_order_is_told_in_small_and_in_large_boxes(far: int) -> None:
    """Equal rows do not ascend, and later axes only count where earlier ones agree."""
    ascending = [(0, 0, far), (0, 1, 0), (far, 0, 0), (far, far, far)]
    assert RowIndex.of(matrix(ascending, 3)).ascending
    for wrong in (
        [ascending[1], ascending[0], *ascending[2:]],
        [*ascending, ascending[-1]],
        [ascending[0], *ascending],
    ):
        assert not RowIndex.of(matrix(wrong, 3)).ascending


def test_a_scalar_has_one_row() -> None:
    """Its coordinates are empty."""
    index = RowIndex.of(matrix([()], 0))
    assert index.find(()) == 0
    assert index.ascending


def test_nothing_is_found_where_there_are_no_rows() -> None:
    """This holds for every rank."""
    for rank in range(3):
        assert RowIndex.of(matrix([], rank)).find((0,) * rank) is None


@pytest.mark.parametrize("wrong", [(), (1,), (1, 1, 1)])
def test_coordinates_of_another_rank_are_not_found(wrong: Coordinates) -> None:
    """A damaged file may hold references that do not fit their array."""
    assert RowIndex.of(matrix([(1, 1)], 2)).find(wrong) is None


@pytest.mark.parametrize("outside", [(-1, 0), (0, -1), (2**32, 0), (2**70, 0), (0, 3)])
def test_coordinates_outside_of_the_box_are_not_found(outside: Coordinates) -> None:
    """Negative ones and those beyond 32 bits too."""
    assert RowIndex.of(matrix(list(product(range(3), range(3))), 2)).find(outside) is None


@given(st.data())
def test_find_matches_a_dictionary(data: st.DataObject) -> None:
    """For rows near and far, present and absent."""
    rank = data.draw(RANKS)
    some = coordinates(rank) | any_coords(rank)
    rows = sorted(data.draw(st.sets(some, max_size=20)))
    index = RowIndex.of(matrix(rows, rank))
    expected = {row: place for place, row in enumerate(rows)}
    assert index.ascending
    for row in [*rows, *data.draw(st.lists(some, max_size=10))]:
        assert index.find(row) == expected.get(row)


@given(st.data())
def test_ascending_is_strict_lexicographic_order(data: st.DataObject) -> None:
    """The rows may have any order and repetitions."""
    rank = data.draw(RANKS)
    rows = data.draw(st.lists(coordinates(rank, 2) | any_coords(rank), max_size=5))
    expected = all(before < after for before, after in pairwise(rows))
    assert RowIndex.of(matrix(rows, rank)).ascending == expected


@given(st.data())
def test_rows_in_is_membership_of_sets(data: st.DataObject) -> None:
    """The rows may be near or far, with repetitions on both sides."""
    rank = data.draw(RANKS)
    lists = st.lists(coordinates(rank, 3) | any_coords(rank), max_size=8)
    rows, others = data.draw(lists), data.draw(lists)
    found = rows_in(matrix(rows, rank), matrix(others, rank))
    assert found.dtype == bool
    assert found.tolist() == [row in set(others) for row in rows]


def test_rows_of_another_rank_are_in_no_matrix() -> None:
    """A scalar's row is not in a matrix of two axes either."""
    for rank in (0, 1, 3):
        rows = matrix([(0,) * rank], rank)
        assert rows_in(rows, matrix([(0, 0)], 2)).tolist() == [False]


def test_coordinates_may_span_all_of_their_range() -> None:
    """On any axis: a step from one row of an axis to the next is then beyond 32 bits."""
    top = 2**32 - 1
    for corners in ([(0, 0), (0, top)], [(0, 0), (top, 0)], [(0, 0, 0), (0, top, 0)]):
        index = RowIndex.of(np.array(corners, np.uint32))
        assert index.ascending
        assert [index.find(corner) for corner in corners] == [0, 1]
        assert index.find(tuple(min(1, it) for it in corners[1])) is None
