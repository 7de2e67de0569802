"""Conditions on coordinates select the rows that Spark's SQL selects."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pytest
import xarray as xr
from pyspark.sql.datasource import EqualTo, GreaterThan, In, LessThan, LessThanOrEqual, Not

from icechunk_async.arrow.table import to_arrow
from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.read.pushdown import Predicate, fulfilled, of_filter
from icechunk_async.sync.xarray import to_icechunk
from icechunk_async.zarr.queries.parsing import parse_where
from icechunk_async.zarr.queries.predicates import combined
from tests.spark.tables import read

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

    from icechunk_async.sync import Repository

_FLOATS: Final = [0.1, 0.2, -0.1, 0.0, -0.0, 1.5, 2.0, 16777216.0, 1e10, np.nan, np.inf, -np.inf]
_WHOLE: Final = [0, 1, 2, 3, 5, 7, 10, 50, 99, 100, 126, 127]
_DAYS: Final = np.array("2020-01-31", "M8[us]") + np.arange(12) * np.timedelta64(3 * 3600, "s")
COLUMNS: Final[dict[str, Any]] = {
    "f16": np.array([0.1, 0.2, -0.1, 0.0, -0.0, 1.5, 2.0, 2048, 65504, np.nan, np.inf, 1], "f2"),
    "f32": np.array(_FLOATS, "f4"),
    "f64": np.array([*_FLOATS[:7], 2.0**53, *_FLOATS[8:]]),
    "i8": np.array([*_WHOLE[:10], -128, -1], "i1"),
    "i32": np.array([*_WHOLE[:9], 2**31 - 1, -(2**31), 16777217], "i4"),
    "i64": np.array([*_WHOLE[:8], 2**53, 2**53 + 1, 2**63 - 1, -(2**63)], "i8"),
    "u8": np.array([*_WHOLE[:10], 200, 255], "u1"),
    "u64": np.array([*_WHOLE[:8], 2**53 + 1, 2**63, 2**64 - 1, 2**64 - 2], "u8"),
    "flag": np.array([True, False] * 6),
    "word": np.array(["", "a", "A", "ab", "b", "é", "z", "Zürich", "10", "9", "\U0001f9ca", "~"]),
    "day": np.where(np.arange(12) == 5, np.datetime64("NaT", "us"), _DAYS),
}
_ZONED: Final = "at"
_NUMBERS: Final = (
    *("0", "1", "2", "-1", "100", "127", "128", "255", "256", "3000000000", "16777216", "16777217"),
    *("9007199254740992", "9007199254740993", "9223372036854775807", "9223372036854775808"),
    *("18446744073709551615", "-9223372036854775808", "0.1", "-0.1", "0.2", "1.5", "2.50", ".5"),
    *("1.", "0.10000000149011612", "0.0999755859375", "16777216.5", "9007199254740992.5", "0.0"),
    *("1e-1", "1E0", "2e0", "-1e-1", "9.007199254740992e15", "0.1D", "0.1F", "16777217F"),
    *("2L", "7S", "5Y", "0.1BD", "1e2BD", "65504", "2048", "1e300", "-0.0", "-0e0", "3.4e38F"),
)
_WORDS: Final = ("''", "'a'", "'A'", "'é'", "'z'", "'10'", "'zz'", "'Z'", '"ab"')
_MOMENTS: Final = (
    *("'2020-01-31'", "'2020-02-01'", "'2020'", "'2020-02'", "'2020-01-31 06:00'"),
    *("'2020-01-31T09:00:00'", "'2020-01-31 12:00:00.000001'", "'1066-10-14'", "'9999-12-31'"),
)
_LITERALS: Final[dict[str, tuple[str, ...]]] = {
    "flag": ("true", "false", "TRUE"),
    "word": _WORDS,
    "day": (*_MOMENTS, "DATE '2020-02-01'", "timestamp '2020-01-31 09:00:00'", "date '1066-10-14'"),
    _ZONED: (
        *(f"{it[:-1]}Z'" for it in _MOMENTS if len(it) > 20),
        *("'2020-01-31 06:00:00+02:00'", "'2020-01-31 06:00:00-05:30'"),
        *("'2020-02-01 00:00:00 UTC'", "TIMESTAMP '2020-01-31 09:00:00Z'"),
    ),
}
_OPERATORS: Final = ("=", "==", "!=", "<>", "<", "<=", ">", ">=")


def columns(*, nan_as_null: bool) -> dict[str, pa.Array[Any]]:
    """Return columns as Spark sees them."""
    from icechunk_async.arrow.table import arrow_type

    found = {
        name: to_arrow(values, arrow_type(name, values.dtype), nan_as_null=nan_as_null)
        for name, values in COLUMNS.items()
    }
    found[_ZONED] = found["day"].cast(pa.timestamp("us", "UTC"))
    return found


def conditions(random: np.random.Generator, depth: int = 3) -> str:
    """Return conditions on some columns, in brackets."""
    if not depth or random.random() < 0.3:
        return str(random.choice(["", "", "not "])) + condition(random)
    joint = str(random.choice([" and ", " or ", " AND ", " Or "]))
    parts = [conditions(random, depth - 1) for _ in range(int(random.integers(1, 4)))]
    form = str(random.choice(["({})", "{}", "not ({})", "NOT(({}))"]))
    return form.format(joint.join(parts))


def condition(random: np.random.Generator) -> str:
    """Return a condition on one column."""
    name = str(random.choice([*COLUMNS, _ZONED]))
    literals = _LITERALS.get(name, _NUMBERS)
    shape = random.random()
    some = [str(random.choice(literals)) for _ in range(int(random.integers(1, 5)))]
    if shape < 0.6:
        return f"{name} {random.choice(_OPERATORS)} {some[0]}"
    if shape < 0.75:
        word = random.choice(["between", "between", "not between", "NOT BETWEEN"])
        return f"{name} {word} {some[0]} and {some[-1]}"
    return f"{name} {random.choice(['in', 'not in', 'NOT  IN'])} ({', '.join(some)})"


def selected(given: Mapping[str, pa.Array[Any]], text: str) -> list[bool]:
    """Return which rows conditions select."""
    mask = np.ones(12, bool)
    for it in parse_where(text):
        mask &= combined(it, lambda own: fulfilled(given[own.column], own, exact=True))
    return mask.tolist()


def _check_against_spark(spark: SparkSession, texts: list[str], *, nan_as_null: bool) -> None:
    """Compare the rows that conditions select with those that Spark selects."""
    given = columns(nan_as_null=nan_as_null)
    # Made by a task: Spark must not fold the conditions while it plans.
    table = pa.Table.from_pydict({"row": pa.array(range(12)), **given})
    frame = spark.createDataFrame(table)
    wanted: Mapping[str, list[Any]] = (
        frame.orderBy("row")
        .selectExpr(*(f"({it}) as `{number}`" for number, it in enumerate(texts)))
        .toArrow()
        .to_pydict()
    )
    for number, text in enumerate(texts):
        assert selected(given, text) == [it is True for it in wanted[str(number)]], text


@pytest.mark.parametrize("seed", range(2))
def test_random_conditions_select_what_spark_selects(spark: SparkSession, seed: int) -> None:
    """1,300 of every type of column, at its bounds, with every kind of literal."""
    random = np.random.default_rng(seed)
    for nan_as_null in (True, False):
        given = [condition(random) for _ in range(325)]
        _check_against_spark(spark, given, nan_as_null=nan_as_null)


@pytest.mark.parametrize("seed", range(2))
def test_random_brackets_select_what_spark_selects(spark: SparkSession, seed: int) -> None:
    """800 with `and`, `or` and `not`, where NULL is neither true nor false."""
    random = np.random.default_rng(seed)
    for nan_as_null in (True, False):
        given = [conditions(random) for _ in range(200)]
        _check_against_spark(spark, given, nan_as_null=nan_as_null)


def test_the_option_selects_what_the_query_selects(
    spark: SparkSession, repository: Repository, url: str
) -> None:
    """Through Spark, with coordinates of float32, also where NaN is no null."""
    coords = np.array([0.1, 0.2, 0.5, np.nan], "f4")
    dataset = xr.Dataset({"v": ("lat", np.arange(4))}, coords={"lat": coords})
    session = repository.writable_session("main")
    to_icechunk(dataset, session)
    session.commit("floats")
    reader = spark.read.format("icechunk").option("nan-as-null", "false")
    whole = reader.load(url)
    wanted = {"lat = 0.1": [], "lat > 0.1": [0, 1, 2, 3], "lat between 0.2 and 0.5F": [1, 2]}
    for text, rows in wanted.items():
        assert sorted(row.v for row in whole.where(text).collect()) == rows
        assert sorted(read(url, nan_as_null="false", where=text)["v"].to_pylist()) == rows
    few = reader.option("where", "lat >= 0.5 and lat != 0.5").load(url)
    assert [row.v for row in few.collect()] == [3]


def test_filters_that_spark_pushes_down_lose_no_row() -> None:
    """Their literals are of the column's type; NaN equals itself and is the greatest."""
    nan = float("nan")
    given = columns(nan_as_null=False)
    at = given["day"].to_pylist()
    for name, pushed, rows in (
        ("f64", EqualTo(("f64",), nan), {9}),
        ("f64", GreaterThan(("f64",), 1e300), {9, 10}),
        ("f64", Not(EqualTo(("f64",), nan)), {*range(12)} - {9}),
        ("f64", LessThan(("f64",), nan), {*range(12)} - {9}),
        ("f64", LessThanOrEqual(("f64",), nan), {*range(12)}),
        ("f64", GreaterThan(("f64",), nan), set[int]()),
        ("f64", In(("f64",), (nan, 0.1)), {0, 9}),
        ("u64", EqualTo(("u64",), Decimal(2**64 - 1)), {10}),
        ("day", EqualTo(("day",), at[1]), {1}),
        ("at", LessThan(("at",), at[2].replace(tzinfo=UTC)), {0, 1}),
        ("at", LessThan(("at",), datetime(2020, 1, 31)), {*range(12)}),
        ("word", GreaterThan(("word",), 5), {*range(12)}),
        ("day", In(("day",), (None, 3)), {*range(12)}),
    ):
        predicate = of_filter(pushed)
        assert predicate is not None
        found = fulfilled(given[name], predicate, exact=False)
        assert set(np.flatnonzero(found).tolist()) == rows, pushed
    assert not fulfilled(given["day"], Predicate("day", "null"), exact=False)[:5].any()
    assert fulfilled(given["day"], Predicate("day", "null"), exact=False)[5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f32 = 0x10", "neither a number of SQL nor quoted text"),
        ("f32 = 1_000", "neither a number"),
        ("f32 = 1j", "neither a number"),
        ("i8 = 128Y", "neither a number"),
        ("i8 = 1.5L", "neither a number"),
        ("f32 = 1e400", "neither a number"),
        ("f32 = 4e38F", "neither a number"),
        (f"f32 = 0.{'1' * 39}", "neither a number"),
        (r"word = 'a\n'", "backslash"),
        ("flag = 1", "of the type bool, with 1. Give true or false"),
        ("f32 = true", "Give numbers"),
        ("i8 = '1'", "Give numbers"),
        ("word = 10", "of the type string, with 10. Give quoted text"),
        ("day = 20200131", "Give quoted text"),
        ("day > 'now'", "Give a moment in ISO 8601"),
        ("day > '2020-02-31'", "of the type timestamp"),
        ("day > '2020-01-31 00:00:00Z'", "has no zone"),
        ("at > '2020-01-31'", "Name the zone"),
        ("at > DATE '2020-01-31'", "Name the zone"),
        ("word = DATE '2020-01-31'", "Give quoted text"),
        ("f32 = TIMESTAMP '2020-01-31'", "with TIMESTAMP '2020-01-31'. Give numbers"),
        ("day > DATE '2020-02-31'", "which is no date"),
        ("flag = true or f32 = true", "Give numbers"),
        ("(flag = true", "not understood at character 13"),
    ],
)
def test_what_sql_does_not_compare_so_is_refused(text: str, message: str) -> None:
    """With what to give instead."""
    with pytest.raises(InvalidInputError, match=message):
        selected(columns(nan_as_null=True), text)
