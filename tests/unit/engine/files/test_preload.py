"""Manifests that are there before anybody asks for them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.engine.files.preload import choose
from icechunk_async.errors import FormatError, StorageUnavailableError
from icechunk_async.format.config import (
    CachingConfig,
    ManifestConfig,
    ManifestPreloadCondition,
    ManifestPreloadConfig,
    ManifestSplitCondition,
    ManifestSplitDimCondition,
    ManifestSplittingConfig,
    fields,
)
from icechunk_async.format.ids import ManifestId, NodeId, SnapshotId
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.snapshot import (
    ArrayData,
    Dimension,
    ManifestFileInfo,
    ManifestRef,
    Node,
    Nodes,
    Snapshot,
)
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import (
    counted_calls,
    group_document,
    make_array,
    memory_url,
    objects,
    read,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

EVERYTHING = ManifestPreloadConfig(preload_if=ManifestPreloadCondition.true())
NOTHING = ManifestPreloadConfig(preload_if=ManifestPreloadCondition.false())
_ANY = (ManifestSplitCondition.AnyArray(), ((ManifestSplitDimCondition.Any(), 1),))
ONE_EACH = ManifestSplittingConfig((_ANY,))
"""A manifest for every chunk."""


def _config(preload: ManifestPreloadConfig | None) -> RepositoryConfig:
    return RepositoryConfig(manifest=ManifestConfig(preload=preload, splitting=ONE_EACH))


async def _prepared(url: str, preload: ManifestPreloadConfig | None = NOTHING) -> None:
    """Make ``big`` of 6 chunks and ``time`` of 2; they share no manifest."""
    async with Repository.create(url, config=_config(preload)) as repository:
        for path, count in (("big", 6), ("time", 2)):
            session = await repository.writable_session("main")
            await write(session, "zarr.json", group_document())
            await make_array(session, path, (count,), (1,))
            for at in range(count):
                await write(session, f"{path}/c/{at}", bytes([at]))
            await session.commit("filled")


def run[T](work: Coroutine[Any, Any, T]) -> T:
    """Run on a loop whose clock jumps, so that seconds count requests in a row."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


def _manifests(storage: LatencyStorage) -> int:
    return sum(key.startswith("manifests/") for _, key in storage.log)


@pytest.mark.parametrize(
    ("preload", "fetched"),
    [
        (EVERYTHING, 8),
        (NOTHING, 0),
        (None, 2),  # by default coordinates
        (ManifestPreloadConfig(max_total_refs=3, preload_if=EVERYTHING.preload_if), 3),
        (ManifestPreloadConfig(max_arrays_to_scan=1, preload_if=EVERYTHING.preload_if), 6),
    ],
)
@pytest.mark.parametrize("kind", ["readonly", "writable", "rearrange"])
def test_the_first_read_needs_no_request_where_manifests_were_preloaded(
    kind: str, preload: ManifestPreloadConfig | None, fetched: int
) -> None:
    """Beginning the session waits for none of them; there are as many as the limits allow."""

    async def scenario() -> tuple[int, float, int, int]:
        url = memory_url()
        await _prepared(url)
        async with open_storage(url) as plain:
            storage = LatencyStorage(plain, seconds=1)
            config = _config(preload or ManifestPreloadConfig())
            async with Repository.open(storage, config=config) as repository:
                begin = asyncio.get_running_loop().time()
                session = await getattr(repository, f"{kind}_session")("main")
                waited = asyncio.get_running_loop().time() - begin
                at_once = _manifests(storage)
                await asyncio.sleep(100)
                later = _manifests(storage)
                storage.forget()
                for path, count in (("big", 6), ("time", 2)):
                    for at in range(count):
                        assert await read(session, f"{path}/c/{at}") == bytes([at])
                return at_once, waited, later, _manifests(storage)

    at_once, waited, later, needed = run(scenario())
    assert at_once == 0
    assert waited <= 2  # the branch and the snapshot
    assert later == fetched
    assert needed == 8 - fetched


