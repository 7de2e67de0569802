"""Snapshots in which some nodes changed: the others are copied, and read as they did."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import Envelope
from icechunk_async.format.snapshot import (
    ArrayData,
    Dimension,
    ManifestFileInfo,
    ManifestRef,
    Node,
    Nodes,
    Snapshot,
    decode_snapshot,
    writing,
)
from icechunk_async.format.snapshot.writing import encode_snapshot
from tests.helpers import examples
from tests.unit.format.samples import PATHS, manifest_id, node_id, snapshot_id
from tests.unit.format.table_builder import Field, Scalar, Struct, TableBuilder
from tests.unit.format.wire import root

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BOTH = pytest.mark.parametrize("spec", [1, 2])
COUNT = 60
"""Enough that copying pays."""


def array_of(number: int, manifests: int) -> ArrayData:
    """Return an array; no two are alike in all lengths."""
    boxes = [((at, at + 1), (0, 2 + number)) for at in range(manifests)]
    refs = [ManifestRef(manifest_id(number * 10 + at), box) for at, box in enumerate(boxes)]
    names = ("x" * (number % 4) or None, None) if number % 3 else None
    return ArrayData((Dimension(10, 10), Dimension(number + 2, number + 2)), names, tuple(refs))


def node(number: int, path: str | None = None) -> Node:
    """Return a group or an array, with a document of some length."""
    array = None if number % 5 == 0 else array_of(number, number % 3)
    return Node(node_id(number), path or f"/{number:03}", b"{%d}" % number * (number % 7), array)


def stored(nodes: Iterable[Node], spec: int) -> Snapshot:
    """Write nodes one by one, and read the file."""
    infos = [ManifestFileInfo(manifest_id(it), it, it) for it in range(7)]
    files = {info.id: info for info in infos}
    snapshot = Snapshot(snapshot_id(1), None, 5, "made", {}, Nodes(nodes), files)
    return decode_snapshot(Envelope(spec, bytes(encode_snapshot(snapshot, spec))))


def encoded(snapshot: Snapshot, nodes: Nodes, spec: int) -> bytes:
    """Return the file of a snapshot with other nodes."""
    return bytes(encode_snapshot(replace(snapshot, nodes=nodes), spec))


def again(payload: bytes, spec: int) -> Snapshot:
    """Read a file."""
    return decode_snapshot(Envelope(spec, payload))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the paths of the nodes that are written anew."""
    paths: list[str] = []
    write = writing._NodeWriter.node

    def noted(self: writing._NodeWriter, it: Node) -> object:
        paths.append(it.path)
        return write(self, it)

    monkeypatch.setattr(writing._NodeWriter, "node", noted)
    return paths


@BOTH
def test_changed_nodes_alone_are_written(spec: int, written: list[str]) -> None:
    """The file is the same, byte for byte, as if all of its nodes had been written anew."""
    base = stored(map(node, range(COUNT)), spec)
    new = [node(2, "/007"), node(300, "/007a"), node(301, "/-first"), node(302, "/~last")]
    edited = base.nodes.edited(new, ["/008", "/050", "/051", "/059", "/000"])
    written.clear()
    payload = encoded(base, edited, spec)
    assert written == ["/-first", "/007", "/007a", "/~last"]
    assert payload == encoded(base, Nodes(edited.values()), spec)
    assert again(payload, spec).nodes == edited


@BOTH
@pytest.mark.parametrize("is_read", [False, True])
def test_of_few_nodes_changed_ones_alone_are_written(
    spec: int, written: list[str], *, is_read: bool
) -> None:
    """Others were written before by this process, also where they are of a file that it read."""
    base = stored(map(node, range(20)), spec)
    nodes = base.nodes if is_read else Nodes(base.nodes.values())
    encoded(base, nodes, spec)
    for number in range(3):
        nodes = nodes.edited([node(100 + number, "/007"), node(number, "/new")], [f"/01{number}"])
        written.clear()
        payload = encoded(base, nodes, spec)
        assert written == ["/007", "/new"]
        assert payload == encoded(base, Nodes(nodes.values()), spec)
    written.clear()
    other = encoded(base, nodes, 3 - spec)  # nothing of one version is in a file of the other
    assert len(written) == len(nodes)
    assert other == encoded(base, Nodes(nodes.values()), 3 - spec)


def test_many_nodes_are_not_kept_as_they_were_written() -> None:
    """They would take memory, and are found in the new file."""
    base = stored(map(node, range(COUNT)), 2)
    for nodes in (Nodes(base.nodes.values()), base.nodes):
        encoded(base, nodes, 2)
        assert not nodes._blocks


EDITS = st.lists(st.tuples(st.integers(0, COUNT - 1), st.booleans()), max_size=12)


