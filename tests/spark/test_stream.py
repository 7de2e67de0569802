"""Commits of a branch as a stream: the rows of each batch, and where it can continue."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxFiles
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    FloatType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from icechunk_async.errors import BranchNotFoundError, InvalidInputError, StreamPositionLostError
from icechunk_async.spark import register
from icechunk_async.spark.options import StreamOptions
from icechunk_async.spark.stream.source import UnlimitedReader
from icechunk_async.sync import Repository, SpecVersion
from icechunk_async.sync.storage import local_filesystem_storage
from tests.spark.streams import follow, follower, read_batch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

NOTHING = ReadAllAvailable()


def commit(url: str, change: Callable[[zarr.Group], object]) -> str:
    """Commit a change of the root group of a repository."""
    session = Repository.open(url).writable_session("main")
    change(zarr.open_group(session.store, mode="a"))
    return str(session.commit("changed"))


def made(group: zarr.Group) -> None:
    """Make two times of three places; a chunk has two times."""
    time = group.create_array("time", shape=(2,), chunks=(4,), dtype="i8", dimension_names=["time"])
    time[:] = [0, 10]
    names = ["time", "x"]
    group.create_array("v", shape=(2, 3), chunks=(2, 3), dtype="f4", dimension_names=names)[:] = 1


def appended(value: int) -> Callable[[zarr.Group], None]:
    """Return a change that appends one time."""

    def change(group: zarr.Group) -> None:
        time: Any = group["time"]
        length = time.shape[0]
        for name in ("time", "v"):
            array: Any = group[name]
            array.resize((length + 1, *array.shape[1:]))
            array[length:] = value

    return change


def updated(group: zarr.Group) -> None:
    """Set one value."""
    v: Any = group["v"]
    v[0, 1] = 7


@pytest.fixture
def commits(repository: Repository, url: str) -> list[str]:
    """Commit four times: an array, a time, a change, a time. The last two share a chunk."""
    assert repository.lookup_branch("main")
    return [commit(url, change) for change in (made, appended(20), updated, appended(30))]


def times(rows: list[dict[str, Any]]) -> list[int]:
    """Return the times of rows, each once, in order."""
    return list(dict.fromkeys(row["time"] for row in rows))


def test_appended_rows_are_streamed(commits: list[str], url: str) -> None:
    """All of each new time and nothing else, from the first commit or after any."""
    rows = follow(follower(url))
    assert times(rows) == [0, 10, 20, 30]
    assert len(rows) == 12
    assert rows[0] == {"time": 0, "x": 0, "v": 1.0}
    assert rows[-1] == {"time": 30, "x": 2, "v": 30.0}
    assert times(follow(follower(url, starting_snapshot=commits[1].lower()))) == [30]
    assert times(follow(follower(url, where="time < 20"))) == [0, 10]


def test_rows_of_many_changed_coordinates_are_exact(repository: Repository, url: str) -> None:
    """Bring their own rows and no others; of the rest come those with other values."""
    count = 3000

    def begin(group: zarr.Group) -> None:
        for name in ("time", "v"):
            array = group.create_array(
                name, shape=(count,), chunks=(1000,), dtype="i8", dimension_names=["time"]
            )
            array[:] = np.arange(count)

    def change(group: zarr.Group) -> None:
        time: Any = group["time"]
        time[::2] = np.arange(0, count, 2) + 10_000
        values: Any = group["v"]
        values[2:5] = -1

    commit(url, begin)
    last = commit(url, change)
    moved = np.arange(0, count, 2)
    new = {10_000 + it: -1 if it in {2, 4} else it for it in moved.tolist()}
    rows = follow(follower(url))[count:]
    assert {row["time"]: row["v"] for row in rows} == new
    assert len(rows) == len(new)
    every = [row for row in follow(follower(url, changes="all")) if row["_snapshot_id"] == last]
    kinds = {
        kind: {row["time"]: row["v"] for row in every if row["_change"] == kind}
        for kind in ("appended", "deleted", "updated")
    }
    gone = {it: it for it in moved.tolist()}
    assert kinds == {"appended": new, "deleted": gone, "updated": {3: -1}}
    assert len(every) == 2 * len(new) + 1


def test_every_change_is_streamed_with_its_kind(commits: list[str], url: str) -> None:
    """With the commit that did it; a value that was stored again is no change."""
    rows = follow(follower(url, changes="all", starting_snapshot=commits[0]))
    told = [(it["_change"], it["_snapshot_id"], it["time"], it["x"], it["v"]) for it in rows]
    assert told == [
        *(("appended", commits[1], 20, x, 20.0) for x in range(3)),
        ("updated", commits[2], 0, 1, 7.0),
        *(("appended", commits[3], 30, x, 30.0) for x in range(3)),
    ]
    assert datetime.now(UTC) - rows[0]["_written_at"] < timedelta(minutes=5)


def test_deleted_rows_have_their_old_values(commits: list[str], url: str) -> None:
    """Also where the whole table is gone, and comes again."""

    def cut(group: zarr.Group) -> None:
        for name in ("time", "v"):
            array: Any = group[name]
            array.resize((3, *array.shape[1:]))

    def removed(group: zarr.Group) -> None:
        del group["v"]

    later = [commit(url, change) for change in (cut, removed)]
    wanted = StructType(
        [
            StructField(name, kind)
            for name, kind in [
                ("_snapshot_id", StringType()),
                ("v", FloatType()),
                ("_change", StringType()),
                ("time", LongType()),
            ]
        ]
    )
    reader = follower(url, wanted, changes="all", starting_snapshot=commits[-1])
    rows = follow(reader)
    assert {row["_change"] for row in rows} == {"deleted"}
    assert [row["v"] for row in rows if row["_snapshot_id"] == later[0]] == [30.0] * 3
    assert times([row for row in rows if row["_snapshot_id"] == later[1]]) == [0, 10, 20]
    assert list(rows[0]) == wanted.names
    assert follow(follower(url, wanted, starting_snapshot=commits[-1])) == []


def test_chunks_come_as_rows_when_they_are_written_replaced_or_removed(
    commits: list[str], url: str
) -> None:
    """Those that came to be; with all changes also those that were replaced, and removed."""

    def chunk(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["array"], tuple(row["chunk"]), tuple(row["stop"])

    assert [chunk(row) for row in follow(follower(url, layout="chunks"))] == [
        ("/time", (0,), (2,)),
        ("/v", (0, 0), (2, 3)),
        ("/v", (1, 0), (3, 3)),
    ]

    def removed(group: zarr.Group) -> None:
        v: Any = group["v"]
        v.resize((2, 3))

    commit(url, removed)
    rows = follow(
        follower(url, layout="chunks", changes="all", arrays="v", starting_snapshot=commits[1])
    )
    assert [(row["_change"], *chunk(row)) for row in rows] == [
        ("updated", "/v", (0, 0), (2, 3)),
        ("updated", "/v", (1, 0), (4, 3)),
        ("deleted", "/v", (1, 0), (4, 3)),
    ]
    assert "data" not in rows[0]
    stored = StructType([StructField("size_bytes", LongType()), StructField("data", BinaryType())])
    rows = follow(follower(url, stored, arrays="v", layout="chunks"))
    assert all(len(row["data"]) == row["size_bytes"] for row in rows)
    fields = [StructField("chunk", ArrayType(LongType())), StructField("tensor", BinaryType())]
    tensors = follow(follower(url, StructType(fields), arrays="v", layout="chunks"))
    assert np.frombuffer(tensors[1]["tensor"], "f4").tolist() == [20.0] * 3


def test_a_chunk_that_was_stored_again_with_equal_bytes_is_no_change(
    commits: list[str], url: str
) -> None:
    """Of an array that was made anew all chunks are told, if they are equal as well."""

    def again(group: zarr.Group) -> None:
        v: Any = group["v"]
        v[0] = v[0]
        v[2] = -1

    def anew(group: zarr.Group) -> None:
        values = group["v"]
        data = np.asarray(values)
        del group["v"]
        array = group.create_array(
            "v", shape=data.shape, chunks=(2, 3), dtype="f4", dimension_names=["time", "x"]
        )
        array[:] = data

    ids = [commit(url, change) for change in (again, anew)]
    options: dict[str, Any] = {"layout": "chunks", "changes": "all", "arrays": "v"}
    rows = follow(follower(url, starting_snapshot=commits[-1], **options))
    told = [(row["_snapshot_id"], row["_change"], row["chunk"]) for row in rows]
    assert told == [
        (ids[0], "updated", [1, 0]),
        (ids[1], "updated", [0, 0]),
        (ids[1], "updated", [1, 0]),
    ]


def test_batch_has_at_most_the_admitted_commits(commits: list[str], url: str) -> None:
    """So many in a batch, all with a trigger that has no limit; in vain the offset stays."""
    reader = follower(url, max_commits_per_trigger="2")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxFiles(2)
    start = reader.initialOffset()
    ends = [reader.latestOffset(start, limit)]
    ends.append(reader.latestOffset(ends[0], limit))
    assert [it["snapshot-id"] for it in ends] == [commits[1], commits[3]]
    assert times(read_batch(reader, *ends)) == [30]
    assert reader.latestOffset(start, NOTHING) == ends[1] == reader.latestOffset(ends[1], limit)
    assert follower(url).getDefaultReadLimit() == NOTHING
    assert reader.reportLatestOffset() == ends[1]


def test_available_now_ends_at_the_tip(commits: list[str], url: str) -> None:
    """Also while others commit."""
    reader = follower(url)
    reader.prepareForTriggerAvailableNow()
    commit(url, appended(40))
    end = reader.latestOffset(reader.initialOffset(), NOTHING)
    assert end["snapshot-id"] == commits[-1]
    assert end == reader.latestOffset(end, NOTHING)
    assert times(follow(follower(url), end)) == [40]


def test_a_query_that_begins_at_the_tip_loses_nothing(commits: list[str], url: str) -> None:
    """Its first batch is empty, so that it is also when Spark asks anew where the query begins."""
    reader = follower(url, starting_snapshot="latest")
    begin = reader.initialOffset()
    commit(url, appended(40))
    first = reader.latestOffset(begin, NOTHING)
    assert first == begin
    assert first["snapshot-id"] == commits[-1]
    again = follower(url, starting_snapshot="latest")
    assert read_batch(again, again.initialOffset(), first) == []
    assert times(follow(again, first)) == [40]


def test_older_pyspark_reads_all_commits_in_a_batch(commits: list[str], url: str) -> None:
    """Which they are not told of by the method's parameters; the rest is the same."""
    given = StreamOptions.parse({"path": url, "starting-snapshot": commits[2]})
    reader = UnlimitedReader(given, follower(url).table)
    start = reader.initialOffset()
    assert reader.latestOffset()["snapshot-id"] == commits[3]
    assert len(reader.partitions(start, reader.latestOffset())) == 1
    latest = StreamOptions.parse({"path": url, "starting-snapshot": "latest"})
    reader = UnlimitedReader(latest, follower(url).table)
    begin = reader.initialOffset()
    commit(url, appended(40))
    assert reader.latestOffset() == begin != reader.latestOffset()


