"""Snapshots of other writers: what is read leniently and what is refused."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import Envelope
from icechunk_async.format.snapshot import (
    ManifestFileInfo,
    ManifestRef,
    Snapshot,
    decode_snapshot,
)
from icechunk_async.format.snapshot.writing import encode_snapshot
from tests.unit.format.samples import manifest_id, node_id, snapshot_id
from tests.unit.format.table_builder import Offset, Scalar, Struct, TableBuilder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.format.manifest.chunk import Extents
    from tests.unit.format.table_builder import Field


class OtherSnapshot:
    """A snapshot with the node tables asked for."""

    def __init__(self) -> None:
        """Begin without nodes."""
        self.out = TableBuilder()
        self.nodes: list[Offset] = []

    def array(self, path: str, fields: Mapping[int, Field]) -> None:
        """Add an array with these fields of ArrayNodeData."""
        data = self.out.table(fields)
        self.node(path, {3: Scalar(1, 1), 4: data})

    def node(self, path: str, fields: Mapping[int, Field]) -> None:
        """Add a node, a group unless ``fields`` say otherwise."""
        text, data = self.out.string(path), self.out.blob(b"")
        group = self.out.table({})
        plain: dict[int, Field] = {1: text, 2: data, 3: Scalar(2, 1), 4: group}
        self.nodes.append(self.out.table({0: Struct(node_id(len(self.nodes))), **plain, **fields}))

    def decode(self, spec: int = 2, fields: Mapping[int, Field] | None = None) -> Snapshot:
        """Read it; ``fields`` of the root replace the plain ones."""
        out = self.out
        plain: dict[int, Field] = {
            0: Struct(snapshot_id(1)), 2: out.offsets(self.nodes), 4: out.string("m"),
            5: out.offsets([]), 6: out.structs(b"", 32, 8),
        }  # fmt: skip
        payload = out.finish(out.table({**plain, **(fields or {})}))
        return decode_snapshot(Envelope(spec, payload))

    def shape(self, *dims: tuple[int, int]) -> Offset:
        """Write a shape of spec 1."""
        return self.out.structs(b"".join(struct.pack("<QQ", *dim) for dim in dims), 16, 8)


def test_old_arrays_are_read_in_files_of_spec_2() -> None:
    """Migrated repositories have them; the shape's presence decides, not the header."""
    other = OtherSnapshot()
    empty = other.out.offsets([])
    other.array("/old", {0: other.shape((10, 3)), 2: empty})
    dims = other.out.offsets([other.out.table({0: Scalar(10, 8), 1: Scalar(9, 4)})])
    other.array("/new", {0: other.shape(), 2: empty, 3: dims})
    other.array("/scalar", {0: other.shape(), 2: empty})
    grids = {path: node.array.grid for path, node in other.decode().nodes.items() if node.array}
    assert grids == {"/new": (9,), "/old": (4,), "/scalar": ()}


@pytest.mark.parametrize(
    ("dimension", "chunks"),
    [((0, 0), 0), ((0, 5), 0), ((5, 5), 1), ((6, 5), 2), ((2**63, 1), 2**63)],
)
def test_chunks_of_spec_1_are_counted_by_division(dimension: tuple[int, int], chunks: int) -> None:
    """Rounded up; an array of nothing may have chunks of nothing."""
    other = OtherSnapshot()
    other.array("/x", {0: other.shape(dimension), 2: other.out.offsets([])})
    node = other.decode(1).nodes["/x"]
    assert node.array is not None
    assert node.array.grid == (chunks,)


def test_chunks_of_length_zero_are_refused() -> None:
    """In an array that has elements."""
    other = OtherSnapshot()
    other.array("/x", {0: other.shape((5, 0)), 2: other.out.offsets([])})
    with pytest.raises(FormatError, match="chunks of length 0"):
        other.decode(1).nodes.get("/x")
    with pytest.raises(FormatError, match="chunks of length 0"):
        list(other.decode(1).nodes.values())


def test_file_infos_are_read_from_both_lists() -> None:
    """Spec 1 has structs, spec 2 tables; a file could have both."""
    other = OtherSnapshot()
    structs = other.out.structs(struct.pack("<12s4xQI4x", manifest_id(1), 10, 2), 32, 8)
    tables = other.out.offsets([other.out.table({0: Struct(manifest_id(2)), 1: Scalar(20, 8)})])
    assert other.decode(fields={6: structs, 7: tables}).manifests == {
        manifest_id(1): ManifestFileInfo(manifest_id(1), 10, 2),
        manifest_id(2): ManifestFileInfo(manifest_id(2), 20, 0),
    }


