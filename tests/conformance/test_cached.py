"""A cache keeps the promises of the storage that it is around."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from icechunk_async.storage import CacheOptions, Storage, open_storage, reopen
from icechunk_async.storage.policies.cache import Cached
from icechunk_async.testing.conformance import StorageConformance
from tests.conformance.test_local import refusing_to_unlink

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from icechunk_async.storage import StorageDescription

NEVER_REPLACED = ("shared", "large", "folder/", "one/", "two/", "three/", "missing")
"""Keys that the suite writes once, or reads when they are gone."""


def never(key: str) -> bool:
    """Tell that no object is immutable."""
    del key
    return False


def some(key: str) -> bool:
    """Tell of keys that the suite never replaces that their objects are immutable."""
    return key.startswith(NEVER_REPLACED)


@asynccontextmanager
async def reopen_cached(description: StorageDescription) -> AsyncIterator[Storage]:
    """Open another handle with a separate cache; importable in other processes."""
    async with reopen(description) as storage:
        cached = Cached(storage, CacheOptions(), immutable=some)
        yield cached
        cached.close()


@pytest.mark.thorough
class TestPassesOn(StorageConformance):
    """A cache that was told that everything changes."""

    many_keys = 1_000
    page_keys = 200

    @pytest.fixture
    async def storage(self, tmp_path: Path) -> AsyncIterator[Storage]:
        """Open an empty storage."""
        async with open_storage(tmp_path / "objects") as storage:
            yield Cached(storage, CacheOptions(directory=tmp_path / "cache"), immutable=never)


class TestCached(StorageConformance):
    """Both tiers, for those of the suite's objects that are written once."""

    many_keys = 1_000
    page_keys = 200
    reopen = staticmethod(reopen_cached)

    @pytest.fixture
    async def storage(self, tmp_path: Path) -> AsyncIterator[Storage]:
        """Open an empty storage."""
        async with open_storage(tmp_path / "objects") as storage:
            yield Cached(storage, CacheOptions(directory=tmp_path / "cache"), immutable=some)

    def undeletable(self, storage: Storage, key: str) -> AbstractAsyncContextManager[None]:
        """Let the system refuse to remove one file."""
        del storage
        return refusing_to_unlink(key.rpartition("/")[2].encode())
