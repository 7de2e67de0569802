"""Finding references in manifests that are not decoded: never another answer than decoding."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icechunk_async.errors import FormatError
from icechunk_async.format.ids import NodeId
from icechunk_async.format.manifest import packed as packed_manifests
from icechunk_async.format.manifest.chunk import InlineChunk, Kind
from icechunk_async.format.manifest.held import EXPAND, Undecided
from icechunk_async.format.manifest.packed import PackedManifest
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.manifest.writing import LocationDictionary, encode_manifest
from tests.unit.format.manifest.test_writing import KINDS
from tests.unit.format.samples import (
    NODE_IDS,
    as_dict,
    coordinates,
    manifest_id,
    node_id,
    ref_maps,
    refs_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates
    from icechunk_async.format.manifest.held import HeldManifest

MANIFEST = manifest_id(5)


def _natives(coords: np.ndarray[tuple[int, int], np.dtype[np.uint32]]) -> ChunkRefs:
    count = len(coords)
    return ChunkRefs.build(
        coords,
        Kind.NATIVE,
        objects=np.arange(count, dtype=np.uint32),
        lengths=np.arange(count, dtype=np.uint64) + 1,
        chunk_ids=np.arange(12 * count, dtype=np.uint32).astype(np.uint8).reshape(count, 12),
    )


@pytest.mark.parametrize("dictionary", [None, LocationDictionary(1, 100, 2048, 3)])
def test_bisection_finds_every_kind(dictionary: LocationDictionary | None) -> None:
    """With all its fields, also where locations are compressed, in each array of the file."""
    arrays = {node_id(1): refs_of(2, KINDS), node_id(2): refs_of(2, {(7, 7): KINDS[1, 1]})}
    payload = encode_manifest(MANIFEST, arrays, location_dictionary=dictionary)
    packed = PackedManifest(payload)
    assert packed.id == MANIFEST
    for coords, ref in KINDS.items():
        assert packed.find(node_id(1), coords) == ref
    assert packed.find(node_id(2), (7, 7)) == KINDS[1, 1]


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1), st.data())
def test_bisection_finds_exactly_what_exists(
    cells: set[tuple[int, int]], data: st.DataObject
) -> None:
    """The references may lie anywhere in the grid."""
    coords = np.array(sorted(cells), np.uint32)
    refs = _natives(coords)
    packed = PackedManifest(encode_manifest(MANIFEST, {node_id(1): refs}))
    for row, cell in enumerate(sorted(cells)):
        assert packed.find(node_id(1), cell) == refs.ref(row)
    other = data.draw(st.tuples(st.integers(0, 10), st.integers(0, 10)))
    if other not in cells:
        assert packed.find(node_id(1), other) is None
    assert packed.find(node_id(2), min(cells)) is None
    assert packed.find(node_id(1), (1,)) is None


def test_a_damaged_manifest_gives_no_reference_that_decoding_would_not() -> None:
    """It raises, or finds nothing, or finds what is written there."""
    payload = bytes(encode_manifest(MANIFEST, {node_id(1): refs_of(2, KINDS)}))
    chance = random.Random(7)
    refused = 0
    for _ in range(300):
        damaged = bytearray(payload)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        for coords in KINDS:
            try:
                found = PackedManifest(bytes(damaged)).find(node_id(1), coords)
            except FormatError:
                refused += 1
                continue
            if found is not None:
                assert found == _decoded(bytes(damaged), coords, found)
    assert refused > 50
    for size in range(0, len(payload), 7):
        try:
            assert PackedManifest(payload[:size]).find(node_id(1), (2, 0)) in {None, KINDS[2, 0]}
        except FormatError:
            continue
        assert size > len(payload) // 2  # only the other references' bytes were cut off


@pytest.mark.parametrize("coords", list(KINDS))
@pytest.mark.parametrize("slot", [1, 5, 8])
def test_of_several_places_that_counts_which_decoding_takes(coords: Coordinates, slot: int) -> None:
    """Other writers, or damage, may give a reference the fields of two kinds."""
    payload = bytearray(encode_manifest(MANIFEST, {node_id(1): refs_of(2, KINDS)}))
    packed = PackedManifest(bytes(payload))
    entry = packed.entry(node_id(1), coords)
    assert entry is not None
    table = entry + int.from_bytes(payload[entry : entry + 4], "little")
    vtable = table - int.from_bytes(payload[table : table + 4], "little", signed=True)
    if slot >= payload[vtable] // 2 - 2 or payload[vtable + 4 + 2 * slot]:
        return  # it is not there, or is that of the reference
    payload[vtable + 4 + 2 * slot] = payload[vtable + 4]  # the vector of coordinates
    found = PackedManifest(bytes(payload)).find(node_id(1), coords)
    assert found == decode_manifest(bytes(payload)).lookup(node_id(1), coords)


def _decoded(payload: bytes, coords: Coordinates, found: ChunkRef) -> ChunkRef | None:
    """Return the chunk as decoding finds it; ``found`` if other parts of the file are damaged."""
    try:
        refs = decode_manifest(payload).refs(node_id(1), len(coords))
    except FormatError:
        return found
    row = refs.find(coords)
    return None if row is None else refs.ref(row)


ARRAYS = st.dictionaries(
    NODE_IDS,
    st.integers(0, 3).flatmap(lambda rank: ref_maps(rank).map(lambda refs: refs_of(rank, refs))),
    min_size=1,
    max_size=12,
)
WANTED = st.integers(0, 3).flatmap(coordinates)


def _lookup(held: HeldManifest, node: NodeId, coords: Coordinates) -> tuple[HeldManifest, Any]:
    """Look a chunk up as readers do; return the form that decided."""
    while isinstance(found := held.lookup(node, coords), Undecided):
        assert found is EXPAND
        held = held.expand(node)
    return held, found


@settings(deadline=None)
@given(ARRAYS, st.data())
def test_lookups_in_any_order_are_those_of_the_decoded_manifest(
    arrays: Mapping[NodeId, ChunkRefs], data: st.DataObject
) -> None:
    """Also after other lookups, and of chunks and arrays that do not exist."""
    payload = encode_manifest(MANIFEST, arrays)
    decoded = decode_manifest(payload, seconds_cut=True)
    held: HeldManifest = PackedManifest(payload, seconds_cut=True)
    stored = [(node, coords) for node, refs in arrays.items() for coords in as_dict(refs)]
    nodes = [*arrays, node_id(1)]
    missing = data.draw(st.lists(st.tuples(st.sampled_from(nodes), WANTED), max_size=5))
    for node, coords in data.draw(st.permutations([*stored, *stored, *missing])):
        held, found = _lookup(held, node, coords)
        expected = decoded.lookup(node, coords)
        assert found == expected
        assert getattr(found, "seconds_cut", None) == getattr(expected, "seconds_cut", None)


def _node(number: int) -> NodeId:
    """Return an id that is nowhere else in a manifest."""
    return NodeId(bytes([number, *range(200, 206), number]))


def _shared(count: int) -> dict[NodeId, ChunkRefs]:
    refs: dict[Coordinates, ChunkRef] = {(it,): InlineChunk(bytes([it])) for it in range(3)}
    return {_node(it): refs_of(1, refs) for it in range(1, count + 1)}


def test_what_is_decoded_of_a_large_manifest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache learns what an array takes that was decoded beside the bytes."""
    monkeypatch.setattr(packed_manifests, "_LARGE_BYTES", 0)
    packed = PackedManifest(encode_manifest(MANIFEST, _shared(20)))
    before = packed.weight
    for number in (1, 2):
        assert packed.expand(_node(number)) is packed
        assert packed.weight == before + 3 * number


