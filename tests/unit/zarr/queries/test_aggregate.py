"""Aggregates: what NumPy says, whatever is known of chunks, and at little cost where much is."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray
import zarr.api.asynchronous as za
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from icechunk_async import Repository
from icechunk_async.config import RepositoryConfig
from icechunk_async.errors import InvalidInputError, NodeNotFoundError
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import examples, memory_url, objects
from tests.unit.zarr.queries.truth import (
    DTYPES,
    TIMES,
    agrees,
    commit_array,
    decoded,
    expected,
    put_array,
)

if TYPE_CHECKING:
    import random

    import numpy.typing as npt

    from icechunk_async.zarr.queries.measuring import AggregateFunction

FUNCTIONS: tuple[AggregateFunction, ...] = ("count", "min", "max", "sum", "mean", "var", "std")
OPERATORS = {
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "=": np.equal,
    "!=": np.not_equal,
}
NO_INLINE = RepositoryConfig(inline_chunk_threshold_bytes=0)


def functions_of(dtype: np.dtype[Any]) -> tuple[AggregateFunction, ...]:
    """Return the aggregates that values of a type have and NumPy computes as exactly."""
    return {"M": FUNCTIONS[:3], "m": FUNCTIONS[:4]}.get(dtype.kind, FUNCTIONS)


@dataclasses.dataclass(frozen=True)
class Case:
    """An array, its attributes, and a question about a part of it."""

    raw: npt.NDArray[Any]
    chunks: tuple[int, ...]
    attributes: dict[str, Any]
    region: tuple[slice, ...] | None
    op: str
    literal: Any
    fill: Any


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw arrays of all types, with and without attributes of CF."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES + TIMES)))
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=2, max_side=7))
    raw = draw(hnp.arrays(dtype, shape))
    chunks = tuple(draw(st.integers(1, 4)) for _ in shape)
    attributes: dict[str, Any] = {}
    some = raw.reshape(-1)[0]
    if dtype.kind in "iu" and draw(st.booleans()):
        attributes["_FillValue"] = int(some)
    if dtype.kind == "i" and draw(st.booleans()):
        attributes["_Unsigned"] = "true"
    if dtype.kind in "iuf" and draw(st.booleans()):
        attributes["scale_factor"] = draw(st.sampled_from([0.5, -2.0, 1e-3]))
        attributes["add_offset"] = draw(st.sampled_from([0.0, 273.15, -7.0]))
    region = None
    if draw(st.booleans()):
        spans = [sorted((draw(st.integers(0, it)), draw(st.integers(0, it)))) for it in shape]
        region = tuple(slice(*it) for it in spans)
    values = decoded(raw, attributes)
    literal: Any = values.values.reshape(-1)[draw(st.integers(0, raw.size - 1))]
    if dtype.kind not in "mM":
        literal = literal.item()
    fill = None if dtype.kind in "mM" else draw(st.sampled_from([0, 1]))
    return Case(
        raw, chunks, attributes, region, draw(st.sampled_from(list(OPERATORS))), literal, fill
    )


def text_of(literal: Any) -> str | None:
    """Return a literal of SQL; None if SQL cannot write it."""
    if isinstance(literal, bool):
        return str(literal).lower()
    if isinstance(literal, float):
        return f"{literal!r}D" if np.isfinite(literal) and "e" not in repr(literal) else None
    return str(literal) if isinstance(literal, int) else None


def is_beyond(values: npt.NDArray[Any]) -> bool:
    """Return whether values are durations whose sum is no duration of NumPy."""
    if values.dtype.kind != "m":
        return False
    return bool(abs(sum(values.view(np.int64).tolist())) > np.iinfo(np.int64).max)


async def check(repository: Repository, case: Case) -> list[Any]:
    """Compare all aggregates of a case with NumPy; return them."""
    session = await repository.readonly_session("main")
    whole = decoded(case.raw, case.attributes)
    part = np.zeros(case.raw.shape, bool)
    part[case.region or ()] = True
    literal = text_of(case.literal)
    questions: list[tuple[str | None, npt.NDArray[np.bool_]]] = [(None, part)]
    if literal is not None:
        compared = whole.values
        if isinstance(case.literal, float):
            compared = compared.astype("f8")
        questions.append(
            (f"a {case.op} {literal}", part & OPERATORS[case.op](compared, case.literal))
        )
    found: list[Any] = []
    for where, mask in questions:
        values = whole.chosen(mask)
        for function in functions_of(case.raw.dtype):
            if function == "sum" and is_beyond(values):
                with pytest.raises(InvalidInputError, match="more than 64 bits"):
                    await session.aggregate("/a", function, where=where, region=case.region)
                continue
            got = await session.aggregate("/a", function, where=where, region=case.region)
            wanted = expected(function, values)
            assert agrees(got.value, wanted, values), (function, where, got, wanted)
            assert got.count == values.size
            found.append(got.value)
    return found


@examples(120)
@given(cases(), st.randoms(use_true_random=False))
async def test_aggregates_are_what_numpy_says_whatever_statistics_are_known(
    case: Case, rng: random.Random
) -> None:
    """Without any, with all, and with some that are lost or damaged: the same, to the last bit."""
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Zarr, about types without a specification
            await commit_array(
                repository, case.raw, case.chunks, attributes=case.attributes, fill=case.fill
            )
            without = await check(repository, case)
            analysis = await repository.analyze()
            assert analysis.left_out == ()
            with_all = await check(repository, case)
            await lose_some(repository, rng)
        async with Repository.open(repository.storage) as again:
            with_some = await check(again, case)
    assert repr(without) == repr(with_all) == repr(with_some)


async def lose_some(repository: Repository, rng: random.Random) -> None:
    """Delete or damage statistics at random."""
    for key, data in (await objects(repository.storage)).items():
        if key.startswith("statistics/"):
            match rng.randrange(3):
                case 0:
                    await repository.storage.delete([key])
                case 1:
                    wrong = bytearray(data)
                    wrong[rng.randrange(len(wrong))] ^= 1 << rng.randrange(8)
                    await repository.storage.put(key, bytes(wrong))
                case _:
                    pass


async def field(repository: Repository) -> npt.NDArray[Any]:
    """Commit a field along latitudes and longitudes, in chunks of 10 by 10, and return it."""
    lat, lon = np.linspace(-90, 90, 100), np.arange(100.0)
    values = (200 + np.abs(lat)[:, None] + lon[None, :] / 1000).astype("f4")
    session = await repository.writable_session("main")
    await put_array(session, "/t", values, (10, 10), names=("lat", "lon"), compressors=None)
    await put_array(session, "/lat", lat, (25,), names=("lat",), compressors=None)
    await put_array(session, "/lon", lon, (25,), names=("lon",), compressors=None)
    await session.commit("field")
    return values


async def test_selective_query_reads_ten_times_fewer_bytes_and_says_so() -> None:
    """The storage sees the requests that it says."""
    async with open_storage(memory_url()) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.create(storage, config=NO_INLINE) as repository:
            values = await field(repository)
            await repository.analyze()
        async with Repository.open(storage, config=NO_INLINE) as repository:
            session = await repository.readonly_session("main")
            where = "t > 289.5 and lon < 10"
            storage.forget()
            found = await session.aggregate("t", "count", where=where)
            chunks = [key for _, key in storage.log if key.startswith("chunks/")]
            assert found.value == np.count_nonzero(values[:, :10] > 289.5)
            assert found.chunks == 100
            assert found.chunks_read == 2
            assert found.bytes_read == 2 * 400 + 4 * 200  # and the coordinate
            assert len(chunks) == 2 + 4
            assert found.bytes_skipped == 98 * 400
            assert found.bytes_read * 10 <= 100 * 400


async def test_aggregates_of_analyzed_arrays_read_no_chunk() -> None:
    """All of them, of whole chunks: requests for metadata and statistics only."""
    async with open_storage(memory_url()) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.create(storage, config=NO_INLINE) as repository:
            values = await field(repository)
            await repository.analyze()
        async with Repository.open(storage, config=NO_INLINE) as repository:
            session = await repository.readonly_session("main")
            await session.aggregate("t", "max")
            storage.forget()
            for function in FUNCTIONS:
                found = await session.aggregate("t", function, region=(slice(10, 30),))
                wanted = expected(function, values[10:30].reshape(-1))
                assert agrees(found.value, wanted, values[10:30].reshape(-1))
                assert (found.chunks, found.chunks_read, found.bytes_read) == (20, 0, 0)
            assert set(storage.requests) == {"list_prefix"}


async def values_of(url: str, raw: Any, where: str, **more: Any) -> Any:
    """Count the cells of an array that fulfil a condition, before and after it is analyzed."""
    async with Repository.create(url, config=NO_INLINE) as repository:
        await commit_array(repository, np.asarray(raw), (2,), **more)
        session = await repository.readonly_session("main")
        before = await session.aggregate("a", "count", where=where)
        await repository.analyze()
        after = await session.aggregate("a", "count", where=where)
        assert before.value == after.value
        return after.value


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ("a > 3", 2),
        ("a >= 3 and a <= 4", 2),
        ("a between 2 and 4", 3),
        ("a in (1, 5, 99)", 2),
        ("a not in (1, 5, 99)", 3),
        ("a != 3", 4),
        ("a <> 3", 4),
        ("a == 3", 1),
        ("a > 2.5", 3),
        ("a > 2.5D", 3),
        ("a < 99999999999999999999", 5),
        ("`a` < -99999999999999999999", 0),
    ],
)
async def test_conditions_are_those_of_sql(where: str, wanted: int) -> None:
    """Comparisons, lists and ranges; missing values fulfil none of them."""
    raw = np.array([1, 2, 3, 4, 5, -1], "i8")
    found = await values_of(memory_url(), raw, where, attributes={"_FillValue": -1})
    assert found == wanted


@pytest.mark.parametrize("shape", [(), (4,), (4, 6), (2, 4, 3)])
async def test_lists_are_compared_in_arrays_of_any_rank(shape: tuple[int, ...]) -> None:
    """Chunk by chunk, in those that statistics leave open."""
    raw = np.arange(np.prod(shape, dtype=int), dtype="i4").reshape(shape)
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        await commit_array(repository, raw, (2,) * len(shape))
        session = await repository.readonly_session("main")
        some, others = [
            (await session.aggregate("a", "count", where=f"a {it} (0, 3, 17)")).value
            for it in ("in", "not in")
        ]
    assert some == np.isin(raw, (0, 3, 17)).sum()
    assert some + others == raw.size


async def test_large_integers_are_compared_exactly() -> None:
    """2**53 + 1 is no double; a literal of SQL without a point is exact."""
    raw = np.array([2**53, 2**53 + 1, 2**53 + 2], "i8")
    assert await values_of(memory_url(), raw, f"a > {2**53}") == 2
    assert await values_of(memory_url(), raw, f"a = {2**53 + 1}") == 1


async def test_times_are_compared_with_moments() -> None:
    """In any unit; a moment between two of the unit lies between them; NaT fulfils nothing."""
    raw = np.array(["2020-01-01", "2020-01-02", "2020-01-03", "NaT"], "M8[D]")
    assert await values_of(memory_url(), raw, "a >= '2020-01-02'") == 2
    assert await values_of(memory_url(), raw, "a > '2020-01-01 12:00:00'") == 2
    assert await values_of(memory_url(), raw, "a = '2020-01-01 12:00:00'") == 0
    assert await values_of(memory_url(), raw, "a < '2020-01-02 01:00:00+02:00'") == 1
    fine = raw.astype("M8[ns]")
    assert await values_of(memory_url(), fine, "a < '3000-01-01'") == 3


async def test_truth_values_are_counted_and_compared() -> None:
    """They are compared with true and false, and add up as 0 and 1."""
    raw = np.array([True, False, True, True])
    assert await values_of(memory_url(), raw, "a = true") == 3
    async with Repository.create(memory_url()) as repository:
        await commit_array(repository, raw, (2,))
        session = await repository.readonly_session("main")
        assert (await session.aggregate("a", "sum")).value == 3
        assert (await session.aggregate("a", "min")).value is False


async def test_zeros_have_no_sign_and_infinities_are_values() -> None:
    """Bounds of 0.0 and -0.0 are 0.0; infinities are found and added as IEEE 754 says."""
    async with Repository.create(memory_url()) as repository:
        await commit_array(repository, np.array([-0.0, -0.0, np.inf, 1.0]), (2,))
        await repository.analyze()
        session = await repository.readonly_session("main")
        assert str((await session.aggregate("a", "min")).value) == "0.0"
        assert (await session.aggregate("a", "max")).value == np.inf
        assert (await session.aggregate("a", "sum")).value == np.inf
        assert (await session.aggregate("a", "count", where="a = 0.0")).value == 2
        assert (await session.aggregate("a", "count", where="a > 1e300")).value == 1


async def test_no_values_have_no_bounds() -> None:
    """Of nothing the count and the sum are 0, all else is None."""
    async with Repository.create(memory_url()) as repository:
        await commit_array(repository, np.full(4, np.nan), (2,))
        session = await repository.readonly_session("main")
        found = {it: (await session.aggregate("a", it)).value for it in FUNCTIONS}
        assert found == {**dict.fromkeys(FUNCTIONS), "count": 0, "sum": 0}
        empty = await session.aggregate("a", "max", region=(slice(3, 1),))
        assert (empty.value, empty.chunks) == (None, 0)


async def test_chunks_that_do_not_exist_hold_the_fill_value() -> None:
    """They are never read, analyzed or not, and count as what they are."""
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        session = await repository.writable_session("main")
        array = await za.create_array(
            session.store, name="a", shape=(10,), chunks=(3,), dtype="i4", fill_value=7
        )
        await array.setitem(slice(0, 3), np.array([1, 2, 3]))
        await session.commit("one of four chunks")
        session = await repository.readonly_session("main")
        found = await session.aggregate("a", "sum")
        assert (found.value, found.count, found.chunks, found.chunks_read) == (55, 10, 4, 1)
        await repository.analyze()
        found = await session.aggregate("a", "sum", where="a > 3")
        assert (found.value, found.chunks_read) == (49, 0)


async def test_packed_values_are_those_of_xarray(tmp_path: Any) -> None:
    """Scale, offset, fill value and `_Unsigned`: xarray reads the same store."""
    rng = np.random.default_rng(3)
    raw = rng.integers(-128, 127, (40, 30)).astype("i1")
    attributes = {"scale_factor": -0.25, "add_offset": 30.5, "_FillValue": 17, "_Unsigned": "true"}
    async with Repository.create(tmp_path, config=NO_INLINE) as repository:
        session = await repository.writable_session("main")
        await za.create_group(store=session.store)
        await put_array(session, "/a", raw, (7, 9), attributes=attributes, names=("y", "x"))
        await session.commit("packed")
        await repository.analyze()
        session = await repository.readonly_session("main")
        shown = xarray.open_zarr(session.store, consolidated=False, zarr_format=3, chunks=None)
        values = shown["a"].to_numpy()
        assert (await session.aggregate("a", "min")).value == np.nanmin(values)
        assert (await session.aggregate("a", "max")).value == np.nanmax(values)
        assert (await session.aggregate("a", "count")).value == np.count_nonzero(~np.isnan(values))
        mean = (await session.aggregate("a", "mean")).value
        assert mean == pytest.approx(np.nanmean(values), rel=1e-12)
        above = await session.aggregate("a", "count", where="a > 20.25")
        assert above.value == np.count_nonzero(values > 20.25)


async def test_attributes_of_packing_and_of_missing_values_keep_results_right() -> None:
    """Another scale needs no new statistics; another fill value makes those there unknown."""
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        await commit_array(repository, np.array([1, 2, 3, 4], "i2"), (2,))
        await repository.analyze()
        changes: list[tuple[dict[str, Any], float, int]] = [
            ({"scale_factor": 2.0}, 8.0, 0),
            ({"scale_factor": -2.0}, -2.0, 0),
            ({"_FillValue": 4}, 3, 2),
        ]
        for attributes, value, reads in changes:
            session = await repository.writable_session("main")
            array = await za.open_array(store=session.store, path="a", mode="r+")
            await array.update_attributes(attributes)
            found = await session.aggregate("a", "max")
            assert (found.value, found.chunks_read) == (value, reads)


async def test_conditions_on_other_arrays_select_cells_and_prune_chunks() -> None:
    """A mask in the same chunks is pruned by its statistics, one in others is read."""
    rng = np.random.default_rng(1)
    values, mask = rng.integers(0, 100, (12, 8)), np.zeros((8, 12), "u1")
    mask[:4, :6] = rng.integers(0, 2, (4, 6))
    wanted = int(values[mask.T == 1].sum())
    for chunks, most in (((2, 3), 4), ((4, 5), 16)):
        async with Repository.create(memory_url(), config=NO_INLINE) as repository:
            session = await repository.writable_session("main")
            await put_array(session, "/g/t", values, (3, 2), names=("x", "y"))
            await put_array(session, "/g/m", mask, chunks, names=("y", "x"))
            await session.commit("both")
            await repository.analyze()
            session = await repository.readonly_session("main")
            found = await session.aggregate("/g/t", "sum", where="m = 1")
            assert found.value == wanted
            assert found.chunks_read <= most


@pytest.mark.parametrize(
    ("path", "function", "more", "message"),
    [
        ("t", "median", {}, r"There is no aggregate 'median'. There are count, min"),
        ("t", "max", {"where": "t >"}, r"The condition is not understood at character 4"),
        ("t", "max", {"where": "x > 3"}, r"about 'x', and there is no array '/x'"),
        (
            "t",
            "max",
            {"where": "other > 3"},
            r"'/other', whose dimensions are \('lon', 'z'\)",
        ),
        ("t", "max", {"where": "t > 'warm'"}, r"compares 't', .* with 'warm'. Give numbers."),
        ("t", "max", {"where": "t = true"}, r"Give numbers."),
        ("t", "max", {"region": (slice(0, 4, 2),)}, r"has steps"),
        ("t", "max", {"region": (slice(0, 4),) * 3}, r"which has 2 axes"),
        ("bytes", "max", {}, r"'/bytes' cannot be queried: they are of the type .*S2.*with SQL"),
        ("words", "sum", {}, r"'/words' are text, which has no sum. There are count, min, max"),
        ("words", "max", {"where": "words > 3"}, r"Give text in quotes"),
        ("when", "sum", {}, r"'/when' are times, which have no sum"),
        ("when", "max", {"where": "when > 3"}, r"Give a moment in ISO 8601"),
        ("odd", "max", {}, r"its attribute 'scale_factor' is \"big\""),
        ("huge", "max", {}, r"its attribute 'add_offset' is 10000"),
    ],
)
async def test_what_cannot_be_asked_is_refused_in_words(
    path: str, function: Any, more: dict[str, Any], message: str
) -> None:
    """The message says what was asked, and what can be."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await put_array(session, "/t", np.zeros((4, 6)), (2, 3), names=("lat", "lon"))
        await put_array(session, "/other", np.zeros((6, 2)), (2, 3), names=("lon", "z"))
        await put_array(session, "/when", np.zeros(2, "M8[s]"), (2,))
        await put_array(session, "/odd", np.zeros(2), (2,), attributes={"scale_factor": "big"})
        # Beyond all doubles.
        await put_array(session, "/huge", np.ones(2), (2,), attributes={"add_offset": 10**400})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            await put_array(session, "/words", np.array(["a", "bc"]), (2,))
            await put_array(session, "/bytes", np.array([b"a", b"bc"]), (2,))
            with pytest.raises(InvalidInputError, match=message):
                await session.aggregate(path, function, **more)
        with pytest.raises(NodeNotFoundError):
            await session.aggregate("nowhere", "max")


