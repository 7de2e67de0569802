"""Forks: they see what their session saw, travel as plain data, and are merged, not committed."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from icechunk_async import ForkSession, Packing, Repository, RepositoryConfig
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.conflicts import ConflictDetector
from icechunk_async.credentials import LocalFileSystemAccess
from icechunk_async.engine.changes.change_set import ArrayChanges, ChangeSet, Deleted
from icechunk_async.engine.changes.wire import ForkState, encode_fork
from icechunk_async.errors import (
    FormatError,
    MergeFailedError,
    ReadOnlyError,
    SessionStateError,
    StorageUnavailableError,
    VirtualAccessError,
)
from icechunk_async.format.config import LocalFileSystemStore, VirtualChunkContainer
from icechunk_async.format.ids import NodeId
from icechunk_async.format.manifest.chunk import InlineChunk
from icechunk_async.format.snapshot import ArrayData, Dimension, Node
from icechunk_async.storage import open_storage
from icechunk_async.testing.cancellation import at_every_wait
from icechunk_async.testing.faults import FaultRates, FaultyStorage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import (
    array_document,
    group_document,
    make_array,
    memory_url,
    objects,
    read,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from icechunk_async.storage import Storage


async def work_elsewhere(fork: ForkSession, key: str, data: bytes) -> ForkSession:
    """Send a fork away, let it write, and get it back."""
    away: ForkSession = pickle.loads(pickle.dumps(fork))
    async with away.attached():
        await write(away, key, data)
    back: ForkSession = pickle.loads(pickle.dumps(away))
    return back


async def test_forks_are_written_elsewhere_and_merged(filled: Repository) -> None:
    """Everything that was written in forks is part of one commit."""
    session = await filled.writable_session("main")
    forks = [await session.fork() for _ in range(4)]
    back = [
        await work_elsewhere(fork, f"a/c/{index + 2}", b"%d" % index * 600)
        for index, fork in enumerate(forks)
    ]
    assert not session.has_uncommitted_changes
    await session.merge(*back)
    await session.commit("merged")
    reader = await filled.readonly_session("main")
    assert [await read(reader, f"a/c/{index}") for index in range(6)] == [
        b"\x00",
        b"\x01",
        *(b"%d" % index * 600 for index in range(4)),
    ]
    assert [info.message async for info in filled.ancestry(branch="main")][:2] == [
        "merged",
        "filled",
    ]


async def test_a_fork_of_a_clean_session_costs_nothing(spec: int) -> None:
    """No request, however many; a state with changes is stored once for all its forks."""
    async with open_storage(memory_url()) as plain:
        counting = LatencyStorage(plain, seconds=0)
        async with Repository.create(counting, spec_version=spec) as repository:
            session = await repository.writable_session("main")
            counting.forget()
            for _ in range(100):
                fork = await session.fork()
                assert fork.snapshot_id == session.snapshot_id
            assert not counting.log
            await make_array(session, "a", (10,), (1,))
            await write(session, "a/c/0", b"x")
            forks = await bounded_map(lambda _: session.fork(), range(50), limit=50)
            assert counting.requests == {"put": 2}  # a manifest and a snapshot
            assert len({fork.snapshot_id for fork in forks}) == 1
            assert [await read(fork, "a/c/0") for fork in forks[:3]] == [b"x"] * 3
            await write(session, "a/c/1", b"y")
            later = await session.fork()
            assert later.snapshot_id != forks[0].snapshot_id
            assert await read(later, "a/c/1") == b"y"
            assert await read(forks[0], "a/c/1") is None
            counting.forget()
            await session.commit("done", allow_missing_forks=True)
            assert "manifests" not in {key.split("/")[0] for _, key in counting.log}


async def test_unpublished_state_of_a_fork_is_not_in_the_history(repository: Repository) -> None:
    """The unpublished state is no part of history, and its changes are not the fork's."""
    session = await repository.writable_session("main")
    await make_array(session, "a", (10,), (1,))
    fork = await session.fork()
    assert not fork.has_uncommitted_changes
    assert not fork.status().new_arrays
    assert [info.message async for info in repository.ancestry()] == ["Repository initialized"]
    await write(fork, "a/zarr.json", array_document((10,), (1,), attributes={"by": "fork"}))
    await write(fork, "a/c/3", b"3")
    await session.merge(await work_elsewhere(fork, "a/c/4", b"4"))
    assert session.status().new_arrays == {"/a"}
    await session.commit("all")
    reader = await repository.readonly_session("main")
    assert (await read(reader, "a/c/3"), await read(reader, "a/c/4")) == (b"3", b"4")
    assert b'"by": "fork"' in (await read(reader, "a/zarr.json") or b"")


