"""The fsspec backend keeps the promises that it makes for two kinds of file systems.

They hold their objects in fsspec's memory and on local disks, but write them in one step, which
fsspec's own do not: ``tests/unit/backends/test_fsspec_storage.py`` is about those.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

import pytest

pytest.importorskip("fsspec", reason="the driver of the fsspec backend is not installed")

from icechunk_async.testing.conformance import StorageConformance
from icechunk_async_fsspec import open_filesystem
from tests.unit.backends.exclusive import ExclusiveLocal, ExclusiveMemory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from icechunk_async.storage import Storage, StorageDescription


@pytest.mark.thorough
class TestMemory(StorageConformance):
    """Whole objects and no folders, as in a bucket."""

    many_keys = 1_000  # fsspec looks at every object of its memory for every folder

    @pytest.fixture
    async def storage(self) -> AsyncIterator[Storage]:
        """Open a folder that nobody else uses."""
        filesystem = ExclusiveMemory(skip_instance_cache=True)
        folder = f"/{uuid4()}"
        async with open_filesystem(filesystem, folder) as storage:
            yield storage
        filesystem.rm(folder, recursive=True) if filesystem.exists(folder) else None

    @staticmethod
    def reopen(description: StorageDescription) -> AbstractAsyncContextManager[Storage]:
        """Open the same folder, not by fsspec's own memory."""
        path = description.url.removeprefix("fsspec+memory://")
        return open_filesystem(ExclusiveMemory(skip_instance_cache=True), path)

    def undeletable(self, storage: Storage, key: str) -> AbstractAsyncContextManager[None]:
        """Let the file system refuse to remove one object."""
        return _refusing_to_remove(storage, key)


class TestLocal(StorageConformance):
    """Files and folders."""

    many_keys = 1_000
    page_keys = 200  # a directory has no pages
    deviations: ClassVar = {
        "test_a_deleted_key_can_be_written_again": "a folder that a deletion emptied stays, and "
        "no file can take its name: removing it would race with a write into it",
    }

    @pytest.fixture
    async def storage(self, tmp_path: Path) -> AsyncIterator[Storage]:
        """Open a folder that is not there yet."""
        filesystem = ExclusiveLocal(skip_instance_cache=True, auto_mkdir=True)
        async with open_filesystem(filesystem, str(tmp_path / "not there" / "yet")) as storage:
            yield storage

    @staticmethod
    def reopen(description: StorageDescription) -> AbstractAsyncContextManager[Storage]:
        """Open the same folder, not by fsspec's own local disks."""
        path = description.url.removeprefix("fsspec+file://")
        filesystem = ExclusiveLocal(skip_instance_cache=True, auto_mkdir=True)
        return open_filesystem(filesystem, path)

    def undeletable(self, storage: Storage, key: str) -> AbstractAsyncContextManager[None]:
        """Let the file system refuse to remove one file."""
        return _refusing_to_remove(storage, key)


@asynccontextmanager
async def _refusing_to_remove(storage: Any, key: str) -> AsyncIterator[None]:
    filesystem = storage._folder._filesystem
    remove = filesystem.rm_file

    def refuse(path: str) -> None:
        if path.endswith(key):
            raise PermissionError(path)
        remove(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filesystem, "rm_file", refuse)
        yield