def test_of_a_manifest_listed_twice_the_last_entry_counts() -> None:
    """However it is looked up."""
    other = OtherSnapshot()
    numbers = [1, 2, 2, 2, 3]
    entries = [
        other.out.table({0: Struct(manifest_id(it)), 1: Scalar(10 * it + at, 8)})
        for at, it in enumerate(numbers)
    ]
    files = other.decode(fields={7: other.out.offsets(entries)}).manifests
    assert [files[manifest_id(it)].size_bytes for it in (1, 2, 3)] == [10, 23, 34]
    assert [it.size_bytes for it in files.values()] == [10, 23, 34]


def test_a_manifest_beyond_any_object_is_refused() -> None:
    """Its size goes into a request."""
    other = OtherSnapshot()
    tables = other.out.offsets(
        [other.out.table({0: Struct(manifest_id(2)), 1: Scalar(1 << 63, 8)})]
    )
    files = other.decode(fields={7: tables}).manifests
    with pytest.raises(FormatError, match="beyond any object"):
        files.get(manifest_id(2))
    with pytest.raises(FormatError, match="beyond any object"):
        list(files)


@pytest.mark.parametrize("kind", [0, 3, 255])
def test_a_node_of_unknown_type_is_refused(kind: int) -> None:
    """It is neither an array nor a group."""
    other = OtherSnapshot()
    other.node("/x", {3: Scalar(kind, 1)})
    with pytest.raises(FormatError, match="neither an array nor a group"):
        other.decode().nodes.get("/x")
    with pytest.raises(FormatError, match="neither an array nor a group"):
        list(other.decode().nodes.values())


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ([], ((0, 3), (0, 5))),
        ([(1, 2)], ((1, 2), (0, 5))),
        ([(1, 2), (0, 4)], ((1, 2), (0, 4))),
        ([(1, 2), (0, 4), (7, 9)], ((1, 2), (0, 4))),
    ],
)
def test_extents_of_another_rank_are_fitted_to_the_array(
    stored: list[tuple[int, int]], expected: Extents
) -> None:
    """The official engine compares the axes that there are."""
    other = OtherSnapshot()
    box = other.out.structs(b"".join(struct.pack("<II", *axis) for axis in stored), 8, 4)
    ref = other.out.table({0: Struct(manifest_id(1)), 1: box})
    shape = other.shape((3, 1), (5, 1))
    other.array("/x", {0: shape, 2: other.out.offsets([ref])})
    node = other.decode().nodes["/x"]
    assert node.array is not None
    assert node.array.manifests == (ManifestRef(manifest_id(1), expected),)


def test_fitted_extents_can_be_written_again() -> None:
    """Spec 1 can describe more chunks than boxes can hold."""
    other = OtherSnapshot()
    ref = other.out.table({0: Struct(manifest_id(1)), 1: other.out.structs(b"", 8, 4)})
    other.array("/x", {0: other.shape((2**40, 1)), 2: other.out.offsets([ref])})
    snapshot = other.decode(1)
    node = snapshot.nodes["/x"]
    assert node.array is not None
    assert node.array.manifests == (ManifestRef(manifest_id(1), ((0, 2**32 - 1),)),)
    assert encode_snapshot(snapshot, 1)


def test_extents_of_a_scalar_are_none_whatever_is_stored() -> None:
    """One that once had an axis, or a chunk with coordinates, has a box."""
    other = OtherSnapshot()
    ref = other.out.table({0: Struct(manifest_id(1)), 1: other.out.structs(bytes(8), 8, 4)})
    other.array("/x", {0: other.shape(), 2: other.out.offsets([ref])})
    node = other.decode().nodes["/x"]
    assert node.array is not None
    assert node.array.manifests == (ManifestRef(manifest_id(1), ()),)


@pytest.mark.parametrize("slot", [0, 2, 4, 5, 6])
def test_required_fields_are_required(slot: int) -> None:
    """Id, nodes, message, metadata and the first list of manifests."""
    other = OtherSnapshot()
    with pytest.raises(FormatError, match="required field"):
        other.decode(fields={slot: None})


@pytest.mark.parametrize("slot", [0, 1, 2, 4])
def test_required_fields_of_nodes_are_required(slot: int) -> None:
    """Id, path, document; the data of arrays."""
    other = OtherSnapshot()
    other.array("/x", {0: other.shape(), 2: other.out.offsets([])})
    other.node("/y", {3: Scalar(1, 1), slot: None})
    with pytest.raises(FormatError, match="required field"):
        other.decode().nodes.get("/y")
    with pytest.raises(FormatError, match="required field"):
        list(other.decode().nodes.values())


def test_reserved_fields_are_passed_over() -> None:
    """``extra``, and what later versions may add."""
    other = OtherSnapshot()
    extra = other.out.blob(b"new")
    other.node("/x", {5: extra, 6: extra})
    assert list(other.decode(fields={8: extra, 9: Scalar(1, 8)}).nodes) == ["/x"]