@pytest.mark.parametrize("method", ["commit", "amend", "flush", "rebase"])
async def test_a_fork_is_never_published(filled: Repository, method: str) -> None:
    """It cannot be committed, with or without changes. The message says what to do."""
    fork = await (await filled.writable_session("main")).fork()
    for key in (None, "a/c/2"):
        if key is not None:
            await write(fork, key, b"2")
        with pytest.raises(SessionStateError, match=r"session\.merge\(fork\)"):
            await getattr(fork, method)(None)
    assert await read(fork, "a/c/2") == b"2"


async def test_only_writable_sessions_fork_and_only_their_forks_merge(filled: Repository) -> None:
    """Reading sessions are not forked, and only forks are merged, into their own session."""
    reader = await filled.readonly_session("main")
    with pytest.raises(SessionStateError, match="readonly session cannot be forked"):
        await reader.fork()
    session, other = [await filled.writable_session("main") for _ in range(2)]
    fork = await session.fork()
    with pytest.raises(SessionStateError, match="readonly session cannot be merged into"):
        await reader.merge(fork)
    for target in (session, fork):
        with pytest.raises(SessionStateError, match="Only forks"):
            await target.merge(other)  # type: ignore[arg-type]
    with pytest.raises(SessionStateError, match="another session"):
        await other.merge(fork)
    await write(session, "a/c/5", b"5")
    await session.commit("done", allow_missing_forks=True)
    with pytest.raises(SessionStateError):
        await session.merge(fork)


async def test_rebased_or_discarded_session_refuses_older_forks(filled: Repository) -> None:
    """After a rebase, or where changes that a fork saw were discarded, a fork does not fit."""
    session, other = [await filled.writable_session("main") for _ in range(2)]
    clean = await session.fork()
    await write(session, "a/c/2", b"2")
    dirty = await session.fork()
    await write(dirty, "a/c/3", b"3")
    session.discard_changes()
    with pytest.raises(SessionStateError, match="discarded"):
        await session.merge(dirty)
    await session.merge(clean)
    await write(other, "a/c/6", b"6")
    await other.commit("newer")
    await session.rebase(ConflictDetector())
    with pytest.raises(SessionStateError, match="rebased"):
        await session.merge(clean)
    assert not session.has_uncommitted_changes


async def test_forks_of_forks_merge_into_their_fork(filled: Repository) -> None:
    """A fork forks as a session does; its forks are merged into it, or past it if it was clean."""
    session = await filled.writable_session("main")
    fork = await session.fork()
    early = await fork.fork()
    await write(fork, "a/c/2", b"2")
    late = await fork.fork()
    assert await read(late, "a/c/2") == b"2"
    await write(early, "a/c/3", b"3")
    await write(late, "a/c/4", b"4")
    with pytest.raises(SessionStateError, match="merged into that first"):
        await session.merge(late)
    await fork.merge(late)
    await session.merge(fork, early)
    assert [await read(session, f"a/c/{index}") for index in (2, 3, 4)] == [b"2", b"3", b"4"]


