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

from icechunk_async.sync.handles.repositories import RepositoryHandle, Source
from icechunk_async.sync.handles.sessions import SessionHandle
from icechunk_async.sync.session import ForkSession
from icechunk_async.sync.xarray import write_lazy
from icechunk_async.zarr.datasets import write_known

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, MutableMapping

    from icechunk_async.session import ForkSession as AsyncForkSession
    from icechunk_async.session import Session
    from icechunk_async.zarr.datasets import Mode, Region

__all__ = ["open_dataset", "to_icechunk"]


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
    lazy = await anyio.to_thread.run_sync(write)
    if lazy.sources:
        fork = await session.fork()
        handle = SessionHandle(RepositoryHandle(_source(fork)), fork)
        work = partial(
            write_lazy, lazy, ForkSession(handle), chunkmanager_store_kwargs, split_every
        )
        written = await anyio.to_thread.run_sync(work)
        await session.merge(written.handle.fork)
        if fork.fork_id in session.unmerged_forks:  # all was written in forks of it
            session.discard_fork(fork)


def _source(fork: AsyncForkSession) -> Source:
    """Return how workers in other processes open the repository of a fork."""
    assert fork.origin is not None  # every session of a repository has one
    return Source.of(fork.origin)


async def open_dataset(session: Session, group: str | None = None, **kwargs: Any) -> xarray.Dataset:
    """Open a group of a session as a dataset; ``await dataset.load_async()`` reads its values.

    Args:
        session: any session.
        group: path of the group; the root if None.
        kwargs: for ``xarray.open_dataset``, such as ``chunks`` or ``decode_times``.

    Raises:
        FileNotFoundError: there is no such group.
    """
    opening = partial(
        xarray.open_dataset,
        cast("Any", session.store),  # xarray's types know no stores
        engine="zarr",
        group=group,
        consolidated=False,
        zarr_format=3,
        **kwargs,
    )
    return await anyio.to_thread.run_sync(opening)
