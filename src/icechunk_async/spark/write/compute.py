"""Computing arrays chunk by chunk in Spark's tasks, with one commit at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import zarr

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.datasets import open_array
from icechunk_async.spark.grid.chunks import ChunkGrid, check_disjoint, share
from icechunk_async.spark.write.cooperative import CooperativeWrite, run_tasks, total_cores
from icechunk_async.spark.write.transactions import Published, is_published
from icechunk_async.sync import Repository

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt
    from pyspark.sql import SparkSession

    from icechunk_async.spark.grid.chunks import Region
    from icechunk_async.spark.write.transactions import Transaction
    from icechunk_async.sync import ForkSession, Session
    from icechunk_async.sync.conflicts import ConflictSolver
    from icechunk_async.sync.store import IcechunkStore

__all__ = ["Input", "NewArray", "map_chunks", "write_region"]

_TASKS_PER_CORE = 4


@dataclass(frozen=True, slots=True)
class Input:
    """An array that is read.

    Attributes:
        path: of the array.
        select: which part is needed for a region of the output, as an index of the array. Without
            it the part at the same place: axes are matched by the names of their dimensions
            where both arrays have names, else one by one, and an axis that the output does not
            have is read whole.
    """

    path: str
    select: Callable[[Region], Any] | None = None


@dataclass(frozen=True, slots=True)
class NewArray:
    """An array to be made, within the same commit.

    Attributes:
        path: of the array; nothing is there yet.
        shape: its shape.
        chunks: the shape of its chunks.
        dtype: type of its elements.
        dimension_names: of its axes.
        fill_value: where nothing was computed; for None the type's default.
        attributes: of the array.
        more: other arguments of ``zarr.create_array``, such as ``compressors``.
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
        """Make it."""
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
    """Compute every chunk of an array from the parts of others that it needs, and commit once.

    Deriving, changing the shape of chunks, and statistics along an axis are all this: say how a
    block of the output comes from blocks of the inputs.

    Args:
        spark: a session.
        repository: an open one, or its URL.
        fn: gets a NumPy block of each input, and answers the block of the output; None leaves the
            chunk as it is. It travels to the executors.
        inputs: arrays to read: paths, or :class:`Input` where the part that is needed is not the
            same as that which is computed.
        output: path of an array that is overwritten, or one to be made.
        branch: is committed to.
        read_from: read inputs from this session, perhaps of another repository; it only reads.
            Without it they are read from the tip of the branch as it is in the beginning.
        message: of the commit.
        metadata: of the commit.
        transaction: names the write: where the branch holds it already, no job is run.
        rebase_with: decides conflicts with commits that came meanwhile; those that touched an
            input are refused whatever it says.
        tasks: how many; each computes a part of the chunks, one after the other. Without it, four
            for each core.

    Raises:
        InvalidInputError: axes of an input cannot be matched.
        ContainsArrayError: a new array is there already.
        ConflictError: another writer was first, and ``rebase_with`` did not settle it, or it
            changed an input that was read from the branch.
        PySparkException: a task failed too often; what ``fn`` raised is in the message.

    After an error nothing is visible. Memory of a task: the blocks of one chunk of the output.
    """
    repo = Repository.open(repository) if isinstance(repository, str) else repository
    if is_published(repo, branch, transaction):  # and so is an array that it made
        return Published(repo.lookup_branch(branch), committed=False)
    write, grid, path = _begin(repo, output, branch)
    reads = tuple(_checked(write, it, path, read_from) for it in inputs)
    count = tasks or max(1, min(grid.chunks, total_cores(spark) * _TASKS_PER_CORE))

    def work(fork: ForkSession, task: int) -> None:
        target = open_array(fork.store, path, write=True)
        # Its own fork: else it would read what it wrote, where the output is an input.
        source = write.fork().store if read_from is None else read_from.store
        arrays = [open_array(source, it.path) for it in reads]
        for chunk in share(grid.chunks, count, task):
            region = grid.region(chunk)
            blocks = [
                np.asarray(array[_selection(it, region)])
                for array, it in zip(arrays, reads, strict=True)
            ]
            place_block(target, region, fn(*blocks))

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
    """Place arrays that tasks load or compute into regions of an array, and commit once.

    Args:
        spark: a session.
        repository: an open one, or its URL.
        load: answers the values of a region, given what stands for them (a file's name, for
            example). It travels to the executors.
        parts: regions, each of whole chunks, and what stands for their values; one task each.
        output: path of an array, or one to be made.
        branch: is committed to.
        message: of the commit.
        metadata: of the commit.
        transaction: names the write: where the branch holds it already, no job is run.
        rebase_with: decides conflicts with commits that came meanwhile.

    Raises:
        InvalidInputError: regions are outside of the array, end inside of chunks or overlap.
        ConflictError, PySparkException: as in :func:`map_chunks`.

    After an error nothing is visible.
    """
    repo = Repository.open(repository) if isinstance(repository, str) else repository
    if is_published(repo, branch, transaction):  # and so is an array that it made
        return Published(repo.lookup_branch(branch), committed=False)
    write, grid, path = _begin(repo, output, branch)
    check_disjoint(grid, [region for region, _ in parts])

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
    """Return an input with the rule by which its part is selected."""
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
    """Return for each axis of an input the axis of the output at the same place, if there is one.

    Raises:
        InvalidInputError: they have no names and not the same number of axes, or differ in length.
    """
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
                f"output has {output_shape[other]}. Give Input(path, select=...), to say which "
                "part of it is needed."
            )
    return axes


@dataclass(frozen=True, slots=True)
class _SameRegion:
    """Selects the part of an array at the same place as a region of the output."""

    axes: tuple[int | None, ...]

    def __call__(self, region: Region) -> Region:
        return tuple(slice(None) if axis is None else region[axis] for axis in self.axes)


def _selection(it: Input, region: Region) -> Any:
    assert it.select is not None  # _checked has made sure
    return it.select(region)


def _names(array: zarr.Array[Any]) -> list[str | None]:
    names: Any = getattr(array.metadata, "dimension_names", None)
    return list(names) if names else [None] * len(array.shape)


def place_block(target: zarr.Array[Any], region: Region, block: npt.NDArray[Any] | None) -> None:
    """Write a block.

    Raises:
        InvalidInputError: it is of another shape, of a type that could lose more than precision,
            or has an integer or a text that the array cannot hold.
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
            f"The block for {region} of {target.path!r} has the shape {values.shape}, and the "
            f"region has {wanted}."
        )
    if not np.can_cast(values.dtype, target.dtype, "same_kind"):
        raise InvalidInputError(
            f"The block for {region} of {target.path!r} is of {values.dtype}, which the array's "
            f"{target.dtype} cannot hold. Convert it, for example with astype."
        )
    stored = values.astype(target.dtype, copy=False)
    if target.dtype.kind in "iuSU" and not np.array_equal(stored, values):
        value = values[stored != values][0]
        raise InvalidInputError(
            f"The block for {region} of {target.path!r} has {value!s}, which the array's "
            f"{target.dtype} cannot hold. Make the array with a larger type, or change such values."
        )
    target[region] = stored
