"""Streams are written to arrays, each batch once."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyspark
import pytest
import zarr
from pyspark.sql.types import (
    FloatType,
    LongType,
    StructField,
    StructType,
    YearMonthIntervalType,
)

from icechunk_async.errors import (
    CheckpointLostError,
    ConflictError,
    IncompleteWriteError,
    InvalidInputError,
    OutsideGridError,
)
from icechunk_async.spark import published_version, repartition_by_chunk
from icechunk_async.spark.stream import sink
from icechunk_async.spark.stream.sink import BatchMark, BatchWritten, StreamWriter, stream_writer
from icechunk_async.spark.write.rows import batch_writer
from icechunk_async.sync import Repository
from tests.spark.dying_sink import DyingSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

APP = "stations"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(repository: Repository, url: str) -> str:
    """Return the URL of a repository with an array that has two times."""
    session = repository.writable_session("main")
    group = zarr.create_group(session.store)
    time = group.create_array("time", shape=(2,), chunks=(4,), dtype="i8", dimension_names=["time"])
    time[:] = [0, 10]
    names = ["time", "x"]
    v = group.create_array("v", shape=(2, 3), chunks=(2, 3), dtype="f4", dimension_names=names)
    v[:] = 1
    session.commit("made")
    return url


def batch(directory: Path, name: str, times: list[int], value: float) -> None:
    """Put a file of rows where the stream finds it."""
    directory.mkdir(exist_ok=True)
    lines = [f"{time},{x},{value}" for time in times for x in range(3)]
    (directory / f".{name}").write_text("\n".join(lines), "utf-8")
    (directory / f".{name}").rename(directory / name)


def run(
    spark: SparkSession,
    source: Path,
    checkpoint: Path,
    url: str,
    kind: str = "icechunk",
    **options: Any,
) -> None:
    """Run the query until it has seen all there is, by default one file in a batch."""
    reader = spark.readStream.schema("time long, x long, v float")
    frame = reader.option("maxFilesPerTrigger", options.pop("maxFilesPerTrigger", 1)).csv(
        str(source)
    )
    writer = frame.writeStream.format(kind).option("append-dim", "time")
    writer = writer.option("checkpointLocation", str(checkpoint)).outputMode("append")
    for name, value in {"txnAppId": APP, **options}.items():
        writer = writer.option(name, str(value))
    query = writer.trigger(availableNow=True).start(url)
    query.awaitTermination(120)


def read(url: str) -> tuple[list[int], list[float]]:
    """Return the times, and the first value of each."""
    group = zarr.open_group(Repository.open(url).readonly_session("main").store, mode="r")
    values: Any = np.asarray(group["v"][:, 0])  # type: ignore[index]
    return np.asarray(group["time"][:]).tolist(), values.tolist()  # type: ignore[index]


def test_each_batch_is_one_commit_and_is_not_written_again(
    spark: SparkSession, place: str, tmp_path: Path
) -> None:
    """Two batches; then the query forgets that the second was committed, and tries it again."""
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    batch(source, "a.csv", [20], 2)
    batch(source, "b.csv", [30, 40], 3)
    run(spark, source, checkpoint, place)
    expected = [0, 10, 20, 30, 40], [1, 1, 2, 3, 3]
    assert read(place) == expected
    tip = next(iter(Repository.open(place).ancestry(branch="main")))
    assert tip.metadata["spark-transaction"] == {"app-id": APP, "version": 1}
    assert tip.metadata["spark-transactions"] == {APP: 1}

    (checkpoint / "commits" / "1").unlink()
    (checkpoint / "commits" / ".1.crc").unlink(missing_ok=True)
    run(spark, source, checkpoint, place)
    assert read(place) == expected
    assert next(iter(Repository.open(place).ancestry(branch="main"))).id == tip.id
    assert published_version(Repository.open(place), "main", APP) == 1


def test_rows_of_one_chunk_may_be_in_many_files(
    spark: SparkSession, place: str, tmp_path: Path
) -> None:
    """Two tasks of one batch, and one commit."""
    source = tmp_path / "source"
    batch(source, "a.csv", [20], 2)
    batch(source, "b.csv", [30], 3)
    run(spark, source, tmp_path / "checkpoint", place, maxFilesPerTrigger=2)
    assert read(place) == ([0, 10, 20, 30], [1, 1, 2, 3])
    assert len(list(Repository.open(place).ancestry(branch="main"))) == 3


@pytest.mark.thorough
def test_rows_of_a_stream_can_be_arranged_by_chunk(
    spark: SparkSession, place: str, tmp_path: Path
) -> None:
    """Spark cannot sort a stream, but brings the rows of each chunk to one task."""
    source = tmp_path / "source"
    for number, times in enumerate(([20, 50], [30, 40])):
        batch(source, f"{number}.csv", times, number + 2)
    rows = spark.readStream.schema("time long, x long, v float").csv(str(source))
    arranged = repartition_by_chunk(rows, place, append_dim="time", tasks=2)
    assert arranged.isStreaming
    query = arranged.writeStream.format("icechunk").option("append-dim", "time")
    query = query.option("txnAppId", APP).option("checkpointLocation", str(tmp_path / "point"))
    query.trigger(availableNow=True).start(place).awaitTermination(120)
    assert read(place) == ([0, 10, 20, 30, 40, 50], [1, 1, 2, 3, 3, 2])


def test_complete_results_are_refused_by_name(
    spark: SparkSession, place: str, tmp_path: Path
) -> None:
    """Arrays would keep cells that the result lacks."""
    batch(tmp_path / "source", "a.csv", [20], 2)
    frame = spark.readStream.schema("time long, x long, v float").csv(str(tmp_path / "source"))
    counted = frame.groupBy("time", "x").max("v").withColumnRenamed("max(v)", "v")
    query = counted.writeStream.format("icechunk").outputMode("complete").option("txnAppId", APP)
    query = query.option("checkpointLocation", str(tmp_path / "point"))
    with pytest.raises(Exception, match=r"outputMode\('complete'\).*outputMode\('update'\)"):
        query.trigger(availableNow=True).start(place).awaitTermination(60)


def test_a_stream_must_be_named(spark: SparkSession, place: str, tmp_path: Path) -> None:
    """Else a batch could not be recognised."""
    batch(tmp_path / "source", "a.csv", [20], 2)
    with pytest.raises(Exception, match="txnAppId"):
        run(spark, tmp_path / "source", tmp_path / "checkpoint", place, txnVersion="3")
    assert read(place) == ([0, 10], [1, 1])


def test_batch_with_existing_coordinates_stops_the_query(
    spark: SparkSession, place: str, tmp_path: Path
) -> None:
    """A new one with times that are there; nothing is visible."""
    batch(tmp_path / "source", "a.csv", [10], 2)
    with pytest.raises(Exception, match="have already"):
        run(spark, tmp_path / "source", tmp_path / "checkpoint", place)
    assert read(place) == ([0, 10], [1, 1])


SLOW = pytest.mark.spark_failures
STEPS = ["task, before chunks", "task, after chunks", "before the commit", "after the commit"]


@pytest.mark.parametrize(
    "step", [pytest.param(it, marks=[] if "after" in it else SLOW) for it in STEPS]
)
def test_a_batch_whose_writer_died_is_written_once(
    spark: SparkSession, place: str, tmp_path: Path, step: str
) -> None:
    """Only committed batches are visible, and the restarted query adds only the rest."""
    spark.dataSource.register(DyingSource)
    source, notes = tmp_path / "source", tmp_path / "notes"
    notes.mkdir()
    batch(source, "a.csv", [20, 30, 40], 2)
    query = source, tmp_path / "checkpoint", place, "dying"
    with pytest.raises(Exception, match=r"(?i)died|crashed|exited"):
        run(spark, *query, dies=step, notes=notes)
    assert (notes / f"died {step}").exists()
    new = ([20, 30, 40], [2, 2, 2])
    published = ([0, 10, *new[0]], [1, 1, *new[1]]) if step == "after the commit" else None
    assert read(place) == (published or ([0, 10], [1, 1]))
    run(spark, *query, dies=step, notes=notes)
    assert read(place) == ([0, 10, *new[0]], [1, 1, *new[1]])
    assert len(list(Repository.open(place).ancestry(branch="main"))) == 3


@pytest.mark.spark_failures
@pytest.mark.parametrize("step", STEPS)
def test_query_of_a_killed_driver_continues(
    spark: SparkSession, place: str, tmp_path: Path, step: str
) -> None:
    """The driver, its JVM and the working process are killed; the next driver adds the rest."""
    assert spark.version  # Java was found
    batch(tmp_path / "source", "a.csv", [20, 30, 40], 2)
    (tmp_path / "notes").mkdir()
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-m", "tests.spark.streaming_driver", step, place, str(tmp_path)]
    for ended in (False, True):
        # A file: processes that outlive the driver a little keep a pipe open.
        with (tmp_path / "log").open("wb") as log:
            done = subprocess.run(
                command, env=environment, cwd=ROOT, stdout=log, stderr=log, timeout=280, check=False
            )
        assert (done.returncode == 0) == ended, (tmp_path / "log").read_text("utf-8")[-3000:]
        assert (tmp_path / "end").exists() == ended
        for note in (tmp_path / "notes").glob("driver-*"):
            note.unlink()
        there = ended or step == "after the commit"
        assert read(place)[0] == [0, 10, *([20, 30, 40] if there else [])]
    assert read(place)[1] == [1, 1, 2, 2, 2]
    assert len(list(Repository.open(place).ancestry(branch="main"))) == 3


class _Task:
    """The context of a task."""

    number = 0

    @classmethod
    def get(cls) -> _Task:
        """Return the task that runs."""
        return cls()

    def partitionId(self) -> int:  # noqa: N802 -- PySpark's name
        """Return its number."""
        return self.number


@pytest.fixture
def writer(place: str, monkeypatch: pytest.MonkeyPatch) -> StreamWriter:
    """Return the sink itself, which the test calls as Spark does."""
    monkeypatch.setattr(sink, "TaskContext", _Task)
    kinds = {"time": LongType(), "x": LongType(), "v": FloatType()}
    schema = StructType([StructField(name, kind) for name, kind in kinds.items()])
    options = {"path": place, "append-dim": "time", "txnAppId": APP}
    made = stream_writer(options, schema, overwrite=False)
    assert isinstance(made, StreamWriter)
    return made


def write(writer: StreamWriter, number: int, times: list[int]) -> BatchWritten:
    """Write rows as a task does; what it answers travels."""
    _Task.number = number
    rows = [(time, x) for time in times for x in range(3)]
    columns = {"time": [it[0] for it in rows], "x": [it[1] for it in rows], "v": [5.0] * len(rows)}
    kinds = [("time", pa.int64()), ("x", pa.int64()), ("v", pa.float32())]
    table = pa.RecordBatch.from_pydict(columns, schema=pa.schema(kinds))
    copy: StreamWriter = pickle.loads(pickle.dumps(writer))
    written: BatchWritten = pickle.loads(pickle.dumps(copy.write(iter([table]))))
    return written


@pytest.mark.parametrize(
    "option", [{"if-written": "error"}, {"if-written": "ignore"}, {"append-values": "[20]"}]
)
def test_options_for_one_write_are_refused_for_streams(place: str, option: dict[str, str]) -> None:
    """Else a batch that is tried again would find what it wrote itself, and fail for good."""
    given = {"path": place, "append-dim": "time", "txnAppId": APP}
    schema = StructType([StructField("time", LongType())])
    with pytest.raises(InvalidInputError, match=f"{next(iter(option))}.*does not go with a stream"):
        stream_writer({**given, **option}, schema, overwrite=False)
    stream_writer({**given, "if-written": "replace"}, schema, overwrite=False)


def test_columns_that_arrow_cannot_read_are_refused_before_tasks(place: str) -> None:
    """Intervals of months: PySpark raises KeyError where a task begins to read them."""
    schema = StructType(
        [StructField("time", LongType()), StructField("p", YearMonthIntervalType())]
    )
    given = {"path": place, "append-dim": "time", "txnAppId": APP}
    for begin in (stream_writer, batch_writer):
        with pytest.raises(InvalidInputError, match=r"'p' has interval.*no array can hold"):
            begin(given, schema, overwrite=False)


def touch(place: str, name: str, *, amend: bool = False) -> None:
    """Commit as others do, who know nothing of Spark."""
    session = Repository.open(place).writable_session("main")
    zarr.open_group(session.store, mode="a").create_group(name)
    session.amend("by others") if amend else session.commit("by others")


def test_batch_is_recognised_under_later_commits(place: str, writer: StreamWriter) -> None:
    """Commits and an amendment by others, and history that expired."""
    writer.commit([write(writer, 0, [20])], 4)
    touch(place, "others")
    touch(place, "more")
    touch(place, "amended", amend=True)
    repository = Repository.open(place)
    tip = repository.lookup_snapshot(repository.lookup_branch("main"))
    repository.expire_snapshots(tip.written_at)
    assert len(list(repository.ancestry(branch="main"))) == 2
    writer.commit([write(writer, 0, [20])], 4)
    assert Repository.open(place).lookup_branch("main") == tip.id
    writer.commit([write(writer, 0, [30])], 5)
    assert read(place) == ([0, 10, 20, 30], [1, 1, 5, 5])


def test_batch_with_a_task_that_did_not_answer_is_never_taken_for_empty_or_another(
    place: str, writer: StreamWriter
) -> None:
    """Spark would count it as written, and its rows would be lost."""
    for answered in ([write(writer, 1, [])], []):
        with pytest.raises(IncompleteWriteError, match="1 of"):
            writer.commit([None, *answered], 0)
    messages = [write(writer, 0, [20]), write(writer, 1, [30])]
    writer.commit(messages, 0)
    with pytest.raises(IncompleteWriteError):
        writer.commit([messages[0], None], 0)
    assert read(place)[0] == [0, 10, 20, 30]


def test_only_one_of_two_drivers_writes_the_batch(place: str, writer: StreamWriter) -> None:
    """One that was believed dead has written it as well."""
    both = [[write(writer, 0, [20])] for _ in range(2)]
    writer.commit(both[0], 0)
    tip = Repository.open(place).lookup_branch("main")
    writer.commit(both[1], 0)
    assert Repository.open(place).lookup_branch("main") == tip
    assert read(place) == ([0, 10, 20], [1, 1, 5])


def test_new_rows_under_old_batch_numbers_are_an_error(place: str, writer: StreamWriter) -> None:
    """The checkpoint was lost, and the query counts from 0 again: nothing is dropped in silence."""
    writer.commit([write(writer, 0, [20])], 0)
    with pytest.raises(CheckpointLostError, match=r"batch 0.*has batch 0 .* with other rows"):
        writer.commit([write(writer, 0, [30])], 0)
    with pytest.raises(CheckpointLostError, match="with other rows"):
        writer.commit([write(writer, 0, [20]), write(writer, 1, [30])], 0)
    writer.commit([write(writer, 0, [30])], 1)
    touch(place, "others")
    tip = Repository.open(place).lookup_branch("main")
    for times in ([20], [40]):
        with pytest.raises(CheckpointLostError, match=r"new 'txnAppId'.*'late-rows'") as raised:
            writer.commit([write(writer, 0, times)], 0)
        told = {"branch": "main", "app_id": APP, "batch": 0, "newest": 1}
        assert raised.value.context == told
    writer.commit([write(writer, 0, [30])], 1)
    assert Repository.open(place).lookup_branch("main") == tip
    assert read(place)[0] == [0, 10, 20, 30]


@pytest.mark.parametrize(("how", "kept"), [("drop", 1), ("overwrite", 5)])
def test_late_rows_of_a_stream_do_what_it_says(
    place: str, writer: StreamWriter, how: str, kept: float
) -> None:
    """The commit counts them; a batch of nothing else makes one too, to be recognised."""
    with pytest.raises(OutsideGridError, match="A row has time=10, x=0"):
        writer.commit([write(writer, 0, [20]), write(writer, 1, [10])], 0)
    writer.options = replace(writer.options, late_rows=how)
    writer.commit([write(writer, 0, [20]), write(writer, 1, [10])], 0)
    writer.commit([write(writer, 0, [10])], 1)
    assert read(place) == ([0, 10, 20], [1, kept, 5])
    tips = [it.metadata for it in Repository.open(place).ancestry(branch="main")][:2]
    assert [it["spark-late-rows"] for it in tips] == [3, 3]
    assert [it["spark-transaction"]["version"] for it in tips] == [1, 0]


def test_marks_tell_rows_in_any_order_and_type() -> None:
    """Equal coordinates of other types have one mark; so have parts of rows, added up."""
    text = np.array(["north", "south"], object)
    one = BatchMark.of([np.array([1, 2]), text])
    assert one == BatchMark.of([np.array([2.0, 1.0]), text[::-1]])
    assert one == sum(
        (BatchMark.of([np.array([it + 1]), text[it:][:1]]) for it in (1, 0)), BatchMark()
    )
    others = (
        [np.array([1, 2]), text[::-1]],
        [np.array([2, 3]), text],
        [np.array([1]), text[:1]],
        [np.array([1, 2]).astype("M8[D]"), text],
    )
    assert len({one, *(BatchMark.of(it) for it in others)}) == 5
    assert BatchMark.of([np.array([0.0])]) == BatchMark.of([np.array([-0.0])])


def test_rows_that_replace_are_told_from_those_before(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an appended dimension too, in any order and tasks; other values are the same rows."""
    monkeypatch.setattr(sink, "TaskContext", _Task)
    kinds = {"time": LongType(), "x": LongType(), "v": FloatType()}
    schema = StructType([StructField(name, kind) for name, kind in kinds.items()])
    writer = stream_writer({"path": place, "txnAppId": APP}, schema, overwrite=False)
    assert isinstance(writer, StreamWriter)
    writer.commit([write(writer, 0, [0, 10])], 0)
    tip = Repository.open(place).lookup_branch("main")
    writer.commit([write(writer, 0, [10]), write(writer, 1, [0])], 0)
    assert Repository.open(place).lookup_branch("main") == tip
    with pytest.raises(CheckpointLostError):
        writer.commit([write(writer, 0, [10])], 0)


