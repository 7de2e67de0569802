"""Look for the objects that manifests refer to: are they there, and long enough?

Chunk objects are found in listings, one request for each 1000, or one by one if few are wanted or
the storage cannot list. Virtual objects are looked at one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map, closing
from icechunk_async.engine.upkeep.integrity.pieces import guarded
from icechunk_async.engine.upkeep.integrity.report import Finding, Level
from icechunk_async.engine.upkeep.sweep import object_name, pages
from icechunk_async.engine.virtual.chunks import check_unchanged
from icechunk_async.errors import (
    IcechunkError,
    ObjectNotFoundError,
    StorageError,
    VirtualAccessError,
    VirtualSourceChangedError,
)
from icechunk_async.format.id_set import IdSet, parse_ids
from icechunk_async.storage import ByteRange

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from icechunk_async.engine.upkeep.integrity.pieces import Pieces, VirtualObject
    from icechunk_async.engine.virtual.chunks import VirtualChunks
    from icechunk_async.storage import Storage

__all__ = ["NOT_AUTHORIZED", "broken_chunks", "broken_virtual"]

_AT_ONCE: Final = 64
_PAGE: Final = 1000
NOT_AUTHORIZED: Final = "not authorised"


async def broken_chunks(
    storage: Storage,
    needed: Pieces,
    level: Level,
    *,
    prefix: str = "chunks/",
    out_of: int | None = None,
) -> list[tuple[int, Finding]]:
    """Look for chunk objects, all of whose keys begin with a prefix.

    Args:
        storage: where they are.
        needed: one piece for each object, see `Pieces.objects`.
        level: *existence*, or above it to compare lengths as well.
        prefix: of the keys.
        out_of: the number of objects that a listing would go through, if these are a sample.

    Returns:
        What is wrong, with the rows of the pieces.

    Cost: one request for each 1000 objects listed; if the storage cannot list, or for few of many,
    one for each object that is needed.
    """
    if not len(needed):
        return []
    few = out_of is not None and len(needed) * _PAGE < out_of
    if storage.capabilities.listing and not few:
        sizes = await _listed(storage, needed, prefix)
    else:
        sizes = await _asked(storage, needed)
    return _short(needed, sizes, level)


async def _listed(storage: Storage, needed: Pieces, prefix: str) -> npt.NDArray[np.int64]:
    wanted = IdSet()
    wanted.add(needed.ids)
    sizes = np.full(len(needed), -1, np.int64)
    listed = pages(storage, prefix)
    async with closing(listed):
        async for page in listed:
            ids, valid = parse_ids([object_name(it.key) for it in page])
            rows = np.where(valid, wanted.find(ids), -1)
            lengths = np.array([it.size_bytes for it in page], np.int64)
            sizes[rows[rows >= 0]] = lengths[rows >= 0]
    return sizes


async def _asked(storage: Storage, needed: Pieces) -> npt.NDArray[np.int64]:
    async def size(row: int) -> int:
        try:
            return (await storage.get(needed.key(row), ByteRange(0, 0))).size_bytes
        except ObjectNotFoundError:
            return -1

    return np.array(await bounded_map(size, range(len(needed)), limit=_AT_ONCE), np.int64)


def _short(needed: Pieces, sizes: npt.NDArray[np.int64], level: Level) -> list[tuple[int, Finding]]:
    least = needed.lengths.astype(np.int64) if level >= Level.LENGTH else 0
    found: list[tuple[int, Finding]] = []
    for row in np.flatnonzero(sizes < least).tolist():
        key, size, count = needed.key(row), int(sizes[row]), int(needed.counts[row])
        if size < 0:
            missing = _finding("chunk", key, "missing", f"{key!r} is missing.", count)
            found.append((row, missing))
        else:
            detail = f"{key!r} has {size} bytes, and {int(needed.lengths[row])} are needed."
            found.append((row, _finding("chunk", key, "too short", detail, count)))
    return found


def _finding(kind: str, location: str, problem: str, detail: str, references: int) -> Finding:
    level = Level.LENGTH if problem == "too short" else Level.EXISTENCE
    return Finding(kind, location, problem, level.name.lower(), detail, references)


async def broken_virtual(
    virtual: VirtualChunks,
    needed: Mapping[VirtualObject, tuple[int, int]],
    level: Level,
) -> tuple[list[tuple[VirtualObject, Finding]], dict[VirtualObject, str]]:
    """Look at virtual objects.

    Args:
        virtual: reads them.
        needed: for each, the bytes that it must have, and the number of references.
        level: *existence*, or above it to compare lengths as well.

    Returns:
        What is wrong with them; and those that could not be looked at, with the reason:
        `NOT_AUTHORIZED`, or what the store said.

    Cost: one request for each, several at a time.
    """
    unread: dict[VirtualObject, str] = {}

    async def look(
        item: tuple[VirtualObject, tuple[int, int]],
    ) -> tuple[VirtualObject, Finding] | None:
        it, (size, count) = item
        location = it[0]
        try:
            retrieved = await virtual.fetch(location, ByteRange(0, 0))
            check_unchanged(guarded(it), retrieved)
        except VirtualAccessError:
            unread[it] = NOT_AUTHORIZED
            return None
        except StorageError as error:  # the store is in trouble: this says nothing of the object
            unread[it] = str(error)
            return None
        except IcechunkError as error:
            gone = isinstance(error.__cause__, ObjectNotFoundError)
            changed = isinstance(error, VirtualSourceChangedError)
            problem = "missing" if gone else "changed" if changed else "unreadable"
            return it, _finding("virtual", location, problem, str(error), count)
        if level < Level.LENGTH or retrieved.size_bytes >= size:
            return None
        detail = f"{location!r} has {retrieved.size_bytes} bytes, and {size} are needed."
        return it, _finding("virtual", location, "too short", detail, count)

    order = sorted(needed.items(), key=lambda item: (item[0][0], item[0][1] or "", item[0][2]))
    found = await bounded_map(look, order, limit=_AT_ONCE)
    return [it for it in found if it is not None], unread