def test_what_may_be_decoded_of_a_small_manifest_counts_beforehand() -> None:
    """Lookups decode its arrays without telling the cache."""
    packed = PackedManifest(encode_manifest(MANIFEST, _shared(7)))
    before = packed.weight
    assert before >= 2 * 7 * 3
    for number in range(1, 8):
        assert packed.lookup(_node(number), (1,)) == InlineChunk(b"\x01")
        assert packed.lookup(_node(number), (9,)) is None
    assert packed.weight == before


def test_references_out_of_order_are_refused_in_an_array_that_is_decoded_alone() -> None:
    """That a chunk does not exist cannot be told from them; other arrays are not affected."""
    arrays = _shared(20)
    arrays[_node(7)] = arrays[_node(7)].take(np.array([2, 0, 1]))
    held: HeldManifest = PackedManifest(encode_manifest(MANIFEST, arrays))
    held, found = _lookup(held, _node(6), (1,))
    assert found == InlineChunk(b"\x01")
    held, found = _lookup(held, _node(6), (9,))
    assert found is None
    for coords in ((0,), (1,), (2,), (9,)):
        with pytest.raises(FormatError, match="not in ascending order, or repeat"):
            held.expand(_node(7))
        try:
            held, found = _lookup(held, _node(7), coords)
        except FormatError:
            continue
        assert found == InlineChunk(bytes(coords))
    with pytest.raises(FormatError, match="not in ascending order, or repeat"):
        held.expand()


