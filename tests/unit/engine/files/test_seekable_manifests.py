"""Lookups in seekable manifests cost few requests and bytes, and find what decoding finds."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async import Repository
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.weighted_cache import WeightedCache
from icechunk_async.engine.files import manifests as manifest_files
from icechunk_async.engine.files.binary_layout import BinaryLayout
from icechunk_async.engine.files.manifests import BlockingManifestFiles
from icechunk_async.errors import FormatError
from icechunk_async.format.ids import ChunkId
from icechunk_async.format.layout import manifest_key
from icechunk_async.format.manifest.chunk import NativeChunk
from icechunk_async.format.manifest.reading import Manifest, decode_manifest
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.manifest.seekable import writing as manifest_seek_write
from icechunk_async.format.manifest.seekable.index import index_size
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from tests.helpers import array_document, memory_url, read, write
from tests.unit.format.seekable import every_second

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from icechunk_async import Session
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates
    from icechunk_async.storage import BlockingStorage, Data, RangeRequest, Retrieved, Version

COUNT = 60_000
SPECS = pytest.mark.parametrize("spec", [1, 2])


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make manifests of this size seekable, to be quick."""
    monkeypatch.setattr(manifest_seek_write, "MIN_SEEKABLE_BYTES", 1 << 20)
    monkeypatch.setattr(manifest_files, "MIN_SEEKABLE_FILE_BYTES", 1 << 18)


async def made(spec: int, url: str = "") -> str:
    """Make a repository of an array with one large manifest."""
    url = url or memory_url()
    async with Repository.create(url, spec_version=spec) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/zarr.json", array_document((2 * COUNT,), (1,)))
        session.workspace.set_refs("/a", every_second(COUNT))
        await session.commit("many")
    return url


async def damage(url: str, *, at: int) -> None:
    """Turn one byte of the manifest over; ``at`` counts from its end."""
    async with open_storage(url) as storage:
        async for entry in storage.list_prefix("manifests/"):
            key = getattr(entry, "key")  # noqa: B009 -- there are no prefixes
            data = bytearray((await storage.get(key)).data)
            data[-at] ^= 0xFF
            await storage.put(key, bytes(data))


async def length(session: Session, chunk: int) -> int | None:
    """Look a chunk up and return its length."""
    handle = await session.workspace.find_chunk("/a", (chunk,))
    if handle is None:
        return None
    assert isinstance(handle.ref, NativeChunk)
    return handle.size_bytes


