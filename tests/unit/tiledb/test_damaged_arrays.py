"""Arrays with one damaged file are read or raise an error of the library, within bounds.

`test_untrusted` damages what one decoder sees. Here a whole array is opened and read, so that files
which contradict one another are met as well.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import random
import tracemalloc
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async._runtime.weighted_cache import WeightedCache
from icechunk_async.errors import FormatError, NotFoundError
from icechunk_async.storage import open_storage
from icechunk_async.tiledb import open_array
from icechunk_async.tiledb.arrays.folder import Folder
from icechunk_async.tiledb.arrays.fragments import Fragment
from tests.unit.format.damage import damaged, within_bounds
from tests.unit.tiledb.archives import ARCHIVES, files_below, filled, golden_jobs
from tests.unit.tiledb.test_untrusted import packed_again

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from icechunk_async.tiledb import TileDBArray

pytest.importorskip("pyarrow", reason="sparse arrays are read as Arrow, which is not installed")
# Importing takes memory, which is not that of a file.
importlib.import_module("icechunk_async.tiledb.arrays.sparse")

ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "30"))
SEED = os.environ.get("FUZZ_SEED", "1")
pytestmark = pytest.mark.timeout(300 + 5 * ROUNDS)
_MOST_CELLS = 100_000
JOBS = [(archive, job) for archive in ARCHIVES for job in golden_jobs(archive)]


@pytest.fixture(autouse=True)
def _memory_is_traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


async def _read_dense(array: TileDBArray) -> None:
    box = array.grid().domain
    if math.prod(high - low for low, high in box) > _MOST_CELLS:
        # A damaged domain may be of any size. Asking for all of it is up to the user.
        box = tuple((low, min(high, low + 4)) for low, high in box)
    for cells in (await array.read_cells(box)).values():
        cells.to_numpy()


async def _read(files: Mapping[str, bytes], query: Mapping[str, Any]) -> None:
    """Open an array, and read all of it."""
    times = {key: query.get(key) for key in ("start", "end")}
    url = await filled(files)
    async with open_array(url, **times) as array:
        await array.metadata()
        if array.schema.is_sparse:
            await (await array.scan()).to_table()
        else:
            await _read_dense(array)
    async with open_storage(url) as storage:
        await storage.delete(list(files))


def _attempt(loop: asyncio.Runner, files: Mapping[str, bytes], query: Mapping[str, Any]) -> bool:
    """Read an array. Return whether it could be read."""
    try:
        loop.run(_read(files, query))
    except (FormatError, NotFoundError):
        return False
    return True


@pytest.mark.parametrize("path", ["../other", "a/../../other", "", "/", "a//b", "x\0y", "x" * 2000])
def test_path_that_a_file_states_stays_in_its_folder(path: str) -> None:
    """A hostile group or schema cannot lead to the files of others."""
    folder = Folder(None, "data/")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="not a path below 'data'"):
        folder.member(path, is_relative=True)


async def test_lost_file_that_another_names_is_a_format_error() -> None:
    """Here an enumeration, which the schema names."""
    archive = ARCHIVES[-1]
    job = next(it for it in golden_jobs(archive) if "enumerations" in it)
    files = files_below(archive, job["number"])
    left = {name: it for name, it in files.items() if "__enumerations" not in name}
    async with open_array(await filled(left)) as array:
        with pytest.raises(FormatError, match="is gone"):
            await array.enumerations()


async def test_cells_that_only_metadata_claims_take_no_memory() -> None:
    """A tile shows how many it has, before anything is made for each of them."""
    archive = ARCHIVES[-1]
    job = next(it for it in golden_jobs(archive) if it["sparse"])
    many = 1 << 24
    async with open_array(await filled(files_below(archive, job["number"]))) as array:
        known = await array.sparse_reader()
        claiming = [
            Fragment(
                it.name,
                it.folder,
                replace(it.schema, capacity=many),
                replace(it.footer, last_tile_cells=many),
                WeightedCache(1 << 20),
            )
            for it in array.fragments
        ]
        reader = type(known)(array.schema, claiming, array.window, (), known.enumerations)
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        with pytest.raises(FormatError):
            await reader.scan().to_table()
        # Without columns no tile is read, and the count is all that there is.
        alone = type(known)(array.schema, claiming[:1], array.window, (), known.enumerations)
        assert (await alone.scan([]).to_table()).num_rows >= many
        _, peak = tracemalloc.get_traced_memory()
    assert peak - before < many


@pytest.mark.blocks_the_loop
def test_arrays_with_a_damaged_file_read_or_raise_format_errors() -> None:
    """Of every version: a file is changed, cut, lost, or is that of another array."""
    refused = 0
    with asyncio.Runner() as loop:
        archive, job = JOBS[0]
        assert _attempt(loop, files_below(archive, job["number"]), job["queries"][0])
        for turn in range(ROUNDS):
            case = f"{SEED}/{turn}"
            rng = random.Random(case)
            archive, job = rng.choice(JOBS)
            files = files_below(archive, job["number"])
            name = rng.choice(sorted(it for it, data in files.items() if data))
            others = [data for data in files.values() if data]
            way = packed_again if turn % 2 else damaged
            bad = {**files, name: way(rng, files[name], others)}
            if turn % 10 == 9:
                del bad[name]
            size = sum(map(len, bad.values()))
            query = rng.choice(job["queries"])
            try:
                refused += not within_bounds(
                    partial(_attempt, loop, bad, query), size, base_bytes=16 << 20
                )
            except BaseException as error:
                error.add_note(f"case {case!r}, file {name!r}")
                raise
    assert refused > ROUNDS / 10
