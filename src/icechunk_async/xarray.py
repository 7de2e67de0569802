"""xarray's datasets in sessions, for asyncio.

xarray itself blocks, so threads do its work and the event loop stays free. For code that blocks
see `icechunk_async.sync.xarray`. Needs ``xarray``; ``dask[array]`` for Dask arrays.
"""

# Dask and xarray have types for one half of themselves.
# pyright: basic

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import anyio.to_thread
import xarray
from xarray.core import indexing

from icechunk_async.datasets.queries import (
    Answers,
    Part,
    Selected,
    answer_dataset,
    check_lazy,
    lazy_array,
    names_of,
    queried_name,
)
from icechunk_async.errors import WrongTypeError
from icechunk_async.handles import SessionHandle
from icechunk_async.session import ForkSession as NativeFork
from icechunk_async.session import Session
from icechunk_async.sync.opening import RepositoryHandle, Source
from icechunk_async.sync.session import ForkSession
from icechunk_async.sync.session import Session as BlockingSession
from icechunk_async.sync.store import IcechunkStore as BlockingStore
from icechunk_async.sync.xarray import write_lazy
from icechunk_async.zarr.datasets import write_known
from icechunk_async.zarr.queries.by_chunk import described
from icechunk_async.zarr.store import IcechunkStore

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, MutableMapping, Sequence

    from icechunk_async.session import AnySession
    from icechunk_async.zarr.datasets import Mode, Region
    from icechunk_async.zarr.queries.measuring import AggregateFunction

__all__ = ["open_aggregates", "open_dataset", "open_where", "to_icechunk"]


async def to_icechunk(
    obj: xarray.DataArray | xarray.Dataset,
    session: Session,
    *,
    group: str | None = None,
    mode: Mode | None = None,
    safe_chunks: bool = True,
    align_chunks: bool = False,
    append_dim: Hashable | None = None,
    region: Region | None = None,
    encoding: Mapping[Any, Any] | None = None,
    chunkmanager_store_kwargs: MutableMapping[Any, Any] | None = None,
    split_every: int | None = None,
) -> None:
    """Write a dataset into a group of a writable session; nothing is committed.

    Arguments and errors as `icechunk_async.sync.xarray.to_icechunk`.

    Cancellation: takes effect when the thread is done; the session may have some of the changes.
    """
    _check_session(session)
    write = partial(
        write_known,
        obj,
        session.store,
        group=group,
        mode=mode,
        safe_chunks=safe_chunks,
        align_chunks=align_chunks,
        append_dim=append_dim,
        region=region,
        encoding=encoding,
    )
    # Zarr's own loop calls the store from another thread, which sessions allow.
    lazy = await anyio.to_thread.run_sync(write)
    if lazy.sources:
        # Dask's workers, on threads or in other processes, write into copies of this fork.
        fork = await session.fork()
        work = partial(
            write_lazy, lazy, ForkSession(_handle(fork)), chunkmanager_store_kwargs, split_every
        )
        written = await anyio.to_thread.run_sync(work)
        await session.merge(written.handle.fork)
        if fork.fork_id in session.unmerged_forks:  # all was written in forks of it
            # What was written came back as another fork of it; this one is empty and would count as
            # unmerged.
            session.discard_fork(fork)


def _check_session(given: object) -> None:
    if not isinstance(given, Session | NativeFork):
        raise WrongTypeError(
            f"Datasets are written to and read from a session of icechunk_async, not a "
            f"{type(given).__module__}.{type(given).__name__}. Repository.writable_session and "
            "readonly_session begin one; icechunk_async.sync.xarray takes those of code that "
            "blocks."
        )


def _handle(session: AnySession) -> SessionHandle:
    """Return how the blocking facade uses a session, and how other processes open it."""
    assert session.origin is not None  # every session of a repository has one
    return SessionHandle(RepositoryHandle(Source.of(session.origin)), session)


