"""Climate projections on Spark: ingest, append, derive, check, publish, query, draw, maintain.

    python examples/spark_pipeline.py DIRECTORY

Everything is written to the branch ``staging``, and ``main`` moves only to what was checked. Each
step knows what it has done: run the program again, after a crash too, and it does only the rest.
The data are those of the package ``iris-sample-data``; how-to/spark-pipeline.md explains the steps.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import iris_sample_data
import numpy as np
import xarray as xr
import zarr
from matplotlib.figure import Figure
from pyspark.sql import SparkSession
from rich.console import Console
from rich.table import Table

from icechunk_async.spark import (
    Input,
    NewArray,
    Transaction,
    check_references,
    garbage_collect,
    ingest_virtual,
    map_chunks,
    publish,
    published_version,
    register,
    rewrite_manifests,
    storage_statistics,
)
from icechunk_async.sync import (
    Repository,
    RepositoryConfig,
    VirtualChunkContainer,
    local_filesystem_store,
)
from icechunk_async.sync.credentials import LocalFileSystemAccess
from icechunk_async.sync.xarray import to_icechunk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from icechunk_async.spark.grid import Region

type Block = npt.NDArray[Any]
type Decades = dict[int, float]
"""Warming in kelvin, by the first year of the decade."""

SAMPLES = Path(iris_sample_data.path).resolve()
COPIED, REFERRED, OCEAN = "A1B", "E1", "ocean"
FILES = {"E1_north_america.nc": REFERRED, "ostia_monthly.nc": OCEAN}
"""Files that are referred to, and the groups for them."""
FIRST_YEAR, REFERENCE = 1860, slice(1, 31)
"""Warming is told against the mean of 1861 to 1890."""
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "C3", "linewidth": 2, "marker": "o"},
    {"color": "C0", "linewidth": 9, "alpha": 0.35, "zorder": 1},
    {"color": "black", "linestyle": "--"},
)
"""How curves are drawn. Two are equal until 2000, so the second is wide and lies below."""
MISSING = 1e19
"""Larger values of the ocean's temperature mean land or ice."""
SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
"""For a single machine; leave them out on a cluster."""


@dataclass
class Pipeline:
    """Where everything is, and what was done in this run."""

    spark: SparkSession
    directory: Path
    started: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        """Create the repository, or open it."""
        prefix = f"{SAMPLES.as_uri()}/"
        config = RepositoryConfig.default()
        config.set_virtual_chunk_container(
            VirtualChunkContainer(prefix, local_filesystem_store(str(SAMPLES)))
        )
        self.url = (self.directory / "repository").as_uri()
        self.repository = Repository.open_or_create(
            self.url, config, authorize_virtual_chunk_access={prefix: LocalFileSystemAccess}
        )
        self.options = {"virtual-chunk-access": f'{{"{prefix}": null}}'}
        if "staging" not in self.repository.list_branches():
            self.repository.create_branch("staging", self.repository.lookup_branch("main"))

    def staged(self) -> Any:
        """Return the arrays at the tip of the branch, as a group of Zarr."""
        store = self.repository.readonly_session("staging").store
        return zarr.open_group(store, mode="r", zarr_format=3)

    def view(self, name: str, *columns: str, **options: str) -> None:
        """Make columns of arrays a view for SQL."""
        reader = self.spark.read.format("icechunk").options(**self.options, **options)
        reader.load(self.url).selectExpr(*columns).createOrReplaceTempView(name)

    def is_done(self, step: str, version: int = 1) -> bool:
        """Return whether the branch holds what a step writes."""
        newest = published_version(self.repository, "staging", step)
        return newest is not None and newest >= version


def tell(console: Console, step: str) -> None:
    """Print the step that begins: it may take minutes, in which Spark is silent."""
    console.print(f"{datetime.now():%H:%M:%S}  {step}", highlight=False)


def refer(pipeline: Pipeline) -> None:
    """Make the chunks of two files chunks of arrays; their bytes stay where they are."""
    groups = {(SAMPLES / name).as_uri(): group for name, group in FILES.items()}
    ingest_virtual(
        pipeline.spark,
        pipeline.repository,
        list(groups),
        branch="staging",
        group_of=groups.__getitem__,
        on_error="fail",
        message="Refer to " + " and ".join(FILES),
    )