@pytest.mark.parametrize(("cached_refs", "fetched"), [(100, 0), (2, 1)])
def test_a_commit_of_this_process_is_preloaded_as_far_as_it_is_not_in_memory(
    cached_refs: int, fetched: int
) -> None:
    """Its manifests may have left the cache since, which weighs one of them as four references."""

    async def scenario() -> int:
        async with open_storage(memory_url()) as plain:
            storage = LatencyStorage(plain, seconds=1)
            config = replace(_config(EVERYTHING), caching=CachingConfig(num_chunk_refs=cached_refs))
            async with Repository.create(storage, config=config) as repository:
                session = await repository.writable_session("main")
                await make_array(session, "a", (2,), (1,))
                for at in range(2):
                    await write(session, f"a/c/{at}", bytes([at]))
                await session.commit("two manifests")
                storage.forget()
                await repository.readonly_session("main")
                await asyncio.sleep(100)
                return _manifests(storage)

    assert run(scenario()) == fetched


@pytest.mark.parametrize(("preload", "fetched"), [(None, False), (EVERYTHING, True)])
async def test_where_reads_hardly_wait_only_what_is_asked_for_is_preloaded(
    preload: ManifestPreloadConfig | None, *, fetched: bool
) -> None:
    """To choose takes about as long as it could save."""
    url = memory_url()
    await _prepared(url, preload)
    async with Repository.open(url) as repository:
        with counted_calls() as calls:
            await repository.readonly_session("main")
            await asyncio.sleep(0)
        assert ("choose" in calls) is fetched


def test_only_a_few_manifests_are_fetched_at_a_time() -> None:
    """The budget of requests is there for readers."""

    async def scenario() -> list[int]:
        url = memory_url()
        await _prepared(url)
        async with open_storage(url) as plain:
            storage = LatencyStorage(plain, seconds=1)
            config = _config(EVERYTHING)
            async with Repository.open(storage, config=config) as repository:
                await repository.readonly_session("main")
                counts = []
                for _ in range(3):
                    await asyncio.sleep(0.6)
                    counts.append(_manifests(storage))
                return counts

    assert run(scenario()) == [4, 8, 8]  # each takes a second


@pytest.mark.parametrize("chunks", [2, 20_000])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_reader_joins_a_preload_that_is_under_way(chunks: int, *, all_of_them: bool) -> None:
    """The manifest is asked for once, whether the reader wants one chunk or the list of all."""

    async def scenario() -> int:
        url = memory_url()
        async with Repository.create(url) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "a", (chunks,), (1,))
            coords = np.arange(chunks, dtype=np.uint32)[:, None]
            ids = np.zeros((1, 12), np.uint8)
            lengths = np.ones(chunks, np.uint64)
            refs = ChunkRefs.build(coords, Kind.NATIVE, chunk_ids=ids, lengths=lengths)
            session.workspace.set_refs("/a", refs)
            await session.commit("filled")
        async with open_storage(url) as plain:
            storage = LatencyStorage(plain, seconds=1)
            wanted = ManifestPreloadConfig(max_total_refs=chunks, preload_if=EVERYTHING.preload_if)
            config = RepositoryConfig(manifest=ManifestConfig(preload=wanted))
            async with Repository.open(storage, config=config) as repository:
                session = await repository.readonly_session("main")
                await asyncio.sleep(0.5)
                if all_of_them:
                    assert len(await session.workspace.all_refs("/a")) == chunks
                else:
                    assert await session.store.exists("a/c/1")
                return _manifests(storage)

    assert run(scenario()) == 1


class _NoManifests(WrappedStorage):
    """Fails, or never answers, where manifests are asked for."""

    def __init__(self, storage: Any, *, hang: bool) -> None:
        super().__init__(storage)
        self.hang = hang
        self.asked = asyncio.Event()
        self.cancelled = 0

    async def before(self, operation: str, key: str) -> None:
        if key.startswith("manifests/"):
            self.asked.set()
            try:
                if self.hang:
                    await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            raise StorageUnavailableError("no manifests today")


async def test_failed_preload_does_not_fail_reads() -> None:
    """The session lives, though storage has no manifests to give."""
    url = memory_url()
    await _prepared(url)
    async with open_storage(url) as plain:
        storage = _NoManifests(plain, hang=False)
        async with Repository.open(storage, config=_config(EVERYTHING)) as repository:
            session = await repository.readonly_session("main")
            await storage.asked.wait()
            assert await session.store.exists("big/zarr.json")
            assert session.status().is_empty()


async def test_a_preload_that_hangs_ends_with_the_repository() -> None:
    """Leaving the block cancels it, and waits until it is gone."""
    url = memory_url()
    await _prepared(url)
    async with open_storage(url) as plain:
        storage = _NoManifests(plain, hang=True)
        async with Repository.open(storage, config=_config(EVERYTHING)) as repository:
            await repository.readonly_session("main")
            await storage.asked.wait()
        assert storage.cancelled > 0
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others


