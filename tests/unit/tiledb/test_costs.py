"""Requests that opening and reading arrays takes."""

from __future__ import annotations

import pickle
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async.errors import FormatError, NotFoundError
from icechunk_async.storage import open_storage
from icechunk_async.storage.policies.coalesce import Coalescing
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.tiledb import open_array
from icechunk_async.tiledb.arrays.folder import Folder
from icechunk_async.tiledb.arrays.portable import PortableArray, PortableFragment
from tests.unit.tiledb.archives import ARCHIVES, files_below, filled, golden_jobs

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

NEWEST = ARCHIVES[-1]


@asynccontextmanager
async def counted(files: Mapping[str, bytes]) -> AsyncGenerator[LatencyStorage]:
    """Open files through a storage that counts requests, below a wrapper that joins them."""
    async with open_storage(await filled(files)) as storage:
        yield LatencyStorage(storage, seconds=0)


def _job(archive: str = NEWEST, **wanted: Any) -> dict[str, Any]:
    return next(
        it
        for it in golden_jobs(archive)
        if all(it.get(key, False) == value for key, value in wanted.items())
    )


async def test_opening_takes_four_listings_a_schema_and_a_footer_for_each_fragment() -> None:
    """And nothing else."""
    job = _job(sparse=False)
    async with (
        counted(files_below(NEWEST, job["number"])) as storage,
        open_array(storage, end=job["queries"][0]["end"]) as array,
    ):
        assert storage.requests["list_prefix"] == 4
        assert storage.requests["get"] == 1 + len(array.fragments)
        assert len(set(storage.log)) == 5 + len(array.fragments)


async def test_small_fragment_takes_one_request_for_all_metadata_and_one_for_adjacent_tiles() -> (
    None
):
    """Where requests are joined, as over a network."""
    job = _job(number="features-0")
    async with (
        counted(files_below(NEWEST, job["number"])) as storage,
        open_array(Coalescing(storage), end=job["queries"][0]["end"]) as array,
    ):
        assert len(array.fragments) == 1
        storage.forget()
        found = await array.read(attributes=["a0", "a1"])
        assert set(found) == {"a0", "a1"}
    # Two tiles of each attribute: one joined request a file, none for metadata.
    assert storage.requests == {"get": 2}


def _writes(job: dict[str, Any]) -> int:
    return sum(it["op"] == "write" for it in job["steps"])


async def test_hidden_tiles_are_not_read() -> None:
    """A fragment below a newer one that holds all wanted cells costs nothing."""
    job = next(it for it in golden_jobs(NEWEST) if not it["sparse"] and _writes(it) > 1)
    lows = [it["domain"][0] for it in job["dims"]]
    async with (
        counted(files_below(NEWEST, job["number"])) as storage,
        open_array(storage, end=job["queries"][0]["end"]) as array,
    ):
        held = [
            slice(start + low, start + high)
            for start, (low, high) in zip(lows, array.grid().boxes[-1], strict=True)
        ]
        assert len(array.fragments) > 1
        storage.forget()
        await array.read(held)
        folders = {key.split("/")[1] for _, key in storage.log}
        assert folders == {array.fragments[-1].name.text}


async def test_consolidated_footers_are_read_from_one_file() -> None:
    """Instead of from each fragment."""
    job = next(
        it
        for it in golden_jobs(NEWEST)
        if len(it["steps"]) == 6 and it["steps"][4]["op"] == "consolidate"
    )
    files = files_below(NEWEST, job["number"])
    async with (
        counted(files) as storage,
        open_array(storage, end=job["queries"][0]["end"]) as array,
    ):
        read = [key for operation, key in storage.log if operation == "get"]
        assert sum(it.endswith(".meta") for it in read) == 1
        footers = sum(it.endswith("__fragment_metadata.tdb") for it in read)
        # The fragment that was written after the consolidation is not in that file.
        assert footers == 1 < len(array.fragments)


@pytest.mark.parametrize("number", ["dense-1", "sparse-1"])
async def test_array_from_another_process_is_not_listed_again(number: str) -> None:
    """With all fragments it reads their footers; with some of them, which it is given, nothing."""
    async with counted(files_below(NEWEST, number)) as storage:
        async with open_array(storage) as array:
            seen = pickle.loads(pickle.dumps(await PortableArray.of(array)))
            sent = pickle.loads(pickle.dumps([PortableFragment.of(array, 0)]))
        folder = Folder(storage)
        storage.forget()
        again = await seen.open(folder)
        assert [it.name for it in again.fragments] == [it.name for it in array.fragments]
        assert set(storage.requests) == {"get"}
        assert storage.requests["get"] <= len(array.fragments)
        storage.forget()
        some = await seen.open_with(folder, sent)
        assert [it.name for it in some.fragments] == [array.fragments[0].name]
        assert some.schema == array.schema
        assert not storage.requests


async def test_an_empty_place_is_no_array() -> None:
    """The error says what is there instead."""
    async with open_storage(await filled({"readme": b"x"})) as storage:
        with pytest.raises(NotFoundError, match="no TileDB array"):
            async with open_array(storage):
                pass
    async with open_storage(await filled({"__tiledb_group.tdb": b""})) as storage:
        with pytest.raises(NotFoundError, match="a TileDB group"):
            async with open_array(storage):
                pass


async def test_fragment_without_its_schema_is_an_error_that_names_both() -> None:
    """Nothing is half-read."""
    job = _job(number="features-0")
    files = files_below(NEWEST, job["number"])
    (schema,) = [it for it in files if "__schema/__" in it]
    other = schema[:-1] + ("0" if schema[-1] != "0" else "1")
    async with open_storage(
        await filled({other if it == schema else it: data for it, data in files.items()})
    ) as storage:
        with pytest.raises(FormatError, match="does not exist") as refused:
            async with open_array(storage):
                pass
        assert schema.rpartition("/")[2] in str(refused.value)
        assert "/__fragments/__" in refused.value.__notes__[0]


async def test_lost_file_of_a_fragment_is_an_error_that_names_it() -> None:
    """As after a vacuum during a read."""
    job = _job(number="features-0")
    files = files_below(NEWEST, job["number"])
    lost = {name: data for name, data in files.items() if not name.endswith("/a3.tdb")}
    async with open_array(await filled(lost), end=job["queries"][0]["end"]) as array:
        assert isinstance((await array.read(attributes=["a0"]))["a0"], np.ndarray)
        with pytest.raises(FormatError, match=r"a3\.tdb"):
            await array.read(attributes=["a3"])
    gone = {name: data for name, data in files.items() if "__fragment_metadata" not in name}
    with pytest.raises(FormatError, match="metadata is gone"):
        async with open_array(await filled(gone), end=job["queries"][0]["end"]):
            pass
