"""Datasets written and read from asyncio."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import dask
import numpy as np
import pytest
import xarray as xr
import xarray.coding.times as xarray_times
import zarr.api.asynchronous as zarr

from icechunk_async import Repository
from icechunk_async.errors import (
    InvalidInputError,
    MissingDriverError,
    ReadOnlyError,
    WrongTypeError,
)
from icechunk_async.sync.xarray import open_dataset as open_blocking
from icechunk_async.sync.xarray import to_icechunk as write_blocking
from icechunk_async.xarray import open_dataset, to_icechunk
from tests.helpers import memory_url
from tests.unit.dask_processes import process_pool

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async import Session, sync


def dataset() -> xr.Dataset:
    """Return a small dataset."""
    return xr.Dataset(
        {"t": (("x", "y"), np.arange(200.0).reshape(20, 10)), "n": (("x",), np.arange(20))},
        coords={"x": np.arange(20.0)},
        attrs={"title": "small"},
    )


@pytest.mark.parametrize("scheduler", [None, "threads", "processes"])
async def test_a_dataset_is_written_and_loaded(tmp_path: Path, scheduler: str | None) -> None:
    """In memory, and in blocks, which threads or processes compute."""
    async with Repository.create(tmp_path / "repository") as repository:
        session = await repository.writable_session("main")
        data = dataset() if scheduler is None else dataset().chunk(x=5)
        pool = process_pool() if scheduler == "processes" else None
        with dask.config.set(scheduler=scheduler or "sync", pool=pool):
            await to_icechunk(data, session, group="g")
        await session.commit("written")
        opened = await open_dataset(await repository.readonly_session("main"), "g")
        xr.testing.assert_identical(await opened.load_async(), dataset())


@pytest.mark.parametrize("mode", ["w", "w-"])
@pytest.mark.parametrize("where", [{"append_dim": "x"}, {"region": {"x": slice(0, 20)}}])
async def test_what_is_added_to_is_not_deleted_first(mode: Any, where: dict[str, Any]) -> None:
    """The session changed nothing, so that a commit cannot lose the group."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await to_icechunk(dataset(), session)
        await session.commit("written")
        session = await repository.writable_session("main")
        with pytest.raises(ValueError, match="Leave one of the two out") as caught:
            await to_icechunk(dataset(), session, mode=mode, **where)
        assert isinstance(caught.value, InvalidInputError)
        assert not session.has_uncommitted_changes


@pytest.mark.parametrize("where", [{"append_dim": "time"}, {"region": {"time": slice(1, 2)}}])
async def test_times_without_a_calendar_count_as_they_are_read(where: dict[str, Any]) -> None:
    """Before 1582 the calendar that CF means then has other days than NumPy's."""
    days = xr.Dataset({"seen": ("time", np.array(["2000-01-01", "2000-01-02"], "M8[ns]"))})
    encoding = {"seen": {"units": "days since 0001-01-01", "calendar": "standard"}}
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        first = days if "region" in where else days.isel(time=slice(1))
        await to_icechunk(first, session, encoding=encoding)
        seen = await zarr.open_array(store=session.store, path="seen")
        attributes = {**seen.attrs}
        del attributes["calendar"]
        plain = await zarr.create_array(
            session.store,
            name="seen",
            data=np.asarray(await seen.getitem(...)),
            dimension_names=["time"],
            attributes=attributes,
            overwrite=True,
        )
        assert "calendar" not in plain.attrs
        await to_icechunk(days.isel(time=slice(1, 2)), session, **where)
        opened = await open_dataset(session)
        assert (opened["seen"].to_numpy() == days["seen"].to_numpy()).all()


@pytest.mark.parametrize("kind", ["data", "coordinate", "new", "new alone"])
async def test_arrays_of_a_group_stay_as_long_as_each_other(kind: str) -> None:
    """The dataset lacks one, or has one more: nothing is written, and the message names it."""
    whole = dataset().assign(fixed=("y", np.arange(10)))
    more: dict[str, tuple[xr.Dataset, dict[str, Any], str]] = {
        "data": (whole.drop_vars("n"), {"append_dim": "x"}, r"'n' 20, .* 40, .* lacks 'n': append"),
        "coordinate": (whole.drop_vars("x"), {"append_dim": "x"}, "lacks 'x': append"),
        "new": (whole.assign(other=whole["n"]), {"append_dim": "x"}, "has no 'other' yet: write"),
        "new alone": (xr.Dataset({"other": ("x", [1])}), {"mode": "a"}, "has no 'other' yet"),
    }
    part, how, message = more[kind]
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await to_icechunk(whole, session, group="g")
        await session.commit("written")
        session = await repository.writable_session("main")
        with pytest.raises(InvalidInputError, match=message) as caught:
            await to_icechunk(part, session, group="g", **how)
        assert str(caught.value).endswith("Nothing was written.")
        assert not session.has_uncommitted_changes
        # What has another dimension may be missing.
        await to_icechunk(whole.drop_vars("fixed"), session, group="g", append_dim="x")
        opened = await open_dataset(session, "g")
        assert opened.sizes == {"x": 40, "y": 10}


