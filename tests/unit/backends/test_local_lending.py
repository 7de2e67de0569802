"""Arrays that are written without being copied, while their owner may stop waiting."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from icechunk_async._runtime.concurrency import gather
from icechunk_async.storage import open_storage

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_large_array_is_written_from_where_it_is(tmp_path: Path) -> None:
    """The bytes are not copied before the system has them."""
    array = np.arange(1 << 20, dtype=np.uint8)
    async with open_storage(tmp_path) as storage:
        with pytest.MonkeyPatch.context() as patch:
            written: list[object] = []
            original = os.write

            def write(fd: int, data: memoryview) -> int:
                written.append(data.obj)
                return original(fd, data)

            patch.setattr(os, "write", write)
            await storage.put("a", memoryview(array))
            assert [it for it in written if it is array]
        assert (await storage.get("a")).data == array.tobytes()


async def test_an_array_that_was_taken_back_while_it_was_written_gets_no_name(
    tmp_path: Path,
) -> None:
    """Nobody sees an object of which a part is what its owner did next."""
    blocked, go_on = threading.Event(), threading.Event()
    original = os.write
    array = np.ones(1 << 20, np.uint8)

    def wait(fd: int, data: memoryview) -> int:
        blocked.set()
        go_on.wait(240)
        return original(fd, data)

    async with open_storage(tmp_path) as storage:
        await storage.put("a/old", b"old")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "write", wait)

            async def let_go() -> None:
                await asyncio.to_thread(blocked.wait, 240)
                raise LookupError  # cancels the put

            with pytest.raises(LookupError):
                await gather(storage.put("a/new", memoryview(array)), let_go())
            array[:] = 2
            go_on.set()
        await storage.put("a/after", b"works")
    assert sorted(it.name for it in (tmp_path / "a").iterdir()) == ["after", "old"]
