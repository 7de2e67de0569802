"""The cost of Spark: rates beside one process, a pool and Parquet, and what plans and filters do.

    python -m benchmarks.spark.measure [--days 1000]

Peers are measured in the same run, in turn, three times each; the best counts. Take the ratios: the
machine is seldom idle, and all of this is one machine with local files.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import psutil
import xarray as xr
import zarr
from pyspark.sql import SparkSession
from rich.console import Console
from rich.table import Table

from benchmarks.spark.tasks import compute, compute_part, leave, warm
from icechunk_async.spark import map_chunks, register
from icechunk_async.spark.options import ReadOptions
from icechunk_async.spark.read.reader import IcechunkReader, Reading
from icechunk_async.sync import (
    Repository,
    RepositoryConfig,
    VirtualChunkContainer,
    local_filesystem_store,
)
from icechunk_async.sync.xarray import open_dataset, to_icechunk

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

WIDTH = 2
DAYS_IN_CHUNK, ROWS, COLUMNS = 20, 120, 150


@dataclass
class Measured:
    """One line of the table."""

    what: str
    value: str
    peer: str = ""
    ratio: str = ""
    target: str = ""


@dataclass
class Spent:
    """The resources that something took."""

    seconds: float
    jvm: float = 0.0
    """Seconds of CPU of the JVM."""
    python: float = 0.0
    """Seconds of CPU of Spark's Python processes."""
    read_bytes: int = 0
    """Bytes that these read from files and sockets."""
    own: float = 0.0
    """Seconds of CPU of this process and of those of its pool."""

    @property
    def cpu(self) -> float:
        """Seconds of CPU in all."""
        return self.jvm + self.python + self.own


class Place:
    """A Spark session, and a repository with a table that Parquet has as well."""

    def __init__(self, directory: Path, days: int) -> None:
        """Make everything."""
        self.directory = directory
        self.url = (directory / "repository").as_uri()
        self.parquet = str(directory / "parquet")
        self.cells = days * ROWS * COLUMNS
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = SparkSession.builder.master(f"local[{WIDTH}]")
        for name, value in {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "2g",
            "spark.local.dir": str(directory / "local"),
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }.items():
            builder = builder.config(name, value)
        self.spark = builder.getOrCreate()
        self.spark.sparkContext.setLogLevel("ERROR")
        register(self.spark)
        self.repository = Repository.create(self.url)
        self._fill(days)

    def _fill(self, days: int) -> None:
        values = np.random.default_rng(5).normal(280, 10, (days, ROWS, COLUMNS)).astype("f4")
        dataset = xr.Dataset(
            {"t": (("day", "y", "x"), values), "u": (("day", "y", "x"), values * 0)},
            coords={"day": np.arange(days), "y": np.arange(ROWS), "x": np.arange(COLUMNS)},
        )
        session = self.repository.writable_session("main")
        chunks = {"chunks": (DAYS_IN_CHUNK, ROWS, COLUMNS), "compressors": None}
        to_icechunk(dataset, session, encoding={"t": chunks, "u": chunks})
        session.commit("Filled")
        os.mkdir(self.parquet)  # noqa: PTH102 -- a string for Spark
        for start in range(0, days, DAYS_IN_CHUNK):
            part = dataset[["t"]].isel(day=slice(start, start + DAYS_IN_CHUNK))
            frame = part.to_dataframe().reset_index()
            frame.to_parquet(f"{self.parquet}/{start:06}.parquet", index=False)

    def arrays(self, **options: str) -> DataFrame:
        """Return the repository's table."""
        return self.spark.read.format("icechunk").options(arrays="t", **options).load(self.url)


def processes() -> tuple[float, float, int, float]:
    """Return CPU seconds of the JVM, and of its Python processes and bytes these have read.

    Then the CPU seconds of this process and its pool.
    """
    jvm = python = own = 0.0
    read = 0
    for it in (psutil.Process(), *psutil.Process().children()):
        times = it.cpu_times()
        if it.name() != "java":
            own += times.user + times.system
            continue
        jvm += times.user + times.system
        python += times.children_user + times.children_system
        for child in it.children(recursive=True):
            times = child.cpu_times()
            python += times.user + times.system + times.children_user + times.children_system
            read += child.io_counters().read_chars
    return jvm, python, read, own


def best(*work: Callable[[], object], times: int = 3) -> list[Spent]:
    """Do each in turn, several times; answer what the quickest of each took."""
    found: list[list[Spent]] = [[] for _ in work]
    for _ in range(times):
        for at, each in enumerate(work):
            before, begun = processes(), time.perf_counter()
            each()
            seconds, after = time.perf_counter() - begun, processes()
            spent = [b - a for a, b in zip(before, after, strict=True)]
            found[at].append(Spent(seconds, spent[0], spent[1], int(spent[2]), spent[3]))
    return [min(them, key=lambda it: it.seconds) for them in found]


