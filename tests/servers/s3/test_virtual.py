"""Virtual chunks in buckets, with every kind of credential, beside the official engine."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from zarr.core.buffer import default_buffer_prototype

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.credentials import (
    S3Anonymous,
    S3FromEnvironment,
    S3Refreshable,
    S3StaticCredentials,
)
from icechunk_async.errors import VirtualChunkError, VirtualSourceChangedError
from icechunk_async.format.config import (
    ChecksumAlgorithm,
    S3CompatibleStore,
    S3Options,
    VirtualChunkContainer,
)
from icechunk_async.storage import open_storage
from tests.helpers import make_array, memory_url
from tests.servers.s3.running import KEYS

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.engine.virtual.chunks import VirtualAccess
    from tests.servers.s3.running import Server

os.environ.setdefault("ICECHUNK_LOG", "error")
icechunk: Any = pytest.importorskip("icechunk", reason="the official engine is not installed")

BODY = bytes(range(200))
STATIC = S3StaticCredentials(
    access_key_id=KEYS["access_key_id"], secret_access_key=KEYS["secret_access_key"]
)


def stored_options(server: Server) -> dict[str, Any]:
    """Return the options for the server in a container's configuration."""
    where = {"endpoint_url": server.endpoint, "region": "us-east-1"}
    return {**where, "allow_http": True, "force_path_style": True}


async def put(server: Server, bucket: str, body: bytes) -> tuple[str, datetime]:
    """Write the source; answer its ETag and time."""
    async with open_storage(f"s3://{bucket}", **server.options()) as storage:
        await storage.put("dir x/f+g.nc", body)
        found = await storage.get("dir x/f+g.nc")
        assert found.last_modified is not None
        return found.version.token, found.last_modified


async def chunks(session: Any, refusal: type[Exception], count: int) -> list[bytes | None]:
    """Return each chunk; None where it is refused."""
    found: list[bytes | None] = []
    for at in range(count):
        try:
            value = await session.store.get(f"a/c/{at}", default_buffer_prototype())
            found.append(value.to_bytes())
        except refusal:
            found.append(None)
    return found


@pytest.mark.parametrize("first", ["ours", "theirs"])
async def test_guards_hold_for_both_engines(
    first: str, ministack_server: Server, tmp_path: Path
) -> None:
    """ETags with and without quotes, and times: recorded by one, enforced by both."""
    server = ministack_server
    bucket = await asyncio.to_thread(server.bucket)
    etag, moment = await put(server, bucket, BODY)
    prefix = f"s3://{bucket}/dir x/"  # the official engine wants prefixes unescaped
    location = f"{prefix}f%2Bg.nc"
    second = timedelta(seconds=1)
    guards = [None, etag, etag.strip('"'), moment, moment - second, "0" * 32]
    expected = [BODY[at : at + 10] if at < 4 else None for at in range(6)]
    container = VirtualChunkContainer(
        prefix, S3CompatibleStore(S3Options(**stored_options(server)))
    )
    if first == "ours":
        config = RepositoryConfig(virtual_chunk_containers=(container,))
        async with Repository.create(tmp_path / "repo", config=config) as repository:
            session: Any = await repository.writable_session("main")
            await make_array(session, "a", (60,), (10,))
            for at, guard in enumerate(guards):
                session.store.set_virtual_ref(
                    f"a/c/{at}", location, offset=at, length=10, checksum=guard
                )
            await session.commit("virtual")
    else:
        their_config = icechunk.RepositoryConfig.default()
        their_config.set_virtual_chunk_container(
            icechunk.VirtualChunkContainer(
                prefix, icechunk.s3_store(s3_compatible=True, **stored_options(server))
            )
        )
        created = await icechunk.Repository.create_async(
            icechunk.local_filesystem_storage(str(tmp_path / "repo")), config=their_config
        )
        session = await created.writable_session_async("main")
        await make_array(session, "a", (60,), (10,))
        for at, guard in enumerate(guards):
            await session.store.set_virtual_ref_async(
                f"a/c/{at}", location, offset=at, length=10, checksum=guard
            )
        await session.commit_async("virtual")
    assert await _read_ours(tmp_path, prefix, server) == expected
    assert await _read_theirs(tmp_path, prefix) == expected
    await put(server, bucket, BODY[::-1])
    replaced = [BODY[::-1][:10], None, None]
    assert (await _read_ours(tmp_path, prefix, server))[:3] == replaced
    assert (await _read_theirs(tmp_path, prefix))[:3] == replaced


