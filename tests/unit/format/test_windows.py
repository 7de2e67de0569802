"""Pieces of bytes, many at a time."""

from __future__ import annotations

import numpy as np
import pytest

from icechunk_async.format.flatbuffers.buffer import copy_of_rows, put_rows


@pytest.mark.parametrize("size", [1, 3, 8, 12, 99])
def test_pieces_are_copied_from_and_to_any_position(size: int) -> None:
    """Pieces may have any alignment, and may overlap where they are read."""
    data = np.random.default_rng(1).integers(0, 256, 200).astype(np.uint8)
    places = np.array([0, 1, 1, 50, 200 - size])
    rows = copy_of_rows(data, places, size)
    wanted = [data[at : at + size].tolist() for at in places.tolist()]
    assert rows.tolist() == wanted
    target = np.zeros(6 * size, np.uint8)
    put_rows(target, np.array([4, 2, 0]) * size, rows[:3])
    assert target.reshape(6, size).tolist()[::2] == [wanted[2], wanted[1], wanted[0]]
    assert not target.reshape(6, size)[1::2].any()


def test_nothing_is_read_or_written_outside() -> None:
    """Beyond the end there is nothing."""
    data = np.zeros(10, np.uint8)
    for place in (7, 10):
        with pytest.raises(IndexError):
            copy_of_rows(data, np.array([place]), 4)
        with pytest.raises(IndexError):
            put_rows(data, np.array([place]), np.ones((1, 4), np.uint8))
    assert copy_of_rows(data, np.array([], np.int64), 11).shape == (0, 11)
    assert not data.any()
