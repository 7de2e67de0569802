"""The Zarr store of a session."""

from icechunk_async.zarr.store import IcechunkStore
from icechunk_async.zarr.virtual.references import VirtualChunkSpec

__all__ = ["IcechunkStore", "VirtualChunkSpec"]
