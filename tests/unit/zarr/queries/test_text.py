"""Text: bounds that are cut, and answers of SQL and NumPy whatever is known of chunks."""

from __future__ import annotations

import dataclasses
import hashlib
import tracemalloc
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import zarr
import zarr.api.asynchronous as za
from hypothesis import example, given
from hypothesis import strategies as st

from icechunk_async import Packing, Repository
from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.format import statistics as format_statistics
from icechunk_async.format.ids import StatisticsId
from icechunk_async.format.statistics import (
    HIGH_CUT,
    LOW_CUT,
    ChunkStatistics,
    greatest_keys,
    row_type,
    text_bound,
    text_key,
    text_of,
)
from icechunk_async.sync import Repository as BlockingRepository
from icechunk_async.sync import RepositoryConfig as BlockingConfig
from icechunk_async.sync.xarray import open_where
from icechunk_async.zarr.queries import aggregate as aggregating
from icechunk_async.zarr.queries import planning
from icechunk_async.zarr.queries.measuring import set_bounds, successor
from tests.helpers import examples, memory_url
from tests.unit.zarr.queries.test_aggregate import NO_INLINE, lose_some
from tests.unit.zarr.queries.test_where import whole_mask
from tests.unit.zarr.queries.test_written import rows_in, stored
from tests.unit.zarr.queries.truth import commit_array, put_array

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from icechunk_async.zarr.queries.measuring import AggregateFunction

duckdb: Any = pytest.importorskip("duckdb", reason="duckdb is not installed: see the group test")

ANY_LENGTH = np.dtypes.StringDType()
LAST = "\U0010ffff"
LETTERS = ("\0", "a", "b", "é", "\ud7ff", "\ue000", "\uffff", "\U00010000", LAST)
"""Of one to four bytes, beside each gap of Unicode, and the least and the greatest."""
COMPARED: dict[str, Callable[[str, tuple[str, ...]], bool]] = {
    "<": lambda it, values: it < values[0],
    "<=": lambda it, values: it <= values[0],
    ">": lambda it, values: it > values[0],
    ">=": lambda it, values: it >= values[0],
    "=": lambda it, values: it == values[0],
    "!=": lambda it, values: it != values[0],
    "in": lambda it, values: it in values,
    "not in": lambda it, values: it not in values,
}
EXTREMES: tuple[AggregateFunction, ...] = ("min", "max")

short = st.text(st.sampled_from(LETTERS), max_size=3)
texts = st.builds(
    lambda head, times, tail: head * times + tail,
    st.sampled_from(LETTERS),
    st.sampled_from([0, 1, 7, 8, 10, 11, 15, 16, 31, 32, 33, 100]),
    short,
)
"""Many begin alike, around the 32 bytes that a bound holds; some end with zeros."""


def array_of(values: Sequence[str], dtype: str) -> npt.NDArray[Any]:
    """Return texts as an array of fixed width or of any length."""
    if dtype == "any":
        return np.array(values, ANY_LENGTH)
    return np.array(values, f"{dtype}U{max(1, *map(len, values))}")


