"""Writing Dask arrays: each worker writes its blocks, and a tree merges their change sets.

Needs `dask[array]`.
"""

# Dask and xarray are only partly typed.
# pyright: basic

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, cast

import dask.array as da
import numpy as np
import zarr
from dask.base import compute
from dask.layers import ArraySliceDep

from icechunk_async.errors import WrongTypeError
from icechunk_async.sync.distributed import extract_session, merge_sessions
from icechunk_async.sync.errors import InvalidInputError, translated
from icechunk_async.sync.session import ForkSession
from icechunk_async.zarr.blocks import check_blocks, within

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async.zarr.blocks import Region

type SimpleGraph = Mapping[str, tuple[object, ...]]
"""A Dask graph: tasks by key."""

__all__ = [
    "SimpleGraph",
    "computing_meta",
    "merge_sessions_array_kwargs",
    "session_merge_reduction",
    "store_dask",
]

_FIXED: Final = ("compute", "return_stored", "load_stored", "lock")
"""Arguments of `dask.array.store` that have fixed values here."""


def computing_meta[**P, R](func: Callable[P, R]) -> Callable[P, Any]:
    """Wrap a function so that Dask learns the type of its result without running it.

    Dask calls the functions of a reduction once with `computing_meta=True` and no data.
    """

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("computing_meta", False):
            # An array of objects, as the results are: of forks.
            return np.array([object()], dtype=object)
        return func(*args, **kwargs)

    return wrapper


@computing_meta
def merge_sessions_array_kwargs(
    *sessions: Any, axis: Any = None, keepdims: Any = None
) -> ForkSession:
    """Merge forks, with the arguments of a Dask reduction."""
    return merge_sessions(*sessions)


@computing_meta
def _session_of(block: Any, axis: Any = None, keepdims: Any = None) -> Any:
    return block if isinstance(block, ForkSession) else extract_session(block, axis, keepdims)


def store_dask(
    *,
    sources: list[da.Array],
    targets: list[zarr.Array[Any]],
    regions: list[tuple[slice, ...]] | None = None,
    split_every: int | None = None,
    **store_kwargs: Any,
) -> ForkSession:
    """Write Dask arrays into Zarr arrays of a fork, and return a fork with all changes.

    Blocks until everything is written, by the workers of any scheduler: threads, processes, a
    cluster. Pass the result to `Session.merge`, then commit.

    Args:
        sources: arrays to write.
        targets: arrays of `ForkSession.store`, one for each source.
        regions: the part of each target, slices of step 1; the whole if None.
        split_every: the number of change sets to merge at a time.
        store_kwargs: for `dask.compute`, such as `scheduler`.

    Raises:
        InvalidInputError: two blocks of a source share a chunk of its target, so that one
            could overwrite the other's part; or an argument is wrong, such as a target of a
            session that is no fork, whose commit would lack the values. Nothing was written.
        IcechunkError: a worker failed. The fork may have some of the changes: drop it.
    """
    unsupported = sorted(set(_FIXED) & set(store_kwargs))
    if unsupported:
        raise InvalidInputError(f"store_dask sets {', '.join(unsupported)} itself; leave it out.")
    if not sources or len(sources) != len(targets):
        raise InvalidInputError(
            f"There are {len(sources)} sources and {len(targets)} targets; pass one target for "
            "each source, and at least one."
        )
    wanted: Sequence[Region | None] = regions if regions is not None else [None] * len(sources)
    if len(wanted) != len(sources):
        raise InvalidInputError(
            f"There are {len(sources)} sources and {len(wanted)} regions; pass one for each."
        )
    with translated():
        for source, target, region in zip(sources, targets, wanted, strict=True):
            _check_target(target)
            check_blocks(source.chunks, target, region)
    written = [
        da.map_blocks(
            _write_block,
            source,
            # Gives each block its place in the source, also where a worker is another process.
            ArraySliceDep(source.chunks),
            target,
            region,
            dtype=object,
            meta=np.array([object()], dtype=object),
            token="icechunk-write",  # noqa: S106 - names tasks
        )
        for source, target, region in zip(sources, targets, wanted, strict=True)
    ]
    return session_merge_reduction(written, split_every=split_every, **store_kwargs)


def _check_target(target: zarr.Array[Any]) -> None:
    session = extract_session(target)
    if not isinstance(session, ForkSession):
        raise WrongTypeError(
            f"The target {target.path!r} is an array of a {type(session).__name__}, which would be "
            "committed without what the workers write. Open it from Session.fork().store, and pass "
            "what store_dask returns to Session.merge before the commit."
        )


def _write_block(
    block: npt.NDArray[Any], place: Region, target: zarr.Array[Any], region: Region | None
) -> ForkSession:
    """Write one block through a fork of the target's fork, since blocks share that one."""
    # Each task has its fork: those of one worker run on several threads, and one that Dask repeats
    # must begin without what its first run wrote.
    fork = extract_session(target).fork()
    array = zarr.open_array(fork.store, path=target.path, mode="r+")
    array[within(place, region)] = block
    return fork


def session_merge_reduction(
    arrays: da.Array | list[da.Array] | tuple[da.Array, ...],
    *,
    split_every: int | None,
    **store_kwargs: Any,
) -> ForkSession:
    """Compute arrays whose blocks are forks or arrays of their stores, and merge the forks.

    Args:
        arrays: each block is an array of a fork's store, or a fork.
        split_every: the number of forks to merge at a time.
        store_kwargs: for `dask.compute`.
    """
    several = arrays if isinstance(arrays, list | tuple) else [arrays]
    reduced = [_reduce(array, split_every) for array in several]
    computed: tuple[Any, ...] = compute(*reduced, **store_kwargs)
    return merge_sessions(*(cast("ForkSession", _item(it)) for it in computed))


def _reduce(array: da.Array, split_every: int | None) -> Any:
    merged: Any = da.reduction(
        array,
        name="icechunk-merge",
        chunk=_session_of,
        aggregate=merge_sessions_array_kwargs,
        split_every=split_every,
        # Blocks are forks, which NumPy cannot join.
        concatenate=False,
        dtype=object,
        meta=np.array([object()], dtype=object),
    )
    return merged


def _item(computed: Any) -> Any:
    return computed.item() if isinstance(computed, np.ndarray) else computed
