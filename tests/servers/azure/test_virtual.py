"""Virtual chunks in containers of Azure, by every credential that an emulator can check."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.credentials import (
    AzureAccountKey,
    AzureAnonymous,
    AzureRefreshable,
    AzureSasToken,
)
from icechunk_async.errors import VirtualAccessError, VirtualSourceChangedError
from icechunk_async.format.config import AzureStore, VirtualChunkContainer
from icechunk_async.storage import open_storage
from tests.helpers import make_array, memory_url, read
from tests.servers.azure.azurite_server import ACCOUNT, KEY
from tests.servers.azure.conftest import options, service
from tests.servers.azure.test_azure import signature

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from icechunk_async import Session
    from icechunk_async.credentials import Credential
    from tests.servers.azure.azurite_server import Azurite

BODY = bytes(range(200))


async def session_with(
    azurite: Azurite, name: str, credential: Credential
) -> AsyncGenerator[Session]:
    """Return a session that reads a container; the reader says where the server is."""
    prefix = f"az://{name}/dir/"
    container = VirtualChunkContainer(prefix, AzureStore({"account": ACCOUNT}))
    where = {"endpoint_url": azurite.endpoint, "allow_http": True}
    access: dict[str, Any] = {**await credential.storage_options(), **where}
    async with Repository.create(
        memory_url(),
        config=RepositoryConfig(virtual_chunk_containers=(container,)),
        authorize_virtual_chunk_access={prefix: access},
    ) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (10,), (1,))
        session.store.set_virtual_ref("a/c/0", f"{prefix}f%20g.nc", offset=10, length=20)
        yield session


async def test_account_keys_and_sas_tokens_work(azurite: Azurite, container: str) -> None:
    """Fixed, or of a function, which is asked again before its signature ends."""
    async with open_storage(f"az://{container}/dir", **options(azurite.endpoint)) as storage:
        await storage.put("f g.nc", BODY)
    lasting = [timedelta(minutes=1), timedelta(hours=1)]
    asked = 0

    async def ask() -> AzureSasToken:
        nonlocal asked
        lasts = lasting[min(asked, 1)]
        asked += 1
        return AzureSasToken(signature(container, lasts, "r"), datetime.now(UTC) + lasts)

    good: list[Credential] = [
        AzureAccountKey(KEY),
        AzureSasToken(signature(container, timedelta(hours=1), "r")),
        AzureRefreshable(lambda: AzureAccountKey(KEY)),
        AzureRefreshable(ask),
    ]
    for credential in good:
        async for session in session_with(azurite, container, credential):
            for _ in range(3):
                assert await read(session, "a/c/0") == BODY[10:30]
    assert asked == 2


async def test_guards_and_refusals_name_the_location(azurite: Azurite, container: str) -> None:
    """Guards use ETags and times. Anonymous reads work only in a public container."""
    async with open_storage(f"az://{container}/dir", **options(azurite.endpoint)) as storage:
        await storage.put("f g.nc", BODY)
        found = await storage.get("f g.nc")
    location = f"az://{container}/dir/f%20g.nc"
    assert found.last_modified is not None
    async for session in session_with(azurite, container, AzureAccountKey(KEY)):
        before = found.last_modified - timedelta(seconds=1)
        guards: list[str | datetime] = [found.version.token, found.last_modified, '"0x0"', before]
        for at, guard in enumerate(guards):
            session.store.set_virtual_ref(f"a/c/{at}", location, offset=0, length=5, checksum=guard)
            if at < 2:
                assert await read(session, f"a/c/{at}") == BODY[:5]
                continue
            with pytest.raises(VirtualSourceChangedError, match=location):
                await read(session, f"a/c/{at}")
    async for session in session_with(azurite, container, AzureAnonymous()):
        with pytest.raises((VirtualAccessError, VirtualSourceChangedError)) as caught:
            await read(session, "a/c/0")
        assert caught.value.context["location"] == location
    async with service(azurite.endpoint) as client:
        at_service = client.get_container_client(container)
        await at_service.set_container_access_policy({}, public_access="container")
    async for session in session_with(azurite, container, AzureAnonymous()):
        assert await read(session, "a/c/0") == BODY[10:30]