def test_batches_leave_no_files_but_their_commits(place: str, writer: StreamWriter) -> None:
    """Tasks store no snapshot, manifest or log; rows of shared chunks travel with answers."""
    for number, times in enumerate(([20], [30], [40])):
        tasks = [write(writer, 0, times), write(writer, 1, [])]
        writer.commit(tasks, number)
    root = Path(place.removeprefix("file://"))
    commits = len(list(Repository.open(place).ancestry(branch="main")))
    assert [len(list((root / it).iterdir())) for it in ("snapshots", "transactions")] == [
        commits,
        commits,
    ]


def test_a_batch_without_rows_makes_no_commit(place: str, writer: StreamWriter) -> None:
    """Nor one without tasks."""
    tip = Repository.open(place).lookup_branch("main")
    writer.commit([write(writer, 0, []), write(writer, 1, [])], 0)
    writer.commit([], 1)
    assert Repository.open(place).lookup_branch("main") == tip


def test_tasks_may_begin_at_different_tips(place: str, writer: StreamWriter) -> None:
    """Others committed in between, and it is one commit on top of theirs."""
    messages = [write(writer, 0, [20, 30])]
    touch(place, "others")
    messages.append(write(writer, 1, [40]))
    touch(place, "more")
    messages.append(write(writer, 2, [60, 70]))
    with pytest.raises(IncompleteWriteError):
        writer.commit([*messages, None], 0)
    messages[2] = write(writer, 2, [])
    writer.commit(messages, 0)
    assert read(place) == ([0, 10, 20, 30, 40], [1, 1, 5, 5, 5])
    group = zarr.open_group(Repository.open(place).readonly_session("main").store, mode="r")
    assert {"others", "more"} <= set(group)


