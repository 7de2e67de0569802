"""Lazy aggregates of xarray: nothing before values are asked for, then all at once."""

# xarray and zarr are only partly typed.
# pyright: basic

from __future__ import annotations

import asyncio
import pickle
import shutil
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import anyio.to_thread
import numpy as np
import pytest
import xarray as xr
import zarr
import zarr.api.asynchronous as za

from icechunk_async import Repository as AsyncRepository
from icechunk_async._runtime.blocking.portal import run
from icechunk_async.config import RepositoryConfig as AsyncConfig
from icechunk_async.errors import IcechunkError, InvalidInputError, NodeNotFoundError
from icechunk_async.storage import open_storage
from icechunk_async.sync import Repository, RepositoryConfig
from icechunk_async.sync.storage import local_filesystem_storage
from icechunk_async.sync.xarray import open_aggregates, open_dataset, open_where, to_icechunk
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.xarray import open_aggregates as async_open_aggregates
from icechunk_async.xarray import open_dataset as async_open_dataset
from icechunk_async.xarray import open_where as async_open_where
from icechunk_async.zarr.queries import by_chunk
from icechunk_async.zarr.queries.measuring import summary
from tests.helpers import memory_url
from tests.unit.zarr.queries.truth import commit_array

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.sync import Session

assert_equal = cast("Any", xr.testing).assert_equal
assert_allclose = cast("Any", xr.testing).assert_allclose
FUNCTIONS: Any = ("min", "max", "sum", "mean", "std", "count")
KINDS = {
    "f4": ("f4", "f8", "f8", "f4", "a > 9"),
    "i2": ("i2", "i8", "f8", "f8", "a > 9"),
    "u8": ("u8", "u8", "f8", "f8", "a > 9"),
    "?": ("?", "i8", "f8", "O", "a = true and a = false"),
    "M8[s]": ("M8[s]", None, "M8[s]", "M8[s]", "a > '2020-01-01'"),
    "m8[s]": ("m8[s]", "m8[s]", "m8[s]", "m8[s]", "a > 9 and a < 8"),
}
"""For each type that of the minimum, the sum, the mean, no minimum, and a condition for none."""


def made() -> xr.Dataset:
    """Return a field of whole numbers, the same with gaps and packed, and coordinates."""
    field = np.arange(240).reshape(24, 10)
    days = np.datetime64("2020-01-01", "ns") + np.arange(24) * np.timedelta64(1, "D")
    return xr.Dataset(
        {
            "t": (("time", "lat"), field, {"units": "K", "long_name": "temperature"}),
            "p": (("time", "lat"), np.where(field % 7 == 0, np.nan, field / 2)),
        },
        coords={"time": days, "lat": np.linspace(-90, 90, 10)},
    )


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """Return a session with them, in chunks of 4 days and 5 latitudes, analyzed."""
    repository = Repository.create(
        local_filesystem_storage(str(tmp_path / "r")),
        RepositoryConfig(inline_chunk_threshold_bytes=0),
    )
    packed = {"dtype": "i2", "scale_factor": 0.5, "_FillValue": -1, "chunks": (4, 5)}
    writable = repository.writable_session("main")
    to_icechunk(made(), writable, encoding={"t": {"chunks": (4, 5)}, "p": packed})
    writable.commit("fields")
    repository.analyze()
    return repository.readonly_session("main")


def wanted(session: Session, name: str, where: str | None, dims: list[str]) -> xr.Dataset:
    """Return the same, computed by xarray."""
    whole = open_dataset(session, chunks=None)
    array = (
        whole[name] if where is None else whole[name].where((whole[name] > 50) & (whole.lat > 0))
    )
    array = array.astype("f8")
    parts = array.coarsen(
        time=4 if "time" in dims else 24,
        lat=5 if "lat" in dims else 10,
        coord_func=lambda it, axis: np.asarray(it).min(axis),
    )
    found = xr.Dataset({it: getattr(parts, it)() for it in FUNCTIONS})
    return found.squeeze([it for it in ("time", "lat") if it not in dims], drop=True)


