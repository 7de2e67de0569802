"""Every value arrives in an array as SQL means it, or is refused; without Spark."""

from __future__ import annotations

import warnings
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import xarray as xr

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.options import WriteOptions
from icechunk_async.spark.write.commit import commit_rows
from icechunk_async.spark.write.plan import WritePlan
from icechunk_async.spark.write.task import write_batches
from icechunk_async.spark.write.values import Encoding, ValueRefusedError, encode_column

if TYPE_CHECKING:
    from icechunk_async.sync import Repository

DAYS = {"units": "days since 2000-01-01"}
SECONDS = {"units": "seconds since 1970-01-01 00:00:00", "calendar": "proleptic_gregorian"}
NANOSECONDS = {"units": "nanoseconds since 1970-01-01"}
NOON = datetime(2020, 1, 1, 12)
MICROSECOND = NOON.replace(microsecond=1)


def _encode(
    dtype: str,
    value: object,
    kind: pa.DataType,
    cf: dict[str, object] | None = None,
    *,
    allow: bool = False,
) -> Any:
    encoding = Encoding("a", np.dtype(dtype), cf or {})
    # Beside another, which has to be found.
    column = pa.concat_arrays([pa.array([None], kind), pa.array([value], kind)])
    return encode_column(column.slice(1), encoding, allow=allow)[0]


@pytest.mark.parametrize(
    ("dtype", "value", "kind", "cf"),
    [
        ("f4", 1e300, pa.float64(), {}),
        ("f4", 1e-300, pa.float64(), {}),
        ("f2", 70_000.0, pa.float64(), {}),
        ("f8", 2**53 + 1, pa.int64(), {}),
        ("f4", 16777217, pa.int32(), {}),
        ("f8", Decimal(2**53 + 1), pa.decimal128(20, 0), {}),
        ("i4", Decimal("1.5"), pa.decimal128(5, 1), {}),
        ("i1", 200, pa.int16(), {}),
        ("u1", -1, pa.int8(), {}),
        ("u8", -1, pa.int64(), {}),
        ("i8", 2**64 - 1, pa.uint64(), {}),
        ("i8", 2.0**63, pa.float64(), {}),
        ("i4", 0.5, pa.float64(), {}),
        ("i4", float("nan"), pa.float64(), {}),
        ("?", 2, pa.int32(), {}),
        ("U3", "abcdef", pa.string(), {}),
        ("S3", "abcdef", pa.string(), {}),
        ("S3", "é", pa.string(), {}),
        ("U3", "a\0", pa.string(), {}),
        ("f8", "1", pa.string(), {}),
        ("i4", "1", pa.string(), {}),
        ("U3", 1, pa.int32(), {}),
        ("O", 1, pa.int32(), {}),
        ("f8", NOON, pa.timestamp("us"), {}),
        ("i8", NOON, pa.timestamp("us"), {}),
        ("U30", NOON, pa.timestamp("us"), {}),
        ("i4", 1, pa.int32(), DAYS),
        ("i4", NOON, pa.timestamp("us"), DAYS),
        ("i8", NOON.replace(microsecond=1), pa.timestamp("us"), SECONDS),
        ("M8[s]", NOON.replace(microsecond=1), pa.timestamp("us"), {}),
        ("f4", NOON.replace(microsecond=1), pa.timestamp("us"), SECONDS),
        ("i2", date(2200, 1, 1), pa.date32(), DAYS),
        ("i8", date(1500, 1, 1), pa.date32(), DAYS),
        ("i4", timedelta(seconds=1.5), pa.duration("us"), {"units": "seconds"}),
        ("u8", datetime(1969, 12, 31), pa.timestamp("us"), SECONDS),
        # Which NumPy or xarray would count by numbers that overflow.
        ("M8[ns]", date(5000, 1, 1), pa.date32(), {}),
        ("M8[ns]", datetime(1, 1, 1), pa.timestamp("us"), {}),
        ("m8[ns]", timedelta(days=999_999), pa.duration("us"), {}),
        ("i8", datetime(9999, 1, 1), pa.timestamp("us"), NANOSECONDS),
        ("i8", NOON, pa.timestamp("us"), {"units": "nanoseconds since 1970-1-1"}),
        ("i8", timedelta(days=999_999), pa.duration("us"), {"units": "nanoseconds"}),
        ("f8", MICROSECOND.replace(year=2400), pa.timestamp("us"), SECONDS),
        ("f8", timedelta(microseconds=2**53 + 1), pa.duration("us"), {"units": "microseconds"}),
        ("i8", datetime(2020, 1, 31), pa.timestamp("us"), {**DAYS, "calendar": "360_day"}),
        ("u8", Decimal(2**64), pa.decimal128(38, 0), {}),
        # Read as null.
        ("i4", -9, pa.int32(), {"_FillValue": -9}),
        ("f4", -9.0, pa.float64(), {"_FillValue": np.float32(-9)}),
        ("i2", 0.04, pa.float64(), {"_FillValue": 0, "scale_factor": 0.1}),
        ("i1", 255, pa.int16(), {"_FillValue": -1, "_Unsigned": "true"}),
        ("f8", -9.0, pa.float64(), {"_FillValue": np.nan, "missing_value": -9.0}),
        ("i4", 8, pa.int32(), {"_FillValue": 7, "missing_value": [9, 8]}),
        # Packed, and too large.
        ("i2", 4000.0, pa.float64(), {"scale_factor": 0.1}),
        # Which xarray reads in double precision.
        ("i8", 2**53 + 1, pa.int64(), {"_FillValue": -1}),
        ("i8", 2**63 - 1, pa.int64(), {"missing_value": -1}),
        ("u8", 2**64 - 1, pa.uint64(), {"_FillValue": 0}),
        ("i8", 2**53 + 1, pa.int64(), {"scale_factor": 1.0}),
        ("i1", 2**53 + 1, pa.int64(), {"add_offset": 2**53}),
        ("i1", 2, pa.int64(), {"dtype": "bool"}),
        ("f8", 1e300, pa.float64(), {"scale_factor": 1e-300}),
        ("i1", 256, pa.int16(), {"_Unsigned": "true"}),
    ],
)
def test_value_that_would_change_is_refused(
    dtype: str, value: object, kind: pa.DataType, cf: dict[str, object]
) -> None:
    """The error names the column, the value, its type, the array's type and the row."""
    with pytest.raises(ValueRefusedError) as raised:
        _encode(dtype, value, kind, cf)
    shown = str(value) if isinstance(value, date | timedelta | Decimal) else repr(value)
    assert str(raised.value).startswith(f"The row number 0 has {shown[:90]}")
    assert raised.value.row == 0
    assert raised.value.context["column"] == "a"
    assert raised.value.context["type"] == str(kind)
    assert f"the array, of {str(np.dtype(dtype)).lstrip('<|')}, cannot" in str(raised.value)


