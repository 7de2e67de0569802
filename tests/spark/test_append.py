"""Appended coordinates are stored as given, and growth has limits; without Spark."""

from __future__ import annotations

from datetime import date, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import xarray as xr
import zarr

from icechunk_async.errors import (
    AmbiguousCoordinatesError,
    InvalidInputError,
    MissingCoordinatesError,
    OutsideGridError,
)
from icechunk_async.spark.grid import Axis, PlaceFinder
from icechunk_async.spark.options import WriteOptions
from icechunk_async.spark.shared import open_array
from icechunk_async.spark.write.commit import commit_rows
from icechunk_async.spark.write.growth import places_beyond, set_length
from icechunk_async.spark.write.plan import WritePlan
from icechunk_async.spark.write.task import write_batches
from icechunk_async.sync import Repository, in_memory_storage

if TYPE_CHECKING:
    from collections.abc import Sequence


def _make(repository: Repository, coordinates: Any, chunk: int = 2) -> None:
    session = repository.writable_session("main")
    ds = xr.Dataset({"v": ("x", np.zeros(len(coordinates)))}, {"x": coordinates})
    encoding = {"v": {"chunks": (chunk,)}, "x": {"chunks": (chunk,)}}
    ds.to_zarr(session.store, zarr_format=3, consolidated=False, encoding=encoding)
    session.commit("made")


def _batch(xs: Sequence[Any]) -> pa.RecordBatch:
    values = pa.array(np.arange(1.0, len(xs) + 1))
    return pa.RecordBatch.from_pydict({"x": pa.array(xs), "v": values})


def _write(
    repository: Repository, *tasks: Sequence[Any], overwrite: bool = False, **options: Any
) -> None:
    """Write a row for each coordinate, its value counting from 1; each sequence is a task."""
    given = WriteOptions(
        repository.storage, cores=1, append_dim=None if overwrite else "x", **options
    )
    plan = WritePlan.begin(given, ["x", "v"], overwrite=overwrite, repository=repository)
    written = [
        write_batches(
            plan,
            number,
            iter(
                [pa.RecordBatch.from_pydict({"x": pa.array(xs), "v": np.arange(1.0, len(xs) + 1)})]
            ),
        )
        for number, xs in enumerate(tasks)
    ]
    commit_rows(plan, written, None)


def _found(repository: Repository) -> xr.Dataset:
    found: xr.Dataset = xr.open_zarr(
        repository.readonly_session("main").store, consolidated=False
    ).load()
    return found


@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_coordinates_are_stored_as_given(repository: Repository, dtype: str) -> None:
    """So that the same rows can be overwritten, and selected. Steps of 0.1 are not exact."""
    _make(repository, (np.arange(3) * 0.1).astype(dtype))
    given = [0.1 * it for it in range(3, 53)]
    _write(repository, given)
    found = _found(repository)
    assert found.x.values[3:].tolist() == np.array(given, dtype).tolist()
    assert found.v.values[3:].tolist() == list(range(1, 51))
    _write(repository, given, overwrite=True)  # each is found
    assert found.equals(_found(repository))


def test_one_coordinate_in_two_spellings_is_refused(repository: Repository) -> None:
    """In one task or in two: 3.0002 and 2.9998 are one step."""
    _make(repository, np.arange(3.0), chunk=1)
    for tasks in ([[3.0002, 2.9998]], [[3.0002], [2.9998]]):
        with pytest.raises(AmbiguousCoordinatesError, match="same step"):
            _write(repository, *tasks)
    _write(repository, [3.0005])
    assert _found(repository).x.values.tolist() == [0, 1, 2, 3.0005]


def test_gaps_are_refused_unless_they_are_meant(repository: Repository) -> None:
    """The error names the first missing coordinate. Filled ones have no value."""
    days = np.arange("2020-01-01", "2020-01-04", dtype="M8[D]").astype("M8[ns]")
    _make(repository, days)
    tip = repository.lookup_branch("main")
    first = date(2020, 1, 4)
    rows = [[first], [first + timedelta(days=4)]]
    with pytest.raises(MissingCoordinatesError, match=r"No row has 2020-01-05.*3 are missing"):
        _write(repository, *rows)
    assert repository.lookup_branch("main") == tip
    _write(repository, *rows, fill_gaps=True)
    found = _found(repository)
    every = np.arange("2020-01-01", "2020-01-09", dtype="M8[D]")
    assert np.array_equal(found.x.values.astype("M8[D]"), every)
    nan = np.nan
    assert np.array_equal(found.v.values, [0, 0, 0, 1, nan, nan, nan, 1], equal_nan=True)


