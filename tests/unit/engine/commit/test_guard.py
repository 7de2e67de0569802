"""Garbage collected under an open session: its commit is refused, or everything of it is there."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest

from icechunk_async import Packing, Repository
from icechunk_async.conflicts import ConflictDetector
from icechunk_async.engine.files.ages import FEW_CHUNKS
from icechunk_async.engine.history import collections
from icechunk_async.engine.history.collections import Collection, collected_since
from icechunk_async.errors import (
    ChunksCollectedError,
    ConflictError,
    OutcomeUnknownError,
    StorageError,
    StorageUnavailableError,
)
from icechunk_async.format.ids import ChunkId
from icechunk_async.format.layout import COLLECTIONS, chunk_key
from icechunk_async.storage import DeleteFailure, ObjectInfo, open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import make_array, memory_url, objects, read, write
from tests.unit.engine.upkeep.upkeep_tools import CHUNK, commit, littered, now, read_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from icechunk_async import Session
    from icechunk_async.format.repo_info import RepoInfo
    from icechunk_async.storage import Data, Expected, ListEntry, Storage, Version

NEW = 100
"""The first chunk that no commit of `littered` wrote."""


async def _alone(session: Session) -> None:
    await write(session, f"a/c/{NEW}", CHUNK)
    await write(session, f"a/c/{NEW + 1}", CHUNK)


async def _in_a_fork(session: Session) -> None:
    fork = pickle.loads(pickle.dumps(await session.fork()))
    async with fork.attached():
        await write(fork, f"a/c/{NEW}", CHUNK)
        await write(fork, f"a/c/{NEW + 1}", CHUNK)
    await session.merge(pickle.loads(pickle.dumps(fork)))


async def _in_a_pack(session: Session) -> None:
    await _alone(session)
    await session.store_pending_chunks()


@pytest.mark.parametrize("how", ["commit", "amend", "flush"])
@pytest.mark.parametrize("work", [_alone, _in_a_fork, _in_a_pack])
async def test_nothing_is_published_that_refers_to_collected_chunks(
    spec: int, how: str, work: Callable[[Session], Awaitable[None]]
) -> None:
    """The error names them, the session says which to write again, and then all is well."""
    if how == "amend" and spec == 1:
        pytest.skip("format version 1 has no amendments")
    url, _ = await littered(spec)
    packing = Packing() if work is _in_a_pack else None
    async with Repository.open(url, packing=packing) as repository:
        before = await read_all(url)
        session = await repository.writable_session("main")
        await work(session)
        await repository.garbage_collect(now())
        publish = {"commit": session.commit, "amend": session.amend, "flush": session.flush}[how]
        with pytest.raises(
            ChunksCollectedError, match=r"2 chunk\(s\).*'/a' \(100,\), \(101,\)"
        ) as e:
            await publish("refused")
        lost = e.value.context["chunks"]
        assert isinstance(lost, dict)
        assert lost["/a"].tolist() == [[NEW], [NEW + 1]]
        assert await read_all(url) == before
        assert session.has_uncommitted_changes
        await write(session, f"a/c/{NEW}", CHUNK)
        assert {path: it.tolist() for path, it in session.collected_chunks.items()} == {
            "/a": [[NEW + 1]]
        }
        with pytest.raises(ChunksCollectedError, match=r"1 chunk\(s\)"):
            await publish("refused again")
        await session.store.delete(f"a/c/{NEW + 1}")
        assert session.collected_chunks == {}
        snapshot_id = await publish("at last")
        reader = await repository.readonly_session(snapshot_id=snapshot_id)
        assert await read(reader, f"a/c/{NEW}") == CHUNK
    await read_all(url)


async def test_the_message_stays_short_and_the_data_whole() -> None:
    """However many chunks are lost, in however many arrays."""
    url, _ = await littered(2)
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        for name in ("a", "b", "c"):
            if name != "a":
                await make_array(session, name, (1000,), (1,))
            for number in range(NEW, NEW + 40):
                await write(session, f"{name}/c/{number}", CHUNK)
        await repository.garbage_collect(now())
        with pytest.raises(ChunksCollectedError, match=r"120 chunk\(s\)") as caught:
            await session.commit("refused")
        assert len(str(caught.value)) < 600
        copied = pickle.loads(pickle.dumps(caught.value)).context["chunks"]
        assert {path: len(it) for path, it in copied.items()} == {"/a": 40, "/b": 40, "/c": 40}
        assert isinstance(copied["/b"], np.ndarray)


class Keeping(WrappedStorage):
    """Deletes nothing, as a collector that is slow, or was killed."""

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Fail."""
        return [DeleteFailure(key, StorageError("too slow")) for key in keys]


