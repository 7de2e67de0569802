"""Shifted, reindexed, unevenly chunked and listed arrays: both engines do and say the same."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
import zarr.api.asynchronous as zarr_async
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.storage import MemoryStore

from icechunk_async import Repository
from icechunk_async.engine.tree.listing import ChunkType
from tests.interop.answers import Settings
from tests.interop.comparing import ENGINES, other, views_agree
from tests.interop.edits import Sources, apply, array, contents, delete_chunk, group, resize, write
from tests.interop.hierarchies import SOURCE_FILES
from tests.interop.ours import our_config, url_of
from tests.interop.ours import touched as our_touched
from tests.interop.theirs import icechunk, open_official
from tests.interop.theirs import touched as their_touched

if TYPE_CHECKING:
    from pathlib import Path

    from tests.interop.edits import Edit


pytestmark = pytest.mark.sampled

SPECS = pytest.mark.parametrize("spec", [1, 2])
FIRST = pytest.mark.parametrize("first", list(ENGINES))


async def _committed(name: str, root: Path, case: _Case) -> None:
    await ENGINES[name].create(root, case.spec, Settings(inline=case.inline))
    async with ENGINES[name].open(root) as repo:
        for edits in case.committed:
            work = await repo.work()
            await apply(work.store, edits)
            await work.commit("base", empty=True)


async def _reshaped(
    name: str, root: Path, edits: list[Edit], steps: list[tuple[str, tuple[Any, ...]]]
) -> tuple[Any, dict[str, bytes]]:
    """Edit, reshape and commit; answer the status before the commit and what was committed."""
    async with ENGINES[name].open(root) as repo:
        work = await repo.work()
        await apply(work.store, edits)
        session: Any = work.session  # type: ignore[attr-defined]
        for call, args in steps:
            answer = getattr(session, call)("/a", *args)
            if name == "ours":
                await answer
        status = (our_touched if name == "ours" else their_touched)(session.status())
        tip = await work.commit("reshaped", empty=True)
        return status, await contents(await repo.reading(tip))


@dataclass
class _Case:
    """An array of one or two axes, edits of it, and ways of moving its chunks.

    Deletions are committed before: those of the same session count as chunks for the official
    engine when it reindexes, against its documentation.
    """

    spec: int
    inline: int
    committed: list[list[Edit]]
    edits: list[Edit]
    grid: list[int]
    steps: list[tuple[str, list[int]]]


@st.composite
def _cases(draw: st.DrawFn) -> _Case:
    rank = draw(st.integers(1, 2))
    chunks = draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
    shape = [size * 5 for size in chunks]

    def region(seed: int) -> Edit:
        corners = [sorted([draw(st.integers(0, it)), draw(st.integers(0, it))]) for it in shape]
        return write("a", [it[0] for it in corners], [it[1] for it in corners], seed)

    committed = [[array("a", shape, chunks), region(1)], []]
    if draw(st.booleans()):
        committed[1].append(delete_chunk("a", *(draw(st.integers(0, 4)) for _ in shape)))
    if draw(st.booleans()):
        shape = [max(1, length - draw(st.integers(0, 3))) for length in shape]
        committed[1].append(resize("a", *shape))
    offsets = st.lists(st.integers(-4, 4), min_size=rank, max_size=rank)
    kinds = st.sampled_from(["shift", "cyclic", "mirror", "some"])
    return _Case(
        draw(st.integers(1, 2)),
        draw(st.sampled_from([0, 512])),
        committed,
        [region(2)] if draw(st.booleans()) else [],
        [-(-length // size) for length, size in zip(shape, chunks, strict=True)],
        [(draw(kinds), draw(offsets))],
    )


def _step(kind: str, offset: list[int], grid: list[int]) -> tuple[str, tuple[Any, ...]]:
    def inside(at: list[int]) -> list[int] | None:
        return at if all(0 <= it < size for it, size in zip(at, grid, strict=True)) else None

    def moved(at: Any, sign: int) -> list[int]:
        return [it + sign * step for it, step in zip(at, offset, strict=True)]

    match kind:
        case "shift":
            return "shift_array", (tuple(offset),)
        case "cyclic":

            def turn(at: Any, sign: int) -> list[int]:
                return [it % size for it, size in zip(moved(at, sign), grid, strict=True)]

            return "reindex_array", (lambda at: turn(at, 1), lambda at: turn(at, -1))
        case "mirror":

            def mirror(at: Any) -> list[int]:
                return [size - 1 - it for it, size in zip(at, grid, strict=True)]

            return "reindex_array", (mirror,)
        case _:
            return "reindex_array", (
                lambda at: inside(moved(at, 1)),
                lambda at: inside(moved(at, -1)) if sum(at) % 3 else None,
            )


@given(case=_cases())
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_chunks_move_to_where_the_official_engine_moves_them(
    case: _Case, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Committed and uncommitted ones, of arrays with gaps and of resized ones."""
    base = tmp_path_factory.mktemp("reshape")
    steps = [_step(kind, offset, case.grid) for kind, offset in case.steps]
    found = []
    for name in ENGINES:
        await _committed(name, base / name, case)
        found.append(await _reshaped(name, base / name, case.edits, steps))
        await views_agree(base / name, case.spec)
    assert found[0] == found[1]


