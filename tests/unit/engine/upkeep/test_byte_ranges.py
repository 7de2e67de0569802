"""Unions of byte ranges, beside sets of bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from icechunk_async.engine.upkeep.statistics import ByteRanges, Ranges


def ranges(rows: list[tuple[bytes, int, int]]) -> Ranges:
    """Make columns of (object, offset, length)."""
    keys = np.frombuffer(b"".join(key for key, _, _ in rows), np.uint8).reshape(len(rows), 12)
    numbers = np.array([row[1:] for row in rows], np.uint64).reshape(len(rows), 2)
    return Ranges.of(keys, numbers[:, 0], numbers[:, 1])


@pytest.mark.parametrize("seed", range(20))
def test_a_byte_counts_once(seed: int) -> None:
    """Ranges overlap, touch, repeat or contain one another, in any order."""
    rng = random.Random(seed)
    objects = [bytes([0] * 11 + [it]) for it in range(3)] + [bytes([9] + [0] * 11)]
    most = rng.choice([20, 100])
    total = ByteRanges()
    model: set[tuple[bytes, int]] = set()
    for _ in range(rng.randrange(1, 6)):
        rows = [
            (rng.choice(objects), rng.randrange(most), rng.choice([0, 1, 3, rng.randrange(most)]))
            for _ in range(rng.randrange(0, 12))
        ]
        model |= {(key, at) for key, start, size in rows for at in range(start, start + size)}
        total.add(ranges(rows))
        if rng.random() < 0.5:
            assert total.size_bytes() == len(model)
    assert total.size_bytes() == len(model)


def test_touching_ranges_are_merged() -> None:
    """An object of many chunks then takes the memory of one range."""
    key = bytes(12)
    union = ranges([(key, start, 10) for start in range(0, 1000, 10)]).union()
    assert (union.starts.tolist(), union.stops.tolist()) == ([0], [1000])
    many = ranges([(bytes([it] * 12), 5, 10) for it in range(200)]).union()
    assert len(many.starts) == 200


def test_many_ranges_are_merged_incrementally() -> None:
    """Beyond the first 65,536 rows."""
    rng = np.random.default_rng(3)
    total = ByteRanges()
    keys = rng.integers(0, 256, (50_000, 12), np.uint8)
    sizes = np.full(len(keys), 7, np.uint64)
    for offset in (0, 7, 3, 100):
        total.add(Ranges.of(keys, np.full(len(keys), offset, np.uint64), sizes))
    assert total.size_bytes() == 50_000 * 21


def test_far_ends_do_not_overflow() -> None:
    """Offsets go up to 2^63."""
    total = ByteRanges()
    total.add(ranges([(bytes(12), 2**62, 5), (bytes(12), 2**62 + 3, 5), (bytes(12), 0, 1)]))
    assert total.size_bytes() == 9