async def test_forks_merge_as_a_tree_without_storage(filled: Repository) -> None:
    """Forks that arrived from other processes are merged pair by pair without opening storage."""
    session = await filled.writable_session("main")
    forks = [await session.fork() for _ in range(8)]
    level = [
        await work_elsewhere(fork, f"a/c/{index}", b"%d" % index)
        for index, fork in enumerate(forks)
    ]
    while len(level) > 1:
        for left, right in zip(level[::2], level[1::2], strict=True):
            assert not left.is_attached
            await left.merge(right)
        level = [pickle.loads(pickle.dumps(fork)) for fork in level[::2]]
    await session.merge(level[0])
    assert [await read(session, f"a/c/{index}") for index in range(8)] == [
        b"%d" % index for index in range(8)
    ]


async def test_pickled_fork_opens_nothing_until_attached(filled: Repository) -> None:
    """The fork says how to open its repository. It is closed after the block, with its changes."""
    fork = await (await filled.writable_session("main")).fork()
    away: ForkSession = pickle.loads(pickle.dumps(fork))
    assert (away.snapshot_id, away.read_only, away.branch) == (fork.snapshot_id, False, None)
    for use in (lambda: away.store, away.status, away.discard_changes, lambda: away.spec_version):
        with pytest.raises(SessionStateError, match=r"fork\.attached"):
            use()
    async with away.attached() as attached:
        assert attached is away
        async with away.attached():  # as where it was made
            store = away.store
            await write(away, "a/c/7", b"7")
            assert away.status().updated_chunks.keys() == {"/a"}
    assert away.has_uncommitted_changes
    with pytest.raises(ReadOnlyError, match="detached"):
        await store.delete("a/c/7")
    async with away.attached():
        assert await read(away, "a/c/7") == b"7"


async def test_fork_detached_during_a_merge_refuses_the_merge(filled: Repository) -> None:
    """Rather than losing it: it would have gone to where nobody looks any more."""
    session = await filled.writable_session("main")
    away: ForkSession = pickle.loads(pickle.dumps(await session.fork()))
    others = [await session.fork() for _ in range(64)]  # enough to be merged on a thread
    await write(others[0], "a/c/5", b"5")
    async with away.attached():
        merging = asyncio.create_task(away.merge(*others))
        await asyncio.sleep(0)
    with pytest.raises(SessionStateError, match=r"detached.*merge them into it again"):
        await merging
    assert not away.has_uncommitted_changes
    await away.merge(*others)
    async with away.attached():
        assert await read(away, "a/c/5") == b"5"


async def test_failed_resume_restores_the_session(filled: Repository) -> None:
    """Its own forks can be merged still."""
    root = await (await filled.writable_session("main")).fork()
    one, other = await root.fork(), await root.fork()
    for fork in (one, other):
        await write(fork, "a/c/0", b"0")
    session = await filled.writable_session("main")
    mine = await session.fork()
    await write(mine, "a/c/3", b"3")
    with pytest.raises(MergeFailedError):
        await session.resume(root, one, other)
    await session.merge(mine)
    assert await read(session, "a/c/3") == b"3"


