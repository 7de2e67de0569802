"""Coordinates of rows find their places, and nothing that is not there finds one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import (
    AlreadyExistsError,
    AmbiguousCoordinatesError,
    InvalidInputError,
    MissingCoordinatesError,
    OutsideGridError,
    UnsortedCoordinatesError,
)
from icechunk_async.spark.grid import Axis, Steps, check_unambiguous
from icechunk_async.spark.write.growth import axis_to_append


def places(values: Any, given: Any, **more: Any) -> list[int]:
    """Return the places of coordinates."""
    axis = Axis("x", np.asarray(values), **more)
    found: list[int] = axis.finder().places(np.asarray(given)).tolist()
    return found


def test_coordinates_may_be_in_any_order_and_of_any_kind() -> None:
    """Numbers are rounded as the array stores its coordinates; text is compared whole."""
    assert places([3, 1, 2], [1, 2, 3]) == [1, 2, 0]
    assert places(np.array([0.1, 0.2], "f4"), np.array([0.2, 0.1])) == [1, 0]
    assert places(["b", "a"], np.array(["a", "b"], object)) == [1, 0]
    days = np.array(["2020-01-02", "2020-01-01"], "M8[us]")
    assert places(days, days.astype("M8[ns]")) == [0, 1]
    assert places(np.array([1, 2], "m8[us]"), np.array([2], "m8[us]")) == [1]


@pytest.mark.parametrize(
    ("values", "given", "error"),
    [
        ([1, 2], [3], OutsideGridError),
        ([1, 2], [1.5], OutsideGridError),
        (np.array([1, 2], "i1"), [257], OutsideGridError),
        (["ab", "cd"], np.array(["abc"], object), OutsideGridError),
        ([], np.array([1.0]), OutsideGridError),
        ([1.0, 2.0], [np.nan], MissingCoordinatesError),
        (np.array([0], "M8[us]"), np.array(["NaT"], "M8[us]"), MissingCoordinatesError),
        ([1, 2], np.array(["1"], object), InvalidInputError),
        (np.array([0], "M8[us]"), [0], InvalidInputError),
    ],
)
def test_unknown_coordinates_are_refused(values: Any, given: Any, error: type[Exception]) -> None:
    """They are not rounded, wrapped around or cut off to whole numbers."""
    with pytest.raises(error):
        places(values, given)


def test_late_coordinates_have_places() -> None:
    """Before the first that may be appended; the write says what becomes of them."""
    assert places([1, 2, 3], [3, 2], first=2) == [2, 1]


@given(
    st.sampled_from(["i1", "u1", "i8", "f4", "f8", "M8[us]"]),
    st.integers(-5, 5).filter(bool),
    st.lists(st.integers(-3, 60), min_size=1, max_size=8),
)
def test_steps_give_the_index_of_later_coordinates(
    dtype: str, step: int, wanted: list[int]
) -> None:
    """As counting does; what lies between, before or too far has no number."""
    kind = np.dtype(dtype)
    start = 60 if step < 0 else 0
    if kind.kind == "u" or kind.itemsize == 1:
        wanted = [it % 10 for it in wanted]
    every = (start + step * np.arange(-4, 64)).astype("i8")
    values = every[4:7].astype(kind)
    steps = Steps.after(values, 50)
    assert steps is not None
    found = steps.number(every[np.array(wanted) + 4].astype(kind))
    expected = [it - 2 if 1 <= it - 2 <= 50 else -1 for it in wanted]
    if kind.itemsize > 1:
        assert found.tolist() == expected
        np.testing.assert_array_equal(steps.values(3), every[7:10].astype(kind))
    if abs(step) > 1 and kind.kind != "u":
        between = (every[7:9] + 1).astype(kind)
        assert steps.number(between).tolist() == [-1, -1]


def test_steps_of_times_are_exact() -> None:
    """A microsecond beside the place, thousands of days after the last one."""
    days = np.arange("2000-01-01", "2000-01-04", dtype="M8[D]").astype("M8[us]")
    steps = Steps.after(days, 10**6)
    assert steps is not None
    far = days[-1:] + np.timedelta64(300_000, "D")
    assert steps.number(far).tolist() == [300_000]
    assert steps.number(far + np.timedelta64(1, "us")).tolist() == [-1]


def test_only_equal_steps_can_be_continued() -> None:
    """Anything else must be named."""
    assert Steps.after(np.array([1, 2, 4]), 9) is None
    assert Steps.after(np.array([1]), 9) is None
    assert Steps.after(np.array([2, 2]), 9) is None
    assert Steps.after(np.array(["a", "b"]), 9) is None
    with pytest.raises(InvalidInputError, match="append-values"):
        axis_to_append("x", np.array([1, 2, 4]), None, indexed=False)


def test_duplicate_coordinates_are_refused() -> None:
    """Which of the two?"""
    check_unambiguous("x", np.array([2, 1]))
    for values in (np.array([1, 2, 1]), np.array(["a", "a"]), np.array([np.nan, np.nan])):
        with pytest.raises(AmbiguousCoordinatesError, match="2 times"):
            check_unambiguous("x", values)


def test_listed_coordinates_must_continue_the_order() -> None:
    """Where there is one; they are new and of the right kind."""
    axis, most = axis_to_append("x", np.array([1, 5]), (7, 8), indexed=False)
    assert (axis.values.tolist(), axis.first, most) == ([1, 5, 7, 8], 2, 4)
    assert axis_to_append("x", np.array([5, 1, 3]), (4, 2), indexed=False)[1] == 5
    assert axis_to_append("x", np.array([], int), (2, 3, 1), indexed=False)[1] == 3
    with pytest.raises(UnsortedCoordinatesError, match="in their order after 5"):
        axis_to_append("x", np.array([1, 5]), (4,), indexed=False)
    with pytest.raises(UnsortedCoordinatesError):
        axis_to_append("x", np.array([5, 1]), (0, 2), indexed=False)
    with pytest.raises(AlreadyExistsError):
        axis_to_append("x", np.array([1, 5]), (5,), indexed=False)
    with pytest.raises(AlreadyExistsError):
        axis_to_append("x", np.array([1, 5]), (6, 6), indexed=False)
    with pytest.raises(InvalidInputError, match="no coordinate of 'x'"):
        axis_to_append("x", np.array([1, 5]), ("later",), indexed=False)
