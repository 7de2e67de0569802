"""Merging changes into the references of an array: few one by one, many by columns, the same."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.format.manifest import merging
from icechunk_async.format.manifest.merging import merge
from icechunk_async.format.manifest.refs import ChunkRefs, InlineChunk, Kind, NativeChunk
from icechunk_async.format.manifest.writing import encode_manifest
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
    from icechunk_async.format.manifest.refs import ChunkRef, Coordinates

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
