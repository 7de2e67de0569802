"""The bytes of forks: exact, equal for equal work, small, and harmless even when forged."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.engine.changes.change_set import ArrayChanges, ChangeSet, Deleted
from icechunk_async.engine.changes.wire import ForkState, decode_fork, encode_fork
from icechunk_async.errors import FormatError
from icechunk_async.format.ids import ChunkId, NodeId, SnapshotId
from icechunk_async.format.manifest.chunk import InlineChunk, NativeChunk, VirtualChunk
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.snapshot import ArrayData, Dimension, Node
from tests.helpers import examples

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates

    type Chunks = dict[Coordinates, ChunkRef | None]

SESSION, BASE = b"s" * 12, SnapshotId(b"b" * 12)
SIZES = st.integers(1, 2**40)
REFS = st.one_of(
    st.none(),
    st.binary(min_size=1, max_size=40).map(InlineChunk),
    st.builds(NativeChunk, st.binary(min_size=12, max_size=12).map(ChunkId), SIZES, SIZES),
    st.builds(
        VirtualChunk,
        st.sampled_from(["s3://b/x.nc", "s3://b/y.nc", "file:///ü.nc"]),
        SIZES,
        SIZES,
        st.none() | st.sampled_from(["e1", "e2"]),
        st.none(),
    ),
    st.builds(
        VirtualChunk, st.just("s3://b/z"), SIZES, SIZES, st.none(), st.integers(1, 2**32 - 1)
    ),
)
COORDS = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 3))


def state_of(chunks: Chunks, rank: int = 2) -> ForkState:
    """Return a fork that changed chunks of one array and some nodes."""
    changes = ArrayChanges(rank)
    for coords, ref in chunks.items():
        changes.set(coords, ref)
    ids = [NodeId(bytes([number]) * 8) for number in range(5)]
    dimensions = tuple(Dimension(10 + axis, 5) for axis in range(rank))
    array = Node(ids[0], "/a", b"{}", ArrayData(dimensions, (None, "y")[:rank]))
    return ForkState(
        SESSION,
        BASE,
        ChangeSet(
            {"/n": Node(ids[1], "/n", b"n"), "/a": array},
            {ids[2]: Node(ids[2], "/", b"r")},
            {ids[3]: Deleted("/x/y", is_array=True), ids[4]: Deleted("/x", is_array=False)},
            {ids[0]: changes},
            sources=frozenset([BASE, SnapshotId(b"a" * 12)]),
        ),
    )


def chunks_of(state: ForkState) -> Chunks:
    """Return the chunks of its array."""
    refs = state.changes.chunks[NodeId(bytes(8))].columns()
    rows: list[list[int]] = refs.coords.tolist()
    return {tuple(at): refs.ref(row) for row, at in enumerate(rows)}


@given(st.dictionaries(COORDS, REFS, min_size=1, max_size=20), st.randoms())
@examples(80)
def test_decoding_reverses_encoding(chunks: Chunks, rng: Any) -> None:
    """Every kind of reference; in whatever order and parts the work was done."""
    state = state_of(chunks)
    data = encode_fork(state)
    again = decode_fork(data)
    found = {
        at: InlineChunk(bytes(ref.data)) if isinstance(ref, InlineChunk) else ref
        for at, ref in chunks_of(again).items()
    }
    assert found == chunks
    assert (again.session_id, again.base_id) == (SESSION, BASE)
    for name in ("new", "updated", "deleted", "sources"):
        assert getattr(again.changes, name) == getattr(state.changes, name)
    assert encode_fork(again) == data
    shuffled = list(chunks.items())
    rng.shuffle(shuffled)
    other = state_of({})
    for coords, ref in shuffled:
        part = ChunkRefs.from_mapping(2, {(9, 9): InlineChunk(b"gone"), coords: ref})
        other.changes.chunks[NodeId(bytes(8))].set_many(
            part.take(np.array([row for row in range(len(part)) if part.coords[row, 1] != 9]))
        )
    assert encode_fork(other) == data


def test_a_grid_that_shrank_travels() -> None:
    """Arrays without written chunks or without axes are no exception."""
    state = state_of({})
    changes = state.changes.chunks[NodeId(bytes(8))]
    changes.shrink((3, 2))
    again = decode_fork(encode_fork(state)).changes.chunks[NodeId(bytes(8))]
    assert again.kept_grid == (3, 2)
    assert again.is_empty()
    scalar = state_of({(): InlineChunk(b"x")}, rank=0)
    assert chunks_of(decode_fork(encode_fork(scalar))).keys() == {()}


def forged(change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return the bytes of a fork with something else in them, and a checksum that is right."""
    genuine: Chunks = {
        (0, 0): InlineChunk(b"abc"),
        (0, 1): NativeChunk(ChunkId(b"c" * 12), 0, 5),
        (1, 0): VirtualChunk("s3://b/x", 1, 2, "etag"),
        (1, 1): None,
        (2, 0): NativeChunk(ChunkId(b"d" * 12), 0, 6),
    }
    data = encode_fork(state_of(genuine))
    document: dict[str, Any] = msgpack.unpackb(zstandard.ZstdDecompressor().decompress(data[8:]))
    change(document)
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(msgpack.packb(document))
    return data[:8] + frame