def test_a_branch_that_was_reset_ends_the_stream(commits: list[str], url: str) -> None:
    """Whether the batch was planned or not; the error says what to do."""
    reader = follower(url)
    start, end = reader.initialOffset(), {"snapshot-id": commits[-1]}
    repository = Repository.open(url)
    repository.reset_branch("main", commits[1])
    with pytest.raises(StreamPositionLostError, match=f"{commits[-1]}.*reset.*new checkpoint") as e:
        reader.latestOffset(end, NOTHING)
    assert e.value.context == {"branch": "main", "snapshot_id": commits[-1]}
    with pytest.raises(StreamPositionLostError, match=commits[-1]):
        reader.partitions(start, end)
    commit(url, appended(50))
    with pytest.raises(StreamPositionLostError, match="starting-snapshot"):
        follow(reader, end)
    repository.create_branch("old", commits[0])
    with pytest.raises(StreamPositionLostError, match="'old'"):
        follow(follower(url, branch="old", starting_snapshot=commits[1]))
    with pytest.raises(BranchNotFoundError):
        follow(follower(url, follower(url).table, branch="none"))
    with pytest.raises(StreamPositionLostError, match="of another source"):
        reader.latestOffset({"files": 3}, NOTHING)


def test_a_batch_does_not_end_before_it_begins(commits: list[str], url: str) -> None:
    """Else what follows the end would come again after the branch is where it was."""
    reader = follower(url)
    start, end = {"snapshot-id": commits[-1]}, {"snapshot-id": commits[1]}
    with pytest.raises(StreamPositionLostError, match=f"{commits[-1]}.*reset"):
        reader.partitions(start, end)
    assert not reader.partitions(start, start)
    assert not follower(url, starting_snapshot="latest").partitions(start, end)