class Watched:
    """A repository opened through a storage that counts, each request taking a second."""

    def __init__(self, session: Session, storage: LatencyStorage, sizes: list[int]) -> None:
        """Begin to count."""
        self.session = session
        self._storage = storage
        self._sizes = sizes

    async def cost(self, *chunks: int) -> tuple[float, int, int]:
        """Look chunks up concurrently; return seconds, requests, and bytes read."""
        self._storage.forget()
        self._sizes.clear()
        began = asyncio.get_running_loop().time()
        found = await bounded_map(
            lambda chunk: length(self.session, chunk), chunks, limit=len(chunks)
        )
        assert found == [None if chunk % 2 else chunk // 2 + 1 for chunk in chunks]
        seconds = asyncio.get_running_loop().time() - began
        return seconds, self._storage.requests["get"], sum(self._sizes)


def watching(url: str, work: Any) -> None:
    """Run ``work`` on a watched session; its clock counts requests in a row."""

    async def run() -> None:
        sizes: list[int] = []
        async with open_storage(url) as plain:
            get = plain.get

            async def noting(*arguments: Any, **options: Any) -> Any:
                retrieved = await get(*arguments, **options)
                sizes.append(len(retrieved.data))
                return retrieved

            object.__setattr__(plain, "get", noting)
            storage = LatencyStorage(plain, seconds=1)
            async with Repository.open(storage) as repository:
                session = await repository.readonly_session("main")
                await work(Watched(session, storage, sizes))

    _on_virtual_time(run())


def _on_virtual_time[T](work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


@SPECS
def test_first_lookup_reads_a_fraction_of_the_file_in_two_rounds(spec: int) -> None:
    """The index, then pieces at once; a neighbour costs nothing; one far away a round."""
    url = asyncio.run(made(spec))

    async def work(it: Watched) -> None:
        info = next(iter(it.session.workspace.base.manifests.values()))
        seconds, requests, read = await it.cost(COUNT)
        assert seconds == 2
        assert requests <= 4
        assert read < info.size_bytes / 3
        assert await it.cost(COUNT + 2, COUNT + 4, COUNT - 2) == (0, 0, 0)
        seconds, requests, _ = await it.cost(COUNT + 20_000)
        assert (seconds, requests) == (1, 1)

    watching(url, work)


def test_concurrent_lookups_share_what_they_read() -> None:
    """Sixty-four of one stretch read no more than one does."""
    url = asyncio.run(made(2))

    async def work(it: Watched) -> None:
        many = await it.cost(*range(COUNT, COUNT + 128, 2))
        assert many[0] == 2
        assert many[1] <= 4

    watching(url, work)


@SPECS
def test_listing_all_chunks_costs_one_request(spec: int) -> None:
    """Reading all of a manifest does not look for an index, nor do lookups after that."""
    url = asyncio.run(made(spec))

    async def work(it: Watched) -> None:
        await it.cost(1)  # a chunk that is not there: only the whole file tells
        refs = await it.session.workspace.all_refs("/a")
        assert np.array_equal(refs.lengths, every_second(COUNT).lengths)
        assert await it.cost(0, 2, 4, 7) == (0, 0, 0)

    watching(url, work)

    async def at_once(it: Watched) -> None:
        await it.session.workspace.all_refs("/a")
        seconds, requests, _ = await it.cost(0)
        assert (seconds, requests) == (0, 0)

    watching(url, at_once)


@pytest.mark.parametrize("at", [1, 12, 40, 200])
def test_damaged_index_costs_one_request_more(at: int) -> None:
    """The whole file is read where the index is of no use."""
    url = asyncio.run(made(2))
    asyncio.run(damage(url, at=at))

    async def work(it: Watched) -> None:
        seconds, requests, _ = await it.cost(COUNT)
        assert (seconds, requests) == (2, 2)
        assert await it.cost(*range(0, 2 * COUNT, 997)) == (0, 0, 0)

    watching(url, work)


@SPECS
async def test_blocking_lookups_read_a_fraction_of_the_file(spec: int, tmp_path: Path) -> None:
    """Readers without an event loop find the same, by pieces, and in the whole file after many."""
    url = await made(spec, f"file://{tmp_path}")
    wanted = every_second(COUNT)
    async with Repository.open(url) as repository:
        workspace = (await repository.readonly_session("main")).workspace
        node, files = workspace.array("/a"), workspace.assets.blocking
        assert files is not None
        [info] = workspace.base.manifests.values()
        counted = Counted(files.chunks.storage)
        manifests = BlockingManifestFiles(counted, WeightedCache(1_000_000), BinaryLayout(2))

        def find(chunk: int) -> object:
            return manifests.find_ref(info.id, info.size_bytes, node.id, (chunk,))

        assert find(COUNT) == wanted.ref(COUNT // 2)
        assert 0 < counted.read_bytes < info.size_bytes / 3
        before = counted.read_bytes
        assert find(COUNT + 2) == wanted.ref(COUNT // 2 + 1)
        assert counted.read_bytes == before
        for chunk in range(0, 2 * COUNT, 501):
            assert find(chunk) == (None if chunk % 2 else wanted.ref(chunk // 2))
        before = counted.read_bytes
        assert find(1) is None
        assert counted.read_bytes == before


class Counted:
    """A storage that answers without an event loop, and counts the bytes read."""

    def __init__(self, storage: BlockingStorage) -> None:
        """Wrap ``storage``."""
        self._storage = storage
        self.read_bytes = 0

    def get_blocking(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read and count."""
        found = self._storage.get_blocking(key, byte_range)
        self.read_bytes += len(found.data)
        return found

    def put_blocking(self, key: str, data: Data) -> Version:
        """Write one whole object."""
        return self._storage.put_blocking(key, data)


async def test_damaged_piece_is_refused() -> None:
    """The bytes of a file have no other checksum; references would be wrong without a word."""
    url = await made(2)
    await damage(url, at=300_000)
    refused = 0
    for chunk in range(0, 2 * COUNT, 6000):
        async with Repository.open(url) as repository:
            session = await repository.readonly_session("main")
            try:
                assert await length(session, chunk) == chunk // 2 + 1
            except FormatError:
                refused += 1
    assert 0 < refused < 10


async def test_many_chunks_far_apart_are_read_from_the_whole_file() -> None:
    """Piece by piece they would take longer."""
    url = await made(2)
    async with Repository.open(url) as repository:
        session = await repository.readonly_session("main")
        for chunk in range(0, 2 * COUNT, 501):
            assert await length(session, chunk) == (None if chunk % 2 else chunk // 2 + 1)
        info = next(iter(session.workspace.base.manifests.values()))
        file = await repository.storage.get(manifest_key(info.id))
        assert index_size(file.data) is not None
        assert info.size_bytes == len(file.data)


async def test_a_rewritten_manifest_is_seekable_again() -> None:
    """Changes are written like everything else."""
    url = await made(2)
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        session.workspace.delete_chunk("/a", (2,))
        await session.commit("one less")
    async with Repository.open(url) as repository:
        session = await repository.readonly_session("main")
        assert await length(session, 2) is None
        assert await length(session, 4) == 3
        infos = session.workspace.base.manifests.values()
        for info in infos:
            file = await repository.storage.get(manifest_key(info.id))
            assert index_size(file.data) is not None


@SPECS
async def test_a_changed_reference_is_written_without_decoding_the_others(
    spec: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are not encoded either. A new or deleted chunk takes the ordinary path."""
    url = await made(spec)
    decoded = 0

    def noting(payload: bytes | memoryview, *, seconds_cut: bool = False) -> Manifest:
        nonlocal decoded
        decoded += 1
        return decode_manifest(payload, seconds_cut=seconds_cut)

    monkeypatch.setattr("icechunk_async.format.manifest.reading.decode_manifest", noting)
    wanted = every_second(COUNT).lengths.astype(object)
    for turn, (chunk, full) in enumerate([(100, False), (100, False), (4000, False), (101, True)]):
        async with Repository.open(url) as repository:
            session = await repository.writable_session("main")
            refs: dict[Coordinates, ChunkRef | None] = {
                (chunk,): NativeChunk(ChunkId(bytes(12)), turn, 7 + turn)
            }
            session.workspace.set_refs("/a", ChunkRefs.from_mapping(1, refs))
            await session.commit("one more")
        assert decoded == full
        async with Repository.open(url) as repository:
            session = await repository.readonly_session("main")
            assert await length(session, chunk) == 7 + turn
            assert await length(session, 2 * COUNT - 2) == COUNT
            decoded = 0
            [info] = session.workspace.base.manifests.values()
            assert info.num_chunk_refs == COUNT + full
            found = await session.workspace.all_refs("/a")
            wanted[chunk // 2] = wanted[chunk // 2] if full else 7 + turn
            assert found.lengths[found.coords[:, 0] % 2 == 0].tolist() == wanted.tolist()
            decoded = 0


@pytest.mark.parametrize("has_index", [True, False])
async def test_a_small_manifest_is_read_once_to_be_changed(
    monkeypatch: pytest.MonkeyPatch, *, has_index: bool
) -> None:
    """It is patched or, without an index, decoded, and in either case right."""
    if not has_index:
        monkeypatch.setattr(manifest_seek_write, "MIN_SEEKABLE_BYTES", 1 << 40)
    monkeypatch.setattr(manifest_files, "MIN_SEEKABLE_FILE_BYTES", 1 << 40)
    url = await made(2)
    decoded: list[int] = []

    def noting(payload: bytes | memoryview, *, seconds_cut: bool = False) -> Manifest:
        decoded.append(len(payload))
        return decode_manifest(payload, seconds_cut=seconds_cut)

    monkeypatch.setattr("icechunk_async.format.manifest.reading.decode_manifest", noting)
    async with open_storage(url) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.open(storage) as repository:
            session = await repository.writable_session("main")
            await read(session, "a/zarr.json")
            storage.forget()
            refs: dict[Coordinates, ChunkRef | None] = {(8,): NativeChunk(ChunkId(bytes(12)), 1, 9)}
            session.workspace.set_refs("/a", ChunkRefs.from_mapping(1, refs))
            await session.publisher.draft("not stored", None, None, session.workspace.changes.log)
            assert storage.requests["get"] == 1
            assert len(decoded) == (not has_index)
            await session.commit("one")
        async with Repository.open(storage) as repository:
            session = await repository.readonly_session("main")
            assert [await length(session, chunk) for chunk in (6, 8, 10)] == [4, 9, 6]