@pytest.mark.parametrize(
    ("dtype", "value", "kind", "cf", "stored"),
    [
        ("f4", 0.1, pa.float64(), {}, np.float32(0.1)),
        ("f4", float("inf"), pa.float64(), {}, np.inf),
        ("f2", -0.0, pa.float64(), {}, 0),
        ("f4", 16777216, pa.int32(), {}, 16777216),
        ("f8", 2**60, pa.int64(), {}, 2.0**60),
        ("i8", 2**63 - 1, pa.int64(), {}, 2**63 - 1),
        ("u8", 2**64 - 1, pa.uint64(), {}, 2**64 - 1),
        ("i4", 3.0, pa.float64(), {}, 3),
        ("i8", Decimal("3.0"), pa.decimal128(5, 1), {}, 3),
        ("f8", Decimal("0.1"), pa.decimal128(5, 1), {}, 0.1),
        ("?", True, pa.bool_(), {}, True),
        ("i1", True, pa.bool_(), {}, 1),
        ("U3", "abc", pa.string(), {}, "abc"),
        ("S3", b"\xff\0a", pa.binary(), {}, b"\xff\0a"),
        ("O", "any length", pa.string(), {}, "any length"),
        ("i4", date(2020, 1, 1), pa.date32(), DAYS, 7305),
        ("f8", NOON, pa.timestamp("us"), DAYS, 7305.5),
        ("f8", NOON.replace(microsecond=1), pa.timestamp("us"), SECONDS, 1577880000.000001),
        ("i8", NOON, pa.timestamp("us"), {"units": "seconds since 2020-01-01T00:00"}, 43200),
        ("M8[h]", NOON, pa.timestamp("us"), {}, np.datetime64("2020-01-01T12")),
        # Outside of the range of nanoseconds, which these arrays do not have.
        ("i4", date(9999, 12, 31), pa.date32(), DAYS, 2921939),
        ("i8", datetime(1, 1, 1), pa.timestamp("us"), SECONDS, -62135596800),
        ("i8", timedelta(days=2), pa.duration("us"), {"units": "hours"}, 48),
        ("i8", timedelta(seconds=2), pa.duration("us"), {"units": "nanoseconds"}, 2 * 10**9),
        ("i8", MICROSECOND, pa.timestamp("us"), NANOSECONDS, 1577880000000001000),
        ("f8", MICROSECOND, pa.timestamp("us"), NANOSECONDS, 1577880000000001024),
        ("i8", datetime(1677, 9, 22), pa.timestamp("us"), NANOSECONDS, -9223286400000000000),
        ("u8", Decimal(2**64 - 1), pa.decimal128(20, 0), {}, 2**64 - 1),
        ("S3", b"abc", pa.large_binary(), {}, b"abc"),
        ("f4", None, pa.float64(), {"_FillValue": np.float32(-1)}, -1),
        ("f4", float("nan"), pa.float64(), {"_FillValue": np.float32(-1)}, -1),
        ("i2", None, pa.int32(), {"_FillValue": -9}, -9),
        ("i2", None, pa.int32(), {"_FillValue": -9, "missing_value": -8}, -9),
        ("i2", None, pa.int32(), {"missing_value": [-8, -7]}, -8),
        ("i2", None, pa.float64(), {"_FillValue": -9, "scale_factor": 0.1}, -9),
        ("i4", None, pa.date32(), {"_FillValue": -9, **DAYS}, -9),
        ("i8", 2**53 + 2, pa.int64(), {"_FillValue": -1}, 2**53 + 2),
        ("i4", 2**31 - 1, pa.int64(), {"_FillValue": -1}, 2**31 - 1),
        ("i8", 2**53 + 1, pa.int64(), {"_Unsigned": "true"}, 2**53 + 1),
        ("i1", True, pa.bool_(), {"dtype": "bool"}, 1),
        ("i2", 5.04, pa.float64(), {"scale_factor": 0.1, "add_offset": 2}, 30),
        ("i1", 200, pa.int16(), {"_Unsigned": "true"}, -56),
        ("i1", None, pa.int16(), {"_Unsigned": "true", "_FillValue": 255}, -1),
    ],
)
def test_value_that_fits_is_stored(
    dtype: str, value: object, kind: pa.DataType, cf: dict[str, object], stored: object
) -> None:
    """Exactly, or rounded as floating-point numbers and packed arrays are."""
    found = _encode(dtype, value, kind, cf)
    assert found == stored
    assert np.asarray(found).dtype == np.dtype(dtype) or dtype == "O"


