"""The storage: each operation is one hop to a thread."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, Literal, NoReturn

import anyio.to_thread

from icechunk_async.errors import PreconditionFailedError, StorageClosedError, UnsafeStorageError
from icechunk_async.storage import (
    Absent,
    Capabilities,
    Data,
    DeleteFailure,
    Expected,
    ListEntry,
    RangeRequest,
    Retrieved,
    StorageDescription,
    Version,
    check_key,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from icechunk_async_fsspec.blocking import Folder

__all__ = ["FsspecStorage", "capabilities"]

_NO_UPDATE: Final = (
    "fsspec has no way to replace an object only if it is in a known state; commit through a "
    "backend of the service itself"
)
_IN_MEMORY: Final = "these objects live in one process; use a file or a bucket to share them"


def capabilities(why_read_only: str | None, *, shared: bool) -> Capabilities:
    """Answer what is promised where creating is exclusive, or else why nothing is written."""
    reasons = {"conditional_update": why_read_only or _NO_UPDATE}
    if why_read_only is not None:
        reasons |= {"writable": why_read_only, "conditional_create": why_read_only}
    if not shared:
        reasons["shared"] = _IN_MEMORY
    return Capabilities(
        writable=why_read_only is None,
        conditional_create=why_read_only is None,
        conditional_update=False,
        shared=shared,
        reasons=reasons,
    )


class FsspecStorage:
    """A :class:`~icechunk_async.storage.Storage` in a file system; made by :func:`open_fsspec`.

    A cancelled call waits for its thread, which cannot be interrupted.
    """

    def __init__(
        self, folder: Folder, promises: Capabilities, description: StorageDescription
    ) -> None:
        """Make a handle; use :func:`open_fsspec`."""
        self._folder = folder
        self._capabilities = promises
        self._description = description
        self._closed = False

    def __repr__(self) -> str:
        """Show the URL."""
        return f"FsspecStorage({self._description.url!r})"

    @property
    def capabilities(self) -> Capabilities:
        """What the file system was found to do."""
        return self._capabilities

    @property
    def description(self) -> StorageDescription:
        """The URL, and the options that were given."""
        return self._description

    def close(self) -> None:
        """Refuse further use."""
        self._closed = True

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it: two looks, and the bytes between them."""
        check_key(key)
        return await self._run(partial(self._folder.get, key, byte_range))

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read a whole object unless it is still at ``version``."""
        check_key(key)
        return await self._run(partial(self._folder.get_if_changed, key, version))

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object, and read it back for its version."""
        check_key(key)
        self._check_open()
        if not self._capabilities.writable:
            self._refuse(f"write {key!r}", "writable")
        if isinstance(if_version, Version):
            self._refuse(f"update {key!r} from {if_version}", "conditional_update")
        owned = bytes(data)  # the caller may change its buffer after a cancellation
        create = if_version is Absent.ABSENT
        return await self._run(partial(self._folder.put, key, owned, create=create))

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete objects, one by one; a missing one counts as deleted."""
        doomed = [check_key(key) for key in keys]
        self._check_open()
        if not self._capabilities.writable:
            self._refuse("delete objects", "writable")
        return await self._run(partial(self._folder.delete, doomed))

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List objects; all below the prefix's folder are looked at before the first entry."""
        if "\0" in prefix or prefix.startswith("/") or "//" in prefix or _climbs(prefix):
            self._check_open()
            return
        listing = partial(self._folder.list, prefix, start_after, delimiter)
        for entry in await self._run(listing):
            self._check_open()
            yield entry

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object within the storage, through this process."""
        check_key(target)
        found = await self.get(source)
        if if_version is not None and found.version != if_version:
            raise PreconditionFailedError(
                f"{source!r} is at {found.version}, not {if_version}; nothing was copied.",
                key=source,
                expected=if_version,
            )
        return await self.put(target, found.data)

    async def sync(self) -> None:
        """Return at once: what is written here is a service's, which answers when it is durable."""
        self._check_open()

    async def _run[T](self, work: Callable[[], T]) -> T:
        self._check_open()
        return await anyio.to_thread.run_sync(work)

    def _refuse(self, what: str, promise: str) -> NoReturn:
        raise UnsafeStorageError(f"{self!r} cannot {what}: {self._capabilities.reasons[promise]}.")

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosedError(
                f"{self!r} was used after its 'async with' block ended. Open it again."
            )


def _climbs(prefix: str) -> bool:
    """Tell whether a folder of the prefix is a dot: no key has one, and it leads elsewhere."""
    return any(segment in (".", "..") for segment in prefix.split("/")[:-1])
