"""The arrays of a query: what their numbers mean, and what is known of chunks without reading."""

from __future__ import annotations

import math
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import zarr.api.asynchronous as za

from icechunk_async._runtime.concurrency import gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError, IcechunkError, InvalidInputError
from icechunk_async.format.statistics import cells_within, chunk_keys, row_type
from icechunk_async.zarr.documents import array_members
from icechunk_async.zarr.queries.meaning import meaning_of
from icechunk_async.zarr.queries.measuring import of_constant

if TYPE_CHECKING:
    import numpy.typing as npt
    from zarr import AsyncArray

    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.snapshot import Node
    from icechunk_async.format.statistics import Keys, Rows
    from icechunk_async.zarr.queries.meaning import Mask, Meaning, Numbers
    from icechunk_async.zarr.store import IcechunkStore

    type Box = tuple[slice, ...]
    type Coords = npt.NDArray[np.int64]

__all__ = ["MOST_CELLS", "KnownChunks", "QueriedArray"]

MOST_CELLS: Final = 1 << 31
"""The most cells of a chunk: sums of halves of more integers could overflow."""
# Chunks are told apart by their number in C order, in 64 bits with a sign.
_MOST_CHUNKS: Final = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class QueriedArray:
    """An array with a regular grid whose values have an order."""

    node: Node
    meaning: Meaning
    array: AsyncArray[Any]
    chunks: tuple[int, ...]
    """Cells along each axis of what is stored as one chunk: of a shard, if there are such."""

    @classmethod
    async def open(cls, store: IcechunkStore, path: str) -> Self:
        """Open an array.

        Raises:
            NodeNotFoundError: there is no array.
            InvalidInputError: its grid is not regular, or its values cannot be queried.
            FormatError: its metadata document is damaged.
        """
        node = store.workspace.array(path)
        assert node.array is not None
        rank = len(node.array.dimensions)
        grid = array_members(node.user_data, path, rank)["chunk_grid"]["name"]
        if grid != "regular":
            raise InvalidInputError(
                f"Values of {path!r} cannot be queried: its chunk grid is {grid!r}, and only "
                "regular ones are supported."
            )
        if math.prod(node.array.grid) > _MOST_CHUNKS:
            raise InvalidInputError(
                f"Values of {path!r} cannot be queried: its grid has {math.prod(node.array.grid)} "
                f"chunks, and at most {_MOST_CHUNKS} can be told apart."
            )
        array = await _opened(store, path)
        meaning = meaning_of(path, bytes(node.user_data), np.dtype(array.dtype))
        return cls(node, meaning, array, array.chunks if array.shards is None else array.shards)

    @property
    def path(self) -> str:
        """Where it is."""
        return self.meaning.path

    @property
    def shape(self) -> tuple[int, ...]:
        """Its cells along each axis."""
        return self.array.shape

    @property
    def dims(self) -> tuple[str | None, ...]:
        """The names of its axes."""
        names = getattr(self.array.metadata, "dimension_names", None)
        return tuple(names) if names else (None,) * len(self.shape)

    @property
    def bytes_a_chunk(self) -> int:
        """The size of a decoded chunk."""
        return math.prod(self.chunks) * self.meaning.cell_bytes

    async def read(self, box: Box) -> Numbers:
        """Read a part of the array as stored numbers or texts, of the shape of the box.

        Raises:
            FormatError: a chunk is missing or damaged, or a text is not Unicode.
        """
        try:
            values: Any = await self.array.getitem(box)
        except (IcechunkError, MemoryError):
            raise
        except Exception as error:  # codecs raise anything
            raise FormatError(
                f"A part of {self.path!r}, {list(box)}, cannot be decoded: {type(error).__name__}: "
                f"{str(error)[:200]}. 'verify' says which chunks are damaged."
            ) from error
        return self.meaning.numbers_of(values).reshape(_shape(box))

    async def known_chunks(self, store: IcechunkStore) -> KnownChunks:
        """Return its chunks, with the statistics of those that have any.

        Cost: one request for each manifest that is not cached, a listing, and one request for each
        object with statistics that is not cached. Memory in proportion to the chunks.
        """
        workspace = store.workspace
        files = workspace.assets.statistics
        # The listing of statistics does not depend on the manifests.
        refs, ids = await gather(workspace.all_refs(self.path), files.find(self.node.id))
        table = await files.load(ids, self.meaning.digest, self.meaning.kind)
        return KnownChunks.of(self, refs, table)


