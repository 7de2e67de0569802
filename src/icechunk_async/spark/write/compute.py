"""Arrays computed chunk by chunk in tasks, with one commit at the end.

A task that reads a block, computes and writes it, one after the other, waits twice for the storage
for each block. So a few threads read the next blocks and write the last ones meanwhile. The
computation itself stays on the thread of the caller, one block at a time and in order.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import zarr

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.grid import ChunkGrid, check_disjoint, share
from icechunk_async.spark.shared import budget_of, in_task, open_array
from icechunk_async.spark.tasks import check_result_size, default_tasks_of
from icechunk_async.spark.write.cooperative import (
    CooperativeWrite,
    Published,
    is_published,
    run_tasks,
)
from icechunk_async.sync import Repository

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    import numpy.typing as npt
    from pyspark.sql import SparkSession

    from icechunk_async.spark.grid import Region
    from icechunk_async.spark.write.cooperative import Transaction
    from icechunk_async.sync import ForkSession, Session
    from icechunk_async.sync.conflicts import ConflictSolver
    from icechunk_async.sync.store import IcechunkStore

    type Block = npt.NDArray[Any]

__all__ = [
    "AHEAD_BYTES",
    "Input",
    "NewArray",
    "compute_blocks",
    "map_chunks",
    "match_axes",
    "place_block",
    "write_region",
]

AHEAD_BYTES: Final = 64 << 20
"""Decoded bytes of a task that are read ahead or wait to be written."""
_MOST_BLOCKS: Final = 4
_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class Input:
    """An array to read.

    Attributes:
        path: path of the array.
        select: returns the index of the array that is needed for a region of the output. By
            default the same region: axes are matched by dimension names if both arrays have
            them, else by position, and an axis that the output lacks is read whole.
    """

    path: str
    select: Callable[[Region], Any] | None = None


@dataclass(frozen=True, slots=True)
class NewArray:
    """An array to create in the same commit.

    Attributes:
        path: path of the array; it must be free.
        shape: shape of the array.
        chunks: shape of its chunks.
        dtype: type of its elements.
        dimension_names: names of its dimensions.
        fill_value: value where nothing is computed; None for the default of the type.
        attributes: attributes of the array.
        more: other arguments of `zarr.create_array`, such as `compressors`.
    """

    path: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: Any
    dimension_names: Sequence[str] | None = None
    fill_value: Any = None
    attributes: Mapping[str, Any] | None = None
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def make(self, store: IcechunkStore) -> None:
        """Create the array."""
        arguments: dict[str, Any] = {
            "shape": self.shape,
            "chunks": self.chunks,
            "dtype": self.dtype,
            "dimension_names": self.dimension_names,
            "fill_value": self.fill_value,
            "attributes": None if self.attributes is None else dict(self.attributes),
            **self.more,
        }
        making = cast("Any", zarr.create_array)  # pyright: ignore[reportUnknownMemberType]
        making(store, name=self.path, **arguments)


def map_chunks(
    spark: SparkSession,
    repository: Repository | str,
    fn: Callable[..., npt.NDArray[Any] | None],
    inputs: Sequence[str | Input],
    output: str | NewArray,
    *,
    branch: str = "main",
    read_from: Session | None = None,
    message: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    transaction: Transaction | None = None,
    rebase_with: ConflictSolver | None = None,
    tasks: int | None = None,
) -> Published:
    """Compute every chunk of an array from parts of other arrays, and commit once.

    Use it to derive arrays, to change the shape of chunks, and for statistics along an axis: say
    how a block of the output follows from blocks of the inputs.

    Args:
        spark: a session.
        repository: an open repository, or its URL.
        fn: called with a NumPy block of each input; returns the block of the output, or None to
            leave the chunk unchanged. It is pickled to the executors.
        inputs: arrays to read: paths, or `Input` if other regions are needed than the one that
            is computed.
        output: path of an array to overwrite, or an array to create.
        branch: the branch to commit to.
        read_from: read-only session to read inputs from, perhaps of another repository; by
            default they are read from the tip of the branch at the start.
        message: message of the commit.
        metadata: properties of the commit.
        transaction: names the write; if the branch holds it already, no job is run.
        rebase_with: decides conflicts with commits made since the start. Commits that touched an
            input are a conflict in any case.
        tasks: number of tasks, each computing some of the chunks one after the other; by default
            one to four for each core, with 64 MiB each at least. Say more if `fn` takes long for
            some chunks.

    Raises:
        InvalidInputError: axes of an input cannot be matched, or there are more chunks than
            `spark.driver.maxResultSize` has room for at 25 bytes each, which is what a reference to
            an object takes at most; no task ran.
        ContainsArrayError: the array to create exists.
        ConflictError: another writer was first and `rebase_with` did not settle it, or another
            writer changed an input that was read from the branch.
        PySparkException: a task failed too often; the message has the error of `fn`.

    After an error nothing is visible. Memory of a task: the blocks of one chunk of the output, and
    up to 64 MiB of blocks that are read ahead or wait to be written while `fn` runs. Memory of the
    driver's Python: about 200 bytes for each chunk that is written.
    """
    repo = Repository.open(repository) if isinstance(repository, str) else repository
    if is_published(repo, branch, transaction):  # first: an array that it created exists
        return Published(repo.lookup_branch(branch), committed=False)
    write, grid, path = _begin(repo, output, branch)
    check_result_size(spark, grid.chunks)
    reads = tuple(_checked(write, it, path, read_from) for it in inputs)
    count = tasks or default_tasks_of(spark, grid.chunks, _size(write, path, reads, read_from))
    write = write.for_job(spark, count)  # for the forks that `work` reads from
    spread = write.budget if read_from is None else budget_of(read_from).in_session(spark, count)

    def work(fork: ForkSession, task: int) -> None:
        target = open_array(fork.store, path, write=True)
        # A second fork, so that a task does not read its own output if that is an input too.
        source = write.fork() if read_from is None else in_task(read_from, spread)
        arrays = [open_array(source.store, it.path) for it in reads]

        def readers(region: Region) -> list[Callable[[], npt.NDArray[Any]]]:
            pairs = zip(arrays, reads, strict=True)
            return [partial(_read, array, _selection(it, region)) for array, it in pairs]

        regions = [grid.region(chunk) for chunk in share(grid.chunks, count, task)]
        compute_blocks(regions, readers, fn, partial(place_block, target))

    answers = run_tasks(spark, write, count, work)
    return write.commit(
        answers,
        count,
        message or f"Computed {path}",
        metadata=metadata,
        transaction=transaction,
        rebase_with=rebase_with,
        unchanged=[it.path for it in reads] if read_from is None else (),
    )


def write_region[T](
    spark: SparkSession,
    repository: Repository | str,
    load: Callable[[T], npt.NDArray[Any]],
    parts: Sequence[tuple[Region, T]],
    output: str | NewArray,
    *,
    branch: str = "main",
    message: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    transaction: Transaction | None = None,
    rebase_with: ConflictSolver | None = None,
) -> Published:
    """Load or compute regions of an array in tasks, and commit once.

    Args:
        spark: a session.
        repository: an open repository, or its URL.
        load: called with the item of a region, such as a file name; returns its values. It is
            pickled to the executors.
        parts: regions of whole chunks, and the item of each; one task each.
        output: path of an array to write to, or an array to create.
        branch: the branch to commit to.
        message: message of the commit.
        metadata: properties of the commit.
        transaction: names the write; if the branch holds it already, no job is run.
        rebase_with: decides conflicts with commits made since the start.

    Raises:
        InvalidInputError: regions are outside of the array, end inside of chunks, overlap, or have
            more chunks than `spark.driver.maxResultSize` has room for, as in `map_chunks`; no task
            ran.
        ConflictError, PySparkException: as in `map_chunks`.

    After an error nothing is visible.
    """
    repo = Repository.open(repository) if isinstance(repository, str) else repository
    if is_published(repo, branch, transaction):  # first: an array that it created exists
        return Published(repo.lookup_branch(branch), committed=False)
    write, grid, path = _begin(repo, output, branch)
    # Before any task runs: the commit would find two tasks with one chunk after all the work.
    check_result_size(spark, check_disjoint(grid, [region for region, _ in parts]))

    def work(fork: ForkSession, task: int) -> None:
        region, item = parts[task]
        place_block(open_array(fork.store, path, write=True), region, load(item))

    answers = run_tasks(spark, write, len(parts), work)
    return write.commit(
        answers,
        len(parts),
        message or f"Wrote {len(parts)} regions of {path}",
        metadata=metadata,
        transaction=transaction,
        rebase_with=rebase_with,
    )


def _begin(
    repository: Repository, output: str | NewArray, branch: str
) -> tuple[CooperativeWrite, ChunkGrid, str]:
    prepare, path = (None, output) if isinstance(output, str) else (output.make, output.path)
    write = CooperativeWrite.begin(repository, branch, prepare=prepare)
    return write, ChunkGrid.of(open_array(write.fork().store, path)), path


def _checked(
    write: CooperativeWrite, given: str | Input, output: str, read_from: Session | None
) -> Input:
    """Return an input with a rule that selects its part."""
    it = Input(given) if isinstance(given, str) else given
    if it.select is not None:
        return it
    store = write.fork().store
    target = open_array(store, output)
    source = store if read_from is None else read_from.store
    array = open_array(source, it.path)
    axes = match_axes(_names(array), array.shape, _names(target), target.shape, it.path)
    return Input(it.path, _SameRegion(axes))


def match_axes(
    names: Sequence[str | None],
    shape: Sequence[int],
    output_names: Sequence[str | None],
    output_shape: Sequence[int],
    path: str,
) -> tuple[int | None, ...]:
    """Return for each axis of an input the matching axis of the output, or None.

    Raises:
        InvalidInputError: there are no names and the number of axes differs, or lengths differ.
    """
    # A name that occurs twice, as in a matrix of x by x, says nothing about either axis.
    if all(names) and all(output_names) and len(set(names)) == len(names):
        axes = tuple(output_names.index(it) if it in output_names else None for it in names)
    elif len(shape) == len(output_shape):
        axes = tuple(range(len(shape)))
    else:
        raise InvalidInputError(
            f"The axes of {path!r} cannot be matched with those of the output: there are "
            f"{len(shape)} and {len(output_shape)}, and not all have names. Name the dimensions "
            "of both arrays, or give Input(path, select=...)."
        )
    for axis, other in enumerate(axes):
        if other is not None and shape[axis] != output_shape[other]:
            raise InvalidInputError(
                f"Axis {axis} of {path!r} has {shape[axis]} places, and axis {other} of the "
                f"output has {output_shape[other]}. Say which part is needed with "
                "Input(path, select=...)."
            )
    return axes


@dataclass(frozen=True, slots=True)
class _SameRegion:
    """Selects the same region as that of the output, by matched axes."""

    axes: tuple[int | None, ...]

    def __call__(self, region: Region) -> Region:
        return tuple(slice(None) if axis is None else region[axis] for axis in self.axes)


def _size(
    write: CooperativeWrite, output: str, reads: Sequence[Input], read_from: Session | None
) -> int:
    """Return the decoded bytes of an output and its inputs."""
    target = write.fork().store
    source = target if read_from is None else read_from.store
    arrays = [open_array(target, output), *(open_array(source, it.path) for it in reads)]
    return sum(it.nbytes for it in arrays)


def _read(array: zarr.Array[Any], selection: Any) -> npt.NDArray[Any]:
    return np.asarray(array[selection])


def _selection(it: Input, region: Region) -> Any:
    assert it.select is not None  # set by _checked
    return it.select(region)


def _names(array: zarr.Array[Any]) -> list[str | None]:
    names: Any = getattr(array.metadata, "dimension_names", None)
    return list(names) if names else [None] * len(array.shape)


def place_block(target: zarr.Array[Any], region: Region, block: npt.NDArray[Any] | None) -> None:
    """Write a block to a region; None leaves it unchanged.

    Values are cast as NumPy does, where that loses precision at most.

    Raises:
        InvalidInputError: the shape differs from the region's, the type could lose more than
            precision, or a value does not fit: a number or a time is too large, or a text too long.
    """
    if block is None:
        return
    wanted = tuple(
        (size if place.stop is None else place.stop) - (place.start or 0)
        for place, size in zip(region, target.shape, strict=True)
    )
    values = np.asarray(block)
    if values.shape != wanted:
        raise InvalidInputError(
            f"The block for {_shown(region)} of {target.path!r} has the shape {values.shape}, and "
            f"the region has {wanted}."
        )
    if not np.can_cast(values.dtype, target.dtype, "same_kind"):
        raise InvalidInputError(
            f"The block for {_shown(region)} of {target.path!r} is of {values.dtype}, which the "
            f"array's {target.dtype} cannot hold. Convert it, for example with astype."
        )
    # What overflows is refused below, by the value and its region; NumPy's warning names neither.
    with np.errstate(over="ignore"):
        try:
            stored = values.astype(target.dtype, copy=False)
        except OverflowError:  # of times; older versions of NumPy wrap them
            lost = [it for it in values.reshape(-1) if not _fits(it, target.dtype)]
        else:
            lost = list(values[_overflowed(values, stored)])
            if not lost:
                target[region] = stored
                return
    raise InvalidInputError(
        f"The block for {_shown(region)} of {target.path!r} has {lost[0]!s}, which the array's "
        f"{target.dtype} cannot hold. Make the array with a larger type, or change such values."
    )


def _shown(region: Region) -> str:
    """Return a region as NumPy's users write it, such as `[0:2, :]`."""
    ends = (["" if it is None else str(it) for it in (at.start, at.stop)] for at in region)
    return f"[{', '.join(':'.join(it) for it in ends)}]"


