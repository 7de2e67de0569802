"""Garbage collected by one engine beside an open session of this library."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from zarr.core.buffer import default_buffer_prototype

from icechunk_async import Repository
from icechunk_async.conflicts import ConflictDetector
from icechunk_async.errors import ChunksCollectedError
from tests.helpers import make_array, read, write
from tests.interop.theirs import icechunk

if TYPE_CHECKING:
    from pathlib import Path

CHUNK = b"x" * 1000
SPECS = pytest.mark.parametrize("spec", [1, 2])


def _official(path: Path) -> Any:
    return icechunk.Repository.open(icechunk.local_filesystem_storage(str(path)))


async def test_a_collection_by_the_official_engine_is_noticed(tmp_path: Path) -> None:
    """Its entry in the log says that it ran, and a look at the chunks that they are gone."""
    async with Repository.create(tmp_path) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (10,), (1,))
        await write(session, "a/c/0", CHUNK)
        official = _official(tmp_path)
        assert official.garbage_collect(datetime.now(UTC)).chunks_deleted == 1
        with pytest.raises(ChunksCollectedError, match=r"'/a' \(0,\)"):
            await session.commit("refused")
        await write(session, "a/c/0", CHUNK)
        snapshot_id = await session.commit("written again")
        store = _official(tmp_path).readonly_session(snapshot_id=str(snapshot_id)).store
        assert (await read_official(store, "a/c/0")) == CHUNK


@SPECS
async def test_the_official_engine_goes_on_after_our_collection(tmp_path: Path, spec: int) -> None:
    """Notes and, in format 1, branches that were written anew, do not disturb it."""
    async with Repository.create(tmp_path, spec_version=spec) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (10,), (1,))
        await write(session, "a/c/0", CHUNK)
        await session.commit("first")
        late = await repository.writable_session("main")
        await write(late, "a/c/1", CHUNK)
        await repository.garbage_collect(datetime.now(UTC))
        assert list((tmp_path / "collections").iterdir())
        official = _official(tmp_path)
        theirs = official.writable_session("main")
        assert (await read_official(theirs.store, "a/c/0")) == CHUNK
        await write_official(theirs.store, "a/c/2", CHUNK)
        theirs.commit("theirs")
        assert official.garbage_collect(datetime.now(UTC)).chunks_deleted == 0
        assert list((tmp_path / "collections").iterdir())
        with pytest.raises(ChunksCollectedError):
            await late.commit("refused", rebase_with=ConflictDetector())
        await write(late, "a/c/1", CHUNK)
        await late.commit("ours", rebase_with=ConflictDetector())
        store = _official(tmp_path).readonly_session("main").store
        for number in range(3):
            assert (await read_official(store, f"a/c/{number}")) == CHUNK
        reader = await repository.readonly_session("main")
        assert await read(reader, "a/c/2") == CHUNK


async def read_official(store: Any, key: str) -> bytes:
    """Read a value through an official store."""
    value = await store.get(key, default_buffer_prototype())
    assert value is not None
    data: bytes = value.to_bytes()
    return data


async def write_official(store: Any, key: str, data: bytes) -> None:
    """Write a value through an official store."""
    await store.set(key, default_buffer_prototype().buffer.from_bytes(data))
