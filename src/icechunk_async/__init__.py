"""Versioned, transactional Zarr on object storage, asyncio to the bottom."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from icechunk_async._version import __version__

if TYPE_CHECKING:
    from icechunk_async.by_url import open_url
    from icechunk_async.engine.commit.once import Transaction
    from icechunk_async.engine.files.packing import Packing
    from icechunk_async.format.config import RepositoryConfig
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.repository import Repository
    from icechunk_async.session import ForkSession, Session
    from icechunk_async.urls import IcechunkURL
    from icechunk_async.zarr.store import IcechunkStore

__all__ = [
    "ForkSession",
    "IcechunkStore",
    "IcechunkURL",
    "Packing",
    "Repository",
    "RepositoryConfig",
    "Session",
    "SnapshotId",
    "Transaction",
    "__version__",
    "open_url",
]

# Imported at first use: backends and the command need not wait for zarr and NumPy.
_HOMES: Final = {
    "ForkSession": "icechunk_async.session",
    "IcechunkStore": "icechunk_async.zarr.store",
    "IcechunkURL": "icechunk_async.urls",
    "Packing": "icechunk_async.engine.files.packing",
    "Repository": "icechunk_async.repository",
    "RepositoryConfig": "icechunk_async.format.config",
    "Session": "icechunk_async.session",
    "SnapshotId": "icechunk_async.format.ids",
    "Transaction": "icechunk_async.engine.commit.once",
    "open_url": "icechunk_async.by_url",
}

if not TYPE_CHECKING:  # else every misspelt name would have a type

    def __getattr__(name: str) -> object:
        """Import a public name."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "Repository":
            # Its sessions need NumPy. A service would else import it on its event loop, at the
            # first session. The command takes the class from its module: history needs none.
            import_module("numpy")
        return getattr(import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        """List the public names, imported or not."""
        return sorted({*globals(), *__all__})
