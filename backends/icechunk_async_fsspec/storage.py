"""The storage: capabilities from the trial, and one hop to a thread for each operation."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from icechunk_async.storage import Capabilities, ThreadedStorage, check_key

if TYPE_CHECKING:
    from icechunk_async.storage import Retrieved, StorageDescription, Version
    from icechunk_async_fsspec.folder import Folder

__all__ = ["FsspecStorage", "capabilities"]

_NO_UPDATE: Final = (
    "fsspec has no way to replace an object only if it is in a known state; commit through a "
    "backend of the service itself"
)
_IN_MEMORY: Final = "these objects live in one process; use a file or a bucket to share them"


def capabilities(why_read_only: str | None, *, shared: bool) -> Capabilities:
    """Return the promises: writes if creation is exclusive, else the reason against them."""
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


class FsspecStorage(ThreadedStorage):
    """A `Storage` in a file system; made by `open_fsspec`."""

    def __init__(
        self, folder: Folder, promises: Capabilities, description: StorageDescription
    ) -> None:
        """Make a handle; use `open_fsspec`."""
        super().__init__(folder, description, promises)
        self._folder = folder

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Check the state, and read a whole object unless it is still at ``version``."""
        check_key(key)
        return await self._run(partial(self._folder.get_if_changed, key, version))
