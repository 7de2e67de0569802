"""Whole repositories on Azurite: without faults, through restarts, through a bad network."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from icechunk_async.testing.proxy_plan import AZURE_BUSY, Respond
from tests.servers.azure.azurite_server import running
from tests.servers.azure.locations import AzureServer
from tests.servers.azure.test_conformance import BACKSLASH, WITH_BACKSLASH
from tests.servers.faulty_network import ConformanceThroughFaults, FaultyHistories
from tests.servers.whole_repository import NewestSpec, WholeRepository

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.azure.azurite_server import Azurite

AZURE_FAILED = Respond(
    500,
    b'<?xml version="1.0" encoding="utf-8"?><Error><Code>InternalError</Code>'
    b"<Message>The server encountered an internal error.</Message></Error>",
    (("Content-Type", "application/xml"), ("x-ms-error-code", "InternalError")),
)
"""How Azure fails."""


# Azurite and the driver take a few milliseconds of one core for each request.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def durable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    """Run a server that keeps its objects on disk, and so through a restart."""
    folder = tmp_path_factory.mktemp("azurite-on-disk")
    with running(folder / "log", folder / "data") as server:
        yield server


class TestAzureRepository(NewestSpec, WholeRepository):
    """On a server that can be restarted."""

    @pytest.fixture
    def server(self, durable: Azurite) -> AzureServer:
        """Return the server on disk."""
        return AzureServer(durable)


class TestAzureHistories(FaultyHistories):
    """No commit is lost or doubled."""

    busy = AZURE_BUSY
    failed = AZURE_FAILED

    @pytest.fixture
    def server(self, azurite: Azurite) -> AzureServer:
        """Return the server in memory."""
        return AzureServer(azurite)


class TestAzureThroughFaults(ConformanceThroughFaults):
    """The suite with retries, behind faults that leave no doubt whether a write landed."""

    half = 1
    busy = AZURE_BUSY
    many_keys = 1000
    deviations: ClassVar = dict.fromkeys(WITH_BACKSLASH, BACKSLASH)

    @pytest.fixture
    def server(self, azurite: Azurite) -> AzureServer:
        """Return the server in memory."""
        return AzureServer(azurite)
