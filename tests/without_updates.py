"""A storage that creates objects if they are absent, and replaces and renames none safely."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from icechunk_async.errors import UnsafeStorageError
from icechunk_async.storage import ABSENT
from icechunk_async.testing.wrapping import WrappedStorage

if TYPE_CHECKING:
    from icechunk_async.storage import Capabilities, Data, Expected, Storage, Version

__all__ = ["NUMBERED", "WithoutUpdates", "suited"]

NUMBERED = "format-2-numbered"
"""The layout for such a storage."""
_REASON = "it is tried without"


class WithoutUpdates(WrappedStorage):
    """Refuses every write that depends on the state of what it replaces.

    Nothing is renamed either: a copy reads one object and creates another.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Those of the wrapped storage, without conditional updates."""
        given = self.wrapped.capabilities
        reasons = {**given.reasons, "conditional_update": _REASON}
        return replace(given, conditional_update=False, reasons=reasons)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object, on no condition but that it is absent."""
        if if_version is not None and if_version is not ABSENT:
            raise UnsafeStorageError(f"{key!r} cannot be replaced on a condition.")
        return await super().put(key, data, if_version=if_version)

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object without a condition."""
        if if_version is not None:
            raise UnsafeStorageError(f"{source!r} cannot be copied on a condition.")
        return await self.put(target, (await self.get(source)).data)


def suited(storage: Storage, layout: str) -> Storage:
    """Return a storage that can do no more than a layout needs, as far as that is known here."""
    return WithoutUpdates(storage) if layout == NUMBERED else storage