async def test_equal_forks_have_equal_bytes(filled: Repository) -> None:
    """Bytes are equal for equal changes, and hold no location; damaged ones are refused."""
    session = await filled.writable_session("main")
    fork = await session.fork()
    await write(fork, "b/zarr.json", array_document((4, 4), (1, 1)))
    for key in ("b/c/3/3", "b/c/0/1", "a/c/9"):
        await write(fork, key, key.encode())
    data = fork.to_bytes()
    again = ForkSession.from_bytes(data)
    assert again.to_bytes() == data
    assert filled.storage.description.url.encode() not in data
    with pytest.raises(SessionStateError, match="give an open storage"):
        async with again.attached():
            pass
    async with again.attached(filled.storage):
        assert await read(again, "b/c/0/1") == b"b/c/0/1"
    for place in range(0, len(data), 7):
        with pytest.raises(FormatError):
            ForkSession.from_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
    for size in (0, 5, 8, 9, len(data) // 2, len(data) - 1):
        with pytest.raises(FormatError):
            ForkSession.from_bytes(data[:size])
    with pytest.raises(FormatError, match="version 9"):
        ForkSession.from_bytes(data[:7] + b"\x09" + data[8:])


async def test_secrets_travel_but_are_not_shown(tmp_path: Path) -> None:
    """Options are in the pickle and in no repr."""
    config = RepositoryConfig(inline_chunk_threshold_bytes=7)
    async with Repository.create(tmp_path / "r", config=config) as repository:
        fork = await (await repository.writable_session("main")).fork()
        shown = f"{fork!r} {fork!s} {fork.origin!r}"
        assert "options" not in shown
        away: ForkSession = pickle.loads(pickle.dumps(fork))
        assert away.origin == fork.origin
        async with away.attached():
            assert away.workspace.inline_threshold_bytes == 7


_WORKER = """
import asyncio, pickle, sys
from zarr.core.buffer import default_buffer_prototype

async def main():
    fork = pickle.load(sys.stdin.buffer)
    async with fork.attached():
        chunk = default_buffer_prototype().buffer.from_bytes(b"w" * 1000)
        await fork.store.set("a/c/8", chunk)
    sys.stdout.buffer.write(pickle.dumps(fork))

asyncio.run(main())
"""


@pytest.mark.blocks_the_loop
async def test_fork_works_in_another_process(tmp_path: Path, spec: int) -> None:
    """A fork is opened, written and sent back by a process that knows nothing else."""
    async with Repository.create(tmp_path / "r", spec_version=spec) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (10,), (1,))
        fork = await session.fork()
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", _WORKER],
            input=pickle.dumps(fork),
            capture_output=True,
            check=True,
        )
        await session.merge(pickle.loads(done.stdout))
        await session.commit("merged")
        reader = await repository.readonly_session("main")
        assert await read(reader, "a/c/8") == b"w" * 1000


async def test_a_cancelled_fork_or_merge_changes_nothing(filled: Repository) -> None:
    """After a cancellation at any point the next call works, and no merge is left half-done."""
    session = await filled.writable_session("main")
    await write(session, "a/c/2", b"2")

    async def start(n: int) -> None:
        await write(session, "a/c/3", b"%d" % n)
        fork = await session.fork()
        await write(fork, "a/c/4", b"4")
        await session.merge(fork)

    waits = [n async for n in at_every_wait(start)]
    assert waits
    assert await read(session, "a/c/4") == b"4"
    assert session.status().updated_chunks["/a"].tolist() == [[2], [3], [4]]
    await session.commit("done")


def test_fork_fails_if_its_state_cannot_be_stored() -> None:
    """The fork fails if the storage does not reply. The next try stores the state anew."""
    failing: set[str] = set()

    def affects(key: str) -> bool:
        return key.partition("/")[0] in failing

    async def scenario() -> None:
        async with open_storage(memory_url()) as plain:
            faulty = FaultyStorage(plain, FaultRates(lost_requests=1.0), seed=0, affects=affects)
            async with Repository.create(faulty) as repository:
                session = await repository.writable_session("main")
                await write(session, "zarr.json", b'{"zarr_format": 3, "node_type": "group"}')
                failing.add("snapshots")
                with pytest.raises(StorageUnavailableError, match="fork again"):
                    await session.fork()
                failing.clear()
                fork = await session.fork()
                assert f"snapshots/{fork.snapshot_id}" in await objects(plain)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(scenario())


