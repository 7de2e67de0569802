"""Conditions as SQL means them: brackets, `or`, `not`, missing values, moments; hostile text."""

# xarray is only partly typed.
# pyright: basic

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any, Final

import duckdb
import numpy as np
import pyarrow as pa
import pytest
import xarray as xr
import zarr

from icechunk_async import Repository
from icechunk_async.errors import IcechunkError, InvalidInputError
from icechunk_async.storage import open_storage
from icechunk_async.sync import Repository as BlockingRepository
from icechunk_async.sync.xarray import open_aggregates, open_where, to_icechunk
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.xarray import open_aggregates as async_open_aggregates
from icechunk_async.xarray import open_where as async_open_where
from icechunk_async.zarr.queries.parsing import parse_where
from icechunk_async.zarr.queries.predicates import (
    Junction,
    Moment,
    Predicate,
    about,
    combined,
    leaves,
    split_by_column,
)
from tests.helpers import memory_url
from tests.unit.zarr.queries.test_aggregate import NO_INLINE, field
from tests.unit.zarr.queries.test_where import whole_mask
from tests.unit.zarr.queries.truth import put_array

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

ROWS, COLUMNS = 24, 6
CHUNK = (4, 3)
DAYS: Final = np.datetime64("2020-01-30", "us") + np.arange(ROWS) * np.timedelta64(21600, "s")


def arrays() -> dict[str, tuple[npt.NDArray[Any], tuple[str, ...], dict[str, Any]]]:
    """Return arrays with missing values, their dimensions, and their attributes."""
    rng = np.random.default_rng(7)
    shape = (ROWS, COLUMNS)
    whole = np.sort(rng.integers(0, 9, ROWS * COLUMNS)).reshape(shape)
    floats = np.where(rng.random(shape) < 0.2, np.nan, whole / 4)
    words = np.array(["", "a", "b", "O", "zz", "-"], np.dtypes.StringDType())
    some_days = np.where(np.arange(ROWS) % 7 == 3, np.datetime64("NaT", "us"), DAYS)
    return {
        "n": (whole.astype("i4"), ("y", "x"), {"_FillValue": 5}),
        "big": (np.where(whole > 4, 2**53 + whole, whole), ("y", "x"), {"_FillValue": 0}),
        "f": (floats, ("y", "x"), {}),
        "word": (words[rng.integers(0, 6, shape)], ("y", "x"), {"missing_value": "-"}),
        "one": (np.ones(shape, "i1"), ("y", "x"), {}),
        "flag": (rng.random(shape) < 0.5, ("y", "x"), {}),
        "y": (np.linspace(-90, 90, ROWS).round(1), ("y",), {}),
        "x": (np.arange(COLUMNS) * 10, ("x",), {}),
        "day": (some_days, ("y",), {}),
        "cf": (np.arange(ROWS) * 6, ("y",), {"units": "hours since 2020-01-30", "_FillValue": 18}),
    }


def table() -> pa.Table:
    """Return the same as a table with NULL where a value is missing, a row for each cell."""
    found: dict[str, Any] = {"row": np.arange(ROWS * COLUMNS)}
    for name, (values, dims, attributes) in arrays().items():
        given = values
        if name == "cf":
            given = np.datetime64("2020-01-30", "us") + values * np.timedelta64(3600, "s")
        wide = np.broadcast_to(
            given if len(dims) == 2 else given[:, None] if dims == ("y",) else given[None, :],
            (ROWS, COLUMNS),
        ).reshape(-1)
        missing = np.zeros(values.shape, bool)
        if values.dtype.kind in "fM":
            missing = np.isnan(values)
        for mark in attributes.values():
            if not (isinstance(mark, str) and name == "cf"):
                missing |= values == mark
        missing = np.broadcast_to(
            missing if len(dims) == 2 else missing[:, None] if dims == ("y",) else missing[None, :],
            (ROWS, COLUMNS),
        ).reshape(-1)
        if values.dtype.kind == "T":
            found[name] = pa.array(
                [None if gone else str(it) for it, gone in zip(wide, missing, strict=True)]
            )
        else:
            found[name] = pa.array(wide, mask=missing, from_pandas=True)
    return pa.table(found)


