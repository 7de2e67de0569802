"""Whole repositories on the server: many writers, a bad network, a server that restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import anyio.to_thread
import pytest

from icechunk_async.testing.proxy_plan import GCS_BUSY, Respond
from tests.servers.faulty_network import ConformanceThroughFaults, FaultyHistories
from tests.servers.gcs.running import ANONYMOUS, serving
from tests.servers.whole_repository import Location, NewestSpec, WholeRepository

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.gcs.running import RunningServer


class GCSServer:
    """A running server, as the shared tests see it."""

    def __init__(self, running: RunningServer, prefix: str = "/repository") -> None:
        """Stand for ``running``."""
        self._running = running
        self._prefix = prefix

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._running.port

    def location(self, endpoint: str) -> Location:
        """Make a bucket, and answer a place in it."""
        bucket = self._running.make_bucket(f"test-{uuid4()}")
        options = {"endpoint_url": endpoint, "allow_http": True, "token": ANONYMOUS}
        return Location(f"gs://{bucket}{self._prefix}", options)

    async def restart(self) -> None:
        """Kill the process and start it again with what it had acknowledged."""
        await anyio.to_thread.run_sync(self._running.restart)


@pytest.fixture(scope="module")
def durable_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Run a server whose objects survive its end."""
    with serving(tmp_path_factory.mktemp("gcs-durable"), durable=True) as running:
        yield running


class TestGCSRepository(NewestSpec, WholeRepository):
    """Without faults, but for restarts."""

    @pytest.fixture
    def server(self, durable_server: RunningServer) -> GCSServer:
        """Return the server."""
        return GCSServer(durable_server)


class TestGCSHistories(FaultyHistories):
    """With every fault."""

    busy = GCS_BUSY
    failed = Respond(500, b"Internal Error")

    @pytest.fixture
    def server(self, shared_server: RunningServer) -> GCSServer:
        """Return the server."""
        return GCSServer(shared_server)


class TestGCSThroughFaults(ConformanceThroughFaults):
    """The suite, with those faults that retries get over."""

    half = 0
    busy = GCS_BUSY

    @pytest.fixture
    def server(self, shared_server: RunningServer) -> GCSServer:
        """Return the server."""
        return GCSServer(shared_server, prefix="")
