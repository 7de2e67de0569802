"""Chunks of which several tasks have rows: joined by the commit, each written once.

Memory: some 32 MiB of rows, and a few chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from zarr.core.sync import sync

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.spark.grid.chunks import Block
from icechunk_async.spark.shared import open_array, read_objects
from icechunk_async.spark.write.parts import Parts, block_rows
from icechunk_async.spark.write.put import put_block

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt
    import zarr

    from icechunk_async.errors import DuplicateRowsError
    from icechunk_async.format.manifest.refs import NativeChunk
    from icechunk_async.spark.grid.chunks import ChunkGrid
    from icechunk_async.spark.write.cooperative import CooperativeWrite
    from icechunk_async.spark.write.target import WriteTarget
    from icechunk_async.sync.store import IcechunkStore

    type Ints = npt.NDArray[np.int64]
    type Arrays = dict[str, zarr.Array[Any]]

__all__ = ["Joiner", "shared_chunks", "twice_whole"]

_GROUP_BYTES: Final = 32 << 20
_CONCURRENT: Final = 8


def shared_chunks(parts: Sequence[Parts]) -> Ints:
    """Return the numbers of the chunks that the commit has to write, ascending. Pure.

    These are chunks that several tasks have rows of, and those that no task stored.
    """
    chunks = np.concatenate([np.empty(0, np.int64), *(it.chunks for it in parts)])
    stored = np.concatenate([np.empty(0, np.bool_), *(it.stored for it in parts)])
    found, counts = np.unique(chunks, return_counts=True)
    return np.union1d(found[counts > 1], chunks[~stored]).astype(np.int64)


def twice_whole(parts: Sequence[Parts]) -> int | None:
    """Return a chunk with a row for every cell in one task, and with rows in another. Pure."""
    whole = np.concatenate([np.empty(0, np.int64), *(it.whole for it in parts)])
    found, counts = np.unique(whole, return_counts=True)
    chunks = np.concatenate([np.empty(0, np.int64), *(it.chunks for it in parts)])
    twice = np.union1d(found[counts > 1], np.intersect1d(found, chunks))
    return int(twice[0]) if len(twice) else None


@dataclass(frozen=True, slots=True)
class Joiner:
    """Joins the rows of shared chunks.

    Attributes:
        write: the write of the tasks.
        target: its arrays.
        grid: their common chunk grid.
        parts: the chunks of each task.
        changes: what each task changed, in which the chunks are that it stored.
    """

    write: CooperativeWrite
    target: WriteTarget
    grid: ChunkGrid
    parts: Sequence[Parts]
    changes: Sequence[bytes]

    def duplicate(self, chunk: int, cell: int = 0) -> DuplicateRowsError:
        """Return the error for rows of one cell in several tasks."""
        index = self.grid.index(chunk, cell)
        return self.target.duplicate(index)

    def refuse_whole(self, chunk: int) -> DuplicateRowsError:
        """Return the error for a chunk that one task has whole, and another has rows of."""
        for it in self.parts:
            for at in np.flatnonzero(it.chunks == chunk).tolist():
                data = self._blocks([(it, np.array([at]))])[0][0]
                return self.duplicate(chunk, int(block_rows(data, self._size(chunk), {})[0][0]))
        return self.duplicate(chunk)

    def join(self, store: IcechunkStore, chunks: Ints, old: tuple[int, int] | None) -> None:
        """Write shared chunks.

        Args:
            store: of the session that has the changes of all tasks, without shared chunks.
            chunks: their numbers, ascending.
            old: see `put_block`.

        Raises:
            DuplicateRowsError: two rows have the same cell.
            FormatError: what a task handed over is damaged.
        """
        arrays = self._arrays(store, write=True)
        places = [np.flatnonzero(np.isin(it.chunks, chunks)) for it in self.parts]
        stored = {
            task: self._arrays(self.write.fork_with(self.changes[task]).store)
            for task, (it, mine) in enumerate(zip(self.parts, places, strict=True))
            if it.stored[mine].any()
        }
        for group in self._groups(chunks, places):
            self._join_group(arrays, stored, group, places, old)

    def _arrays(self, store: IcechunkStore, *, write: bool = False) -> Arrays:
        return {it.name: open_array(store, path, write=write) for path, it in self.target.variables}

    def _size(self, chunk: int) -> int:
        return int(np.prod([it.stop - it.start for it in self.grid.region(chunk)]))

    def _groups(self, chunks: Ints, places: Sequence[Ints]) -> Iterator[Ints]:
        """Divide chunks into groups whose rows fit into memory together."""
        sizes = np.zeros(len(chunks), np.int64)
        for it, mine in zip(self.parts, places, strict=True):
            at = np.searchsorted(chunks, it.chunks[mine])
            np.add.at(sizes, at, it.spans[mine, 1] - it.spans[mine, 0])
        group = (np.cumsum(sizes) - sizes) // _GROUP_BYTES
        yield from np.split(chunks, np.flatnonzero(np.diff(group)) + 1)

    def _join_group(
        self,
        arrays: Arrays,
        stored: Mapping[int, Arrays],
        group: Ints,
        places: Sequence[Ints],
        old: tuple[int, int] | None,
    ) -> None:
        wanted = [
            (it, mine[(it.chunks[mine] >= group[0]) & (it.chunks[mine] <= group[-1])])
            for it, mine in zip(self.parts, places, strict=True)
        ]
        found = self._blocks(wanted)
        by_chunk: dict[int, list[tuple[int, bytes | memoryview]]] = {}
        for task, ((it, mine), blocks) in enumerate(zip(wanted, found, strict=True)):
            for at, data in zip(mine.tolist(), blocks, strict=True):
                by_chunk.setdefault(int(it.chunks[at]), []).append((task, data))

        async def one(chunk: int) -> None:
            block = await self._joined(arrays, stored, chunk, by_chunk[chunk])
            await put_block(arrays, self.grid, block, old)

        sync(bounded_map(one, group.tolist(), limit=_CONCURRENT))

    def _blocks(self, wanted: Sequence[tuple[Parts, Ints]]) -> list[list[bytes | memoryview]]:
        """Return blocks of every task; of an object one range is read that has them all."""
        ranges: list[tuple[NativeChunk, int, int]] = []
        plans: list[list[tuple[bytes | int, int, int]]] = []
        for it, mine in wanted:
            plan: list[tuple[bytes | int, int, int]] = []
            for piece in sorted(set(it.piece[mine].tolist())):
                source = it.pieces[int(piece)]
                spans = it.spans[mine[it.piece[mine] == piece]]
                first = 0
                if not isinstance(source, bytes):
                    first = int(spans[:, 0].min())
                    ranges.append((source, first, int(spans[:, 1].max())))
                at = source if isinstance(source, bytes) else len(ranges) - 1
                plan += [(at, start - first, stop - first) for start, stop in spans.tolist()]
            plans.append(plan)
        read = read_objects(self.write.repository, ranges)
        views = [memoryview(it) for it in read]
        return [
            [(views[at] if isinstance(at, int) else memoryview(at))[a:b] for at, a, b in plan]
            for plan in plans
        ]

    async def _joined(
        self,
        arrays: Arrays,
        stored: Mapping[int, Arrays],
        chunk: int,
        blocks: Sequence[tuple[int, bytes | memoryview]],
    ) -> Block:
        """Return the rows of a chunk from all tasks, also from chunks that tasks stored."""
        region, size = self.grid.region(chunk), self._size(chunk)
        dtypes = {name: array.dtype for name, array in arrays.items()}
        cells: list[Ints] = []
        values: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in arrays}
        for task, data in blocks:
            mine, given = block_rows(data, size, dtypes)
            cells.append(mine)
            for name in arrays:
                if given is None:
                    there = await stored[task][name].async_array.getitem(region)
                    values[name].append(np.asarray(there).reshape(-1)[mine])
                else:
                    values[name].append(given[name])
        every = np.concatenate(cells)
        found, counts = np.unique(every, return_counts=True)
        if len(found) < len(every):
            raise self.duplicate(chunk, int(found[counts > 1][0]))
        joined = {name: np.concatenate(it) for name, it in values.items()}
        return Block(chunk, every, joined, whole=len(every) == size)
