"""A stream over commits that change its columns stops, or continues without a row twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async.errors import InvalidInputError, StreamSchemaChangedError
from icechunk_async.spark.stream.source import stream_schema
from icechunk_async.sync import Repository
from tests.spark.streams import follow, follower

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.spark.stream.admitting import AdmittingReader

    type Change = Callable[[zarr.Group], object]


def commit(url: str, change: Change) -> str:
    """Commit a change of the root group of a repository."""
    session = Repository.open(url).writable_session("main")
    change(zarr.open_group(session.store, mode="a"))
    return str(session.commit("changed"))


def made(group: zarr.Group) -> None:
    """Make two times of two places."""
    _array(group, "time", ["time"], np.array([0, 10]))
    _array(group, "v", ["time", "x"], np.ones((2, 2)))


def _array(group: zarr.Group, name: str, dims: list[str], values: Any) -> None:
    array = group.create_array(
        name, shape=values.shape, chunks=values.shape, dtype=values.dtype, dimension_names=dims
    )
    array[...] = values


def appended(value: int) -> Change:
    """Return a change that appends a time to all arrays that have times."""

    def change(group: zarr.Group) -> None:
        for name in ("time", "v", "w"):
            if name in group:
                array: Any = group[name]
                length = array.shape[0]
                array.resize((length + 1, *array.shape[1:]))
                array[length:] = value

    return change


def added(group: zarr.Group) -> None:
    """Add an array, with a value for every cell that there is but one."""
    time: Any = group["time"]
    values = np.arange(2.0 * time.shape[0]).reshape(-1, 2)
    values[0, 0] = np.nan
    _array(group, "w", ["time", "x"], values)


def located(group: zarr.Group) -> None:
    """Give a dimension coordinates."""
    _array(group, "x", ["x"], np.array([0, 100]))


def narrowed(group: zarr.Group) -> None:
    """Make an array anew, with another type and one other value."""
    array: Any = group["v"]
    values = np.asarray(array[...]).astype("f4")
    values[1, 1] = 7
    del group["v"]
    _array(group, "v", ["time", "x"], values)


def removed(group: zarr.Group) -> None:
    """Remove an array."""
    del group["w"]


def end(reader: AdmittingReader) -> dict[str, Any]:
    """Return the offset after all that there is."""
    return reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())


@pytest.fixture
def repository_url(repository: Repository, url: str) -> str:
    """The place of a repository with two times."""
    assert repository.lookup_branch("main")
    commit(url, made)
    return url


def told(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    """Return columns of rows."""
    return [tuple(row[name] for name in names) for row in rows]


def test_an_array_that_was_added_brings_no_row_again(repository_url: str) -> None:
    """The query that runs keeps its columns; a new one stops, or continues with only new rows."""
    url = repository_url
    running = follower(url)
    start = end(running)
    commit(url, appended(20))
    change = commit(url, added)
    commit(url, appended(30))
    assert told(follow(running, start), "time", "x") == [(20, 0), (20, 1), (30, 0), (30, 1)]

    with pytest.raises(StreamSchemaChangedError, match=f"{change}.*'w' .double. is new") as caught:
        follow(follower(url), start)
    assert caught.value.context["snapshot_id"] == change
    with pytest.raises(StreamSchemaChangedError, match=r"option.'schema-change', 'latest'"):
        follower(url).partitions(start, end(running))

    rows = follow(follower(url, schema_change="latest"), start)
    assert told(rows, "time", "x", "v", "w") == [
        *((20, x, 20.0, None) for x in (0, 1)),
        *((30, x, 30.0, 30.0) for x in (0, 1)),
    ]
    every = follow(follower(url, changes="all", schema_change="latest"), start)
    updates = [row for row in every if row["_change"] == "updated"]
    assert told(updates, "time", "x", "w") == [
        (0, 1, 1),
        (10, 0, 2),
        (10, 1, 3),
        (20, 0, 4),
        (20, 1, 5),
    ]
    assert {row["_snapshot_id"] for row in updates} == {change}
    assert told([it for it in every if it["_change"] != "updated"], "time", "_change") == [
        *[(20, "appended")] * 2,
        *[(30, "appended")] * 2,
    ]
    assert told(follow(follower(url, arrays="v"), start), "time") == [(20,), (20,), (30,), (30,)]


def test_an_array_that_was_removed_stops_the_query(repository_url: str) -> None:
    """Unless it is to continue without, or its old columns are asked for."""
    url = repository_url
    commit(url, added)
    start = end(follower(url))
    old = stream_schema({"path": url, "changes": "appended"})
    change = commit(url, removed)
    commit(url, appended(20))
    with pytest.raises(StreamSchemaChangedError, match=f"{change}.*'w' .double. is gone"):
        follow(follower(url), start)
    rows = follow(follower(url, schema_change="latest"), start)
    assert rows == [{"time": 20, "x": x, "v": 20.0} for x in (0, 1)]
    rows = follow(follower(url, old, schema_change="latest"), start)
    assert rows == [{"time": 20, "x": x, "v": 20.0, "w": None} for x in (0, 1)]


def test_coordinates_that_were_added_bring_no_row_again(repository_url: str) -> None:
    """A query that runs stops as well, since the rows it has told have other coordinates."""
    url = repository_url
    running = follower(url)
    start = end(running)
    change = commit(url, located)
    commit(url, appended(20))
    for reader in (running, follower(url)):
        with pytest.raises(StreamSchemaChangedError, match=f"{change}.*dimension 'x'"):
            follow(reader, start)
    rows = follow(follower(url, schema_change="latest"), start)
    assert told(rows, "time", "x") == [(20, 0), (20, 100)]
    every = follow(follower(url, changes="all", schema_change="latest"), start)
    assert told(every, "_change", "time", "x") == [
        *(("updated", time, 100) for time in (0, 10)),
        *(("appended", 20, x) for x in (0, 100)),
    ]


def test_a_type_that_was_narrowed_can_be_continued_from(repository_url: str) -> None:
    """The values of earlier commits are rounded to it; the query that runs has the wider type."""
    url = repository_url
    running = follower(url)
    start = end(running)
    commit(url, appended(20))
    change = commit(url, narrowed)
    commit(url, appended(30))
    assert told(follow(running, start), "v") == [(20,), (20,), (30,), (30,)]
    with pytest.raises(StreamSchemaChangedError, match=f"{change}.*'v' was double and is float"):
        follow(follower(url), start)
    rows = follow(follower(url, schema_change="latest"), start)
    assert told(rows, "time", "v") == [(20, 20), (20, 20), (30, 30), (30, 30)]
    every = follow(follower(url, changes="all", schema_change="latest"), start)
    updates = [row for row in every if row["_change"] == "updated"]
    assert told(updates, "time", "x", "v") == [(10, 1, 7)]


def test_values_that_the_latest_type_cannot_hold_are_an_error(repository_url: str) -> None:
    """Of numbers without fraction, since nothing is lost in silence."""

    def whole(group: zarr.Group) -> None:
        del group["v"]
        _array(group, "v", ["time", "x"], np.ones((3, 2), "i1"))

    url = repository_url
    running = follower(url)
    start = end(running)
    commit(url, appended(300))
    change = commit(url, whole)
    with pytest.raises(StreamSchemaChangedError, match=f"{change}.*'v' is of the type int8"):
        follow(running, start)
    with pytest.raises(InvalidInputError, match="'v' was double and is int8"):
        follow(follower(url, schema_change="latest"), start)


def test_offsets_of_older_versions_and_of_chunks_say_nothing_of_columns(
    repository_url: str,
) -> None:
    """A query continues from them."""
    url = repository_url
    start = end(follower(url))
    assert start["columns"] == {"time": "int64", "x": "int64", "v": "double"}
    assert list(end(follower(url, layout="chunks"))) == ["snapshot-id"]
    commit(url, appended(20))
    del start["columns"]
    assert told(follow(follower(url), start), "time") == [(20,), (20,)]
