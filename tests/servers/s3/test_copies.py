"""Copies between buckets: the server copies, and large objects in parts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async import Packing, Repository
from icechunk_async.errors import ObjectNotFoundError
from icechunk_async.storage import open_storage
from icechunk_async.storage.extensions import CopiesFrom
from icechunk_async_s3 import writing
from icechunk_async_s3.changing import Changer
from tests.helpers import make_array, read, write
from tests.servers.copies import check_copy_by_the_service

if TYPE_CHECKING:
    from tests.servers.s3.running import Server


async def test_repository_is_copied_by_the_server(moto_server: Server) -> None:
    """From one bucket to another; then to another prefix of that one."""
    first, second = [await asyncio.to_thread(moto_server.bucket) for _ in range(2)]
    await check_copy_by_the_service(f"s3://{first}", f"s3://{second}", moto_server.options())


async def test_large_object_is_copied_in_parts(
    moto_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the server refused to copy it in one request."""

    async def refuse(*_: object) -> bool:
        return False

    monkeypatch.setattr(Changer, "copy_from", refuse)
    monkeypatch.setattr(writing, "_COPIED_PART_BYTES", 5 << 20)
    first, second = [await asyncio.to_thread(moto_server.bucket) for _ in range(2)]
    options = moto_server.options()
    body = bytes(range(256)) * (11 << 12)
    async with (
        open_storage(f"s3://{first}/x", **options) as source,
        open_storage(f"s3://{second}/y", **options) as target,
    ):
        assert isinstance(target, CopiesFrom)
        assert target.copies_from(source)
        await source.put("chunks/large", body)
        await target.copy_from(source, "chunks/large")
        assert (await target.get("chunks/large")).data == body
        with pytest.raises(ObjectNotFoundError):
            await target.copy_from(source, "chunks/none")


async def test_a_missing_source_is_an_error_and_another_endpoint_is_not_copied_from(
    moto_server: Server,
) -> None:
    """Nothing is made."""
    bucket = await asyncio.to_thread(moto_server.bucket)
    options = moto_server.options()
    async with (
        open_storage(f"s3://{bucket}/x", **options) as source,
        open_storage(f"s3://{bucket}/y", **options) as target,
        open_storage(f"s3://{bucket}/y", **{**options, "endpoint_url": "http://[::1]:1"}) as other,
    ):
        assert isinstance(target, CopiesFrom)
        assert not target.copies_from(other)
        with pytest.raises(ObjectNotFoundError):
            await target.copy_from(source, "chunks/none")
        assert not [it async for it in target.list_prefix()]


@pytest.mark.parametrize("spec", [1, 2])
async def test_shallow_copy_is_read_by_both_engines(ministack_server: Server, spec: int) -> None:
    """From the bucket of its origin, by a container with the server's address and no secret."""
    first, second = [await asyncio.to_thread(ministack_server.bucket) for _ in range(2)]
    options = ministack_server.options()
    create = Repository.create(
        f"s3://{first}/a b", storage_options=options, spec_version=spec, packing=Packing(9000, 900)
    )
    async with create as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (3000,), (1000,))
        for number, size in enumerate((1000, 1000, 800)):
            await write(session, f"a/c/{number}", bytes([number]) * size + bytes(1000 - size))
        await session.commit("three chunks")
        report = await repository.copy_to(f"s3://{second}/x", storage_options=options, shallow=True)
    prefix = f"s3://{first}/a b/"
    assert report.origin_prefix == prefix
    access = {prefix: dict(options)}
    async with (
        Repository.open(
            f"s3://{second}/x", storage_options=options, authorize_virtual_chunk_access=access
        ) as copy,
        open_storage(f"s3://{second}/x", **options) as storage,
    ):
        assert not [it async for it in storage.list_prefix("chunks/")]
        (container,) = copy.config.virtual_chunk_containers or ()
        assert str(options["secret_access_key"]) not in repr(container)
        session = await copy.readonly_session("main")
        assert await read(session, "a/c/1") == b"\1" * 1000
        assert (await copy.verify("decode")).is_healthy
    await asyncio.to_thread(_read_officially, ministack_server, second, prefix)


def _read_officially(server: Server, bucket: str, prefix: str) -> None:
    """Read all of a copy with the official engine. Blocks."""
    icechunk: Any = pytest.importorskip("icechunk", reason="the official engine is not installed")
    keys: dict[str, Any] = server.options()
    storage = icechunk.s3_storage(bucket=bucket, prefix="x", force_path_style=True, **keys)
    credentials = icechunk.s3_credentials(
        access_key_id=keys["access_key_id"], secret_access_key=keys["secret_access_key"]
    )
    repository = icechunk.Repository.open(
        storage,
        authorize_virtual_chunk_access=icechunk.containers_credentials({prefix: credentials}),
    )
    array = zarr.open_array(repository.readonly_session("main").store, path="a", mode="r")
    assert [int(it) for it in np.asarray(array[::1000])] == [0, 1, 2]
