"""A repository of weather, statements of SQL about it, and what its chunks are."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xarray

from icechunk_async._runtime.blocking.portal import run
from icechunk_async.sync import Repository, RepositoryConfig
from icechunk_async.sync.storage import local_filesystem_storage
from icechunk_async.sync.xarray import to_icechunk
from icechunk_async.tables import read_table

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection
    from pathlib import Path

SHAPE: Final = (24, 9, 8)
CHUNKS: Final = (7, 4, 3)
_OPERATORS: Final = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
_CONDITIONS: Final = (
    "lat > 20",
    "lat >= 20 and lat < 61",
    "lat = -90",
    "lat <> 90",
    "lat between -25 and 0",
    "lat in (-90, 0, 90, 91)",
    "lat > 1000",
    "not (lat > 0)",
    "lon > 200 or lat < -60",
    "lon >= 135 and not (lat = 0 or lat = 45)",
    "station = 3",
    "station < 2 and lon = 0",
    "time >= timestamp '2020-01-10 00:00:00'",
    "time = timestamp '2020-01-03 00:00:00'",
    "time < timestamp '2019-01-01 00:00:00'",
    "time > timestamp '2020-01-20 12:00:00' and lat = 45",
    "t > 20",
    "t > 20 and lat > 0",
    "t is null",
    "t is not null and t < -20",
    "t is null or lat = 0",
    "quality = 3",
    "quality > 2 and t > 0",
    "quality in (0, 7)",
    "lat > 0 and (t > 25 or quality = 1)",
)
_ASKED: Final = (
    "select count(*) as n, min(t) as low, sum(quality) as q from weather where {}",
    "select lat, max(t) as high, count(*) as n from weather where {} group by lat order by lat",
)
QUERIES: Final = tuple(asked.format(it) for it in _CONDITIONS for asked in _ASKED)
"""Fifty of them."""


def make_weather(folder: Path) -> Repository:
    """Create a repository with values that are missing, unsigned or at descending coordinates."""
    # Every chunk is a separate object, which tests can take away.
    config = RepositoryConfig(inline_chunk_threshold_bytes=0)
    repository = Repository.create(local_filesystem_storage(str(folder)), config)
    random = np.random.default_rng(7)
    values = random.normal(0, 15, SHAPE).astype("f4")
    values[random.random(SHAPE) < 0.1] = np.nan
    values[7:14] = np.nan
    axes = ("time", "lat", "lon")
    dataset = xarray.Dataset(
        {
            "t": (axes, values),
            "quality": (axes, random.integers(0, 8, SHAPE).astype("u1")),
            "station": (("lat", "lon"), np.arange(72, dtype="i4").reshape(9, 8) % 5),
        },
        coords={
            "time": np.datetime64("2020-01-01", "ns") + np.arange(24).astype("timedelta64[D]"),
            "lat": np.linspace(90, -90, 9),
            "lon": np.arange(8) * 45.0,
        },
    ).set_coords("station")
    session = repository.writable_session("main")
    encoding: dict[str, Any] = {name: {"chunks": CHUNKS} for name in ("t", "quality")}
    to_icechunk(dataset, session, encoding=encoding)
    session.commit("Weather")
    return repository


def keep_only(folder: Path, kept: Collection[str]) -> None:
    """Remove the objects of all chunks of a repository but some."""
    for path in (folder / "chunks").iterdir():
        if path.name not in kept:
            path.unlink()


def objects_of(
    repository: Repository, array: str, inside: Callable[[list[int]], bool] | None = None
) -> set[str]:
    """Return the names of the objects of an array's chunks, or of some by their coordinates."""
    table = run(repository.handle.ask(lambda it: read_table(it, "chunks", branch="main")))
    return {
        row["location"].rpartition("/")[2]
        for row in table.to_pylist()
        if row["array"] == array and (inside is None or inside(row["chunk"]))
    }


def _compared(rng: random.Random, column: pc.Expression, value: Any) -> pc.Expression:
    found: pc.Expression = rng.choice(_OPERATORS)(column, value)
    return found


def random_condition(rng: random.Random, table: pa.Table, depth: int = 2) -> pc.Expression:
    """Return a random expression over the columns of a table, with values that occur in it."""
    if depth and rng.random() < 0.5:
        left, right = (random_condition(rng, table, depth - 1) for _ in range(2))
        return left & right if rng.random() < 0.6 else left | right
    name = rng.choice(table.schema.names)
    column = pc.field(name)
    known: Any = table[name]
    values = [known[rng.randrange(len(table))] for _ in range(3)]
    match rng.randrange(7):
        case 0:
            return column.is_null()
        case 1:
            return column.is_valid()
        case 2:
            return column.isin(
                pa.array([it.as_py() for it in values], table.schema.field(name).type)
            )
        case 3:
            return ~_compared(rng, column, values[0])
        case _:
            return _compared(rng, column, values[0])


def sorted_rows(table: pa.Table) -> list[tuple[str, ...]]:
    """Return rows as text, sorted, so that NaN equals itself."""
    return sorted(tuple(map(repr, row)) for row in zip(*table.to_pydict().values(), strict=True))
