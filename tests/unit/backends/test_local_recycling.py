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
    """Begin without spare memory."""
    blocks: list[memoryview] = []
    monkeypatch.setattr(recycling, "_spare", blocks)
    return blocks


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
    again = borrow(MAX_BYTES)
    assert _address(again) == where
    assert len(again) == MAX_BYTES


def test_what_was_given_back_cannot_be_looked_at_by_its_old_name() -> None:
    """Else somebody would see the next one's bytes."""
    view = borrow(MIN_BYTES)
    loan = view.obj
    view.release()
    with pytest.raises((TypeError, BufferError)):
        memoryview(loan)


def test_only_so_much_is_kept(spare: list[memoryview]) -> None:
    """After many large reads at a time the rest goes back to the system."""
    views = [borrow(MIN_BYTES) for _ in range(50)]
    views.clear()
    assert len(spare) == 12


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
