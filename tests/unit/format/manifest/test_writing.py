"""Manifests: what is written, byte for byte, and what is read from other writers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.blocks import IDENTIFIER
from icechunk_async.format.manifest.chunk import (
    ChunkRef,
    Coordinates,
    InlineChunk,
    Kind,
    NativeChunk,
    VirtualChunk,
)
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.manifest.writing import encode_manifest
from tests.unit.format.other_writer import OtherManifest
from tests.unit.format.samples import as_dict, chunk_id, manifest_id, node_id, refs_of
from tests.unit.format.table_builder import Field, Scalar, Struct, TableBuilder
from tests.unit.format.wire import Table, root

if TYPE_CHECKING:
    from icechunk_async.format.manifest.refs import ChunkRefs

KINDS: dict[Coordinates, ChunkRef | None] = {
    (0, 1): InlineChunk(b"inline"),
    (0, 2): NativeChunk(chunk_id(1), 0, 20),
    (0, 3): NativeChunk(chunk_id(2), 7, 20),
    (1, 0): VirtualChunk("s3://b/plain", 0, 6),
    (1, 1): VirtualChunk("s3://b/étag", 8, 6, etag='"e"'),
    (2, 0): VirtualChunk("s3://b/plain", 9, 6, last_modified=7),
}
MANIFEST = manifest_id(5)


def written(refs: ChunkRefs) -> list[Table]:
    """Return the ChunkRef tables of a manifest of one array."""
    table = root(encode_manifest(MANIFEST, {node_id(1): refs}))
    return table.tables(1)[0].tables(1)


def test_every_kind_has_its_fields_and_no_others() -> None:
    """An offset of 0 is the default and left out."""
    tables = written(refs_of(2, KINDS))
    assert [table.slots for table in tables] == [
        {0, 1},  # index, inline
        {0, 2, 3, 4},  # where natives differ in having an offset, all of one manifest write it
        {0, 2, 3, 4},  # index, offset, length, chunk_id
        {0, 2, 3, 5},  # index, offset, length, location
        {0, 2, 3, 5, 6},  # and checksum_etag
        {0, 2, 3, 5, 7},  # and checksum_last_modified
    ]


def test_whole_objects_have_no_offset() -> None:
    """Official writers omit it too."""
    refs = refs_of(1, {(row,): NativeChunk(chunk_id(row), 0, 5) for row in range(3)})
    assert {frozenset(table.slots) for table in written(refs)} == {frozenset({0, 3, 4})}


def test_every_field_has_its_value_where_the_schema_says() -> None:
    """Read by a reader that shares nothing with the writer."""
    tables = written(refs_of(2, KINDS))
    assert [table.words(0) for table in tables] == [list(coords) for coords in KINDS]
    assert tables[0].blob(1) == b"inline"
    assert tables[2].raw(4, 12) == chunk_id(2)
    assert tables[4].string(5) == "s3://b/étag"
    assert tables[4].string(6) == '"e"'
    assert tables[5].number(7, 4) == 7
    assert [table.number(2, 8) for table in tables] == [None, 0, 7, 0, 8, 9]
    assert [table.number(3, 8) for table in tables] == [None, 20, 20, 6, 6, 6]


def test_equal_strings_are_stored_once() -> None:
    """Locations and ETags, over all arrays of the file."""
    refs = refs_of(1, {(row,): VirtualChunk("s3://b/same", row, 1, "etag") for row in range(50)})
    payload = bytes(encode_manifest(MANIFEST, {node_id(1): refs, node_id(2): refs}))
    assert payload.count(b"s3://b/same") == 1
    assert payload.count(b"etag") == 1


def test_strings_that_no_reference_uses_are_not_stored() -> None:
    """A cell split off a large manifest takes only its own locations along."""
    refs = refs_of(
        1, {(row,): VirtualChunk(f"s3://b/{row}", row, 1, f"e{row}") for row in range(9)}
    )
    payload = encode_manifest(MANIFEST, {node_id(1): refs})
    for source in (refs, decode_manifest(payload).arrays[node_id(1)]):
        part = source.take(np.array([3, 5]))
        cell = encode_manifest(MANIFEST, {node_id(1): part})
        assert b"s3://b/4" not in bytes(cell)
        assert b"e4" not in bytes(cell)
        assert as_dict(decode_manifest(cell).arrays[node_id(1)]) == as_dict(part)


def test_the_root_holds_id_arrays_and_algorithm() -> None:
    """Without a dictionary the algorithm is 0, which is not the default."""
    table = root(encode_manifest(MANIFEST, {node_id(1): refs_of(2, KINDS)}))
    assert table.slots == {0, 1, 3}
    assert table.raw(0, 12) == MANIFEST
    assert table.number(3, 1) == 0


def test_arrays_are_sorted_by_node_id() -> None:
    """The mapping may have any order."""
    refs = refs_of(0, {(): InlineChunk(b"x")})
    nodes = [node_id(number) for number in (3, 1, 2)]
    table = root(encode_manifest(MANIFEST, dict.fromkeys(nodes, refs)))
    assert [it.raw(0, 8) for it in table.tables(1)] == sorted(nodes)


def test_arrays_of_different_ranks_share_a_manifest() -> None:
    """Official writers make one array each, but readers must accept several."""
    arrays = {
        node_id(rank): refs_of(rank, {(at,) * rank: InlineChunk(b"%d" % rank) for at in range(3)})
        for rank in range(4)
    }
    manifest = decode_manifest(encode_manifest(MANIFEST, arrays))
    assert manifest.id == MANIFEST
    assert len(manifest) == 1 + 3 + 3 + 3
    assert {node: as_dict(refs) for node, refs in manifest.arrays.items()} == {
        node: as_dict(refs) for node, refs in arrays.items()
    }


def test_the_index_of_a_scalar_is_an_empty_vector() -> None:
    """Present, since it is required."""
    refs = refs_of(0, {(): NativeChunk(chunk_id(1), 0, 4)})
    (table,) = written(refs)
    assert table.words(0) == []
    manifest = decode_manifest(encode_manifest(MANIFEST, {node_id(1): refs}))
    assert manifest.arrays[node_id(1)].find(()) == 0


def test_deletions_are_never_stored() -> None:
    """They are a session's; storing one would be a bug."""
    refs = refs_of(1, {(0,): None})
    with pytest.raises(AssertionError, match="no deletions"):
        encode_manifest(MANIFEST, {node_id(1): refs})