async def test_a_chunk_that_is_about_to_be_deleted_is_not_committed(spec: int) -> None:
    """It is there when the commit looks; the collection has started, and will delete it."""
    url, _ = await littered(spec)
    async with open_storage(url) as plain, Repository.open(plain) as repository:
        session = await repository.writable_session("main")
        await _alone(session)
        async with Repository.open(Keeping(plain)) as slow:
            assert (await slow.garbage_collect(now())).failures
        with pytest.raises(ChunksCollectedError):
            await session.commit("refused")


async def test_what_a_lost_try_stored_is_stored_again_after_a_collection(spec: int) -> None:
    """Manifests and the snapshot of an earlier try are garbage as well; their chunks are young."""
    url, _ = await littered(spec)
    async with open_storage(url) as plain, Repository.open(plain) as other:

        class Racing(WrappedStorage):
            """Collects garbage just before the reference is written for the first time."""

            armed = True

            async def before(self, operation: str, key: str) -> None:
                if self.armed and operation == "put" and key.startswith(("repo", "refs/")):
                    self.armed = False
                    await other.garbage_collect(now())

        async with Repository.open(Racing(plain)) as repository:
            session = await repository.writable_session("main")
            await write(session, "a/c/5", b"inline")
            snapshot_id = await session.commit("once more")
        assert (await other.lookup_branch("main")) == snapshot_id
    assert (await read_all(url))[str(snapshot_id)]["a/c/5"] == b"inline"


async def _requests(
    spec: int, prepare: Callable[[Session], Awaitable[object]], cutoff: timedelta | None
) -> Counter[str]:
    """Return the requests of a commit beside a collection with this cutoff before now."""
    url, _ = await littered(spec)
    async with open_storage(url) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.open(storage) as repository, Repository.open(plain) as other:
            # So that nothing written so far is a second old to the storage.
            session = await repository.writable_session("main")
            moment = now()
            await prepare(session)
            if cutoff is not None:
                await other.garbage_collect(moment - cutoff)
            storage.forget()
            await session.commit("counted")
            listed = [key for operation, key in storage.log if operation == "list_prefix"]
            return Counter(key.partition("/")[0] + "/" for key in listed)


async def _many(session: Session) -> None:
    for number in range(NEW, NEW + 3 * FEW_CHUNKS):
        await write(session, f"a/c/{number}", CHUNK)


async def _document(session: Session) -> None:
    await make_array(session, "only-metadata", (10,), (1,))


async def _shift(session: Session) -> None:
    await session.shift_array("/a", (1,))


NOW = timedelta(0)
"""A cutoff just before the session wrote anything, so that its commit succeeds."""


@pytest.mark.parametrize(
    ("work", "cutoff", "expected"),
    [
        (_alone, None, {}),
        (_alone, timedelta(days=7), {COLLECTIONS: 1}),
        (_alone, NOW, {COLLECTIONS: 1, "chunks/": 2}),
        (_many, NOW, {COLLECTIONS: 1, "chunks/": 1}),
        (_document, NOW, {COLLECTIONS: 1}),
        (_shift, NOW, {COLLECTIONS: 1}),
    ],
    ids=["none ran", "cutoff far back", "few chunks", "many chunks", "metadata", "inherited"],
)
async def test_looking_costs_nothing_or_little(
    work: Callable[[Session], Awaitable[object]], cutoff: timedelta | None, expected: dict[str, int]
) -> None:
    """Format 2: no request without a collection; never one for each of many chunks."""
    assert await _requests(2, work, cutoff) == expected