def test_an_amended_tip_counts_as_a_reset(commits: list[str], url: str) -> None:
    """Its rows were read, and may differ now; from older snapshots the stream continues."""
    reader = follower(url)
    session = Repository.open(url).writable_session("main")
    updated(zarr.open_group(session.store, mode="a"))
    zarr.open_array(session.store, path="v", mode="r+")[3:] = 31
    session.amend("better")
    with pytest.raises(StreamPositionLostError, match="amended"):
        follow(reader, {"snapshot-id": commits[3]})
    rows = follow(reader, {"snapshot-id": commits[2]})
    assert [row["v"] for row in rows] == [31.0] * 3


@pytest.mark.parametrize("spec", [1, 2])
def test_history_that_expired_ends_the_stream(tmp_path: Path, spec: int) -> None:
    """Unless it was read; a new stream then has all rows that there are from the oldest commit."""
    version = SpecVersion(spec)
    url = (tmp_path / "old").as_uri()
    storage = local_filesystem_storage(url.removeprefix("file://"))
    repository = Repository.create(storage, spec_version=version)
    ids = [commit(url, change) for change in (made, appended(20), updated)]
    before = repository.lookup_snapshot(ids[-1]).written_at
    ids.append(commit(url, appended(30)))
    repository.expire_snapshots(before + timedelta(microseconds=1))
    reader = follower(url)
    with pytest.raises(StreamPositionLostError, match="expired"):
        reader.latestOffset({"snapshot-id": ids[1]}, NOTHING)
    repository.garbage_collect(datetime.now(UTC))
    with pytest.raises(StreamPositionLostError, match="expired"):
        reader.latestOffset({"snapshot-id": ids[2]}, NOTHING)
    assert times(follow(reader)) == [0, 10, 20, 30]
    commit(url, appended(40))
    assert times(follow(reader, {"snapshot-id": ids[3]})) == [40]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tag": "v1"}, "'tag' does not go with readStream"),
        ({"starting-snapshot": "yesterday"}, "cannot be 'yesterday'"),
        ({"max-commits-per-trigger": "0"}, "positive number"),
        ({"changes": "some"}, "cannot be 'some'"),
        ({"starting": "latest"}, "Unknown option 'starting'"),
    ],
)
def test_options_are_checked(options: dict[str, str], message: str) -> None:
    """Before anything is read."""
    with pytest.raises(InvalidInputError, match=message):
        StreamOptions.parse({"path": "memory:", **options})


