"""Zarr's own suite for stores, unmodified, for both format versions on memory and local disks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from zarr.core.buffer import cpu, default_buffer_prototype
from zarr.testing.store import StoreTests

from icechunk_async import Repository
from tests.helpers import memory_url
from tests.unit.zarr.any_keys import AnyKeyStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from zarr.core.buffer import Buffer


class _Suite(StoreTests[AnyKeyStore, cpu.Buffer]):
    """The suite's fixtures, over a session of a new repository."""

    store_cls = AnyKeyStore
    buffer_cls = cpu.Buffer
    spec_version: ClassVar[int]
    local: ClassVar[bool]
    deviations: ClassVar = {
        "test_serializable_store": "a writable session does not pickle: a copy could not commit",
    }

    async def set(self, store: AnyKeyStore, key: str, value: Buffer) -> None:
        """Write around the store under test: into the session."""
        await AnyKeyStore(store.inner.session).set(key, value)

    async def get(self, store: AnyKeyStore, key: str) -> Buffer:
        """Read around the store under test: from the session."""
        workspace = store.inner.session.workspace
        data = await workspace.read_chunk(f"/{key}", ())
        assert data is not None
        return default_buffer_prototype().buffer.from_bytes(data[1:])

    @pytest.fixture
    async def store_kwargs(self, tmp_path: Path) -> AsyncIterator[dict[str, Any]]:
        """Open a repository for the length of a test."""
        url = (tmp_path / "repository").as_uri() if self.local else memory_url()
        async with Repository.create(url, spec_version=self.spec_version) as repository:
            yield {"session": await repository.writable_session("main"), "read_only": False}

    def test_store_repr(self, store: AnyKeyStore) -> None:
        """Show session and mode."""
        assert repr(store.inner).startswith("IcechunkStore(<writable session on 'main' at ")

    def test_store_supports_writes(self, store: AnyKeyStore) -> None:
        """It does."""
        assert store.supports_writes

    def test_store_supports_listing(self, store: AnyKeyStore) -> None:
        """It does."""
        assert store.supports_listing


class TestMemorySpec1(_Suite):
    """Format version 1 in memory."""

    spec_version = 1
    local = False


class TestMemorySpec2(_Suite):
    """Format version 2 in memory."""

    spec_version = 2
    local = False


class TestLocalSpec1(_Suite):
    """Format version 1 on a local disk."""

    spec_version = 1
    local = True


class TestLocalSpec2(_Suite):
    """Format version 2 on a local disk."""

    spec_version = 2
    local = True
