"""The official engine works on a copy as on the original."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import icechunk
import numpy as np
import pytest
import zarr

from icechunk_async import Repository
from icechunk_async.errors import RepositoryExistsError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("spec", [1, 2])
async def test_official_engine_reads_and_continues_a_copy(tmp_path: Path, spec: int) -> None:
    """Of its own repository: same ids, same data; commits, garbage collection and checks work."""
    origin = icechunk.Repository.create(
        icechunk.local_filesystem_storage(f"{tmp_path}/origin"), spec_version=spec
    )
    session = origin.writable_session("main")
    array = zarr.group(session.store).create_array("x", shape=(1000,), chunks=(100,), dtype="i4")
    array[:] = np.arange(1000)
    first = session.commit("first")
    origin.create_tag("v1", first)
    async with Repository.open(f"file://{tmp_path}/origin") as repository:
        await repository.copy_to(f"file://{tmp_path}/copy")

    copy = icechunk.Repository.open(icechunk.local_filesystem_storage(f"{tmp_path}/copy"))
    assert copy.list_tags() == {"v1"}
    assert [it.id for it in copy.ancestry(tag="v1")] == [it.id for it in origin.ancestry(tag="v1")]
    session = copy.writable_session("main")
    array = zarr.open_array(session.store, path="x")
    np.testing.assert_array_equal(array[:], np.arange(1000))
    array[:100] = -1
    session.commit("on the copy")
    copy.garbage_collect(datetime.now(UTC))
    np.testing.assert_array_equal(
        zarr.open_array(copy.readonly_session(tag="v1").store, path="x")[:], np.arange(1000)
    )
    async with Repository.open(f"file://{tmp_path}/copy") as repository:
        assert (await repository.check_references()).is_whole
    async with Repository.open(f"file://{tmp_path}/origin") as repository:
        with pytest.raises(RepositoryExistsError, match="changed after the last copy"):
            await repository.copy_to(f"file://{tmp_path}/copy")
