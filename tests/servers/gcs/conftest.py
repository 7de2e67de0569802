"""A server for the session, and a separate bucket for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from tests.servers.gcs.running import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.gcs.running import RunningServer


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Run one server for all tests that neither stop it nor set tokens."""
    with serving(tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> RunningServer:
    """Return the server."""
    return shared_server


@pytest.fixture
def bucket(server: RunningServer) -> str:
    """Create a bucket that nobody else uses."""
    return server.make_bucket(f"test-{uuid4()}")