def test_a_manifest_without_arrays_reads() -> None:
    """None is ever written by the engine."""
    manifest = decode_manifest(encode_manifest(MANIFEST, {}))
    assert len(manifest) == 0
    assert manifest.arrays == {}


def test_an_array_without_references_reads() -> None:
    """Nothing is found in it."""
    other = OtherManifest()
    other.array(node_id(1), [])
    refs = decode_manifest(other.finish(MANIFEST)).arrays[node_id(1)]
    assert len(refs) == 0
    assert refs.find((0, 0)) is None


def test_payload_kinds_are_chosen_as_the_official_reader_does() -> None:
    """Chunk id, then compressed location, then location, then inline."""
    other = OtherManifest()
    name, data = other.out.string("s3://b/x"), other.out.blob(b"inline")
    chunk = Struct(chunk_id(1))
    other.array(
        node_id(1),
        [
            other.ref((0,), {1: data, 4: chunk, 5: name, 8: data}),
            other.ref((1,), {1: data, 5: name, 8: data}),
            other.ref((2,), {1: data, 5: name}),
            other.ref((3,), {1: data}),
        ],
    )
    refs = decode_manifest(other.finish(MANIFEST)).arrays[node_id(1)]
    assert refs.kinds.tolist() == [Kind.NATIVE, Kind.VIRTUAL, Kind.VIRTUAL, Kind.INLINE]
    with pytest.raises(FormatError, match="cannot be decoded"):
        refs.ref(1)
    assert refs.ref(2) == VirtualChunk("s3://b/x", 0, 0)


def test_reference_without_a_target_is_refused() -> None:
    """The official reader refuses it too."""
    other = OtherManifest()
    other.array(node_id(1), [other.ref((0,), {3: Scalar(5, 8)})])
    with pytest.raises(FormatError, match="refers to nothing"):
        decode_manifest(other.finish(MANIFEST))


def test_a_reference_without_an_index_is_refused() -> None:
    """It is required, also for scalars."""
    other = OtherManifest()
    other.array(node_id(1), [other.ref(None, {4: Struct(bytes(12))})])
    with pytest.raises(FormatError, match="'index'"):
        decode_manifest(other.finish(MANIFEST))


def test_references_of_another_rank_are_ignored() -> None:
    """The official engine stores coordinates of any rank; who knows the array asks by rank."""
    other = OtherManifest()
    indices: list[Coordinates] = [(0,), (0, 0), (0, 0, 1), (0, 1), (7,), (1, 0)]
    other.array(node_id(1), [other.native(index, chunk_id(7)) for index in indices])
    manifest = decode_manifest(other.finish(MANIFEST))
    assert manifest.refs(node_id(1), 2).coords.tolist() == [[0, 0], [0, 1], [1, 0]]
    assert manifest.refs(node_id(1), 2).ref(2) == NativeChunk(chunk_id(7), 0, 1)
    assert manifest.refs(node_id(1), 1).coords.tolist() == [[0], [7]]
    assert manifest.refs(node_id(1), 3).coords.tolist() == [[0, 0, 1]]
    for rank in (0, 4):
        assert manifest.refs(node_id(1), rank).coords.shape == (0, rank)
    assert manifest.refs(node_id(2), 5).coords.shape == (0, 5)
    assert manifest.arrays[node_id(1)] is manifest.refs(node_id(1), 2)
    assert len(manifest) == 3


