"""Cells that are copied, since no tile can be a chunk: as strings, or as bytes.

Zarr's core has no type for cells that differ in length. Its registry of extensions has ``string``
and ``bytes``, with the codecs ``vlen-utf8`` and ``vlen-bytes``; Zarr-Python has both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from zarr.dtype import VariableLengthBytes

from icechunk_async.errors import FormatError
from icechunk_async.tiledb.arrays.cells import UTF8, Cells, is_bytes, viewed
from icechunk_async.tiledb.format.types import TEXT, Datatype

if TYPE_CHECKING:
    import numpy.typing as npt
    from zarr.core.common import JSON, ZarrFormat

    from icechunk_async.tiledb.format.schema import Attribute

__all__ = ["CellBytes", "byte_strings", "element_attributes", "is_copied", "is_string", "strings"]


class CellBytes(VariableLengthBytes):
    """Bytes of variable length by the name that Zarr's registry of extensions has for them.

    Zarr-Python reads it, and writes another one, with a warning that it may change.
    """

    def to_json(self, zarr_format: ZarrFormat) -> Any:
        """Return the name."""
        del zarr_format  # groups of TileDB arrays are of format 3
        return "bytes"


def is_string(it: Attribute) -> bool:
    """Return whether an attribute is text that becomes an array of strings."""
    return it.is_variable and it.datatype in UTF8


def is_copied(it: Attribute) -> bool:
    """Return whether an attribute becomes an array of strings or bytes, which are copies."""
    return it.is_variable or it.datatype in TEXT


def element_attributes(it: Attribute) -> dict[str, JSON]:
    """Return the attributes that say what the cells of an array of bytes hold.

    Units of CF would be wrong here: readers would apply them to the bytes.
    """
    found: dict[str, JSON] = {"tiledb_datatype": it.datatype.name.lower()}
    if not is_bytes(it.datatype):
        found["element_dtype"] = viewed(it, np.zeros((0, 1), it.dtype)).dtype.str
    return found


def strings(cells: Cells, fill: str) -> npt.NDArray[Any]:
    """Return cells of text as objects of `str`; null ones as the fill value.

    Raises:
        FormatError: a cell is not valid UTF-8.
    """
    found = np.empty(len(cells), object)
    found[:] = cells.items()
    if cells.valid is not None:
        found[~cells.valid] = fill
    try:
        "".join(found).encode()
    except UnicodeEncodeError as error:  # bytes that were not UTF-8 became surrogates
        raise FormatError(
            f"The attribute {cells.field.name!r} of a TileDB array is declared as text, and a cell "
            "is not valid UTF-8. Leave it out, or write it anew as bytes with TileDB."
        ) from error
    return found


def byte_strings(cells: Cells, fill: bytes) -> npt.NDArray[Any]:
    """Return the values of cells as objects of `bytes`, little-endian; null ones as the fill."""
    values = cells.values
    if cells.field.datatype is Datatype.BOOL:
        values = (values != 0).astype(np.uint8)  # as readers of `bool` need it
    found = np.empty(len(cells), object)
    found[:] = Cells(cells.field, values, cells.offsets).stored_items()
    if cells.valid is not None:
        for row in np.flatnonzero(~cells.valid).tolist():
            found[row] = fill
    return found
