"""A repository that keeps what never changes: what that saves, and what must not be kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.format.config import S3Store, VirtualChunkContainer
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID
from icechunk_async.format.layout import is_immutable
from icechunk_async.storage import CacheOptions, open_storage
from icechunk_async.zarr import VirtualChunkSpec
from tests.helpers import make_array, memory_url, read, write
from tests.unit.storage.cache_tools import Counting, opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CHUNK = b"x" * 1000


class Noting(Counting):
    """Remembers what was read."""

    def __init__(self, *arguments: Counting) -> None:
        super().__init__(*arguments)
        self.keys: list[str] = []

    async def before(self, operation: str, key: str) -> None:
        """Remember."""
        if operation == "get":
            self.keys.append(key)


@pytest.fixture
async def storage(spec: int) -> AsyncIterator[Noting]:
    """Open a storage with a repository of one chunk."""
    async with opened() as plain:
        async with Repository.create(plain, spec_version=spec) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "a", (1000,), (1000,))
            await write(session, "a/c/0", CHUNK)
            await session.commit("one chunk")
        yield Noting(plain)


async def read_chunk(storage: Noting, options: CacheOptions) -> list[str]:
    """Open the repository as another process would, and read; answer what was asked for."""
    storage.keys.clear()
    async with Repository.open(storage, cache=options) as repository:
        session = await repository.readonly_session("main")
        for _ in range(2):
            assert await read(session, "a/c/0") == CHUNK
        statistics = repository.cache_statistics
    assert statistics is not None
    assert statistics.memory_hits >= (1 if options.memory_bytes else 0)
    return sorted({key.partition("/")[0] for key in storage.keys})


async def test_cached_repository_requests_immutable_files_once(
    storage: Noting, spec: int, tmp_path: Path
) -> None:
    """Then only for what may change; without a directory until the repository closes."""
    disk = CacheOptions(directory=tmp_path)
    first = await read_chunk(storage, disk)
    assert {"chunks", "manifests", "snapshots"} <= set(first)
    assert storage.keys.count(next(key for key in storage.keys if key.startswith("chunks"))) == 1
    changing = {"repo", "config.yaml", "refs", *(["snapshots"] if spec == 1 else [])}
    assert set(await read_chunk(storage, disk)) <= changing
    assert await read_chunk(storage, CacheOptions()) == first


async def test_without_cache_option_there_are_no_statistics(storage: Noting) -> None:
    """There is no cache, and so no statistics."""
    async with Repository.open(storage) as repository:
        assert repository.cache_statistics is None


async def test_recreated_repository_is_not_served_from_the_old_cache(
    spec: int, tmp_path: Path
) -> None:
    """The first snapshot has the same id in all repositories, and another time in each."""
    cache = CacheOptions(memory_bytes=0, directory=tmp_path)
    times = set()
    for _ in range(2):
        async with opened() as storage:
            async with Repository.create(storage, spec_version=spec, cache=cache) as repository:
                found = await repository.lookup_snapshot(INITIAL_SNAPSHOT_ID)
            async with Repository.open(storage, cache=cache) as repository:
                session = await repository.readonly_session("main")
                assert session.snapshot_id == INITIAL_SNAPSHOT_ID
                base = await repository.engine.assets.snapshot(INITIAL_SNAPSHOT_ID)
                times.add(base.flushed_at)
                assert base.flushed_at == found.flushed_at
    assert len(times) == 2


@pytest.mark.parametrize(
    ("key", "spec1", "spec2"),
    [
        ("chunks/ABC", True, True),
        ("manifests/ABC", True, True),
        ("transactions/ABC", True, True),
        ("snapshots/ABC", False, True),  # expiration writes them again under spec 1
        (f"snapshots/{INITIAL_SNAPSHOT_ID}", False, False),
        (f"transactions/{INITIAL_SNAPSHOT_ID}", False, False),
        ("repo", False, False),
        ("config.yaml", False, False),
        ("refs/branch.main/ref.json", False, False),
        ("overwritten/repo.1", False, False),
        ("chunks", False, False),
        ("", False, False),
    ],
)
def test_immutable_keys_are_recognized(key: str, spec1: bool, spec2: bool) -> None:  # noqa: FBT001
    """Immutable files have random names and are never written again."""
    assert is_immutable(key, spec_version=1) is spec1
    assert is_immutable(key, spec_version=2) is spec2


async def test_virtual_chunks_are_not_cached(spec: int, tmp_path: Path) -> None:
    """Their sources are not ours, and may change."""
    prefix = "s3://source/data/"
    config = RepositoryConfig(virtual_chunk_containers=(VirtualChunkContainer(prefix, S3Store()),))
    async with (
        opened() as storage,
        open_storage(memory_url()) as source,
        Repository.create(
            storage,
            spec_version=spec,
            config=config,
            authorize_virtual_chunk_access={prefix: source},
            cache=CacheOptions(directory=tmp_path),
        ) as repository,
    ):
        session = await repository.writable_session("main")
        await make_array(session, "a", (1000,), (1000,))
        chunk = VirtualChunkSpec((0,), f"{prefix}chunks/file", 0, 1000)
        session.store.set_virtual_refs("a", [chunk])
        for body in (b"a" * 1000, b"b" * 1000):
            await source.put("chunks/file", body)
            assert await read(session, "a/c/0") == body
