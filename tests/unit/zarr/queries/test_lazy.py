"""Conditions as lazy arrays of xarray: what xarray selects, from few chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import anyio.to_thread
import numpy as np
import pytest
import xarray as xr

from icechunk_async import Repository as AsyncRepository
from icechunk_async.errors import IcechunkError
from icechunk_async.sync import Repository, RepositoryConfig
from icechunk_async.sync.storage import local_filesystem_storage
from icechunk_async.sync.xarray import open_dataset, open_where, to_icechunk
from icechunk_async.xarray import open_where as async_open_where

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.sync import Session

assert_equal = cast("Any", xr.testing).assert_equal
PARTS: tuple[dict[str, Any], ...] = (
    {},
    {"time": slice(5, 17)},
    {"time": slice(None, None, 3), "lat": slice(7, 2, -2)},
    {"lat": 3},
    {"time": [11, 2, 2]},
    {"time": slice(3, 3)},
)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """Return a session with a field of whole numbers and one of packed ones, analyzed."""
    repository = Repository.create(
        local_filesystem_storage(str(tmp_path / "r")),
        RepositoryConfig(inline_chunk_threshold_bytes=0),
    )
    field = np.arange(240).reshape(24, 10)
    dataset = xr.Dataset(
        {
            "t": (("time", "lat"), field),
            "p": (("time", "lat"), np.where(field % 7 == 0, np.nan, field / 2)),
        },
        coords={"time": np.arange(24) * 2, "lat": np.linspace(-90, 90, 10)},
    )
    packed = {"dtype": "i2", "scale_factor": 0.5, "_FillValue": -1, "chunks": (4, 5)}
    writable = repository.writable_session("main")
    to_icechunk(dataset, writable, encoding={"t": {"chunks": (4, 5)}, "p": packed})
    writable.commit("fields")
    repository.analyze()
    return repository.readonly_session("main")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["t", "p"])
def test_values_are_those_that_xarray_selects(
    session: Session, name: str, part: dict[str, Any]
) -> None:
    """Of any part: slices with steps, single places, lists."""
    whole = open_dataset(session, chunks=None)
    wanted = whole[name].where((whole[name] > 50) & (whole.lat > 0))
    found = open_where(session, f"{name} > 50 and lat > 0")
    assert_equal(found.isel(part), wanted.isel(part))
    assert found.attrs == whole[name].attrs


@pytest.mark.parametrize("part", PARTS)
async def test_asyncio_awaits_the_same_values(
    session: Session, tmp_path: Path, part: dict[str, Any]
) -> None:
    """From few chunks; the others are gone. What blocks gets them as well."""
    whole = await anyio.to_thread.run_sync(lambda: open_dataset(session, chunks=None).load())
    wanted = whole.t.where((whole.t >= 215) & (whole.lat > 0)).isel(part)
    async with AsyncRepository.open(tmp_path / "r") as repository:
        native = await repository.readonly_session("main")
        for at in range(5):
            handle: Any = await native.workspace.find_chunk("/t", (at, 0))
            (tmp_path / "r" / "chunks" / str(handle.ref.chunk_id)).unlink()
        found = await async_open_where(native, "t >= 215 and lat > 0")
        assert_equal(await found.isel(part).load_async(), wanted)
        assert_equal(await anyio.to_thread.run_sync(found.isel(part).load), wanted)
        with pytest.raises(IcechunkError, match=r"about 'x', and the group has no such array"):
            await async_open_where(native, "x > 1")
        with pytest.raises(IcechunkError, match="lazy without Dask"):
            await async_open_where(native, "t > 1", chunks={})


def test_chunks_without_a_match_are_not_read(session: Session, tmp_path: Path) -> None:
    """They are gone; nothing is read before values are asked for."""
    from icechunk_async._runtime.blocking.portal import run

    whole: Any = open_dataset(session, chunks=None)
    whole.load()
    workspace = session.handle.now().workspace
    for at in range(5):
        handle: Any = run(workspace.find_chunk("/t", (at, 0)))
        (tmp_path / "r" / "chunks" / str(handle.ref.chunk_id)).unlink()
    found = open_where(session, "t >= 215")
    assert found.shape == (24, 10)
    assert "[240 values with dtype=float64]" in repr(found)  # what is in memory is shown
    assert_equal(found, whole.t.where(whole.t >= 215))


@pytest.mark.parametrize(("condition", "value"), [("n > 3", 4.0), ("n > 4", np.nan)])
def test_an_array_without_axes_is_one_value(tmp_path: Path, condition: str, value: float) -> None:
    """Which fulfils the condition, or is missing."""
    repository = Repository.create(str(tmp_path / "r"))
    session = repository.writable_session("main")
    to_icechunk(xr.Dataset({"n": ((), 4)}), session)
    session.commit("a number")
    found = open_where(repository.readonly_session("main"), condition)
    np.testing.assert_equal(found.item(), value)


def test_what_cannot_be_asked_is_refused(session: Session) -> None:
    """With the names that there are."""
    with pytest.raises(IcechunkError, match=r"about 'x', and the group has no such array.*lat"):
        open_where(session, "x > 1")
    with pytest.raises(IcechunkError, match="There is no condition"):
        open_where(session, "")
    with pytest.raises(IcechunkError, match="lazy without Dask"):
        open_where(session, "t > 1", chunks={})