def scan(place: Place) -> list[Measured]:
    """Every row of a table, as an aggregate needs it."""

    def in_one_process() -> None:
        dataset = open_dataset(place.repository.readonly_session("main"), chunks=None)
        assert len(dataset[["t"]].to_dataframe()) == place.cells

    def of(frame: DataFrame) -> Callable[[], object]:
        return lambda: frame.selectExpr("sum(t)", "sum(day + y + x)").collect()

    frames = place.arrays(), place.spark.read.parquet(place.parquet)
    for frame in frames:
        of(frame)()  # processes start, and code is compiled
    ours, parquet, xarray = best(of(frames[0]), of(frames[1]), in_one_process)
    rate = f"{place.cells / ours.seconds / 1e6:.1f} M rows/s"
    whole = ours.jvm + ours.python
    return [
        Measured("scan", rate, f"xarray to_dataframe {place.cells / xarray.seconds / 1e6:.1f}",
                 f"{xarray.seconds / ours.seconds:.2f}"),
        Measured("scan", rate, f"Parquet {place.cells / parquet.seconds / 1e6:.1f}",
                 f"{parquet.seconds / ours.seconds:.2f}"),
        Measured("CPU of the scan: Python", f"{ours.python:.1f} s",
                 f"JVM {ours.jvm:.1f} s", f"{ours.python / whole:.0%} : {ours.jvm / whole:.0%}"),
        Measured("CPU of the scan", f"{ours.cpu:.1f} s",
                 f"Parquet {parquet.cpu:.1f} s", f"{ours.cpu / parquet.cpu:.2f} x its CPU"),
        Measured("CPU of the scan", f"{ours.cpu:.1f} s",
                 f"xarray {xarray.cpu:.1f} s", f"{ours.cpu / xarray.cpu:.2f} x its CPU"),
    ]  # fmt: skip


def chunkwise(place: Place) -> list[Measured]:
    """Compute an array from another, chunk by chunk, and commit."""

    def on_spark() -> None:
        map_chunks(place.spark, place.repository, compute, ["t"], "u", tasks=2 * WIDTH)

    def nothing() -> None:
        map_chunks(place.spark, place.repository, leave, [], "u", tasks=2 * WIDTH)

    def one_process() -> None:
        session = place.repository.writable_session("main")
        session.merge(compute_part(session.fork(), "t", "u", 0, 1))
        session.commit("One process")

    with ProcessPoolExecutor(WIDTH, get_context("spawn")) as pool:

        def in_pool() -> None:
            session = place.repository.writable_session("main")
            fork = session.fork()
            parts = range(2 * WIDTH)
            done = [pool.submit(compute_part, fork, "t", "u", it, len(parts)) for it in parts]
            session.merge(*(it.result() for it in done))
            session.commit("A pool")

        list(pool.map(warm, range(2 * WIDTH)))
        for each in (on_spark, nothing, in_pool):
            each()
        ours, pooled, alone, idle = best(on_spark, in_pool, one_process, nothing)
    rate = f"{place.cells / ours.seconds / 1e6:.1f} M cells/s"
    return [
        Measured("map_chunks", rate, f"pool of {WIDTH} {place.cells / pooled.seconds / 1e6:.1f}",
                 f"{ours.seconds / pooled.seconds:.2f} x its time"),
        Measured("map_chunks, less a job that does nothing", f"{idle.seconds:.2f} s less",
                 f"pool of {WIDTH} {pooled.seconds:.2f} s",
                 f"{(ours.seconds - idle.seconds) / pooled.seconds:.2f} x its time", "1.3"),
        Measured("CPU of map_chunks", f"{ours.cpu:.1f} s", f"pool of {WIDTH} {pooled.cpu:.1f} s",
                 f"{ours.cpu / pooled.cpu:.2f} x its CPU"),
        Measured("map_chunks", rate, f"one process {place.cells / alone.seconds / 1e6:.1f}",
                 f"{ours.seconds / alone.seconds:.2f} x its time"),
    ]  # fmt: skip


