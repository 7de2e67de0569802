"""Jobs that are too large for Spark's driver are refused before any work is done."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import zarr

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark import NewArray, map_chunks
from icechunk_async.spark.options import ReadOptions
from icechunk_async.spark.read.bounds import MOST_PARTITIONS, few
from icechunk_async.spark.read.reader import IcechunkReader, Reading
from icechunk_async.spark.tasks import check_result_size, default_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from icechunk_async.sync import Repository


def _spark(cores: int = 2, **settings: str) -> SparkSession:
    context = SimpleNamespace(defaultParallelism=cores)
    conf = SimpleNamespace(get=lambda name, default: settings.get(name.split(".")[-1], default))
    return cast("SparkSession", SimpleNamespace(conf=conf, sparkContext=context))


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"partition-bytes": "1"}, True),
        ({}, False),
        ({"partition-bytes": "1", "where": "t < 5"}, True),
        ({"layout": "chunks"}, False),
    ],
)
def test_plans_of_very_many_partitions_are_refused(
    repository: Repository, url: str, given: dict[str, str], *, refused: bool
) -> None:
    """With what to change; the same array is read in fewer."""
    session = repository.writable_session("main")
    group = zarr.create_group(session.store)
    group.create_array("t", shape=(52_000_000,), chunks=(8,), dtype="i1", dimension_names=["x"])
    session.commit("large")
    options = Reading.begin(ReadOptions.parse({"path": url, **given}))
    reader = IcechunkReader(options.options, options.spark_schema())
    if not refused:
        assert 1 <= len(reader.partitions()) < 100
        return
    with pytest.raises(InvalidInputError, match=r"partitions or more.*'partition-bytes'.*'where'"):
        reader.partitions()


def test_parts_are_counted_while_they_are_made() -> None:
    """Without end, if it must be; or not at all, if their number is known."""
    assert few(iter(range(MOST_PARTITIONS))) == list(range(MOST_PARTITIONS))
    with pytest.raises(InvalidInputError, match="in 1000001 partitions or more"):
        few(count())
    parts = count()
    with pytest.raises(InvalidInputError, match="in 52000000 partitions or more"):
        few(parts, 52_000_000)
    assert next(parts) == 0


def test_results_that_spark_would_throw_away_are_refused(repository: Repository, url: str) -> None:
    """Before a task runs; nothing is committed."""
    before = repository.lookup_branch("main")
    large = NewArray("t", (100_000,), (1,), "i1")
    with pytest.raises(InvalidInputError, match=r"100000 chunks.*maxResultSize is 1m.*of 3m"):
        map_chunks(_spark(maxResultSize="1m"), url, lambda: None, [], large)
    assert repository.lookup_branch("main") == before


@pytest.mark.parametrize(
    ("setting", "most"),
    [("1g", 42_949_672), ("2048M", 85_899_345), ("100", 4), ("1kb", 40), ("0", 10**12)],
)
def test_the_bound_is_read_as_spark_reads_it(setting: str, most: int) -> None:
    """In bytes or with a unit; 0 is no bound."""
    check_result_size(_spark(maxResultSize=setting), most)
    if setting != "0":
        with pytest.raises(InvalidInputError, match="maxResultSize"):
            check_result_size(_spark(maxResultSize=setting), most + 1)


def test_the_running_session_tells_its_bound(spark: SparkSession) -> None:
    """Spark's default, where nobody set one."""
    check_result_size(spark, 42_949_672)
    with pytest.raises(InvalidInputError, match="maxResultSize is 1g"):
        check_result_size(spark, 42_949_673)


@pytest.mark.parametrize(
    ("cores", "files", "each"), [(2, 5, 1), (2, 64, 2), (2, 2000, 50), (1000, 32_000, 2)]
)
def test_files_are_divided_by_their_number(cores: int, files: int, each: int) -> None:
    """So that every core has some, and a task is worth its cost."""
    assert default_files(_spark(cores), files) == each
