"""Rows of one chunk may be in any tasks; late rows do what the write says; without Spark."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import zarr
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from icechunk_async.errors import (
    DuplicateRowsError,
    FormatError,
    OutsideGridError,
    RebaseFailedError,
)
from icechunk_async.spark.grid import Block
from icechunk_async.spark.options import WriteOptions
from icechunk_async.spark.write import parts as parts_module
from icechunk_async.spark.write.commit import commit_rows
from icechunk_async.spark.write.parts import PartWriter, block_rows
from icechunk_async.spark.write.plan import WritePlan
from icechunk_async.spark.write.task import RowsWritten, write_batches
from icechunk_async.sync import Repository
from tests.helpers import examples

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.format.manifest.chunk import NativeChunk

VALUES: dict[str, Any] = {
    "f4": lambda n: np.arange(1, n + 1) / 4,
    "i2": lambda n: np.arange(1, n + 1) % 1000,
    "U3": lambda n: np.array([f"{it % 999}" for it in range(n)], object),
    "S3": lambda n: np.array([b"%d" % (it % 999) for it in range(n)], object),
    "string": lambda n: np.array([f"text {it}" for it in range(n)], object),
    "M8[s]": lambda n: np.arange(n).astype("M8[s]").astype("M8[us]"),
}


def make(
    url: str, shape: Sequence[int], chunks: Sequence[int], dtype: str = "f4", **more: Any
) -> Repository:
    """Create an array `v` along `t` and `x`; `t` has coordinates in steps of 10."""
    repository = Repository.create(url)
    session = repository.writable_session("main")
    group = zarr.create_group(session.store)
    t = group.create_array("t", shape=shape[:1], chunks=(4,), dtype="i8", dimension_names=["t"])
    t[:] = np.arange(shape[0]) * 10
    names = ["t", "x"][: len(shape)]
    group.create_array("v", shape=shape, chunks=chunks, dtype=dtype, dimension_names=names, **more)
    session.commit("made")
    return repository


def rows_of(cells: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> pa.RecordBatch:
    """Return rows for cells, `(n, 2)`."""
    column = pa.array(values.tolist() if values.dtype.kind == "O" else values)
    return pa.RecordBatch.from_pydict(
        {"t": pa.array(cells[:, 0] * 10), "x": pa.array(cells[:, 1]), "v": column}
    )


def write(
    repository: Repository, tasks: Sequence[pa.RecordBatch], **options: Any
) -> list[RowsWritten]:
    """Write the rows of tasks, whose results travel, and commit."""
    given = WriteOptions(repository.storage, cores=1, **options)
    plan = WritePlan.begin(
        given, ["t", "x", "v"], overwrite=given.append_dim is None, repository=repository
    )
    written: list[RowsWritten] = [
        pickle.loads(pickle.dumps(write_batches(plan, number, iter([batch]))))
        for number, batch in enumerate(tasks)
    ]
    commit_rows(plan, written, None)
    return written


def found(repository: Repository) -> npt.NDArray[Any]:
    """Return the array of the tip."""
    store = repository.readonly_session("main").store
    return np.asarray(zarr.open_array(store, path="v", mode="r")[...])


@pytest.mark.filterwarnings("ignore:The data type:zarr.errors.UnstableSpecificationWarning")
@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize("inline", [1 << 18, 0])
def test_rows_in_any_tasks_are_joined(
    url: str, monkeypatch: pytest.MonkeyPatch, dtype: str, inline: int
) -> None:
    """Every type; whether they travel with answers or through storage, in objects of two blocks."""
    monkeypatch.setattr(parts_module, "_INLINE_BYTES", inline)
    monkeypatch.setattr(parts_module, "_OBJECT_BYTES", 300)
    repository = make(url, (6, 10), (3, 5), dtype)
    cells = np.stack(np.unravel_index(np.arange(60), (6, 10)), axis=1)
    values = VALUES[dtype](60)
    tasks = np.random.default_rng(1).integers(0, 12, 60)
    written = write(
        repository, [rows_of(cells[tasks == it], values[tasks == it]) for it in range(12)]
    )
    assert found(repository).reshape(-1).astype(values.dtype).tolist() == values.tolist()
    pieces = [piece for it in written for piece in it.parts.pieces]
    assert all(isinstance(it, bytes) for it in pieces) == bool(inline)
    assert any(it.parts.stored.any() for it in written)
    assert not all(it.parts.stored.all() for it in written)


def test_nothing_but_rows_is_stored_twice(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that many tasks have a few rows of is written once, by the commit."""
    repository = make(url, (1, 1024), (1, 1024))
    cells = np.stack(np.unravel_index(np.arange(1024), (1, 1024)), axis=1)
    values = VALUES["f4"](1024)
    root = Path(url.removeprefix("file://")) / "chunks"
    for inline, chunks in ((1 << 18, 1), (0, 17)):
        monkeypatch.setattr(parts_module, "_INLINE_BYTES", inline)
        before = {*root.iterdir()} if root.exists() else set()
        write(repository, [rows_of(cells[it::16], values[it::16]) for it in range(16)])
        new = {*root.iterdir()} - before
        assert len(new) == chunks
        assert sum(it.stat().st_size for it in new) < 1024 * (4 + 12)
    assert found(repository).reshape(-1).tolist() == values.tolist()


