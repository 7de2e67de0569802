"""Changes streamed from random commits turn each table into the next one, exactly."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import zarr
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from icechunk_async.arrow import boxes as changed_boxes
from icechunk_async.sync import Repository
from icechunk_async.sync.storage import local_filesystem_storage
from tests.spark.streams import follow, follower
from tests.spark.tables import read

if TYPE_CHECKING:
    from collections.abc import Callable

type Step = tuple[str, int, int, int]

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "append",
                "cut",
                "set",
                "fill",
                "move time",
                "attributes",
                "replace",
                "delete",
                "scale",
            ]
        ),
        st.integers(0, 5),
        st.integers(0, 5),
        st.integers(1, 4),
    ),
    min_size=1,
    max_size=6,
)


def make(group: zarr.Group, chunk: int) -> None:
    """Make a table of two arrays, whose chunks differ, and an auxiliary coordinate."""
    for name in list(group):
        del group[name]
    time = group.create_array("time", shape=(3,), chunks=(4,), dtype="i8", dimension_names=["time"])
    time[:] = np.arange(3)
    names = ["time", "x"]
    a = group.create_array(
        "a", shape=(3, 4), chunks=(chunk, 3), dtype="f4", fill_value=0, dimension_names=names
    )
    b = group.create_array(
        "b", shape=(3, 4), chunks=(3, chunk), dtype="i4", fill_value=0, dimension_names=names
    )
    season = group.create_array(
        "season", shape=(3,), chunks=(2,), dtype="i4", dimension_names=["time"]
    )
    a.attrs["coordinates"] = "season"
    b.attrs["scale_factor"] = 1.0
    a[:], b[:], season[:] = 1, 2, 3


def resize(group: zarr.Group, length: int) -> None:
    """Resize all arrays of the table to a number of times."""
    for name in ("time", "season", "a", "b"):
        array: Any = group[name]
        array.resize((length, *array.shape[1:]))


def change(group: zarr.Group, step: Step, number: int) -> None:  # noqa: C901 -- one line each
    """Do one of the things that commits do to tables; times are those of the step only."""
    what, first, second, count = step
    if "a" not in group:
        make(group, count)
        return
    time: Any = group["time"]
    a: Any = group["a"]
    b: Any = group["b"]
    length = time.shape[0]
    at = (first % max(1, length), second % 4)
    match what:
        case "append":
            resize(group, length + count)
            time, a = group["time"], group["a"]
            time[length:] = 100 * number + np.arange(count)
            a[length:] = count
        case "cut":
            resize(group, max(0, length - count))
        case "set" if length:
            a[at] = np.nan if second == 5 else 10 * count
            b[at] = b[at]  # the same again
        case "fill" if length:
            b[at[0] :] = 0
        case "move time" if length:
            time[at[0]] = 100 * number + 50
        case "attributes":
            a.attrs["history"] = f"{first} {second} {count}"
        case "scale":
            b.attrs["scale_factor"] = float(count)
        case "replace":
            del group["b"]
            names = ["time", "x"]
            b = group.create_array(
                "b", shape=(length, 4), chunks=(2, 4), dtype="i4", dimension_names=names
            )
            b.attrs["scale_factor"] = 1.0
            if length:
                b[:] = count
        case "delete":
            del group["a"]
        case _:
            time.attrs["note"] = f"{first} {second} {count}"


def keyed(rows: list[dict[str, Any]]) -> dict[tuple[Any, Any], tuple[Any, ...]]:
    """Return the values of each row, by its coordinates."""
    found = {(row["time"], row["x"]): (row["a"], row["b"], row["season"]) for row in rows}
    assert len(found) == len(rows)
    return found


def commit(repository: Repository, changes: Callable[[zarr.Group], object]) -> str:
    """Commit changes of the root group."""
    session = repository.writable_session("main")
    changes(zarr.open_group(session.store, mode="a"))
    return str(session.commit("changed", allow_empty=True))


@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@example(chunk=2, steps=[("move time", 1, 0, 1), ("set", 2, 1, 1)], most=1)
@given(chunk=st.integers(1, 4), steps=STEPS, most=st.sampled_from([1, 1024]))
def test_changes_make_each_table_from_the_one_before(
    chunk: int, steps: list[Step], most: int
) -> None:
    """Rows that were appended, changed and removed, and no unchanged row.

    So also where what changed makes more boxes than a plan should have.
    """
    with (
        tempfile.TemporaryDirectory() as directory,
        patch.object(changed_boxes, "_MAX_BOXES", most),
    ):
        repository = Repository.create(local_filesystem_storage(directory))
        url = f"file://{directory}"
        first = commit(repository, lambda group: make(group, chunk))
        reader = follower(url, arrays="a,b,season", changes="all")
        states = [(first, keyed(read(url, arrays="a,b,season").to_pylist()))]
        for number, step in enumerate(steps, 1):
            snapshot_id = commit(repository, partial(change, step=step, number=number))
            group = zarr.open_group(repository.readonly_session("main").store, mode="r")
            rows = read(url, arrays="a,b,season").to_pylist() if "a" in group else []
            states.append((snapshot_id, keyed(rows)))
        found = follow(reader)
        state: dict[tuple[Any, Any], tuple[Any, ...]] = {}
        for snapshot_id, expected in states:
            mine = [row for row in found if row["_snapshot_id"] == snapshot_id]
            told = {
                kind: keyed([row for row in mine if row["_change"] == kind])
                for kind in ("deleted", "appended", "updated")
            }
            for key, values in told["deleted"].items():
                assert state.pop(key) == values
            assert not state.keys() & told["appended"].keys()
            assert not told["deleted"].keys() & told["appended"].keys()
            state |= told["appended"]
            for key, values in told["updated"].items():
                assert state[key] != values
            state |= told["updated"]
            assert state == expected