async def test_grid_that_nobody_could_list_is_refused() -> None:
    """An array of 2**60 cells in chunks of one takes no memory, and neither does the question."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await za.create_array(
            session.store, name="a", shape=(2**31, 2**31), chunks=(1, 1), dtype="u1"
        )
        with pytest.raises(InvalidInputError, match="at most"):
            await session.aggregate("a", "max")
        found = await session.aggregate("a", "max", region=(slice(5, 9), slice(2**31 - 2, None)))
        assert (found.value, found.chunks) == (0, 8)


async def test_shards_are_chunks() -> None:
    """An object is analyzed and read as one."""
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        values = np.arange(64.0).reshape(8, 8)
        await commit_array(repository, values, (2, 2), shards=(4, 4))
        assert (await repository.analyze()).chunks == 4
        session = await repository.readonly_session("main")
        found = await session.aggregate("a", "sum", where="a >= 36")
        assert (found.value, found.chunks, found.chunks_read) == (values[values >= 36].sum(), 4, 1)


@pytest.mark.parametrize("statistics", [False, True])
async def test_integers_marked_as_truth_are_true_or_false(*, statistics: bool) -> None:
    """As versions of xarray write them; all but zero is true."""
    values = np.array([[0, 1, -1], [1, 5, 1]], "i1")
    async with Repository.create(memory_url()) as repository:
        if statistics:
            await repository.keep_statistics()
        session = await repository.writable_session("main")
        array = await za.create_array(
            session.store, name="a", shape=(2, 3), chunks=(1, 3), dtype="i1",
            attributes={"dtype": "bool"}, dimension_names=["y", "x"],
        )  # fmt: skip
        await array.setitem(slice(None), values)
        await session.commit("filled")
        session = await repository.readonly_session("main")
        answers: dict[AggregateFunction, tuple[Any, Any]] = {
            "min": (False, True),
            "max": (True, True),
            "sum": (5, 5),
        }
        for function, (whole, true) in answers.items():
            assert (found := await session.aggregate("a", function)).value == whole
            assert (found.chunks_read == 0) is statistics
            found = await session.aggregate("a", function, where="a = true")
            assert found.value == true
            assert type(found.value) is type(true)
        assert (await session.aggregate("a", "count", where="a = false")).value == 1
        with pytest.raises(InvalidInputError, match="true or false"):
            await session.aggregate("a", "count", where="a = 2")
