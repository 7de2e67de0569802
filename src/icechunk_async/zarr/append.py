"""Put two appends behind one another: a solver for writers that both made an array longer.

Both sides began with an array of ``n`` elements along a dimension. The branch made it ``n + q``
long, and we made it ``n + p`` long: afterwards it has ``n + q + p`` elements, ours last. Where
chunk borders fit, our chunks are moved by reference. Where the branch's end lies within a chunk,
that chunk is decoded and written again; if ``q`` is no multiple of the chunk's length, so are all
of our new chunks.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.commit.conflicts import ConflictDetector
from icechunk_async.format.manifest.chunk import Coordinates, Kind
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.zarr_document import parse_document
from icechunk_async.zarr.documents import array_members

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Sequence

    import numpy.typing as npt

    from icechunk_async.engine.changes.change_set import ArrayChanges
    from icechunk_async.engine.commit.conflicts import (
        Answer,
        Clash,
        ConflictSolver,
        Preparation,
        Settled,
    )
    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.manifest.chunk import ChunkRef
    from icechunk_async.format.snapshot import Node
    from icechunk_async.zarr.decoding import ChunkCodec

__all__ = ["AppendSolver"]

# Each holds a decoded chunk of both sides.
_CONCURRENT_CHUNKS: Final = 16


@dataclass(frozen=True, slots=True)
class AppendSolver:
    """Put what both sides appended along a dimension behind one another, the branch's first.

    All arrays with this dimension must have grown by the same length on each side, and nothing
    else of their metadata may differ. A coordinate of the dimension, a one-dimensional array with
    its name, must continue ascending (or descending) across the seam: equal or overlapping times
    are left to the other solver, as is every other conflict. Use it for commits
    (``rebase_with=AppendSolver("time")``) and for merges.

    Attributes:
        dimension: the name of the dimension, as in the arrays' ``dimension_names``.
        default: decides everything else.

    Cost: no chunk is copied where the grids fit; otherwise only the chunks across the seam, or
    all appended ones if the branch did not append whole chunks.
    """

    dimension: str
    default: ConflictSolver = ConflictDetector()

    def solve(self, clash: Clash) -> Sequence[Answer] | Awaitable[Sequence[Answer]]:
        """Leave the conflicts that are no appends to the other solver."""
        return self.default.solve(clash)

    async def prepare(self, preparation: Preparation) -> Settled:
        """Move our appended chunks behind those of the branch; see `PreparingSolver`."""
        appends = [it for it in _appends(preparation, self.dimension) if it is not None]
        # Arrays along one dimension must stay equally long: one that appended something else leaves
        # all of them to the default.
        if not appends or len({(it.old, it.theirs, it.ours) for it in appends}) > 1:
            return {}
        for append in appends:
            if append.is_coordinate(self.dimension) and not await _continues(preparation, append):
                return {}
            if not await _old_part_agrees(preparation, append):
                return {}
        moved = [await _moved(preparation, append) for append in appends]
        for append, (changes, _) in zip(appends, moved, strict=True):
            append.carry_out(preparation, changes)
        return {it.node_id: both for it, (_, both) in zip(appends, moved, strict=True)}


@dataclass(frozen=True, slots=True)
class _Append:
    """An array that both sides made longer along one axis."""

    node_id: NodeId
    base: Node
    mine: Node
    """As our side has it."""
    branch: Node
    axis: int
    old: int
    """Elements along the axis in the common base."""
    theirs: int
    """Elements that the branch appended."""
    ours: int
    """Elements that we appended."""
    size: int
    """Elements of a chunk along the axis."""

    @property
    def first(self) -> int:
        """Our first chunk along the axis that has appended elements."""
        return self.old // self.size

    @property
    def length(self) -> int:
        """Elements along the axis in the end."""
        return self.old + self.theirs + self.ours

    def is_coordinate(self, dimension: str) -> bool:
        """Return whether it holds the coordinates of the dimension."""
        assert self.branch.array is not None
        return len(self.branch.array.dimensions) == 1 and (
            self.branch.path.rsplit("/", 1)[1] == dimension
        )

    def carry_out(self, preparation: Preparation, chunks: ChunkRefs) -> None:
        """Give the array its final length, and our changes their places."""
        document: dict[str, Any] = json.loads(self.branch.user_data)
        document["shape"][self.axis] = self.length
        data = json.dumps(document).encode()
        array = parse_document(data, self.branch.path).array
        changes = preparation.changes
        changes.updated[self.node_id] = replace(self.branch, user_data=data, array=array)
        # A new record: the old one has our chunks where those of the branch are, and marks of
        # deletion.
        mine: ArrayChanges = type(changes.chunks[self.node_id])(chunks.rank)
        mine.set_many(chunks)
        changes.chunks[self.node_id] = mine


def _appends(preparation: Preparation, dimension: str) -> Iterator[_Append | None]:
    """Iterate over the arrays that both sides made longer along the dimension."""
    # By node id, as the branch may have moved the array; then ours are put to its new place.
    base, branch = preparation.base.base.nodes, preparation.branch.base.nodes
    for node_id, node in preparation.changes.updated.items():
        paths = base.path_of(node_id), branch.path_of(node_id)
        if node.array is None or None in paths or node_id not in preparation.changes.chunks:
            continue
        assert paths[0] is not None
        assert paths[1] is not None
        yield _append_of(base[paths[0]], node, branch[paths[1]], dimension)


def _append_of(base: Node, mine: Node, branch: Node, dimension: str) -> _Append | None:
    if base.array is None or branch.array is None or mine.array is None:
        return None
    documents = [
        array_members(node.user_data, node.path, len(array.dimensions))
        for node, array in ((base, base.array), (mine, mine.array), (branch, branch.array))
    ]
    shapes: list[list[int]] = [it.pop("shape") for it in documents]
    names = branch.array.dimension_names or ()
    # But for the shape all three documents must be equal: with other codecs or another fill value
    # chunks of one side would be read by the document of the other.
    if dimension not in names or documents[0] != documents[1] or documents[0] != documents[2]:
        return None
    grid = documents[0]["chunk_grid"]
    axis = names.index(dimension)
    others = [tuple(it[:axis] + it[axis + 1 :]) for it in shapes]
    if grid["name"] != "regular" or len(set(others)) > 1:
        return None
    old, ours, theirs = (it[axis] for it in shapes)
    if ours <= old or theirs <= old:
        return None
    size = grid["configuration"]["chunk_shape"][axis]
    return _Append(base.id, base, mine, branch, axis, old, theirs - old, ours - old, size)


def _codec_of(append: _Append) -> ChunkCodec:
    """Return how the chunks of both sides are encoded."""
    from icechunk_async.zarr.decoding import ChunkCodec  # noqa: PLC0415 -- imports Zarr

    return ChunkCodec.of(append.branch.user_data)


async def _continues(preparation: Preparation, append: _Append) -> bool:
    """Return whether our coordinates continue those of the branch."""
    codec, size = _codec_of(append), append.size
    branch, mine = preparation.branch, preparation.ours
    end, length = append.old + append.theirs, append.old + append.ours
    # From the first element on: whether an axis ascends or descends shows nowhere else, and a
    # series that does neither has no seam to check.
    theirs = await _elements(branch, append.branch.path, codec, size, end)
    ours = await _elements(mine, append.mine.path, codec, size, length)
    joined = np.concatenate([theirs, ours[append.old :]])
    # Compared, not subtracted: unsigned numbers would wrap around, and texts have no difference.
    earlier, later = joined[:-1], joined[1:]
    return bool((later > earlier).all() or (later < earlier).all())


async def _old_part_agrees(preparation: Preparation, append: _Append) -> bool:
    """Return whether we left the elements before the old end unchanged that share its chunk.

    Others of these elements may be taken from the branch then.
    """
    inside = append.old % append.size
    if not inside:
        return True
    codec = _codec_of(append)
    refs = preparation.changes.chunks[append.node_id].columns()
    rows: list[list[int]] = refs.coords[refs.coords[:, append.axis] == append.first].tolist()

    async def agrees(row: list[int]) -> bool:
        mine = await codec.decode(await preparation.ours.read_chunk(append.mine.path, tuple(row)))
        base = await codec.decode(await preparation.base.read_chunk(append.base.path, tuple(row)))
        part = _along(append.axis, 0, inside, mine.ndim)
        # By bytes: a NaN equals itself then, and a negative zero is not zero.
        return mine[part].tobytes() == base[part].tobytes()

    return all(await bounded_map(agrees, rows, limit=_CONCURRENT_CHUNKS))


async def _elements(
    side: Workspace, path: str, codec: ChunkCodec, size: int, length: int
) -> npt.NDArray[Any]:
    """Return all elements of a one-dimensional array."""

    async def read(at: int) -> npt.NDArray[Any]:
        return await codec.decode(await side.read_chunk(path, (at,)))

    parts = await bounded_map(read, range(-(-length // size)), limit=_CONCURRENT_CHUNKS)
    return np.concatenate(parts)[:length]


async def _moved(
    preparation: Preparation, append: _Append
) -> tuple[ChunkRefs, frozenset[Coordinates]]:
    """Return our changes of an array with the appended chunks in their places.

    And the chunks among them that also hold what the branch appended.
    """
    refs = preparation.changes.chunks[append.node_id].columns()
    along = refs.coords[:, append.axis]
    kept = refs.take(along < append.first)
    # A chunk that we deleted holds fill values. Nothing has been written in its new place, behind
    # the branch's end, so there is nothing to delete.
    new = refs.take((along >= append.first) & (refs.kinds != Kind.DELETED))
    # If the branch appended whole chunks, ours only get other coordinates. Otherwise every cell of
    # ours moves to another place within a chunk, and all of them are written anew.
    if append.theirs % append.size:
        written = await _assembled(preparation, append, new)
        return ChunkRefs.concat([kept, written]).sort(), _shared(append, written)
    seam = new.coords[:, append.axis] == append.first
    whole = new if append.old % append.size == 0 else new.take(~seam)
    coords = whole.coords.copy()
    coords[:, append.axis] += np.uint32(append.theirs // append.size)
    parts = [kept, replace(whole, coords=coords)]
    both = frozenset[Coordinates]()
    if append.old % append.size and seam.any():
        written = await _assembled(preparation, append, new.take(seam))
        both = _shared(append, written)
        parts.append(written)
    return ChunkRefs.concat([*parts, ChunkRefs.empty(refs.rank)]).sort(), both


def _shared(append: _Append, written: ChunkRefs) -> frozenset[Coordinates]:
    """Return the written chunks in which the branch has elements, too."""
    end, along = append.old + append.theirs, written.coords[:, append.axis].astype(np.int64)
    rows: list[list[int]] = written.coords[along * append.size < end].tolist()
    return frozenset(tuple(row) for row in rows)


async def _assembled(preparation: Preparation, append: _Append, new: ChunkRefs) -> ChunkRefs:
    """Write the chunks that the elements of some of our chunks end up in."""
    targets: dict[Coordinates, list[Coordinates]] = {}
    rows: list[list[int]] = new.coords.tolist()
    for row in rows:
        for place in _places(append, row[append.axis]):
            target = (*row[: append.axis], place, *row[append.axis + 1 :])
            targets.setdefault(target, []).append(tuple(row))
    codec = _codec_of(append)

    async def write(target: Coordinates) -> tuple[Coordinates, ChunkRef]:
        values = await codec.decode(
            await preparation.branch.read_chunk(append.branch.path, target)
            if target[append.axis] * append.size < append.old + append.theirs
            else None
        )
        # Codecs may decode into memory that they do not let anybody write to.
        values = values.copy()
        for source in targets[target]:
            mine = await codec.decode(await preparation.ours.read_chunk(append.mine.path, source))
            _copy_part(append, mine, source[append.axis], values, target[append.axis])
        return target, await preparation.store(await codec.encode(values))

    written = await bounded_map(write, list(targets), limit=_CONCURRENT_CHUNKS)
    refs: dict[Coordinates, ChunkRef | None] = dict(written)
    return ChunkRefs.from_mapping(new.rank, refs)


def _places(append: _Append, chunk: int) -> range:
    """Return the chunks along the axis that the appended elements of one of our chunks go to."""
    start, stop = _appended(append, chunk)
    if start >= stop:
        return range(0)
    first, last = start + append.theirs, stop - 1 + append.theirs
    return range(first // append.size, last // append.size + 1)


def _appended(append: _Append, chunk: int) -> tuple[int, int]:
    """Return the appended elements in one of our chunks, by their places on our side."""
    start = max(chunk * append.size, append.old)
    return start, min((chunk + 1) * append.size, append.old + append.ours)


def _copy_part(
    append: _Append,
    mine: npt.NDArray[Any],
    chunk: int,
    values: npt.NDArray[Any],
    target: int,
) -> None:
    """Copy the elements of one of our chunks that belong into a chunk of the result."""
    # 6 old elements, 3 of theirs, 2 of ours, chunks of 4: ours are 6 and 7 on our side, in chunk 1,
    # and become 9 and 10, in chunk 2. There `low` is 5, and they are at 1 and 2.
    start, stop = _appended(append, chunk)
    low = target * append.size - append.theirs
    start, stop = max(start, low), min(stop, low + append.size)
    if start >= stop:
        return
    source = _along(append.axis, start - chunk * append.size, stop - chunk * append.size, mine.ndim)
    values[_along(append.axis, start - low, stop - low, mine.ndim)] = mine[source]


def _along(axis: int, start: int, stop: int, rank: int) -> tuple[slice, ...]:
    every = itertools.repeat(slice(None))
    return tuple(slice(start, stop) if at == axis else next(every) for at in range(rank))
