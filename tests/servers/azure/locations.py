"""Azurite as the tests of whole repositories ask for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from uuid import uuid4

from azure.core.credentials import AzureNamedKeyCredential
from azure.storage.blob import BlobServiceClient

from tests.servers.azure.azurite_server import ACCOUNT, KEY
from tests.servers.azure.conftest import options
from tests.servers.whole_repository import Location

if TYPE_CHECKING:
    from tests.servers.azure.azurite_server import Azurite


class AzureServer:
    """A `Server`; each place is a container."""

    def __init__(self, azurite: Azurite) -> None:
        self._azurite = azurite

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._azurite.port

    def location(self, endpoint: str) -> Location:
        """Make a container, by the direct way, and answer how it is reached."""
        name = f"test-{uuid4()}"
        with BlobServiceClient(self._azurite.endpoint, AzureNamedKeyCredential(ACCOUNT, KEY)) as it:
            it.create_container(name)
        return Location(f"az://{name}", options(f"{endpoint}/{ACCOUNT}"))

    async def restart(self) -> None:
        """Stop the server, breaking connections, and start it on what it has on disk."""
        await asyncio.to_thread(self._azurite.stop)
        await asyncio.to_thread(self._azurite.start)
