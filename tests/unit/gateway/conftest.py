"""A repository with each kind of chunk, in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository, RepositoryConfig, SnapshotId
from icechunk_async.format.config import LocalFileSystemStore, VirtualChunkContainer
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import group_document, make_array, memory_url, write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async.storage import Storage

NATIVE = bytes(range(256)) * 4
SOURCE = b"somebody else's file"


@dataclass
class Served:
    """A repository and what is in it."""

    repository: Repository
    storage: LatencyStorage
    """Counts what the repository asks its storage for."""
    elsewhere: Storage
    """Holds the source of virtual chunks."""
    first: SnapshotId
    tip: SnapshotId


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """Make ``/air`` (native), ``/g/small`` (inline), ``/v`` (virtual) and two commits; tag v1."""
    container = "file:///elsewhere/"
    config = RepositoryConfig(inline_chunk_threshold_bytes=16).with_virtual_chunk_container(
        VirtualChunkContainer(container, LocalFileSystemStore("/elsewhere"))
    )
    async with open_storage(memory_url()) as plain, open_storage(memory_url()) as elsewhere:
        etag = (await elsewhere.put("file", SOURCE)).token
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.create(
            storage, config=config, authorize_virtual_chunk_access={container: elsewhere}
        ) as repository:
            session = await repository.writable_session("main")
            await write(session, "zarr.json", group_document(title="all"))
            await write(session, "g/zarr.json", group_document())
            await make_array(session, "air", (2048,), (1024,))
            await make_array(session, "g/small", (8,), (4,))
            await make_array(session, "v", (20,), (10,))
            await write(session, "air/c/0", NATIVE)
            await write(session, "g/small/c/0", b"abcd")
            location = f"{container}file"
            session.store.set_virtual_ref("v/c/0", location, offset=2, length=10, checksum=etag)
            session.store.set_virtual_ref("v/c/1", location, offset=0, length=10)
            first = await session.commit("first")
            await repository.create_tag("v1", first)
            session = await repository.writable_session("main")
            await write(session, "g/small/c/1", b"wxyz")
            tip = await session.commit("second")
            storage.forget()
            yield Served(repository, storage, elsewhere, first, tip)