@FIRST
async def test_uneven_chunks_are_resized_by_both(first: str, tmp_path: Path) -> None:
    """After each step of either engine the contents equal those of Zarr's memory store."""
    root = tmp_path / "repo"
    oracle = MemoryStore()
    await ENGINES[first].create(root, 2)
    shapes = [(10, 12), (7, 12), (4, 5), (4, 12), (15, 14)]
    with zarr.config.set({"array.rectilinear_chunks": True}):
        for number, shape in enumerate(shapes):
            engine = ENGINES[first] if number % 2 == 0 else other(first)
            async with engine.open(root) as repo:
                work = await repo.work()
                for store in (work.store, oracle):
                    if number == 0:
                        node = await zarr_async.create_array(
                            store=store,
                            name="a",
                            shape=shape,
                            chunks=[[2, 3, 5], [4, 4, 3, 1]],
                            dtype="<i4",
                        )
                    else:
                        node = await zarr_async.open_array(store=store, path="a", mode="r+")
                        await node.resize(shape)
                    data = np.arange(np.prod(shape), dtype="<i4").reshape(shape) + number
                    await node.setitem(slice(number, None), data[number:])
                tip = await work.commit(f"shape {shape}")
            await views_agree(root, 2, expected={tip: await contents(oracle)})
        nodes = open_official(root).inspect_snapshot(tip)["nodes"]
        (counts,) = [
            [it["num_chunks"] for it in node["shape"]] for node in nodes if "shape" in node
        ]
        assert counts == [4, 5]


async def test_an_axis_of_one_size_is_read_by_the_official_engine(tmp_path: Path) -> None:
    """It refuses to store such a document itself, and reads and fills the array all the same."""
    root = tmp_path / "repo"
    await ENGINES["ours"].create(root, 2)
    with zarr.config.set({"array.rectilinear_chunks": True}):
        async with ENGINES["ours"].open(root) as repo:
            work = await repo.work()
            uneven: Any = [[2, 3, 5], 4]
            node = await zarr_async.create_array(
                store=work.store, name="a", shape=(10, 6), chunks=uneven, dtype="<i4"
            )
            await node.setitem(slice(0, 5), 7)
            await work.commit("ours")
        async with ENGINES["theirs"].open(root) as repo:
            work = await repo.work()
            node = await zarr_async.open_array(store=work.store, path="a", mode="r+")
            with pytest.raises(icechunk.IcechunkError):
                await node.update_attributes({"n": 1})
            await node.setitem(slice(5, 10), 8)
            tip = await work.commit("theirs")
        seen = await views_agree(root, 2, everything=True)
        values = np.frombuffer(seen.arrays[tip]["a"][3], "<i4").reshape(10, 6)
        assert (values[:5] == 7).all()
        assert (values[5:] == 8).all()