async def test_forks_read_and_write_virtual_chunks(tmp_path: Path) -> None:
    """Access to sources travels with a fork as plain data. An open source must be given again."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "file.nc").write_bytes(b"0123456789")
    prefix = f"{source.as_uri()}/"
    container = VirtualChunkContainer(prefix, LocalFileSystemStore(str(source)))
    config = RepositoryConfig(virtual_chunk_containers=(container,))
    async with (
        open_storage(source) as open_source,
        Repository.create(
            tmp_path / "r", config=config, authorize_virtual_chunk_access={prefix: None}
        ) as repository,
        Repository.open(
            tmp_path / "r", authorize_virtual_chunk_access={prefix: open_source}
        ) as other,
    ):
        session = await repository.writable_session("main")
        await make_array(session, "a", (4,), (4,))
        session.store.set_virtual_ref("a/c/0", f"{prefix}file.nc", offset=2, length=4)
        away: ForkSession = pickle.loads(pickle.dumps(await session.fork()))
        async with away.attached():
            assert await read(away, "a/c/0") == b"2345"
            away.store.set_virtual_ref("a/c/0", f"{prefix}file.nc", offset=3, length=4)
        await session.merge(away)
        assert await read(session, "a/c/0") == b"3456"
        await session.commit("virtual")
        fork = await (await other.writable_session("main")).fork()
        away = pickle.loads(pickle.dumps(fork))
        async with away.attached():
            with pytest.raises(VirtualAccessError):
                await read(away, "a/c/0")
        async with away.attached(authorize_virtual_chunk_access={prefix: open_source}):
            assert await read(away, "a/c/0") == b"3456"


class _Held(WrappedStorage):
    """Holds back the first snapshot that is written, until it is let go."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.begun, self.let_go = asyncio.Event(), asyncio.Event()
        self.active = False

    async def before(self, operation: str, key: str) -> None:
        if self.active and operation == "put" and key.startswith("snapshots/"):
            self.active = False
            self.begun.set()
            await self.let_go.wait()


async def test_fork_from_before_a_rebase_is_refused() -> None:
    """Changes that others committed between the two bases would be overwritten silently."""
    async with open_storage(memory_url()) as plain:
        held = _Held(plain)
        async with Repository.create(held) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "a", (4,), (1,))
            await session.commit("array")
            session = await repository.writable_session("main")
            await write(session, "a/c/0", b"ours")
            held.active = True
            early = asyncio.create_task(session.fork())
            await held.begun.wait()
            other = await repository.writable_session("main")
            await write(other, "a/c/1", b"theirs")
            await other.commit("theirs")
            await session.rebase(ConflictDetector())
            await session.fork()
            held.let_go.set()
            fork = await early
            await write(fork, "a/c/1", b"lost")
            with pytest.raises(SessionStateError, match="another state"):
                await session.merge(fork)
            await session.commit("both", allow_missing_forks=True)
            reader = await repository.readonly_session("main")
            assert await read(reader, "a/c/1") == b"theirs"


def _node(path: str, number: int, shape: tuple[int, ...] | None = None) -> Node:
    array = None if shape is None else ArrayData(tuple(Dimension(it, it) for it in shape), None)
    return Node(NodeId(bytes([number]) * 8), path, b"{}", array)


def _chunks(*rows: tuple[int, ...]) -> ArrayChanges:
    changes = ArrayChanges(len(rows[0]))
    for row in rows:
        changes.set(row, InlineChunk(b"x"))
    return changes


def _group(path: str) -> Node:
    return Node(NodeId(b"g" * 8), path, group_document())


def _resized(node: Node, *shape: int) -> Node:
    """Return an array of chunks of one element with another shape."""
    array = ArrayData(tuple(Dimension(it, it) for it in shape))
    return replace(node, user_data=array_document(shape, (1,) * len(shape)), array=array)


def _kept(*grid: int) -> ArrayChanges:
    changes = ArrayChanges(len(grid))
    changes.shrink(grid)
    return changes


