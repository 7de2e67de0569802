"""The official engine and ours take turns on one bucket."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async import Repository
from icechunk_async.storage import open_storage
from tests.helpers import make_array, read, write

if TYPE_CHECKING:
    from tests.servers.s3.running import Server

os.environ.setdefault("ICECHUNK_LOG", "error")
icechunk = pytest.importorskip("icechunk", reason="the official engine is not installed")


def theirs(server: Server, bucket: str) -> Any:
    """Return the official engine's storage for a bucket."""
    options: dict[str, Any] = server.options()
    return icechunk.s3_storage(
        bucket=bucket, prefix="a/repository", force_path_style=True, **options
    )


def begin(storage: Any, spec: int) -> None:
    """Create a repository with the official engine. Blocks."""
    session = icechunk.Repository.create(storage, spec_version=spec).writable_session("main")
    zarr.create_array(
        session.store, name="a", shape=(4,), chunks=(1,), dtype="uint8", compressors=None
    )[:] = np.arange(4)
    session.commit("theirs")


def go_on(storage: Any, expected: list[int]) -> None:
    """Read with the official engine what is there, and commit. Blocks."""
    repository = icechunk.Repository.open(storage)
    session = repository.writable_session("main")
    array = zarr.open_array(session.store, path="a")
    assert list(np.asarray(array[:])) == expected
    array[3] = 33
    session.commit("theirs again")


@pytest.mark.parametrize("spec", [1, 2])
async def test_what_they_wrote_is_continued_by_us_and_read_by_them(
    ministack_server: Server, spec: int
) -> None:
    """They create; we read and commit; they read and commit; we read."""
    bucket = await asyncio.to_thread(ministack_server.bucket)
    storage = theirs(ministack_server, bucket)
    await asyncio.to_thread(begin, storage, spec)
    options = dict(ministack_server.options())
    url = f"s3://{bucket}/a/repository"
    async with Repository.open(url, storage_options=options) as repository:
        assert repository.spec_version == spec
        session = await repository.writable_session("main")
        assert await read(session, "a/c/2") == bytes([2])
        await write(session, "a/c/1", bytes([11]))
        await session.commit("ours")
    await asyncio.to_thread(go_on, storage, [0, 11, 2, 3])
    async with Repository.open(url, storage_options=options) as repository:
        reader = await repository.readonly_session("main")
        assert await read(reader, "a/c/3") == bytes([33])
        messages = [info.message async for info in repository.ancestry(branch="main")]
        assert messages[:3] == ["theirs again", "ours", "theirs"]


@pytest.mark.parametrize("spec", [1, 2])
async def test_what_we_wrote_is_continued_by_them(ministack_server: Server, spec: int) -> None:
    """We create; they read and commit; we read."""
    bucket = await asyncio.to_thread(ministack_server.bucket)
    url, options = f"s3://{bucket}/a/repository", dict(ministack_server.options())
    async with Repository.create(url, spec_version=spec, storage_options=options) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (4,), (1,))
        for number in range(4):
            await write(session, f"a/c/{number}", bytes([number]))
        await session.commit("ours")
    await asyncio.to_thread(go_on, theirs(ministack_server, bucket), [0, 1, 2, 3])
    async with Repository.open(url, storage_options=options) as repository:
        reader = await repository.readonly_session("main")
        assert await read(reader, "a/c/3") == bytes([33])


async def test_both_stamp_writes_alike(ministack_server: Server) -> None:
    """An object of theirs has the id of its write where ours has it."""
    bucket = await asyncio.to_thread(ministack_server.bucket)
    await asyncio.to_thread(begin, theirs(ministack_server, bucket), 2)
    options = dict(ministack_server.options())
    async with open_storage(f"s3://{bucket}/a/repository", **options) as storage:
        reply = await storage._transport.read("HEAD", "a/repository/repo")  # type: ignore[attr-defined]
        assert reply.headers["x-amz-meta-icechunkwriteid"]
