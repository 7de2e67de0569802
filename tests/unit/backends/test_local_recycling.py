"""Memory of large reads that is used again, and never while somebody looks at it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from icechunk_async.storage import open_storage
from icechunk_async_local import recycling
from icechunk_async_local.at_once import ReadsAtOnce
from icechunk_async_local.recycling import MAX_BYTES, MIN_BYTES, borrow

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def spare(monkeypatch: pytest.MonkeyPatch) -> list[memoryview]:
    """Begin without spare memory; answer where blocks for short reads will be."""
    blocks: dict[int, list[memoryview]] = {1 << 20: [], 1 << 21: []}
    monkeypatch.setattr(recycling, "_spare", blocks)
    return blocks[1 << 20]


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def test_memory_is_used_again_once_nobody_looks_at_it(spare: list[memoryview]) -> None:
    """However the last one got hold of it."""
    view = borrow(MIN_BYTES)
    where = _address(view)
    piece = np.frombuffer(view.toreadonly()[100:200], np.uint8)[10:20].view(np.uint16)
    view[110:112] = b"\1\2"
    del view
    assert spare == []
    other = borrow(MIN_BYTES)
    assert _address(other) != where
    other[:] = bytes(MIN_BYTES)
    assert piece[0] == 0x0201
    del piece
    assert len(spare) == 1
    again = borrow(1 << 20)
    assert _address(again) == where
    assert len(again) == 1 << 20
    assert _address(borrow(MAX_BYTES)) != where


def test_what_was_given_back_cannot_be_looked_at_by_its_old_name() -> None:
    """Else somebody would see the next one's bytes."""
    view = borrow(MIN_BYTES)
    loan = view.obj
    view.release()
    with pytest.raises((TypeError, BufferError)):
        memoryview(loan)


def test_only_so_much_is_kept() -> None:
    """After many large reads at a time the rest goes back to the system."""
    views = [borrow(size) for _ in range(50) for size in (MIN_BYTES, MAX_BYTES)]
    views.clear()
    kept = [sum(map(len, blocks)) for blocks in recycling._spare.values()]
    assert kept == [12 << 20, 12 << 20]


@pytest.mark.parametrize("length", [MIN_BYTES, 1 << 20, (1 << 20) + 1, MAX_BYTES])
def test_who_keeps_a_read_keeps_at_most_twice_its_memory(length: int) -> None:
    """And gets all that was asked for."""
    view = borrow(length)
    assert len(view) == length
    del view
    kept = [len(block) for blocks in recycling._spare.values() for block in blocks]
    assert length <= sum(kept) <= 2 * length


def test_blocks_begin_with_a_page() -> None:
    """Copying from the system's cache takes twice as long to where the allocator's begin."""
    views = [borrow(MIN_BYTES) for _ in range(3)]
    assert {_address(view) % 4096 for view in views} == {0}


async def test_large_objects_that_are_read_one_after_another_share_memory(
    tmp_path: Path, spare: list[memoryview]
) -> None:
    """And each that is kept stays what it is."""
    if not ReadsAtOnce(tmp_path).active:
        pytest.skip("only Linux on a local file system reads without waiting")
    bodies = [os.urandom(MIN_BYTES) for _ in range(4)]
    async with open_storage(tmp_path) as storage:
        for number, body in enumerate(bodies):
            await storage.put(f"chunks/{number}", body)
        kept = [(await storage.get(f"chunks/{number}")).data for number in range(4)]
        assert [bytes(it) for it in kept] == bodies
        last = kept.pop()
        del kept
        assert len(spare) == 3
        for _ in range(10):
            await storage.get("chunks/0")
        assert len(spare) == 3
        assert bytes(last) == bodies[3]
