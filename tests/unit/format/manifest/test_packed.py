"""Finding references in manifests that are not decoded: never another answer than decoding."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import FormatError
from icechunk_async.format.manifest.packed import PackedManifest
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.manifest.refs import ChunkRefs, Kind
from icechunk_async.format.manifest.writing import LocationDictionary, encode_manifest
from tests.unit.format.manifest.test_writing import KINDS
from tests.unit.format.samples import manifest_id, node_id, refs_of

if TYPE_CHECKING:
    from icechunk_async.format.manifest.refs import ChunkRef, Coordinates

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


def _decoded(payload: bytes, coords: Coordinates, found: ChunkRef) -> ChunkRef | None:
    """Return the chunk as decoding finds it; ``found`` if other parts of the file are damaged."""
    try:
        refs = decode_manifest(payload).refs(node_id(1), len(coords))
    except FormatError:
        return found
    row = refs.find(coords)
    return None if row is None else refs.ref(row)