async def test_format_1_lists_the_notes_once_beside_the_other_requests() -> None:
    """It has no log of operations. A collection renews the branch, so that one looks again."""
    assert await _requests(1, _alone, None) == {COLLECTIONS: 1}
    assert await _requests(1, _alone, timedelta(days=7)) == {COLLECTIONS: 2}


async def test_chunks_of_an_unknown_collection_are_looked_for(spec: int) -> None:
    """The official engine leaves no note: what is there counts as kept, what is gone as lost."""
    url, _ = await littered(spec)
    async with open_storage(url) as plain, Repository.open(plain) as repository:
        first = await repository.writable_session("main")
        await _alone(first)
        second = await repository.writable_session("main")
        await write(second, f"a/c/{NEW + 2}", CHUNK)
        await repository.garbage_collect(now() - timedelta(days=7))
        await plain.delete([key for key in await objects(plain) if key.startswith(COLLECTIONS)])
        await _delete_chunks_of(plain, first)
        if spec == 1:  # which cannot know of it until the session is old
            first.publisher.guard._watch.began_us -= 3_700_000_000
        with pytest.raises(ChunksCollectedError):
            await first.commit("refused")
        await second.commit("kept", rebase_with=ConflictDetector())
    await read_all(url)


class Unreachable(WrappedStorage):
    """Lists and reads no chunk while it is told so."""

    down = False

    async def before(self, operation: str, key: str) -> None:
        """Fail what looks for chunks."""
        if self.down and key.startswith("chunks/") and operation != "put":
            raise StorageUnavailableError("no answer")


async def test_a_look_that_found_a_loss_or_failed_is_repeated_at_once() -> None:
    """Format 1, where only time tells that there may have been a collection: once an hour."""
    url, _ = await littered(1)
    async with open_storage(url) as plain, Repository.open(Unreachable(plain)) as repository:
        session = await repository.writable_session("main")
        await _alone(session)
        await _delete_chunks_of(plain, session)
        session.publisher.guard._watch.began_us -= 3_700_000_000
        Unreachable.down = True
        with pytest.raises(StorageUnavailableError):
            await session.commit("not looked at")
        Unreachable.down = False
        for _ in range(2):
            with pytest.raises(ChunksCollectedError):
                await session.commit("refused")
    await read_all(url)


async def _delete_chunks_of(storage: Storage, session: Session) -> None:
    for changes in session.workspace.changes.chunks.values():
        for chunk_id in changes.columns().chunk_ids:
            await storage.delete([chunk_key(ChunkId(chunk_id.tobytes()))])


async def test_a_session_that_continues_another_looks_for_all_of_its_chunks(spec: int) -> None:
    """The collection ran before this session began, but not before the chunks were written."""
    url, _ = await littered(spec)
    async with Repository.open(url) as repository:
        gone = await repository.writable_session("main")
        root = await gone.fork()
        await write(root, f"a/c/{NEW}", CHUNK)
        data = root.to_bytes()
        await repository.garbage_collect(now())
        session = await repository.writable_session("main")
        await session.resume(type(root).from_bytes(data))
        with pytest.raises(ChunksCollectedError):
            await session.commit("refused")


async def test_manifests_that_are_being_rewritten_are_not_lost(spec: int) -> None:
    """They are stored long before the commit that refers to them."""
    url, _ = await littered(spec)
    async with open_storage(url) as plain, Repository.open(plain) as other:

        class Racing(WrappedStorage):
            """Collects garbage just before the new snapshot is stored."""

            armed = True

            async def before(self, operation: str, key: str) -> None:
                if self.armed and operation == "put" and key.startswith("snapshots/"):
                    self.armed = False
                    await other.garbage_collect(now())

        async with Repository.open(Racing(plain)) as repository:
            with pytest.raises(ConflictError, match="while manifests were being rewritten"):
                await repository.rewrite_manifests("refused", branch="main")
            await read_all(url)
            await repository.rewrite_manifests("alone", branch="main")
    await read_all(url)