def write(place: Place) -> list[Measured]:
    """Write rows that come chunk by chunk, and the same rows to Parquet."""
    rows = place.spark.read.parquet(place.parquet).selectExpr("day", "y", "x", "t AS u")

    def to_arrays() -> None:
        rows.write.format("icechunk").mode("overwrite").save(place.url)

    def to_parquet() -> None:
        rows.write.mode("overwrite").parquet(str(place.directory / "written"))

    to_arrays()
    ours, parquet = best(to_arrays, to_parquet, times=2)
    return [
        Measured("df.write", f"{place.cells / ours.seconds / 1e6:.2f} M rows/s",
                 f"Parquet {place.cells / parquet.seconds / 1e6:.2f}",
                 f"{parquet.seconds / ours.seconds:.2f}"),
        Measured("CPU of df.write", f"{ours.cpu:.1f} s",
                 f"Parquet {parquet.cpu:.1f} s", f"{ours.cpu / parquet.cpu:.2f} x its CPU"),
    ]  # fmt: skip


def select(place: Place) -> list[Measured]:
    """Ask for one day: a filter that is pushed down, or not."""
    place.spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")

    def ask(**options: str) -> Callable[[], object]:
        return lambda: place.arrays(**options).where("day = 7").selectExpr("sum(t)").collect()

    whole, pushed = ask(), ask(**{"push-filters": "true"})
    for each in (whole, pushed):
        each()
    without, with_it = best(whole, pushed)
    return [
        Measured("one day, pushed down", f"{with_it.read_bytes / 1e6:.1f} MB read",
                 f"not pushed {without.read_bytes / 1e6:.1f} MB",
                 f"{without.read_bytes / with_it.read_bytes:.0f} x fewer", "10"),
        Measured("one day, pushed down", f"{with_it.seconds:.2f} s",
                 f"not pushed {without.seconds:.2f} s",
                 f"{without.seconds / with_it.seconds:.1f} x faster"),
    ]  # fmt: skip


def plan(place: Place) -> list[Measured]:
    """Plan reads of arrays with more and more chunks, in one partition for each."""
    source = place.directory / "source"
    source.mkdir()
    config = RepositoryConfig.default()
    prefix = f"{source.as_uri()}/"
    config.set_virtual_chunk_container(
        VirtualChunkContainer(prefix, local_filesystem_store(str(source)))
    )
    url = (place.directory / "many").as_uri()
    repository = Repository.create(url, config)
    session = repository.writable_session("main")
    counts = (100, 10_000, 100_000)
    for count in counts:
        root = zarr.create_group(session.store, path=f"of{count}")
        root.create_array("t", shape=(count * 10,), chunks=(10,), dtype="f4",
                          dimension_names=["cell"], compressors=None)  # fmt: skip
        session.store.set_virtual_refs_arr(
            f"of{count}/t", (count,), [f"{prefix}a"] * count,
            np.arange(count, dtype="u8") * 40, np.full(count, 40, "u8"),
        )  # fmt: skip
    session.commit("Many chunks")
    lines: list[Measured] = []
    first = 0
    for count in counts:
        size = str(max(1, count * 10 * 12 // 4))
        given = {"path": url, "group": f"of{count}", "partition-bytes": size}
        spent, parts = [], []
        for _ in range(3):
            begun = time.perf_counter()
            reader = reader_of(given)
            parts = reader.partitions()
            spent.append(time.perf_counter() - begun)
        length = len(pickle.dumps((reader, parts)))
        first = first or length
        lines.append(
            Measured(f"plan of {count:,} chunks, {len(parts)} partitions", f"{length:,} bytes",
                     f"{min(spent):.3f} s", f"{length / first:.2f} x", "1.0, 2 s")
        )  # fmt: skip
    return lines


def reader_of(given: dict[str, str]) -> IcechunkReader:
    """Return the reader that Spark's planning would pickle."""
    options = ReadOptions.parse(given)
    schema: StructType = Reading.begin(options).spark_schema()
    return IcechunkReader(options, schema)


MEASURES: Final[dict[str, Callable[[Place], list[Measured]]]] = {
    "scan": scan,
    "map": chunkwise,
    "write": write,
    "select": select,
    "plan": plan,
}


def main() -> None:
    """Measure everything, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=1000, help="of 18,000 cells each")
    parser.add_argument("--only", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    given = parser.parse_args()
    days: int = given.days
    table = Table(title=f"Spark, local[{WIDTH}], {days * ROWS * COLUMNS:,} cells of float32")
    for heading in ("what", "here", "beside", "ratio", "target"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    with tempfile.TemporaryDirectory() as directory:
        place = Place(Path(directory), days)
        for name in given.only:
            for it in MEASURES[name](place):
                table.add_row(it.what, it.value, it.peer, it.ratio, it.target)
                Console(stderr=True).print(it)
        place.spark.stop()
    Console(width=120).print(table)
    Console().print(f"Load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.")


if __name__ == "__main__":
    main()
