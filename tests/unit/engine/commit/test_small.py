"""Small arrays are merged together: quicker, and otherwise as one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async import Repository
from icechunk_async.config import RepositoryConfig, S3Store, VirtualChunkContainer
from icechunk_async.engine.commit import flush, small
from icechunk_async.errors import FormatError
from icechunk_async.storage import open_storage
from tests.helpers import counted_calls, make_array, memory_url, read, write
from tests.unit.engine.commit.test_shared import planted, split, tip

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async import Session
    from icechunk_async.format.ids import ManifestId
    from icechunk_async.format.manifest.reading import Manifest

BUCKET = "s3://bucket/"
LARGE = b"x" * 600


async def changed(repository: Repository, arrays: int, chunk: int) -> int:
    """Change a chunk in each of some arrays; return the Python functions called by the commit."""
    session = await repository.writable_session("main")
    for number in range(arrays):
        await write(session, f"a{number:04}/c/{chunk}", b"y")
    with counted_calls() as calls:
        await session.commit("changed")
    return len(calls)


async def test_a_commit_calls_little_for_each_array() -> None:
    """Of new arrays, and of those that change again."""

    async def calls(arrays: int) -> tuple[int, int, int]:
        url = memory_url()
        async with Repository.create(url) as repository:
            session = await repository.writable_session("main")
            for number in range(arrays):
                await make_array(session, f"a{number:04}", (100,), (1,))
                for chunk in range(20):
                    await write(session, f"a{number:04}/c/{chunk}", b"x")
            with counted_calls() as new:
                await session.commit("new")
        async with Repository.open(url) as repository:
            first = await changed(repository, arrays, 1)
            return len(new), first, await changed(repository, arrays, 2)

    few, many = await calls(20), await calls(120)
    found = [(b - a) / 100 for a, b in zip(few, many, strict=True)]
    assert found[0] < 130  # one by one 350, and 480 of those that change
    assert max(found) < 153


async def mixed(session: Session, turn: int) -> None:
    """Change arrays of several ranks, kinds of chunks and sizes; some chunks are deleted."""
    store = session.store
    for number in range(12):
        name = f"{number % 3}d-{number}"
        shape = ((), (8,), (8, 9))[number % 3]
        await make_array(session, name, shape, (1,) * len(shape))
        keys = (["c"], ["c/3", "c/1", "c/7"], ["c/7/0", "c/1/8", "c/1/2"])[number % 3]
        for at, key in enumerate(keys):
            if (number + at + turn) % 4 == 3:
                await store.delete(f"{name}/{key}")
            elif turn == 0 or at % 2:
                await write(session, f"{name}/{key}", (b"%d" % turn, LARGE)[(number + at) % 2])
    for name, length in (("shrinks", 9 - turn), ("grows", 9 + turn), ("long", 200)):
        await make_array(session, name, (length,), (1,))
        for chunk in range(turn, length, 1 + turn):
            await write(session, f"{name}/c/{chunk}", b"%d" % turn)
    await make_array(session, "virtual", (9,), (1,))
    store.set_virtual_ref(f"virtual/c/{turn}", f"{BUCKET}a", offset=turn, length=1)
    await make_array(session, f"empty-{turn}", (9,), (1,))
    await write(session, f"empty-{turn}/c/0", b"x")
    await store.delete(f"empty-{turn}/c/0")


async def references(repository: Repository) -> dict[str, Any]:
    """Return the references of all arrays, and the bytes of their chunks; no ids."""
    session = await repository.readonly_session("main")
    found: dict[str, Any] = {}
    for path, node in session.workspace.base.nodes.items():
        if node.array is not None:
            refs = await session.workspace.all_refs(path)
            columns = (refs.coords, refs.kinds, refs.lengths)
            found[path] = [it.tolist() for it in columns]
    async for key in session.store.list():
        if "/c" in key and "virtual" not in key:
            found[key] = await read(session, key)
    return found


@pytest.mark.parametrize("spec", [1, 2])
async def test_arrays_of_all_kinds_are_as_if_merged_one_by_one(
    spec: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several commits one after the other, which find the manifests of those before."""
    config = RepositoryConfig(virtual_chunk_containers=(VirtualChunkContainer(BUCKET, S3Store()),))
    found = []
    for fewest, together in ((1 << 20, 512), (1, 3), (1, 512)):
        monkeypatch.setattr(flush, "_FEWEST_SMALL", fewest)
        monkeypatch.setattr(flush, "_SMALL_TOGETHER", together)
        async with Repository.create(memory_url(), config=config, spec_version=spec) as repository:
            for turn in range(4):
                session = await repository.writable_session("main")
                await mixed(session, turn)
                await session.commit("mixed")
            snapshot = await tip(repository)
            extents = {
                path: [ref.extents for ref in node.array.manifests]
                for path, node in snapshot.nodes.items()
                if node.array is not None
            }
            counts = sorted(it.num_chunk_refs for it in snapshot.manifests.values())
            found.append((await references(repository), extents, counts))
    assert found[0] == found[1] == found[2]


