"""The same operations for both engines, in the blocking style."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import icechunk

from icechunk_async.config import LocalFileSystemStore, RepositoryConfig, VirtualChunkContainer
from icechunk_async.sync import Repository

if TYPE_CHECKING:
    from zarr.abc.store import Store

__all__ = ["create", "open_repository", "tip_store"]

PREFIX = "file:///data/"


def create(engine: str, directory: str) -> Any:
    """Create a repository of format version 2 on the local disk, with a virtual container."""
    if engine == "ours":
        container = VirtualChunkContainer(PREFIX, LocalFileSystemStore("/data"))
        config = RepositoryConfig(virtual_chunk_containers=(container,))
        return Repository.create(directory, config=config)
    official = icechunk.RepositoryConfig.default()
    official.set_virtual_chunk_container(
        icechunk.VirtualChunkContainer(PREFIX, icechunk.local_filesystem_store("/data"))
    )
    return icechunk.Repository.create(icechunk.local_filesystem_storage(directory), official)


def open_repository(engine: str, directory: str) -> Any:
    """Open a repository that either engine wrote."""
    if engine == "ours":
        return Repository.open(directory)
    return icechunk.Repository.open(icechunk.local_filesystem_storage(directory))


def tip_store(engine: str, directory: str) -> Store:
    """Open a repository and answer the store of its main branch."""
    store: Store = open_repository(engine, directory).readonly_session("main").store
    return store