def test_a_chunk_is_found_though_strays_are_as_common() -> None:
    """Nothing is guessed from numbers."""
    other = OtherManifest()
    indices: list[Coordinates] = [(0,), (0, 0), (0, 0, 0)]
    refs = [other.native(index, chunk_id(len(index))) for index in indices]
    other.array(node_id(1), refs)
    manifest = decode_manifest(other.finish(MANIFEST))
    for index in indices:
        found = manifest.refs(node_id(1), len(index))
        assert found.find(index) == 0
        assert found.ref(0) == NativeChunk(chunk_id(len(index)), 0, 1)


def test_coordinates_of_more_axes_than_any_array_has_are_passed_over() -> None:
    """Unless there are no others."""
    other = OtherManifest()
    far = other.native((1,) * 65)
    other.array(node_id(1), [other.native((0,)), far])
    assert decode_manifest(other.finish(MANIFEST)).refs(node_id(1), 1).find((0,)) == 0
    other = OtherManifest()
    other.array(node_id(1), [other.native((1,) * 65)])
    with pytest.raises(FormatError, match="65 axes"):
        decode_manifest(other.finish(MANIFEST))


@pytest.mark.parametrize("indices", [[(1,), (0,)], [(0,), (0,)], [(0, 1), (0, 0)], [(), ()]])
def test_references_out_of_order_are_refused(indices: list[Coordinates]) -> None:
    """Binary search would miss them."""
    other = OtherManifest()
    other.array(node_id(1), [other.native(index) for index in indices])
    with pytest.raises(FormatError, match="ascending"):
        decode_manifest(other.finish(MANIFEST))


def test_an_array_listed_twice_is_refused() -> None:
    """It would be read in half."""
    other = OtherManifest()
    for _ in range(2):
        other.array(node_id(1), [other.native((0,))])
    with pytest.raises(FormatError, match="twice"):
        decode_manifest(other.finish(MANIFEST))


def test_any_offset_into_an_object_is_honoured() -> None:
    """Several references may share one object, as shards do."""
    other = OtherManifest()
    refs = [other.native((row,), chunk_id(9), offset=10 * row, length=10) for row in range(3)]
    other.array(node_id(1), refs)
    found = decode_manifest(other.finish(MANIFEST)).arrays[node_id(1)]
    assert [found.ref(row) for row in range(3)] == [
        NativeChunk(chunk_id(9), 10 * row, 10) for row in range(3)
    ]


@pytest.mark.parametrize(("offset", "length"), [(1 << 63, 0), (0, 1 << 63), (1 << 62, 1 << 62)])
def test_a_range_beyond_any_object_is_refused(offset: int, length: int) -> None:
    """Before anything is asked of a storage."""
    other = OtherManifest()
    other.array(node_id(1), [other.native((0,), offset=offset, length=length)])
    with pytest.raises(FormatError, match="beyond any object"):
        decode_manifest(other.finish(MANIFEST))


def test_fields_that_are_not_known_yet_are_passed_over() -> None:
    """The reserved ``extra`` fields and later ones."""
    out = TableBuilder()
    index = out.structs(bytes(4), 4, 4)
    extra = out.blob(b"new")
    ref = out.table({0: index, 1: out.blob(b"x"), 9: extra, 10: Scalar(5, 8)})
    array = out.table({0: Struct(node_id(1)), 1: out.offsets([ref]), 2: extra, 3: extra})
    fields: dict[int, Field] = {
        0: Struct(MANIFEST), 1: out.offsets([array]), 4: extra, 5: Scalar(1, 4),
    }  # fmt: skip
    manifest = decode_manifest(out.finish(out.table(fields)))
    assert as_dict(manifest.arrays[node_id(1)]) == {(0,): InlineChunk(b"x")}


def test_the_identifier_is_written_and_not_checked() -> None:
    """No reader looks at it."""
    payload = bytearray(encode_manifest(MANIFEST, {}))
    assert payload[4:8] == IDENTIFIER == b"Ichk"
    payload[4:8] = b"????"
    assert decode_manifest(bytes(payload)).id == MANIFEST


def test_writing_what_was_read_gives_the_same_bytes() -> None:
    """Columns that point into an old buffer write as fresh ones do."""
    first = bytes(encode_manifest(MANIFEST, {node_id(1): refs_of(2, KINDS)}))
    again = encode_manifest(MANIFEST, dict(decode_manifest(first).arrays))
    assert bytes(again) == first
