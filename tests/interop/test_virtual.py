"""Virtual chunks, compressed locations, rectilinear grids and relabelled chunks across engines."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
import zarr.api.asynchronous as zarr_async
import zstandard

from icechunk_async.errors import (
    InvalidInputError,
    UnsupportedBySpecError,
    VirtualAccessError,
    VirtualContainerError,
    VirtualSourceChangedError,
)
from icechunk_async.format.envelope import HEADER_BYTES
from icechunk_async.format.flatbuffers.buffer import Buffer
from icechunk_async.format.flatbuffers.reading import Tables
from icechunk_async.zarr import VirtualChunkSpec
from tests.interop.answers import Settings
from tests.interop.comparing import ENGINES, other, views_agree
from tests.interop.edits import apply, array, delete_chunk, group, values, write
from tests.interop.files import Files
from tests.interop.hierarchies import SOURCE_BYTES, SOURCE_FILES
from tests.interop.theirs import icechunk, open_official

if TYPE_CHECKING:
    from tests.interop.edits import Sources


pytestmark = pytest.mark.sampled

SPECS = pytest.mark.parametrize("spec", [1, 2])
FIRST = pytest.mark.parametrize("first", list(ENGINES))
COUNT = 64


def spec_class(engine: str) -> Any:
    """Return an engine's class for one virtual chunk of many."""
    return VirtualChunkSpec if engine == "ours" else icechunk.VirtualChunkSpec


@SPECS
@FIRST
async def test_references_set_one_by_one_in_lists_and_in_columns_agree(
    spec: int, first: str, tmp_path: Path, sources: Sources
) -> None:
    """Each way of writing virtual chunks is read by both engines, with every kind of checksum."""
    root = tmp_path / "repo"
    await ENGINES[first].create(root, spec, Settings(source=sources.directory))
    future = datetime.now(UTC) + timedelta(seconds=10)
    urls = [f"{sources.url}{name}" for name in SOURCE_FILES]
    async with ENGINES[first].open(root, sources.directory) as repo:
        work = await repo.work()
        store: Any = work.store
        for name in ("one", "list", "columns", "block"):
            await apply(store, [array(name, [8, 8], [2, 4], "u1", plain=True)])
        store.set_virtual_ref("one/c/0/0", urls[0], offset=0, length=8)
        store.set_virtual_ref("one/c/1/1", urls[1], offset=4088, length=8, checksum=future)
        store.set_virtual_ref("one/c/3/0", urls[0], offset=1, length=8, checksum=None)
        specs = [
            spec_class(first)([row, 1], urls[row % 2], 8 * row, 8, None, future if row else None)
            for row in range(4)
        ]
        store.set_virtual_refs("/list", specs, validate_containers=True)
        names = [urls[at % 2] if at != 5 else "" for at in range(8)]
        offsets = np.arange(8, dtype=np.uint64) * 16
        lengths = np.full(8, 8, np.uint64)
        store.set_virtual_refs_arr("columns", (4, 2), names, offsets, lengths)
        store.set_virtual_refs_arr(
            "block", (2, 1), names[:2], offsets[:2], lengths[:2], arr_offset=(1, 1), checksum=future
        )
        await work.commit("virtual")
    seen = await views_agree(root, spec, source=sources.directory, everything=True)
    (keys,) = (it for it in seen.contents.values() if it)
    data = [(sources.directory / name).read_bytes() for name in SOURCE_FILES]
    assert keys["one/c/1/1"] == data[1][4088:4096]
    assert keys["columns/c/1/0"] == data[0][32:40]
    assert "columns/c/2/1" not in keys
    assert sorted(key for key in keys if key.startswith("block/c")) == [
        "block/c/1/1",
        "block/c/2/1",
    ]
    async with other(first).open(root, sources.directory) as repo:
        work = await repo.work()
        await apply(work.store, [write("one", [0, 0], [2, 4], 1, "u1")])
        other_store: Any = work.store
        other_store.set_virtual_ref("one/c/2/0", urls[1], offset=3, length=8)
        await work.commit("continued")
    await views_agree(root, spec, source=sources.directory, everything=True)


