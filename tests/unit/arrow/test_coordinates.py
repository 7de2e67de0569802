"""Coordinates are fetched once, however many parts of a table need them."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
import pytest
import xarray
from hypothesis import given
from hypothesis import strategies as st
from xarray.core import indexing

from icechunk_async import arrow
from icechunk_async._runtime.blocking import portal
from icechunk_async.arrow import coordinates, rows
from icechunk_async.arrow.coordinates import keep_coordinates
from icechunk_async.storage import open_storage
from icechunk_async.sync import Repository, RepositoryConfig
from icechunk_async.sync.xarray import to_icechunk
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import examples, memory_url
from tests.unit.arrow.queries import objects_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from icechunk_async.storage import Storage

STEPS, POINTS = 600, 40


@contextmanager
def counted() -> Generator[LatencyStorage]:
    """Open a storage in memory that counts its requests."""
    manager: AbstractAsyncContextManager[Storage] = open_storage(memory_url())

    async def opened() -> Storage:
        return await manager.__aenter__()

    async def closed() -> None:
        await manager.__aexit__(None, None, None)

    try:
        yield LatencyStorage(portal.run(opened()), seconds=0)
    finally:
        portal.run(closed())


def filled(storage: LatencyStorage, steps_in_chunk: int) -> Repository:
    """Commit points over time, in 30 chunks; say how many times a chunk holds."""
    config = RepositoryConfig(inline_chunk_threshold_bytes=0)
    repository = Repository.create(storage, config)
    dataset = xarray.Dataset(
        {"v": (("time", "point"), np.arange(STEPS * POINTS, dtype="f8").reshape(STEPS, POINTS))},
        {
            "time": np.datetime64("2020-01-01", "ns") + np.arange(STEPS) * np.timedelta64(1, "h"),
            "point": np.arange(POINTS) / 4,
            "depth": ("point", np.arange(POINTS) * 10.0),
        },
    )
    session = repository.writable_session("main")
    encoding = {"v": {"chunks": (20, POINTS)}, "time": {"chunks": (steps_in_chunk,)}}
    to_icechunk(dataset, session, encoding=encoding)
    session.commit("filled")
    return repository


@pytest.mark.parametrize(("steps_in_chunk", "chunks"), [(STEPS, 1), (100, 6), (7, 86)])
@pytest.mark.parametrize("fewer", [False, True])
def test_parts_share_the_chunks_of_coordinates(
    monkeypatch: pytest.MonkeyPatch, steps_in_chunk: int, chunks: int, *, fewer: bool
) -> None:
    """Each is fetched once by a scan in thirty parts; at the edges of parts small ones are again.

    Of a single chunk no later scan fetches anything.
    """
    monkeypatch.setattr(rows, "LOAD_BYTES", 1)
    with counted() as storage:
        repository = filled(storage, steps_in_chunk)
        times = objects_of(repository, "/time")
        others = objects_of(repository, "/point") | objects_of(repository, "/depth")
        assert len(times) == chunks
        dataset = arrow.dataset(repository)
        found = pc.field("time") >= np.datetime64("2020-01-05", "us") if fewer else None

        def fetched(names: set[str]) -> int:
            return sum(key.rpartition("/")[2] in names for _, key in storage.log)

        for scan in range(2):
            storage.forget()
            assert dataset.count_rows(pc.field("v") >= 0) == STEPS * POINTS
            if found is not None:
                assert dataset.count_rows(found) == (STEPS - 96) * POINTS
            table = dataset.to_table()
            assert (
                table["time"].to_pylist()
                == np.repeat(
                    np.datetime64("2020-01-01", "us") + np.arange(STEPS) * np.timedelta64(1, "h"),
                    POINTS,
                ).tolist()
            )
            assert fetched(others) == (2 if scan == 0 else 0)
            if chunks == 1:
                assert fetched(times) == (1 if scan == 0 else 0)
            else:
                assert fetched(times) <= chunks + (30 if steps_in_chunk < 20 else 0)


def test_large_coordinates_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read where a part needs them, as far as it does."""
    monkeypatch.setattr(coordinates, "KEPT_BYTES", 8 * POINTS)
    with counted() as storage:
        repository = filled(storage, STEPS)
        dataset = arrow.dataset(repository)
        expected = dataset.to_table()
        times = objects_of(repository, "/time")
        storage.forget()
        monkeypatch.setattr(rows, "LOAD_BYTES", 1)
        assert dataset.to_table().equals(expected)
        assert sum(key.rpartition("/")[2] in times for _, key in storage.log) == 30


@pytest.mark.parametrize(("kind", "kept"), [("U8", True), ("O", False), ("T", False)])
def test_texts_of_any_length_count_as_more_than_their_references(
    monkeypatch: pytest.MonkeyPatch, kind: str, *, kept: bool
) -> None:
    """An array of objects has eight bytes for each, and the texts lie elsewhere."""
    monkeypatch.setattr(coordinates, "KEPT_BYTES", 100 * 32)
    dtype: Any = np.dtypes.StringDType() if kind == "T" else kind
    variable = xarray.Variable("x", np.array(["some text"] * 100).astype(dtype))
    found = coordinates._Kept(variable)
    assert found[indexing.BasicIndexer((slice(2, 4),))].tolist() == [
        str(it) for it in variable[2:4].to_numpy()
    ]
    assert (found._last is not None) == kept


@st.composite
def spans(draw: st.DrawFn, length: int) -> slice:
    """Return a slice of an axis; xarray itself fails for some with negative steps."""
    start, stop = sorted((draw(st.integers(0, length)), draw(st.integers(0, length))))
    return slice(start, stop, draw(st.sampled_from([None, 1, 2])))


@examples(200)
@given(st.data())
def test_any_part_is_what_it_was(data: st.DataObject) -> None:
    """In any order, with steps and single places; of one or two dimensions, in any chunks."""
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=2)))
    dims = ("x", "y")[: len(shape)]
    values = (
        np.arange(np.prod(shape)).reshape(shape).astype(data.draw(st.sampled_from(["i4", "U3"])))
    )
    chunks: Any = tuple(data.draw(st.integers(1, 5)) for _ in shape)
    if data.draw(st.booleans()):
        chunks = tuple([size] * 3 for size in chunks)
    variable = xarray.Variable(dims, values, {"a": 1}, {"chunks": chunks})
    coords = xarray.Coordinates({"c": variable}, indexes={})
    kept = keep_coordinates(xarray.Dataset(coords=coords)).variables["c"]
    assert (kept.dims, kept.attrs, kept.encoding) == (dims, {"a": 1}, {"chunks": chunks})
    for _ in range(data.draw(st.integers(1, 5))):
        key = tuple(data.draw(st.one_of(st.integers(-it, it - 1), spans(it))) for it in shape)
        np.testing.assert_array_equal(kept[key].to_numpy(), values[key])