@pytest.mark.parametrize(
    ("units", "start", "step", "dtype"),
    [
        ("days since 1850-01-01", "2300-01-01", "86400s", "i4"),
        ("days since 0001-01-01", "1600-02-27", "86400s", "f8"),
        ("seconds since 1970-01-01", "2262-04-11T12:00", "21600s", "i8"),
        ("hours since 1900-01-01", "9999-12-20", "3600s", "i4"),
    ],
)
def test_times_beyond_nanoseconds_are_stored_exactly(
    repository: Repository, units: str, start: str, step: str, dtype: str
) -> None:
    """Before 1678 and after 2262, where the array's own units have them."""
    length = np.timedelta64(int(step[:-1]), "s")
    every = np.datetime64(start, "s") + length * np.arange(8)
    session = repository.writable_session("main")
    attributes = {"x": {"units": units, "calendar": "proleptic_gregorian"}}
    encoding = {it: {"chunks": (2,)} for it in "vx"}
    encoding["x"] |= {"dtype": dtype, **attributes["x"]}  # type: ignore[dict-item]
    ds = xr.Dataset({"v": ("x", np.zeros(3))}, {"x": every[:3]})
    ds.to_zarr(session.store, zarr_format=3, consolidated=False, encoding=encoding)
    session.commit("made")
    given = every.astype("M8[us]").tolist()
    _write(repository, given[3:6], given[6:])
    store = repository.readonly_session("main").store
    coder = xr.coders.CFDatetimeCoder(time_unit="s")
    found = xr.open_zarr(store, consolidated=False, decode_times=coder).load()
    assert found.x.values.astype("M8[s]").tolist() == every.tolist()
    assert found.v.values.tolist() == [0, 0, 0, 1, 2, 3, 1, 2]
    _write(repository, given, overwrite=True)  # each is found
    store = repository.readonly_session("main").store
    again = xr.open_zarr(store, consolidated=False, decode_times=coder).load()
    assert again.x.equals(found.x)
    assert again.v.values.tolist() == list(range(1, 9))
    beside = every[-1:] + length // 2
    with pytest.raises(OutsideGridError, match=rf"of x=.* has {beside[0]!s}.*in column 'x'"):
        _write(repository, beside.astype("M8[us]").tolist())


def test_packed_coordinates_are_given_back_or_refused(repository: Repository) -> None:
    """Else neither an overwrite nor a query would find the rows; `allow` appends them so."""
    session = repository.writable_session("main")
    ds = xr.Dataset({"v": ("x", np.zeros(3))}, {"x": np.array([0.0, 0.1, 0.2])})
    encoding = {"x": {"dtype": "i2", "scale_factor": 0.1, "_FillValue": -999}}
    ds.to_zarr(session.store, zarr_format=3, consolidated=False, encoding=encoding)
    tip = session.commit("made")
    for given in ([0.3], [0.30001]):
        with pytest.raises(InvalidInputError, match=r"of x=0\.3.*back as 0\.3000000000.*'cast'"):
            _write(repository, given)
        with pytest.raises(InvalidInputError, match="would give back as"):
            _write(repository, given, append_values=tuple(given))
    assert repository.lookup_branch("main") == tip
    _write(repository, [0.30000000000000004, 0.4])
    _write(repository, [0.30000000000000004, 0.4], overwrite=True)
    _write(repository, [0.7], fill_gaps=True, cast="allow")
    assert _found(repository).x.values[5:].tolist() == [0.5, 0.6000000000000001, 0.7000000000000001]


