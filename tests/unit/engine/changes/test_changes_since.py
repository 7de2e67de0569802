"""Changes since a copy was made bring the original to the state of the copy."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.engine.changes.change_set import ChangeSet, WorkingTree
from icechunk_async.engine.changes.merge import ForkPoint, Merger
from icechunk_async.engine.changes.since import changes_since
from icechunk_async.engine.changes.wire import ForkState, encode_fork
from icechunk_async.format.ids import NodeId, SnapshotId
from icechunk_async.format.manifest.chunk import InlineChunk
from icechunk_async.format.snapshot import ArrayData, Dimension, Node, Nodes

BASE = SnapshotId(b"b" * 12)


def _array(length: int) -> tuple[bytes, ArrayData]:
    """Return an array of chunks of one element."""
    return json.dumps({"length": length}).encode(), ArrayData((Dimension(length, length),), None)


def _base() -> Nodes:
    array = _array(6)
    paths = [("/", b"{}", None), ("/a", *array), ("/b", *array), ("/g", b"{}", None)]
    return Nodes(
        Node(NodeId(path.encode().ljust(8, b"-")), path, data, kind) for path, data, kind in paths
    )


STEP = st.one_of(
    st.tuples(st.just("array"), st.sampled_from(["/a", "/b", "/c", "/g/d"]), st.integers(1, 9)),
    st.tuples(st.just("group"), st.sampled_from(["/g", "/h"]), st.integers(0, 3)),
    st.tuples(st.just("delete"), st.sampled_from(["/a", "/c", "/g", "/h"]), st.just(0)),
    st.tuples(st.just("chunk"), st.sampled_from(["/a", "/b", "/c", "/g/d"]), st.integers(0, 8)),
    st.tuples(st.just("drop"), st.sampled_from(["/a", "/b", "/c", "/g/d"]), st.integers(0, 8)),
)


def _take(tree: WorkingTree, step: tuple[str, str, int], value: int) -> None:
    """Do one step, if it can be done in this state."""
    what, path, number = step
    node = tree.get(path)
    is_array = node is not None and node.array is not None
    if what == "delete":
        tree.delete_node(path)
    elif what == "group" and not is_array:
        tree.set_node(path, json.dumps({"n": number}).encode(), None)
    elif what == "array" and (node is None or is_array):
        tree.set_node(path, *_array(number))
    elif what in {"chunk", "drop"} and node is not None and node.array is not None:
        at = (number % node.array.grid[0],)
        data = b"%d" % (value % 3)
        tree.chunk_changes(node).set(at, InlineChunk(data) if what == "chunk" else None)


def _bytes(changes: ChangeSet) -> bytes:
    return encode_fork(ForkState(b"s" * 12, BASE, changes))


@given(st.lists(STEP, max_size=8), st.lists(STEP, max_size=8))
def test_changes_since_lead_to_the_same_state(before: list[Any], after: list[Any]) -> None:
    """For any steps before and after, merged as those of a fork; equal states have none."""
    base = _base()
    tree = WorkingTree(base, ChangeSet())
    for number, step in enumerate(before):
        _take(tree, step, number)
    then = tree.changes
    copy = WorkingTree(base, then.copy())
    for number, step in enumerate(after):
        _take(copy, step, number + 1)
    since = changes_since(copy.changes, then)
    merger = Merger(then, BASE)
    merger.add(since, ForkPoint(then))
    assert _bytes(merger.finish()) == _bytes(copy.changes)
    assert changes_since(then, then.copy()).is_empty()
