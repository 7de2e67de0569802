"""What a backend's author may say about a backend; the tests reach it through ``self``."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from icechunk_async.storage import registry

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from icechunk_async.storage import Storage, StorageDescription

__all__ = ["Promises"]


class Promises:
    """Base of all groups of tests."""

    many_keys: ClassVar[int] = 10_000
    """Keys in the largest listing: more than ten pages of any service."""

    large_bytes: ClassVar[int] = 20 * 1024 * 1024
    """Size of the largest object: beyond what services take in one part."""

    @staticmethod
    def reopen(description: StorageDescription) -> AbstractAsyncContextManager[Storage]:
        """Open another handle on the same objects.

        It is called in other processes as well, so it must be found under its name there. The
        default goes through the backend's entry point.
        """
        return registry.reopen(description)

    def undeletable(self, storage: Storage, key: str) -> AbstractAsyncContextManager[None] | None:
        """Return a block in which deleting ``key`` fails, or None where that cannot be arranged."""
        del storage, key
        return None
