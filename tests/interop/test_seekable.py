"""Seekable manifests in the official engines: read bit for bit, kept, counted and collected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async import Repository
from icechunk_async.engine.files import manifests as manifest_files
from icechunk_async.format.ids import ChunkId
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.locations import Strings
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.manifest.seekable import writing as manifest_seek_write
from icechunk_async.format.manifest.seekable.index import index_size
from icechunk_async.upkeep import upgrade
from tests.helpers import array_document, write
from tests.interop.answers import Settings
from tests.interop.comparing import ENGINES, check_garbage, collect, views_agree
from tests.interop.edits import apply
from tests.interop.edits import write as edit
from tests.interop.ours import url_of
from tests.interop.test_wheel_1 import Wheel1, agree
from tests.interop.theirs import open_official

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from icechunk_async import Session


COUNT = 1500
PER_CHUNK = 1100
DATA = np.random.default_rng(2).integers(1, 256, COUNT * PER_CHUNK, np.uint8).tobytes()
SPECS = pytest.mark.parametrize("spec", [1, 2])


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make manifests of this size seekable, to be quick."""
    monkeypatch.setattr(manifest_seek_write, "MIN_SEEKABLE_BYTES", 1 << 19)
    monkeypatch.setattr(manifest_files, "MIN_SEEKABLE_FILE_BYTES", 1 << 14)


@pytest.fixture(scope="module")
def wheel(python_of_wheel_1: str) -> Iterator[Wheel1]:
    """Return a running wheel 1.x."""
    started = Wheel1(python_of_wheel_1)
    yield started
    started.close()


def references(chunk: ChunkId, location: str) -> ChunkRefs:
    """Return references of all kinds by turns, one to each two bytes of ``DATA``."""
    rows = np.arange(COUNT, dtype=np.uint32)
    kinds = (rows % 3).astype(np.uint8)
    assert set(kinds.tolist()) == {Kind.INLINE, Kind.NATIVE, Kind.VIRTUAL}
    return ChunkRefs.build(
        rows[:, None],
        kinds,
        objects=np.zeros(COUNT, np.uint32),
        offsets=rows.astype(np.uint64) * PER_CHUNK,
        lengths=np.full(COUNT, PER_CHUNK, np.uint64),
        chunk_ids=np.frombuffer(chunk, np.uint8)[None, :],
        locations=Strings((location,)),
        inline=memoryview(DATA),
    )


async def filled(root: Path, spec: int, source: Path) -> None:
    """Make a repository with one seekable manifest of all kinds of references."""
    _write_source(source)
    await ENGINES["ours"].create(root, spec, Settings(None, (), source))
    chunk = ChunkId(bytes(range(12)))
    async with Repository.open(root) as repository:
        await repository.storage.put(f"chunks/{chunk}", DATA)
        session = await repository.writable_session("main")
        await write(session, "a/zarr.json", array_document((len(DATA),), (PER_CHUNK,)))
        session.workspace.set_refs("/a", references(chunk, f"{url_of(source)}data"))
        await session.commit("many")
    assert seekable_files(root) == 1


def _write_source(source: Path) -> None:
    source.mkdir()
    (source / "data").write_bytes(DATA)


def seekable_files(root: Path) -> int:
    """Count the manifests that have an index."""
    files = (root / "manifests").iterdir()
    return sum(index_size(path.read_bytes()) is not None for path in files)


async def ours_at(root: Path, *chunks: int) -> list[Any]:
    """Return a few references, found piece by piece."""
    async with Repository.open(root) as repository:
        session: Session = await repository.readonly_session("main")
        found = [await session.workspace.find_chunk("/a", (chunk,)) for chunk in chunks]
    return [None if it is None else it.ref for it in found]


@SPECS
async def test_the_official_engine_reads_every_reference(tmp_path: Path, spec: int) -> None:
    """The bytes of all chunks, through references of every kind."""
    root, source = tmp_path / "repo", tmp_path / "source"
    await filled(root, spec, source)
    seen = await views_agree(root, spec, source=source)
    [(_, keys)] = seen.contents.items()
    assert b"".join(keys[f"a/c/{row}"] for row in range(COUNT)) == DATA


async def test_wheel_1_reads_every_chunk(wheel: Wheel1, tmp_path: Path) -> None:
    """All keys and values, and all else that it says, as we do."""
    root, source = tmp_path / "repo", tmp_path / "source"
    await filled(root, 1, source)
    seen = await agree(wheel, root, source)
    values = [keys for keys in seen.contents.values() if keys]
    assert b"".join(values[-1][f"a/c/{row}"] for row in range(COUNT)) == DATA
    assert wheel.ask("collect", root=str(root), dry_run=True)["bytes"] == 0


@SPECS
async def test_both_engines_commit_to_seekable_manifests(tmp_path: Path, spec: int) -> None:
    """The official engine rewrites such manifests without an index; we write one, or patch it."""
    root, source = tmp_path / "repo", tmp_path / "source"
    await filled(root, spec, source)
    before = await ours_at(root, 0, 1, 2, COUNT - 1)
    for turn, name in enumerate(("ours", "theirs", "ours", "ours", "theirs")):
        async with ENGINES[name].open(root, source) as repo:
            work = await repo.work()
            start = (100 + turn) * PER_CHUNK
            await apply(work.store, [edit("a", [start], [start + PER_CHUNK], turn, "u1")])
            await work.commit(f"turn {turn}")
        assert seekable_files(root) == (2, 2, 3, 4, 4)[turn]
        assert await ours_at(root, 0, 1, 2, COUNT - 1) == before
    await views_agree(root, spec, source=source)


@SPECS
async def test_such_files_are_kept_counted_and_collected(tmp_path: Path, spec: int) -> None:
    """Nothing that upkeep looks at depends on how a manifest was compressed."""
    root, source = tmp_path / "repo", tmp_path / "source"
    await filled(root, spec, source)
    assert set(check_garbage(root).values()) == {0}
    official = open_official(root, source)
    stats = official.chunk_storage_stats()
    async with Repository.open(root) as repository:
        ours = await repository.chunk_storage_stats()
        await repository.rewrite_manifests("again", branch="main")
    assert (ours.virtual_bytes, ours.inlined_bytes) == (stats.virtual_bytes, stats.inlined_bytes)
    assert ours.native_bytes == len(DATA) // 3  # they count a chunk object once, and one chunk
    assert seekable_files(root) == 2
    official = open_official(root, source)
    tip = official.lookup_branch("main")
    assert official.list_manifest_files(tip)[0].size_bytes in {
        path.stat().st_size for path in (root / "manifests").iterdir()
    }
    official.rewrite_manifests("by them", branch="main")
    assert seekable_files(root) == 2
    await views_agree(root, spec, source=source)
    collect(root, dry_run=False)
    if spec == 1:
        await upgrade(root)
        await views_agree(root, 2, source=source)
