"""The objects of in-memory storages: shared by all uses of one, dropped with the last."""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any, Final

from icechunk_async._runtime.clock import random_bytes
from icechunk_async.sync.errors import StorageError

__all__ = ["MemoryObjects"]


class MemoryObjects:
    """A name for objects in the memory of this process."""

    def __init__(self) -> None:
        """Name objects that nobody else has."""
        self.url = f"memory://icechunk-async-{random_bytes(12).hex()}"
        _living[self.url] = self
        weakref.finalize(self, _forget, self.url).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as a name, which only this process knows."""
        return _found, (self.url,)


_living: Final[weakref.WeakValueDictionary[str, MemoryObjects]] = weakref.WeakValueDictionary()
if hasattr(os, "register_at_fork"):  # a child has a copy, whose changes nobody else would see
    os.register_at_fork(after_in_child=_living.clear)


def _forget(url: str) -> None:
    backend: Any = sys.modules.get("icechunk_async_memory")
    if backend is not None:
        backend.forget(url)


def _found(url: str) -> MemoryObjects:
    objects = _living.get(url)
    if objects is None:
        raise StorageError(
            "An in-memory storage was unpickled in another process than the one that made it, or "
            "after that had let go of it. Use local_filesystem_storage() or an object store for "
            "data that several processes share.",
            "storage-config",
        )
    return objects