@seed(0)
@settings(examples(240), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_division_of_rows_gives_the_same_array(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Rows that replace values, then rows that append, some of them late."""
    url = (tmp_path_factory.mktemp("rows") / "repo").as_uri()
    length, width = data.draw(st.integers(2, 7)), data.draw(st.integers(1, 9))
    chunks = data.draw(st.integers(1, length)), data.draw(st.integers(1, width))
    sharded = data.draw(st.booleans())
    shards = tuple(2 * it for it in chunks) if sharded else None
    repository = make(url, (length, width), chunks, shards=shards)
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    expected = np.zeros((length, width), "f4")

    def tasks(cells: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> list[pa.RecordBatch]:
        count = data.draw(st.integers(1, 5))
        homes = rng.integers(0, count, len(cells))
        return [rows_of(cells[homes == it], values[homes == it]) for it in range(count)]

    def some(first: int, last: int) -> npt.NDArray[np.int64]:
        every = np.stack(np.meshgrid(np.arange(first, last), np.arange(width), indexing="ij"), -1)
        every = every.reshape(-1, 2)
        part = data.draw(st.sampled_from([0.1, 0.5, 1.0]))
        return rng.permutation(every)[: max(1, int(len(every) * part))]

    cells = some(0, length)
    values = rng.integers(1, 99, len(cells)).astype("f4")
    expected[tuple(cells.T)] = values
    write(repository, tasks(cells, values))
    np.testing.assert_array_equal(found(repository), expected)

    cells = some(0, length + data.draw(st.integers(1, 6)))
    values = rng.integers(1, 99, len(cells)).astype("f4")
    how = data.draw(st.sampled_from(["overwrite", "drop"]))
    late = cells[:, 0] < length
    longer = max(length, int(cells[:, 0].max()) + 1)
    expected = np.concatenate([expected, np.zeros((longer - length, width), "f4")])
    kept = cells if how == "overwrite" else cells[~late]
    expected[tuple(kept.T)] = values if how == "overwrite" else values[~late]
    write(repository, tasks(cells, values), append_dim="t", late_rows=how, fill_gaps=True)
    np.testing.assert_array_equal(found(repository), expected)
    tip = next(iter(repository.ancestry(branch="main")))
    if len(kept):
        assert tip.metadata.get("spark-late-rows", 0) == late.sum()


def _line(*xs: int, t: int = 0) -> pa.RecordBatch:
    cells = np.array([(t, x) for x in xs])
    return rows_of(cells, np.ones(len(xs)))


@pytest.mark.parametrize(
    ("tasks", "twice"),
    [
        ([_line(0), _line(0)], 0),
        ([_line(1, 2, 3), _line(3)], 3),
        ([_line(1, 2, 3), _line(3, 4, 5)], 3),
        ([_line(*range(8)), _line(2)], 2),
        ([_line(2), _line(*range(8))], 2),
        ([_line(*range(8)), _line(*range(8))], 0),
        ([_line(0, 0)], 0),
        ([_line(*range(8), 5)], 5),
    ],
)
def test_duplicate_rows_are_named_in_one_task_or_in_two(
    url: str, tasks: list[pa.RecordBatch], twice: int
) -> None:
    """Whether chunks are whole, stored or handed over; nothing is published."""
    repository = make(url, (2, 16), (1, 8))
    tip = repository.lookup_branch("main")
    with pytest.raises(DuplicateRowsError, match=f"Several rows have t=0, x={twice}:") as raised:
        write(repository, tasks)
    assert raised.value.context["index"] == (0, twice)
    assert repository.lookup_branch("main") == tip


def test_late_row_is_named(url: str) -> None:
    """By default it ends the write; with all of its coordinates."""
    repository = make(url, (3, 4), (2, 4))
    tip = repository.lookup_branch("main")
    rows = rows_of(np.array([(3, 0), (1, 2)]), np.ones(2))
    with pytest.raises(OutsideGridError, match=r"A row has t=10, x=2, which the arrays have alrea"):
        write(repository, [rows], append_dim="t")
    assert repository.lookup_branch("main") == tip


def test_dropped_rows_alone_make_no_commit(url: str) -> None:
    """There is nothing to publish."""
    repository = make(url, (3, 4), (2, 4))
    tip = repository.lookup_branch("main")
    write(repository, [_line(1, t=1), _line(2, t=0)], append_dim="t", late_rows="drop")
    assert repository.lookup_branch("main") == tip


def test_chunk_changed_by_another_writer_meanwhile_is_a_conflict(url: str) -> None:
    """Also if the commit joins it: its rows were placed beside values that are others now."""
    repository = make(url, (2, 8), (1, 8))
    plan = WritePlan.begin(
        WriteOptions(repository.storage, cores=1),
        ["t", "x", "v"],
        overwrite=True,
        repository=repository,
    )
    written = [write_batches(plan, it, iter([_line(it)])) for it in range(2)]
    other = repository.writable_session("main")
    array: Any = zarr.open_array(other.store, path="v", mode="r+")
    array[0, 7] = 5
    other.commit("by others")
    with pytest.raises(RebaseFailedError):
        commit_rows(plan, written, None)
    assert found(repository)[0].tolist() == [0, 0, 0, 0, 0, 0, 0, 5]


def test_damaged_rows_of_tasks_are_refused() -> None:
    """Cut, outside of the chunk, without values, or of another array."""
    block = Block(0, np.array([3, 1]), {"v": np.array([1.0, 2.0])}, whole=False)

    def store(_: bytes) -> NativeChunk:
        raise AssertionError("so few rows travel with the answer")

    done = PartWriter(store).finish([])
    assert (len(done.chunks), len(done.whole), len(done.pieces)) == (0, 0, 0)
    writer = PartWriter(store)
    writer.add(block, stored=False)
    (data,) = writer.finish([]).pieces
    assert isinstance(data, bytes)
    f8 = np.dtype("f8")
    cells, values = block_rows(data, 4, {"v": f8})
    assert (cells.tolist(), values and values["v"].tolist()) == ([1, 3], [2.0, 1.0])
    wrong: list[tuple[bytes, int, dict[str, np.dtype[Any]]]] = [
        (data[:-4], 4, {"v": f8}),
        (b"", 4, {"v": f8}),
        (data, 3, {"v": f8}),
        (data, 4, {"w": f8}),
        (data, 4, {"v": np.dtype("f4")}),
    ]
    for given_data, size, dtypes in wrong:
        with pytest.raises(FormatError):
            block_rows(given_data, size, dtypes)