LISTING = """
import asyncio, json, os, sys
import icechunk
root, prefix, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
access = {prefix: icechunk.credentials.LocalFileSystemAccess}
storage = icechunk.local_filesystem_storage(root)
repository = icechunk.Repository.open(storage, authorize_virtual_chunk_access=access)

async def main():
    session = repository.readonly_session("main")
    rows, places = [], []
    async for coords, kinds, paths, offsets, lengths, inlined in (
        session.store.array_chunk_iterator("a", size)
    ):
        assert len(coords) <= size
        for row in range(len(coords)):
            data = inlined.get(row)
            rows.append([coords[row].tolist(), int(kinds[row]), paths[row], int(offsets[row]),
                         int(lengths[row]), None if data is None else data.hex()])
    async for at in session.chunk_coordinates("/a", size):
        places.append(list(at))
    kinds = [str(session.chunk_type("/a", [at])) for at in range(26)]
    print(json.dumps([rows, places, kinds]))
    sys.stdout.flush()
    os._exit(0)  # the wheel may crash on the way out

asyncio.run(main())
"""


def _official_listing(root: Path, prefix: str, size: int) -> Any:
    command = [sys.executable, "-c", LISTING, str(root), prefix, str(size)]
    done = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@SPECS
@pytest.mark.parametrize("size", [1, 4, 1000])
async def test_both_list_the_same_chunks(
    spec: int, size: int, tmp_path: Path, sources: Sources
) -> None:
    """Inline, native and virtual ones, with the same ids, URLs, offsets, lengths and bytes."""
    root = tmp_path / "repo"
    directory = sources.directory
    splits = ((("AnyArray", ""), ((None, 7),)),)
    wanted = Settings(inline=20, splits=splits, source=directory)
    await ENGINES["ours"].create(root, spec, wanted)
    async with ENGINES["ours"].open(root, directory) as repo:
        work = await repo.work()
        store: Any = work.store
        edits = [
            group(""),
            array("a", [96], [4], "<f8", plain=True),
            write("a", [0], [40], 1, "<f8"),
        ]
        await apply(store, edits)
        for at in (11, 12, 20):
            url = f"{sources.url}{SOURCE_FILES[at % 2]}"
            store.set_virtual_ref(f"a/c/{at}", url, offset=at, length=32)
        await work.commit("first")
        work = await repo.work()
        await apply(work.store, [delete_chunk("a", 3)])
        for at in (5, 23):
            await work.store.set(f"a/c/{at}", zarr.core.buffer.cpu.Buffer.from_bytes(b"few bytes"))
        await work.commit("second")
    prefix = url_of(directory)
    theirs = await asyncio.to_thread(_official_listing, root, prefix, size)
    access = {prefix: None}
    async with Repository.open(
        root, config=our_config(wanted), authorize_virtual_chunk_access=access
    ) as repository:
        session = await repository.readonly_session("main")
        rows: list[list[Any]] = []
        async for batch in session.array_chunk_iterator("a", size):
            columns = (batch.coords, batch.kinds, batch.paths, batch.offsets, batch.lengths)
            found = zip(*(column.tolist() for column in columns), strict=True)
            inlined = {row: bytes(data).hex() for row, data in batch.inlined.items()}
            rows += [[*row, inlined.get(number)] for number, row in enumerate(found)]
        assert sorted(rows) == sorted(theirs[0])
        places = [
            row async for part in session.chunk_coordinates("/a", size) for row in part.tolist()
        ]
        assert sorted(places) == sorted(theirs[1])
        kinds = [await session.chunk_type("/a", (at,)) for at in range(26)]
        assert [f"ChunkType.{kind.name.lower()}" for kind in kinds] == theirs[2]
        assert set(kinds) == set(ChunkType)
