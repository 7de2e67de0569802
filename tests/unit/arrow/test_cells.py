"""Values of cells become rows in batches, in C order."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pytest

from icechunk_async.arrow.table import Cells, Column, to_arrow

if TYPE_CHECKING:
    import numpy.typing as npt

DIMS = ("x", "y", "z")
COUNTS = (2, 3, 4)
KINDS: dict[pa.DataType, Any] = {
    pa.float32(): lambda n: np.where(n % 3 == 1, np.nan, n).astype("f4"),
    pa.float64(): lambda n: n / 2,
    pa.uint8(): lambda n: n.astype("u1"),
    pa.decimal128(20, 0): lambda n: n.astype("u8"),
    pa.timestamp("us"): lambda n: n.astype("M8[h]"),
    pa.duration("us"): lambda n: np.where(n == 1, np.timedelta64("NaT", "s"), n.astype("m8[s]")),
    pa.string(): lambda n: n.astype("U"),
    pa.bool_(): lambda n: n % 2 == 0,
}


def _source(batch_rows: int) -> Any:
    return SimpleNamespace(batch_rows=batch_rows, nan_as_null=True)


def _column(dims: tuple[str, ...], kind: pa.DataType) -> tuple[Column, npt.NDArray[Any]]:
    shape = tuple(COUNTS[DIMS.index(dim)] for dim in dims)
    values = KINDS[kind](np.arange(np.prod(shape, dtype=int)).reshape(shape))
    return Column(f"{'_'.join(dims)}:{kind}", kind, dims, variable=True), values


@pytest.mark.parametrize("batch_rows", [1, 2, 3, 5, 7, 12, 24, 100])
def test_columns_with_some_dimensions_have_their_value_in_each_row(batch_rows: int) -> None:
    """Of any type, with nulls, whichever dimensions they have, however rows are cut."""
    some = [dims for count in range(4) for dims in combinations(DIMS, count)]
    made = [_column(dims, kind) for dims in some for kind in KINDS]
    columns, values = zip(*made, strict=True)
    schema = pa.schema([(it.name, it.type) for it in columns])
    found = list(Cells(DIMS, COUNTS, columns, values, schema, _source(batch_rows)).batches())
    assert {it.num_rows for it in found[:-1]} <= {batch_rows}
    table = pa.Table.from_batches(found, schema)
    table.validate(full=True)
    for column, one in made:
        shape = [n if dim in column.dims else 1 for dim, n in zip(DIMS, COUNTS, strict=True)]
        rows = np.broadcast_to(one.reshape(shape), COUNTS).reshape(-1)
        expected = to_arrow(rows, column.type)
        assert table.column(column.name).to_pylist() == expected.to_pylist(), column.name


def test_a_batch_of_a_large_chunk_is_made_by_itself() -> None:
    """Memory and time do not grow with the rows that follow."""
    counts = (3, 10**7, 1000)
    columns = tuple(Column(dim, pa.int64(), (dim,), variable=True) for dim in DIMS)
    values = (np.arange(3), np.broadcast_to(np.int64(7), 10**7), np.arange(1000))
    schema = pa.schema([(it.name, it.type) for it in columns])
    cells = Cells(DIMS, counts, columns, cast("Any", values), schema, _source(1500))
    batch = next(cells.batches())
    assert batch.to_pydict() == {
        "x": [0] * 1500,
        "y": [7] * 1500,
        "z": [*range(1000), *range(500)],
    }
