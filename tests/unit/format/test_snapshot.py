"""Snapshots: what each version writes and reads."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from icechunk_async.errors import FormatError, InvalidInputError, UnsupportedBySpecError
from icechunk_async.format.envelope import Envelope
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.snapshot import (
    ArrayData,
    Dimension,
    ManifestFileInfo,
    ManifestRef,
    Node,
    Nodes,
    Snapshot,
    decode_snapshot,
    with_parent,
)
from icechunk_async.format.snapshot.writing import encode_snapshot
from tests.helpers import counted_calls
from tests.unit.format.samples import manifest_id, node_id, snapshot_id
from tests.unit.format.wire import Table, root

BOTH = pytest.mark.parametrize("spec", [1, 2])
FILES = {
    manifest_id(number): ManifestFileInfo(manifest_id(number), 100 * number, number)
    for number in (9, 3, 5)
}
GRID = ArrayData(
    (Dimension(10, 4), Dimension(7, 7)),
    ("x", None),
    (
        ManifestRef(manifest_id(3), ((0, 2), (0, 7))),
        ManifestRef(manifest_id(5), ((2, 4), (3, 4))),
    ),
)
SCALAR = ArrayData((), None, (ManifestRef(manifest_id(9), ()),))
NODES = Nodes(
    [
        Node(node_id(2), "/a/b", b"{1}", GRID),
        Node(node_id(1), "/a", b"{}"),
        Node(node_id(3), "/a-b", b"\xff not text", SCALAR),
        Node(node_id(9), "/", b""),
        Node(node_id(4), "/é", b"{2}", ArrayData((Dimension(0, 0),))),
    ]
)
SNAPSHOT = Snapshot(
    snapshot_id(7), snapshot_id(6), 1_700_000_000_000_001, "Méssage", {"b": 1, "a": [None]},
    NODES, FILES,
)  # fmt: skip


def decoded(snapshot: Snapshot, spec: int) -> Snapshot:
    """Write and read."""
    return decode_snapshot(Envelope(spec, bytes(encode_snapshot(snapshot, spec))))


def written(snapshot: Snapshot, spec: int) -> Table:
    """Return the root table."""
    return root(encode_snapshot(snapshot, spec))


def test_spec_1_reads_back() -> None:
    """With its parent."""
    assert decoded(SNAPSHOT, 1) == SNAPSHOT


def test_spec_2_reads_back_without_a_parent() -> None:
    """Ancestry is in the repo info."""
    found = decoded(SNAPSHOT, 2)
    assert found.parent_id is None
    assert found.nodes == SNAPSHOT.nodes
    assert (found.id, found.flushed_at, found.message, found.metadata, found.manifests) == (
        SNAPSHOT.id, SNAPSHOT.flushed_at, SNAPSHOT.message, SNAPSHOT.metadata, SNAPSHOT.manifests,
    )  # fmt: skip


def test_spec_1_has_the_fields_of_spec_1() -> None:
    """Parent and file structs, no file tables."""
    table = written(SNAPSHOT, 1)
    assert table.slots == {0, 1, 2, 3, 4, 5, 6}
    assert table.raw(0, 12) == SNAPSHOT.id
    assert table.raw(1, 12) == SNAPSHOT.parent_id
    assert table.number(3, 8) == SNAPSHOT.flushed_at
    assert table.string(4) == "Méssage"


def test_spec_2_has_the_fields_of_spec_2() -> None:
    """No parent, an empty vector of file structs, and a vector of file tables even if empty."""
    for snapshot in (SNAPSHOT, Snapshot(snapshot_id(1), snapshot_id(0), 5, "")):
        table = written(snapshot, 2)
        assert table.slots == {0, 2, 3, 4, 5, 6, 7}
        assert table.structs(6, 32, 8) == []
        assert len(table.tables(7)) == len(snapshot.manifests)


def test_the_first_snapshot_has_no_parent() -> None:
    """The field is left out in spec 1 too."""
    first = Snapshot(snapshot_id(1), None, 5, "Repository initialized")
    assert 1 not in written(first, 1).slots
    assert decoded(first, 1) == first


@BOTH
def test_the_first_snapshot_may_have_any_id(spec: int) -> None:
    """Before 1.0 it was a random one."""
    first = Snapshot(SnapshotId(b"\xfe" * 12), None, 0, "Repository initialized")
    assert decoded(first, spec) == first


@BOTH
def test_nodes_are_sorted_by_the_bytes_of_their_paths(spec: int) -> None:
    """They are not sorted by segments: ``/a-b`` comes before ``/a/b``."""
    paths = [table.string(1) for table in written(SNAPSHOT, spec).tables(2)]
    assert paths == ["/", "/a", "/a-b", "/a/b", "/é"]


@BOTH
def test_metadata_is_sorted_by_name(spec: int) -> None:
    """Each format version has a different encoding."""
    items = written(SNAPSHOT, spec).tables(5)
    assert [item.string(0) for item in items] == ["a", "b"]
    assert items[1].blob(1) == bytes.fromhex("01" if spec == 1 else "010801")


def test_manifest_file_structs_have_32_bytes() -> None:
    """Id, four zero bytes, size, count, four zero bytes; sorted by id."""
    assert written(SNAPSHOT, 1).structs(6, 32, 8) == [
        struct.pack("<12s4xQI4x", manifest_id(number), 100 * number, number) for number in (3, 5, 9)
    ]


def test_manifest_file_tables_leave_defaults_out() -> None:
    """Sorted by id."""
    unknown = ManifestFileInfo(manifest_id(1), 0, 0)
    tables = written(
        Snapshot(snapshot_id(1), None, 5, "", manifests={unknown.id: unknown} | FILES), 2
    )
    found = tables.tables(7)
    assert [table.raw(0, 12) for table in found] == [manifest_id(it) for it in (1, 3, 5, 9)]
    assert found[0].slots == {0}
    assert (found[1].number(1, 8), found[1].number(2, 4)) == (300, 3)


def test_groups_have_an_empty_table() -> None:
    """Union member 2; arrays are 1."""
    nodes = {table.string(1): table for table in written(SNAPSHOT, 2).tables(2)}
    assert nodes["/a"].number(3, 1) == 2
    assert nodes["/a"].table(4).slots == set()
    assert nodes["/a/b"].number(3, 1) == 1
    assert nodes["/a/b"].slots == {0, 1, 2, 3, 4}


def test_the_metadata_document_is_kept_byte_for_byte() -> None:
    """It may be empty or invalid JSON."""
    nodes = {table.string(1): table for table in written(SNAPSHOT, 2).tables(2)}
    assert nodes["/a-b"].blob(2) == b"\xff not text"
    assert nodes["/"].blob(2) == b""


def array_table(spec: int, array: ArrayData) -> Table:
    """Write an array and answer its ArrayNodeData."""
    snapshot = Snapshot(
        snapshot_id(1), None, 5, "", nodes=Nodes([Node(node_id(1), "/x", b"", array)])
    )
    return written(snapshot, spec).tables(2)[0].table(4)


def test_shapes_of_spec_1_are_lengths_of_arrays_and_chunks() -> None:
    """The chunk length gives the right number of chunks, not always the real chunk."""
    shapes = array_table(1, GRID).structs(0, 16, 8)
    assert shapes == [struct.pack("<QQ", 10, 3), struct.pack("<QQ", 7, 1)]
    assert 3 not in array_table(1, GRID).slots


def test_shapes_of_spec_2_are_lengths_and_numbers_of_chunks() -> None:
    """In tables that leave zeros out; the old field is there and empty."""
    table = array_table(2, ArrayData((Dimension(10, 4), Dimension(0, 0))))
    assert table.structs(0, 16, 8) == []
    first, second = table.tables(3)
    assert (first.number(0, 8), first.number(1, 4)) == (10, 4)
    assert second.slots == set()


def test_a_scalar_of_spec_2_has_an_empty_new_shape() -> None:
    """Its presence is what tells the versions apart."""
    assert array_table(2, SCALAR).tables(3) == []
    assert 3 not in array_table(1, SCALAR).slots


def test_extents_are_pairs_of_words() -> None:
    """Half-open, one an axis; a scalar has none."""
    refs = array_table(2, GRID).tables(2)
    assert [ref.raw(0, 12) for ref in refs] == [manifest_id(3), manifest_id(5)]
    assert refs[1].structs(1, 8, 4) == [struct.pack("<II", 2, 4), struct.pack("<II", 3, 4)]
    assert array_table(2, SCALAR).tables(2)[0].structs(1, 8, 4) == []


def test_dimension_names_are_absent_null_or_text() -> None:
    """An unnamed axis has a table without a name; no names at all, no vector."""
    assert 1 not in array_table(2, SCALAR).slots
    names = array_table(2, GRID).tables(1)
    assert [name.slots for name in names] == [{0}, set()]
    assert names[0].string(0) == "x"


def test_an_empty_dimension_name_reads_as_none() -> None:
    """Zarr's empty name and null are one."""
    array = ArrayData((Dimension(1, 1),), ("",))
    nodes = Nodes([Node(node_id(1), "/x", b"", array)])
    found = decoded(Snapshot(snapshot_id(1), None, 5, "", nodes=nodes), 2).nodes["/x"]
    assert found.array is not None
    assert found.array.dimension_names == (None,)