def run(
    spark: SparkSession, url: str, checkpoint: Path, **options: str
) -> list[list[tuple[Any, ...]]]:
    """Run a query on what is there; answer the rows of each batch."""
    found: list[list[tuple[Any, ...]]] = []

    def keep(frame: DataFrame, number: int) -> None:
        assert number >= 0
        rows: list[Any] = frame.collect()
        found.append(sorted(map(tuple, rows)))

    reader = spark.readStream.format("icechunk")
    for name, value in options.items():
        reader = reader.option(name.replace("_", "-"), value)
    writer = reader.load(url).writeStream.foreachBatch(keep)
    writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    writer.start().awaitTermination(120)
    return found


def test_query_continues_from_its_checkpoint(
    spark: SparkSession, commits: list[str], url: str, tmp_path: Path
) -> None:
    """A batch a commit; one that was not done is the same again; a reset ends the query."""
    checkpoint = tmp_path / "checkpoint"
    options = {"max_commits_per_trigger": "1"}
    batches = run(spark, url, checkpoint, **options)
    found = [sorted({row[0] for row in batch}) for batch in batches]
    assert found == [[0, 10], [20], [], [30]]
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda it: int(it.name))
    assert commits[-1] in (checkpoint / "offsets" / last.name).read_text(encoding="utf-8")
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)
    commit(url, appended(40))
    again = run(spark, url, checkpoint, **options)
    assert again[0] == batches[-1]
    assert again[1:] == [[(40, x, 40.0) for x in range(3)]]
    Repository.open(url).reset_branch("main", commits[1])
    with pytest.raises(Exception, match="not in the history"):
        run(spark, url, checkpoint, **options)


def test_a_query_of_all_changes_of_chunks(
    spark: SparkSession, commits: list[str], url: str, tmp_path: Path
) -> None:
    """In one batch, with the columns that tell of changes."""
    options = {"changes": "all", "layout": "chunks", "starting_snapshot": commits[1]}
    (batch,) = run(spark, url, tmp_path / "checkpoint", arrays="v", **options)
    names = spark.readStream.format("icechunk").option("changes", "all").load(url).columns
    assert names == ["time", "x", "v", "_change", "_snapshot_id", "_written_at"]
    assert [row[-3:-1] for row in batch] == [("updated", commits[2]), ("updated", commits[3])]


def test_plans_show_no_secret(spark: SparkSession, url: str) -> None:
    """Of a stream Spark prints the options; what was hidden before still is."""
    source = spark.readStream.format("icechunk").schema("x long").option("branch", "shown")
    source = source.option("storage.account_key", "HUNTER1").option("url", "HUNTER2")
    access = '{"az://a/c/": {"account_key": "HUNTER3"}}'
    frame = source.option("Virtual-Chunk-Access", access).load(url)
    plan = str(frame._jdf.queryExecution().toString())
    assert "shown" in plan
    assert "HUNTER" not in plan
    name = "spark.sql.redaction.options.regex"
    before = spark.conf.get(name)
    register(spark)
    assert spark.conf.get(name) == before
    try:
        spark.conf.set(name, "mine")
        register(spark)
        assert spark.conf.get(name) == r"mine|(?i)storage\.|virtual-chunk-access"
    finally:
        spark.conf.set(name, before or "")
