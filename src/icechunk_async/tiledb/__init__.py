"""Read TileDB arrays on any storage; TileDB itself is not needed.

`open_array` and `open_group` open what is at a URL, at a time. Dense arrays are read as NumPy
arrays, sparse ones are scanned as record batches of Arrow::

    async with tiledb.open_array("s3://bucket/array") as array:
        values = await array.read([slice(0, 100), slice(0, 100)], ["temperature"])

Format versions 4 to 22 are read, which TileDB 1.7 to 2.30 write among others.

`write_virtual_array` makes a dense array a part of a repository, without copying it.

`format` reads the files, without I/O; `arrays` loads them from storage; `zarr` gives them to Zarr,
and `dataset` sparse ones to programs that take datasets of pyarrow.
Names are imported when they are used, so that importing this package takes no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from icechunk_async.tiledb.arrays.array import TileDBArray, open_array
    from icechunk_async.tiledb.arrays.groups import TileDBGroup, open_group
    from icechunk_async.tiledb.arrays.sparse import Scan
    from icechunk_async.tiledb.format.metadata import GroupMember, MetadataValue
    from icechunk_async.tiledb.format.schema import (
        Attribute,
        Dimension,
        DimensionLabel,
        Enumeration,
        Schema,
    )
    from icechunk_async.tiledb.format.types import Datatype, Layout
    from icechunk_async.tiledb.zarr.codec import TileDBCodec
    from icechunk_async.tiledb.zarr.ingest import IngestedArray, ingest_array
    from icechunk_async.tiledb.zarr.virtual import VirtualTiles, write_virtual_array

__all__ = [
    "Attribute",
    "Datatype",
    "Dimension",
    "DimensionLabel",
    "Enumeration",
    "GroupMember",
    "IngestedArray",
    "Layout",
    "MetadataValue",
    "Scan",
    "Schema",
    "TileDBArray",
    "TileDBCodec",
    "TileDBGroup",
    "VirtualTiles",
    "ingest_array",
    "open_array",
    "open_group",
    "write_virtual_array",
]

_NAMES: Final = {
    "arrays.array": ("TileDBArray", "open_array"),
    "arrays.groups": ("TileDBGroup", "open_group"),
    "arrays.sparse": ("Scan",),
    "format.metadata": ("GroupMember", "MetadataValue"),
    "format.schema": ("Attribute", "Dimension", "DimensionLabel", "Enumeration", "Schema"),
    "format.types": ("Datatype", "Layout"),
    "zarr.codec": ("TileDBCodec",),
    "zarr.ingest": ("IngestedArray", "ingest_array"),
    "zarr.virtual": ("VirtualTiles", "write_virtual_array"),
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names}

if not TYPE_CHECKING:  # type checkers would accept any name otherwise

    def __getattr__(name: str) -> object:
        """Import a public name."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

    def __dir__() -> list[str]:
        """List the public names, imported or not."""
        return sorted({*globals(), *__all__})
