"""Merging changes into the references of an array: few one by one, many by columns, the same."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.format.manifest import merging
from icechunk_async.format.manifest.chunk import InlineChunk, Kind, NativeChunk, VirtualChunk
from icechunk_async.format.manifest.merging import merge
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.manifest.refs import NO_ETAG, ChunkRefs
from icechunk_async.format.manifest.writing import encode_manifest
from tests.helpers import counted_calls
from tests.unit.format.samples import (
    CHUNK_IDS,
    CHUNK_REFS,
    as_dict,
    chunk_id,
    coordinates,
    manifest_id,
    node_id,
    refs_of,
)

if TYPE_CHECKING:
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates

PLAIN: st.SearchStrategy[ChunkRef] = st.one_of(
    st.binary(max_size=20).map(InlineChunk),
    st.builds(NativeChunk, CHUNK_IDS, st.integers(0, 2**40), st.integers(0, 2**40)),
)
BOX = ((1, 4), (0, 4))
INSIDE = st.tuples(st.integers(1, 3), st.integers(0, 3))


def _parts(refs: st.SearchStrategy[ChunkRef]) -> st.SearchStrategy[list[ChunkRefs]]:
    """References of other chunks each, of which some lie outside of the box."""
    every = st.dictionaries(coordinates(2), refs, max_size=12)
    return st.tuples(every, st.integers(1, 3)).map(
        lambda it: [
            refs_of(2, {at: ref for at, ref in it[0].items() if sum(at) % it[1] == part})
            for part in range(it[1])
        ]
    )


@pytest.mark.parametrize("refs", [PLAIN, CHUNK_REFS], ids=["plain", "any"])
def test_few_references_are_merged_as_many_are(refs: st.SearchStrategy[ChunkRef]) -> None:
    """Also where changes delete all of them, and where a part is of another rank."""

    @given(_parts(refs), st.dictionaries(INSIDE, st.none() | refs, max_size=6), st.booleans())
    def check(
        parts: list[ChunkRefs],
        changes: dict[Coordinates, ChunkRef | None],
        cut: bool,  # noqa: FBT001
    ) -> None:
        parts = [replace(part.take(slice(None)), seconds_cut=cut) for part in parts]
        parts.insert(1, refs_of(1, {(2,): NativeChunk(chunk_id(9), 0, 1)}))
        changed = refs_of(2, changes)
        few = merge(parts, changed, BOX)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(merging, "_FEW", -1)
            patch.setattr(merging, "_FEW_CHANGED", -1)
            many = merge(parts, changed, BOX)
        assert as_dict(few) == as_dict(many)
        assert few.coords.tolist() == many.coords.tolist()
        assert many.has_cut_seconds or not few.has_cut_seconds  # few may know better
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(merging, "_gathered", lambda *args: merging._collected(*args[:2]))
            collected = merge(parts, changed, BOX)
        if len(few):
            files = [encode_manifest(manifest_id(1), {node_id(1): it}) for it in (few, collected)]
            assert bytes(files[0]) == bytes(files[1])

    check()


@given(
    st.dictionaries(coordinates(2), CHUNK_REFS, min_size=1, max_size=12),
    st.dictionaries(INSIDE, st.none() | CHUNK_REFS, max_size=2),
    st.data(),
)
def test_references_that_replace_others_are_merged_as_many_are(
    old: dict[Coordinates, ChunkRef],
    changes: dict[Coordinates, ChunkRef | None],
    data: st.DataObject,
) -> None:
    """Mostly they are of chunks that were there; some are new, deleted, or outside of the box."""
    there = data.draw(st.dictionaries(st.sampled_from(sorted(old)), PLAIN, max_size=4))
    changes = {**data.draw(st.sampled_from([changes, {}])), **there}
    box = data.draw(st.sampled_from([BOX, ((0, 99), (0, 99))]))
    changes = {at: ref for at, ref in changes.items() if refs_of(2, {at: ref}).inside(box).all()}
    part, changed = refs_of(2, old), refs_of(2, changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "_FEW", -1)
        found = merge([part], changed, box)
        patch.setattr(merging, "_FEW_CHANGED", -1)
        expected = merge([part], changed, box)
    assert as_dict(found) == as_dict(expected)
    assert found.coords.tolist() == expected.coords.tolist()
    file = encode_manifest(manifest_id(1), {node_id(1): found})
    assert as_dict(decode_manifest(file).refs(node_id(1), 2)) == as_dict(expected)
    assert as_dict(part) == as_dict(refs_of(2, old))  # it may be in a cache


def test_references_of_a_file_without_order_are_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other writers may have left them so."""
    monkeypatch.setattr(merging, "_FEW", -1)
    refs: dict[Coordinates, ChunkRef] = {(at,): NativeChunk(chunk_id(at), 0, 1) for at in (2, 0, 1)}
    changed = refs_of(1, {(1,): InlineChunk(b"x")})
    merged = merge([ChunkRefs.from_mapping(1, refs)], changed, ((0, 3),))
    assert merged.coords.tolist() == [[0], [1], [2]]
    assert as_dict(merged) == {(0,): refs[0,], (1,): InlineChunk(b"x"), (2,): refs[2,]}


