"""A small dataset that tests write rows of tables to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from icechunk_async.sync import Repository

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["LAT", "LON", "TIMES", "commits", "dataset", "load", "make", "table"]

TIMES: Any = xr.date_range("2020-01-01", periods=5, freq="D")
LAT = np.array([40.0, 30.0, 20.0], "f4")
LON = np.arange(4, dtype="f8") / 10


def dataset(times: Any = TIMES, seed: int = 0) -> xr.Dataset:
    """Make a small dataset: descending latitudes, packed precipitation."""
    rng = np.random.default_rng(seed)
    shape = (len(times), 3, 4)
    return xr.Dataset(
        {
            "t": (("time", "lat", "lon"), rng.random(shape).astype("f4")),
            "p": (("time", "lat", "lon"), rng.integers(0, 100, shape) / 4),
        },
        {"time": times, "lat": LAT, "lon": LON},
    )


def make(repository: Repository, times: Any = TIMES) -> None:
    """Commit the dataset: chunks of two by two, the second variable packed."""
    session = repository.writable_session("main")
    chunks = (2, 2, 4)
    dataset(times).to_zarr(
        session.store,
        zarr_format=3,
        consolidated=False,
        encoding={
            "t": {"chunks": chunks},
            "p": {"chunks": chunks, "dtype": "i2", "scale_factor": 0.25, "_FillValue": -1},
            "time": {"units": "hours since 1970-01-01", "dtype": "i8"},
        },
    )
    session.commit("made")


def load(url: str) -> xr.Dataset:
    """Read the dataset of the tip."""
    store = Repository.open(url).readonly_session("main").store
    found: xr.Dataset = xr.open_zarr(store, consolidated=False, chunks=None).load()
    return found


def commits(url: str) -> int:
    """Count the commits of the branch."""
    return len(list(Repository.open(url).ancestry(branch="main")))


def table(spark: SparkSession, ds: xr.Dataset, columns: tuple[str, ...] = ("t", "p")) -> DataFrame:
    """Return a dataset as rows, in no order."""
    frame = ds[list(columns)].to_dataframe().reset_index().sample(frac=1, random_state=1)
    frame["time"] = frame["time"].dt.tz_localize("UTC")
    return spark.createDataFrame(frame[["time", "lat", "lon", *columns]])
