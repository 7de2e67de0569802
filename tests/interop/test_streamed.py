"""Large manifests of the official engine: one chunk is found without holding all of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import icechunk
import numpy as np
import pytest
import zarr

from icechunk_async import Repository
from icechunk_async.engine.files import manifests as manifest_files
from icechunk_async.format.manifest.refs import NativeChunk, VirtualChunk
from icechunk_async.format.manifest.stream import open_streamed

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.format.manifest.stream import StreamedManifest

COUNT = 60_000
PER_FILE = 900
PREFIX = "s3://bucket/measured/"
NATIVE = 41_000


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take manifests of this size for large."""
    monkeypatch.setattr(manifest_files, "_MIN_STREAMED_FILE_BYTES", 1 << 16)


def _written(path: Path, spec: int) -> None:
    """Have the official engine write virtual references, and a native chunk among them."""
    config = icechunk.RepositoryConfig(inline_chunk_threshold_bytes=0)
    store = icechunk.s3_store(region="us-east-1")
    config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(PREFIX, store))
    storage = icechunk.local_filesystem_storage(str(path))
    repository = icechunk.Repository.create(storage, config=config, spec_version=spec)
    session = repository.writable_session("main")
    array = zarr.create_array(
        session.store, name="a", shape=(COUNT,), chunks=(1,), dtype="u1", compressors=None
    )
    numbers = np.arange(COUNT, dtype=np.uint64)
    names = [f"{PREFIX}{number // PER_FILE}.nc" for number in numbers.tolist()]
    offsets = numbers % np.uint64(PER_FILE) * np.uint64(10)
    session.store.set_virtual_refs_arr("a", (COUNT,), names, offsets, numbers + np.uint64(1))
    array[NATIVE] = 7
    session.commit("references")


@pytest.mark.parametrize("spec", [1, 2])
async def test_the_official_engines_references_are_found_in_passing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: int
) -> None:
    """Each by a handle of its own that holds a fraction of the manifest, as the counts tell."""
    await asyncio.to_thread(_written, tmp_path, spec)
    held: list[int] = []

    def noting(data: bytes) -> StreamedManifest | None:
        found = open_streamed(data)
        assert found is not None
        held.append(found.weight * 40 - len(data))
        return found

    monkeypatch.setattr(manifest_files, "open_streamed", noting)
    chunks = [0, 1, PER_FILE - 1, PER_FILE, NATIVE, NATIVE + 1, COUNT // 2, COUNT - 1]
    for number in chunks:
        async with Repository.open(str(tmp_path)) as repository:
            session = await repository.readonly_session("main")
            handle = await session.workspace.find_chunk("/a", (number,))
            assert handle is not None
            if number == NATIVE:
                assert isinstance(handle.ref, NativeChunk)
                continue
            assert isinstance(handle.ref, VirtualChunk)
            assert handle.ref.location == f"{PREFIX}{number // PER_FILE}.nc"
            assert handle.ref.offset == number % PER_FILE * 10
            assert handle.ref.length == number + 1
    assert len(held) == len(chunks)
    assert max(held) < 40 * COUNT
