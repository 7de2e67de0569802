"""Columns of several small arrays: what each array would have by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icechunk_async.format.ids import ChunkId
from icechunk_async.format.manifest.chunk import InlineChunk, Kind, NativeChunk, VirtualChunk
from icechunk_async.format.manifest.merging import merge
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.manifest.several import Several, encode_several, merge_several
from icechunk_async.format.manifest.writing import encode_manifest
from tests.helpers import counted_calls
from tests.unit.format.samples import (
    CHUNK_IDS,
    MANIFEST_IDS,
    NODE_IDS,
    as_dict,
    chunk_id,
    manifest_id,
    node_id,
    refs_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates

    type Changes = dict[Coordinates, ChunkRef | None]

INLINE: st.SearchStrategy[ChunkRef] = st.binary(max_size=9).map(InlineChunk)
SIZES = st.integers(0, 1 << 40)
NATIVE: st.SearchStrategy[ChunkRef] = st.builds(NativeChunk, CHUNK_IDS, st.just(0), SIZES)
SHIFTED: st.SearchStrategy[ChunkRef] = st.builds(NativeChunk, CHUNK_IDS, SIZES, SIZES)
SUMMED: st.SearchStrategy[ChunkRef] = st.builds(
    NativeChunk, CHUNK_IDS, SIZES, SIZES, st.integers(0, 9)
)
KINDS = st.sampled_from([INLINE, NATIVE, SHIFTED, INLINE | NATIVE, INLINE | SHIFTED | NATIVE])


def of_rank(rank: int) -> st.SearchStrategy[dict[Coordinates, ChunkRef]]:
    """Single references of one array."""
    coords = st.tuples(*[st.integers(0, 20)] * rank)
    return KINDS.flatmap(lambda it: st.dictionaries(coords, it, min_size=1, max_size=12))


def changes(rank: int) -> st.SearchStrategy[list[Changes]]:
    """Return changes of several arrays, in any order, deletions included."""
    coords = st.tuples(*[st.integers(0, 20)] * rank)
    kinds = st.none() | INLINE | SUMMED
    one: st.SearchStrategy[Changes] = st.dictionaries(coords, kinds, max_size=12)
    return st.lists(one, min_size=1, max_size=5)


@settings(deadline=None)
@given(st.integers(0, 3).flatmap(lambda rank: st.tuples(st.just(rank), changes(rank))))
def test_single_references_become_the_columns_of_each_array(
    given_: tuple[int, list[Changes]],
) -> None:
    """Sorted, with separate pools."""
    rank, arrays = given_
    several = Several.from_mappings(rank, arrays)
    assert several is not None
    for refs, single in zip(several.divided(), arrays, strict=True):
        expected = ChunkRefs.from_mapping(rank, single).sort()
        assert refs.coords.tolist() == expected.coords.tolist()
        assert refs.kinds.tolist() == expected.kinds.tolist()
        for row in range(len(refs)):
            assert refs.ref(row) == expected.ref(row)
        assert (refs.sums is None) == (expected.sums is None)
        assert refs.sums is None or expected.sums is not None
        if refs.sums is not None and expected.sums is not None:
            assert refs.sums.tolist() == expected.sums.tolist()
        assert len(refs.inline) == len(expected.inline)
        assert len(refs.chunk_ids) == len(expected.chunk_ids)
        assert {
            name: it.dtype for name, it in vars(refs).items() if isinstance(it, np.ndarray)
        } == {name: it.dtype for name, it in vars(expected).items() if isinstance(it, np.ndarray)}


def _types(refs: ChunkRefs) -> dict[str, object]:
    return {name: it.dtype for name, it in vars(refs).items() if isinstance(it, np.ndarray)}


@settings(deadline=None)
@given(st.integers(0, 3).flatmap(lambda rank: st.lists(of_rank(rank), min_size=1, max_size=5)))
def test_references_are_the_same_after_they_were_joined(
    arrays: list[dict[Coordinates, ChunkRef]],
) -> None:
    """Also those that share pools with others, of which they use a part."""
    rank = len(next(iter(arrays[0])))
    whole = [refs_of(rank, it) for it in arrays]
    every = [part for refs in whole for part in (refs.take(slice(0, 1)), refs.take(slice(1, None)))]
    parts = [part for part in every if len(part)]
    several = Several.of(parts)
    assert several is not None
    for refs, expected in zip(several.divided(), parts, strict=True):
        assert as_dict(refs) == as_dict(expected)


ARRAYS = st.integers(0, 4).flatmap(
    lambda rank: st.dictionaries(
        NODE_IDS, of_rank(rank).map(lambda it: refs_of(rank, it)), min_size=1, max_size=6
    )
)


@settings(deadline=None)
@given(MANIFEST_IDS, ARRAYS)
def test_files_are_those_that_columns_make(
    identifier: ManifestId, arrays: Mapping[NodeId, ChunkRefs]
) -> None:
    """Byte for byte, also from columns that share pools with others."""
    assert encode_several(identifier, arrays) == encode_manifest(identifier, arrays)
    some = {node: refs.take(slice(1, None, 2)) for node, refs in arrays.items() if len(refs) > 1}
    if some:
        assert encode_several(identifier, some) == encode_manifest(identifier, some)


@pytest.mark.parametrize(
    "other",
    [
        refs_of(1, {(0,): VirtualChunk("s3://bucket/key", 0, 1)}),
        refs_of(2, {(0, 0): InlineChunk(b"x")}),
        ChunkRefs.empty(1),
        ChunkRefs.from_mapping(1, {(0,): None}),
        refs_of(1, {(0,): InlineChunk(bytes(2 << 20))}),
        refs_of(1, {(it,): InlineChunk(b"") for it in range(5000)}),
        refs_of(1, {(0,): NativeChunk(ChunkId(bytes(16)), 0, 1)}),
    ],
    ids=["virtual", "rank", "empty", "deleted", "large", "many", "ids"],
)
def test_others_are_left_to_those_who_write_any(other: ChunkRefs) -> None:
    """They are rare, or quicker by themselves."""
    arrays = {node_id(1): refs_of(1, {(0,): InlineChunk(b"1")}), node_id(2): other}
    assert encode_several(manifest_id(1), arrays) is None


BOX = (4, 3)


@settings(deadline=None)
@given(
    st.lists(st.tuples(of_rank(2) | st.just({}), changes(2)), min_size=1, max_size=5), st.booleans()
)
def test_changes_are_merged_as_those_of_one_array_are(
    arrays: list[tuple[dict[Coordinates, ChunkRef], list[Changes]]],
    new: bool,  # noqa: FBT001
) -> None:
    """References outside of the grid are left out, and deleted ones."""
    old = [refs_of(2, {} if new else it) for it, _ in arrays]
    changed = [ChunkRefs.from_mapping(2, it[0]).sort() for _, it in arrays]
    found = merge_several(old, changed, [BOX] * len(arrays))
    assert found is not None
    box = tuple((0, size) for size in BOX)
    for (refs, inline_bytes), before, ours in zip(found, old, changed, strict=True):
        expected = merge([before], ours.take(ours.inside(box)), box)
        assert as_dict(refs) == as_dict(expected)
        assert refs.coords.tolist() == expected.coords.tolist()
        assert inline_bytes == int(refs.lengths[refs.kinds == Kind.INLINE].sum())
        for row in range(len(refs)):
            assert getattr(refs.ref(row), "sum", 0) == getattr(expected.ref(row), "sum", 0)


def test_changes_of_an_array_without_axes_are_merged() -> None:
    """It has one chunk."""
    one: dict[Coordinates, ChunkRef] = {(): InlineChunk(b"old")}
    old, new = refs_of(0, one), ChunkRefs.from_mapping(0, {(): InlineChunk(b"new")})
    gone = ChunkRefs.from_mapping(0, {(): None})
    found = merge_several([old, old, ChunkRefs.empty(0)], [new, gone, new], [(), (), ()])
    assert found is not None
    assert [as_dict(refs) for refs, _ in found] == [as_dict(new), {}, as_dict(new)]


def test_new_references_are_not_copied() -> None:
    """Where no array had any before, and none are left out."""
    refs = refs_of(1, {(0,): InlineChunk(b"1")})
    found = merge_several([ChunkRefs.empty(1)] * 2, [refs, refs], [(1,), (1,)])
    assert found is not None
    assert [it is refs for it, _ in found] == [True, True]


def test_virtual_references_are_merged_by_others() -> None:
    """They have pools of texts."""
    refs = refs_of(1, {(0,): VirtualChunk("s3://bucket/key", 0, 1)})
    assert merge_several([ChunkRefs.empty(1)], [refs], [(1,)]) is None


def test_an_array_costs_hardly_a_call() -> None:
    """A commit makes columns of many arrays, and writes them."""

    def calls(arrays: int) -> tuple[int, int]:
        single: list[Changes] = [
            {(it,): NativeChunk(chunk_id(it), 0, 1) for it in range(9)} for _ in range(arrays)
        ]
        with counted_calls() as made:
            several = Several.from_mappings(1, single)
        assert several is not None
        refs = several.divided()
        with counted_calls() as written:
            encode_several(manifest_id(1), {node_id(it): one for it, one in enumerate(refs)})
        return len(made), len(written)

    few, many = calls(10), calls(60)
    assert many[0] == few[0]
    assert many[1] - few[1] <= 50 * 12
