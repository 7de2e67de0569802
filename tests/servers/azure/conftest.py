"""One Azurite for all tests here, and a fresh container for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from azure.core.credentials import AzureNamedKeyCredential
from azure.storage.blob.aio import BlobServiceClient

from tests.servers.azure.azurite_server import ACCOUNT, KEY, Azurite, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    """Run a server that keeps everything in memory."""
    with running(tmp_path_factory.mktemp("azurite") / "log") as server:
        yield server


def service(endpoint: str) -> BlobServiceClient:
    """Return the driver's own client, for what tests arrange behind the backend's back."""
    return BlobServiceClient(endpoint, AzureNamedKeyCredential(ACCOUNT, KEY))


def options(endpoint: str) -> dict[str, Any]:
    """Return how a server is opened."""
    return {
        "account_name": ACCOUNT,
        "account_key": KEY,
        "endpoint_url": endpoint,
        "allow_http": True,
    }


async def make_container(endpoint: str) -> str:
    """Create a new container for a test and return its name."""
    name = f"test-{uuid4()}"
    async with service(endpoint) as client:
        await client.create_container(name)
    return name


@pytest.fixture
async def container(azurite: Azurite) -> AsyncIterator[str]:
    """Create a container, and delete it afterwards, which gives memory back."""
    name = f"test-{uuid4()}"
    async with service(azurite.endpoint) as client:
        await client.create_container(name)
        yield name
        await client.delete_container(name)
