"""The Zarr store of a session.

`store.IcechunkStore` is what ``zarr`` and ``xarray`` use; `keys` parses its keys, `listing` lists
them, and `export` writes them as a plain hierarchy. `virtual` writes references to other people's
files, `datasets` xarray's datasets. `queries` finds values by statistics of chunks. `blocks`
knows which parts of an array can be written at the same time.

References to files of others are imported when they are asked for: readers need none.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from icechunk_async.zarr.store import IcechunkStore

if TYPE_CHECKING:
    from icechunk_async.zarr.virtual.references import VirtualChunkSpec

__all__ = ["IcechunkStore", "VirtualChunkSpec"]

if not TYPE_CHECKING:  # else every misspelt name would have a type

    def __getattr__(name: str) -> object:
        """Import a public name."""
        if name != "VirtualChunkSpec":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module("icechunk_async.zarr.virtual.references").VirtualChunkSpec

    def __dir__() -> list[str]:
        """List the public names, imported or not."""
        return sorted({*globals(), *__all__})
