"""Deleting old objects that are not kept, folder by folder, while listing."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map, closing
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import Progress
from icechunk_async.engine.files.ages import are_older, is_older
from icechunk_async.errors import StorageError
from icechunk_async.format.id_set import IdSet, parse_ids
from icechunk_async.format.ids import ALPHABET
from icechunk_async.storage import DeleteFailure, ObjectInfo
from icechunk_async.storage.extensions import FolderListing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from datetime import datetime

    import numpy.typing as npt

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.storage import Storage

    type _Garbage = list[tuple[str, int]]
    """Keys, and the sizes of what they name."""

__all__ = [
    "BATCH",
    "Sweep",
    "Tally",
    "are_older",
    "chunk_ids",
    "delete_batch",
    "garbage_in",
    "id_set",
    "is_older",
    "object_name",
    "pages",
]


def chunk_ids(manifest: Manifest) -> npt.NDArray[np.uint8]:
    """Return the chunk objects that a manifest refers to, ``(n, 12)``, in arrays of any rank.

    The official engine keeps references of a wrong rank, so the objects they name are not garbage.
    """
    refs = [*manifest.arrays.values(), *manifest.strays.values()]
    return np.concatenate([np.empty((0, 12), np.uint8), *(it.chunk_ids for it in refs)])


def id_set(ids: Iterable[bytes]) -> IdSet:
    """Return a set of ids, few enough to be Python objects."""
    found = IdSet()
    found.add(np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 12))
    return found


# Google takes 100; its backend divides such a batch.
BATCH: Final = 1000
"""Keys of one delete request, at most: what S3 takes."""
_BATCHES: Final = 10
"""Delete requests that are made at a time."""
_NAMES: Final = BATCH * _BATCHES
"""Names that are looked at together."""
_FEW: Final = 10_000
"""Objects of a folder that are listed sequentially before parts are listed concurrently: for fewer,
concurrency costs more requests and saves nothing."""
_SIDE_BY_SIDE: Final = 16
_MOST_FAILURES: Final = 1000
"""The limit at which a folder is given up: deleting seems to fail in general."""


@dataclass(slots=True)
class Tally:
    """The progress in one folder so far."""

    count: int = 0
    size_bytes: int = 0
    seen: int = 0
    failures: list[DeleteFailure] = field(default_factory=list[DeleteFailure])


def object_name(key: str) -> str:
    """Return a key without its folder."""
    return key.partition("/")[2]


async def pages(
    storage: Storage, prefix: str, *, start_after: str | None = None
) -> AsyncIterator[list[ObjectInfo]]:
    """List objects by the page."""
    page: list[ObjectInfo] = []
    entries = storage.list_prefix(prefix, start_after=start_after)
    async with closing(entries):
        async for entry in entries:
            if isinstance(entry, ObjectInfo):
                page.append(entry)
            if len(page) == BATCH:
                yield page
                page = []
    if page:
        yield page


def garbage_in(page: list[ObjectInfo], keep: IdSet, cutoff: datetime) -> list[ObjectInfo]:
    """Return the objects that are old and not kept; foreign names are left alone."""
    # By age first: what is young may belong to a commit that landed after everything was marked.
    old = [it for it in page if is_older(it.last_modified, cutoff)]
    ids, valid = parse_ids([object_name(it.key) for it in old])
    doomed = valid & ~keep.contains(ids)
    return [it for it, gone in zip(old, doomed.tolist(), strict=True) if gone]


async def delete_batch(storage: Storage, keys: list[str]) -> list[DeleteFailure]:
    """Delete at most 1000 objects; return those that failed or whose outcome is unknown."""
    try:
        return await storage.delete(keys)
    except StorageError as error:  # the outcome of each is unknown
        return [DeleteFailure(key, error) for key in keys]


class Sweep:
    """Deletes old objects that are not kept, folder by folder."""

    def __init__(
        self,
        storage: Storage,
        cutoff: datetime,
        *,
        dry_run: bool,
        side_by_side: bool,
        folders: object = None,
        progress: ProgressCallback,
    ) -> None:
        """Sweep a storage.

        Args:
            storage: where the folders are.
            cutoff: objects written at this time or later stay.
            dry_run: only count.
            side_by_side: list parts of a large folder concurrently. That is slower if each listing
                reads the whole folder, as on local disks.
            folders: the backend, which may be able to list the names in a folder cheaply.
            progress: called with the number of objects looked at.
        """
        self._storage = storage
        self._side_by_side = side_by_side
        self._cutoff = cutoff
        self._dry_run = dry_run
        self._progress = progress
        self._folders = folders if isinstance(folders, FolderListing) else None
        self._beginnings: dict[str, list[ObjectInfo]] = {}

    async def look_ahead(self, folders: Sequence[str]) -> None:
        """List the beginnings of folders at once, each as much as one request returns.

        Most folders hold no more, and so their listings do not wait for each other. Objects are
        deleted folder by folder even so. Where a listing reads the whole folder and waits for
        nothing, as on local disks, this does nothing.
        """
        if self._side_by_side and self._folders is None:
            found = await bounded_map(self._beginning_of, folders, limit=len(folders))
            self._beginnings.update(zip(folders, found, strict=True))

    async def _beginning_of(self, folder: str) -> list[ObjectInfo]:
        listed = pages(self._storage, f"{folder}/")
        async with closing(listed):
            async for page in listed:
                return page
        return []

    async def run(self, folder: str, keep: IdSet, tally: Tally) -> None:
        """Sweep a folder: its beginning alone, and if it is large, the rest concurrently."""
        if self._folders is not None:
            await self._by_name(self._folders, folder, keep, tally)
            return
        most = _FEW if self._side_by_side else None
        beginning = self._beginnings.pop(folder, None)
        last = await self._part(f"{folder}/", keep, tally, most=most, beginning=beginning)
        if last is None:
            return
        # The beginning ended within one of the parts; those before it are done.
        parts = [f"{folder}/{letter}" for letter in ALPHABET]
        # Names are base32 whose letters ascend (spec, "Object identifiers"), so the first letters
        # divide a listing in its own order.
        parts = [part for part in parts if part >= last[: len(part)]]

        async def part(prefix: str) -> None:
            await self._part(prefix, keep, tally, start_after=last)

        await bounded_map(part, parts, limit=_SIDE_BY_SIDE)

    async def _by_name(
        self, listing: FolderListing, folder: str, keep: IdSet, tally: Tally
    ) -> None:
        """Sweep a folder by names; size and time are read only for objects that are not kept."""
        # Most files of a repository are kept, and their names say so without a look at the file.
        names = await listing.list_names(folder)
        for start in range(0, len(names), _NAMES):
            if len(tally.failures) >= _MOST_FAILURES:
                return
            part = names[start : start + _NAMES]
            ids, valid = parse_ids(part)
            doomed = valid & ~keep.contains(ids)
            chosen = [name for name, gone in zip(part, doomed.tolist(), strict=True) if gone]
            found = await listing.states(folder, chosen)
            old = found.present & are_older(found.modified_us, self._cutoff)
            rows = zip(chosen, found.sizes_bytes.tolist(), old.tolist(), strict=True)
            garbage = [(f"{folder}/{name}", size) for name, size, gone in rows if gone]
            tally.seen += len(part)
            self._progress(Progress(f"deleting {folder}", tally.seen))
            await self._delete(garbage, tally)

    async def _part(
        self,
        prefix: str,
        keep: IdSet,
        tally: Tally,
        *,
        start_after: str | None = None,
        most: int | None = None,
        beginning: list[ObjectInfo] | None = None,
    ) -> str | None:
        """Sweep a part, whose ``beginning`` may be known.

        Returns:
            The last key if it stopped after ``most`` objects.
        """
        seen = 0
        last = None
        garbage: _Garbage = []
        listed = self._listed(prefix, start_after, beginning)
        async with closing(listed):
            async for page in listed:
                if len(tally.failures) >= _MOST_FAILURES:
                    return None
                found = garbage_in(page, keep, self._cutoff)
                garbage += [(it.key, it.size_bytes) for it in found]
                # Over several pages, so that requests to delete are full also where little is
                # garbage.
                if len(garbage) >= BATCH * _BATCHES:
                    await self._delete(garbage, tally)
                    garbage = []
                seen += len(page)
                tally.seen += len(page)
                self._progress(Progress(f"deleting {prefix.partition('/')[0]}", tally.seen))
                if most is not None and seen >= most:
                    last = page[-1].key
                    break
        await self._delete(garbage, tally)
        return last

    async def _listed(
        self, prefix: str, start_after: str | None, beginning: list[ObjectInfo] | None
    ) -> AsyncIterator[list[ObjectInfo]]:
        if beginning is not None:
            yield beginning
            if len(beginning) < BATCH:
                return
            start_after = beginning[-1].key
        listed = pages(self._storage, prefix, start_after=start_after)
        async with closing(listed):
            async for page in listed:
                yield page

    async def _delete(self, garbage: _Garbage, tally: Tally) -> None:
        starts = range(0, len(garbage), BATCH)

        async def batch(start: int) -> None:
            await self._delete_batch(garbage[start : start + BATCH], tally)

        await bounded_map(batch, starts, limit=_BATCHES)

    async def _delete_batch(self, garbage: _Garbage, tally: Tally) -> None:
        """Delete objects unless this is a dry run, and note failures."""
        failures: list[DeleteFailure] = []
        if not self._dry_run:
            failures = await delete_batch(self._storage, [key for key, _ in garbage])
        failed = {it.key for it in failures}
        # The outcome of a failed batch is unknown, so none of its objects counts as deleted; the
        # next run deletes what is left.
        tally.failures += failures
        tally.count += len(garbage) - len(failed)
        tally.size_bytes += sum(size for key, size in garbage if key not in failed)