@examples(80)
@given(EDITS, st.sets(PATHS, max_size=5), st.sampled_from([1, 2]))
def test_any_change_is_written_as_if_anew(
    edits: list[tuple[int, bool]], paths: set[str], spec: int
) -> None:
    """Nodes replaced, deleted and added, in two commits one after the other."""
    base = stored(map(node, range(COUNT)), spec)
    nodes = base.nodes
    half = len(edits) // 2
    for some, more in ((edits[:half], ()), (edits[half:], paths)):
        gone = [f"/{number:03}" for number, is_gone in some if is_gone]
        put = [node(number + 1, f"/{number:03}") for number, is_gone in some if not is_gone]
        put += [node(number, path) for number, path in enumerate(more, 500)]
        nodes = nodes.edited(put, gone)
        payload = encoded(base, nodes, spec)
        assert payload == encoded(base, Nodes(nodes.values()), spec)
    assert len(nodes) == len(nodes.paths) == len(list(nodes.values()))
    assert all(nodes[path].path == path for path in nodes.paths)


def test_edited_nodes_are_found_in_every_way() -> None:
    """By path, by id, below a path and by the manifests that they use."""
    base = stored(map(node, range(COUNT)), 2).nodes
    edited = base.edited([node(700, "/002"), node(701, "/002/a")], ["/003", "/nothing"])
    assert "/003" not in edited
    assert edited.get("/003") is None
    assert edited["/002"].id == node_id(700)
    assert edited.path_of(node_id(2)) is None
    assert edited.path_of(node_id(3)) is None
    assert edited.path_of(node_id(700)) == "/002"
    assert edited.path_of(node_id(4)) == "/004"
    assert list(edited.below("/002")) == ["/002/a"]
    assert len(edited) == len(edited.paths) == COUNT
    assert list(edited) == [it.path for it in edited.values()]
    assert base["/003"].id == node_id(3)  # the old nodes stay
    assert list(base.below("/002")) == []
    back = edited.edited([node(3, "/003")], ["/002/a"])
    assert back.paths == base.paths
    assert back["/003"] == base["/003"]


def test_manifests_that_are_still_used_are_known() -> None:
    """By a node of the file, or by one on top of it; not by those that were replaced."""
    shared = replace(array_of(1, 1), manifests=array_of(11, 2).manifests)
    nodes = [*map(node, range(COUNT)), Node(node_id(900), "/shared", b"", shared)]
    for base in (stored(nodes, 2).nodes, Nodes(nodes)):
        ids = [manifest_id(it) for it in (110, 111, 140, 141, 999)]
        assert base.using(ids) == set(ids[:4])
        edited = base.edited([node(14 + 15, "/014")], ["/011"])
        assert edited.using(ids) == set(ids[:2])
        assert edited.edited([], ["/shared"]).using(ids) == set()
        assert edited.edited([node(14, "/014")]).using(ids) == set(ids[:4])


def other_file(
    count: int,
    fields: Callable[[TableBuilder, int], dict[int, Field]],
    *,
    order: int = 1,
    first: str = "/000",
) -> bytes:
    """Return a file of groups as other writers make them: vtables are shared, children first.

    What is made ``first`` comes last in the file, before something that is not referred to.
    """
    out = TableBuilder()
    out.blob(b"")
    tables = []
    for number in range(count)[::order]:
        plain: dict[int, Field] = {
            0: Struct(node_id(number)), 1: out.string(f"/{number:03}" if number else first),
            2: out.blob(b"{%d}" % number * (number % 9)), 3: Scalar(2, 1), 4: out.table({}),
        }  # fmt: skip
        tables.append(out.table({**plain, **fields(out, number)}))
    none = out.offsets([])
    message, files = out.string("m"), out.structs(b"", 32, 8)
    root_fields: dict[int, Field] = {
        0: Struct(snapshot_id(1)), 2: out.offsets(tables), 4: message, 5: none, 6: files, 7: none,
    }  # fmt: skip
    return out.finish(out.table(root_fields))


def test_nodes_of_other_writers_are_copied(written: list[str]) -> None:
    """Also if they share vtables and lie in another order."""
    base = again(other_file(COUNT, lambda *_: {}), 2)
    edited = base.nodes.edited([node(1, "/050"), node(2, "/0500")], ["/045"])
    payload = encoded(base, edited, 2)
    assert written == ["/050", "/0500"]
    assert again(payload, 2).nodes == edited
    assert list(again(payload, 2).nodes.values()) == list(edited.values())


@pytest.mark.parametrize("length", range(8))
def test_strings_keep_the_zero_at_their_end(length: int) -> None:
    """Also the last one of what is copied; the official reader wants it."""
    name = "/000" + "x" * length
    base = again(other_file(COUNT, lambda *_: {}, first=name), 2)
    payload = encoded(base, base.nodes.edited([node(1, "/050")]), 2)
    stored = again(payload, 2)
    paths = stored.nodes.table.tables.vector(1, 1, 1) if stored.nodes.table else None
    assert paths is not None
    assert [payload[it] for it in (paths.starts + paths.counts).tolist()] == [0] * COUNT