IMPOSSIBLE: dict[str, Callable[[Node, Node], ChangeSet]] = {
    "a second node at a path": lambda it, _: ChangeSet(new={it.path: _node(it.path, 1)}),
    "a second node of an id": lambda it, _: ChangeSet(new={"/b": replace(it, path="/b")}),
    "another document of no node": lambda it, _: ChangeSet(updated={it.id: _node("/b", 1)}),
    "an array for a group": lambda _, group: ChangeSet(
        updated={group.id: replace(group, array=ArrayData((), None))}
    ),
    "another shape than the document's": lambda it, _: ChangeSet(
        updated={it.id: replace(it, array=ArrayData((Dimension(99, 99),), None))}
    ),
    "a new array without a document": lambda _, __: ChangeSet(new={"/b": _node("/b", 1, (4,))}),
    "a new group without a document": lambda _, __: ChangeSet(new={"/b": _node("/b", 1)}),
    "no node deleted": lambda _, group: ChangeSet(deleted={group.id: Deleted("/b", is_array=True)}),
    "chunks of no array": lambda _, __: ChangeSet(chunks={NodeId(b"n" * 8): _chunks((0,))}),
    "chunks of a group": lambda _, group: ChangeSet(chunks={group.id: _chunks((0,))}),
    "chunks of another rank": lambda it, _: ChangeSet(chunks={it.id: _chunks((0, 0))}),
    "chunks outside": lambda it, _: ChangeSet(chunks={it.id: _chunks((1,), (1 << 30,))}),
    "two nodes of one id": lambda _, __: ChangeSet(new={"/b": _group("/b"), "/c": _group("/c")}),
    "a node changed and deleted": lambda it, _: ChangeSet(
        updated={it.id: _resized(it, 10)}, deleted={it.id: Deleted(it.path, is_array=True)}
    ),
    "chunks of a deleted array": lambda it, _: ChangeSet(
        deleted={it.id: Deleted(it.path, is_array=True)}, chunks={it.id: _chunks((1,))}
    ),
    "chunks left outside of a smaller grid": lambda it, _: ChangeSet(
        updated={it.id: _resized(it, 1)}
    ),
    "some chunks left outside": lambda it, _: ChangeSet(
        updated={it.id: _resized(it, 1)}, chunks={it.id: _kept(2)}
    ),
    "chunks left of another rank": lambda it, _: ChangeSet(updated={it.id: _resized(it, 10, 10)}),
    "a document in UTF-16": lambda it, _: ChangeSet(
        updated={it.id: replace(it, user_data=it.user_data.decode().encode("utf-16"))}
    ),
    "a shape given twice": lambda it, _: ChangeSet(
        updated={it.id: replace(it, user_data=b'{"shape": [1], ' + it.user_data[1:])}
    ),
}