def decade_of(first: int) -> xr.Dataset:
    """Read ten years of the scenario that is copied.

    Its calendar has twelve months of 30 days, for which tables have no time; years will do, since
    there is one mean for each.
    """
    with h5py.File(SAMPLES / f"{COPIED}_north_america.nc") as file:
        at = slice(first - FIRST_YEAR, first - FIRST_YEAR + 10)
        values = file["air_temperature"][at]
        latitude, longitude = file["latitude"][:], file["longitude"][:]
    return xr.Dataset(
        {"air_temperature": (("year", "latitude", "longitude"), values, {"units": "K"})},
        coords={
            "year": np.arange(first, first + 10, dtype="i4"),
            "latitude": latitude,
            "longitude": longitude,
        },
    )


def begin(pipeline: Pipeline) -> None:
    """Write the first decade of the copied scenario, which says how the arrays are laid out."""
    if pipeline.is_done("begin"):
        return
    session = pipeline.repository.writable_session("staging")
    first = decade_of(FIRST_YEAR)
    chunks = {"air_temperature": {"chunks": (10, *first.air_temperature.shape[1:])}}
    to_icechunk(first, session, group=COPIED, encoding={**chunks, "year": {"chunks": (240,)}})
    publish(
        pipeline.repository,
        session,
        f"{COPIED}: the first decade",
        transaction=Transaction("begin", 1),
    )


def deliver(pipeline: Pipeline, first: int) -> None:
    """Put the rows of a decade where the stream looks for them, whole or not at all."""
    path = pipeline.directory / "landing" / f"{first}.parquet"
    if path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    hidden = path.with_name(f".{path.name}")
    decade_of(first).to_dataframe().reset_index().to_parquet(hidden, index=False)
    os.utime(hidden, (2_000_000_000 + first, 2_000_000_000 + first))  # streams read by age
    hidden.rename(path)


def append(pipeline: Pipeline) -> None:
    """Append what was delivered, a decade in each commit, each exactly once."""
    rows = (
        pipeline.spark.readStream.schema(
            "year int, latitude float, longitude float, air_temperature float"
        )
        .option("maxFilesPerTrigger", 1)
        .parquet(str(pipeline.directory / "landing"))
    )
    query = (
        rows.coalesce(1)
        .writeStream.format("icechunk")
        .option("branch", "staging")
        .option("group", COPIED)
        .option("append-dim", "year")
        .option("txnAppId", f"append {COPIED}")
        .option("message", f"{COPIED}: another decade")
        .option("checkpointLocation", str(pipeline.directory / "checkpoint"))
        .outputMode("append")
        .trigger(availableNow=True)
        .start(pipeline.url)
    )
    query.awaitTermination()


def reference_period(region: Region) -> Region:
    """Return the sum and the count from which a mean is made."""
    return (REFERENCE, *region)


def mean(values: Block) -> Block:
    """Return the mean over time."""
    return np.asarray(values.mean(axis=0, dtype="f8"))


def minus(values: Block, normal: Block) -> Block:
    """Return how far values are from normal."""
    return np.asarray(values - normal)


def month_of(hours: Block) -> Block:
    """Return the month, 1 to 12, of hours since 1970."""
    return hours.astype("M8[h]").astype("M8[M]").astype(int) % 12 + 1


def monthly_mean(values: Block, months: Block) -> Block:
    """Return the mean of each month of the year."""
    means = [values[months == month].mean(axis=0, dtype="f8") for month in range(1, 13)]
    return np.where(np.array(means) < MISSING, means, np.nan)


def minus_monthly_mean(values: Block, months: Block, normal: Block) -> Block:
    """Return how far values are from what is normal in their month."""
    return np.asarray(values - normal[months - 1])


