"""TileDB arrays and groups, for code that blocks.

The counterparts of `icechunk_async.tiledb`: what is awaited there returns here::

    from icechunk_async.sync import tiledb

    with tiledb.open_array("s3://bucket/array") as array:
        values = array.read([slice(0, 100), slice(0, 100)], ["temperature"])

Arrays and groups are used inside of the ``with`` block that opened them.

`dataset` shows sparse arrays to programs that take datasets of pyarrow, which it needs.
"""

from icechunk_async.sync.tiledb.arrays import (
    IngestedArray,
    Scan,
    TileDBArray,
    TileDBGroup,
    VirtualTiles,
    ingest_array,
    open_array,
    open_group,
    write_virtual_array,
)

__all__ = [
    "IngestedArray",
    "Scan",
    "TileDBArray",
    "TileDBGroup",
    "VirtualTiles",
    "ingest_array",
    "open_array",
    "open_group",
    "write_virtual_array",
]
