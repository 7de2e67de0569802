"""xarray over the store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr

from icechunk_async import Repository
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import memory_url

if TYPE_CHECKING:
    from icechunk_async import Session

# xarray names types and options of Zarr that are not settled yet, and Zarr says so.
pytestmark = pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")


def _dataset() -> xr.Dataset:
    rng = np.random.default_rng(0)
    return xr.Dataset(
        {
            "temperature": (
                ("time", "station"),
                rng.normal(280, 5, (24, 3)),
                {"units": "K", "valid_range": [200.0, 330.0]},
            ),
            "count": (("time",), np.arange(24, dtype="i2")),
        },
        coords={
            "time": np.datetime64("2020-01-01", "ns") + np.arange(24).astype("m8[D]"),
            "station": ["Kew", "Oxford", "Dürham"],
        },
        attrs={"title": "test"},
    )


async def _open(session: Session) -> xr.Dataset:
    return await asyncio.to_thread(xr.open_zarr, session.store, consolidated=False, chunks=None)


@pytest.mark.parametrize("spec", [1, 2])
async def test_dataset_round_trips(spec: int) -> None:
    """Types, times, strings and attributes; after appending, and at the snapshot before."""
    whole = _dataset()
    async with Repository.create(memory_url(), spec_version=spec) as repository:
        session = await repository.writable_session("main")
        first = whole.isel(time=slice(0, 12))
        await asyncio.to_thread(
            first.to_zarr, session.store, mode="w", consolidated=False, zarr_format=3
        )
        half = await session.commit("half")
        session = await repository.writable_session("main")
        await asyncio.to_thread(
            whole.isel(time=slice(12, 24)).to_zarr,
            session.store,
            append_dim="time",
            consolidated=False,
        )
        await session.commit("whole")
        xr.testing.assert_identical(
            (await _open(await repository.readonly_session("main"))).load(), whole
        )
        xr.testing.assert_identical(
            (await _open(await repository.readonly_session(snapshot_id=half))).load(), first
        )


async def test_opening_is_lazy() -> None:
    """Variables are read when they are used, and only the chunks that are."""
    async with open_storage(memory_url()) as plain:
        async with Repository.create(plain) as repository:
            session = await repository.writable_session("main")
            data = xr.Dataset({"v": (("t", "x"), np.random.default_rng(0).random((20, 500)))})
            await asyncio.to_thread(
                data.to_zarr,
                session.store,
                mode="w",
                consolidated=False,
                zarr_format=3,
                encoding={"v": {"chunks": (1, 500)}},
            )
            await session.commit("data")
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.open(storage) as repository:
            opened = await _open(await repository.readonly_session("main"))
            assert not [key for _, key in storage.log if key.startswith("chunks/")]
            rows = await asyncio.to_thread(lambda: opened.v.isel(t=slice(4, 7)).values)
            np.testing.assert_array_equal(rows, data.v.values[4:7])
            assert len([key for _, key in storage.log if key.startswith("chunks/")]) == 3