def test_tasks_do_not_write_to_arrays_that_others_changed(place: str, writer: StreamWriter) -> None:
    """Another writer appended in between; the restarted query tries the batch again."""
    messages = [write(writer, 0, [20])]
    writer.commit([write(writer, 0, [20])], 0)
    messages.append(write(writer, 1, [30]))
    with pytest.raises(ConflictError, match=r"different arrays.*start the query again"):
        writer.commit(messages, 1)
    assert read(place) == ([0, 10, 20], [1, 1, 5])


def test_tasks_do_not_write_to_arrays_that_others_made_anew(
    place: str, writer: StreamWriter
) -> None:
    """Alike in all that one sees; the chunks of the one are not those of the other."""
    messages = [write(writer, 0, [20])]
    session = Repository.open(place).writable_session("main")
    group: Any = zarr.open_group(session.store, mode="a")
    old = group["v"]
    group.create_array(
        "v",
        shape=old.shape,
        chunks=old.chunks,
        dtype=old.dtype,
        fill_value=old.fill_value,
        dimension_names=old.metadata.dimension_names,
        attributes=dict(old.attrs),
        overwrite=True,
    )[:] = 1
    session.commit("by others")
    messages.append(write(writer, 1, [30]))
    with pytest.raises(ConflictError, match=r"different arrays.*start the query again"):
        writer.commit(messages, 1)
    assert read(place) == ([0, 10], [1, 1])