def test_files_do_not_grow_with_commits_on_nodes_of_other_writers() -> None:
    """Replaced nodes are left behind, sooner or later."""
    snapshot = again(other_file(COUNT, lambda *_: {}), 2)
    anew = len(encoded(snapshot, Nodes(snapshot.nodes.values()), 2))
    for number in range(300):
        path = f"/{number % COUNT:03}"
        edited = snapshot.nodes.edited([replace(snapshot.nodes[path], user_data=b"x" * 99)])
        payload = encoded(snapshot, edited, 2)
        assert len(payload) < 2 * anew + COUNT * 200
        snapshot = again(payload, 2)
    assert {it.user_data for it in snapshot.nodes.values()} == {b"x" * 99}


def test_nodes_out_of_order_are_written_in_order() -> None:
    """Readers search by halving."""
    base = again(other_file(COUNT, lambda *_: {}, order=-1), 2)
    assert base.nodes["/007"].id == node_id(7)
    payload = encoded(base, base.nodes.edited([node(1, "/0500")]), 2)
    paths = [table.string(1) for table in root(payload).tables(2)]
    assert paths == sorted([f"/{number:03}" for number in range(COUNT)] + ["/0500"])
    assert again(payload, 2).nodes["/007"].user_data == base.nodes["/007"].user_data


def test_nodes_in_a_form_that_we_do_not_write_are_written_anew(written: list[str]) -> None:
    """Paths get their normal form, arrays of format 1 the shape of format 2."""

    def fields(out: TableBuilder, number: int) -> dict[int, Field]:
        if number == 3:
            return {1: out.string("/003/")}
        if number == 5:
            shape = out.structs(struct.pack("<QQ", 10, 3), 16, 8)
            return {3: Scalar(1, 1), 4: out.table({0: shape, 2: out.offsets([])})}
        return {6: out.blob(b"later")} if number == 7 else {}

    base = again(other_file(COUNT, fields), 2)
    payload = encoded(base, base.nodes.edited([node(1, "/050")]), 2)
    assert written == ["/003", "/005", "/007", "/050"]
    tables = {table.string(1): table for table in root(payload).tables(2)}
    assert list(tables) == [f"/{number:03}" for number in range(COUNT)]
    (dimension,) = tables["/005"].table(4).tables(3)
    assert (dimension.number(0, 8), dimension.number(1, 4)) == (10, 4)
    assert 6 not in tables["/007"].slots


def test_nodes_of_a_file_of_another_version_are_written_anew(written: list[str]) -> None:
    """Migrated repositories have files of both."""
    base = stored(map(node, range(COUNT)), 1)
    written.clear()
    payload = encoded(base, base.nodes.edited([]), 2)
    assert len(written) == COUNT
    assert payload == encoded(base, Nodes(base.nodes.values()), 2)


def test_things_that_nodes_share_are_copied_once() -> None:
    """A document of several nodes."""
    shared: list[Field] = []

    def fields(out: TableBuilder, number: int) -> dict[int, Field]:
        if not shared:
            shared.append(out.blob(b"d" * 1000))
        return {2: shared[0]} if number % 2 else {}

    payload = other_file(COUNT, fields)
    base = again(payload, 2)
    edited = base.nodes.edited([node(1, "/001")])
    copied = encoded(base, edited, 2)
    assert len(copied) < len(payload) + 1000
    assert again(copied, 2).nodes == edited


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_damaged_node_is_not_copied(slot: int) -> None:
    """A commit looks at all that it takes over."""
    base = again(other_file(COUNT, lambda _, number: {slot: None} if number == 50 else {}), 2)
    edited = base.nodes.edited([replace(base.nodes["/001"], user_data=b"new")])
    with pytest.raises(FormatError, match="required field"):
        encoded(base, edited, 2)


def test_two_nodes_at_one_path_are_not_copied() -> None:
    """Other writers have done that; a commit must not choose one."""
    base = again(other_file(COUNT, lambda out, it: {1: out.string("/007")} if it == 8 else {}), 2)
    with pytest.raises(FormatError, match="twice"):
        encoded(base, base.nodes.edited([replace(base.nodes["/001"], user_data=b"new")]), 2)


def test_little_on_top_of_a_file_is_light() -> None:
    """A snapshot with few changes keeps the file of its base; with more it is read again."""
    base = stored(map(node, range(COUNT)), 2).nodes
    assert base.is_light
    assert base.edited([node(1, "/001")]).is_light
    assert not base.edited(node(it, f"/{it:03}") for it in range(20)).is_light
    assert not Nodes(map(node, range(40))).is_light