def test_nothing_is_left_of_the_guard_of_a_virtual_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither an ETag nor a time belongs to the chunk that replaces it."""
    monkeypatch.setattr(merging, "_FEW", -1)
    guarded: list[ChunkRef] = [
        VirtualChunk("s3://b/a", 0, 1, "tag"),
        VirtualChunk("s3://b/b", 0, 1, None, 7),
    ]
    refs = refs_of(1, {(at,): ref for at, ref in enumerate(guarded)})
    changed = refs_of(1, {(at,): NativeChunk(chunk_id(at), 0, 1) for at in range(2)})
    merged = merge([refs], changed, ((0, 2),))
    assert merged.etags.tolist() == [NO_ETAG, NO_ETAG]
    assert merged.modified.tolist() == [0, 0]


@pytest.mark.parametrize("count", [100, 1000, 100_000])
def test_replacing_a_reference_costs_the_same_calls_among_any_number(count: int) -> None:
    """A commit that updates one chunk merges it into all others of the manifest."""
    coords = np.arange(count, dtype=np.uint32).reshape(-1, 1)
    ids = np.zeros((count, 12), np.uint8)
    objects, lengths = np.arange(count, dtype=np.uint32), np.full(count, 9, np.uint64)
    refs = ChunkRefs.build(coords, Kind.NATIVE, objects=objects, lengths=lengths, chunk_ids=ids)
    changed = refs_of(1, {(count // 2,): NativeChunk(chunk_id(1), 3, 4)})
    refs.find((0,))  # the index is made once for a manifest
    with counted_calls() as calls:
        merged = merge([refs], changed, ((0, count),))
    assert len(calls) < 70
    assert merged.coords is refs.coords
    assert merged.ref(count // 2) == NativeChunk(chunk_id(1), 3, 4)
    assert merged.ref(count - 1) == refs.ref(count - 1)


def test_sums_of_few_references_are_kept() -> None:
    """Of those that stay, and of new ones."""
    old: dict[Coordinates, ChunkRef] = {
        (at,): NativeChunk(chunk_id(at), at, 1, sum=at + 1) for at in range(4)
    }
    changes: dict[Coordinates, ChunkRef | None] = {
        (1,): NativeChunk(chunk_id(9), 0, 2, sum=7),
        (2,): None,
    }
    merged = merge([refs_of(1, old)], refs_of(1, changes), ((0, 9),))
    assert merged.sums is not None
    assert merged.sums.tolist() == [1, 7, 4]


def test_no_object_is_made_of_plain_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit merges them for each array that it changes."""
    refs = refs_of(1, {(at,): NativeChunk(chunk_id(at), 0, 1) for at in range(20)})
    changed = refs.take(np.array([3]))
    monkeypatch.setattr(ChunkRefs, "ref", None)
    merged = merge([refs], changed, ((0, 20),))
    assert len(merged) == 20
    assert (merged.kinds == Kind.NATIVE).all()