LOCATIONS = {
    "größe x.bin": "{url}größe x.bin",
    "escaped": "{url}gr%C3%B6%C3%9Fe%20x.bin",
    "escaped dot": "{url}p%2ebin",
    "escaped percent": "{url}50%25.bin",
    "lone percent": "{url}50%.bin",
    "parent": "{url}sub/../p.bin",
    "itself": "{url}./p.bin",
    "query": "{url}p.bin?x=1",
    "fragment": "{url}p.bin#part",
    "capitals": "FILE{rest}p.bin",
    "localhost": "file://localhost{path}p.bin",
}


@FIRST
@pytest.mark.parametrize("name", LOCATIONS)
async def test_odd_locations_lead_both_to_the_same_file(
    first: str, name: str, tmp_path: Path
) -> None:
    """Escapes, dots, queries, capitals and hosts mean one file to both, whichever stored them."""
    root, directory = tmp_path / "repo", tmp_path / "source"
    (directory / "sub").mkdir(parents=True)
    for index, file in enumerate(("größe x.bin", "p.bin", "50%.bin")):
        (directory / file).write_bytes(bytes([index]) * 8)
    url = f"file://{directory}/"
    location = LOCATIONS[name].format(url=url, rest=url[4:], path=url[7:])
    await ENGINES[first].create(root, 2, Settings(source=directory))
    async with ENGINES[first].open(root, directory) as repo:
        work = await repo.work()
        store: Any = work.store
        await apply(store, [array("a", [8], [8], "u1", plain=True)])
        store.set_virtual_ref("a/c/0", location, offset=0, length=8)
        tip = await work.commit("odd")
    seen = await views_agree(root, 2, source=directory)
    assert len(set(seen.contents[tip]["a/c/0"])) == 1


@SPECS
@FIRST
async def test_a_changed_source_and_a_closed_container_are_refused_by_both(
    spec: int, first: str, tmp_path: Path, sources: Sources
) -> None:
    """Guarded chunks stop reading when the file is newer; nobody reads without being let in."""
    root = tmp_path / "repo"
    await ENGINES[first].create(root, spec, Settings(source=sources.directory))
    path = sources.directory / SOURCE_FILES[0]
    written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    async with ENGINES[first].open(root, sources.directory) as repo:
        work = await repo.work()
        store: Any = work.store
        await apply(store, [array("a", [16], [8], "u1", plain=True)])
        url = f"{sources.url}{SOURCE_FILES[0]}"
        guard = written + timedelta(seconds=2)
        store.set_virtual_ref("a/c/0", url, offset=0, length=8, checksum=guard)
        store.set_virtual_ref("a/c/1", url, offset=8, length=8)
        with pytest.raises((VirtualContainerError, icechunk.IcechunkError)):
            store.set_virtual_ref("a/c/1", "file:///elsewhere/x", offset=0, length=8)
        elsewhere = f"file://elsewhere{sources.directory}/{SOURCE_FILES[0]}"
        with pytest.raises((InvalidInputError, icechunk.IcechunkError)):
            store.set_virtual_ref("a/c/1", elsewhere, offset=0, length=8)
        tip = await work.commit("guarded")
    await views_agree(root, spec, source=sources.directory)
    os.utime(path, (written.timestamp() + 60, written.timestamp() + 60))
    refusals = {"ours": VirtualSourceChangedError, "theirs": icechunk.IcechunkError}
    for name, engine in ENGINES.items():
        async with engine.open(root, sources.directory) as repo:
            reader = await repo.reading(tip)
            node = await zarr_async.open_array(store=reader, path="a", mode="r")
            assert np.asarray(await node.getitem(slice(8, 16))).tobytes() == path.read_bytes()[8:16]
            with pytest.raises(refusals[name]):
                await node.getitem(slice(0, 8))
    closed = {"ours": VirtualAccessError, "theirs": icechunk.IcechunkError}
    for name, engine in ENGINES.items():
        async with engine.open(root) as repo:
            node = await zarr_async.open_array(store=await repo.reading(tip), path="a", mode="r")
            with pytest.raises(closed[name]):
                await node.getitem(slice(8, 16))


