"""Jobs that are too large for Spark's driver are refused before any work is done."""

from __future__ import annotations

import tracemalloc
from datetime import UTC, datetime
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import zarr

from icechunk_async.errors import InvalidInputError
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.spark import NewArray, map_chunks, write_region
from icechunk_async.spark.jobs import garbage
from icechunk_async.spark.options import ReadOptions
from icechunk_async.spark.read.reader import IcechunkReader, Reading
from icechunk_async.spark.shared import workspace_of
from icechunk_async.spark.tasks import MOST_PARTITIONS, check_result_size, few, in_rounds
from icechunk_async.spark.write.cooperative import Answer, CooperativeWrite
from icechunk_async.sync import Repository, RepositoryConfig
from tests.spark.here import session_here

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession

    from icechunk_async.sync.store import IcechunkStore


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
    told = r"100000 chunks.*maxResultSize is 1m.*of 3m or more.*about 20m"
    with pytest.raises(InvalidInputError, match=told):
        map_chunks(_spark(maxResultSize="1m"), url, lambda: None, [], large)
    assert repository.lookup_branch("main") == before


def test_merging_takes_no_more_memory_than_the_error_says(url: str) -> None:
    """Of changes as tasks return them, in up to 25 bytes a chunk."""
    count, tasks = 50_000, 10

    def prepare(store: IcechunkStore) -> None:
        zarr.create_array(store, name="a", shape=(count,), chunks=(1,), dtype="i1")

    write = CooperativeWrite.begin(Repository.create(url), prepare=prepare)
    rng = np.random.default_rng(0)
    answers: list[Answer] = []
    for task, coords in enumerate(np.split(np.arange(count, dtype="u4"), tasks)):
        fork = write.fork()
        refs = ChunkRefs.build(
            coords[:, None],
            Kind.NATIVE,
            objects=np.arange(len(coords), dtype="u4"),
            lengths=rng.integers(1, 1 << 20, len(coords)).astype("u8"),
            chunk_ids=rng.integers(0, 256, (len(coords), 12), np.uint8),
        )
        workspace_of(fork).set_refs("/a", refs)
        answers.append(Answer(task, write.changes(fork)))
    assert 12 * count < sum(len(it.changes) for it in answers) < 25 * count
    tracemalloc.start()
    try:
        write.commit(answers, tasks, "merged")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The allocator keeps more than is in use: 176 bytes a chunk where 137 were counted.
    assert peak < 160 * count


def test_regions_with_very_many_chunks_are_refused(repository: Repository, url: str) -> None:
    """As those of `map_chunks`."""
    before = repository.lookup_branch("main")
    large = NewArray("t", (400,), (1,), "i1")
    parts = [((slice(start, start + 100),), start) for start in (0, 200)]
    with pytest.raises(InvalidInputError, match=r"200 chunks.*maxResultSize is 4k"):
        write_region(_spark(maxResultSize="4k"), url, np.zeros, parts, large)
    assert repository.lookup_branch("main") == before


@pytest.mark.parametrize(
    ("setting", "rounds"),
    [("100", [["a", "b"], ["c"], ["d"], ["e"]]), ("1", [["a"], ["b"], ["c"], ["d"], ["e"]])],
)
def test_results_come_in_rounds_that_spark_brings_to_the_driver(
    setting: str, rounds: list[list[str]]
) -> None:
    """Half of the bound each, or one file; all at once where there is no bound, or nothing."""
    files = [("a", 20), ("b", 30), ("c", 40), ("d", 90), ("e", 1)]
    found = in_rounds(_spark(maxResultSize=setting), files)
    assert [[name for name, _ in it] for it in found] == rounds
    assert list(in_rounds(_spark(maxResultSize="0"), files)) == [files]
    assert list(in_rounds(_spark(), [])) == []


def test_a_collection_reads_manifests_in_rounds(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the chunks that any of them refers to, and deletes others."""
    config = RepositoryConfig(inline_chunk_threshold_bytes=0)
    repository = Repository.create(url, config)
    tips: list[str] = []
    for name in "abcd":
        session = repository.writable_session("main")
        array = zarr.create_array(session.store, name=name, shape=(9,), chunks=(1,), dtype="i1")
        array[:] = np.arange(1, 10)
        tips.append(session.commit(name))
    repository.reset_branch("main", tips[-2])
    asked: list[int] = []

    def one_a_round(_: Any, files: Sequence[tuple[Any, int]]) -> Iterator[list[tuple[Any, int]]]:
        asked.extend(size for _, size in files)
        return ([it] for it in files)

    monkeypatch.setattr(garbage, "in_rounds", one_a_round)
    found = garbage.garbage_collect(session_here(), repository, datetime.now(UTC))
    assert len(asked) == 3
    assert min(asked) > 9 * 12  # as large as the ids that come back, at least
    assert found.result.chunks_deleted == 9
    store = repository.readonly_session("main").store
    for name in "abc":
        array = zarr.open_array(store, path=name, mode="r")
        assert np.asarray(array[:]).tolist() == list(range(1, 10))


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