@pytest.mark.parametrize(
    ("length", "chunks"), [(10, 4), (10, 10), (10, 1), (0, 0), (1, 1), (2**40, 2**20), (7, 4)]
)
def test_regular_grids_survive_spec_1(length: int, chunks: int) -> None:
    """Any chunk length that gives their number of chunks is valid."""
    array = ArrayData((Dimension(length, chunks),))
    nodes = Nodes([Node(node_id(1), "/x", b"", array)])
    assert decoded(Snapshot(snapshot_id(1), None, 5, "", nodes=nodes), 1).nodes == nodes


@pytest.mark.parametrize(("length", "chunks"), [(10, 6), (10, 11), (10, 0), (0, 1)])
def test_other_grids_need_spec_2(length: int, chunks: int) -> None:
    """The error names the array and says what to do."""
    array = ArrayData((Dimension(length, chunks),))
    with pytest.raises(UnsupportedBySpecError, match=r"'/x'.*version 2"):
        array_table(1, array)
    assert array_table(2, array).tables(3)


def test_more_chunks_than_32_bits_can_number_are_refused() -> None:
    """Spec 1 has room for the numbers they follow from, and migration meets them."""
    array = ArrayData((Dimension(2**40, 2**32),))
    assert array_table(1, array).structs(0, 16, 8)
    with pytest.raises(UnsupportedBySpecError, match="larger chunks"):
        array_table(2, array)