@dataclasses.dataclass(frozen=True)
class Case:
    """An array of texts, and a question."""

    raw: npt.NDArray[Any]
    chunk: int
    missing: str | None
    fill: str
    op: str
    literals: tuple[str, ...]

    @property
    def where(self) -> str:
        """The condition."""
        given = ", ".join(f"'{it}'" for it in self.literals)
        return f"a {self.op} ({given})" if "in" in self.op else f"a {self.op} {given}"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw arrays, of which some texts are those that are asked for or begin like them."""
    values = draw(st.lists(texts, min_size=1, max_size=9))
    op = draw(st.sampled_from(list(COMPARED)))
    literal = st.one_of(texts, st.sampled_from(values))
    count = 2 if "in" in op else 1
    return Case(
        array_of(values, draw(st.sampled_from(["any", "<", ">"]))),
        draw(st.integers(1, 4)),
        draw(st.one_of(st.none(), st.sampled_from(values))),
        draw(short),
        op,
        tuple(draw(literal) for _ in range(count)),
    )


@dataclasses.dataclass(frozen=True)
class Truth:
    """The results that SQL and NumPy have."""

    count: int
    low: str | None
    high: str | None
    mask: list[bool]


def truth(values: list[str], case: Case) -> Truth:
    """Ask DuckDB about texts, and compare what it says with NumPy and Python."""
    missing = None if case.missing is None else case.missing.rstrip("\0")
    there = [None if it == missing else it for it in values]
    cells = pa.table({"i": range(len(there)), "a": pa.array(there, pa.string())})
    given = ", ".join("?" for _ in case.literals)
    condition = f"a {case.op} ({given})" if "in" in case.op else f"a {case.op} {given}"
    question = f"select i from cells where {condition}"  # noqa: S608 -- of parameters
    with duckdb.connect() as connection:
        connection.register("cells", cells)
        (about,) = connection.sql("select count(a), min(a), max(a) from cells").fetchall()
        found = connection.execute(question, list(case.literals)).fetchall()
    mask = [False] * len(there)
    for (place,) in found:
        mask[place] = True
    chosen = [it for it in there if it is not None]
    assert about[0] == len(chosen)
    if chosen:
        assert about[1:] == (np.array(chosen, ANY_LENGTH).min(), np.array(chosen, ANY_LENGTH).max())
    compare = COMPARED[case.op]
    assert mask == [it is not None and compare(it, case.literals) for it in there]
    return Truth(about[0], about[1], about[2], mask)


async def check(repository: Repository, case: Case) -> None:
    """Compare all that can be asked with the truth."""
    session = await repository.readonly_session("main")
    array = await za.open_array(store=session.store, path="a", mode="r")
    whole: Any = np.asarray(await array.getitem(...))
    values: list[str] = whole.astype(ANY_LENGTH).tolist()
    wanted = truth(values, case)
    count = await session.aggregate("a", "count")
    assert (count.value, count.count) == (wanted.count, wanted.count)
    assert (await session.aggregate("a", "min")).value == wanted.low
    assert (await session.aggregate("a", "max")).value == wanted.high
    mask = await whole_mask(await session.where(case.where))
    assert mask.tolist() == wanted.mask
    chosen = [it for it, chosen in zip(values, wanted.mask, strict=True) if chosen]
    for function in EXTREMES:
        found = await session.aggregate("a", function, where=case.where)
        extreme = min(chosen, default=None) if function == "min" else max(chosen, default=None)
        assert (found.value, found.count) == (extreme, len(chosen))
    part = await session.aggregate("a", "max", region=(slice(1, 4),))
    there = [it for it in values[1:4] if case.missing is None or it != case.missing.rstrip("\0")]
    assert (part.value, part.count) == (max(there, default=None), len(there))


@examples(150)
@given(cases(), st.randoms(use_true_random=False))
async def test_answers_are_those_of_sql_and_numpy_whatever_is_known(
    case: Case, rng: random.Random
) -> None:
    """Without statistics, with all, with those of chunks that are gone, and with lost ones."""
    attributes = {} if case.missing is None else {"missing_value": case.missing}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Zarr, about types without a specification
        async with Repository.create(memory_url(), config=NO_INLINE) as repository:
            await commit_array(
                repository, case.raw, (case.chunk,), attributes=attributes, fill=case.fill
            )
            session = await repository.writable_session("main")
            array = await za.open_array(store=session.store, path="a", mode="r+")
            await array.resize((len(case.raw) + 3,))
            await session.commit("cells that nobody wrote")
            await check(repository, case)
            analysis = await repository.analyze()
            assert (analysis.left_out, analysis.unreadable) == ((), ())
            await check(repository, case)
            session = await repository.writable_session("main")
            array = await za.open_array(store=session.store, path="a", mode="r+")
            await array.setitem(slice(0, 1), np.array([case.literals[0]], case.raw.dtype))
            if session.has_uncommitted_changes:
                await session.commit("another text")
            await check(repository, case)
            await lose_some(repository, rng)
            async with Repository.open(repository.storage) as again:
                await check(again, case)


@examples(100)
@given(cases())
async def test_commits_make_the_statistics_that_analysis_makes(case: Case) -> None:
    """To the last bit, so that no chunk is read afterwards."""
    attributes = {} if case.missing is None else {"_FillValue": case.missing}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        url = memory_url()
        async with Repository.create(url, config=NO_INLINE) as repository:
            await repository.keep_statistics()
            await commit_array(
                repository, case.raw, (case.chunk,), attributes=attributes, fill=case.fill
            )
            assert (await repository.analyze()).chunks == 0
            made = await rows_in(repository)
            await repository.storage.delete(await stored(repository.storage))
        async with Repository.open(url, config=NO_INLINE) as again:
            await again.analyze()
            assert await rows_in(again) == made


@pytest.mark.parametrize("analyze", [False, True])
async def test_a_single_text_keeps_its_zeros(*, analyze: bool) -> None:
    """Zarr returns the cell of an array without axes as text of Python."""
    async with Repository.create(memory_url()) as repository:
        await commit_array(repository, np.array("a\0", ANY_LENGTH), ())
        if analyze:
            await repository.analyze()
        session = await repository.readonly_session("main")
        assert (await session.aggregate("a", "max")).value == "a\0"
        assert (await whole_mask(await session.where("a = 'a\0'"))).item()
        assert not (await whole_mask(await session.where("a = 'a'"))).item()


@pytest.mark.parametrize(("dtype", "count"), [("<", 1), ("any", 2)])
async def test_zeros_at_the_end_of_a_mark_do_not_count(dtype: str, count: int) -> None:
    """As for NumPy, by which xarray compares: the text without them is missing."""
    attributes = {"missing_value": "a\0"}
    async with Repository.create(memory_url()) as repository:
        raw = array_of(["a", "a\0", "b"], dtype)
        await commit_array(repository, raw, (3,), attributes=attributes)
        session = await repository.readonly_session("main")
        assert (await session.aggregate("a", "count")).value == count
        assert len((await session.where("a = 'a'")).candidates) == 1
        assert (await session.aggregate("a", "count", where="a = 'a'")).value == 0


# Costs


LONG = "x" * 40


@pytest.mark.parametrize("dtype", ["<", "any"])
async def test_only_chunks_that_could_have_the_extreme_text_are_read(dtype: str) -> None:
    """Bounds that are whole are enough; of those that are cut, the least and the greatest count."""
    values = ["b", "c", LONG + "1", LONG + "2", "d", "z" * 50, "e", "z" * 51, "f", "g"]
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        await commit_array(repository, array_of(values, dtype), (2,), compressors=None)
        await repository.analyze()
        session = await repository.readonly_session("main")
        count = await session.aggregate("a", "count")
        low = await session.aggregate("a", "min")
        high = await session.aggregate("a", "max")
        later = await session.aggregate("a", "min", where="a > 'x'")
    assert (count.value, count.chunks_read, count.bytes_read) == (10, 0, 0)
    assert (low.value, low.chunks_read, low.bytes_read) == ("b", 0, 0)
    assert (high.value, high.chunks_read) == ("z" * 51, 2)
    # The chunk of long texts passes whole, those with "z" in part; all three are read.
    assert (later.value, later.chunks_read) == (LONG + "1", 3)
    assert high.bytes_read + high.bytes_skipped == low.bytes_skipped


@pytest.mark.parametrize(
    ("where", "candidates", "certain"),
    [
        ("a = 'b2'", [1], [False]),
        ("a != 'c0'", [0, 1, 2, 3], [True, True, False, True]),
        ("a < 'b'", [0], [True]),
        ("a between 'b1' and 'c9'", [1, 2], [False, True]),
        ("a in ('a0', 'd1')", [0, 3], [False, False]),
        ("a not in ('x')", [0, 1, 2, 3], [True] * 4),
        ("a > 'd2'", [], []),
        ("a >= 'c'", [2, 3], [True, True]),
        ("a < 'b' and a > 'a1'", [0], [False]),
    ],
)
async def test_conditions_rule_out_chunks(
    where: str, candidates: list[int], certain: list[bool]
) -> None:
    """Sorted names, three to a chunk; what is certain is not read either."""
    values = [f"{letter}{number}" for letter in "abcd" for number in range(3)]
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        await commit_array(repository, array_of(values, "any"), (3,), compressors=None)
        await repository.analyze()
        session = await repository.readonly_session("main")
        selection = await session.where(where)
        found = await session.aggregate("a", "count", where=where)
    assert selection.candidates[:, 0].tolist() == candidates
    assert selection.certain.tolist() == certain
    assert found.chunks_read == certain.count(False)


async def test_text_beside_numbers_rules_out_their_chunks() -> None:
    """A coordinate of text is read once; text along all axes goes by its statistics."""
    names = np.array(["ABC", "DEF", "GHI", "JKL"])
    numbers = np.arange(16.0).reshape(4, 4)
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        session = await repository.writable_session("main")
        dims = ("station", "x")
        for name, raw, chunks, names_ in (
            ("/t2m", numbers, (1, 2), dims),
            ("/station", names, (4,), dims[:1]),
            ("/flag", np.repeat(names[:, None], 4, axis=1), (1, 2), dims),
        ):
            await put_array(session, name, raw, chunks, names=names_, compressors=None)
        await session.commit("stations")
        await repository.analyze()
        session = await repository.readonly_session("main")
        by_name = await session.where("station = 'DEF' and t2m > 5")
        assert by_name.candidates.tolist() == [[1, 1]]
        assert np.argwhere(await whole_mask(by_name)).tolist() == [[1, 2], [1, 3]]
        by_flag = await session.where("flag >= 'GHI' and t2m < 14")
        assert by_flag.candidates.tolist() == [[2, 0], [2, 1], [3, 0]]
        assert by_flag.certain.all()
        found = await session.aggregate("t2m", "max", where="flag = 'ABC'")
        assert (found.value, found.chunks_read) == (3.0, 0)


async def test_long_coordinates_of_text_are_not_read_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts are larger than numbers, so fewer of them are held; chunks are read where needed."""
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        session = await repository.writable_session("main")
        names = np.array([f"{it:02}" for it in range(20)], ANY_LENGTH)
        await put_array(session, "/name", names, (5,), names=("x",), compressors=None)
        values = np.arange(40.0).reshape(20, 2)
        await put_array(session, "/t", values, (5, 2), names=("x", "y"), compressors=None)
        await session.commit("names")
        await repository.analyze()
        session = await repository.readonly_session("main")
        costs: list[int] = []
        for most in (20 * 16, 19 * 16):
            monkeypatch.setattr(planning, "_MOST_VALUES", most)
            found = await session.aggregate("t", "max", where="name < '07'")
            assert (found.value, found.chunks_read) == (13.0, 1)
            costs.append(found.bytes_read)
    one_chunk = 4 + 5 * (4 + 2)
    assert costs == [80 + 4 * one_chunk, 80 + one_chunk]


