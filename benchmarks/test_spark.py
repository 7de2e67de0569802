"""Spark beside one process, a pool and Dask, on the same work on the local disk of one machine.

The CPU of all processes is counted: this one, its pools, and Spark's JVM and Python. Everybody has
two workers, which run and have done the work once before. A job that does nothing shows what Spark
takes for itself.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("psutil", reason="psutil, which counts CPU, is not installed")
pytest.importorskip("pyspark", reason="Spark is not installed")
pytest.importorskip("dask", reason="a peer, Dask, is not installed")
pytest.importorskip("h5py", reason="h5py, which writes the files to ingest, is not installed")

import dask
import dask.array as da
import h5py
import numpy as np
import zarr
from pyarrow import parquet
from tests.spark.java import java_home
from tests.spark.sources import open_for

from benchmarks.spark.measure import COLUMNS, DAYS_IN_CHUNK, ROWS, WIDTH, Place, best
from benchmarks.spark.tasks import compute, compute_part, leave, scan_part, warm
from icechunk_async.spark import garbage_collect, ingest_virtual, map_chunks
from icechunk_async.sync import Repository
from icechunk_async.sync.dask import store_dask
from icechunk_async.sync.xarray import open_dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.contest import Contest

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(scope="module")
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """A session of Spark, and a repository of 1,000 days; of 40 for a quick look."""
    directory = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        home = java_home(directory / "java")
        if home is not None:
            patch.setenv("JAVA_HOME", home)
        patch.setenv("PYTHONWARNDEFAULTENCODING", "")
        made = Place(directory, 40 if request.config.getoption("size") == "quick" else 1000)
        yield made
        made.spark.stop()


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """Processes that have imported what the work needs."""
    with ProcessPoolExecutor(WIDTH, get_context("spawn")) as made:
        list(made.map(warm, range(2 * WIDTH)))
        yield made


def _compare(contest: Contest, workload: str, contenders: dict[str, Callable[[], object]]) -> None:
    """Do each in turn, and keep the CPU and the time of each."""
    for work in contenders.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(contest.pick(1, 5)):
        for name, spent in zip(contenders, best(*contenders.values(), times=1), strict=True):
            seconds[name].append(spent.seconds)
            cpu[name].append(spent.cpu)
    contest.add(workload, seconds, cpu=cpu, metric="seconds")
    contest.add(workload, cpu, metric="cpu seconds")


def test_map_chunks(contest: Contest, place: Place, pool: ProcessPoolExecutor) -> None:
    """Compute an array from another, chunk by chunk, and commit."""

    def parts(count: int, run: Callable[..., list[Any]]) -> None:
        session = place.repository.writable_session("main")
        session.merge(*run(session.fork(), count))
        session.commit("computed")

    def pooled(fork: Any, count: int) -> list[Any]:
        done = [pool.submit(compute_part, fork, "t", "u", it, count) for it in range(count)]
        return [it.result() for it in done]

    def by_dask() -> None:
        session = place.repository.writable_session("main")
        fork = session.fork()
        source = da.from_zarr(zarr.open_array(fork.store, path="t", mode="r"))
        target = zarr.open_array(fork.store, path="u", mode="r+")
        with dask.config.set(pool=pool):
            done = store_dask(
                sources=[source.map_blocks(compute)], targets=[target], scheduler="processes"
            )
        session.merge(done)
        session.commit("computed")

    _compare(
        contest,
        f"map_chunks, {place.cells * 4 / 1e6:.0f} MB",
        {
            "ours": lambda: map_chunks(place.spark, place.repository, compute, ["t"], "u"),
            "a job that does nothing": lambda: map_chunks(
                place.spark, place.repository, leave, [], "u", tasks=WIDTH
            ),
            "one process": lambda: parts(1, lambda fork, _: [compute_part(fork, "t", "u", 0, 1)]),
            "a pool": lambda: parts(2 * WIDTH, pooled),
            "dask": by_dask,
        },
    )


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_map_chunks_beside_xarray_beam(contest: Contest, place: Place) -> None:
    """Compute an array from another in Apache Beam, into a plain Zarr store that nobody commits."""
    beam: Any = pytest.importorskip("apache_beam", reason="a peer, Apache Beam, is not installed")
    xbeam: Any = pytest.importorskip("xarray_beam", reason="a peer, xarray-beam, is not installed")
    settings: Any = pytest.importorskip("apache_beam.options.pipeline_options")
    # Its processes would start anew for each pipeline, and take seconds.
    options = settings.DirectOptions(
        direct_num_workers=WIDTH, direct_running_mode="multi_threading"
    )
    chunks = {"day": DAYS_IN_CHUNK, "y": ROWS, "x": COLUMNS}

    def by_beam() -> None:
        session = place.repository.readonly_session("main")
        source = open_dataset(session, chunks=None)[["t"]].drop_vars(["day", "y", "x"])
        store = str(place.directory / "beam.zarr")
        with beam.Pipeline(options=options) as pipeline:
            blocks = pipeline | xbeam.DatasetToChunks(source, chunks)
            done = blocks | beam.MapTuple(lambda key, block: (key, block.map(compute)))
            template = xbeam.make_template(source)
            done | xbeam.ChunksToZarr(store, template, chunks, zarr_format=3)

    _compare(
        contest,
        f"map_chunks, {place.cells * 4 / 1e6:.0f} MB, and Beam",
        {
            "ours": lambda: map_chunks(place.spark, place.repository, compute, ["t"], "u"),
            "xarray-beam, not committed": by_beam,
        },
    )


def test_rows_out(contest: Contest, place: Place) -> None:
    """Read every row of a table, and add up its columns."""
    sums = ("sum(t)", "sum(day + y + x)")

    def in_one_process() -> None:
        session = place.repository.readonly_session("main")
        frame = open_dataset(session, chunks=None)[["t"]].to_dataframe().reset_index()
        assert frame["t"].sum()
        assert (frame["day"] + frame["y"] + frame["x"]).sum()

    frames = place.arrays(), place.spark.read.parquet(place.parquet)
    _compare(
        contest,
        f"{place.cells / 1e6:.2g} M rows out",
        {
            "ours": lambda: frames[0].selectExpr(*sums).collect(),
            "Spark from Parquet": lambda: frames[1].selectExpr(*sums).collect(),
            "one process, xarray": in_one_process,
        },
    )


def test_rows_in(contest: Contest, place: Place) -> None:
    """Write rows to an array that exists."""
    rows = place.spark.read.parquet(place.parquet).selectExpr("day", "y", "x", "t AS u")

    def in_one_process() -> None:
        table: Any = cast("Any", parquet).read_table(place.parquet, columns=["day", "y", "x", "t"])
        values = table.sort_by([(it, "ascending") for it in ("day", "y", "x")]).column("t")
        session = place.repository.writable_session("main")
        array: Any = zarr.open_array(session.store, path="u", mode="r+")
        array[:] = values.to_numpy().reshape(-1, ROWS, COLUMNS)
        session.commit("written")

    _compare(
        contest,
        f"{place.cells / 1e6:.2g} M rows in",
        {
            "ours": lambda: rows.write.format("icechunk").mode("overwrite").save(place.url),
            "Spark to Parquet": lambda: rows.write.mode("overwrite").parquet(
                str(place.directory / "written")
            ),
            "one process, Arrow": in_one_process,
        },
    )


def test_ingest(contest: Contest, place: Place, pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    """Scan NetCDF files for references to their chunks, and commit them."""
    folder = tmp_path / "files"
    folder.mkdir()
    count = contest.pick(8, 400)
    for number in range(count):
        with h5py.File(folder / f"{number:04}.nc", "w") as file:
            for name in "abcd":
                file.create_dataset(name, data=np.ones((8, 64, 64), "f4"), chunks=(1, 64, 64))
    repository = open_for((tmp_path / "repository").as_uri(), folder)
    root = repository.lookup_branch("main")
    files = sorted(it.as_uri() for it in folder.glob("*.nc"))

    def ours() -> None:
        found = ingest_virtual(place.spark, repository, files, mode="overwrite")
        assert found.report.num_rows == count
        repository.reset_branch("main", root)

    _compare(
        contest,
        f"ingest of {count} NetCDF files",
        {
            "ours": ours,
            "one process, scanning alone": lambda: scan_part(repository, files),
            "a pool, scanning alone": lambda: [
                it.result()
                for it in [
                    pool.submit(scan_part, repository, files[at::WIDTH]) for at in range(WIDTH)
                ]
            ],
        },
    )


def test_collection(contest: Contest, place: Place, tmp_path: Path) -> None:
    """Look for garbage among many objects, and delete nothing."""
    repository = Repository.create((tmp_path / "repository").as_uri())
    arrays = contest.pick(3, 30)
    for number in range(arrays):
        session = repository.writable_session("main")
        array: Any = zarr.create_array(
            session.store,
            name=f"a{number}",
            shape=(200, 1000),
            chunks=(1, 1000),
            dtype="f8",
            compressors=None,  # compressed, they would be inline and no objects
        )
        array[:] = 1.0
        session.commit(f"{number}")

    def now() -> datetime:
        return datetime.now(UTC)

    _compare(
        contest,
        f"collection, {200 * arrays:,} chunks",
        {
            "ours": lambda: garbage_collect(place.spark, repository, now(), dry_run=True),
            "one process": lambda: asyncio.run(
                repository.garbage_collect_async(now(), dry_run=True)
            ),
        },
    )
