"""Large manifests without an index: one chunk is found in passing, several in the whole file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async import Repository
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.engine.files import manifests as manifest_files
from icechunk_async.errors import FormatError
from icechunk_async.format.layout import manifest_key
from icechunk_async.format.manifest import stream as manifest_stream
from icechunk_async.format.manifest.refs import NativeChunk
from icechunk_async.format.manifest.seekable import writing as manifest_seek_write
from icechunk_async.format.manifest.seekable.unpacking import unpack_manifest
from icechunk_async.format.manifest.stream import open_streamed
from icechunk_async.storage import open_storage
from tests.helpers import array_document, memory_url, write
from tests.unit.format.seekable import every_second

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.session import Session

COUNT = 20_000


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write manifests without an index, and take those of this size for large."""
    monkeypatch.setattr(manifest_seek_write, "MIN_SEEKABLE_BYTES", 1 << 40)
    monkeypatch.setattr(manifest_files, "_MIN_STREAMED_FILE_BYTES", 1 << 16)
    monkeypatch.setattr(manifest_stream, "_WINDOW_BYTES", 1 << 14)
    monkeypatch.setattr(manifest_stream, "_HEAD_BYTES", 1 << 12)
    monkeypatch.setattr(manifest_stream, "_TAIL_BYTES", 1 << 12)
    monkeypatch.setattr(manifest_stream, "_STEP", 256)


async def made(url: str) -> None:
    """Make a repository of an array with one large manifest."""
    async with Repository.create(url) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/zarr.json", array_document((2 * COUNT,), (1,)))
        session.workspace.set_refs("/a", every_second(COUNT))
        await session.commit("many")


async def look_up(session: Session, *chunks: int) -> None:
    """Look chunks up at once, and compare what is found."""

    async def one(chunk: int) -> int | None:
        handle = await session.workspace.find_chunk("/a", (chunk,))
        assert handle is None or isinstance(handle.ref, NativeChunk)
        return None if handle is None else handle.size_bytes

    found = await bounded_map(one, chunks, limit=len(chunks))
    assert found == [None if it % 2 else it // 2 + 1 for it in chunks]


class Counted:
    """What was read, passed through and decompressed as a whole."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Begin to count."""
        self.streamed = self.whole = self.requests = 0
        fetch = manifest_files.ManifestFiles._fetch_manifest

        def streaming(data: bytes) -> object:
            self.streamed += 1
            return open_streamed(data)

        def unpacking(data: bytes) -> object:
            self.whole += 1
            return unpack_manifest(data)

        async def fetching(*arguments: Any) -> object:
            self.requests += 1
            return await fetch(*arguments)

        monkeypatch.setattr(manifest_files, "open_streamed", streaming)
        monkeypatch.setattr(manifest_files, "unpack_manifest", unpacking)
        monkeypatch.setattr(manifest_files.ManifestFiles, "_fetch_manifest", fetching)

    def taken(self) -> tuple[int, int, int]:
        """Return the requests, the passages that began, and the whole files, since last time."""
        found = self.requests, self.streamed, self.whole
        self.streamed = self.whole = self.requests = 0
        return found


@pytest.fixture
async def url() -> str:
    """Make one in memory."""
    url = memory_url()
    await made(url)
    return url


@pytest.fixture
def counted(url: str, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Count what is done to it once it is there."""
    assert url
    return Counted(monkeypatch)


async def test_one_chunk_needs_no_whole_manifest(url: str, counted: Counted) -> None:
    """Nor do its neighbours; who looks for one that is not there has all of it decoded."""
    async with Repository.open(url) as repository:
        session = await repository.readonly_session("main")
        await look_up(session, 2000)
        assert counted.taken() == (1, 1, 0)
        await look_up(session, 2002, 2004, 1998)
        assert counted.taken() == (0, 0, 0)
        await look_up(session, 2001)
        assert counted.taken() == (0, 0, 1)  # the file is here still
        await look_up(session, 0, 2, 2000, 2 * COUNT - 2, 3)
        assert counted.taken() == (0, 0, 0)


async def test_chunks_in_many_places_need_the_whole_manifest(url: str, counted: Counted) -> None:
    """At once where they are looked for together, and after a few one by one."""
    async with Repository.open(url) as repository:
        session = await repository.readonly_session("main")
        await look_up(session, *range(0, 2 * COUNT, 1000))
        assert counted.taken() == (1, 0, 1)
    async with Repository.open(url) as repository:
        session = await repository.readonly_session("main")
        for chunk in range(0, 2 * COUNT, 1000):
            await look_up(session, chunk)
        assert counted.taken() == (1, 1, 1)


async def test_all_chunks_and_a_commit_take_the_file_that_is_here(
    url: str, counted: Counted
) -> None:
    """And what has to be decoded anyway is not passed through before."""
    async with Repository.open(url) as repository:
        session = await repository.readonly_session("main")
        await look_up(session, 2000)
        refs = await session.workspace.all_refs("/a")
        assert np.array_equal(refs.lengths, every_second(COUNT).lengths)
        assert counted.taken() == (1, 1, 1)
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/7", b"new")
        await session.commit("one")
        assert counted.taken() == (1, 0, 1)
        session = await repository.readonly_session("main")
        await look_up(session, 2000)


async def test_readers_without_a_loop_find_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Spark's tasks and Zarr's fused pipeline look chunks up on threads of their own."""
    url = f"file://{tmp_path}"
    await made(url)
    counted = Counted(monkeypatch)
    async with Repository.open(url) as repository:
        workspace = (await repository.readonly_session("main")).workspace
        node, direct = workspace.base.nodes.get("/a"), workspace.assets.direct
        assert node is not None
        assert direct is not None
        (info,) = workspace.base.manifests.values()
        found = await direct.find_ref(info.id, info.size_bytes, node.id, (2000,))
        assert found == every_second(COUNT).ref(1000)
        assert counted.taken() == (1, 1, 0)


async def test_a_file_of_another_manifest_is_refused(url: str) -> None:
    """The name says which one it is."""
    async with open_storage(url) as storage, Repository.open(url) as repository:
        session = await repository.readonly_session("main")
        (other,) = session.workspace.base.manifests
        data = (await storage.get(manifest_key(other))).data
        unpacked = unpack_manifest(bytes(data)).payload
        place = bytes(unpacked).index(bytes(other))
        changed = bytearray(unpacked)
        changed[place] ^= 1
        repacked = session.workspace.assets.pack_manifest(memoryview(bytes(changed)))
        await storage.put(manifest_key(other), repacked)
        with pytest.raises(FormatError, match="another file"):
            await look_up(session, 2000)