async def test_many_long_texts_take_the_memory_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk that is read has one of 2 MB, of which the least is kept."""
    monkeypatch.setattr(aggregating, "chunks_at_once", lambda *_: 1)
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        values = np.array([chr(200 - it) * 1_000_000 for it in range(60)], ANY_LENGTH)
        await commit_array(repository, values, (1,))
        expected = str(values.min())
        del values
        session = await repository.readonly_session("main")
        tracemalloc.start()
        try:
            found = await session.aggregate("a", "min")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert found.value == expected
    assert found.chunks_read == 60
    assert peak < 20e6


# What is refused


@pytest.mark.parametrize("function", ["sum", "mean", "var", "std"])
async def test_text_has_no_sum(function: Any) -> None:
    """The message says what there is."""
    async with Repository.create(memory_url()) as repository:
        await commit_array(repository, np.array(["a"]), (1,))
        session = await repository.readonly_session("main")
        with pytest.raises(InvalidInputError, match=r"text, which has no .* count, min, max"):
            await session.aggregate("a", function)


@pytest.mark.parametrize("where", ["a = 5", "a > 1.5", "a in (true)", "a = '\ud800'"])
async def test_text_is_compared_with_text(where: str) -> None:
    """That is in quotes, and Unicode."""
    async with Repository.create(memory_url()) as repository:
        await commit_array(repository, np.array(["a"]), (1,))
        session = await repository.readonly_session("main")
        with pytest.raises(InvalidInputError, match="compares 'a'"):
            await session.where(where)


@pytest.mark.parametrize("code", [0xD800, 0xDFFF, 0x110000, 0xFFFFFFFF])
async def test_text_that_is_not_unicode_is_refused(code: int) -> None:
    """Its chunk stays unknown; other chunks are not affected."""
    raw = np.array(["ab", "cd", "ef", "gh"])
    raw.view(np.uint32)[2] = code
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        await repository.keep_statistics()
        await commit_array(repository, raw, (1,))
        analysis = await repository.analyze()
        assert (analysis.known, analysis.chunks, len(analysis.unreadable)) == (3, 0, 1)
        session = await repository.readonly_session("main")
        with pytest.raises(FormatError, match=r"'/a' .*not valid Unicode"):
            await session.aggregate("a", "max")
        assert (await session.aggregate("a", "max", region=(slice(2, 4),))).value == "gh"


@pytest.mark.parametrize("dtype", ["<", "any"])
async def test_fill_value_that_is_not_unicode_is_refused(dtype: str) -> None:
    """A document can say so."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await put_array(session, "/a", array_of(["a"], dtype), (1,), fill="f")
        store = session.store
        document = await store.get("a/zarr.json", zarr.core.buffer.default_buffer_prototype())
        assert document is not None
        data = document.to_bytes().replace(b'"fill_value": "f"', b'"fill_value": "\\udfff"')
        data = data.replace(b'"shape": [\n    1\n', b'"shape": [\n    2\n', 1)
        assert data.count(b"udfff") == 1
        await store.set("a/zarr.json", zarr.core.buffer.cpu.Buffer.from_bytes(data))
        await session.commit("no text")
        session = await repository.readonly_session("main")
        with pytest.raises(FormatError):
            await session.aggregate("a", "max")