def derive(pipeline: Pipeline, until: int) -> None:
    """Compute what is normal, and how far each year or month is from that."""
    staged, grid = pipeline.staged(), ["latitude", "longitude"]
    for group, time, version in ((COPIED, "year", until), (REFERRED, "time", 1)):
        values = f"{group}/air_temperature"
        shape = staged[values].shape
        normal = NewArray(f"{group}/normal", shape[1:], shape[1:], "f8", grid)
        compute(pipeline, mean, [Input(values, select=reference_period)], normal)
        anomaly = NewArray(f"{group}/anomaly", shape, (10, *shape[1:]), "f4", [time, *grid], np.nan)
        compute(pipeline, minus, [values, normal.path], anomaly, version)
    values = f"{OCEAN}/surface_temperature"
    times, rows, columns = shape = staged[values].shape
    month = NewArray(f"{OCEAN}/month", (times,), (times,), "i1", ["time"])
    compute(pipeline, month_of, [f"{OCEAN}/time"], month)
    chunks = (12, rows, columns // 4)
    normal = NewArray(
        f"{OCEAN}/normal", (12, rows, columns), chunks, "f8", ["calendar_month", *grid], np.nan
    )
    compute(pipeline, monthly_mean, [values, month.path], normal)
    anomaly = NewArray(f"{OCEAN}/anomaly", shape, chunks, "f4", ["time", *grid], np.nan)
    compute(pipeline, minus_monthly_mean, [values, month.path, normal.path], anomaly)


def compute(
    pipeline: Pipeline,
    fn: Callable[..., Block],
    inputs: Sequence[str | Input],
    output: NewArray,
    version: int = 1,
) -> None:
    """Compute an array, which is made if need be, in one commit."""
    step = f"compute {output.path}"
    if pipeline.is_done(step, version):
        return
    map_chunks(
        pipeline.spark,
        pipeline.repository,
        fn,
        inputs,
        output.path if output.path in pipeline.staged() else output,
        branch="staging",
        message=f"Computed {output.path}",
        transaction=Transaction(step, version),
    )


def warming(pipeline: Pipeline, group: str, **where: str) -> Decades:
    """Ask Spark how much warmer each decade is, weighting cells by their area."""
    year = "year" if group == COPIED else "int(substring(time, 1, 4))"  # of 360 days, so text
    decade, weight = f"{year} DIV 10 * 10 AS decade", "cos(radians(latitude)) AS weight"
    pipeline.view("cells", decade, weight, "anomaly", group=group, arrays="anomaly", **where)
    decades = pipeline.spark.sql(
        "SELECT decade, sum(anomaly * weight) / sum(weight) AS warming FROM cells "
        "GROUP BY decade ORDER BY decade"
    )
    return {row.decade: row.warming for row in decades.collect()}


def seasons(pipeline: Pipeline, **where: str) -> list[float]:
    """Ask Spark for the normal temperature of the ocean in each month, in degrees Celsius."""
    columns = ["calendar_month AS month", "normal"]
    pipeline.view("normals", *columns, group=OCEAN, arrays="normal", **where)
    months = pipeline.spark.sql(
        "SELECT month, avg(normal) - 273.15 AS celsius FROM normals GROUP BY month ORDER BY month"
    )
    return [row.celsius for row in months.collect()]


def check(pipeline: Pipeline, until: int) -> None:
    """Look at what is about to be published.

    Raises:
        ValueError: something is wrong with it.
    """
    copied = warming(pipeline, COPIED, branch="staging")
    referred = warming(pipeline, REFERRED, branch="staging")
    if list(copied) != list(range(FIRST_YEAR, until, 10)):
        raise ValueError(f"{COPIED} has the decades {list(copied)}, not those until {until}.")
    if any(abs(copied[it] - referred[it]) > 1e-6 for it in copied if it < 2000):
        raise ValueError("The two scenarios differ before 2000, where they are one simulation.")
    if not all(abs(it) < 10 for it in [*copied.values(), *referred.values()]):
        raise ValueError("No decade can be ten kelvin from normal.")
    by_month = seasons(pipeline, branch="staging")
    if len(by_month) != 12 or not all(20 < it < 35 for it in by_month):
        raise ValueError(f"The tropical ocean has the temperatures {by_month}.")


def release(pipeline: Pipeline, tag: str | None = None) -> None:
    """Move ``main`` to what was checked, unless somebody else moved it meanwhile."""
    repository = pipeline.repository
    published, checked = repository.lookup_branch("main"), repository.lookup_branch("staging")
    if published not in {it.id for it in repository.ancestry(snapshot_id=checked)}:
        raise ValueError("Somebody committed to main. Create staging again from there.")
    if published != checked:
        repository.reset_branch("main", checked, from_snapshot_id=published)
    if tag is not None and tag not in repository.list_tags():
        repository.create_tag(tag, checked)


def maintain(pipeline: Pipeline, tag: str) -> dict[str, int]:
    """Drop what led to a release, and write its references in as few objects as possible."""
    spark, repository = pipeline.spark, pipeline.repository
    message = f"Rewrote the manifests of {tag}"
    tip = next(iter(repository.ancestry(branch="staging")))
    if tip.message != message:
        rewrite_manifests(spark, repository, message, branch="staging")
    release(pipeline)  # also where an earlier run ended before it
    tagged = next(iter(repository.ancestry(tag=tag)))
    expired = repository.expire_snapshots(tagged.written_at)
    deleted = garbage_collect(spark, repository, pipeline.started).result
    stats = storage_statistics(spark, repository).result
    return {
        "snapshots expired": len(expired),
        "bytes deleted": deleted.bytes_deleted,
        "bytes in the repository": stats.native_bytes + stats.inlined_bytes,
        "bytes referred to": stats.virtual_bytes,
        "objects missing": len(check_references(spark, repository).result.broken),
    }


def draw(curves: dict[str, Decades], months: list[float], path: Path) -> None:
    """Draw warming by decade, and the ocean's year, as PNG."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes, beside = figure.subplots(1, 2, width_ratios=(2, 1))
    beside.plot(range(1, 13), months, "C0o-")
    beside.set(xlabel="month", ylabel="degrees Celsius", title="Tropical ocean, a normal year")
    for (label, decades), style in zip(curves.items(), STYLES, strict=False):
        axes.plot(list(decades), list(decades.values()), label=label, **style)
    axes.set(xlabel="decade", ylabel="kelvin above 1861 to 1890", title="Warming of North America")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def run(pipeline: Pipeline, deliveries: Sequence[int], console: Console) -> dict[str, Decades]:
    """Publish a release for each delivery; answer warming as the last ones tell it."""
    tell(console, f"Referring to {' and '.join(FILES)}")
    refer(pipeline)
    begin(pipeline)
    for until in deliveries:
        if f"until-{until}" in pipeline.repository.list_tags():
            tell(console, f"Decades before {until}: released already")
            continue
        tell(console, f"Decades before {until}: appending, each in a commit")
        for first in range(FIRST_YEAR + 10, until, 10):
            deliver(pipeline, first)
        append(pipeline)
        tell(console, f"Decades before {until}: computing what is normal, and how far from that")
        derive(pipeline, until)
        tell(console, f"Decades before {until}: checking by SQL, and publishing")
        check(pipeline, until)
        release(pipeline, f"until-{until}")
    tell(console, "Asking for the warming of each decade, and drawing it")
    last = f"until-{deliveries[-1]}"
    curves = {
        f"{COPIED}, {last}": warming(pipeline, COPIED, tag=last),
        f"{REFERRED}, {last}": warming(pipeline, REFERRED, tag=last),
        f"{COPIED}, until-{deliveries[0]}": warming(pipeline, COPIED, tag=f"until-{deliveries[0]}"),
    }
    draw(curves, seasons(pipeline, tag=last), pipeline.directory / "warming.png")
    tell(console, "Rewriting manifests, expiring snapshots, collecting garbage, checking objects")
    for what, number in maintain(pipeline, last).items():
        console.print(f"{what}: {number:,}")
    return curves


def show(curves: dict[str, Decades], console: Console) -> None:
    """Print warming as a table."""
    table = Table(title="Kelvin above the mean of 1861 to 1890")
    table.add_column("decade")
    for name in curves:
        table.add_column(name, justify="right")
    for decade in max(curves.values(), key=len):
        cells = (it.get(decade) for it in curves.values())
        table.add_row(str(decade), *("" if it is None else f"{it:+.2f}" for it in cells))
    console.print(table)


def main() -> None:
    """Run the pipeline in a directory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="holds everything; made if it is not there")
    parser.add_argument(
        "--until", type=int, nargs="+", default=[2010, 2100], help="years at which deliveries end"
    )
    given = parser.parse_args()
    directory: Path = given.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[*]").appName("pipeline")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    console = Console()
    pipeline = Pipeline(spark, directory)
    show(run(pipeline, given.until, console), console)
    console.print(f"Repository: {pipeline.url}")
    console.print(f"Tip of main: {pipeline.repository.lookup_branch('main')}")
    console.print(f"Picture: {directory / 'warming.png'}")
    spark.stop()


if __name__ == "__main__":
    main()
