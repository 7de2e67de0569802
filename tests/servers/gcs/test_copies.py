"""Copies between buckets: the server copies."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

from tests.servers.copies import check_copy_by_the_service, check_shallow_copy

if TYPE_CHECKING:
    from tests.servers.gcs.running import RunningServer


async def test_repository_is_copied_by_the_server(server: RunningServer, bucket: str) -> None:
    """From one bucket to another; no chunk is read or written."""
    second = server.make_bucket(f"second-{uuid4()}")
    options = {"endpoint_url": server.url, "allow_http": True, "token": "anonymous"}
    await check_copy_by_the_service(f"gs://{bucket}", f"gs://{second}", options)


async def test_shallow_copy_reads_chunks_in_the_bucket_of_its_origin(
    server: RunningServer, bucket: str
) -> None:
    """The reader says where the server is."""
    second = server.make_bucket(f"second-{uuid4()}")
    options = {"endpoint_url": server.url, "allow_http": True, "token": "anonymous"}
    await check_shallow_copy(f"gs://{bucket}", f"gs://{second}", options)