def test_damaged_manifest_in_preload_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Reading the chunk raises the error; the preload logs it and continues."""
    caplog.set_level(logging.INFO, "icechunk_async")

    async def scenario() -> None:
        url = memory_url()
        await _prepared(url)
        async with open_storage(url) as storage:
            for key in [key for key in await objects(storage) if key.startswith("manifests/")]:
                await storage.put(key, b"damaged")
            async with Repository.open(storage, config=_config(EVERYTHING)) as repository:
                session = await repository.readonly_session("main")
                await asyncio.sleep(100)
                with pytest.raises(FormatError):
                    await read(session, "big/c/0")

    run(scenario())
    notes = [it.message for it in caplog.records if it.name.endswith(".preload")]
    assert ["could not be preloaded" in it for it in notes] == [True] * 8


def _snapshot(sizes: dict[str, list[int]]) -> Snapshot:
    """Make a snapshot of arrays with manifests of these numbers of references."""
    nodes: list[Node] = []
    files: dict[ManifestId, ManifestFileInfo] = {}
    for path, counts in sizes.items():
        refs = []
        for count in counts:
            info = ManifestFileInfo(ManifestId(len(files).to_bytes(2, "little") * 6), 100, count)
            files[info.id] = info
            refs.append(ManifestRef(info.id, ((0, count),)))
        array = ArrayData((Dimension(10, 10),), None, tuple(refs))
        nodes.append(Node(NodeId.random(), path, b"{}", array if counts else None))
    return Snapshot(SnapshotId.random(), None, 0, "", {}, Nodes(nodes), files)


def _numbers(chosen: list[ManifestId]) -> list[int]:
    return [it[0] for it in chosen]


def test_preload_chooses_in_path_order_within_limits() -> None:
    """A manifest that exceeds the rest of the limit is skipped. Later smaller ones are loaded."""
    base = _snapshot({"/b": [5, 9, 1], "/a": [4], "/g": [], "/c": [2]})
    everything = EVERYTHING.preload_if
    assert _numbers(choose(base, EVERYTHING, 10_000)) == [3, 0, 1, 2, 4]
    some = ManifestPreloadConfig(max_total_refs=12, preload_if=everything)
    assert _numbers(choose(base, some, 10_000)) == [3, 0, 2, 4]
    assert _numbers(choose(base, EVERYTHING, 12)) == [3, 0, 2, 4]
    two = ManifestPreloadConfig(max_arrays_to_scan=2, preload_if=everything)
    assert _numbers(choose(base, two, 10_000)) == [3, 0, 1, 2]
    small = ManifestPreloadConfig(preload_if=ManifestPreloadCondition.num_refs(None, 5))
    assert _numbers(choose(base, small, 10_000)) == [3, 2, 4]


@pytest.mark.parametrize(
    "sizes", [{f"/{n:0100}": [1] for n in range(2000)}, {f"/{0:0100}": [1] * 2000}]
)
def test_the_searches_of_many_expressions_are_bounded_together(
    sizes: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is short; expressions, arrays and manifests multiply, and the event loop waits."""
    searches = 0

    def counted(regex: str, text: str) -> bool:
        nonlocal searches
        searches += 1
        return search(regex, text)

    search = fields.search
    monkeypatch.setattr(fields, "search", counted)
    slow = [ManifestPreloadCondition.path_matches("(?:0|0)" * 11 + f"x{n}") for n in range(4)]
    some = ManifestPreloadCondition.or_conditions(
        [*slow, ManifestPreloadCondition.path_matches("0" if len(sizes) == 1 else "x")]
    )
    config = ManifestPreloadConfig(preload_if=some, max_arrays_to_scan=10_000)
    chosen = choose(_snapshot(sizes), config, 10**6)
    assert 4 <= searches <= 250
    assert len(chosen) < 50


def test_preload_skips_what_the_cache_would_drop() -> None:
    """The capacity for references is a limit as well."""

    async def scenario() -> int:
        url = memory_url()
        await _prepared(url)
        async with open_storage(url) as plain:
            storage = LatencyStorage(plain, seconds=1)
            config = RepositoryConfig(
                manifest=ManifestConfig(preload=EVERYTHING), caching=CachingConfig(num_chunk_refs=2)
            )
            async with Repository.open(storage, config=config) as repository:
                await repository.readonly_session("main")
                await asyncio.sleep(100)
                return _manifests(storage)

    assert run(scenario()) == 2