@pytest.mark.parametrize("made", [False, True])
def test_coordinates_changed_by_another_commit_are_a_conflict(
    place: str, monkeypatch: pytest.MonkeyPatch, *, made: bool
) -> None:
    """Rows would be in cells of other coordinates; also if a coordinate array is new."""
    monkeypatch.setattr(sink, "TaskContext", _Task)
    kinds = {"time": LongType(), "x": LongType(), "v": FloatType()}
    schema = StructType([StructField(name, kind) for name, kind in kinds.items()])
    writer = stream_writer({"path": place, "txnAppId": APP}, schema, overwrite=False)
    assert isinstance(writer, StreamWriter)
    messages = [write(writer, 0, [0])]
    session = Repository.open(place).writable_session("main")
    group: Any = zarr.open_group(session.store, mode="a")
    if made:
        group.create_array("x", shape=3, dtype="i8", dimension_names=["x"])[:] = [2, 1, 0]
    else:
        group["time"][:] = [10, 0]
    session.commit("by others")
    with pytest.raises(ConflictError, match="changed '/x'" if made else "changed '/time'"):
        writer.commit(messages, 0)
    assert read(place)[1] == [1, 1]
    writer.commit([write(writer, 0, [0])], 0)
    assert read(place)[1] == ([5, 1] if made else [1, 5])