@pytest.mark.parametrize("change", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
async def test_impossible_changes_are_not_merged(
    filled: Repository, change: Callable[[Node, Node], ChangeSet]
) -> None:
    """Bytes from elsewhere may say anything: a commit of that would damage the hierarchy."""
    session = await filled.writable_session("main")
    array, group = session.workspace.node("/a"), session.workspace.node("/")
    assert array is not None
    assert group is not None
    genuine = await session.fork()
    state = ForkState(genuine.session_id, genuine.snapshot_id, change(array, group))
    with pytest.raises((FormatError, MergeFailedError), match="Nothing was merged"):
        await session.merge(ForkSession.from_bytes(encode_fork(state)))
    assert not session.has_uncommitted_changes
    fork = ForkSession.from_bytes(encode_fork(state))
    with pytest.raises(FormatError, match="Nothing was merged"):
        async with fork.attached(filled.storage):
            pytest.fail("it can be read and written, and forked again")


async def test_a_rectilinear_grid_is_not_merged_into_format_1(filled: Repository) -> None:
    """It cannot store one; in format 2 the same fork is merged."""
    session = await filled.writable_session("main")
    document = array_document(
        (4,),
        (4,),
        chunk_grid={
            "name": "rectilinear",
            "configuration": {"kind": "inline", "chunk_shapes": [[1, 3]]},
        },
    )
    node = Node(NodeId(b"r" * 8), "/r", document, ArrayData((Dimension(4, 2),)))
    genuine = await session.fork()
    state = ForkState(genuine.session_id, genuine.snapshot_id, ChangeSet(new={"/r": node}))
    back = ForkSession.from_bytes(encode_fork(state))
    if filled.spec_version == 1:
        with pytest.raises(FormatError, match="format 1"):
            await session.merge(back)
    else:
        await session.merge(back)
        assert session.has_uncommitted_changes


async def test_credentials_of_virtual_chunks_travel_with_a_fork(tmp_path: Path) -> None:
    """A fork can read the same sources in the process it is sent to."""
    source = tmp_path / "source"
    source.write_bytes(b"0123456789")
    prefix = f"file://{tmp_path}/"
    config = RepositoryConfig(
        virtual_chunk_containers=(
            VirtualChunkContainer(prefix, LocalFileSystemStore(str(tmp_path))),
        )
    )
    async with Repository.create(
        str(tmp_path / "repository"),
        config=config,
        authorize_virtual_chunk_access={prefix: LocalFileSystemAccess()},
    ) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (4,), (4,))
        session.store.set_virtual_ref("a/c/0", f"{prefix}source", offset=2, length=4)
        away: ForkSession = pickle.loads(pickle.dumps(await session.fork()))
        async with away.attached():
            assert await read(away, "a/c/0") == b"2345"


def _in_child(work: Callable[[], object]) -> object:
    """Return the reply of a process made by `os.fork`."""
    answers, answering = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child == 0:
        try:
            reply = work()
        except BaseException as error:  # noqa: BLE001 - the parent looks at it
            reply = error
        os.write(answering, pickle.dumps(reply))
        os._exit(0)
    os.close(answering)
    with open(answers, "rb") as reading:  # noqa: PTH123 - a descriptor
        reply = pickle.load(reading)
    os.waitpid(child, 0)
    return reply


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_fork_inherited_by_a_process_opens_its_own_connections(tmp_path: Path, spec: int) -> None:
    """It is attached in the child by itself, and unchanged in the parent."""

    async def in_child(fork: ForkSession) -> ForkSession:
        assert not fork.is_attached
        with pytest.raises(SessionStateError, match="nothing open here"):
            await read(fork, "a/c/0/0")
        async with fork.attached():
            await write(fork, "a/c/1/0", b"child")
        return fork

    async def in_parent() -> None:
        async with Repository.create(tmp_path / "r", spec_version=spec) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "a", (4, 1), (1, 1))
            fork = await session.fork()
            await write(fork, "a/c/0/0", b"parent")
            # A loop of the child runs in a new thread: here one runs already.
            back = await asyncio.to_thread(_in_child, lambda: asyncio.run(in_child(fork)))
            assert isinstance(back, ForkSession), back
            assert fork.is_attached
            await session.merge(back)
            await session.commit("both")
            reader = await repository.readonly_session("main")
            assert await read(reader, "a/c/0/0") == b"parent"
            assert await read(reader, "a/c/1/0") == b"child"

    asyncio.run(in_parent())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_fork_with_pending_chunks_is_refused_in_a_child_process(tmp_path: Path) -> None:
    """The parent stores those chunks under keys that the child would write differently."""

    async def in_parent() -> None:
        async with Repository.create(tmp_path / "r", packing=Packing()) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "a", (4, 1), (1, 1))
            fork = await session.fork()
            await write(fork, "a/c/0/0", bytes(1000))
            refused = await asyncio.to_thread(_in_child, fork.changes_so_far)
            assert isinstance(refused, SessionStateError)
            assert "store_pending_chunks" in str(refused)
            await fork.store_pending_chunks()
            changes = await asyncio.to_thread(_in_child, lambda: fork.changes_so_far().is_empty())
            assert changes is False

    asyncio.run(in_parent())