def test_metadata_that_is_no_json_is_refused() -> None:
    """Before anything is written."""
    bad: Any = {"x": object()}
    with pytest.raises(InvalidInputError, match="metadata"):
        encode_snapshot(Snapshot(snapshot_id(1), None, 5, "", bad), 2)


@pytest.mark.parametrize("length", [0, 1, 5])
def test_another_parent_changes_nothing_else(length: int) -> None:
    """The rest of the file stays byte for byte, including fields of later versions."""
    old, new = SnapshotId.random(), SnapshotId.random()
    snapshot = Snapshot(SnapshotId.random(), old, 7, "m" * length, {"a": length})
    payload = encode_snapshot(snapshot, 1)
    changed = with_parent(payload, new)
    assert changed.replace(new, old) == payload
    assert decode_snapshot(Envelope(1, changed)).parent_id == new


def test_a_root_gets_no_parent() -> None:
    """There is no place for one in its file."""
    payload = encode_snapshot(Snapshot(SnapshotId.random(), None, 7, "root"), 1)
    with pytest.raises(FormatError, match="parent_id"):
        with_parent(payload, SnapshotId.random())


@BOTH
def test_what_arrays_have_in_common_is_made_once(spec: int) -> None:
    """And is written for each of them, of whatever shape and with whatever manifests."""
    names: list[tuple[str | None, ...] | None] = [None, ("x", None), ("x", "y")]
    refs = [
        ManifestRef(manifest_id(3), ((0, 2), (0, 3))),
        ManifestRef(manifest_id(5), ((1, 2), (0, 3))),
    ]
    arrays = [
        ArrayData((Dimension(length, 4), Dimension(7, 7)), name, tuple(refs[:count]))
        for length in (10, 11)
        for name in names
        for count in (0, 1, 2)
    ]
    nodes = [
        Node(node_id(number), f"/{number:03}", b"{}", arrays[number % len(arrays)])
        for number in range(4 * len(arrays))
    ]
    whole = decoded(replace(SNAPSHOT, nodes=Nodes(nodes)), spec)
    assert list(whole.nodes.values()) == nodes

    def calls(count: int) -> int:
        alike = Nodes([Node(node_id(it), f"/{it:03}", b"{}", arrays[2]) for it in range(count)])
        with counted_calls() as made:
            encode_snapshot(replace(SNAPSHOT, nodes=alike), spec)
        return len(made)

    assert calls(60) - calls(10) < 50 * 20
