"""Versioned, transactional Zarr on object storage, asyncio to the bottom."""

from icechunk_async.format.config import RepositoryConfig
from icechunk_async.format.ids import SnapshotId
from icechunk_async.repository.repository import Repository
from icechunk_async.repository.session import Session
from icechunk_async.zarr.store import IcechunkStore

__all__ = ["IcechunkStore", "Repository", "RepositoryConfig", "Session", "SnapshotId"]
