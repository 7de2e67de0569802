"""Sets of ids in columns, beside Python's own."""

from __future__ import annotations

import random

import numpy as np
import pytest

from icechunk_async.format.id_set import IdSet, parse_ids
from icechunk_async.format.ids import ChunkId


def columns(ids: list[bytes]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Return ids as the set takes them."""
    return np.frombuffer(b"".join(ids), np.uint8).reshape(len(ids), 12)


@pytest.mark.parametrize("seed", range(5))
def test_the_set_holds_exactly_the_added_ids(seed: int) -> None:
    """Among ids that differ in a single byte, anywhere, added in parts and repeatedly."""
    rng = random.Random(seed)
    ids = [
        bytes(12 if it != place else value for it in range(12))
        for place in range(12)
        for value in (0, 1, 127, 128, 255)
    ]
    model: set[bytes] = set()
    found = IdSet()
    assert not found.contains(columns(ids)).any()
    for _ in range(6):
        part = rng.choices(ids, k=rng.randrange(12))
        found.add(columns(part))
        model |= set(part)
        if rng.random() < 0.5:
            assert found.contains(columns(ids)).tolist() == [it in model for it in ids]
    assert found.contains(columns(ids)).tolist() == [it in model for it in ids]
    assert len(found) == len(model)


def test_it_grows_in_steps() -> None:
    """Many ids in many parts, of which half are repeated."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 256, (300_000, 12), np.uint8)
    found = IdSet()
    for start in range(0, len(ids), 10_000):
        found.add(ids[start : start + 10_000])
        found.add(ids[: start // 10])
    assert len(found) == len(ids)
    assert found.contains(ids).all()
    assert not found.contains(ids ^ np.uint8(1)).any()


def test_names_are_read_as_one_by_one() -> None:
    """Many at once give what each gives alone."""
    ids = [ChunkId.random() for _ in range(100)] + [ChunkId(bytes(12)), ChunkId(b"\xff" * 12)]
    raw, valid = parse_ids([str(it) for it in ids])
    assert valid.all()
    assert [row.tobytes() for row in raw] == ids
    raw, valid = parse_ids([])
    assert (raw.shape, len(valid)) == ((0, 12), 0)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "0" * 19,
        "0" * 21,
        "0" * 19 + "1",  # more bits than an id has
        "0" * 18 + "U0",
        "0" * 18 + "a0",
        "0" * 18 + "O0",
        "0" * 18 + "é0",
        "0" * 18 + "\x000",
        ".tmp-00000000000000000000",
    ],
)
def test_other_names_are_not_ids(name: str) -> None:
    """Lenient spellings, other lengths or letters, and left-over bits are refused."""
    _, valid = parse_ids([str(ChunkId.random()), name, str(ChunkId.random())])
    assert valid.tolist() == [True, False, True]
