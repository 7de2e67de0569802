"""When objects were written by the storage's clock: of what is old, and of chunks by their ids."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import bounded_map, closing
from icechunk_async.format.id_set import IdSet, parse_ids
from icechunk_async.format.ids import ALPHABET, ChunkId
from icechunk_async.format.layout import CHUNKS, chunk_key
from icechunk_async.storage import ObjectInfo
from icechunk_async.storage.extensions import FolderListing

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from icechunk_async.format.id_set import Ids
    from icechunk_async.storage import Storage

__all__ = ["FEW_CHUNKS", "are_older", "chunk_times", "is_older"]

_ONE_SECOND: Final = timedelta(seconds=1)
_ONE_MICROSECOND: Final = timedelta(microseconds=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

FEW_CHUNKS: Final = 32
"""Chunk objects that are looked up one by one; for more, the folder is listed once."""
_SIDE_BY_SIDE: Final = 16
_PAGE: Final = 1000
_FEW: Final = 10_000
"""Objects that are listed sequentially before parts of the folder are listed concurrently."""


def are_older(modified_us: npt.NDArray[np.int64], cutoff: datetime) -> npt.NDArray[np.bool_]:
    """Return for many objects what `is_older` returns for one; times are since 1970."""
    cutoff_us = (cutoff - _EPOCH) // _ONE_MICROSECOND
    # The last microsecond of a whole second counts: a store that cuts times may have written it
    # then.
    latest = np.where(modified_us % 1_000_000 == 0, modified_us + 999_999, modified_us)
    return latest < cutoff_us


def is_older(written_at: datetime, cutoff: datetime) -> bool:
    """Return whether an object was certainly written before a cutoff, by the store's clock.

    Many stores list whole seconds: the actual time may be anything up to the next one.
    """
    if written_at.microsecond == 0:
        return written_at + _ONE_SECOND <= cutoff
    return written_at < cutoff


async def chunk_times(storage: Storage, backend: object, ids: Ids) -> npt.NDArray[np.int64]:
    """Return when chunk objects were written, in microseconds since 1970; -1 if one is gone.

    Args:
        storage: where they are.
        backend: the storage without its policies, which may tell states cheaply.
        ids: their ids, ``(n, 12)``, each once, ascending as `IdSet.ids` returns them.

    Cost: no request of this storage's budget where the backend can tell; one for each of up to
    `FEW_CHUNKS` objects; one listing of the folder for more.
    """
    names = [str(ChunkId(row.tobytes())) for row in ids]
    # Local disks: one look at each file is cheaper than a listing, and each counts as no request.
    if isinstance(backend, FolderListing):
        found = await backend.states(CHUNKS, names)
        return np.where(found.present, found.modified_us, -1)
    if len(names) <= FEW_CHUNKS:
        times = await bounded_map(lambda name: _time(storage, name), names, limit=_SIDE_BY_SIDE)
        return np.array(times, np.int64).reshape(len(names))
    return await _listed(storage, ids)


async def _time(storage: Storage, name: str) -> int:
    """Return when one chunk object was written. A listing is answered by no cache."""
    key = chunk_key(ChunkId.parse(name))
    entries = storage.list_prefix(key)
    async with closing(entries):
        async for entry in entries:
            if isinstance(entry, ObjectInfo) and entry.key == key:
                return clock.to_us(entry.last_modified)
    return -1


async def _listed(storage: Storage, ids: Ids) -> npt.NDArray[np.int64]:
    """Return the times of many chunk objects: list the folder, large ones in parts at a time."""
    # A folder may hold millions of chunks. Each page is matched and dropped, so that memory is that
    # of the ids asked for.
    wanted = IdSet()
    wanted.add(ids)
    times = np.full(len(wanted), -1, np.int64)

    def note(page: list[ObjectInfo]) -> None:
        # Several listings call this, each between two awaits, so no two of them write at once.
        found, valid = parse_ids([it.key.partition("/")[2] for it in page])
        places = wanted.find(found)
        modified = np.array([clock.to_us(it.last_modified) for it in page], np.int64)
        here = valid & (places >= 0)
        times[places[here]] = modified[here]

    last = await _list(storage, f"{CHUNKS}/", note, most=_FEW)
    if last is not None:
        # Ids are random, so each first letter has 1/32 of the objects, and none is listed twice:
        # after `chunks/3F...` come the rest of `chunks/3` and the letters above it.
        prefixes = [f"{CHUNKS}/{letter}" for letter in ALPHABET]
        rest = [it for it in prefixes if it >= last[: len(it)]]
        await bounded_map(
            lambda prefix: _list(storage, prefix, note, start_after=last),
            rest,
            limit=_SIDE_BY_SIDE,
        )
    return times[wanted.find(ids)]


async def _list(
    storage: Storage,
    prefix: str,
    note: Callable[[list[ObjectInfo]], None],
    *,
    start_after: str | None = None,
    most: int | None = None,
) -> str | None:
    """List a part by the page; return the last key if it stopped after ``most`` objects."""
    page: list[ObjectInfo] = []
    seen = 0
    entries = storage.list_prefix(prefix, start_after=start_after)
    async with closing(entries):
        async for entry in entries:
            if isinstance(entry, ObjectInfo):
                page.append(entry)
                seen += 1
            if len(page) == _PAGE:
                note(page)
                if most is not None and seen >= most:
                    return page[-1].key
                page = []
    note(page)
    return None
