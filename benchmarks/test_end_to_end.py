"""Whole tasks of people who use xarray and Dask.

A dataset of 200 variables on the local disk, through the functions for xarray that both packages
have. Ours is synced to the disk when a commit returns, the official engine's is not.
"""

from __future__ import annotations

import os
import warnings
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import dask.array
import icechunk.dask
import icechunk.xarray
import numpy as np
import pytest
import xarray
import zarr

import icechunk_async.sync.dask
import icechunk_async.sync.xarray
from benchmarks.one_chunk import ENGINES
from benchmarks.peers import create, open_repository

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.attic import Attic
    from benchmarks.contest import Contest

VARIABLES = 200
DAYS = 8
SIDES = 400, 400
"""A day of a variable takes 640 kB, all of the dataset 1 GB."""
XARRAY: dict[str, Any] = {
    "ours": icechunk_async.sync.xarray.to_icechunk,
    "official": icechunk.xarray.to_icechunk,
}
DASK: dict[str, Any] = {
    "ours": icechunk_async.sync.dask.store_dask,
    "official": icechunk.dask.store_dask,
}


def _dataset(contest: Contest, days: int, first: int = 0) -> xarray.Dataset:
    """Return days of all variables, numbers that compress by half."""
    variables, sides = contest.pick((3, (4, 4)), (VARIABLES, SIDES))
    random = np.random.default_rng(first)
    numbers = random.normal(280, 10, (days, *sides)).astype("f4").round(2)
    times = np.datetime64("2020-01-01", "ns") + (first + np.arange(days)) * np.timedelta64(1, "D")
    arrays = {f"v{it}": (("time", "y", "x"), numbers + np.float32(it)) for it in range(variables)}
    return xarray.Dataset(arrays, {"time": times})


def _fresh(folder: Path, attic: Attic, engine: str) -> Any:
    """Return a session of a new repository, once everything written before is on the disk."""
    attic.put_away(folder / engine)
    os.sync()
    return create(engine, str(folder / engine)).writable_session("main")


def _write(engine: str, session: Any, dataset: xarray.Dataset, **how: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about consolidated metadata
        XARRAY[engine](dataset, session, **how)
    session.commit("written")


def _chunks(dataset: xarray.Dataset) -> dict[str, Any]:
    """Return an encoding with a chunk for each day."""
    found = {str(it): {"chunks": (1, *dataset[it].shape[1:])} for it in dataset.data_vars}
    return found | {"time": {"chunks": (1000,)}}


def test_write_dataset(contest: Contest, tmp_path: Path, attic: Attic) -> None:
    """`to_icechunk` and commit."""
    dataset = _dataset(contest, contest.pick(2, DAYS))
    size = dataset.nbytes

    def writing(engine: str) -> Callable[[Any], None]:
        return lambda session: _write(engine, session, dataset, encoding=_chunks(dataset))

    contest.race(
        f"xarray: write {len(dataset.data_vars)} variables, {size / 1e6:,.0f} MB",
        {engine: writing(engine) for engine in ENGINES},
        rounds=3,
        warmup_rounds=0,
        setup=partial(_fresh, tmp_path, attic),
        note="ours is synced to the disk, the official engine's is not",
    )


@pytest.mark.parametrize("work", ["open", "average"])
def test_read_dataset(contest: Contest, tmp_path: Path, work: str) -> None:
    """Open, and take the mean of everything or nothing."""
    dataset = _dataset(contest, contest.pick(2, DAYS))
    session = create("official", str(tmp_path)).writable_session("main")
    _write("official", session, dataset, encoding=_chunks(dataset))

    def opened(engine: str) -> xarray.Dataset:
        store = open_repository(engine, str(tmp_path)).readonly_session("main").store
        found: xarray.Dataset = xarray.open_zarr(store, consolidated=False, chunks=None)
        return found

    def averaged(engine: str) -> float:
        return float(opened(engine).to_array().mean())

    assert averaged("ours") == averaged("official")
    amount = f"xarray: open {len(dataset.data_vars)} variables"
    names = {
        "open": (amount, opened),
        "average": (f"{amount}, {dataset.nbytes / 1e6:,.0f} MB, and take the mean", averaged),
    }
    workload, chosen = names[work]
    contest.race(
        workload,
        {engine: partial(chosen, engine) for engine in ENGINES},
        rounds=5,
        targets={"official": 1},
    )


def test_append_days(contest: Contest, tmp_path: Path) -> None:
    """Append a day to every variable, and commit."""
    first = _dataset(contest, contest.pick(2, DAYS))
    day = _dataset(contest, 1, first.sizes["time"])
    numbers = count(first.sizes["time"])
    repositories: dict[str, Any] = {}
    for engine in ENGINES:
        repositories[engine] = create(engine, str(tmp_path / engine))
        session = repositories[engine].writable_session("main")
        _write(engine, session, first, encoding=_chunks(first))

    def another(name: str) -> tuple[Any, xarray.Dataset]:
        times = [np.datetime64("2020-01-01", "ns") + next(numbers) * np.timedelta64(1, "D")]
        return repositories[name].writable_session("main"), day.assign_coords(time=times)

    def appending(engine: str) -> Callable[[tuple[Any, xarray.Dataset]], None]:
        return lambda it: _write(engine, it[0], it[1], append_dim="time")

    contest.race(
        f"xarray: append a day to {len(day.data_vars)} variables, and commit",
        {engine: appending(engine) for engine in ENGINES},
        rounds=5,
        setup=another,
        note="ours is synced to the disk, the official engine's is not",
    )


def test_dask(contest: Contest, tmp_path: Path, attic: Attic) -> None:
    """Write a Dask array from threads by forks, and commit."""
    shape = contest.pick((4, 10, 10), (256, 500, 500))
    source = dask.array.random.default_rng(0).random(shape, chunks=(1, *shape[1:]), dtype="f4")

    def writing(engine: str) -> Callable[[Any], None]:
        def write(session: Any) -> None:
            zarr.create_array(
                session.store, name="a", shape=shape, chunks=(1, *shape[1:]), dtype="f4"
            )
            session.commit("created")
            session = open_repository(engine, str(tmp_path / engine)).writable_session("main")
            fork = session.fork()
            target = zarr.open_array(fork.store, path="a", mode="r+")
            session.merge(DASK[engine](sources=[source], targets=[target]))
            session.commit("written")

        return write

    contest.race(
        f"dask: write {np.prod(shape) * 4 / 1e6:,.0f} MB by forks, and commit",
        {engine: writing(engine) for engine in ENGINES},
        rounds=3,
        warmup_rounds=0,
        setup=partial(_fresh, tmp_path, attic),
        note="ours is synced to the disk, the official engine's is not",
    )
