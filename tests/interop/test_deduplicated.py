"""Chunks that share an object because their bytes are equal: the official engine takes them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
import zarr.api.asynchronous

from icechunk_async import Repository
from tests.interop.theirs import open_official

if TYPE_CHECKING:
    from pathlib import Path

ZARR: Any = zarr
ASYNC: Any = zarr.api.asynchronous
SPECS = pytest.mark.parametrize("spec", [1, 2])
SHAPE, CHUNKS = (40, 500), (1, 500)


async def ingest(root: Path, data: Any) -> None:
    """Write all chunks of an array, of which those that are equal share an object."""
    async with (
        Repository.open(root) as repository,
        repository.transaction("main", message="ingest", deduplicate=True) as store,
    ):
        array = await ASYNC.open_array(store=store, path="a", mode="r+")
        await array.setitem(slice(None), data)


def number_of_objects(root: Path) -> int:
    """Count chunk objects."""
    return len(list((root / "chunks").iterdir()))


def theirs(root: Path) -> Any:
    """Return the values as the official engine has them."""
    store = open_official(root).readonly_session("main").store
    return ZARR.open_array(store, path="a", mode="r")[:]


@SPECS
async def test_shared_objects_are_read_expired_and_collected_by_both(
    spec: int, tmp_path: Path
) -> None:
    """Deleting one of two references leaves the object to the other, with either collector."""
    data = np.repeat(np.arange(1, 5, dtype="i8"), 10)[:, None] * np.ones(SHAPE, "i8")
    async with (
        Repository.create(tmp_path, spec_version=spec) as repository,
        repository.transaction("main", message="empty") as store,
    ):
        await ASYNC.create_array(
            store, name="a", shape=SHAPE, chunks=CHUNKS, dtype="i8", compressors=None
        )
    await ingest(tmp_path, data)
    assert number_of_objects(tmp_path) == 4
    assert (theirs(tmp_path) == data).all()

    official = open_official(tmp_path)
    session = official.writable_session("main")
    data[:15] = 7
    ZARR.open_array(session.store, path="a", mode="r+")[:15] = 7
    session.commit("theirs")
    official.expire_snapshots(datetime.now(UTC))
    official.garbage_collect(datetime.now(UTC))
    assert (theirs(tmp_path) == data).all()
    assert number_of_objects(tmp_path) == 3 + 15

    await ingest(tmp_path, data)  # nothing changed
    assert number_of_objects(tmp_path) == 3 + 15
    data[15:25] = 9
    await ingest(tmp_path, data)
    later = datetime.now(UTC)
    async with Repository.open(tmp_path) as repository:
        await repository.expire_snapshots(later)
        await repository.garbage_collect(later)
        assert (await repository.verify()).findings == ()
    assert number_of_objects(tmp_path) == 2 + 15 + 1
    assert (theirs(tmp_path) == data).all()