@SPECS
@FIRST
async def test_compressed_locations_cross_over(spec: int, first: str, tmp_path: Path) -> None:
    """Many long locations, compressed in spec 2, are read, rewritten and kept by the other."""
    root, directory = tmp_path / "repo", tmp_path / "a-directory-of-files"
    directory.mkdir()
    paths = [directory / f"observation-{at:05}-größe.bin" for at in range(COUNT)]
    for at, path in enumerate(paths):
        path.write_bytes(bytes([at]) * 8)
    await ENGINES[first].create(root, spec, Settings(source=directory, compress_from=20))
    zeros, eights = np.zeros(COUNT, np.uint64), np.full(COUNT, 8, np.uint64)
    async with ENGINES[first].open(root, directory) as repo:
        work = await repo.work()
        await apply(work.store, [array("a", [8 * COUNT], [8], "u1", plain=True)])
        store: Any = work.store
        names = [f"file://{path}" for path in paths]
        store.set_virtual_refs_arr("a", (COUNT,), names, zeros, eights)
        tips = [await work.commit("referenced")]
    for turn, engine in enumerate((other(first), ENGINES[first])):
        async with engine.open(root, directory) as repo:
            work = await repo.work()
            await apply(work.store, [write("a", [8 * turn], [8 * turn + 8], turn, "u1")])
            tips.append(await work.commit("rewritten"))
    seen = await views_agree(root, spec, source=directory, everything=True)
    for tip in tips:
        assert len(seen.contents[tip]) == COUNT + 2
        assert seen.contents[tip]["a/c/9"] == bytes([9]) * 8
        compressed = [_is_compressed(Files(root), tip) for tip in tips]
    assert compressed == [spec == 2] * 3


@SPECS
@FIRST
async def test_thousands_of_references_cross_over(
    spec: int, first: str, tmp_path: Path, sources: Sources
) -> None:
    """Many references in several manifests are listed, read and partly replaced by the other."""
    root, count = tmp_path / "repo", 9000
    splits = ((("AnyArray", ""), ((None, 4000),)),)
    await ENGINES[first].create(root, spec, Settings(0, splits, sources.directory))
    urls = [f"{sources.url}{name}" for name in SOURCE_FILES]
    async with ENGINES[first].open(root, sources.directory) as repo:
        work = await repo.work()
        store: Any = work.store
        await apply(store, [array("a", [count], [1], "u1", plain=True)])
        names = [urls[at % 2] for at in range(count)]
        offsets = np.arange(count, dtype=np.uint64) % np.uint64(SOURCE_BYTES)
        store.set_virtual_refs_arr("a", (count,), names, offsets, np.ones(count, np.uint64))
        await work.commit("many")
    async with other(first).open(root, sources.directory) as repo:
        work = await repo.work()
        await apply(work.store, [write("a", [3999], [4001], 1, "u1"), delete_chunk("a", 8999)])
        tip = await work.commit("some")
    data = np.frombuffer(b"".join(map(_bytes_of, urls)), "u1").reshape(2, -1)
    expected = data[np.arange(count) % 2, np.arange(count) % SOURCE_BYTES].copy()
    expected[3999:4001], expected[8999] = values("u1", [2], 1), 0
    for engine in ENGINES.values():
        async with engine.open(root, sources.directory) as repo:
            reader = await repo.reading(tip)
            keys = {key async for key in reader.list_prefix("a/")}
            assert keys == {"a/zarr.json", *(f"a/c/{at}" for at in range(count - 1))}
            node = await zarr_async.open_array(store=reader, path="a", mode="r")
            for start in (0, 3900, 8900):
                part = np.asarray(await node.getitem(slice(start, start + 100)))
                assert part.tolist() == expected[start : start + 100].tolist()
    assert len(Files(root).snapshot(tip).manifests) == 3


def _bytes_of(url: str) -> bytes:
    return Path(url.removeprefix("file://")).read_bytes()


def _is_compressed(files: Files, tip: str) -> bool:
    (manifest_id,) = files.snapshot(tip).manifests
    data = (files.root / "manifests" / str(manifest_id)).read_bytes()[HEADER_BYTES:]
    root = Tables.root(Buffer(zstandard.ZstdDecompressor().decompress(data)))
    has_dictionary = bool(root.has(2)[0])
    refs = root.vector(1, 4, 4).tables().vector(1, 4, 4).tables()
    assert bool(refs.has(8).any()) == has_dictionary
    return has_dictionary