def test_the_least_duration_does_not_wrap_to_zero() -> None:
    """Python has none so long, and its absolute value is not a number of 64 bits."""
    encoding = Encoding("a", np.dtype("i8"), {"units": "nanoseconds"})
    with pytest.raises(ValueRefusedError, match="which the array, of int64, cannot hold"):
        encode_column(pa.array([5, -(2**63)], pa.duration("us")), encoding)


@pytest.mark.parametrize(
    ("dtype", "kind", "cf", "stored"),
    [
        ("f4", pa.float64(), {}, "nan"),
        ("f8", pa.timestamp("us"), DAYS, "nan"),
        ("M8[s]", pa.timestamp("us"), {}, "NaT"),
        ("m8[s]", pa.duration("us"), {}, "NaT"),
        ("i4", pa.int32(), {}, None),
        ("i4", pa.timestamp("us"), DAYS, None),
        ("?", pa.bool_(), {}, None),
        ("U3", pa.string(), {}, None),
    ],
)
def test_null_without_a_fill_value_is_nan_nat_or_refused(
    dtype: str, kind: pa.DataType, cf: dict[str, object], stored: str | None
) -> None:
    """Refused where the type of the array has neither."""
    if stored is not None:
        assert str(np.asarray(_encode(dtype, None, kind, cf))) == stored
        return
    with pytest.raises(ValueRefusedError, match="no value for missing data"):
        _encode(dtype, None, kind, cf)