@pytest.mark.parametrize("count", [2, 3, 20])
def test_an_array_that_is_listed_twice_is_refused_when_it_is_looked_up(count: int) -> None:
    """Which of both would count is not for a reader to choose; the others can be read."""
    data = bytes(encode_manifest(MANIFEST, _shared(count)))
    for number in range(2, count + 1):
        place = data.rindex(_node(number))
        twice = data[:place] + _node(number - 1) + data[place + 8 :]
        for coords in ((1,), (9,)):
            packed = PackedManifest(twice)
            with pytest.raises(FormatError, match="twice"):
                _lookup(packed, _node(number - 1), coords)
            with pytest.raises(FormatError, match="twice"):
                packed.expand(_node(number - 1))
        for other in {1, count} - {number - 1, number}:
            assert _lookup(PackedManifest(twice), _node(other), (1,))[1] == InlineChunk(b"\x01")


@pytest.mark.parametrize("twice", [False, True])
def test_arrays_out_of_order_are_found_all_the_same(twice: bool) -> None:  # noqa: FBT001
    """Decoding all of them finds what bisection misses, or that one is there twice."""
    data = bytes(encode_manifest(MANIFEST, _shared(9)))
    first, last = data.rindex(_node(1)), data.rindex(_node(9))
    moved = bytearray(data)
    moved[first : first + 8], moved[last : last + 8] = _node(9), _node(9 if twice else 1)
    refused = set[int]()
    for number in range(2 if twice else 1, 10):
        held: HeldManifest = PackedManifest(bytes(moved))
        for at in (1, 1, 2):
            try:
                held, found = _lookup(held, _node(number), (at,))
            except FormatError:
                refused.add(number)
            else:
                assert found == InlineChunk(bytes([at]))
    assert refused == ({2} if twice else set())  # bisection finds the others
    if twice:
        with pytest.raises(FormatError, match="twice"):
            PackedManifest(bytes(moved)).expand()


def test_damaged_shared_manifests_give_nothing_that_decoding_would_not() -> None:
    """Any byte may be another one: lookups raise FormatError, or find what is written there."""
    arrays = {_node(it): refs_of(2, KINDS) for it in range(1, 11)}
    payload = bytes(encode_manifest(MANIFEST, arrays))
    chance = random.Random(8)
    refused = 0
    for _ in range(400):
        damaged = bytearray(payload)
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(damaged) if chance.random() < 0.5 else 400)
            damaged[place] = chance.randrange(256)
        try:
            decoded = decode_manifest(bytes(damaged))
        except FormatError:
            decoded = None
        try:
            held: HeldManifest = PackedManifest(bytes(damaged))
            for coords in [*KINDS, (9, 9), *KINDS]:
                node = _node(chance.randrange(1, 12))
                held, found = _lookup(held, node, coords)
                if decoded is not None:
                    assert found == decoded.lookup(node, coords)
        except FormatError:
            assert decoded is None or damaged != payload
            refused += 1
    assert refused > 50
