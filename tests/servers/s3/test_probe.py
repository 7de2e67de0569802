"""Servers that would lose commits are found out before a repository is made on them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository
from icechunk_async.errors import UnsafeStorageError
from icechunk_async.storage import ObjectInfo, open_storage
from icechunk_async.storage.probe import PROBE_PREFIX, probe_storage
from icechunk_async_s3.connections import Connections
from icechunk_async_s3.transport import Transport
from tests.servers.s3.running import Server, rclone

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def careless_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server that ignores every condition of a write, and answers that all is well."""
    with rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


async def test_a_server_that_ignores_conditions_is_refused(careless_server: Server) -> None:
    """The error names the promises; nothing is left of a repository, nor of the trial."""
    bucket = await asyncio.to_thread(careless_server.bucket)
    url, options = f"s3://{bucket}/repository", careless_server.options()
    result = await probe_storage(url, **options)
    assert {"conditional create", "conditional update"} <= {it.promise for it in result.problems}
    with pytest.raises(UnsafeStorageError, match="conditional create, conditional update"):
        async with Repository.create(url, storage_options=dict(options)):
            pass
    async with open_storage(url, **options) as storage:
        assert [entry async for entry in storage.list_prefix()] == []


async def test_a_documented_service_takes_twenty_requests(
    ministack_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a creation, with a look at each write that was refused."""
    sent: list[str] = []
    send = Transport.send

    async def noted(self: Transport, method: str, *args: Any, **kwargs: Any) -> Any:
        sent.append(method)
        return await send(self, method, *args, **kwargs)

    monkeypatch.setattr(Transport, "send", noted)
    monkeypatch.setattr(Connections, "is_documented", True)
    bucket = await asyncio.to_thread(ministack_server.bucket)
    url, options = f"s3://{bucket}/repository", ministack_server.options()
    async with Repository.create(url, storage_options=dict(options)):
        assert len(sent) <= 20, sent
        assert "HEAD" in sent
    async with open_storage(url, **options) as storage:
        keys = [entry.key async for entry in storage.list_prefix() if isinstance(entry, ObjectInfo)]
        assert not any(key.startswith(PROBE_PREFIX) for key in keys)


async def test_servers_that_keep_their_promises_are_accepted(
    ministack_server: Server, moto_server: Server
) -> None:
    """Every promise is kept, also those that only tools need."""
    for server in (ministack_server, moto_server):
        bucket = await asyncio.to_thread(server.bucket)
        result = await probe_storage(f"s3://{bucket}/repository", **server.options())
        assert result.is_safe, result
        assert {finding.verdict.value for finding in result.findings} == {"kept"}, result
