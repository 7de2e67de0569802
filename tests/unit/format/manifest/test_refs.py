"""References survive every operation on their columns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import FormatError
from icechunk_async.format.manifest.chunk import (
    ChunkRef,
    Coordinates,
    InlineChunk,
    Kind,
    NativeChunk,
    VirtualChunk,
)
from icechunk_async.format.manifest.refs import ChunkRefs
from tests.unit.format.samples import (
    any_coords,
    as_dict,
    chunk_id,
    coordinates,
    ref_maps,
    refs_of,
)

type Model = dict[Coordinates, ChunkRef | None]

MIXED: Model = {
    (3,): VirtualChunk("s3://b/x", 5, 6, etag='"e"'),
    (0,): InlineChunk(b"inline"),
    (1,): NativeChunk(chunk_id(1), 10, 20),
    (2,): None,
    (9,): VirtualChunk("s3://b/x", 50, 60, last_modified=7),
    (4,): VirtualChunk("s3://b/y", 0, 1),
    (5,): InlineChunk(b""),
    (6,): NativeChunk(chunk_id(2), 0, 2**62),
}


@given(st.data())
def test_references_round_trip_through_columns(data: st.DataObject) -> None:
    """Of every kind, deletions included, in the order given."""
    rank = data.draw(st.integers(0, 3))
    model = data.draw(ref_maps(rank, deletions=True))
    refs = ChunkRefs.from_mapping(rank, model)
    assert (len(refs), refs.rank) == (len(model), rank)
    assert list(as_dict(refs).items()) == list(model.items())


def test_equal_locations_are_kept_once() -> None:
    """Equal ETags are kept once too."""
    refs = ChunkRefs.from_mapping(
        1, {(row,): VirtualChunk(f"s3://b/{row % 2}", row, 1, etag="e") for row in range(10)}
    )
    assert len(refs.locations) == 2
    assert len(refs.etag_pool) == 1


def test_an_inline_chunk_is_a_view() -> None:
    """Its bytes are not copied."""
    ref = ChunkRefs.from_mapping(1, MIXED).ref(1)
    assert isinstance(ref, InlineChunk)
    assert isinstance(ref.data, memoryview)
    assert bytes(ref.data) == b"inline"


@pytest.mark.parametrize("rank", range(4))
def test_empty_references_have_a_rank(rank: int) -> None:
    """Nothing can be found in them."""
    refs = ChunkRefs.empty(rank)
    assert (len(refs), refs.rank) == (0, rank)
    assert refs.find((0,) * rank) is None
    assert as_dict(refs.sort()) == as_dict(refs.compact()) == as_dict(refs.narrow()) == {}


def test_columns_that_are_not_given_take_no_memory() -> None:
    """A million constants are one number."""
    coords = np.arange(1_000_000, dtype=np.uint32)[:, None]
    refs = ChunkRefs.build(coords, Kind.NATIVE)
    for column in (refs.kinds, refs.objects, refs.offsets, refs.lengths, refs.modified):
        assert column.shape == (1_000_000,)
        assert column.strides == (0,)


@given(st.data())
def test_sort_orders_by_coordinates_and_the_last_one_stays(data: st.DataObject) -> None:
    """Assigning to a dictionary has the same effect."""
    rank = data.draw(st.integers(0, 3))
    parts = data.draw(st.lists(ref_maps(rank, deletions=True), min_size=1, max_size=4))
    model: Model = {}
    for part in parts:
        model |= part
    refs = ChunkRefs.concat([ChunkRefs.from_mapping(rank, part) for part in parts]).sort()
    assert list(as_dict(refs).items()) == sorted(model.items(), key=lambda item: item[0])
    refs.check_sorted()


@given(st.data())
def test_concat_is_one_after_the_other(data: st.DataObject) -> None:
    """This holds for any pools and inline bytes. The parts stay unchanged."""
    models = data.draw(st.lists(ref_maps(2, deletions=True), min_size=1, max_size=4))
    parts = [ChunkRefs.from_mapping(2, model) for model in models]
    joined = ChunkRefs.concat(parts)
    expected = [(coords, ref) for model in models for coords, ref in model.items()]
    assert joined.coords.tolist() == [list(coords) for coords, _ in expected]
    assert [_bytes(joined.ref(row)) for row in range(len(joined))] == [ref for _, ref in expected]
    assert [as_dict(part) for part in parts] == models


def _bytes(ref: ChunkRef | None) -> ChunkRef | None:
    return InlineChunk(bytes(ref.data)) if isinstance(ref, InlineChunk) else ref


def test_concat_of_nothing_but_empty_parts_is_empty() -> None:
    """With the rank of the last; parts of another rank do not matter if they are empty."""
    joined = ChunkRefs.concat([ChunkRefs.empty(1), ChunkRefs.empty(2)])
    assert (len(joined), joined.rank) == (0, 2)
    refs = refs_of(2, {(1, 1): InlineChunk(b"x")})
    assert as_dict(ChunkRefs.concat([ChunkRefs.empty(1), refs])) == as_dict(refs)


@given(st.data())
def test_take_answers_rows_by_index_and_by_mask(data: st.DataObject) -> None:
    """In the order asked for; then narrow and compact change nothing that can be seen."""
    model = data.draw(ref_maps(1, deletions=True))
    refs = ChunkRefs.from_mapping(1, model)
    items = list(model.items())
    mask = data.draw(st.lists(st.booleans(), min_size=len(items), max_size=len(items)))
    chosen = [item for item, keep in zip(items, mask, strict=True) if keep]
    taken = refs.take(np.array(mask, bool))
    assert list(as_dict(taken).items()) == chosen
    rows = data.draw(st.permutations(range(len(items))))
    picked = refs.take(np.array(rows, np.int64))
    assert list(as_dict(picked).items()) == [items[row] for row in rows]
    for part in (taken, picked):
        for same in (part.narrow(), part.compact(), part.narrow().compact()):
            assert list(as_dict(same).items()) == list(as_dict(part).items())


def test_narrow_drops_what_no_row_refers_to() -> None:
    """From the chunk ids, the locations and the ETags."""
    refs = ChunkRefs.from_mapping(1, MIXED).take(np.array([0, 6]))
    assert (len(refs.locations), len(refs.chunk_ids)) == (2, 2)
    narrow = refs.narrow()
    assert len(narrow.locations) == 1
    assert len(narrow.chunk_ids) == 0
    assert len(narrow.etag_pool) == 1
    assert narrow.narrow() is narrow


def test_compact_drops_inline_bytes_that_no_row_refers_to() -> None:
    """The buffer of an old manifest can then be freed."""
    refs = refs_of(1, {(row,): InlineChunk(b"%03d" % row) for row in range(100)})
    assert refs.compact() is refs
    few = refs.take(np.array([7, 50])).compact()
    assert bytes(few.inline) == b"007050"
    assert few.compact() is few


@given(st.data())
def test_find_matches_a_dictionary(data: st.DataObject) -> None:
    """For rows that are there and rows that are not."""
    rank = data.draw(st.integers(0, 3))
    refs = refs_of(rank, model := data.draw(ref_maps(rank)))
    asked = coordinates(rank) | any_coords(rank)
    for coords in [*model, *data.draw(st.lists(asked, max_size=10))]:
        row = refs.find(coords)
        assert (row is not None) == (coords in model)
        if row is not None:
            assert _bytes(refs.ref(row)) == model[coords]


@given(st.data())
def test_inside_tells_which_rows_lie_in_a_box(data: st.DataObject) -> None:
    """Half-open along each axis."""
    rank = data.draw(st.integers(0, 3))
    refs = refs_of(rank, data.draw(ref_maps(rank)))
    edge = st.integers(0, 5) | st.integers(0, 2**32 - 1)
    box = tuple(data.draw(st.tuples(edge, edge)) for _ in range(rank))
    expected = [
        all(a <= at < b for at, (a, b) in zip(coords, box, strict=True))
        for coords in refs.coords.tolist()
    ]
    assert refs.inside(box).tolist() == expected


def test_nothing_lies_inside_a_box_of_another_rank() -> None:
    """One axis does not stretch to three."""
    refs = refs_of(1, {(0,): InlineChunk(b"x")})
    assert refs.inside(((0, 5), (0, 5))).tolist() == [False]
    assert refs.inside(()).tolist() == [False]


@given(st.data())
def test_extents_are_the_smallest_box(data: st.DataObject) -> None:
    """It holds every row, and no face of it can be moved in."""
    rank = data.draw(st.integers(0, 3))
    refs = refs_of(rank, model := data.draw(ref_maps(rank).filter(bool)))
    extents = refs.extents()
    assert len(extents) == rank
    assert refs.inside(extents).all()
    for axis, (start, stop) in enumerate(extents):
        along = {coords[axis] for coords in model}
        assert (start, stop) == (min(along), max(along) + 1)


def test_extents_of_a_scalar_are_empty() -> None:
    """The empty box holds its one chunk."""
    refs = refs_of(0, {(): InlineChunk(b"x")})
    assert refs.extents() == ()
    assert refs.inside(()).tolist() == [True]


@pytest.mark.parametrize("far", [1, 2**32 - 2])
def test_rows_out_of_order_are_refused(far: int) -> None:
    """Lookups would miss them silently; repetitions are no better."""
    coords = np.array([[0, 0, far], [0, far, 0], [far, 0, 0]], np.uint32)
    ChunkRefs.build(coords, Kind.NATIVE).check_sorted()
    for rows in ([1, 0, 2], [0, 2, 1], [0, 0], [2, 2]):
        with pytest.raises(FormatError, match="ascending"):
            ChunkRefs.build(coords[rows], Kind.NATIVE).check_sorted()


def test_two_rows_of_a_scalar_are_refused() -> None:
    """It has one chunk; when a session sets it twice the last one stays."""
    refs = ChunkRefs.build(np.empty((2, 0), np.uint32), Kind.NATIVE)
    with pytest.raises(FormatError):
        refs.check_sorted()
    assert len(refs.sort()) == 1
