"""The processes in which the conformance suite works on one storage."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from icechunk_async.storage import open_storage, registry
from icechunk_async.testing.conformance._processes import PROCESSES, create_in_processes

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from icechunk_async.storage import Storage, StorageDescription


def refuse_to_open(description: StorageDescription) -> AbstractAsyncContextManager[Storage]:
    """Fail in the other process."""
    raise ConnectionRefusedError(description.url)


def test_work_that_fails_is_told_and_leaves_the_next_work_alone(tmp_path: Path) -> None:
    """The same processes serve again; after an error others take their place."""

    async def describe() -> StorageDescription:
        async with open_storage(tmp_path) as storage:
            return storage.description

    description = asyncio.run(describe())
    for first in ("a", "b"):
        keys = [f"{first}{number}" for number in range(5)]
        won = create_in_processes(registry.reopen, description, keys)
        assert len(won) == PROCESSES
        assert sorted(key for winner in won for key in winner) == keys
        with pytest.raises(ConnectionRefusedError):
            create_in_processes(refuse_to_open, description, keys)