async def test_what_is_kept_of_an_array_is_not_more_than_its_manifest() -> None:
    """The columns of all arrays of the commit would stay in memory with the last of them."""
    async with Repository.create(memory_url()) as repository:
        await planted(repository, 130, 3)
        await changed(repository, 130, 1)
        held = repository.engine.assets.manifests._cache._entries.values()
        kept: list[Manifest] = [it.columns for it, _ in held if it.columns is not None]
        assert {64, 2} <= {len(it.arrays) for it in kept}
        for manifest in kept:
            for refs in manifest.arrays.values():
                base = refs.coords if refs.coords.base is None else refs.coords.base
                assert isinstance(base, np.ndarray)
                assert base.size <= len(manifest)


async def test_a_damaged_manifest_stops_the_commit_of_its_arrays() -> None:
    """Nothing is published, and nothing of the changes is lost."""
    async with open_storage(memory_url()) as storage:
        async with Repository.create(storage) as repository:
            await planted(repository, 6, 2)
            (old,) = (await tip(repository)).manifests
        await storage.put(f"manifests/{old}", b"damaged")
        async with Repository.open(storage) as repository:
            before = await tip(repository)
            session = await repository.writable_session("main")
            for number in range(6):
                await write(session, f"a{number:04}/c/0", b"y")
            with pytest.raises(FormatError):
                await session.commit("changed")
            assert (await tip(repository)).id == before.id
            assert session.has_uncommitted_changes


async def test_arrays_of_one_cell_are_merged_together_whatever_the_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of several cells are not."""
    one_by_one: list[str] = []
    write_one = flush.Flusher._write

    async def noted(self: flush.Flusher, node: Any, *args: Any, **options: Any) -> Any:
        one_by_one.append(node.path)
        return await write_one(self, node, *args, **options)

    monkeypatch.setattr(flush.Flusher, "_write", noted)
    config: RepositoryConfig = split(5)
    async with Repository.create(memory_url(), config=config) as repository:
        session = await repository.writable_session("main")
        for number in range(8):
            await make_array(session, f"a{number}", (5 + number % 2,), (1,))
            await write(session, f"a{number}/c/4", b"x")
        await session.commit("new")
    assert one_by_one == ["/a1", "/a3", "/a5", "/a7"]


async def test_arrays_of_large_manifests_are_merged_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the manifests of many would be in memory together."""
    together: list[int] = []
    merge = small.merged

    def noted(arrays: tuple[small.Small, ...], manifests: Mapping[ManifestId, Manifest]) -> Any:
        together.append(len(arrays))
        return merge(arrays, manifests)

    monkeypatch.setattr(small, "merged", noted)
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        for number in range(8):
            await make_array(session, f"a{number:04}", (100,), (1,))
            await write(session, f"a{number:04}/c/0", b"x")
        await session.commit("new")
        await changed(repository, 8, 1)
        monkeypatch.setattr(small, "_MOST_BYTES", 10)
        await changed(repository, 8, 2)
        assert together == [8, 8]
        session = await repository.readonly_session("main")
        found = [await read(session, f"a{it:04}/c/{chunk}") for it in range(8) for chunk in (1, 2)]
        assert found == [b"y"] * 16
