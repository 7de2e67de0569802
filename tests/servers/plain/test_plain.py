"""The tests that servers share, on a server that keeps every promise."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from icechunk_async.storage import open_storage, registry
from icechunk_async.testing.conformance import StorageConformance
from tests.servers.dependable import dependable
from tests.servers.faulty_network import ConformanceThroughFaults, FaultyHistories
from tests.servers.plain.backend import open_plain
from tests.servers.plain.server import PlainServer
from tests.servers.whole_repository import WholeRepository

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager
    from typing import Any

    from icechunk_async.storage import Storage, StorageDescription


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._loaded, "plain", open_plain)  # type: ignore[arg-type]


@pytest.fixture
async def server() -> AsyncIterator[PlainServer]:
    """Run a server for the test."""
    async with PlainServer() as server:
        yield server


def reopen_plain(description: StorageDescription) -> AbstractAsyncContextManager[Storage]:
    """Open another handle; found by this name in other processes, where nothing is registered."""
    options: dict[str, Any] = dict(description.options)
    return open_plain(description.url, **options)


@asynccontextmanager
async def reopen_with_retries(description: StorageDescription) -> AsyncIterator[Storage]:
    """Open another handle with retries."""
    async with reopen_plain(description) as storage:
        yield dependable(storage)


class TestPlain(StorageConformance):
    """The promises of the client itself."""

    many_keys = 2500
    reopen = staticmethod(reopen_plain)

    @pytest.fixture
    async def storage(self, server: PlainServer) -> AsyncIterator[Storage]:
        """Open an empty storage."""
        location = server.location(f"http://127.0.0.1:{server.port}")
        async with open_storage(location.url, **location.options) as storage:
            yield storage


class TestPlainRepository(WholeRepository):
    """Without faults, but for restarts."""

    @pytest.fixture
    def server(self, server: PlainServer) -> PlainServer:
        """Return the server."""
        return server


class TestPlainHistories(FaultyHistories):
    """With every fault."""

    @pytest.fixture
    def server(self, server: PlainServer) -> PlainServer:
        """Return the server."""
        return server


class TestPlainThroughFaults(ConformanceThroughFaults):
    """With those faults that a client without read-back gets over by retries."""

    reopen = staticmethod(reopen_with_retries)

    @pytest.fixture
    def server(self, server: PlainServer) -> PlainServer:
        """Return the server."""
        return server
