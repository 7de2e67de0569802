"""A few references are written and merged one by one: quicker, and otherwise the same."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icechunk_async.format.ids import ChunkId
from icechunk_async.format.manifest import few as writing_few
from icechunk_async.format.manifest import merging
from icechunk_async.format.manifest.chunk import InlineChunk, NativeChunk, VirtualChunk
from icechunk_async.format.manifest.few import encode_few
from icechunk_async.format.manifest.merging import merge
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.manifest.writing import encode_manifest
from tests.unit.format.samples import (
    CHUNK_IDS,
    MANIFEST_IDS,
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

    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates

    type Refs = Mapping[Coordinates, ChunkRef]

INLINE: st.SearchStrategy[ChunkRef] = st.binary(max_size=9).map(InlineChunk)
SIZES = st.integers(0, 1 << 40)
NATIVE: st.SearchStrategy[ChunkRef] = st.builds(NativeChunk, CHUNK_IDS, st.just(0), SIZES)
SHIFTED: st.SearchStrategy[ChunkRef] = st.builds(NativeChunk, CHUNK_IDS, SIZES, SIZES)


def stored_refs(rank: int) -> st.SearchStrategy[ChunkRefs]:
    """Return references to chunks of the repository, of one kind or of several."""
    coords = st.tuples(*[st.integers(0, 20)] * rank)
    kinds = st.sampled_from([INLINE, NATIVE, SHIFTED, INLINE | NATIVE, INLINE | SHIFTED | NATIVE])
    maps = kinds.flatmap(lambda kind: st.dictionaries(coords, kind, max_size=12))
    return maps.map(lambda refs: refs_of(rank, refs))


ARRAYS = st.dictionaries(NODE_IDS, st.integers(0, 4).flatmap(stored_refs), min_size=1, max_size=4)


@settings(deadline=None)
@given(MANIFEST_IDS, ARRAYS)
def test_files_are_those_that_columns_make(
    identifier: ManifestId, arrays: Mapping[NodeId, ChunkRefs]
) -> None:
    """Byte for byte, of one array or several, also from columns that share pools with others."""
    assert encode_few(identifier, arrays) == encode_manifest(identifier, arrays)
    some = {node: refs.take(slice(1, None, 2)) for node, refs in arrays.items()}
    assert encode_few(identifier, some) == encode_manifest(identifier, some)


@pytest.mark.parametrize(
    "refs",
    [
        ChunkRefs.from_mapping(1, {(it,): InlineChunk(b"") for it in range(2 * writing_few._FEW)}),
        ChunkRefs.from_mapping(1, {(0,): InlineChunk(bytes(writing_few.MOST_INLINE + 1))}),
        ChunkRefs.from_mapping(1, {(0,): VirtualChunk("s3://bucket/key", 0, 1)}),
    ],
    ids=["many", "large", "virtual"],
)
def test_columns_write_what_is_not_a_few(refs: ChunkRefs) -> None:
    """Many, which they write faster, and kinds that are rarely written alone."""
    assert encode_few(manifest_id(1), {node_id(1): refs}) is None
    small = ChunkRefs.from_mapping(1, {(0,): InlineChunk(b"1")})
    assert encode_few(manifest_id(1), {node_id(1): refs, node_id(2): small}) is None


BOX = ((1, 4), (0, 3))
CHANGES = st.dictionaries(
    st.tuples(st.integers(1, 3), st.integers(0, 2)), st.none() | INLINE | SHIFTED, max_size=8
)


@settings(deadline=None)
@given(ref_maps(2, coords=coordinates(2, 5)), CHANGES, st.sampled_from([-1, 1000]))
def test_changes_replace_references_inside_of_the_box(
    refs: Refs, changes: Mapping[Coordinates, ChunkRef | None], few: int
) -> None:
    """Those outside of it and those that were deleted are gone; one by one and by columns."""
    expected = {
        coords: ref
        for coords, ref in refs.items()
        if all(start <= it < stop for it, (start, stop) in zip(coords, BOX, strict=True))
    }
    for coords, ref in changes.items():
        expected.pop(coords, None)
        if ref is not None:
            expected[coords] = ref
    changed = ChunkRefs.from_mapping(2, changes).sort()
    stored = refs_of(2, refs)
    parts = [stored.take(slice(0, 3)), stored.take(slice(3, None)), ChunkRefs.empty(1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "_FEW", few)
        merged = merge(parts, changed, BOX)
    assert as_dict(merged) == expected
    assert list(as_dict(merged)) == sorted(expected)
    assert merged.rank == 2


@pytest.mark.parametrize("few", [-1, 1000])
def test_checksums_stay_with_their_references(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of references that stay, and of new ones; 0 where none is known."""
    monkeypatch.setattr(merging, "_FEW", few)
    ids = [ChunkId(bytes([it]) * 12) for it in range(4)]
    natives: Refs = {(it,): NativeChunk(one, 0, 8, sum=it + 5) for it, one in enumerate(ids)}
    stored = ChunkRefs.from_mapping(1, natives)
    changes: Refs = {
        (0,): InlineChunk(b"new"),
        (1,): NativeChunk(ids[0], 8, 8, sum=9),
        (3,): NativeChunk(ids[0], 16, 8),
    }
    merged = merge([stored], ChunkRefs.from_mapping(1, changes), ((0, 5),))
    assert merged.sums is not None
    assert merged.sums.tolist() == [0, 9, 7, 0]


def test_the_doubt_about_times_of_others_stays() -> None:
    """Whether a time may have been rounded down is known for all references together."""
    ref = VirtualChunk("s3://bucket/key", 0, 1, last_modified=7)
    stored = ChunkRefs.build(
        np.zeros((1, 1), np.uint32),
        refs_of(1, {(0,): ref}).kinds,
        locations=refs_of(1, {(0,): ref}).locations,
        modified=np.array([7], np.uint32),
        seconds_cut=True,
    )
    changed = ChunkRefs.from_mapping(1, {(1,): InlineChunk(b"new")})
    merged = merge([stored], changed, ((0, 5),))
    assert merged.has_cut_seconds
    assert not merge([changed], ChunkRefs.empty(1), ((0, 5),)).has_cut_seconds


@pytest.mark.parametrize("few", [-1, 1000])
def test_the_doubt_about_times_goes_with_the_last_reference_that_had_it(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our times are rounded up: to take them for cut would miss a source that changed."""
    monkeypatch.setattr(merging, "_FEW", few)
    old, new = (VirtualChunk("s3://bucket/key", 0, 1, last_modified=it) for it in (7, 9))
    stored = replace(ChunkRefs.from_mapping(1, {(0,): old}), seconds_cut=True)
    assert stored.has_cut_seconds
    changed = ChunkRefs.from_mapping(1, {(0,): new})
    assert not merge([stored], changed, ((0, 5),)).has_cut_seconds
