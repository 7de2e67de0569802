"""Integers of 64 bits of which some are missing: exact, with null."""

# zarr is only partly typed.
# pyright: basic

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import zarr

from icechunk_async import arrow
from icechunk_async.arrow.table import Column, check_type, to_arrow
from icechunk_async.errors import InvalidInputError
from icechunk_async.sync import Repository

if TYPE_CHECKING:
    from pathlib import Path

SIGNED = [2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63), 7, 7, 5, 2**53, 3]
UNSIGNED = [2**53 + 1, 2**64 - 1, 2**63 + 1, 0, 7, 7, 5, 2**63, 3]


def put(path: Path, **arrays: tuple[Any, Any, dict[str, Any]]) -> Repository:
    """Commit arrays along a dimension, in chunks of two, and analyze them."""
    repository = Repository.create(str(path))
    session = repository.writable_session("main")
    for name, (values, kind, attributes) in arrays.items():
        array = zarr.create_array(
            session.store, name=name, shape=(len(values),), chunks=(2,), dtype=kind,
            dimension_names=["x"], attributes=attributes,
        )  # fmt: skip
        array[:] = np.array(values, kind)
    session.commit("integers")
    repository.analyze()
    return repository


@pytest.mark.parametrize("mark", ["_FillValue", "missing_value"])
@pytest.mark.parametrize(
    ("kind", "values", "type_"),
    [
        ("i8", SIGNED, pa.int64()),
        (">i8", SIGNED, pa.int64()),
        ("u8", UNSIGNED, pa.uint64()),
    ],
)
def test_integers_are_exact_and_missing_ones_are_null(
    tmp_path: Path, mark: str, kind: str, values: list[int], type_: pa.DataType
) -> None:
    """As values and as coordinates; chunks are left out by their exact bounds."""
    marks: dict[str, Any] = {mark: 7}
    repository = put(
        tmp_path / "r",
        v=(values, kind, marks),
        x=(values[::-1], kind, marks),
    )
    found = arrow.dataset(repository.readonly_session("main"))
    assert found.schema == pa.schema([("x", type_), ("v", type_)])
    table = found.to_table()
    wanted = [None if it == 7 else it for it in values]
    assert table["v"].to_pylist() == wanted
    assert table["x"].to_pylist() == wanted[::-1]
    for nulls in (True, False):
        other = arrow.dataset(repository.readonly_session("main"), nan_as_null=nulls)
        assert other.to_table(["v"])["v"].to_pylist() == wanted
    for it in values:
        one: Any = pa.scalar(it, type_)
        for name in ("v", "x"):
            column = wanted if name == "v" else wanted[::-1]
            for compare in (operator.eq, operator.lt):
                expression = compare(pc.field(name), one)
                rows = found.to_table([name], filter=expression)[name].to_pylist()
                kept = sorted(a for a in column if a is not None and compare(a, it))
                assert sorted(rows) == kept, (name, compare, it)
    assert found.planned(pc.field("v") == pa.scalar(2**53 + 1, type_)).chunks < 5
    connection = duckdb.connect()
    connection.register("cells", found)
    total = connection.table("cells").aggregate("sum(v), count(v)").fetchall()
    assert total == [(sum(it for it in values if it != 7), 7)]


def test_arrays_with_other_orders_of_dimensions_keep_their_nulls(tmp_path: Path) -> None:
    """Values that are transposed, and of which a filter takes some, are not next to each other."""
    repository = Repository.create(str(tmp_path / "r"))
    session = repository.writable_session("main")
    values = np.arange(12).reshape(3, 4) + 2**53
    for name, given, dims in (("a", values, ["x", "y"]), ("b", values.T, ["y", "x"])):
        array = zarr.create_array(
            session.store, name=name, shape=given.shape, chunks=(2, 2), dtype="i8",
            dimension_names=dims, attributes={"_FillValue": 2**53 + 5},
        )  # fmt: skip
        array[:] = given
    session.commit("fields")
    found = arrow.dataset(repository.readonly_session("main"))
    for kept in (None, pc.field("y") != 2):
        table = found.to_table(filter=kept)
        assert table["a"].to_pylist() == table["b"].to_pylist()
        assert table["a"].null_count == 1
        rows = table.to_pylist()
        shown = {(row["x"], row["y"]): row["b"] for row in rows}
        assert shown[1, 3] == 2**53 + 7
        assert shown[1, 1] is None


def test_other_integers_stay_as_xarray_decodes_them(tmp_path: Path) -> None:
    """Packed ones, times, narrow ones, and marks that are no integers of the type."""
    repository = put(
        tmp_path / "r",
        packed=([1, 2, 3], "i8", {"_FillValue": 2, "scale_factor": 0.5}),
        narrow=([1, 2, 3], "i4", {"_FillValue": 2}),
        time=([1, 2, 3], "i8", {"_FillValue": 2, "units": "days since 2020-01-01"}),
        odd=([1, 2, 3], "i8", {"_FillValue": 2.5}),
        plain=([1, 2, 2**53 + 1], "i8", {}),
    )
    table = arrow.dataset(repository.readonly_session("main")).to_table()
    assert table.schema.field("packed").type == pa.float64()
    assert table["packed"].to_pylist() == [0.5, None, 1.5]
    assert table["narrow"].to_pylist() == [1, None, 3]
    assert table["time"].to_pylist()[1] is None
    assert table.schema.field("time").type == pa.timestamp("us")
    assert table["odd"].to_pylist() == [1, None, 3]  # xarray cuts off the fraction of the mark
    assert table["plain"].to_pylist() == [1, 2, 2**53 + 1]


def test_doubles_that_earlier_versions_had_can_be_asked_for() -> None:
    """In the schemas of streams and views; but no integer is rounded by it."""
    check_type(Column("v", pa.int64(), ("x",), marked=True), pa.float64())
    with pytest.raises(InvalidInputError, match="as double, but it is int64"):
        check_type(Column("v", pa.int64(), ("x",)), pa.float64())
    values = np.ma.masked_array(np.array([1, 2**53 + 1, 3]), [False, True, False])
    assert to_arrow(values, pa.float64()).to_pylist() == [1.0, None, 3.0]
    with pytest.raises(InvalidInputError, match="Read it as int64"):
        to_arrow(np.ma.masked_array([1, 2**53 + 1], [False, False]), pa.float64())
