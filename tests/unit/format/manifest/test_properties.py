"""Any manifest is read back, and its file is well-formed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.manifest.writing import LocationDictionary, encode_manifest
from tests.unit.format.samples import MANIFEST_IDS, NODE_IDS, as_dict, ref_maps, refs_of
from tests.unit.format.wire import root

if TYPE_CHECKING:
    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest.refs import ChunkRefs

RANKED = st.integers(0, 4).flatmap(lambda rank: st.tuples(st.just(rank), ref_maps(rank)))
ARRAYS = st.dictionaries(NODE_IDS, RANKED.map(lambda it: refs_of(*it)), max_size=4)
DICTIONARIES = st.none() | st.builds(
    LocationDictionary,
    min_refs=st.integers(0, 4),
    max_samples=st.integers(1, 10),
    max_bytes=st.integers(256, 4096),
)


@settings(deadline=None)
@given(MANIFEST_IDS, ARRAYS, DICTIONARIES)
def test_manifests_read_back(
    identifier: ManifestId, arrays: dict[NodeId, ChunkRefs], dictionary: LocationDictionary | None
) -> None:
    """Every reference of every array, with or without compressed locations."""
    manifest = decode_manifest(encode_manifest(identifier, arrays, location_dictionary=dictionary))
    assert manifest.id == identifier
    assert list(manifest.arrays) == sorted(arrays)
    for node, refs in arrays.items():
        found = manifest.arrays[node]
        assert list(as_dict(found).items()) == list(as_dict(refs).items())
        for coords, row in zip(refs.coords.tolist(), range(len(refs)), strict=True):
            assert found.find(tuple(coords)) == row


@settings(deadline=None)
@given(MANIFEST_IDS, ARRAYS)
def test_files_are_in_order(identifier: ManifestId, arrays: dict[NodeId, ChunkRefs]) -> None:
    """Arrays by node id, references by coordinates; every word aligned, every offset forward."""
    table = root(encode_manifest(identifier, arrays))
    nodes = [it.raw(0, 8) for it in table.tables(1)]
    assert nodes == sorted(arrays)
    for array in table.tables(1):
        indices = [ref.words(0) for ref in array.tables(1)]
        assert indices == sorted(indices)
        for ref in array.tables(1):
            assert ref.slots >= {0}
            ref.number(2, 8)
            ref.number(3, 8)
            ref.number(7, 4)
            for slot in (1, 8):
                ref.blob(slot)
            for slot in (5, 6):
                ref.string(slot)


@settings(deadline=None)
@given(MANIFEST_IDS, ARRAYS)
def test_rewriting_is_stable(identifier: ManifestId, arrays: dict[NodeId, ChunkRefs]) -> None:
    """Encoding decoded columns, which point into the file, gives the same references."""
    first = decode_manifest(encode_manifest(identifier, arrays))
    again = decode_manifest(encode_manifest(identifier, dict(first.arrays)))
    assert {node: as_dict(refs) for node, refs in again.arrays.items()} == {
        node: as_dict(refs) for node, refs in arrays.items()
    }
