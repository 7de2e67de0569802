"""The chunks that versions of an array share: which bytes each version has at some places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.engine.changes.compare import common_rows, compare_refs
from icechunk_async.format.manifest.chunk import InlineChunk
from icechunk_async.format.manifest.refs import ChunkRefs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.versions.timeline import ArrayVersion
    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates, Extents
    from icechunk_async.format.snapshot import ManifestFileInfo

    type Places = npt.NDArray[np.uint32]

__all__ = ["shared_chunks"]

_CONCURRENT_VERSIONS: Final = 8
_CONCURRENT_CHUNKS: Final = 16
_FEW_CHUNKS: Final = 16
"""The most chunks of a manifest that are looked up one by one, perhaps in a part of its file."""

NO_CHUNK: Final = -1


async def shared_chunks(
    assets: Assets, states: Sequence[ArrayVersion], places: Places
) -> tuple[npt.NDArray[np.int32], list[ChunkRef]]:
    """Find the chunks of versions of an array at some places, each different one once.

    Args:
        assets: of the repository.
        states: versions, which have the same number of axes.
        places: coordinates of chunks, ``(m, rank)``, ascending.

    Returns:
        For each state and place the index of its chunk, ``(n, m)``, -1 where no chunk is; and
        the chunks.

    Raises:
        FormatError: a manifest is damaged.

    Cost: one request for each different manifest that has chunks there and is not cached; less of a
    large one if it is seekable and few places are asked for. Memory: the references of sixteen
    versions at these places, besides the result.
    """
    table = np.full((len(states), len(places)), NO_CHUNK, np.int32)
    if not len(places):
        return table, []
    chunks: dict[ChunkRef, int] = {}
    picker = _Picker(assets, places)
    last = ChunkRefs.empty(places.shape[1])
    for start in range(0, len(states), _CONCURRENT_VERSIONS):
        some = states[start : start + _CONCURRENT_VERSIONS]
        for row, refs in enumerate(await picker.pick(some), start):
            # Versions share most of their chunks: each row begins as the one before it, and only
            # references that differ are looked up in the table.
            changes = compare_refs(last, refs)
            last = refs
            if row:
                table[row] = table[row - 1]
            if changes.is_empty():
                continue
            if len(changes.before):
                table[row, common_rows(places, changes.before.coords)[0]] = NO_CHUNK
            if len(changes.after):
                where = common_rows(places, changes.after.coords)[0]
                table[row, where] = [_number(chunks, changes.after, it) for it in range(len(where))]
    return table, list(chunks)


def _number(chunks: dict[ChunkRef, int], refs: ChunkRefs, row: int) -> int:
    ref = refs.ref(row)
    assert ref is not None  # manifests hold no deletions
    if isinstance(ref, InlineChunk):
        ref = InlineChunk(bytes(ref.data))  # without the manifest that it is part of
    return chunks.setdefault(ref, len(chunks))


class _Picker:
    """Picks the references at some places out of manifests, each manifest once."""

    def __init__(self, assets: Assets, places: Places) -> None:
        self._assets = assets
        self._places = places
        # With the box, which says which of the places are looked for there.
        self._picked: dict[tuple[ManifestId, NodeId, Extents], ChunkRefs] = {}

    async def pick(self, states: Sequence[ArrayVersion]) -> list[ChunkRefs]:
        """Return the references of some versions, each in ascending order."""
        wanted = {
            (info.id, state.node_id, extents): (info, extents, state)
            for state in states
            for info, extents in state.manifests
        }
        # Those of the versions just before are kept, since most of them are in use still.
        self._picked = {key: it for key, it in self._picked.items() if key in wanted}
        new = {key: it for key, it in wanted.items() if key not in self._picked}
        found = await bounded_map(
            lambda it: self._search(*it), new.values(), limit=_CONCURRENT_VERSIONS
        )
        self._picked.update(zip(new, found, strict=True))
        return [self._of(state) for state in states]

    def _of(self, state: ArrayVersion) -> ChunkRefs:
        parts = [self._picked[info.id, state.node_id, box] for info, box in state.manifests]
        refs = ChunkRefs.concat([*parts, ChunkRefs.empty(len(state.grid))]).sort()
        # A manifest may still hold chunks that a smaller shape cut off, for older versions that
        # share it.
        inside = refs.inside(tuple((0, size) for size in state.grid))
        return refs if inside.all() else refs.take(inside)

    async def _search(
        self, info: ManifestFileInfo, extents: Extents, state: ArrayVersion
    ) -> ChunkRefs:
        """Return the references that a manifest has at the places."""
        rank = len(state.grid)
        places = self._places[_within(self._places, extents)]
        manifests = self._assets.manifests
        if not len(places):
            return ChunkRefs.empty(rank)
        if len(places) <= _FEW_CHUNKS:

            async def find(at: Coordinates) -> ChunkRef | None:
                return await manifests.find_ref(info.id, info.size_bytes, state.node_id, at)

            rows: list[list[int]] = places.tolist()
            listed = [tuple(row) for row in rows]
            found = await bounded_map(find, listed, limit=_CONCURRENT_CHUNKS)
            there = {at: it for at, it in zip(listed, found, strict=True) if it is not None}
            return ChunkRefs.from_mapping(rank, there) if there else ChunkRefs.empty(rank)
        manifest = await manifests.get(info.id, info.size_bytes)
        refs = manifest.refs(state.node_id, rank)
        if not len(refs):
            return refs
        size_bytes = refs.coords.nbytes
        rows_there, _ = await self._assets.compute(
            lambda: common_rows(refs.coords, places), size_bytes=size_bytes
        )
        # Without the ids and locations of all other references, or each version would keep whole
        # manifests.
        return refs.take(rows_there).narrow().compact()


def _within(places: Places, extents: Extents) -> npt.NDArray[np.bool_]:
    """Return which places lie in a box; that of an array of no axes is empty and holds all."""
    inside = np.ones(len(places), bool)
    for axis, (start, stop) in enumerate(extents):
        column = places[:, axis]
        inside &= (column >= start) & (column < stop)
    return inside