@pytest.mark.parametrize("missing", [5, ["a", None], True])
async def test_marks_of_missing_text_are_text(missing: Any) -> None:
    """The message says which attribute to correct."""
    async with Repository.create(memory_url()) as repository:
        await commit_array(repository, np.array(["a"]), (1,), attributes={"missing_value": missing})
        session = await repository.readonly_session("main")
        with pytest.raises(InvalidInputError, match=r"'missing_value' .* not text"):
            await session.aggregate("a", "max")


async def test_bytes_are_left_out() -> None:
    """They are no text, and the message says what there is instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        async with Repository.create(memory_url()) as repository:
            session = await repository.writable_session("main")
            await put_array(session, "/fixed", np.array([b"a"]), (1,))
            await za.create_array(
                session.store, name="any", shape=(1,), chunks=(1,), dtype="variable_length_bytes"
            )
            await session.commit("bytes")
            analysis = await repository.analyze()
    assert analysis.arrays == 0
    assert len(analysis.left_out) == 2
    assert all("Select by bytes with SQL" in it for it in analysis.left_out)


# With everything else


async def test_compaction_carries_them() -> None:
    """To the keys of the copies; no chunk is read for it."""
    values = np.array([f"{it:03}" * 13 for it in range(40)], ANY_LENGTH)
    packing = Packing(target_bytes=400, max_chunk_bytes=200)
    async with Repository.create(memory_url(), config=NO_INLINE, packing=packing) as repository:
        await commit_array(repository, values, (1,), compressors=None)
        session = await repository.writable_session("main")
        array = await za.open_array(store=session.store, path="a", mode="r+")
        for place in range(0, 40, 2):
            await array.setitem(place, "new")
        await session.commit("half is new")
        await repository.analyze()
        assert (await repository.compact("main", min_live_share=1.0)).chunks
        session = await repository.readonly_session("main")
        found = await session.aggregate("a", "count", where="a >= '03'")
        assert (found.value, found.chunks_read) == (25, 0)
        assert (await repository.analyze()).chunks == 0


def test_blocking_code_and_xarray_select_by_text(tmp_path: Path) -> None:
    """Missing values elsewhere, and chunks that are gone are not needed."""
    config = BlockingConfig(inline_chunk_threshold_bytes=0)
    repository = BlockingRepository.create(str(tmp_path / "r"), config=config)
    session = repository.writable_session("main")
    for name, raw in (("a", np.array(["b", "c", "d", "e"])), ("n", np.arange(4))):
        zarr.create_array(session.store, name=name, data=raw, chunks=(2,), dimension_names=("x",))
    session.commit("data")
    repository.analyze()
    session = repository.readonly_session("main")
    assert [it.indices().tolist() for it in session.where("a > 'c'")] == [[[2], [3]]]
    found = open_where(session, "a >= 'd' and n < 3")
    assert found.values[2] == "d"
    assert found.isnull().values.tolist() == [True, True, False, True]


# The bounds


@given(texts)
@example("a" * 31 + "é")
@example("a" * 30 + "\0" * 3)
@example("")
def test_bounds_are_the_begin_of_a_text(text: str) -> None:
    """Whole characters, at most 32 bytes; whether it is all is known, and zeros are kept."""
    bound, is_cut = text_bound(text)
    begin = text_of(bound.rstrip(b"\0"))  # as NumPy returns it
    assert len(bound) == 33
    assert len(begin.encode()) <= 32
    assert text.startswith(begin)
    assert is_cut == (begin != text)
    if is_cut:
        assert len(begin.encode()) + len(text[len(begin)].encode()) > 32


@examples(300)
@given(st.lists(texts, min_size=1, max_size=4), texts)
@example(["a" * 32, "a" * 31 + "é"], "a" * 31 + "b")
@example([LAST * 8, LAST * 9], LAST * 100)
def test_keys_are_in_the_order_of_texts(values: list[str], literal: str) -> None:
    """No bound says more than the texts do, and whole ones say as much."""
    rows = np.zeros(1, row_type("t"))
    set_bounds(rows, 0, min(values), max(values))
    low, high, key = rows["low"], greatest_keys(rows), text_key(literal)
    cut = int(rows["cut"][0])
    if (low > key).all():
        assert literal < min(values)
    elif not cut & LOW_CUT:
        assert min(values) <= literal
    if (high < key).all():
        assert literal > max(values)
    elif not cut & HIGH_CUT:
        assert literal <= max(values)
    assert bool((low == key).all()) <= (text_of(bytes(low[0])) == literal)
    assert not (cut and low[0] == high[0])
    assert format_statistics._are_texts(rows)


@given(texts, short)
def test_successor_is_above_all_that_begin_alike(begin: str, tail: str) -> None:
    """And above no other; behind the last character nothing follows."""
    found = successor(begin)
    if found is None:
        assert begin.strip(LAST) == ""
        return
    found.encode()
    assert begin + tail < found
    assert begin + LAST * 50 < found
    following = begin.rstrip(LAST)
    assert found[:-1] == following[:-1]
    gap = ord(found[-1]) - ord(following[-1])
    assert gap == 1 or (found[-1], gap) == ("\ue000", 0x801)


# The file


ID = StatisticsId(bytes(range(12)))


def rows_of(count: int) -> Any:
    """Return possible rows."""
    rows = np.zeros(count, row_type("t"))
    rows["key"] = [b"%040d" % it for it in range(count)]
    rows["count"] = 3
    for at in range(count):
        set_bounds(rows, at, "é" * at, "é" * (at + 14))
    return rows


def encoded(rows: Any) -> bytes:
    """Return rows as an object."""
    return ChunkStatistics(b"m" * 32, "t", rows).encode(ID)


async def test_statistics_of_text_take_123_bytes_a_chunk() -> None:
    """Beside a head and a digest; what was stored is what is read."""
    data = encoded(rows_of(5))
    assert len(data) == 64 + 5 * 123 + 32
    again = ChunkStatistics.decode(data, ID)
    assert again.rows.tobytes() == rows_of(5).tobytes()
    assert again.encode(ID) == data
    assert data[20:21] == b"t"


def test_older_versions_take_them_for_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """They refuse kinds that they do not know, and never take text for numbers."""
    monkeypatch.setattr(format_statistics, "_KINDS", {b"i": "i", b"u": "u", b"f": "f"})
    with pytest.raises(FormatError, match="newer version"):
        ChunkStatistics.decode(encoded(rows_of(2)), ID)


def test_statistics_of_numbers_are_stored_as_before() -> None:
    """Objects of older versions stay valid: the digest is of one that such a version wrote."""
    rows = np.zeros(2, row_type("i"))
    rows["key"] = [b"a" * 40, b"b" * 40]
    rows["count"], rows["high"], rows["sum"], rows["rest"] = 3, 7, 1, 5
    data = ChunkStatistics(b"m" * 32, "i", rows).encode(ID)
    assert hashlib.sha256(data).hexdigest() == OLDER
    assert ChunkStatistics.decode(data, ID).rows.tobytes() == rows.tobytes()


OLDER = "6b164d83f4d43d9d9c26a12bd9d4ea49a8e8a63f6c85885cb65abd985c5fe716"


@examples(300)
@given(st.data())
def test_damaged_statistics_of_text_are_format_errors(data: st.DataObject) -> None:
    """Also with a right digest: they are read, or refused, and nothing else."""
    whole = encoded(rows_of(4))
    wrong = bytearray(whole)
    at = data.draw(st.integers(0, len(whole) - 1))
    wrong[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FormatError):
        ChunkStatistics.decode(bytes(wrong), ID)
    wrong[-32:] = hashlib.sha256(wrong[:-32]).digest()
    try:
        found = ChunkStatistics.decode(bytes(wrong), ID)
    except FormatError:
        return
    for name in ("low", "high"):
        for bound in found.rows[name].tolist():
            text_of(bound).encode()
    assert (found.rows["low"] <= greatest_keys(found.rows)).all()


def _spoiled(name: str, bound: bytes, cut: int = 0) -> Any:
    rows = rows_of(4)
    rows[name][1], rows["cut"][1] = bound, cut
    return rows


@pytest.mark.parametrize(
    "rows",
    [
        _spoiled("low", b"a" * 32 + b"\x21"),
        _spoiled("low", b"a" * 32 + b"\x01"),
        _spoiled("high", b"a\xc3".ljust(32, b"\0") + b"\x02"),
        _spoiled("high", b"\xed\xa0\x80".ljust(32, b"\0") + b"\x03"),
        _spoiled("high", b"\xf4\x90\x80\x80".ljust(32, b"\0") + b"\x04"),
        _spoiled("low", LAST.encode().ljust(32, b"\0") + b"\x04"),
        _spoiled("high", b"", HIGH_CUT),
        _spoiled("low", b"a".ljust(32, b"\0") + b"\x01", LOW_CUT),
        _spoiled("low", b"", 4),
    ],
    ids=[
        "longer",
        "padding",
        "half a character",
        "a surrogate",
        "beyond all characters",
        "order",
        "nothing cut",
        "cut short",
        "a flag",
    ],
)
def test_impossible_bounds_with_a_right_digest_are_refused(rows: Any) -> None:
    """Each for one reason."""
    with pytest.raises(FormatError, match="cannot be those of any values"):
        ChunkStatistics.decode(encoded(rows), ID)


def test_half_characters_of_two_bounds_make_none_together() -> None:
    """Though their bytes are beside each other."""
    rows = rows_of(2)
    rows["high"] = [b"z" * 31 + b"\xc3\x20", b"\xa9" + b"z" * 31 + b"\x20"]
    with pytest.raises(FormatError):
        ChunkStatistics.decode(encoded(rows), ID)
