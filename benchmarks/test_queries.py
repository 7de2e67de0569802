"""Query arrays as tables.

By value: an array of floats, each chunk around another value, as a field that changes with time.
The statistics of chunks were made before, by `analyze`. The official engine has none: its user
reads the array slab by slab. As rows: ours are Arrow's, from its dataset; the official engine's are
those of xarray's data frame. Far away, both are read by us: xarray asks for all chunks at once, the
dataset for those of a few megabytes at a time, which fit into bounded memory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import xarray
import zarr

from benchmarks.peers import create, open_repository
from icechunk_async import arrow
from icechunk_async._runtime.blocking.portal import blocking
from icechunk_async.storage import open_storage
from icechunk_async.sync import Repository
from icechunk_async.sync.xarray import open_dataset, to_icechunk
from icechunk_async.testing.latency import LatencyStorage

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.contest import Contest

LEAST_SAVING = 10
SPREAD = 4.0
"""A chunk has values from its number to this much more, so that few chunks have any one value."""


def _fill(directory: str, chunks: int, cells: int) -> None:
    session = create("ours", directory, inline=0).writable_session("main")
    array: Any = zarr.create_array(
        session.store, name="t", shape=(chunks * cells,), chunks=(cells,), dtype="f4"
    )
    # Not random: values of a chunk are near to one another, as those of a field are.
    wave = (np.arange(cells, dtype="f4") % 4096) * (SPREAD / 4096)
    for number in range(chunks):
        array[number * cells : (number + 1) * cells] = wave + number
    session.commit("filled")
    open_repository("ours", directory).analyze()


def _by_slabs(directory: str, low: float, high: float, cells: int) -> float:
    store = open_repository("official", directory).readonly_session("main").store
    array: Any = zarr.open_array(store, path="t", mode="r")
    most = -math.inf
    # Eight chunks at a time: the array as a whole would not fit into memory.
    for start in range(0, array.shape[0], 8 * cells):
        slab = array[start : start + 8 * cells]
        found = slab[(slab > low) & (slab < high)]
        most = max(most, float(found.max(initial=-math.inf)))
    return most


def test_selective(contest: Contest, tmp_path: Path) -> None:
    """The largest value in a narrow range, of 10 GB."""
    chunks, cells = contest.pick((64, 4096), (2560, 1 << 20))
    directory = str(tmp_path / "field")
    _fill(directory, chunks, cells)
    low, high = chunks / 2 + 0.5, chunks / 2 + 1.5
    found: list[Any] = []
    slabs: list[float] = []

    def ours() -> None:
        session = open_repository("ours", directory).readonly_session("main")
        found.append(session.aggregate("t", "max", where=f"t > {low} and t < {high}"))

    contest.race(
        f"local: largest value in a range, of {chunks} chunks of {cells * 4 >> 10} KiB",
        {"ours": ours, "official": lambda: slabs.append(_by_slabs(directory, low, high, cells))},
        rounds=3,
    )
    cost = found[-1]
    # Of all turns: an answer that differs once is wrong.
    assert {it.value for it in found} == set(slabs)
    whole = cost.bytes_read + cost.bytes_skipped
    assert cost.bytes_read * LEAST_SAVING <= whole
    contest.add(
        f"local: largest value in a range, of {chunks} chunks of {cells * 4 >> 10} KiB",
        {"ours": [float(cost.bytes_read)], "official": [float(whole)]},
        metric="bytes",
        targets={"official": LEAST_SAVING},
    )


def test_rows(contest: Contest, tmp_path: Path) -> None:
    """All cells as rows of Arrow, beside the data frame of xarray."""
    times = contest.pick(20, 2000)
    directory = str(tmp_path / "field")
    coords = {
        "time": np.datetime64("2020-01-01", "ns") + np.arange(times) * np.timedelta64(1, "h"),
        "lat": np.linspace(-90, 90, 64),
        "lon": np.linspace(0, 359, 96),
    }
    values = np.random.default_rng(0).random((times, 64, 96), "f4")
    dataset = xarray.Dataset({"t": (tuple(coords), values)}, coords=coords)
    session = create("ours", directory, inline=0).writable_session("main")
    to_icechunk(dataset, session, encoding={"t": {"chunks": (min(50, times), 64, 96)}})
    session.commit("filled")

    def frame() -> int:
        store = open_repository("official", directory).readonly_session("main").store
        opened: Any = xarray.open_zarr(store, consolidated=False, chunks=None)
        return len(opened.to_dataframe())

    def table() -> int:
        return len(arrow.dataset(directory).to_table())

    assert frame() == table()
    contest.race(
        f"local: {values.size:,} cells with three coordinates as rows",
        {"ours": table, "official": frame},
        targets={"official": 0.8},
    )


def test_rows_far_away(contest: Contest) -> None:
    """All cells as rows from a storage that takes 50 ms to answer."""
    times = contest.pick(40, 2000)
    coords = {
        "time": np.datetime64("2020-01-01", "ns") + np.arange(times) * np.timedelta64(1, "h"),
        "point": np.arange(64 * 96) / 4,
    }
    values = np.random.default_rng(0).random((times, 64 * 96), "f4")
    dataset = xarray.Dataset({"t": (tuple(coords), values)}, coords=coords)
    with blocking(open_storage(f"memory://{uuid4()}")) as near:
        storage = LatencyStorage(near, seconds=0)
        repository = Repository.create(storage)
        session = repository.writable_session("main")
        to_icechunk(dataset, session, encoding={"t": {"chunks": (20, 64 * 96)}})
        session.commit("filled")
        # Only once it is filled: writing is not what is measured.
        storage.seconds = contest.pick(0.001, 0.05)

        def frame() -> int:
            opened: Any = open_dataset(repository.readonly_session("main"), chunks=None)
            return len(opened.to_dataframe())

        def table() -> int:
            found = arrow.dataset(repository).to_batches()
            return sum(it.num_rows for it in found)

        assert frame() == table()
        contest.race(
            f"50 ms away: {values.size:,} cells with two coordinates as rows",
            {"ours": table, "xarray, all at once": frame},
            targets={"xarray, all at once": 0.8},
        )