def test_values_beyond_a_shortened_array_do_not_reappear(place: str, writer: StreamWriter) -> None:
    """A chunk still holds it; cells without a row have no value."""
    session = Repository.open(place).writable_session("main")
    group: Any = zarr.open_group(session.store, mode="a")
    group["v"][:] = [[2], [3]]
    for name, shape in (("time", (1,)), ("v", (1, 3))):
        group[name].resize(shape)
    session.commit("shorter")
    _Task.number = 0
    kinds = [("time", pa.int64()), ("x", pa.int64()), ("v", pa.float32())]
    one = {"time": [10], "x": [2], "v": [5.0]}
    writer.options = replace(writer.options, append_values=(10,))
    writer.commit([writer.write(iter([pa.RecordBatch.from_pydict(one, pa.schema(kinds))]))], 0)
    group = zarr.open_group(Repository.open(place).readonly_session("main").store, mode="r")
    assert np.asarray(group["v"][:]).tolist() == [[2, 2, 2], [0, 0, 5]]


def test_a_stream_of_one_repository_goes_to_another(
    spark: SparkSession, place: str, tmp_path: Path
) -> None:
    """Rows appended to one are appended to the other, commit by commit."""
    store = Repository.open(place).readonly_session("main").store
    before: Any = zarr.open_group(store, mode="r")
    other = (tmp_path / "other").as_uri()
    session = Repository.create(other).writable_session("main")
    root = zarr.open_group(session.store, mode="a")
    for name in ("time", "v"):
        array = before[name]
        names = list(array.metadata.dimension_names)
        made = root.create_array(
            name, shape=array.shape, chunks=array.chunks, dtype=array.dtype, dimension_names=names
        )
        made[:] = array[:]
    session.commit("a copy")
    start = str(Repository.open(place).lookup_branch("main"))
    for time in (20, 30):
        session = Repository.open(place).writable_session("main")
        group: Any = zarr.open_group(session.store, mode="a")
        for array in (group["time"], group["v"]):
            length = array.shape[0]
            array.resize((length + 1, *array.shape[1:]))
            array[length:] = time
        session.commit("appended")
    reader = spark.readStream.format("icechunk").option("starting-snapshot", start)
    frame = reader.option("max-commits-per-trigger", 1).load(place).coalesce(1)
    query = frame.writeStream.format("icechunk").option("append-dim", "time")
    query = query.option("txnAppId", "copy").option("checkpointLocation", str(tmp_path / "point"))
    query.trigger(availableNow=True).start(other).awaitTermination(120)
    assert read(other) == read(place) == ([0, 10, 20, 30], [1, 1, 20, 30])
    versions = [
        it.metadata.get("spark-transactions")
        for it in Repository.open(other).ancestry(branch="main")
    ]
    # Before PySpark 4.2 a stream has no limit: all commits come in one batch.
    limited = pyspark.__version__ >= "4.2"
    assert versions[:3] == (
        [{"copy": 1}, {"copy": 0}, None] if limited else [{"copy": 0}, None, None]
    )