def test_encodings_are_those_of_xarray() -> None:
    """Stored values decode to what the rows had, for every encoding that this module knows."""
    frame = {
        "t": pa.array([date(2020, 2, 29), None, date(1999, 1, 1)], pa.date32()),
        "u": pa.array([200, None, 3], pa.int16()),
        "p": pa.array([5.5, None, -3.0], pa.float64()),
        "n": pa.array([1.5, None, 2.5], pa.float64()),
    }
    cf: dict[str, tuple[str, dict[str, object]]] = {
        "t": ("i4", {"_FillValue": np.int32(-1), "units": "days since 1970-01-01"}),
        "u": ("i1", {"_FillValue": np.int8(-1), "_Unsigned": "true"}),
        "p": ("i2", {"_FillValue": np.int16(-99), "scale_factor": 0.5, "add_offset": 1.0}),
        "n": ("f4", {"_FillValue": np.float32(-1)}),
    }
    stored = xr.Dataset(
        {
            name: ("row", encode_column(column, Encoding(name, np.dtype(cf[name][0]), cf[name][1])))
            for name, column in frame.items()
        }
    )
    for name, (_, attributes) in cf.items():
        stored[name].attrs.update(attributes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decoded = xr.decode_cf(stored)
    for name, column in frame.items():
        found = decoded[name].values
        missing = np.isnat(found) if name == "t" else np.isnan(found)
        values = (found.astype("M8[D]") if name == "t" else found).tolist()
        shown = [None if gone else it for gone, it in zip(missing, values, strict=True)]
        assert shown == column.to_pylist()


ENCODINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "a float's fill value": ("f4", {"_FillValue": -1.0}),
    "NaN, and another": ("f8", {"missing_value": -1.0}),
    "two": ("f8", {"_FillValue": -1.0, "missing_value": -1.0}),
    "packed": ("f8", {"dtype": "i2", "_FillValue": -9, "scale_factor": 0.5, "add_offset": 3.5}),
    "unsigned": ("f4", {"dtype": "i1", "_Unsigned": "true", "_FillValue": np.int8(-1)}),
    "unsigned twice": ("f4", {"dtype": "u1", "_Unsigned": "true", "_FillValue": np.uint8(255)}),
    "truth values": ("i1", {}),
    "an integer's": ("f8", {"dtype": "i4", "_FillValue": np.int32(-1)}),
    "an integer's, named otherwise": ("f8", {"dtype": "i4", "missing_value": np.int32(-1)}),
}


@pytest.mark.parametrize("named", ENCODINGS)
def test_arrays_of_xarray_give_back_what_they_took(repository: Repository, named: str) -> None:
    """The values -1, 0, 255 and null: each is refused, or read as it was written."""
    dtype, encoding = ENCODINGS[named]
    session = repository.writable_session("main")
    attributes = {"dtype": "bool"} if named == "truth values" else {}
    xr.Dataset({"v": ("x", np.zeros(4, dtype), attributes)}).to_zarr(
        session.store, zarr_format=3, consolidated=False, encoding={"v": encoding}
    )
    session.commit("made")
    refused: list[float | None] = []
    for value in (-1.0, 0.0, 255.0, None):
        rows = pa.RecordBatch.from_pydict({"x": [1], "v": pa.array([value], pa.float64())})
        options = WriteOptions(repository.storage, cores=1)
        plan = WritePlan.begin(options, rows.schema.names, overwrite=True, repository=repository)
        try:
            commit_rows(plan, [write_batches(plan, 0, iter([rows]))], None)
        except ValueRefusedError:
            refused.append(value)
            continue
        store = repository.readonly_session("main").store
        found = xr.open_zarr(store, consolidated=False).v.values[1]
        assert (None if np.isnan(found) else float(found)) == value
    unless = {"truth values": [-1.0, 255.0, None]}
    assert refused == unless.get(named, [-1.0, 255.0] if "unsigned" in named else [-1.0])


def test_cast_allow_converts_as_numpy_does() -> None:
    """Named, and off by default. What NumPy cannot convert is refused all the same."""
    assert np.isinf(_encode("f4", 1e300, pa.float64(), allow=True))
    assert _encode("i1", 200, pa.int16(), allow=True) == -56
    assert _encode("U3", "abcdef", pa.string(), allow=True) == "abc"
    assert _encode("f8", "1.5", pa.string(), allow=True) == 1.5
    assert _encode("i4", -9, pa.int32(), {"_FillValue": -9}, allow=True) == -9
    with pytest.raises(ValueRefusedError, match="cannot be converted") as raised:
        _encode("f8", "many", pa.string(), allow=True)
    assert "'cast'" not in str(raised.value)
    with pytest.raises(ValueRefusedError, match="no value for missing data"):
        _encode("i4", None, pa.int32(), allow=True)


@pytest.mark.parametrize(
    ("dtype", "days", "cf"),
    [
        ("i4", [1, 2, 31, 3, 31], {**DAYS, "calendar": "360_day"}),
        ("M8[ns]", [1, 2, 10**6, 3, 10**6], {}),
    ],
)
def test_time_that_is_refused_is_found_among_others(
    dtype: str, days: list[int], cf: dict[str, object]
) -> None:
    """Where NumPy or xarray refuses a whole column, and does not say for which value."""
    first = date(2019, 12, 31)
    column = pa.array([first + timedelta(days=it) for it in days], pa.date32())
    with pytest.raises(ValueRefusedError, match=f"number 2 has {column[2]}") as raised:
        encode_column(column, Encoding("a", np.dtype(dtype), cf))
    assert raised.value.row == 2