async def test_a_collection_whose_note_cannot_be_stored_deletes_nothing(spec: int) -> None:
    """Sessions would take it for one of which nothing is known."""
    url, _ = await littered(spec)
    async with open_storage(url) as plain:
        before = await objects(plain)

        class Lossy(WrappedStorage):
            """Never says whether a note was stored."""

            async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
                if key.startswith(COLLECTIONS):
                    raise OutcomeUnknownError("no reply")
                return await super().put(key, data, if_version=if_version)

        async with Repository.open(Lossy(plain)) as repository:
            with pytest.raises(StorageUnavailableError, match="Nothing was deleted"):
                await repository.garbage_collect(now())
        assert await objects(plain) == before


async def test_notes_are_deleted_after_a_month() -> None:
    """A session that is open for longer looks for each of its chunks."""
    url, _ = await littered(2)
    async with open_storage(url) as plain:

        class Aged(WrappedStorage):
            """Dates the first note back."""

            async def list_prefix(
                self,
                prefix: str = "",
                *,
                start_after: str | None = None,
                delimiter: Literal["/"] | None = None,
            ) -> AsyncIterator[ListEntry]:
                listed = self.wrapped.list_prefix(
                    prefix, start_after=start_after, delimiter=delimiter
                )
                entries = [it async for it in listed]
                for place, entry in enumerate(entries):
                    if prefix == COLLECTIONS and place == 0 and isinstance(entry, ObjectInfo):
                        old = entry.last_modified - timedelta(days=31)
                        yield replace(entry, last_modified=old)
                    else:
                        yield entry

        async with Repository.open(Aged(plain)) as repository:
            for _ in range(3):
                await repository.garbage_collect(now())
                notes = [key for key in await objects(plain) if key.startswith(COLLECTIONS)]
                assert len(notes) == 1


def test_only_lengths_of_time_are_compared() -> None:
    """So that clocks of machines, right or wrong, do not matter."""
    noted = now() + timedelta(days=365)
    week = Collection(1, noted - timedelta(days=7), noted)
    assert not week.may_reach(timedelta(days=6))
    assert week.may_reach(timedelta(days=6, hours=23, minutes=30))
    assert week.may_reach(timedelta(days=8))
    assert Collection(1).may_reach(timedelta(0))


ALL = 1 << 30


