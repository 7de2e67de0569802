"""Copies between containers of one account: the service copies, large objects in blocks."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async.errors import ObjectNotFoundError, StorageError
from icechunk_async.format.config import AzureStore
from icechunk_async.storage import open_storage
from icechunk_async.storage.extensions import CopiesFrom
from icechunk_async.testing.proxy import FaultProxy
from icechunk_async.testing.proxy_plan import FaultPlan, Respond, Rule
from icechunk_async_azure import copying
from icechunk_async_azure.writing import write_blocks
from tests.servers.azure.azurite_server import ACCOUNT
from tests.servers.azure.conftest import make_container, options
from tests.servers.azure.test_azure import signature
from tests.servers.copies import check_copy_by_the_service, check_shallow_copy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.servers.azure.azurite_server import Azurite

TOO_LARGE = Respond(409, b"", (("x-ms-error-code", "CannotVerifyCopySource"),))
"""The answer of the service to a copy of a large object in one request."""
BODY = bytes(range(256)) * 40


@pytest.fixture
async def second(azurite: Azurite) -> str:
    """Create another container."""
    return await make_container(azurite.endpoint)


@pytest.fixture
async def proxy(azurite: Azurite) -> AsyncIterator[FaultProxy]:
    """Put a proxy before the server."""
    async with FaultProxy("127.0.0.1", azurite.port) as running:
        yield running


async def test_repository_is_copied_by_the_service(
    azurite: Azurite, container: str, second: str
) -> None:
    """From one container to another, then to another prefix of that one; no chunk is read."""
    await check_copy_by_the_service(
        f"az://{container}", f"az://{second}", options(azurite.endpoint)
    )


async def test_each_side_brings_its_own_signature(
    azurite: Azurite, container: str, second: str
) -> None:
    """Tokens that open one container each: the service reads the source by the source's."""
    where = {"account_name": ACCOUNT, "endpoint_url": azurite.endpoint, "allow_http": True}
    tokens = [signature(it, timedelta(hours=1)) for it in (container, second)]
    async with (
        open_storage(f"az://{container}/x", **where, sas_token=tokens[0]) as source,
        open_storage(f"az://{second}/y", **where, sas_token=tokens[1]) as target,
    ):
        assert isinstance(target, CopiesFrom)
        assert target.copies_from(source)
        await source.put("chunks/é", BODY)
        await target.copy_from(source, "chunks/é")
        assert bytes((await target.get("chunks/é")).data) == BODY


async def test_a_missing_source_is_an_error_and_another_account_is_not_copied_from(
    azurite: Azurite, container: str, second: str
) -> None:
    """Nothing is made. Other accounts are not copied from."""
    given = options(azurite.endpoint)
    elsewhere = {**given, "endpoint_url": "http://127.0.0.1:1/devstoreaccount1"}
    async with (
        open_storage(f"az://{container}/x", **given) as source,
        open_storage(f"az://{second}/y", **given) as target,
        open_storage(f"az://{second}/y", **elsewhere) as other,
    ):
        assert isinstance(target, CopiesFrom)
        assert not target.copies_from(other)
        with pytest.raises(ObjectNotFoundError, match="'chunks/none'"):
            await target.copy_from(source, "chunks/none")
        assert not [it async for it in target.list_prefix()]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take objects above a kilobyte for large ones."""
    monkeypatch.setattr(copying, "_ONE_REQUEST_BYTES", 1000)
    monkeypatch.setattr(copying, "_COPIED_BLOCK_BYTES", 1000)


def refusing_one_request(proxy: FaultProxy) -> None:
    """Refuse copies in one request from now on, and note what is asked for."""
    proxy.use(FaultPlan((Rule(TOO_LARGE, method="PUT", path=r"[^?]*/y/[^?]*large$"),)))


async def test_large_object_is_copied_in_blocks(
    azurite: Azurite, container: str, second: str, proxy: FaultProxy, large: None
) -> None:
    """Between containers and within one. What is small and refused is not tried in blocks."""
    del large
    given = options(f"http://127.0.0.1:{proxy.port}/{ACCOUNT}")
    async with (
        open_storage(f"az://{container}/x", **given) as source,
        open_storage(f"az://{second}/y", **given) as target,
    ):
        assert isinstance(target, CopiesFrom)
        await source.put("large", BODY)
        refusing_one_request(proxy)
        await target.copy_from(source, "large")
        assert bytes((await target.get("large")).data) == BODY
        await source.put("small/large", b"x")
        with pytest.raises(StorageError):
            await target.copy_from(source, "small/large")
        version = await target.copy("large", "again/large")
        found = await target.get("again/large")
        assert (bytes(found.data), found.version) == (BODY, version)


async def test_blocks_are_of_one_version(
    container: str, second: str, proxy: FaultProxy, large: None
) -> None:
    """An object that is replaced between two blocks is not mixed."""
    del large
    given = options(f"http://127.0.0.1:{proxy.port}/{ACCOUNT}")
    async with (
        open_storage(f"az://{container}/x", **given) as source,
        open_storage(f"az://{second}/y", **given) as target,
    ):
        assert isinstance(target, CopiesFrom)
        await source.put("large", BODY)
        refusing_one_request(proxy)

        async def replaced(requests: Any, client: Any, task: Any, starts: range, stage: Any) -> Any:
            async def other(block_id: str, start: int) -> None:
                if start:
                    await source.put("large", BODY[::-1])
                await stage(block_id, start)

            return await write_blocks(requests, client, task, starts, other)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copying, "write_blocks", replaced)
            with pytest.raises(StorageError, match="replaced"):
                await target.copy_from(source, "large")
        assert not [it async for it in target.list_prefix()]


async def test_shallow_copy_reads_chunks_in_the_container_of_its_origin(
    azurite: Azurite, container: str, second: str
) -> None:
    """The reader says where the emulator is, and brings the key."""
    given = options(azurite.endpoint)
    config = await check_shallow_copy(f"az://{container}", f"az://{second}", given)
    (named,) = config.virtual_chunk_containers or ()
    assert named.store == AzureStore({"account": ACCOUNT})
