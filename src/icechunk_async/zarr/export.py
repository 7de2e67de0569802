"""Write one snapshot as a plain Zarr hierarchy, which needs no Icechunk to read it.

Chunks are written first and the documents last, the one of the root at the very end: until then
there is no hierarchy to open. A note tells a copy that was interrupted from other objects.
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from zarr.core.buffer import default_buffer_prototype

from icechunk_async._runtime.concurrency import bounded_map, closing
from icechunk_async._runtime.progress import Progress, no_progress
from icechunk_async.engine.open import open_location
from icechunk_async.engine.policies import policies_of
from icechunk_async.engine.upkeep.copying.copy import CopyReport
from icechunk_async.errors import ObjectNotFoundError, RepositoryExistsError, UnsafeStorageError
from icechunk_async.format.config import RepositoryConfig
from icechunk_async.format.paths import ancestors, join
from icechunk_async.storage import ObjectInfo
from icechunk_async.storage.policies.limit import Budget
from icechunk_async.storage.policies.stack import with_policies

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.open import Request
    from icechunk_async.storage import Storage
    from icechunk_async.zarr.store import IcechunkStore

__all__ = ["NOTE", "export_zarr", "open_limited"]

NOTE: Final = "icechunk-copy.json"
"""Names the snapshot while it is being written; deleted at the end."""
_DOCUMENT: Final = "zarr.json"
_AT_ONCE: Final = 32
_PAGE: Final = 1000


@asynccontextmanager
async def open_limited(request: Request) -> AsyncGenerator[Storage]:
    """Open a destination, with the limits and retries of a configuration."""
    config = request.config or RepositoryConfig()
    async with open_location(request) as storage:
        budget = Budget(config.effective_max_concurrent_requests)
        policies = policies_of(config.effective_storage)
        # Each key is written once, with the bytes of one snapshot, so any request may be repeated.
        yield with_policies(storage, budget, policies, immutable=lambda _: True)


async def export_zarr(
    store: IcechunkStore,
    snapshot_id: str,
    destination: Storage,
    progress: ProgressCallback | None = None,
    *,
    paths: Sequence[str] | None = None,
) -> CopyReport:
    """Write the keys of a store; see `Repository.copy_to`.

    Args:
        store: of a read-only session.
        snapshot_id: the snapshot that it shows.
        destination: empty, or with a part of this copy.
        progress: called with the number of chunks looked at.
        paths: only these arrays and groups, with all below them and the groups above them; none
            is below another. None: all.

    Raises:
        RepositoryExistsError: something else is there, or a part of another snapshot.
        UnsafeStorageError: the destination cannot be written or listed.
        VirtualChunkError: a virtual chunk's source changed, or may not be read.

    Memory: 32 chunks, the documents, and after an interruption the keys that are there.

    Cancellation: chunks may have been written, and no document of the root. Copying again
    continues.
    """
    work = _Export(store, destination, paths, progress or no_progress)
    await work.begin(snapshot_id)
    documents = await work.write_chunks()
    await work.write_documents(documents)
    return CopyReport(work.copied, work.bytes_copied, work.skipped)


class _Export:
    def __init__(
        self,
        store: IcechunkStore,
        destination: Storage,
        paths: Sequence[str] | None,
        progress: ProgressCallback,
    ) -> None:
        self._store = store
        self._destination = destination
        self._paths = paths
        self._progress = progress
        self._there: set[str] = set()
        self.copied = self.bytes_copied = self.skipped = 0

    async def begin(self, snapshot_id: str) -> None:
        """Refuse a destination that holds something else, and leave the note."""
        destination = self._destination
        url = destination.description.url
        for name in ("writable", "listing"):
            if not getattr(destination.capabilities, name):
                raise UnsafeStorageError(
                    f"A Zarr hierarchy cannot be written to {url!r}: the storage is not "
                    f"{name if name == 'writable' else 'able to list'}.",
                    missing=[name],
                )
        entries = destination.list_prefix()
        async with closing(entries):
            self._there = {it.key async for it in entries if isinstance(it, ObjectInfo)}
        # Only a copy of the same snapshot may be continued: chunks that are there are not compared.
        note: dict[str, object] = {"snapshot": snapshot_id}
        if self._paths is not None:
            note["paths"] = list(self._paths)
        # Before any chunk: an interrupted copy without its note would pass for something else.
        if not self._there:
            await destination.put(NOTE, json.dumps(note).encode())
            return
        if (noted := await self._noted()) != note:
            found = repr(min(self._there))
            if noted is not None:
                of = f" of {', '.join(map(str, noted['paths']))}" if "paths" in noted else ""
                found = f"a part of a copy{of} of snapshot {noted['snapshot']}"
            raise RepositoryExistsError(
                f"Snapshot {snapshot_id} cannot be written to {url!r} as a Zarr hierarchy: "
                f"{found} is there. Copy to an empty location.",
                url=url,
            )

    async def _noted(self) -> dict[str, Any] | None:
        try:
            found = json.loads(bytes((await self._destination.get(NOTE)).data))
            if isinstance(found["snapshot"], str) and isinstance(found.get("paths", []), list):
                return dict(found)
        # Anybody may have put an object of this name there.
        except (ObjectNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            pass
        return None

    async def _keys(self) -> AsyncGenerator[str]:
        """Iterate over the keys to write."""
        if self._paths is None:
            async for key in self._store.list():
                yield key
            return
        # Zarr opens an array by its path alone, and lists it only if the groups above it exist.
        above = {it for path in self._paths for it in ancestors(path)}
        for path in sorted(above):
            key = join(path, _DOCUMENT)[1:]
            if await self._store.exists(key):
                yield key
        for path in self._paths:
            async for key in self._store.list_prefix(f"{path[1:]}/"):
                yield key

    async def write_chunks(self) -> list[str]:
        """Write chunks that are not there; return the keys of the documents."""
        documents: list[str] = []
        page: list[str] = []
        done = 0
        async for key in self._keys():
            if key.rpartition("/")[2] == _DOCUMENT:
                documents.append(key)
            elif key in self._there:  # of the same snapshot, so with the same bytes
                self.skipped += 1
            else:
                page.append(key)
            if len(page) == _PAGE:
                await bounded_map(self._write, page, limit=_AT_ONCE)
                done += len(page)
                self._progress(Progress("writing chunks", done))
                page = []
        await bounded_map(self._write, page, limit=_AT_ONCE)
        self._progress(Progress("writing chunks", done + len(page)))
        # Durable before any document says that they are there.
        await self._destination.sync()
        return documents

    async def write_documents(self, documents: list[str]) -> None:
        """Write documents, that of the root last, and delete the note."""
        # A reader that finds a document finds all that is below it: the deepest are written first.
        depths = sorted({key.count("/") for key in documents}, reverse=True)
        for depth in depths:
            level = [key for key in documents if key.count("/") == depth]
            await bounded_map(self._write, level, limit=_AT_ONCE)
        await self._destination.sync()
        for failure in await self._destination.delete([NOTE]):
            raise failure.error

    async def _write(self, key: str) -> None:
        value = await self._store.get(key, default_buffer_prototype())
        if value is None:
            return
        data = value.to_bytes()
        await self._destination.put(key, data)
        self.copied += 1
        self.bytes_copied += len(data)