_NUMBERS: Final = ("0", "2", "3", "5", "8", "1.5", "-0.25", "2e0", "100", "1e300", "0.75")
_BIG: Final = ("3", "9007199254740998", "9007199254740999", "9007199254740999.5")
_MOMENTS: Final = (
    *("'2020-02-01'", "DATE '2020-02-01'", "date '2020-01-31'", "'2020-02-03 18:00:00'"),
    *("TIMESTAMP '2020-02-02 06:00:00'", "timestamp '2020-02-02'", "'2020-02-01 12:00:00.000001'"),
)
LITERALS: Final[dict[str, tuple[str, ...]]] = {
    "n": _NUMBERS,
    "big": _BIG,
    "f": _NUMBERS,
    "word": ("'a'", "''", "'b'", "'zzz'", "'o'"),
    "flag": ("true", "FALSE"),
    "y": ("0", "-90", "45.5", "90", "-82.2"),
    "x": ("10", "20", "25", "0"),
    "day": _MOMENTS,
    "cf": _MOMENTS,
}


def condition(rng: random.Random, depth: int = 3) -> str:
    """Return random conditions."""
    if depth and rng.random() < 0.6:
        parts = [condition(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
        text = rng.choice((" and ", " OR ", "\n or ", " and ")).join(parts)
        return rng.choice(("({})", "not ({})", "{}", "NOT({})")).format(text)
    name = rng.choice(sorted(LITERALS))
    one, other, third = (rng.choice(LITERALS[name]) for _ in range(3))
    shape = rng.random()
    negation = rng.choice(("", "", "not "))
    if shape < 0.6:
        return f"{negation}{name} {rng.choice(('=', '<>', '!=', '<', '<=', '>', '>='))} {one}"
    if shape < 0.8:
        return f"{name} {negation}between {one} and {other}"
    return f"{name} {negation}in ({one}, {other}, {third})"


async def commit_all(repository: Repository) -> None:
    """Commit the arrays."""
    session = await repository.writable_session("main")
    for name, (values, dims, attributes) in arrays().items():
        chunks = {2: CHUNK, 1: (CHUNK[0],)}[values.ndim]
        await put_array(
            session, f"/{name}", values, chunks, attributes=attributes, names=dims, fill=None
        )
    await session.commit("arrays")


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
@pytest.mark.parametrize("seed", range(2))
async def test_random_conditions_select_what_duckdb_selects(seed: int) -> None:
    """300 with brackets, on up to ten arrays; with and without statistics, and in regions.

    No chunk is left out that has such a cell, and none is taken for certain that has others.
    """
    rng = random.Random(seed)
    cells = table()
    connection = duckdb.connect()
    connection.register("cells", cells)
    left_out = certain = 0
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        await commit_all(repository)
        for number in range(150):
            if number == 50:
                await repository.analyze()
            session = await repository.readonly_session("main")
            where = f"({condition(rng)}) and one = 1"
            found = connection.table("cells").filter(where).project("row").fetchall()
            wanted = np.zeros(ROWS * COLUMNS, bool)
            wanted[[row for (row,) in found]] = True
            region = None if rng.random() < 0.7 else (slice(3, 17), slice(2, 5))
            inside = np.zeros((ROWS, COLUMNS), bool)
            inside[region or ()] = True
            selection = await session.where(where, region=region)
            mask = await whole_mask(selection)
            expected = wanted.reshape(ROWS, COLUMNS) & inside
            np.testing.assert_array_equal(mask, expected, err_msg=where)
            left_out += selection.chunks - len(selection.candidates)
            plainly = await session.aggregate("f", "count", where=where, region=region)
            assert plainly.value == int((expected & ~np.isnan(arrays()["f"][0])).sum()), where
            certain += int(selection.certain.sum())
    assert left_out > 300
    assert certain > 100


async def test_disjunctions_leave_out_chunks_that_no_part_needs() -> None:
    """By statistics and by coordinates; chunks of which all cells match are not read."""
    async with open_storage(memory_url()) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.create(storage, config=NO_INLINE) as repository:
            t = await field(repository)
            await repository.analyze()
        lat = np.linspace(-90, 90, 100)[:, None]
        async with Repository.open(storage, config=NO_INLINE) as repository:
            session = await repository.readonly_session("main")
            for where, wanted in (
                ("t > 280 or lat > 80", (t > 280) | (lat > 80)),
                ("not (t <= 280 and lat <= 80)", (t > 280) | (lat > 80)),
                ("(lat > 80 or lat < -80) and t > 0", (abs(lat) > 80) & (t > 0)),
                ("lat > 10.5 and lat < 11 or t > 1e9", t > 1e9),
                ("(t > 280 and lat > 0) or (t > 1e9 and lat < 0)", (t > 280) & (lat > 0)),
            ):
                storage.forget()
                selection = await session.where(where)
                chunks = [key for _, key in storage.log if key.startswith("chunks/")]
                assert len(chunks) == 4, where  # the coordinate, once
                needed = wanted.reshape(10, 10, 10, 10).any((1, 3))
                assert {tuple(it) for it in selection.candidates.tolist()} == {
                    tuple(it) for it in np.argwhere(needed).tolist()
                }, where
                storage.forget()
                np.testing.assert_array_equal(await whole_mask(selection), wanted)
                read = [key for _, key in storage.log if key.startswith("chunks/")]
                assert len(read) == int(np.count_nonzero(~selection.certain)), where


def test_code_that_blocks_and_lazy_arrays_take_brackets(tmp_path: Path) -> None:
    """The four ways in which conditions are given to sessions."""
    repository = BlockingRepository.create(str(tmp_path / "r"))
    session = repository.writable_session("main")
    array = zarr.create_array(
        session.store, name="a", data=np.arange(12), chunks=(3,), dimension_names=["x"]
    )
    assert array.shape == (12,)
    where = "(a < 2 or a >= 10) and not a in (0, 11)"
    assert [it.indices().ravel().tolist() for it in session.where(where)] == [[1], [10]]
    assert session.aggregate("a", "sum", where=where).value == 11
    assert open_where(session, where).dropna("x").to_numpy().tolist() == [1, 10]
    assert int(open_aggregates(session, "a", "sum", where=where)["sum"]) == 11
    with pytest.raises(IcechunkError, match="not understood at character 7"):
        session.where("(a < 2")


async def test_lazy_arrays_of_asyncio_take_brackets() -> None:
    """With an array beside the one that is asked for."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await put_array(session, "/a", np.arange(12), (3,), names=("x",))
        await put_array(session, "/b", np.arange(12) % 2, (4,), names=("x",))
        where = "not (a > 3 or b = 1)"
        found = await (await async_open_where(session, where)).load_async()
        assert found.dropna("x").to_numpy().tolist() == [0, 2]
        sums = await async_open_aggregates(session, "a", "sum", where=where, per_chunk_of="x")
        assert (await sums.load_async())["sum"].to_numpy().tolist() == [2, 0, 0, 0]


CF_TIMES: Final[dict[str, tuple[str, str]]] = {
    "days": ("days since 2000-01-01", "i8"),
    "hours": ("hours since 1900-01-01 00:00:0.0", "i4"),
    "seconds": ("seconds since 1970-1-1 0:0:0", "i8"),
    "nanoseconds": ("nanoseconds since 2020-01-01T00:00:00Z", "i8"),
    "fractions": ("days since 1900-01-01", "f8"),
    "uneven": ("days since 1970-01-01", "f8"),
    "single": ("hours since 2020-01-30 01:30:00", "f4"),
    "zone": ("minutes since 2020-01-30 01:30:00 +05:30", "i4"),
}


@pytest.mark.parametrize("kind", CF_TIMES)
@pytest.mark.filterwarnings("ignore")
def test_times_of_cf_are_compared_as_xarray_decodes_them(tmp_path: Path, kind: str) -> None:
    """Numbers of many units and starts, whole and not; numbers may still be compared."""
    units, dtype = CF_TIMES[kind]
    step = np.timedelta64(24 if kind == "days" else 1, "h").astype("m8[us]")
    moments = np.datetime64("2020-01-30T01:30" if kind == "single" else "2020-01-30", "us")
    if kind == "uneven":
        step = np.timedelta64(1_234_567, "us")
    moments = moments + np.arange(60) * step
    if kind == "zone":
        moments = moments - np.timedelta64(30, "m")
    dataset = xr.Dataset({"v": ("time", np.arange(60))}, coords={"time": moments.astype("M8[ns]")})
    repository = BlockingRepository.create(str(tmp_path / "r"))
    session = repository.writable_session("main")
    encoding = {"units": units.replace("Z", ""), "dtype": dtype, "chunks": (7,)}
    to_icechunk(dataset, session, encoding={"time": encoding, "v": {"chunks": (7,)}})
    stored = zarr.open_array(session.store, path="time")
    assert stored.dtype == np.dtype(dtype)
    decoded = xr.open_zarr(session.store, consolidated=False).time.to_numpy().astype("M8[us]")
    if kind == "uneven":  # xarray cuts off what a double lost; what was written is nearer
        decoded = moments
    np.testing.assert_array_equal(decoded, moments)
    for number in range(60):
        equal = session.where(f"v >= 0 and time = '{decoded[number]}'")
        assert [it.indices()[:, 0].tolist() for it in equal] == [[number]]
    for number in (0, 17, 59):
        for shift in (-1, 0, 1):
            at = decoded[number] + np.timedelta64(shift, "us")
            for op, compare in (("<", np.less), (">=", np.greater_equal), ("=", np.equal)):
                where = f"v >= 0 and time {op} TIMESTAMP '{at}'"
                rows = [int(it) for cells in session.where(where) for it in cells.indices()[:, 0]]
                assert rows == np.flatnonzero(compare(decoded, at)).tolist(), where
    few = session.aggregate("v", "count", where=f"time > {stored[17]!s} and time < '2020-01-31'")
    assert few.value == int(
        ((decoded > decoded[17]) & (decoded < np.datetime64("2020-01-31"))).sum()
    )


@pytest.mark.parametrize(
    ("attributes", "literal", "message"),
    [
        ({"units": "months since 2000-01-01"}, "'2020-01-01'", "no moment can be compared with"),
        (
            {"units": "days since 2000-01-01", "calendar": "noleap"},
            "DATE '2020-01-01'",
            "in the calendar 'noleap', which no moment",
        ),
        ({"units": "days since 0001-01-01"}, "'2020-01-01'", "Julian before 1582-10-15"),
        ({"units": "days since 2000-13-01"}, "'2020-01-01'", "with '2020-01-01'"),
        ({"units": "days since 2000-01-01"}, "'soon'", "Give a moment in ISO 8601"),
        ({"units": "days"}, "DATE '2020-01-01'", "with DATE '2020-01-01'. Give numbers"),
        ({}, "'2020-01-01'", "Give numbers"),
    ],
)
async def test_moments_are_refused_where_times_are_in_other_calendars(
    attributes: dict[str, Any], literal: str, message: str
) -> None:
    """And of numbers that are no times."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await put_array(session, "/a", np.arange(12), (3,), attributes=attributes)
        with pytest.raises(InvalidInputError, match=re.escape(message)):
            await session.where(f"a > {literal}")
        assert await whole_mask(await session.where("a > 10")) is not None


async def test_moments_are_no_text() -> None:
    """A date is not compared with text, truth values or numbers of no unit."""
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        await commit_all(repository)
        session = await repository.readonly_session("main")
        for name, message in (("word", "Give text"), ("flag", "Give true"), ("n", "Give numbers")):
            with pytest.raises(InvalidInputError, match=f"with DATE '2020-01-01'. {message}"):
                await session.where(f"{name} = DATE '2020-01-01'")


def test_not_is_left_to_comparisons() -> None:
    """By the laws of De Morgan; of `between`, too, in which `and` joins no conditions."""
    found = parse_where("not (a < 1 or not b between 2 and 3 and c in ('x')) and `or` <> .5")
    assert [(it.column, it.op) for it in leaves(*found)] == [
        ("a", ">="), ("b", ">="), ("b", "<="), ("c", "not in"), ("or", "!=")
    ]  # fmt: skip
    assert isinstance(found[1], Junction)
    assert found[1].is_any
    assert parse_where("not not ((a = 1))") == (Predicate("a", "=", (1,)),)
    assert parse_where("date > date '2020-01-31'") == (
        Predicate("date", ">", (Moment("DATE", "2020-01-31"),)),
    )
    assert parse_where(" \n") == ()


def test_what_is_known_of_one_column_is_implied() -> None:
    """By all rows, with any values elsewhere; and the parts on one column stay together."""
    (where,) = parse_where("(a < 1 and b = 2 and a > -3) or (a > 7 and c = 1)")
    implied = about(where, "a")
    assert implied is not None
    assert [it.op for it in leaves(implied)] == ["<", ">", ">"]
    assert about(where, "b") is None
    split = split_by_column(where, lambda column, own: (column, own))
    assert sorted(column for column, _ in leaves(split)) == ["a", "a", "b", "c"]
    rng = np.random.default_rng(0)
    rows = {name: rng.integers(-5, 10, 500) for name in "abc"}

    def mask(it: Predicate) -> npt.NDArray[np.bool_]:
        compare = {"<": np.less, ">": np.greater, "=": np.equal}[it.op]
        return np.asarray(compare(rows[it.column], it.values[0]))

    whole = combined(where, mask)
    assert not (whole & ~combined(implied, mask)).any()
    np.testing.assert_array_equal(whole, combined(split, lambda it: combined(it[1], mask)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a >", r"at character 4: there is the end, instead of a number, quoted text"),
        ("a > 3 and", r"at character 10: there is the end, instead of a column"),
        ("(a > 3", r"at character 7: there is the end, instead of 'and', 'or' or '\)'"),
        ("a > 3)", r"at character 6: there is '\)', instead of 'and', 'or' or the end"),
        ("()", r"at character 2: there is '\)', instead of a column"),
        ("a > 3 b > 4", r"at character 7: there is 'b', instead of 'and'"),
        ("a > 3 && b > 4", r"at character 7: there is '&& b > 4'"),
        ("a > 'x", r"at character 5: .* instead of the quote that ends it"),
        ("`a > 3", r"at character 1: .* instead of the quote that ends it"),
        ("a = 'O''Hare'", r"at character 8"),
        ("and > 3", r"at character 1: there is 'and', instead of a column"),
        ("a between 1 or 2", r"at character 13: there is 'or', instead of 'and', and the upper"),
        ("a in ()", r"at character 7: there is '\)', instead of a number"),
        ("a in (1", r"at character 8: there is the end, instead of ',' or '\)'"),
        ("a in 1", r"at character 6: there is '1', instead of '\('"),
        ("a is null", r"at character 3: there is 'is', instead of an operator"),
        ("a not > 3", r"at character 7: there is '>', instead of an operator"),
        ("3 < a", r"holds 'a' at character 5, .* Columns are compared with literals"),
        ("a > b", r"holds 'b' at character 5, which is neither a number of SQL nor quoted text"),
        ("a > DATE '2020-02-31'", r"holds DATE '2020-02-31' at character 5, which is no date"),
        ("a > DATE '2020'", r"Write it in ISO 8601, such as DATE '2020-01-31'"),
        ("a > date '2020-01-01 12:00'", r"which is no date"),
        ("a > TIMESTAMP 'now'", r"which is no timestamp. .* TIMESTAMP '2020-01-31 12:00:00'"),
        ("a > DATE 3", r"holds 'DATE' at character 5, which is neither"),
        (r"a = 'x\y'", r"at character 5, with a backslash"),
    ],
)
def test_errors_say_where_and_what_to_do(text: str, message: str) -> None:
    """The place, what is there, and what could be there."""
    with pytest.raises(InvalidInputError, match=message) as caught:
        parse_where(text, "The condition")
    assert str(caught.value).startswith("The condition ")


@pytest.mark.parametrize("opening", ["(", "not (", "not ", "(not(", " ( ( not "])
def test_conditions_are_nested_to_a_bounded_depth(opening: str) -> None:
    """Text of a million brackets is an error, and no crash; so is one bracket too many."""
    levels = opening.count("(") + opening.count("not")
    closing = ")" * opening.count("(")
    for count, fits in ((64 // levels, True), (64 // levels + 1, False), (300_000, False)):
        text = f"{opening * count} a > 1 {closing * count}"
        if fits:
            assert list(leaves(*parse_where(text)))
        else:
            with pytest.raises(InvalidInputError, match="at most 64 brackets"):
                parse_where(text)


def test_any_text_is_parsed_or_refused() -> None:
    """Pieces of conditions in any order: never another error; long ones in linear time."""
    rng = random.Random(0)
    pieces = (
        *("(", ")", "and", "or", "not", "in", "between", "a", "`b`", "=", "<>", ",", "1", "-", "."),
        *("'x'", '"y"', "'", "`", "date", "timestamp", "'2020-01-01'", "1e5", "99999d", "\0", "é"),
    )
    understood = 0
    for _ in range(20_000):
        text = " ".join(rng.choice(pieces) for _ in range(rng.randrange(1, 9)))
        try:
            parse_where(text)
        except InvalidInputError:
            continue
        understood += 1
    assert understood > 10
    many = " or ".join(["a > 1"] * 20_000)
    assert len(list(leaves(*parse_where(many)))) == 20_000
    for hostile in (
        "9" * 100_000,
        "a > " + "9" * 100_000 + "L",
        "a" * 100_000,
        " " * 100_000 + "x",
    ):
        with pytest.raises(InvalidInputError):
            parse_where(hostile)