@pytest.mark.parametrize("dims", [[], ["time"], ["lat"], ["time", "lat"]])
@pytest.mark.parametrize("where", [None, "{} > 50 and lat > 0"])
@pytest.mark.parametrize("name", ["t", "p"])
def test_values_are_those_of_xarray(
    session: Session, name: str, where: str | None, dims: list[str]
) -> None:
    """Of the whole array, and of each chunk along dimensions. Units belong to values only."""
    where = where and where.format(name)
    found = open_aggregates(session, name, FUNCTIONS, where=where, per_chunk_of=dims)
    assert_allclose(found[list(FUNCTIONS)], wanted(session, name, where, dims))
    assert found["max"].attrs == open_dataset(session)[name].attrs
    assert found["count"].attrs == {}


@pytest.mark.parametrize("dims", [[], ["time"]])
async def test_nothing_is_read_before_values_are_asked_for(dims: list[str]) -> None:
    """No request at all; then all variables cost one query, which says what it read."""
    async with open_storage(memory_url()) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with AsyncRepository.create(
            storage, config=AsyncConfig(inline_chunk_threshold_bytes=0)
        ) as repository:
            raw = np.arange(240.0).reshape(24, 10)
            names = ("time", "lat")
            await commit_array(repository, raw, (4, 5), "/t", names=names)
            await commit_array(repository, np.arange(10.0), (5,), "/lat", names=("lat",))
            await repository.analyze()
            session = await repository.readonly_session("main")
            storage.forget()
            where = "t > 116 and lat >= 0"
            found = await async_open_aggregates(
                session, "t", ["max", "sum"], where=where, per_chunk_of=dims
            )
            assert not storage.log
            found = await found.load_async()
            chunks = [key for _, key in storage.log if key.startswith("chunks/")]
            assert len(chunks) == len(set(chunks)) == 2 + 1  # the coordinate, and one of them
            assert storage.requests["list_prefix"] == 2
            assert float(found["sum"].sum()) == raw[raw > 116].sum()
            plainly = await session.aggregate("t", "sum", where=where)
            for name in ("chunks", "chunks_read", "bytes_read", "bytes_skipped"):
                assert int(found[name].sum()) == getattr(plainly, name), name


def put(path: Path, values: Any, **attributes: Any) -> Session:
    """Return a session with one array ``a``, in chunks of two."""
    session = Repository.create(str(path)).writable_session("main")
    array = zarr.create_array(
        session.store,
        name="a",
        shape=values.shape,
        chunks=(2,),
        dtype=values.dtype,
        dimension_names=["x"],
        attributes=attributes,
    )
    array[:] = values
    return session


@pytest.mark.parametrize("kind", KINDS)
def test_types_are_known_before_values(tmp_path: Path, kind: str) -> None:
    """Those that are computed have them, also where there is no value."""
    least, total, mean, none, where = KINDS[kind]
    values = np.array([1, 0, 1]).astype(kind)
    session = put(tmp_path / "r", values)
    types = {it: found for it, found in (("min", least), ("mean", mean), ("sum", total)) if found}
    found = open_aggregates(session, "a", cast("Any", list(types)), per_chunk_of="x")
    for name, dtype in types.items():
        assert found[name].dtype == np.dtype(dtype) == found[name].to_numpy().dtype
    np.testing.assert_array_equal(found["min"], values[[1, 2]])
    gap = open_aggregates(session, "a", "min", where=where)["min"]
    assert gap.dtype == np.dtype(none) == gap.to_numpy().dtype
    assert gap.isnull().item()


@pytest.mark.parametrize(("attributes", "kind"), [({"_FillValue": 7}, "f8"), ({}, "i4")])
def test_marks_of_missing_values_make_integers_doubles(
    tmp_path: Path, attributes: Any, kind: str
) -> None:
    """Only these; so where no value is marked, integers stay exact."""
    session = put(tmp_path / "r", np.array([7, 7, 3], "i4"), **attributes)
    found = open_aggregates(session, "a", "min", per_chunk_of="x")["min"]
    assert found.dtype == np.dtype(kind)
    np.testing.assert_array_equal(found, [np.nan if attributes else 7, 3])
    assert found.attrs == {}  # it is decoded


def test_an_empty_array_has_no_values(tmp_path: Path) -> None:
    """Its aggregate is missing, and no chunk along its dimension has one."""
    session = put(tmp_path / "r", np.zeros(0, "i4"))
    found = open_aggregates(session, "a", ["max", "count"])
    assert (found["count"].item(), found["max"].isnull().item()) == (0, True)
    assert open_aggregates(session, "a", "max", per_chunk_of="x").load()["max"].shape == (0,)


