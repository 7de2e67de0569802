"""The same operations for both engines, in the blocking style."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import icechunk

import icechunk_async.sync

if TYPE_CHECKING:
    from zarr.abc.store import Store

__all__ = ["create", "open_repository", "tip_store"]

PREFIX = "file:///data/"
PACKAGES: Final[dict[str, Any]] = {"ours": icechunk_async.sync, "official": icechunk}


def create(engine: str, directory: str) -> Any:
    """Create a repository of format version 2 on the local disk, with a virtual container."""
    package = PACKAGES[engine]
    config = package.RepositoryConfig.default()
    store = package.local_filesystem_store("/data")
    config.set_virtual_chunk_container(package.VirtualChunkContainer(PREFIX, store))
    return package.Repository.create(package.local_filesystem_storage(directory), config)


def open_repository(engine: str, directory: str) -> Any:
    """Open a repository that either engine wrote."""
    package = PACKAGES[engine]
    return package.Repository.open(package.local_filesystem_storage(directory))


def tip_store(engine: str, directory: str) -> Store:
    """Open a repository and answer the store of its main branch."""
    store: Store = open_repository(engine, directory).readonly_session("main").store
    return store
