"""Cells of arrays as rows: coordinates and values, in Arrow batches."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from icechunk_async.spark.schema import to_arrow

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    import xarray

    from icechunk_async.spark.options import ReadOptions
    from icechunk_async.spark.schema import Column, TableShape

    type Places = npt.NDArray[np.int64]

__all__ = ["batches", "dimension_values"]


def dimension_values(
    dataset: xarray.Dataset, column: Column, span: tuple[int, int], options: ReadOptions
) -> pa.Array[Any]:
    """Answer a part of the values along a dimension, as Spark gets them."""
    if column.variable:
        values = dataset.variables[column.name][span[0] : span[1]].to_numpy()
    else:
        values = np.arange(*span)
    return to_arrow(values, column.type, nan_as_null=options.nan_as_null)


def batches(
    dataset: xarray.Dataset,
    shape: TableShape,
    places: Sequence[Places],
    schema: pa.Schema,
    options: ReadOptions,
) -> Iterator[pa.RecordBatch]:
    """Read cells once, and answer them row by row in batches.

    Args:
        dataset: the group.
        shape: of the table.
        places: along each dimension those to read, ascending.
        schema: the columns wanted, in order.
        options: how values are shown, and rows of a batch.

    Memory: the values of these cells, and of one batch.
    """
    counts = tuple(len(it) for it in places)
    total = prod(counts)
    if not total:
        return
    at = dict(zip(shape.dims, places, strict=True))
    columns = [shape.column(name) for name in schema.names]
    loaded = [_load(dataset, column, shape.dims, at) for column in columns]
    for start in range(0, total, options.batch_rows):
        stop = min(start + options.batch_rows, total)
        index = np.unravel_index(np.arange(start, stop), counts) if counts else ()
        where = dict(zip(shape.dims, index, strict=True))
        arrays: list[pa.Array[Any]] = []
        for column, values in zip(columns, loaded, strict=True):
            if len(column.dims) == len(shape.dims):
                part = values.reshape(-1)[start:stop]
            elif column.dims:
                dims = [dim for dim in shape.dims if dim in column.dims]
                part = values[tuple(where[dim] for dim in dims)]
            else:
                part = np.repeat(values.reshape(1), stop - start)
            kind = schema.field(column.name).type
            arrays.append(to_arrow(part, kind, nan_as_null=options.nan_as_null))
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _load(
    dataset: xarray.Dataset, column: Column, dims: tuple[str, ...], at: dict[str, Places]
) -> npt.NDArray[Any]:
    """Read the values of a column; its dimensions in the table's order."""
    if not column.variable:
        return at[column.dims[0]]
    variable = dataset.variables[column.name]
    spans = {dim: slice(int(at[dim][0]), int(at[dim][-1]) + 1) for dim in column.dims}
    ordered = [dim for dim in dims if dim in column.dims]
    values = variable.isel(spans).transpose(*ordered).to_numpy()
    for axis, dim in enumerate(ordered):
        if len(at[dim]) < values.shape[axis]:
            values = np.take(values, at[dim] - at[dim][0], axis=axis)
    return np.ascontiguousarray(values) if values.ndim else values