async def test_a_group_that_xarray_cannot_open_can_be_mended() -> None:
    """Step by step: lengths that differ already are not refused."""
    data = dataset()
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await to_icechunk(data, session)
        longer = await zarr.open_array(store=session.store, path="t")
        await longer.resize((40, 10))
        for part in (data[["n"]].drop_vars("x"), data[["x"]]):
            await to_icechunk(part, session, append_dim="x")
        assert (await open_dataset(session)).sizes == {"x": 40, "y": 10}


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("there", [True, False], ids=["there", "new"])
async def test_old_times_need_a_package(
    named: Any, there: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the array is there or new; others do without."""
    days = xr.Dataset({"seen": ("time", np.array(["2000-01-01"], "M8[ns]"))})
    attributes = {"units": "days since 0001-01-01"} | ({"calendar": "standard"} if named else {})
    old = xr.Dataset({"seen": ("time", [730_120], attributes)})
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await to_icechunk(old if there else xr.Dataset(), session, group="old")
        await to_icechunk(days, session, group="young")
        await session.commit("written")
        session = await repository.writable_session("main")
        monkeypatch.setitem(sys.modules, "cftime", None)
        monkeypatch.setattr(xarray_times, "cftime", None, raising=False)
        more = {"append_dim": "time"} if there else {"mode": "a", "encoding": {"seen": attributes}}
        with pytest.raises(MissingDriverError, match="pip install cftime"):
            await to_icechunk(days, session, group="old", **cast("Any", more))
        assert not session.has_uncommitted_changes
        await to_icechunk(days, session, group="young", append_dim="time")
        assert (await open_dataset(session, "young")).sizes == {"time": 2}


@pytest.mark.parametrize(
    ("first", "units", "calendar"),
    [
        ("0900-01-01", "days since 0001-01-01", "proleptic_gregorian"),
        ("1700-01-01", "hours since 1600-01-01", "standard"),
    ],
)
async def test_times_that_xarray_counts_alone_need_no_package(
    first: str, units: str, calendar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In nanoseconds it could not count them."""
    monkeypatch.setitem(sys.modules, "cftime", None)
    monkeypatch.setattr(xarray_times, "cftime", None, raising=False)
    days = xr.Dataset({"seen": ("time", np.array([first, first], "M8[s]"))})
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        encoding = {"seen": {"units": units, "calendar": calendar}}
        await to_icechunk(days, session, encoding=encoding)
        array = await zarr.open_array(store=session.store, path="seen")
        assert str(array.attrs["units"]).startswith(units)
        assert np.asarray(await array.getitem(...)).all()


async def test_times_of_day_are_appended_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether integers can count them is asked of the times that are written, and of no other."""
    monkeypatch.setitem(sys.modules, "cftime", None)
    monkeypatch.setattr(xarray_times, "cftime", None, raising=False)
    moments = np.datetime64("2024-01-01T06", "ns") + np.arange(3) * np.timedelta64(1, "D")
    days = xr.Dataset({"seen": ("time", moments)})
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await to_icechunk(days.isel(time=slice(2)), session)
        await to_icechunk(days.isel(time=slice(2, 3)), session, append_dim="time")
        assert ((await open_dataset(session))["seen"].to_numpy() == moments).all()


async def test_nothing_is_written_through_a_session_that_reads() -> None:
    """A missing group raises `FileNotFoundError`."""
    async with Repository.create("memory://xarray-reads") as repository:
        session = await repository.readonly_session("main")
        with pytest.raises((ReadOnlyError, ValueError), match=r"(?i)read.only|only reads"):
            await to_icechunk(dataset(), session)
        with pytest.raises(FileNotFoundError):
            await open_dataset(session, "none")


async def test_datasets_go_to_sessions_of_their_own_kind() -> None:
    """Neither to a repository nor to a store; the message says what the others are for."""
    location = memory_url()
    async with Repository.create(location) as repository:
        session = await repository.writable_session("main")
        for given in (repository, session.store, None):
            with pytest.raises(WrongTypeError, match=r"of icechunk_async, not a .*sync\.xarray"):
                await to_icechunk(dataset(), cast("Session", given))
            with pytest.raises(WrongTypeError, match=r"of icechunk_async, not a .*sync\.xarray"):
                await open_dataset(cast("Session", given))
        for asked in (session, repository, session.store):
            blocking = cast("sync.Session", asked)
            for call in (lambda it: write_blocking(dataset(), it), open_blocking):
                with pytest.raises(TypeError, match=r"icechunk_async\.xarray takes those of"):
                    call(blocking)
        assert not session.has_uncommitted_changes