def column(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    """Return a change of one column."""
    return lambda document: document["chunks"][0][3].update({name: value})


def row(part: str, place: int, value: Any) -> Callable[[dict[str, Any]], object]:
    """Return a change of one field of the first row of a list."""
    return lambda document: document[part][0].__setitem__(place, value)


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no_session": lambda document: document.pop("session"),
    "short_session": lambda document: document.update(session=b"s"),
    "short_base": lambda document: document.update(base=b"b"),
    "short_source": lambda document: document.update(sources=[b"b"]),
    "sources_are_a_number": lambda document: document.update(sources=7),
    "nodes_are_no_list": lambda document: document.update(new={}),
    "row_of_another_width": lambda document: document["new"][0].append(1),
    "node_twice": lambda document: document["new"].append(document["new"][0]),
    "short_node_id": row("new", 1, b"1"),
    "relative_path": row("new", 0, "a"),
    "path_of_numbers": row("deleted", 0, 7),
    "path_of_dots": row("new", 0, "/a/../b"),
    "path_with_nul": row("deleted", 0, "/a\0"),
    "deleted_is_a_number": row("deleted", 2, 1),
    "document_is_text": row("new", 2, "{}"),
    "negative_shape": row("new", 3, [[[-1, 1]], None]),
    "huge_shape": row("new", 3, [[[2**63, 1]], None]),
    "endless_axes": row("new", 3, [[[1, 1]] * 65, None]),
    "name_is_a_number": row("new", 3, [[[1, 1]], [7]]),
    "grid_of_another_rank": row("chunks", 2, [1]),
    "negative_rank": row("chunks", 1, -1),
    "other_rank": row("chunks", 1, 3),
    "huge_rank": row("chunks", 1, 10**6),
    "unlisted_rows": column("count", 10**12),
    "fewer_rows": column("count", 4),
    "negative_rows": column("count", -1),
    "rows_out_of_order": column("coords", [b"\0\0\0\0" * 5, b"\1\0\0\0" + b"\0\0\0\0" * 4]),
    "rows_repeat": column("coords", [b"\0\0\0\0" * 5, b"\0\0\0\0" * 5]),
    "missing_axis": column("coords", [b"\0\0\0\0" * 5]),
    "odd_bytes": column("lengths", b"123"),
    "unknown_kind": column("kinds", 9),
    "column_beyond_its_type": column("kinds", 300),
    "no_bytes": column("lengths", 0),
    "beyond_any_object": column("lengths", 2**64 - 1),
    "too_few_ids": column("ids", b"c" * 12),
    "half_an_id": column("ids", b"c" * 13),
    "beyond_the_locations": column("location_of", 7),
    "location_is_bytes": column("locations", [b"s3://b/x"]),
    "beyond_the_etags": column("etag_of", 1),
    "missing_inline_bytes": column("inline", b"ab"),
    "column_is_text": column("modified", "1"),
    "column_is_missing": lambda document: document["chunks"][0][3].pop("kinds"),
    "columns_are_a_list": row("chunks", 3, []),
    "a_pickle": row("new", 2, pickle.dumps(print).decode("latin-1")),
}


def test_a_genuine_document_is_read() -> None:
    """The document that the forgeries start from is valid."""
    assert len(chunks_of(decode_fork(forged(lambda _: None)))) == 5


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_bytes_are_refused(name: str) -> None:
    """With a plain error, whatever they claim; no memory is taken for what is not there."""
    with pytest.raises(FormatError):
        decode_fork(forged(FORGERIES[name]))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        b"\x91" * 2000 + b"\xc0",
        b"\x80",
        b"\x80\x80",
        b"\x81\xa7session\xc7\x0c\x01hello world!",
    ],
)
def test_other_documents_are_refused(content: bytes) -> None:
    """Nothing, nonsense, endless nesting, nothing of what there should be, and types of others."""
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    head = encode_fork(state_of({}))[:8]
    with pytest.raises(FormatError):
        decode_fork(head + frame)


def test_decompression_bomb_is_refused() -> None:
    """A gigabyte of nothing in a few kilobytes is refused before it is made."""
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    with pytest.raises(FormatError, match="are believed"):
        decode_fork(encode_fork(state_of({}))[:8] + frame)