@FIRST
async def test_rectilinear_grids_cross_over(first: str, tmp_path: Path) -> None:
    """Chunks of different sizes are read and continued by the other engine; spec 1 refuses."""
    root = tmp_path / "repo"
    with zarr.config.set({"array.rectilinear_chunks": True}):
        for spec in (1, 2):
            await ENGINES[first].create(tmp_path / str(spec), spec)
        data = np.arange(48, dtype="<i4").reshape(6, 8)
        async with ENGINES[first].open(tmp_path / "1") as repo:
            work = await repo.work()
            with pytest.raises((UnsupportedBySpecError, icechunk.IcechunkError)):
                await _rectilinear(work.store)
        root = tmp_path / "2"
        async with ENGINES[first].open(root) as repo:
            work = await repo.work()
            node = await _rectilinear(work.store)
            await node.setitem(Ellipsis, data)
            await work.commit("uneven")
        async with other(first).open(root) as repo:
            work = await repo.work()
            node = await zarr_async.open_array(store=work.store, path="a", mode="r+")
            await node.setitem((slice(0, 3), slice(0, 2)), -data[:3, :2])
            tip = await work.commit("continued")
        seen = await views_agree(root, 2, everything=True)
        data[:3, :2] *= -1
        assert seen.arrays[tip]["a"][3] == data.tobytes()
        keys = sorted(key for key in seen.contents[tip] if "/c/" in key)
        assert keys == [f"a/c/{row}/{column}" for row in range(3) for column in range(2)]
        array_data = Files(root).snapshot(tip).nodes["/a"].array
        assert array_data is not None
        assert array_data.grid == (3, 2)


async def _rectilinear(store: Any) -> Any:
    return await zarr_async.create_array(
        store=store, name="a", shape=(6, 8), chunks=[[1, 2, 3], [5, 3]], dtype="<i4"
    )


@SPECS
async def test_shifted_and_reindexed_chunks_are_read(spec: int, tmp_path: Path) -> None:
    """Chunks that the official engine relabelled are where it put them, and can be changed."""
    root = tmp_path / "repo"
    await ENGINES["ours"].create(root, spec)
    edits = [array("a", [12], [2]), write("a", [0], [12], 1), array("b", [12], [2])]
    async with ENGINES["ours"].open(root) as repo:
        work = await repo.work()
        await apply(work.store, [*edits, write("b", [0], [12], 2), group("g")])
        await work.commit("first")
    session = open_official(root).writable_session("main")
    session.shift_array("/a", (-2,))
    session.reindex_array("/b", lambda index: [5 - index[0]], lambda index: [5 - index[0]])
    tip = session.commit("relabelled")
    seen = await views_agree(root, spec, everything=True)
    parent = seen.ancestries[tip][1].id
    before = np.frombuffer(seen.arrays[parent]["a"][3], "<i4")
    after = np.frombuffer(seen.arrays[tip]["a"][3], "<i4")
    assert after.tolist() == [*before[4:].tolist(), 0, 0, 0, 0]
    async with ENGINES["ours"].open(root) as repo:
        work = await repo.work()
        await apply(work.store, [write("a", [0], [4], 3), write("b", [10], [12], 4)])
        await work.commit("continued")
    await views_agree(root, spec, everything=True)


@SPECS
@FIRST
async def test_a_copied_repository_reads_its_virtual_chunks(
    spec: int, first: str, tmp_path: Path, sources: Sources
) -> None:
    """References are absolute: a repository that was moved elsewhere reads the same."""
    root = tmp_path / "repo"
    await ENGINES[first].create(root, spec, Settings(source=sources.directory))
    async with ENGINES[first].open(root, sources.directory) as repo:
        work = await repo.work()
        store: Any = work.store
        await apply(store, [array("s", [], [], "u1", plain=True)])
        store.set_virtual_ref("s/c", f"{sources.url}{SOURCE_FILES[0]}", offset=77, length=1)
        tip = await work.commit("a scalar")
    shutil.move(root, moved := tmp_path / "moved")
    seen = await views_agree(moved, spec, source=sources.directory)
    expected = (sources.directory / SOURCE_FILES[0]).read_bytes()[77:78]
    assert seen.contents[tip]["s/c"] == expected
