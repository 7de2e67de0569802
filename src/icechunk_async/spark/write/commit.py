"""The commit of a write of rows: the chunks of all tasks, and those that tasks share.

A chunk of which several tasks have rows is joined here, and written once. That takes the memory of
some 32 MiB of rows, and of a few chunks.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from zarr.core.sync import sync

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import IncompleteWriteError
from icechunk_async.spark.grid import Block
from icechunk_async.spark.shared import open_array, read_objects, without_chunks
from icechunk_async.spark.write.cooperative import Answer
from icechunk_async.spark.write.parts import Parts, block_rows, put_block
from icechunk_async.spark.write.task import RowsWritten, numbered

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt
    import zarr
    from pyspark.sql.datasource import WriterCommitMessage

    from icechunk_async.errors import DuplicateRowsError
    from icechunk_async.format.manifest.chunk import NativeChunk
    from icechunk_async.spark.grid import ChunkGrid
    from icechunk_async.spark.write.cooperative import CooperativeWrite, Published, Transaction
    from icechunk_async.spark.write.plan import WritePlan
    from icechunk_async.spark.write.target import WriteTarget
    from icechunk_async.sync.conflicts import ConflictSolver
    from icechunk_async.sync.store import IcechunkStore

    type Ints = npt.NDArray[np.int64]
    type Arrays = dict[str, zarr.Array[Any]]

__all__ = ["LATE_ROWS", "check_complete", "commit_rows"]

_log = logging.getLogger(__name__)

LATE_ROWS: Final = "spark-late-rows"
"""Property of a commit: how many of its rows were late, and replaced values or were left out."""
# Compressed bytes of rows that are in memory together; the rows themselves are made chunk by chunk.
_GROUP_BYTES: Final = 32 << 20
# Each has the rows and the old values of a chunk in memory.
_CONCURRENT: Final = 8


def commit_rows(
    plan: WritePlan,
    messages: Sequence[WriterCommitMessage | None],
    transaction: Transaction | None,
    *,
    metadata: Mapping[str, Any] | None = None,
    rebase_with: ConflictSolver | None = None,
) -> Published | None:
    """Publish the changes of all tasks; return None if there is nothing to do, or no row.

    Args:
        plan: the plan of the tasks.
        messages: the results of the tasks.
        transaction: names the write.
        metadata: properties of the snapshot.
        rebase_with: decides conflicts; by default the plan's options say how.

    Raises:
        IncompleteWriteError: a task did not answer.
        DuplicateRowsError: two tasks had rows of one cell.
        ConflictError: another writer was first, or changed coordinates by which rows were placed.

    Cost: reads, joins and writes each chunk of which several tasks had rows.
    """
    check_complete(messages)
    written = numbered([it for it in messages if isinstance(it, RowsWritten)])
    target = plan.target
    if target is None or plan.write.is_done(transaction):
        return None
    # Only now that the branch is known not to have the batch: of one that landed, rows are refused
    # because their coordinates exist since.
    for refusal in (it.refusal for it in written if it.refusal is not None):
        raise refusal
    # A batch of a stream may have late rows alone, which are dropped. The branch remembers it all
    # the same, with their number.
    if transaction is None and not any(it.rows for it in written):
        return None

    growth = target.growth
    appended = [it.appended for it in written if it.appended is not None]
    new = None
    if growth is not None:
        allow = plan.options.cast == "allow"
        new = growth.filled(appended, fill_gaps=plan.options.fill_gaps, allow=allow)
    joiner, shared = _joiner(plan, written)

    def finish(store: IcechunkStore) -> None:
        # Before the arrays get their final length: a chunk's region is that of the grid by which
        # tasks placed rows.
        if joiner is not None:
            joiner.join(store, shared, target.old)
        if growth is not None and new is not None:
            growth.finish(store, new)

    late = sum(it.late for it in written)
    if late:
        how = "replaced values" if plan.options.late_rows == "overwrite" else "were left out"
        _log.warning("%d late rows %s.", late, how)
    return plan.write.commit(
        _without(written, joiner, shared),
        len(written),
        plan.options.message,
        metadata={**(metadata or {}), **({LATE_ROWS: late} if late else {})},
        transaction=transaction,
        rebase_with=rebase_with or plan.options.solver,
        finish=finish,
        # Also dimensions without an array: another writer may have created one.
        unchanged=[plan.options.path_of(axis.name) for axis in target.axes],
    )


def check_complete(messages: Sequence[WriterCommitMessage | None]) -> None:
    """Check that all tasks answered: Spark's message of one that failed is None.

    Raises:
        IncompleteWriteError: one did not.
    """
    missing = [at for at, it in enumerate(messages) if it is None]
    if missing:
        raise IncompleteWriteError(
            f"{len(missing)} of {len(messages)} tasks did not answer. Nothing was published; write "
            "again.",
            missing=missing,
            repeated=[],
        )


def _joiner(plan: WritePlan, written: Sequence[RowsWritten]) -> tuple[Joiner | None, Any]:
    """Return the numbers of the chunks that tasks share, and their joiner if there is one.

    Raises:
        DuplicateRowsError: a task has every cell of a chunk, and another has some.
    """
    parts = [it.parts for it in written]
    shared, twice = shared_chunks(parts), twice_whole(parts)
    if plan.target is None or (not len(shared) and twice is None):
        return None, shared
    grid = plan.target.grid(plan.write.fork().store)
    changes = [it.answer.changes for it in written]
    joiner = Joiner(plan.write, plan.target, grid, parts, changes)
    if twice is not None:
        raise joiner.refuse_whole(twice)
    return joiner, shared


def _without(written: Sequence[RowsWritten], joiner: Joiner | None, shared: Any) -> list[Answer]:
    """Return the answers of tasks without the chunks that the commit writes."""
    if joiner is None:
        return [it.answer for it in written]
    found: list[Answer] = []
    for it in written:
        stored = it.parts.chunks[it.parts.stored]
        again = np.intersect1d(stored, shared)
        changes = it.answer.changes
        if len(again):
            coords = np.stack(np.unravel_index(again, joiner.grid.counts), axis=1)
            # Two tasks that stored one chunk would be a clash, and neither has the rows of the
            # other: the commit writes it anew, and their objects are garbage.
            changes = without_chunks(changes, coords.astype(np.uint32))
        found.append(Answer(it.answer.task, changes))
    return found


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
    # A whole chunk leaves no cell for rows of others. Two tasks with the whole of it are as wrong
    # as one with a part.
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
        # Only for tasks that stored a chunk which is joined: a fork holds all references of its
        # task.
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
        # The bytes before a chunk say its group, so that chunks stay in order: sizes of 20, 20 and
        # 5 MiB are in the groups 0, 0 and 1.
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
        # Groups are contiguous in the ascending numbers of chunks, so that two ends describe one.
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
        # One request for each object of a task, however many of its blocks are wanted.
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
        # Only here can two tasks with one cell be found: each of them saw its own rows alone.
        if len(found) < len(every):
            raise self.duplicate(chunk, int(found[counts > 1][0]))
        joined = {name: np.concatenate(it) for name, it in values.items()}
        return Block(chunk, every, joined, whole=len(every) == size)
