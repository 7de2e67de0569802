"""Large manifests of the official engine, which have no index: single chunks and all of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import icechunk
import numpy as np
import pytest
import zarr

from icechunk_async import Repository
from icechunk_async.format.manifest.chunk import Kind, NativeChunk, VirtualChunk

if TYPE_CHECKING:
    from pathlib import Path

COUNT = 60_000
PER_FILE = 900
PREFIX = "s3://bucket/measured/"
NATIVE = 41_000


def _written(path: Path, spec: int) -> None:
    """Let the official engine write virtual references, and a native chunk among them."""
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
async def test_lookups_and_listing_agree_on_official_manifests(tmp_path: Path, spec: int) -> None:
    """Single chunks are found by bisection in a layout that only the official engine writes."""
    await asyncio.to_thread(_written, tmp_path, spec)
    async with Repository.open(str(tmp_path)) as repository:
        workspace = (await repository.readonly_session("main")).workspace
        for number in (0, 1, PER_FILE - 1, PER_FILE, NATIVE, NATIVE + 1, COUNT // 2, COUNT - 1):
            handle = await workspace.find_chunk("/a", (number,))
            assert handle is not None
            if number == NATIVE:
                assert isinstance(handle.ref, NativeChunk)
                continue
            assert isinstance(handle.ref, VirtualChunk)
            assert handle.ref.location == f"{PREFIX}{number // PER_FILE}.nc"
            assert handle.ref.offset == number % PER_FILE * 10
            assert handle.ref.length == number + 1
        refs = await workspace.all_refs("/a")
        virtual = refs.kinds == Kind.VIRTUAL
        assert np.flatnonzero(~virtual).tolist() == [NATIVE]
        assert (refs.lengths[virtual] == np.flatnonzero(virtual) + 1).all()