async def _read_ours(tmp_path: Path, prefix: str, server: Server) -> list[bytes | None]:
    endpoint = stored_options(server)["endpoint_url"]
    authorized: dict[str, VirtualAccess] = {prefix: replace(STATIC, endpoint_url=endpoint)}
    async with Repository.open(
        tmp_path / "repo", authorize_virtual_chunk_access=authorized
    ) as repository:
        session = await repository.readonly_session("main")
        return await chunks(session, VirtualChunkError, 6)


async def _read_theirs(tmp_path: Path, prefix: str) -> list[bytes | None]:
    opened = await icechunk.Repository.open_async(
        icechunk.local_filesystem_storage(str(tmp_path / "repo")),
        authorize_virtual_chunk_access=icechunk.containers_credentials(
            {prefix: icechunk.s3_credentials(**KEYS)}
        ),
    )
    session = await opened.readonly_session_async("main")
    return await chunks(session, icechunk.IcechunkError, 6)


async def test_every_kind_of_credential_works(
    ministack_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Static, of the environment, asked for, and none; with what the container says stored."""
    server = ministack_server
    bucket = await asyncio.to_thread(server.bucket)
    await put(server, bucket, BODY)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS["secret_access_key"])
    asked: list[str] = []

    async def ask() -> S3StaticCredentials:
        asked.append("async")
        return replace(STATIC, expires_after=datetime.now(UTC) + timedelta(hours=1))

    def ask_plainly() -> S3StaticCredentials:
        asked.append("plain")
        return STATIC

    options = S3Options(
        **stored_options(server),
        anonymous=True,
        requester_pays=True,
        network_stream_timeout_seconds=9,
        checksum_algorithm=ChecksumAlgorithm.Crc32c,
    )
    prefix = f"s3://{bucket}/"
    container = VirtualChunkContainer(prefix, S3CompatibleStore(options))
    accesses: list[VirtualAccess] = [
        None,
        STATIC,
        S3FromEnvironment(),
        S3Anonymous(),
        S3Refreshable(ask),
        S3Refreshable(ask_plainly),
        S3Refreshable(ask, STATIC),
        dict(KEYS),
    ]
    for access in accesses:
        async with Repository.create(
            memory_url(),
            config=RepositoryConfig(virtual_chunk_containers=(container,)),
            authorize_virtual_chunk_access={prefix: access},
        ) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "a", (20,), (10,))
            for at in range(2):
                session.store.set_virtual_ref(
                    f"a/c/{at}", f"{prefix}dir%20x/f+g.nc", offset=at, length=10
                )
            found = await chunks(session, VirtualChunkError, 2)
            assert found == [BODY[:10], BODY[1:11]], access
    assert asked == ["async", "plain"]


async def test_a_source_that_is_gone_is_named(ministack_server: Server) -> None:
    """The object or the whole bucket."""
    server = ministack_server
    bucket = await asyncio.to_thread(server.bucket)
    prefix = f"s3://{bucket}/"
    container = VirtualChunkContainer(
        prefix, S3CompatibleStore(S3Options(**stored_options(server)))
    )
    async with Repository.create(
        memory_url(),
        config=RepositoryConfig(virtual_chunk_containers=(container,)),
        authorize_virtual_chunk_access={prefix: STATIC},
    ) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (20,), (10,))
        session.store.set_virtual_ref("a/c/0", f"{prefix}gone.nc", offset=0, length=10)
        with pytest.raises(VirtualSourceChangedError, match=f"{prefix}gone.nc.*is gone") as caught:
            await session.store.get("a/c/0", default_buffer_prototype())
        assert caught.value.context["location"] == f"{prefix}gone.nc"