def test_decimals_are_coordinates(repository: Repository) -> None:
    """As SQL writes numbers with a point; by number, not by text."""
    _make(repository, np.arange(3) * 0.5)
    _write(repository, [Decimal("1.50"), Decimal("2.00")])
    _write(repository, [Decimal("1.5"), Decimal("2.0")], overwrite=True)
    assert _found(repository).x.values.tolist() == [0, 0.5, 1, 1.5, 2]
    _make(again := Repository.create(in_memory_storage()), np.arange(3, dtype="u8") + 2**63)
    _write(again, [Decimal(2**63 + 1)], overwrite=True)
    assert _found(again).v.values.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("dtype", "last", "given"),
    [("f4", 2**24, np.int32), ("f8", 2**53, np.int64), ("f8", 2**63, np.uint64)],
)
def test_integers_that_a_dimension_would_round_have_no_place(
    dtype: str, last: int, given: type[np.generic]
) -> None:
    """They were written to the row of another integer; those that are there are found."""
    values = np.array([0, last // 2, last], dtype)
    finder = PlaceFinder(Axis("x", values))
    assert finder.places(np.array([last, 0], given)).tolist() == [2, 0]
    with pytest.raises(OutsideGridError, match=f"has {last + 1} "):
        finder.places(np.array([0, last + 1], given))


@pytest.mark.parametrize("given", [np.int64, np.uint64])
def test_the_greatest_integer_is_no_float(given: type[np.integer]) -> None:
    """It is rounded up, to a number that no integer of its type is."""
    most = int(np.iinfo(given).max)
    finder = PlaceFinder(Axis("x", np.array([0.0, float(most)])))
    with pytest.raises(OutsideGridError, match=f"has {most} "):
        finder.places(np.array([most], given))


def test_rows_without_a_place_are_named(repository: Repository) -> None:
    """By all of their coordinates."""
    session = repository.writable_session("main")
    ds = xr.Dataset({"v": (("t", "x"), np.zeros((2, 2)))}, {"x": [1.5, 2.5]})
    ds.to_zarr(session.store, zarr_format=3, consolidated=False)
    session.commit("made")
    plan = WritePlan.begin(
        WriteOptions(repository.storage, cores=1), ["t", "x", "v"], overwrite=True,
        repository=repository,
    )  # fmt: skip
    for x, error, why in (
        (3.5, OutsideGridError, r"The row of t=1, x=3\.5 has 3\.5 \(float64\) in column 'x'"),
        (None, MissingCoordinatesError, "The row of t=1, x=None has null in column 'x'"),
        (np.nan, MissingCoordinatesError, "The row of t=1, x=nan has no value in column 'x'"),
    ):
        rows = {"t": [0, 1], "x": pa.array([1.5, x], pa.float64()), "v": [1.0, 2.0]}
        with pytest.raises(error, match=why):
            write_batches(plan, 0, iter([pa.RecordBatch.from_pydict(rows)]))


def test_times_that_the_units_cannot_count_are_refused(repository: Repository) -> None:
    """Column and value are named, and nothing is published."""
    last = np.datetime64("1970-01-01") + np.timedelta64(32_767, "D")
    session = repository.writable_session("main")
    ds = xr.Dataset({"v": ("x", np.zeros(2))}, {"x": last - np.array([1, 0])})
    encoding = {"x": {"dtype": "i2", "units": "days since 1970-01-01"}}
    ds.to_zarr(session.store, zarr_format=3, consolidated=False, encoding=encoding)
    tip = session.commit("made")
    day = (last + np.array([1])).astype("M8[us]").tolist()
    with pytest.raises(InvalidInputError, match=r"x=2059-09-19.*'x'.*days since") as raised:
        _write(repository, day)
    assert "'cast'" not in str(raised.value)
    assert repository.lookup_branch("main") == tip


def test_far_rows_do_not_grow_an_array_by_mistake(repository: Repository) -> None:
    """Not even with gaps: a year of 2261 is refused where it is read."""
    _make(repository, np.arange(3))
    for fill_gaps in (False, True):
        with pytest.raises(OutsideGridError, match=r"more than 1,000 steps.*max-append"):
            _write(repository, [900_000], fill_gaps=fill_gaps)
    with pytest.raises(OutsideGridError, match="more than 5 steps"):
        _write(repository, range(3, 9), max_append=5)
    _write(repository, range(3, 8), max_append=5)
    assert _found(repository).sizes["x"] == 8


def test_limit_follows_large_chunks(repository: Repository) -> None:
    """Ten chunks may be appended."""
    _make(repository, np.arange(3), chunk=500)
    _write(repository, range(3, 5003))
    assert _found(repository).v.values[-1] == 5000
    with pytest.raises(OutsideGridError, match="more than 5,000 steps"):
        _write(repository, range(5003, 10004))


def test_many_steps_can_be_appended(repository: Repository) -> None:
    """A series of more than a million steps, in one write, if the write says so."""
    _make(repository, np.arange(3), chunk=300_000)
    _write(repository, range(3, 1_200_003), max_append=1_200_000)
    found = _found(repository)
    assert found.sizes["x"] == 1_200_003
    assert found.v.values[-1] == 1_200_000
    assert found.x.values[-1] == 1_200_002


def test_indices_are_appended_without_gaps(repository: Repository) -> None:
    """A dimension without coordinates counts."""
    session = repository.writable_session("main")
    xr.Dataset({"v": ("x", np.zeros(3))}).to_zarr(
        session.store, zarr_format=3, consolidated=False, encoding={"v": {"chunks": (2,)}}
    )
    session.commit("made")
    with pytest.raises(MissingCoordinatesError, match="No row has 4"):
        _write(repository, [3, 5])
    _write(repository, [3, 4])
    assert _found(repository).v.values.tolist() == [0, 0, 0, 1, 2]


def test_places_beyond_an_index_are_chunks_with_new_cells() -> None:
    """Those that begin before it, too, unless a chunk ends there."""
    assert list(places_beyond((9, 3), (4, 2), 0, 5)) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert list(places_beyond((9, 3), (4, 2), 0, 8)) == [(2, 0), (2, 1)]
    assert list(places_beyond((9,), (4,), 0, 9)) == [(2,)]


@pytest.mark.parametrize("shrunk", [5, 4])
@pytest.mark.parametrize("keeps_chunks", [True, False])
def test_cells_that_no_row_touches_show_no_old_values(
    repository: Repository, shrunk: int, *, keeps_chunks: bool
) -> None:
    """After an array was shrunk and grows again; so do other arrays along the dimension."""
    session = repository.writable_session("main")
    old = np.arange(1.0, 13.0)
    ds = xr.Dataset({"v": ("x", old), "w": (("y", "x"), np.stack([old, old]))})
    encoding: dict[str, dict[str, Any]] = {"v": {"chunks": (4,)}, "w": {"chunks": (1, 4)}}
    ds.to_zarr(session.store, zarr_format=3, consolidated=False, encoding=encoding)
    for path, axis in (("v", 0), ("w", 1)):
        if keeps_chunks:
            set_length(session.store, path, axis, shrunk)
        else:
            open_array(session.store, path, write=True).resize((2, shrunk)[1 - axis :])
    session.commit("made, and shrunk")
    _write(repository, [13], fill_gaps=True)
    found = _found(repository)
    kept, gone = old[:shrunk].tolist(), [np.nan] * (14 - shrunk)
    assert np.array_equal(found.v.values, [*kept, *gone[1:], 1.0], equal_nan=True)
    for row in found.w.values:
        assert np.array_equal(row, [*kept, *gone], equal_nan=True)


@pytest.mark.filterwarnings("ignore:Duplicate dimension names")
@pytest.mark.parametrize("dims", [("x", "x"), ("v", "x"), ()])
def test_arrays_whose_dimensions_place_no_row_are_refused(
    repository: Repository, dims: tuple[str, ...]
) -> None:
    """One dimension twice, no dimension, or an array named like its dimension."""
    session = repository.writable_session("main")
    group = zarr.create_group(session.store)
    group.create_array("v", shape=(2,) * len(dims), dtype="f8", dimension_names=dims)
    session.commit("made")
    columns = ["v", "x"] if dims else ["v"]
    options = WriteOptions(repository.storage, cores=1)
    with pytest.raises(InvalidInputError, match=r"no column says where|only columns of coord"):
        WritePlan.begin(options, columns, overwrite=True, repository=repository)