def test_a_sum_beyond_64_bits_is_an_error(tmp_path: Path) -> None:
    """And not some other number; `Session.aggregate` has it."""
    session = put(tmp_path / "r", np.array([2**63 - 1, 1], "i8"))
    with pytest.raises(IcechunkError, match=f"is {2**63}, and an array holds 64 bits"):
        open_aggregates(session, "a", "sum").load()
    assert session.aggregate("a", "sum").value == 2**63


def test_a_part_costs_its_chunks_and_is_computed_once(session: Session, tmp_path: Path) -> None:
    """Of lists, steps and single places. Chunks elsewhere are gone; later all are."""
    whole = open_dataset(session, chunks=None).load()
    coldest = whole.t.coarsen(time=4).min().min("lat")
    shutil.rmtree(tmp_path / "r" / "statistics")
    workspace = session.handle.now().workspace
    for at in (0, 5):
        handle: Any = run(workspace.find_chunk("/t", (at, 0)))
        (tmp_path / "r" / "chunks" / str(handle.ref.chunk_id)).unlink()
    found = open_aggregates(session, "t", ["min", "max"], per_chunk_of="time")
    for part in ({"time": 3}, {"time": slice(3, 0, -2)}, {"time": [2, 1, 2]}):
        np.testing.assert_array_equal(found.isel(part)["min"], coldest.isel(part))
    last = found.sel(time=slice("2020-01-06", "2020-01-16"))
    assert last["time"].to_numpy().tolist() == whole["time"][8:16:4].to_numpy().tolist()
    shutil.rmtree(tmp_path / "r" / "chunks")
    np.testing.assert_array_equal(last["max"], coldest[2:4] + 39)
    last["max"].values[:] = 0  # what somebody else does to a result
    np.testing.assert_array_equal(found.copy(deep=True)["max"][2:4], coldest[2:4] + 39)


def test_copies_elsewhere_and_dask_compute_the_same(session: Session) -> None:
    """A pickled copy opens the repository."""
    found = open_aggregates(session, "t", FUNCTIONS, where="t > 7", per_chunk_of=["time"])
    wanted = found.copy().load()
    assert_equal(pickle.loads(pickle.dumps(found)).load(), wanted)
    assert_equal(found.chunk(time=2).compute(scheduler="threads"), wanted)


async def test_what_asyncio_opens_pickles(session: Session, tmp_path: Path) -> None:
    """Datasets, selections and aggregates, of sessions that only read; and code may block."""
    del session
    async with AsyncRepository.open(tmp_path / "r") as repository:
        native = await repository.readonly_session("main")
        found = [
            await async_open_dataset(native, chunks=None),
            await async_open_where(native, "t > 50 and lat > 0"),
            await async_open_aggregates(native, "t", FUNCTIONS, per_chunk_of="time"),
        ]
        copies = [pickle.dumps(it) for it in found]
        for it, copy in zip(found, copies, strict=True):
            loaded = await it.copy(deep=True).load_async()
            assert_equal(await anyio.to_thread.run_sync(partial(_loaded, copy)), loaded)
            assert_equal(await pickle.loads(copy).load_async(), loaded)
            assert_equal(await anyio.to_thread.run_sync(it.load), loaded)
        writable = await repository.writable_session("main")
        with pytest.raises(ValueError, match="A writable session stays in its process"):
            pickle.dumps(await async_open_where(writable, "t > 50"))


def _loaded(data: bytes) -> Any:
    return pickle.loads(data).load()