class Gated(WrappedStorage):
    """Lets a number of requests pass; others wait until more are allowed."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.allowed = ALL
        self.waiting = 0
        self._opened = asyncio.Event()

    async def before(self, operation: str, key: str) -> None:
        """Wait for a turn."""
        while not self.allowed:
            self.waiting += 1
            self._opened.clear()
            await self._opened.wait()
            self.waiting -= 1
        self.allowed -= 1

    async def run(self, task: asyncio.Task[object], requests: int) -> None:
        """Let some requests of a task pass, and return when it waits for more or is done."""
        self.allowed = requests
        self._opened.set()
        for _ in range(10_000):
            await asyncio.sleep(0)
            if task.done() or (self.allowed == 0 and self.waiting):
                for _ in range(20):  # let what was carried out reach its end
                    await asyncio.sleep(0)
                return
        await asyncio.wait({task}, timeout=240)  # it works on a thread


async def _scheduled(
    contents: dict[str, bytes], turns: tuple[int, int], *, first: int
) -> tuple[str, tuple[bool, bool]]:
    """Run a collector and a committer in turns, and look at all that is left.

    Args:
        contents: the repository to begin with.
        turns: how many requests the first makes, and then the other, before each continues alone.
        first: who begins; 0 is the collector.

    Returns:
        How the commit ended, and whether each was interrupted before its end.
    """
    async with open_storage(memory_url()) as plain:
        for key, data in contents.items():
            await plain.put(key, data)
        gates = [Gated(plain), Gated(plain)]
        async with Repository.open(gates[0]) as collector, Repository.open(gates[1]) as writer:
            session = await writer.writable_session("main")
            await write(session, f"a/c/{NEW}", CHUNK)

            async def collect() -> str:
                assert not (await collector.garbage_collect(now())).failures
                return "collected"

            async def land() -> str:
                try:
                    await session.commit("beside", rebase_with=ConflictDetector())
                except ChunksCollectedError:
                    session.discard_changes()
                    return "refused"
                return "acknowledged"

            for gate in gates:
                gate.allowed = 0
            tasks = [asyncio.create_task(collect()), asyncio.create_task(land())]
            order = (first, 1 - first)
            for who, requests in zip(order, turns, strict=True):
                await gates[who].run(tasks[who], requests)
            interrupted = (not tasks[first].done(), not tasks[1 - first].done())
            for who in order:
                await gates[who].run(tasks[who], ALL)
            _, outcome = await asyncio.gather(*tasks)
        await read_all(plain)
        if outcome == "acknowledged":
            async with Repository.open(plain) as repository:
                reader = await repository.readonly_session("main")
                assert await read(reader, f"a/c/{NEW}") == CHUNK
        return outcome, interrupted


@pytest.mark.parametrize(
    "stride", [13, pytest.param(1, marks=pytest.mark.thorough)], ids=["some", "all"]
)
async def test_no_interleaving_of_collector_and_committer_loses_a_commit(
    spec: int, stride: int
) -> None:
    """Every schedule in which each is interrupted once, at any of its requests, by the other."""
    url = memory_url()
    async with Repository.create(url, spec_version=spec) as repository:
        await commit(repository, 1, "first")
    async with open_storage(url) as plain:
        contents = await objects(plain)
    outcomes: Counter[str] = Counter()
    for first, steps in ((0, (stride, 1)), (1, (1, stride))):
        for one in range(0, 100, steps[0]):
            interrupted = (True, True)
            for other in range(0, 100, steps[1]):
                outcome, interrupted = await _scheduled(contents, (one, other), first=first)
                outcomes[outcome] += 1
                if not interrupted[1]:
                    break
            if not interrupted[0]:
                break
    assert outcomes.keys() == {"refused", "acknowledged"}
    assert min(outcomes.values()) >= 10, outcomes


class _Overtaken(WrappedStorage):
    """A storage where another writer is first, some times."""

    def __init__(self, storage: Storage, other: Callable[[], Awaitable[object]]) -> None:
        super().__init__(storage)
        self._other = other
        self.left = 0

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write, after the other one."""
        if key == "repo" and self.left:
            self.left -= 1
            await self._other()
        return await super().put(key, data, if_version=if_version)


async def test_each_entry_of_the_log_is_looked_at_once_however_many_races_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For collections that ran: each try begins where the one before it ended."""
    new: list[int] = []
    ours = True

    def look(info: RepoInfo, since_us: int) -> list[Collection]:
        if ours:
            new.append(sum(it.updated_at > since_us for it in info.updates))
        return collected_since(info, since_us)

    url = memory_url()
    async with open_storage(url) as plain, Repository.create(plain) as other:
        await commit(other, 0, "first")

        async def overtake() -> None:
            nonlocal ours
            ours = False
            await commit(other, 0, "again")
            ours = True

        storage = _Overtaken(plain, overtake)
        async with Repository.open(storage) as repository:
            session = await repository.writable_session("main")
            await write(session, "a/c/1", CHUNK)
            monkeypatch.setattr(collections, "collected_since", look)
            storage.left = 4
            await session.commit("late", rebase_with=ConflictDetector())
    assert new == [0, 1, 1, 1, 1]
