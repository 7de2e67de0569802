"""The chunks of an array: single ones by kind, and all of them in columns."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.engine.tree import listing as chunk_listing
from icechunk_async.engine.tree.listing import ChunkType
from icechunk_async.errors import InvalidInputError, NodeNotFoundError, VirtualContainerError
from icechunk_async.format.config import (
    HttpStore,
    ManifestConfig,
    ManifestPreloadConfig,
    ManifestSplitCondition,
    ManifestSplitDimCondition,
    ManifestSplittingConfig,
    VirtualChunkContainer,
)
from icechunk_async.format.manifest.chunk import NativeChunk
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import array_document, group_document, make_array, memory_url, read, write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from icechunk_async import Session

LARGE = b"x" * 1000
"""Too long to be stored inline."""
_ANY = (ManifestSplitCondition.AnyArray(), ((ManifestSplitDimCondition.Any(), 3),))
CONFIG = RepositoryConfig(
    virtual_chunk_containers=(
        VirtualChunkContainer("https://example.org/data/", HttpStore(), name="here"),
    ),
    manifest=ManifestConfig(
        splitting=ManifestSplittingConfig((_ANY,)), preload=ManifestPreloadConfig(max_total_refs=0)
    ),
)


@pytest.fixture(params=[1, 2], ids=["spec1", "spec2"])
async def repository(request: pytest.FixtureRequest) -> AsyncIterator[Repository]:
    """An array ``a`` of 10 chunks, with a manifest for each three: every kind of chunk."""
    async with Repository.create(
        memory_url(), spec_version=request.param, config=CONFIG
    ) as repository:
        session = await repository.writable_session("main")
        await write(session, "zarr.json", group_document())
        await make_array(session, "a", (10,), (1,))
        for at in (0, 1, 8):
            await write(session, f"a/c/{at}", b"abc"[: at + 1])
        for at in (2, 4):
            await write(session, f"a/c/{at}", LARGE)
        for at, location in ((5, "https://example.org/data/f"), (9, "vcc://here/g/h")):
            session.store.set_virtual_ref(f"a/c/{at}", location, offset=at, length=7)
        await session.commit("filled")
        yield repository


@pytest.fixture
async def session(repository: Repository) -> Session:
    """Return a session that wrote 3 and 4, and deleted 1."""
    begun = await repository.writable_session("main")
    await write(begun, "a/c/3", LARGE)
    await write(begun, "a/c/4", b"new")
    await begun.store.delete("a/c/1")
    return begun


async def _columns(session: Session, batch_size: int) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    async for batch in session.array_chunk_iterator("/a", batch_size):
        assert 1 <= len(batch) <= batch_size
        inlined = batch.inlined
        for row in range(len(batch)):
            data = inlined.get(row)
            rows.append(
                (
                    int(batch.coords[row, 0]),
                    ChunkType(int(batch.kinds[row])).name,
                    str(batch.paths[row]),
                    int(batch.offsets[row]),
                    int(batch.lengths[row]),
                    None if data is None else bytes(data),
                )
            )
    return rows


async def _native(session: Session, at: int) -> str:
    handle = await session.workspace.find_chunk("/a", (at,))
    assert handle is not None
    assert isinstance(handle.ref, NativeChunk)
    return str(handle.ref.chunk_id)


@pytest.mark.parametrize("batch_size", [1, 2, 100])
async def test_columns_describe_each_chunk(session: Session, batch_size: int) -> None:
    """Manifest by manifest, then what the session wrote; nothing twice, nothing deleted."""
    wanted = [
        (0, "INLINE", "", 0, 1, b"a"),
        (2, "NATIVE", await _native(session, 2), 0, 1000, None),
        (5, "VIRTUAL", "https://example.org/data/f", 5, 7, None),
        (8, "INLINE", "", 0, 3, b"abc"),
        (9, "VIRTUAL", "https://example.org/data/g/h", 9, 7, None),
        (3, "NATIVE", await _native(session, 3), 0, 1000, None),
        (4, "INLINE", "", 0, 3, b"new"),
    ]
    assert await _columns(session, batch_size) == wanted
    coords = [rows async for rows in session.chunk_coordinates("a", batch_size=batch_size)]
    assert {rows.dtype for rows in coords} == {np.dtype(np.uint32)}
    assert np.concatenate(coords)[:, 0].tolist() == [row[0] for row in wanted]
    assert max(map(len, coords)) <= batch_size
    await session.commit("more")
    assert await _columns(session, batch_size) == sorted(wanted)


@pytest.mark.parametrize("min_run", [0, 1000])
async def test_a_list_of_paths_holds_each_location_once(
    session: Session, monkeypatch: pytest.MonkeyPatch, min_run: int
) -> None:
    """A million references to a thousand files are a thousand strings."""
    monkeypatch.setattr(chunk_listing, "_MIN_RUN", min_run)
    for at in (5, 6, 7):
        location = "https://example.org/data/f"
        session.store.set_virtual_ref(f"a/c/{at}", location, offset=at, length=7)
    found: list[str] = []
    async for batch in session.array_chunk_iterator("a", 100):
        texts = batch.path_list()
        assert texts == batch.paths.tolist()
        found += texts
    equal = [text for text in found if text == "https://example.org/data/f"]
    assert len(equal) == 3
    assert len({id(text) for text in equal}) == 1


async def test_a_table_of_paths_holds_each_once(session: Session) -> None:
    """With an index for each chunk, for chunks of every kind."""
    for at in (5, 6, 7):
        session.store.set_virtual_ref(f"a/c/{at}", "https://example.org/data/f", offset=1, length=7)
    async for batch in session.array_chunk_iterator("a", 100):
        paths, codes = batch.path_table()
        assert [paths[code] for code in codes.tolist()] == batch.paths.tolist()
        assert len(set(paths)) == len(paths)


async def test_changing_a_batch_changes_nothing_else(session: Session) -> None:
    """Its columns belong to the caller; later reads do not see changes."""
    before = await _columns(session, 100)
    async for batch in session.array_chunk_iterator("a", 100):
        for column in (batch.coords, batch.kinds, batch.offsets, batch.lengths):
            column[:] = 77
    async for coords in session.chunk_coordinates("a"):
        coords[:] = 77
    assert await _columns(session, 100) == before


async def test_single_chunks_have_the_same_kinds(session: Session) -> None:
    """Chunks that do not exist, or are outside of the grid, are uninitialized."""
    listed = {row[0]: row[1] for row in await _columns(session, 100)}
    for at in range(10):
        kind = await session.chunk_type("/a", (at,))
        assert kind.name == listed.get(at, "UNINITIALIZED")
    for coords in ((10,), (-1,), (0, 0), ()):
        assert await session.chunk_type("a", coords) is ChunkType.UNINITIALIZED
    for path in ("/", "/b"):
        with pytest.raises(NodeNotFoundError):
            await session.chunk_type(path, (0,))
        for iterator in (session.chunk_coordinates, session.array_chunk_iterator):
            with pytest.raises(NodeNotFoundError):
                iterator(path)
            with pytest.raises(InvalidInputError):
                iterator("/a", batch_size=0)


async def test_changes_after_the_call_do_not_count(session: Session) -> None:
    """The list is of one moment, even if other tasks write meanwhile."""
    wanted = await _columns(session, 100)
    found: list[int] = []
    async for batch in session.array_chunk_iterator("/a", 1):
        found += batch.coords[:, 0].tolist()
        await write(session, f"a/c/{9 - found[-1]}", b"late")
        await write(session, "a/zarr.json", array_document((5,), (1,)))
        await write(session, "a/zarr.json", array_document((10,), (1,)))
    assert found == [row[0] for row in wanted]


async def test_an_array_without_axes_has_one_chunk(repository: Repository) -> None:
    """Its coordinates are rows of no numbers."""
    session = await repository.writable_session("main")
    await make_array(session, "s", (), ())
    assert [rows.shape async for rows in session.chunk_coordinates("/s")] == []
    await write(session, "s/c", b"1")
    assert [rows.shape async for rows in session.chunk_coordinates("/s")] == [(1, 0)]
    await session.commit("scalar")
    assert await session.chunk_type("/s", ()) is ChunkType.INLINE
    session = await repository.writable_session("main")
    await write(session, "s/c", b"2")
    assert [rows.shape async for rows in session.chunk_coordinates("/s")] == [(1, 0)]


async def test_missing_container_is_named_in_the_error(repository: Repository) -> None:
    """The error is raised only when the URLs are read."""
    session = await repository.writable_session("main")
    session.store.set_virtual_ref(
        "a/c/0", "vcc://gone/x", offset=0, length=1, validate_container=False
    )
    async for batch in session.array_chunk_iterator("/a"):
        if batch.coords[0, 0] == 0:
            with pytest.raises(VirtualContainerError, match="vcc://gone/x"):
                _ = batch.paths


async def test_a_moved_array_is_listed_where_it_is(repository: Repository) -> None:
    """Its manifests are still those of its old place."""
    if repository.spec_version == 1:
        session = await repository.readonly_session("main")
        path = "/a"
    else:
        session = await repository.rearrange_session("main")
        await session.move("/a", "/b")
        path = "/b"
    found = [rows[:, 0].tolist() async for rows in session.chunk_coordinates(path)]
    assert found == [[0, 1, 2], [4, 5], [8], [9]]


async def test_manifests_are_fetched_when_their_turn_comes() -> None:
    """An iteration that is left early costs what was looked at, and leaves no task behind."""
    url = memory_url()
    async with Repository.create(url, config=CONFIG) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (30,), (1,))
        for at in range(30):
            await write(session, f"a/c/{at}", b"1")
        await session.commit("filled")
    async with open_storage(url) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.open(storage) as repository:
            session = await repository.readonly_session("main")
            batches = session.array_chunk_iterator("/a", batch_size=2)
            for wanted in ([0, 1], [2], [3, 4]):
                assert (await anext(batches)).coords[:, 0].tolist() == wanted
            await batches.aclose()
            assert sum(key.startswith("manifests/") for _, key in storage.log) == 2
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert await read(session, "a/c/29") == b"1"


SCRIPT = """
import asyncio, sys
from icechunk_async import Repository

async def main(way):
    async with Repository.open(sys.argv[1]) as repository:
        session = await repository.readonly_session("main")
        held.append(session.array_chunk_iterator("/a", batch_size=2))
        held.append(session.chunk_coordinates("/a", batch_size=2))
        for iterator in held:
            await anext(iterator)
        if way == "raise":
            sys.exit(0)

held = []
if sys.argv[2] == "runner":
    runner = asyncio.Runner()
    runner.run(main("runner"))
else:
    asyncio.run(main(sys.argv[2]))
print("end")
"""


def _run(root: str, way: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "always::RuntimeWarning", "-c", SCRIPT, root, way]
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", timeout=240, check=False
    )


@pytest.mark.parametrize("way", ["run", "raise", "runner"])
async def test_a_process_ends_cleanly_with_an_iteration_half_way(tmp_path: Path, way: str) -> None:
    """Whether its loop was closed or not: no crash, no complaint, and at once."""
    root = tmp_path / "repo"
    async with Repository.create(root, config=CONFIG) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (9,), (1,))
        for at in range(9):
            await write(session, f"a/c/{at}", b"1")
        await session.commit("filled")
    for _ in range(2):
        done = await asyncio.to_thread(_run, str(root), way)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == ("" if way == "raise" else "end\n")