def test_event_loops_of_several_threads_do_not_wait_for_each_other(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that waits for a lock of another is never woken."""
    found = open_aggregates(session, "t", "max", per_chunk_of="time")
    wanted = found.copy().load()["max"]
    found = open_aggregates(session, "t", "max", per_chunk_of="time")
    begun, released = threading.Event(), threading.Event()
    answered = by_chunk.answered
    results: list[xr.Dataset] = []

    async def gated(*given: Any) -> Any:
        if not begun.is_set():
            begun.set()
            await anyio.to_thread.run_sync(released.wait)
        return await answered(*given)

    monkeypatch.setattr("icechunk_async.datasets.queries.answered", gated)

    def load() -> None:
        results.append(asyncio.run(found.copy().load_async()))

    first, second = (threading.Thread(target=load, daemon=True) for _ in range(2))
    first.start()
    assert begun.wait(60)
    second.start()
    try:
        second.join(60)
        assert not second.is_alive()
    finally:
        released.set()
    first.join(60)
    assert len(results) == 2
    for it in results:
        assert_equal(it["max"], wanted)


async def test_many_answers_do_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are put together on another thread; each takes some microseconds."""
    threads = set[int]()

    def noted(*given: Any) -> Any:
        threads.add(threading.get_ident())
        return summary(*given)

    monkeypatch.setattr(by_chunk, "summary", noted)
    async with AsyncRepository.create(memory_url()) as repository:
        raw = np.arange(1000, dtype="u2")
        await commit_array(repository, raw, (2,), "/a", names=("x",))
        session = await repository.readonly_session("main")
        found = await async_open_aggregates(session, "a", ["min", "sum"], per_chunk_of="x")
        found = await found.load_async()
    assert found["sum"].to_numpy().tolist() == raw.reshape(-1, 2).sum(1).tolist()
    assert threads
    assert threading.get_ident() not in threads


def test_an_array_that_was_resized_is_opened_anew(tmp_path: Path) -> None:
    """Its answers would not fit; what was computed stays, and values that change are seen."""
    session = put(tmp_path / "r", np.arange(4))
    before, found, after = (
        open_aggregates(session, "a", "max", per_chunk_of="x")["max"] for _ in range(3)
    )
    before.load()
    array = zarr.open_array(session.store, path="a")
    array[3] = 9
    assert found.to_numpy().tolist() == [1, 9]
    array.resize((6,))
    assert before.to_numpy().tolist() == [1, 3]
    with pytest.raises(IcechunkError, match="was resized, or its attributes changed"):
        after.load()


def test_what_cannot_be_asked_is_refused(session: Session) -> None:
    """At opening, and not when values are needed."""

    def refused(message: str, path: str = "t", functions: Any = "max", **more: Any) -> None:
        with pytest.raises(IcechunkError, match=message):
            open_aggregates(session, path, functions, **more)

    refused("no array at '/x'", "x")
    refused("There is no aggregate 'median'", functions=["max", "median"])
    refused("No aggregate is named", functions=[])
    refused("no dimension 'lon'", per_chunk_of="lon")
    refused("about 'x', and there is no array", where="x > 1")
    refused("not understood", where="t >")
    refused("which is neither a number", where="t > warm")


TEXTS = (
    *("", "b", "a", "é", "z\U0010ffff", "\U0010ffff" * 20, "\ud7ff", "\ue000", "none"),
    *("z" * 40, "z" * 39 + "a", "z" * 41, "z" * 32, "z" * 33, "é" * 16, "é" * 17 + "a", "é" * 17),
)
TEXT_KINDS = {"fixed": np.dtype("U48"), "any length": np.dtypes.StringDType()}


@pytest.mark.parametrize("kind", TEXT_KINDS)
@pytest.mark.parametrize("where", [None, "a > 'b' and a != 'z'", "a < ''"])
def test_least_and_greatest_texts_are_those_of_python(
    tmp_path: Path, kind: str, where: str | None
) -> None:
    """Of the whole array and of each chunk: empty ones, long ones that begin alike, missing ones.

    With and without statistics, they are also what `Session.aggregate` returns.
    """
    rng = np.random.default_rng(0)
    texts = [str(it) for it in rng.choice(TEXTS, 120)] + ["none", "none", "z" * 40]
    session = put(tmp_path / "r", np.array(texts, TEXT_KINDS[kind]), missing_value="none")
    session.commit("texts")
    repository = Repository.open(str(tmp_path / "r"))
    condition: Any = {None: lambda it: True, "a < ''": lambda it: False}.get(
        where, lambda it: it > "b" and it != "z"
    )

    def extremes(some: list[str]) -> list[Any]:
        chosen = [it for it in some if it != "none" and condition(it)]
        return [min(chosen), max(chosen)] if chosen else [None, None]

    for analyze in (False, True):
        if analyze:
            repository.analyze()
        session = repository.readonly_session("main")
        whole = open_aggregates(session, "a", ["min", "max"], where=where)
        some = open_aggregates(session, "a", ["min", "max"], where=where, per_chunk_of="x")
        assert {it.dtype for it in (whole["min"], some["max"])} == {np.dtype(object)}
        assert shown(whole) == [extremes(texts)]
        assert shown(some) == [extremes(texts[at : at + 2]) for at in range(0, len(texts), 2)]
        functions = ("min", "max")
        assert shown(whole) == [
            [session.aggregate("a", cast("Any", it), where=where).value for it in functions]
        ]
        part = open_aggregates(session, "a", ["min", "max"], where=where, per_chunk_of="x")
        assert shown(part.isel(x=slice(7, 20, 3))) == shown(some)[7:20:3]


def shown(found: xr.Dataset) -> list[list[Any]]:
    """Return the least and the greatest texts; None where they are missing as xarray has it."""
    columns: list[list[Any]] = []
    for name in ("min", "max"):
        values = np.atleast_1d(found[name].to_numpy())
        missing = np.atleast_1d(found[name].isnull().to_numpy())
        columns.append(
            [None if it else str(text) for it, text in zip(missing, values, strict=True)]
        )
    return [list(it) for it in zip(*columns, strict=True)]


async def test_texts_cost_the_chunks_whose_bounds_were_cut() -> None:
    """For each answer; both are from one read, and conditions leave out chunks as ever."""
    texts = np.array(
        ["a", "b", "y" * 40, "y" * 39 + "z", "c", "c", "z" * 40, "d", "e", "f"],
        np.dtypes.StringDType(),
    )
    async with open_storage(memory_url()) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with AsyncRepository.create(
            storage, config=AsyncConfig(inline_chunk_threshold_bytes=0)
        ) as repository:
            await commit_array(repository, texts, (2,), "/a", names=("x",))
            await repository.analyze()
            session = await repository.readonly_session("main")

            async def cost(functions: Any, **more: Any) -> tuple[Any, int]:
                found = await async_open_aggregates(session, "a", functions, **more)
                storage.forget()
                found = await found.load_async()
                chunks = [key for _, key in storage.log if key.startswith("chunks/")]
                assert len(chunks) == int(found["chunks_read"].sum())
                return found["chunks_read"].to_numpy().tolist(), len(chunks)

            assert await cost(["min", "max"], per_chunk_of="x") == ([0, 1, 0, 1, 0], 2)
            assert await cost("min", per_chunk_of="x") == ([0, 1, 0, 0, 0], 1)
            assert await cost(["min", "max"]) == (1, 1)
            assert await cost("min") == (0, 0)
            assert await cost("max", where="a > 'x'", per_chunk_of="x") == ([0, 1, 0, 1, 0], 2)


def test_texts_travel_and_are_lazy_with_dask(tmp_path: Path) -> None:
    """A pickled copy computes them, and so do tasks."""
    writable = put(tmp_path / "r", np.array(["a", "b" * 40, "c", "d"], "U40"))
    writable.commit("texts")
    session = Repository.open(str(tmp_path / "r")).readonly_session("main")
    found = open_aggregates(session, "a", ["min", "max", "count"], per_chunk_of="x")
    loaded = found.copy().load()
    assert loaded["max"].to_numpy().tolist() == ["b" * 40, "d"]
    assert_equal(pickle.loads(pickle.dumps(found)).load(), loaded)
    assert_equal(found.chunk(x=1).compute(scheduler="threads"), loaded)
    with pytest.raises(IcechunkError, match="are text, which has no mean"):
        open_aggregates(session, "a", ["count", "mean"])


LARGE = {
    "i8": (2**53, -(2**53), 2**53 - 1, 2**62, -(2**63), 2**54 + 4, -(2**54) - 4),
    "u8": (2**53, 2**64 - 2048, 2**63, 2**60 + 2**8),
}
ROUNDED = {
    "i8": (2**53 + 1, -(2**53) - 1, 2**63 - 1, 2**62 + 1, -(2**63) + 1, 2**54 + 2**54 - 1),
    "u8": (2**53 + 1, 2**64 - 1, 2**63 + 1, 2**63 - 1),
}
"""Integers that are equal to a double, and such that are not."""


@pytest.mark.parametrize("kind", ["i8", "u8"])
@pytest.mark.parametrize("dims", [(), ("x",)])
async def test_integers_are_exact_or_refused(kind: str, dims: tuple[str, ...]) -> None:
    """Where a value could be missing they are doubles, and none is another number than it was."""
    for value in (*LARGE[kind], *ROUNDED[kind]):
        async with AsyncRepository.create(memory_url()) as repository:
            raw = np.array([value, value, 5, 7], kind)
            await commit_array(repository, raw, (2,), "/a", names=("x",))
            marked = {"_FillValue": 5}
            await commit_array(repository, raw, (2,), "/m", names=("x",), attributes=marked)
            session = await repository.readonly_session("main")
            exact = await async_open_aggregates(session, "a", ["min", "max"], per_chunk_of=dims)
            exact = await exact.load_async()
            assert exact["min"].dtype == exact["max"].dtype == np.dtype(kind)
            far = "min" if value < 0 else "max"
            assert int(exact[far].to_numpy().reshape(-1)[0]) == value
            for path, where in (("a", "a != 5"), ("m", None)):
                found = await async_open_aggregates(
                    session, path, ["min", "max"], where=where, per_chunk_of=dims
                )
                assert found[far].dtype == np.dtype("f8")
                if value in ROUNDED[kind]:
                    with pytest.raises(InvalidInputError, match=rf" is {value}, and the nearest"):
                        # One variable: xarray would leave the others to compute on.
                        await found[far].load_async()
                    plainly = await session.aggregate(path, cast("Any", far), where=where)
                    assert plainly.value == value
                else:
                    found = await found.load_async()
                    assert int(found[far].to_numpy().reshape(-1)[0]) == value


def test_integers_that_would_be_rounded_are_refused_to_code_that_blocks(tmp_path: Path) -> None:
    """And where cells are selected, which become doubles as well."""
    for number, (value, is_rounded) in enumerate(
        [(it, False) for it in LARGE["i8"]] + [(it, True) for it in ROUNDED["i8"]]
    ):
        session = put(tmp_path / str(number), np.array([5, value, 7, 8], "i8"))
        values = open_where(session, "a != 5")
        assert values.isel(x=slice(2, 4)).to_numpy().tolist() == [7, 8]
        highest = open_aggregates(session, "a", ["min", "max"], where="a != 5")
        if is_rounded:
            with pytest.raises(IcechunkError, match=f"value {value} fulfils"):
                values.load()
            with pytest.raises(IcechunkError, match=r"'Session.aggregate' returns it exactly"):
                highest.load()
        else:
            assert int(values.to_numpy()[1]) == value
            assert value in {int(highest["min"]), int(highest["max"])}


async def test_selected_integers_that_would_be_rounded_are_refused() -> None:
    """By asyncio; unsigned ones, too. None is refused that the conditions leave out."""
    async with AsyncRepository.create(memory_url()) as repository:
        raw = np.array([2**64 - 1, 2**64 - 2048, 7], "u8")
        await commit_array(repository, raw, (2,), "/a", names=("x",))
        session = await repository.readonly_session("main")
        kept = await async_open_where(session, f"a != {2**64 - 1}")
        assert int((await kept.load_async()).to_numpy()[1]) == 2**64 - 2048
        with pytest.raises(InvalidInputError, match=r"Use 'Session.where'"):
            await (await async_open_where(session, "a > 3")).load_async()


@pytest.mark.parametrize("unit", ["ns", "s"])
def test_times_are_exact_where_some_are_missing(tmp_path: Path, unit: str) -> None:
    """To the last unit, since NaT has a place among them."""
    raw = np.array([2**62 + 1, 2**62 - 1, -(2**63) + 1, 3]).view(f"M8[{unit}]")
    session = put(tmp_path / "r", raw)
    found = open_aggregates(session, "a", ["min", "max"], per_chunk_of="x", where="a > '1970'")
    assert found["max"].to_numpy().view("i8").tolist() == [2**62 + 1, 3]
    assert found["min"].to_numpy().view("i8").tolist() == [2**62 - 1, 3]


async def test_names_and_numbers_of_answers_are_bounded() -> None:
    """A dimension with the name of an answer cannot stay, nor can one of millions of chunks."""
    async with AsyncRepository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await za.create_array(
            session.store, name="a", shape=(6_000_000, 2), chunks=(1, 2), dtype="u1",
            dimension_names=["x", "max"],
        )  # fmt: skip
        with pytest.raises(InvalidInputError, match="6000000 answers"):
            await async_open_aggregates(session, "a", "max", per_chunk_of="x")
        with pytest.raises(InvalidInputError, match="named as an answer: max"):
            await async_open_aggregates(session, "a", "max", per_chunk_of="max")
        with pytest.raises(NodeNotFoundError):
            await async_open_aggregates(session, "b", "max")
