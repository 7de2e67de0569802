"""The Zarr store of a session.

`store.IcechunkStore` is what ``zarr`` and ``xarray`` use; `keys` parses its keys, `listing` lists
them, and `export` writes them as a plain hierarchy. `virtual` writes references to other people's
files, `datasets` xarray's datasets. `queries` finds values by statistics of chunks. `blocks`
knows which parts of an array can be written at the same time.
"""

from icechunk_async.zarr.store import IcechunkStore
from icechunk_async.zarr.virtual.references import VirtualChunkSpec

__all__ = ["IcechunkStore", "VirtualChunkSpec"]
