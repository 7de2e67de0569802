"""Copies between buckets: the server copies."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

from icechunk_async import Repository
from tests.helpers import make_array, write

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
