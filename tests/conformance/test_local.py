"""The local backend keeps every promise of the contract."""

from __future__ import annotations

import errno
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async.storage import open_storage
from icechunk_async.testing.conformance import StorageConformance

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from icechunk_async.storage import Storage


class TestLocal(StorageConformance):
    """Objects in a directory that the first write makes."""

    many_keys = 3_000
    page_keys = 200  # a directory has no pages

    @pytest.fixture
    async def storage(self, tmp_path: Path, no_system_calls: None) -> AsyncIterator[Storage]:
        """Open a directory; any call that blocks the loop is an error."""
        del no_system_calls
        async with open_storage(tmp_path / "not" / "there yet") as storage:
            yield storage

    def undeletable(self, storage: Storage, key: str) -> AbstractAsyncContextManager[None]:
        """Let the system refuse to remove one file."""
        del storage
        return refusing_to_unlink(key.rpartition("/")[2].encode())


@asynccontextmanager
async def refusing_to_unlink(name: bytes) -> AsyncIterator[None]:
    """Let removing the file of this name fail."""
    unlink = os.unlink

    def refuse(path: Any, *, dir_fd: int | None = None) -> None:
        if path == name:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(path, dir_fd=dir_fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        yield
