"""Compare what we read with what TileDB read, byte by byte."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from icechunk_async.tiledb import TileDBArray, open_array

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.tiledb.arrays.cells import Cells
    from icechunk_async.tiledb.format.schema import Schema

    type Columns = dict[str, list[bytes]]

__all__ = ["columns_of_cells", "columns_of_file", "read_query", "sorted_rows"]

_NULL = b"null"


def columns_of_cells(cells: Mapping[str, Cells]) -> Columns:
    """Return the bytes of each cell that we read; nulls are all alike."""
    found: Columns = {}
    for name, it in cells.items():
        width = it.values.dtype.itemsize
        data = np.ascontiguousarray(it.values).tobytes()
        if it.offsets is None:
            size = width * it.values.shape[1]
            bounds = list(range(0, len(data) + 1, size))
        else:
            bounds = (it.offsets * width).tolist()
        valid = None if it.valid is None else it.valid.tolist()
        found[name] = _cut(data, bounds, valid)
    return found


def columns_of_file(stored: Mapping[str, Any], schema: Schema) -> Columns:
    """Return the bytes of each cell that TileDB read."""
    found: Columns = {}
    for name in {key.rpartition("/")[0] for key in stored}:
        data = stored[f"{name}/values"].tobytes()
        offsets = stored.get(f"{name}/offsets")
        valid = stored.get(f"{name}/valid")
        if offsets is None:
            bounds = list(range(0, len(data) + 1, schema.fields[name].cell_bytes))
        else:
            bounds = [*offsets.tolist(), len(data)]
        found[name] = _cut(data, bounds, None if valid is None else valid.tolist())
    return found


def _cut(data: bytes, bounds: list[int], valid: list[Any] | None) -> list[bytes]:
    cells = [data[a:b] for a, b in pairwise(bounds)]
    if valid is None:
        return cells
    return [cell if ok else _NULL for cell, ok in zip(cells, valid, strict=True)]


def sorted_rows(columns: Columns) -> list[tuple[bytes, ...]]:
    """Return the rows of columns in order; sparse arrays have none."""
    names = sorted(columns)
    return sorted(zip(*(columns[name] for name in names), strict=True))


async def read_query(location: Any, query: Mapping[str, Any]) -> tuple[Schema, Columns]:
    """Read what a query of a job asks for; return the schema at its time, and the columns."""
    times = {key: query.get(key) for key in ("start", "end")}
    async with open_array(location, **times) as array:
        if array.schema.is_sparse:
            return array.schema, await _read_sparse(array)
        box = tuple(
            (int(low) - int(dim.low or 0), int(high) - int(dim.low or 0) + 1)
            for (low, high), dim in zip(query["region"], array.schema.dimensions, strict=True)
        )
        return array.schema, columns_of_cells(await array.read_cells(box))


async def _read_sparse(array: TileDBArray) -> Columns:
    reader = await array.sparse_reader()
    names = reader.arrow_schema.names
    found: Columns = {name: [] for name in names}
    # Small parts, so that boxes are cut and tiles are read for several.
    for part in await reader.scan().plan(part_bytes=4096):
        cells, _ = await reader.cells(part, names)
        for name, column in columns_of_cells(cells).items():
            found[name] += column
    return found