# Apart from `IcechunkStore`, whose pickling is refused where it would lose changes without a word.
class _Store(IcechunkStore):
    """A native store; pickled copies are stores of the blocking facade, for other processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        is_fork = isinstance(self.session, NativeFork)
        session = (ForkSession if is_fork else BlockingSession)(_handle(self.session))
        return BlockingStore, (session, self.read_only)


async def open_dataset(session: Session, group: str | None = None, **kwargs: Any) -> xarray.Dataset:
    """Open a group of a session as a dataset; ``await dataset.load_async()`` reads its values.

    Datasets of read-only sessions pickle; a copy opens the repository where it is used.

    Args:
        session: any session.
        group: path of the group; the root if None.
        kwargs: for ``xarray.open_dataset``, such as ``chunks`` or ``decode_times``.

    Raises:
        FileNotFoundError: there is no such group.
        InvalidInputError: it is no session of asyncio.
    """
    _check_session(session)
    opening = partial(
        xarray.open_dataset,
        cast("Any", _Store(session, read_only=session.read_only)),  # not in xarray's types
        engine="zarr",
        group=group,
        consolidated=False,
        zarr_format=3,
        **kwargs,
    )
    return await anyio.to_thread.run_sync(opening)


async def open_where(
    session: Session, conditions: str, *, group: str | None = None, **kwargs: Any
) -> xarray.DataArray:
    """Return the values that fulfil conditions, and missing values elsewhere, as a lazy array.

    `icechunk_async.sync.xarray.open_where` for asyncio: ``await found.isel(time=0).load_async()``
    reads only the chunks that statistics (`Repository.analyze`) and coordinates leave open. Other
    ways to its values, such as ``found.values``, read as well, and block.

    Args:
        session: any session; it must be open while values are read.
        conditions: as for `Session.where`, such as ``"t2m > 320 and lat > 60"``.
        group: path of the group; the root if None.
        kwargs: for ``xarray.open_dataset``, but ``chunks``; times are not decoded in conditions.

    Returns:
        An array with the coordinates of the group; integers become floats, for values that are
        missing. One of more than 53 bits that would be rounded is an error when it is read.

    Raises:
        FileNotFoundError: there is no such group.
        InvalidInputError: a condition cannot be understood, or has no order to compare.
        NodeNotFoundError: there is no such array.

    Cancellation: no effect, also while values are read.

    Cost: opens the group; each access as `Session.where`, and one request for each chunk of the
    array that holds a match. Memory: the part that is asked for.
    """
    check_lazy(kwargs)
    dataset = await open_dataset(session, group, chunks=None, **kwargs)
    name = queried_name(dataset, conditions)
    return lazy_array(
        dataset, name, _AwaitedSelected(session, conditions, group or "/", dataset.variables[name])
    )


async def open_aggregates(
    session: Session,
    path: str,
    functions: Sequence[AggregateFunction] | AggregateFunction,
    *,
    where: str | None = None,
    per_chunk_of: Sequence[str] | str = (),
) -> xarray.Dataset:
    """Return aggregates of an array as a lazy dataset, with one variable for each.

    `icechunk_async.sync.xarray.open_aggregates` for asyncio: ``await found.load_async()`` computes
    all variables at once. Other ways to its values, such as ``found["max"].values``, block.

    Args:
        session: any session; it must be open while values are computed.
        path: the array, as for `Session.aggregate`.
        functions: what to return, such as ``["min", "max", "mean"]``.
        where: conditions as for `Session.aggregate`.
        per_chunk_of: dimensions that stay, with one value for each chunk along them.

    Returns:
        As `icechunk_async.sync.xarray.open_aggregates`; so are the costs.

    Raises:
        NodeNotFoundError: there is no array.
        InvalidInputError: its values have no order, an argument cannot be understood, or there are
            more than five million chunks along `per_chunk_of`.

    Cancellation: no effect, also while values are computed.
    """
    names, dims = names_of(functions), names_of(per_chunk_of)
    question = await described(session.store, path, names, where, dims)
    around = None
    if dims:
        others = question.other_dims
        around = await open_dataset(session, question.group, chunks=None, drop_variables=others)
    return answer_dataset(Answers(question, _handle(session), session), around)


class _AwaitedSelected(Selected):
    """Selected cells that a session of asyncio reads; those who block get them by the facade."""

    def __init__(
        self, session: Session, conditions: str, group: str, variable: xarray.Variable
    ) -> None:
        super().__init__(BlockingSession(_handle(session)), conditions, group, variable)
        self._native = session

    def __reduce__(self) -> tuple[Any, ...]:
        return Selected, (self.session, self.conditions, self.group, self.variable)

    async def async_getitem(self, key: indexing.ExplicitIndexer) -> Any:
        """Read a part."""
        return await indexing.async_explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self._read_async
        )

    async def _read_async(self, key: tuple[Any, ...]) -> Any:
        part = Part(key, self.variable)
        if part.found.size:
            found = await self._native.where(self.conditions, group=self.group, region=part.region)
            async for cells in found:
                values = await self.variable[cells.box].load_async()
                part.place(cells, values.to_numpy())
        return part.result()