def _fits(value: Any, dtype: np.dtype[Any]) -> bool:
    try:
        np.asarray(value).astype(dtype)
    except OverflowError:
        return False
    return True


def _overflowed(values: npt.NDArray[Any], stored: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of the values that are others now, by more than precision."""
    kind = stored.dtype.kind
    if kind in "iuSU":
        return np.asarray(stored != values, np.bool_)
    if kind in "fc":
        return np.asarray(np.isfinite(values) & ~np.isfinite(stored), np.bool_)
    if kind in "mM" and np.can_cast(values.dtype, stored.dtype, "safe"):  # to a finer unit
        return np.asarray((stored.astype(values.dtype) != values) & ~np.isnat(values), np.bool_)
    return np.zeros(stored.shape, np.bool_)


def compute_blocks[T](
    places: Sequence[T],
    reads: Callable[[T], Sequence[Callable[[], Block]]],
    fn: Callable[..., Block | None],
    write: Callable[[T, Block], object],
) -> None:
    """Read, compute and write blocks.

    Args:
        places: of the blocks, in the order of computing.
        reads: returns a function for each input of a place, which reads it; called on threads.
        fn: called with the inputs of a place, on this thread; returns the block to write, whose
            memory it may use again, or None to write nothing.
        write: called on a thread with a place and its block.

    Raises:
        Exception: the first error of any of them. Blocks before it may have been written.

    Memory: the block that is computed, or the last one while the next is awaited, and up to
    `AHEAD_BYTES` of others. Where two blocks with their inputs are more than that, nothing
    overlaps.
    """
    if not places:
        return
    # The first block is not overlapped: only its size tells how many fit into `AHEAD_BYTES`.
    inputs = [read() for read in reads(places[0])]
    found = fn(*inputs)
    size = sum(it.nbytes for it in inputs) + (0 if found is None else np.asarray(found).nbytes)
    if found is not None:
        write(places[0], found)
    room = min(_MOST_BLOCKS, len(places) - 1, AHEAD_BYTES // max(1, size))
    del inputs, found
    if room < 1:
        for place in places[1:]:
            found = fn(*(read() for read in reads(place)))
            if found is not None:
                write(place, found)
        return
    pool = ThreadPoolExecutor(_THREADS, "icechunk-blocks")
    try:
        _overlapped(pool, places[1:], reads, fn, write, room=room)
    finally:
        # After an error nobody waits for reads that have not started; the others end first.
        pool.shutdown(cancel_futures=True)


def _overlapped[T](
    pool: ThreadPoolExecutor,
    places: Sequence[T],
    reads: Callable[[T], Sequence[Callable[[], Block]]],
    fn: Callable[..., Block | None],
    write: Callable[[T, Block], object],
    *,
    room: int,
) -> None:
    written: deque[tuple[Future[object], int]] = deque()
    for place, inputs in _ahead(pool, places, reads, room):
        found = fn(*inputs)
        if found is None:
            continue
        size = np.asarray(found).nbytes
        # Blocks may be larger than the first, which may have been none.
        while written and (len(written) >= room or _bytes(written) + size > AHEAD_BYTES):
            written.popleft()[0].result()
        # A copy: the function may return the same memory for the next block.
        written.append((pool.submit(write, place, np.array(found)), size))
    for future, _ in written:
        future.result()


def _bytes(written: Iterable[tuple[object, int]]) -> int:
    return sum(size for _, size in written)


def _ahead[T](
    pool: ThreadPoolExecutor,
    places: Sequence[T],
    reads: Callable[[T], Sequence[Callable[[], Block]]],
    room: int,
) -> Iterator[tuple[T, list[Block]]]:
    """Return the inputs of each place in order, while those of the next `room` places are read."""
    begun: deque[tuple[T, list[Future[Block]]]] = deque()
    rest = iter(places)
    while True:
        while len(begun) <= room and (place := next(rest, None)) is not None:
            begun.append((place, [pool.submit(read) for read in reads(place)]))
        if not begun:
            return
        place, futures = begun.popleft()
        yield place, [it.result() for it in futures]
