"""Large manifests are decoded only when more than a few chunks are wanted of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

from icechunk_async import Repository
from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import FileType, pack
from icechunk_async.format.layout import manifest_key
from icechunk_async.format.manifest.chunk import Kind, NativeChunk
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.manifest.writing import encode_manifest
from tests.helpers import array_document, memory_url, write

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.transaction_log import TransactionLog

COUNT = 10_000
HOLE = 1234


@pytest.fixture
async def large() -> AsyncGenerator[str]:
    """Make a repository of an array whose chunks are all there but one."""
    url = memory_url()
    coords = np.delete(np.arange(COUNT, dtype=np.uint32), HOLE)[:, None]
    refs = ChunkRefs.build(
        coords,
        Kind.NATIVE,
        objects=np.arange(COUNT - 1, dtype=np.uint32),
        lengths=coords[:, 0].astype(np.uint64) + 1,
        chunk_ids=np.random.default_rng(1).integers(0, 256, (COUNT - 1, 12), np.uint8),
    )
    async with Repository.create(url) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/zarr.json", array_document((COUNT,), (1,)))
        session.workspace.set_refs("/a", refs)
        await session.commit("many")
        yield url


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Manifest]:
    """Note each manifest that is decoded."""
    seen: list[Manifest] = []

    def noting(payload: bytes | memoryview, *, seconds_cut: bool = False) -> Manifest:
        seen.append(decode_manifest(payload, seconds_cut=seconds_cut))
        return seen[-1]

    monkeypatch.setattr("icechunk_async.format.manifest.reading.decode_manifest", noting)
    return seen


async def test_first_lookups_do_not_decode_a_large_manifest(
    large: str, decoded: list[Manifest]
) -> None:
    """One request, whether or not it is decoded later; answers do not depend on it."""
    async with Repository.open(large) as repository:
        session = await repository.readonly_session("main")
        for at in range(40):
            handle = await session.workspace.find_chunk("/a", (at * 100,))
            assert handle is not None
            assert isinstance(handle.ref, NativeChunk)
            assert handle.size_bytes == at * 100 + 1
            assert len(decoded) == (at >= 16)
        assert len(await session.workspace.all_refs("/a")) == COUNT - 1
        assert len(decoded) == 1


async def test_missing_chunk_is_confirmed_by_decoding(large: str, decoded: list[Manifest]) -> None:
    """A chunk that bisection does not find could be in a manifest that is out of order."""
    async with Repository.open(large) as repository:
        session = await repository.readonly_session("main")
        assert await session.workspace.find_chunk("/a", (HOLE,)) is None
        assert len(decoded) == 1


async def test_unordered_manifest_is_refused_instead_of_read_as_missing_chunks(large: str) -> None:
    """Chunks would be fill values without a word."""
    async with Repository.open(large) as repository:
        session = await repository.readonly_session("main")
        node = session.workspace.array("/a")
        assert node.array is not None
        [ref] = node.array.manifests
        refs = await session.workspace.all_refs("/a")
        turned = refs.take(np.arange(len(refs))[::-1])
        payload = encode_manifest(ref.manifest_id, {node.id: turned})
        packed = pack(payload, FileType.MANIFEST, 2, level=3)
        await repository.storage.put(manifest_key(ref.manifest_id), packed)
        # Readers request exactly the size that the snapshot declares.
        assert len(packed) <= session.workspace.base.manifests[ref.manifest_id].size_bytes * 2
    async with Repository.open(large) as repository:
        session = await repository.readonly_session("main")
        with pytest.raises(FormatError):
            await session.workspace.find_chunk("/a", (3,))


@pytest.mark.parametrize("count", [10, 20_000])
async def test_logs_of_many_chunks_are_encoded_along_with_manifests(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The two run at the same time. A few chunks start no task."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/zarr.json", array_document((count,), (1,)))
        coords = np.arange(count, dtype=np.uint32)[:, None]
        ids = np.ones((1, 12), np.uint8)
        lengths = np.ones(count, np.uint64)
        refs = ChunkRefs.build(coords, Kind.NATIVE, lengths=lengths, chunk_ids=ids)
        session.workspace.set_refs("/a", refs)
        assets = session.workspace.assets
        tasks: list[object] = []
        pack_log = assets.pack_transaction_log

        async def noting(log: TransactionLog) -> bytes:
            tasks.append(asyncio.current_task())
            return await pack_log(log)

        monkeypatch.setattr(assets, "pack_transaction_log", noting)
        snapshot = await session.commit("many")
        assert (tasks[0] is asyncio.current_task()) == (count == 10)
        changed = (await assets.transaction_log(snapshot)).updated_chunks.values()
        assert [len(it) for it in changed] == [count]
