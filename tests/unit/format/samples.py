"""Values of the format to test with: by name, and by Hypothesis."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st

from icechunk_async.format.ids import ChunkId, ManifestId, NodeId, SnapshotId
from icechunk_async.format.manifest.chunk import (
    ChunkRef,
    Coordinates,
    InlineChunk,
    NativeChunk,
    VirtualChunk,
)
from icechunk_async.format.manifest.refs import ChunkRefs

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from icechunk_async.format.transaction_log import TransactionLog

__all__ = [
    "CHUNK_IDS",
    "CHUNK_REFS",
    "MANIFEST_IDS",
    "NODE_IDS",
    "PATHS",
    "SNAPSHOT_IDS",
    "TEXTS",
    "TIMES",
    "any_coords",
    "as_dict",
    "chunk_id",
    "comparable",
    "coordinates",
    "manifest_id",
    "node_id",
    "reading_repo_infos",
    "ref_maps",
    "refs_of",
    "snapshot_id",
]

TEXTS = st.text(max_size=12)
"""Any text that UTF-8 can express, NUL included."""
TIMES = st.integers(0, 2**64 - 1)
SNAPSHOT_IDS = st.binary(min_size=12, max_size=12).map(SnapshotId)
MANIFEST_IDS = st.binary(min_size=12, max_size=12).map(ManifestId)
CHUNK_IDS = st.binary(min_size=12, max_size=12).map(ChunkId)
NODE_IDS = st.binary(min_size=8, max_size=8).map(NodeId)

_NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=5
).filter(lambda name: name not in {".", ".."})
PATHS = st.lists(_NAMES | st.sampled_from(["a", "a-b", "a.b", "a0", "b"]), max_size=4).map(
    lambda names: "/" + "/".join(names)
)
"""Normal absolute paths, among them some that order differently by bytes and by segment."""

_SIZES = st.integers(0, 2**40) | st.integers(0, 2**62 - 1)
_LOCATIONS = st.sampled_from(["s3://b/a", "s3://b/b", ""]) | TEXTS
_ETAGS = st.none() | st.sampled_from(['"e"', ""]) | TEXTS
CHUNK_REFS: st.SearchStrategy[ChunkRef] = st.one_of(
    st.binary(max_size=20).map(InlineChunk),
    st.builds(NativeChunk, CHUNK_IDS, st.just(0) | _SIZES, _SIZES),
    st.builds(VirtualChunk, _LOCATIONS, _SIZES, _SIZES, _ETAGS),
    st.builds(
        VirtualChunk, _LOCATIONS, _SIZES, _SIZES, st.none(), st.none() | st.integers(1, 2**32 - 1)
    ),
)
"""References of every kind, with at most one of the two checksums."""


def snapshot_id(number: int) -> SnapshotId:
    """Return an id that sorts by ``number``."""
    return SnapshotId(number.to_bytes(12))


def manifest_id(number: int) -> ManifestId:
    """Return an id that sorts by ``number``."""
    return ManifestId(number.to_bytes(12))


def chunk_id(number: int) -> ChunkId:
    """Return an id that sorts by ``number``."""
    return ChunkId(number.to_bytes(12))


def node_id(number: int) -> NodeId:
    """Return an id that sorts by ``number``."""
    return NodeId(number.to_bytes(8))


def coordinates(rank: int, limit: int = 4) -> st.SearchStrategy[Coordinates]:
    """Coordinates below ``limit`` along each axis, so that they often agree."""
    return st.tuples(*[st.integers(0, limit - 1)] * rank)


def any_coords(rank: int) -> st.SearchStrategy[Coordinates]:
    """Coordinates near zero, near the largest, and anywhere between."""
    axis = st.integers(0, 5) | st.integers(2**32 - 4, 2**32 - 2) | st.integers(0, 2**32 - 2)
    return st.tuples(*[axis] * rank)


def ref_maps(
    rank: int, *, deletions: bool = False, coords: st.SearchStrategy[Coordinates] | None = None
) -> st.SearchStrategy[dict[Coordinates, ChunkRef | None]]:
    """References of one array by coordinates, in any order."""
    values = st.none() | CHUNK_REFS if deletions else CHUNK_REFS
    keys = coords if coords is not None else coordinates(rank) | any_coords(rank)
    return st.dictionaries(keys, values, max_size=12)


def refs_of(rank: int, refs: Mapping[Coordinates, ChunkRef | None]) -> ChunkRefs:
    """Return sorted columns."""
    return ChunkRefs.from_mapping(rank, refs).sort()


def as_dict(refs: ChunkRefs) -> dict[Coordinates, ChunkRef | None]:
    """Return every reference as an object, in the order of the rows."""
    return {tuple(coords): _plain(refs.ref(row)) for row, coords in enumerate(refs.coords.tolist())}


def comparable(log: TransactionLog) -> object:
    """Return a log in a form that ``==`` understands."""
    touched = {node: (it.shape, it.tobytes()) for node, it in log.updated_chunks.items()}
    return replace(log, updated_chunks={}, stray_chunks={}), touched


def _plain(ref: ChunkRef | None) -> ChunkRef | None:
    return InlineChunk(bytes(ref.data)) if isinstance(ref, InlineChunk) else ref


@contextmanager
def reading_repo_infos(*, by_columns: bool) -> Generator[None]:
    """Read all lists of repo infos by columns, or table by table as short ones are."""
    rooms = ("flatbuffers.single", "repo_info")
    modules = ("repo_info.log", "repo_info.snapshots")
    with pytest.MonkeyPatch.context() as patch:
        for name in (*rooms, *modules):
            patch.setattr(f"icechunk_async.format.{name}.columns_pay", lambda _: by_columns)
        yield