async def _opened(store: IcechunkStore, path: str) -> AsyncArray[Any]:
    try:
        return await za.open_array(  # pyright: ignore[reportUnknownMemberType]
            store=store, path=path.strip("/"), mode="r"
        )
    except IcechunkError:
        raise
    except Exception as error:  # a codec or data type that is not installed, or anything damaged
        raise InvalidInputError(
            f"Values of {path!r} cannot be queried: Zarr does not open the array "
            f"({type(error).__name__}: {str(error)[:200]})."
        ) from error


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(it.stop - it.start for it in box)


@dataclass(frozen=True, slots=True, eq=False)
class KnownChunks:
    """The chunks of an array that exist, and the statistics of some of them."""

    owner: QueriedArray
    refs: ChunkRefs
    """In ascending order."""
    keys: Keys
    has_key: Mask
    places: npt.NDArray[np.int64]
    """The row of each chunk in ``table``; -1 if its statistics are unknown."""
    table: Rows
    numbers: npt.NDArray[np.int64] = field(repr=False)
    """The number of each chunk in the grid, counted in C order; ascending."""

    @classmethod
    def of(cls, owner: QueriedArray, refs: ChunkRefs, table: Rows) -> Self:
        """Find the rows of chunks in statistics, which are in the order of their keys."""
        within = cells_within(refs.coords, owner.shape, owner.chunks)
        keys, has_key = chunk_keys(refs, within, owner.chunks)
        if math.prod(owner.chunks) >= MOST_CELLS:
            # Sums over more cells than that may have overflowed, so no row about them is believed.
            has_key[:] = False
        # Rows are in the order of their keys. A key behind the last has the place `len(table)`,
        # which is no row.
        places = np.searchsorted(table["key"], keys).astype(np.int64)
        inside = np.flatnonzero(places < len(table))
        known = has_key.copy()
        known[places >= len(table)] = False
        known[inside] &= table["key"][places[inside]] == keys[inside]
        cells = within.prod(axis=1, dtype=np.int64)
        rows = np.flatnonzero(known)
        found = table[places[rows]]
        # A row about another number of cells cannot be about this chunk.
        known[rows] = found["count"] + found["nulls"] == cells[rows].astype(np.uint64)
        numbers = _numbers(refs.coords.astype(np.int64), owner)
        return cls(owner, refs, keys, has_key, np.where(known, places, -1), table, numbers)

    def rows_of(self, coords: Coords) -> npt.NDArray[np.int64]:
        """Return the rows of chunks among the references, ``(n,)``; -1 for those not stored."""
        # `numbers` ascends as the references do, so a binary search finds each.
        wanted = _numbers(coords, self.owner)
        rows = np.searchsorted(self.numbers, wanted)
        found = np.minimum(rows, max(len(self.numbers) - 1, 0))
        there = np.zeros(len(wanted), bool)
        if len(self.numbers):
            there = self.numbers[found] == wanted
        return np.where(there, found, -1).astype(np.int64)

    def statistics(self, coords: Coords) -> tuple[Rows, Mask]:
        """Return the statistics of chunks, ``(n,)``, and which are known; others are zeros.

        Chunks that are not stored have the fill value in all cells.
        """
        rows = self.rows_of(coords)
        found = np.zeros(len(coords), row_type(self.owner.meaning.kind))
        stored = rows >= 0
        places = np.full(len(coords), -1, np.int64)
        places[stored] = self.places[rows[stored]]
        known = places >= 0
        found[known] = self.table[places[known]]
        empty = np.flatnonzero(~stored)
        if len(empty):
            owner = self.owner
            cells = cells_within(coords[empty], owner.shape, owner.chunks).prod(axis=1)
            # What readers see where no chunk is: known without any statistics.
            fill = owner.meaning.numbers_of(owner.array.metadata.fill_value)
            found[empty] = of_constant(owner.meaning, fill, cells)
            known[empty] = True
        return found, known

    def lengths(self, coords: Coords) -> npt.NDArray[np.int64]:
        """Return the stored bytes of chunks, ``(n,)``; 0 for those not stored."""
        rows = self.rows_of(coords)
        found = np.zeros(len(coords), np.int64)
        found[rows >= 0] = self.refs.lengths[rows[rows >= 0]].astype(np.int64)
        return found


def _numbers(coords: Coords, owner: QueriedArray) -> npt.NDArray[np.int64]:
    """Return the places of chunks in the grid, in C order."""
    assert owner.node.array is not None
    found = np.zeros(len(coords), np.int64)
    for axis, size in enumerate(owner.node.array.grid):
        found = found * size + coords[:, axis]
    return found
