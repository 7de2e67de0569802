"""Copies between buckets: the server copies."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

from icechunk_async import Repository
from tests.helpers import make_array, read, write

if TYPE_CHECKING:
    from tests.servers.gcs.running import RunningServer


async def test_repository_is_copied_by_the_server(server: RunningServer, bucket: str) -> None:
    """From one bucket to another; no chunk is read or written."""
    second = server.make_bucket(f"second-{uuid4()}")
    options = {"endpoint_url": server.url, "token": "anonymous"}
    async with Repository.create(f"gs://{bucket}/a b", storage_options=options) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (4,), (1,))
        for number in range(4):
            await write(session, f"a/c/{number}", bytes(1000))
        tip = await session.commit("four chunks")
        report = await repository.copy_to(f"gs://{second}/é", storage_options=options)
        assert report.objects_by_service == report.objects_copied - 1
    async with Repository.open(f"gs://{second}/é", storage_options=options) as copy:
        assert (await copy.check_references()).is_whole
        assert await copy.lookup_branch("main") == tip


async def test_shallow_copy_reads_chunks_in_the_bucket_of_its_origin(
    server: RunningServer, bucket: str
) -> None:
    """The reader says where the server is."""
    second = server.make_bucket(f"second-{uuid4()}")
    options = {"endpoint_url": server.url, "token": "anonymous"}
    async with Repository.create(f"gs://{bucket}/a b", storage_options=options) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (4,), (1,))
        await write(session, "a/c/1", b"x" * 1000)
        await session.commit("a chunk")
        report = await repository.copy_to(f"gs://{second}/x", storage_options=options, shallow=True)
    assert report.origin_prefix == f"gs://{bucket}/a b/"
    access = {report.origin_prefix: options}
    async with Repository.open(
        f"gs://{second}/x", storage_options=options, authorize_virtual_chunk_access=access
    ) as copy:
        session = await copy.readonly_session("main")
        assert await read(session, "a/c/1") == b"x" * 1000