@pytest.mark.parametrize("calendar", ["standard", "gregorian", None])
@pytest.mark.parametrize("start", ["0001-01-01", "1500-03-01 06:00", "1582-10-04", "1582-10-15"])
@pytest.mark.parametrize(("unit", "dtype"), [("days", "f8"), ("hours", "i4"), ("seconds", "i8")])
def test_times_that_count_from_before_the_reform_are_given_back(
    calendar: str | None, start: str, unit: str, dtype: str
) -> None:
    """`standard` has Julian dates before 1582-10-15, which are ten days apart by then."""
    attributes = {"units": f"{unit} since {start}"}
    if calendar is not None:
        attributes["calendar"] = calendar
    given = [datetime(2000, 1, 1), datetime(1582, 10, 15), datetime(1990, 5, 5, 18)]
    encoding = Encoding("a", np.dtype(dtype), attributes)
    stored = encode_column(pa.array(given, pa.timestamp("us")), encoding)
    assert stored.dtype == np.dtype(dtype)
    coder = xr.coders.CFDatetimeCoder(time_unit="us")
    dataset = xr.Dataset({"a": ("row", stored, attributes)})
    assert xr.decode_cf(dataset, decode_times=coder).a.values.tolist() == given
    with pytest.raises(ValueRefusedError, match="other dates before 1582-10-15"):
        encode_column(pa.array([datetime(1582, 10, 14)], pa.timestamp("us")), encoding)


@pytest.mark.parametrize("calendar", ["standard", None, "proleptic_gregorian"])
def test_microseconds_that_a_double_from_long_ago_loses_are_refused(calendar: str | None) -> None:
    """Of days since 0001-01-01 it has sixteen: the next one would be stored in silence."""
    attributes = {"units": "days since 0001-01-01"}
    if calendar is not None:
        attributes["calendar"] = calendar
    encoding = Encoding("a", np.dtype("f8"), attributes)
    given = [datetime(2000, 1, 1), datetime(2000, 1, 1, 0, 0, 0, 123_457)]
    with pytest.raises(ValueRefusedError) as raised:
        encode_column(pa.array(given, pa.timestamp("us")), encoding)
    assert raised.value.row == 1


def _made(repository: Repository) -> None:
    session = repository.writable_session("main")
    ds = xr.Dataset(
        {
            "v": (("time", "x"), np.zeros((4, 2), "f4")),
            "n": (("time", "x"), np.zeros((4, 2), "i1")),
        },
        {"time": np.arange("2020-01-01", "2020-01-05", dtype="M8[D]").astype("M8[ns]")},
    )
    encoding = {it: {"chunks": (2, 2)} for it in ("v", "n")}
    ds.to_zarr(session.store, zarr_format=3, consolidated=False, encoding=encoding)
    session.commit("made")


def test_refused_row_is_named_and_nothing_is_visible(repository: Repository) -> None:
    """With its coordinates; `allow` writes it."""
    _made(repository)
    rows = pa.RecordBatch.from_pydict(
        {
            "time": [date(2020, 1, 1), date(2020, 1, 3), date(2020, 1, 3)],
            "x": [0, 0, 1],
            "v": [1.0, 1e300, 2.0],
            "n": [1, 2, 3],
        }
    )
    tip = repository.lookup_branch("main")
    for cast in ("refuse", "allow"):
        options = WriteOptions(repository.storage, cores=1, cast=cast)
        plan = WritePlan.begin(options, rows.schema.names, overwrite=True, repository=repository)
        if cast == "refuse":
            with pytest.raises(InvalidInputError) as raised:
                write_batches(plan, 0, iter([rows]))
            wanted = (
                "The row of time=2020-01-03, x=0 has 1e+300 (double) in column 'v', which the "
                "array, of float32, cannot hold: it is too large or too small. Nothing was "
                "published. Convert the column or filter such rows; option('cast', 'allow') "
                "converts them as NumPy does."
            )
            assert raised.value.message == wanted
            assert repository.lookup_branch("main") == tip
        else:
            commit_rows(plan, [write_batches(plan, 0, iter([rows]))], None)
    found = xr.open_zarr(repository.readonly_session("main").store, consolidated=False)
    assert found.v.values[[0, 2, 2], [0, 0, 1]].tolist() == [1, np.inf, 2]
    assert found.n.values[2].tolist() == [2, 3]
