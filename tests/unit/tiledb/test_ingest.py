"""Dense arrays that become snapshots of a branch, again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr.api.asynchronous as zarr_async

from icechunk_async.errors import InvalidInputError, NodeExistsError
from icechunk_async.tiledb import ingest_array, open_array
from tests.unit.tiledb.archives import golden_jobs
from tests.unit.tiledb.virtual_arrays import expressible, placed, referring

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async import Repository

ARCHIVE = "by-0.14.5"
JOB = next(it for it in golden_jobs(ARCHIVE) if it["number"] == "dense-1")
"""Three writes, and nothing consolidated."""


async def _names(place: Path) -> list[str]:
    async with open_array(place) as array:
        return expressible(array.schema)


async def _is_as_at(repository: Repository, snapshot: Any, place: Path, end: int) -> None:
    """Compare a snapshot with the array at a time."""
    session = await repository.readonly_session(snapshot_id=snapshot)
    async with open_array(place, end=end) as array:
        expected = await array.read(attributes=await _names(place))
    for name, values in expected.items():
        made: Any = await zarr_async.open_array(store=session.store, path=f"grid/{name}")
        found = await made.getitem(...)
        np.testing.assert_array_equal(found, values[tuple(map(slice, found.shape))])


async def test_each_moment_of_the_array_becomes_a_snapshot(tmp_path: Path) -> None:
    """The oldest first; a second run finds nothing new."""
    place = placed(ARCHIVE, JOB["number"], tmp_path)
    options: dict[str, Any] = {"attributes": await _names(place), "copy": True}
    async with referring(place) as repository:
        found = await ingest_array(repository, place, "grid", history=True, **options)
        times = sorted({it["time"] for it in JOB["steps"]})
        assert [it.end for it in found] == times
        for it in found:
            await _is_as_at(repository, it.snapshot_id, place, it.end)
        log = [it async for it in repository.ancestry(branch="main")]
        assert [it.id for it in reversed(log)][1:] == [it.snapshot_id for it in found]
        assert log[0].metadata["tiledb"]["end"] == times[-1]  # type: ignore[index,call-overload]
        assert await ingest_array(repository, place, "grid", history=True, **options) == ()
        assert await ingest_array(repository, place, "grid", **options) == ()


async def test_later_run_commits_what_is_new(tmp_path: Path) -> None:
    """Only moments after the last one that is known; other attributes are new as well."""
    place = placed(ARCHIVE, JOB["number"], tmp_path)
    last = max(JOB["steps"], key=lambda it: it["time"])["time"]
    (mark,) = [it for it in (place / "__commits").iterdir() if it.name.startswith(f"__{last}_")]
    hidden = mark.rename(tmp_path / mark.name)
    options: dict[str, Any] = {"attributes": await _names(place), "copy": True, "history": True}
    async with referring(place) as repository:
        first = await ingest_array(repository, place, "grid", **options)
        assert last not in [it.end for it in first]
        assert first
        hidden.rename(mark)
        second = await ingest_array(repository, place, "grid", **options)
        assert [it.end for it in second] == [last]
        await _is_as_at(repository, second[0].snapshot_id, place, last)
        some = options | {"attributes": options["attributes"][:1]}
        if some != options:
            assert len(await ingest_array(repository, place, "grid", **some)) == 1


async def test_group_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    """Nor one that was written from another array."""
    place = placed(ARCHIVE, JOB["number"], tmp_path)
    other = placed(ARCHIVE, JOB["number"], tmp_path, name="other")
    options: dict[str, Any] = {"attributes": await _names(place), "copy": True}
    async with referring(place) as repository:
        session = await repository.writable_session("main")
        await zarr_async.create_group(store=session.store, path="grid", attributes={"mine": 1})
        await session.commit("a group")
        with pytest.raises(NodeExistsError, match="'/grid' exists"):
            await ingest_array(repository, place, "grid", **options)
        await ingest_array(repository, place, "tiles", **options)
        with pytest.raises(NodeExistsError):
            await ingest_array(repository, other, "tiles", validate_containers=False, **options)
        assert len([it async for it in repository.ancestry(branch="main")]) == 3


async def test_array_without_fragments_is_refused(tmp_path: Path) -> None:
    """There is no moment to commit."""
    place = placed(ARCHIVE, JOB["number"], tmp_path)
    for mark in (place / "__commits").iterdir():
        mark.unlink()
    async with referring(place) as repository:
        with pytest.raises(InvalidInputError, match="no fragments"):
            await ingest_array(repository, place, "grid")
