"""Sidecars with checksums of chunks, in the storage."""

from __future__ import annotations

import hashlib
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from icechunk_async.engine.sidecars.sums import SumFiles, with_sums
from icechunk_async.errors import FormatError
from icechunk_async.format.crc import KNOWN
from icechunk_async.format.ids import ManifestId, NodeId
from icechunk_async.format.layout import sums_key
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.reading import Manifest
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.sums import ManifestSums
from icechunk_async.storage import BlockingStorage, open_storage
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import memory_url

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

NODE = NodeId.random()


def a_manifest(count: int = 3) -> Manifest:
    """Return a manifest of native chunks with sums."""
    codes = np.arange(count, dtype=np.uint64) | np.uint64(KNOWN)
    ids = np.zeros((1, 12), np.uint8)
    coords = np.arange(count, dtype=np.uint32)[:, None]
    refs = ChunkRefs.build(coords, Kind.NATIVE, chunk_ids=ids, sums=codes)
    return Manifest(ManifestId.random(), {NODE: refs})


def sidecar(manifest: Manifest) -> bytes:
    """Return the sidecar of a manifest."""
    return ManifestSums.of(manifest, hashlib.sha256(b"").digest()).encode()


@asynccontextmanager
async def files() -> AsyncGenerator[tuple[SumFiles, LatencyStorage]]:
    """Open the sidecars of an empty storage that counts requests."""
    async with open_storage(memory_url()) as plain:
        storage = LatencyStorage(plain, seconds=0)
        yield SumFiles(storage, 1000), storage


async def test_sums_are_read_once_and_kept() -> None:
    """However often they are asked for, and from threads as well."""
    manifest = a_manifest()
    async with files() as (sums, storage):
        await storage.put(sums_key(manifest.id), sidecar(manifest))
        storage.forget()
        found = await sums.load(manifest.id)
        assert found is not None
        assert found.known == 3
        assert await sums.load(manifest.id) is found
        assert storage.requests == {"get": 1}
        assert sums.load_blocking(manifest.id, cast("BlockingStorage", storage)) is found


async def test_missing_sums_are_looked_for_once() -> None:
    """So a repository without sums costs one request for each manifest, not one each time."""
    async with files() as (sums, storage):
        missing = ManifestId.random()
        assert await sums.load(missing) is None
        assert await sums.load(missing) is None
        assert storage.requests == {"get": 1}
        assert await sums.read(missing) is None


async def test_damaged_sums_are_unknown_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    """They stop nobody from reading; who looks for damage is told."""
    manifest = a_manifest()
    data = bytearray(sidecar(manifest))
    data[-1] ^= 1
    async with files() as (sums, storage):
        await storage.put(sums_key(manifest.id), data)
        with caplog.at_level(logging.WARNING):
            assert await sums.load(manifest.id) is None
        assert "taken for unknown" in caplog.text
        with pytest.raises(FormatError, match="damaged"):
            await sums.read(manifest.id)


async def test_stored_sums_replace_what_was_known() -> None:
    """Also where none were there before."""
    manifest = a_manifest()
    async with files() as (sums, storage):
        assert await sums.load(manifest.id) is None
        await sums.put(manifest.id, sidecar(manifest))
        storage.forget()
        found = await sums.load(manifest.id)
        assert found is not None
        assert found.known == 3
        assert not storage.requests  # what was stored is kept


def test_sums_that_do_not_fit_leave_a_manifest_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Right digests, and another number of chunks."""
    manifest = a_manifest()
    sums = ManifestSums.of(manifest, hashlib.sha256(b"").digest())
    longer = Manifest(manifest.id, a_manifest(5).arrays)
    with caplog.at_level(logging.WARNING):
        assert with_sums(longer, sums) is longer
    assert "taken for unknown" in caplog.text
    assert with_sums(longer, None) is longer
