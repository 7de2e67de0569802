"""Blocking sessions and their stores: what travels, and how stores reach the library's."""

from __future__ import annotations

import asyncio
import io
import logging
import pickle
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from rich.console import Console
from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import cpu, default_buffer_prototype
from zarr.storage import WrapperStore

from icechunk_async import handles
from icechunk_async.engine.commit.once import Transaction
from icechunk_async.engine.tree.blocking import BlockingChunks
from icechunk_async.engine.tree.workspace import Workspace
from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.sync import (
    BasicConflictSolver,
    ConflictDetector,
    ConflictError,
    IcechunkError,
    IcechunkStore,
    ReadOnlyError,
    Repository,
    Session,
    SessionStateError,
    in_memory_storage,
)
from icechunk_async.zarr.store import IcechunkStore as AsyncStore
from tests.helpers import memory_url

if TYPE_CHECKING:
    from pathlib import Path

    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer

_PROTOTYPE = default_buffer_prototype()


def _values(store: IcechunkStore) -> list[int]:
    values: list[int] = np.asarray(zarr.open_array(store, path="a", mode="r")[:]).tolist()
    return values


@pytest.fixture
def repository() -> Repository:
    """One with an array of four chunks, the first two of them written."""
    repository = Repository.create(memory_url())
    with repository.transaction("main", message="data") as store:
        array = zarr.create_array(
            store, name="a", shape=(4,), chunks=(1,), dtype="u1", compressors=None
        )
        array[:2] = 7
    return repository


def test_what_was_unpickled_opens_when_it_is_used_and_once(
    repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    """Hundreds of tasks of one worker share connections and caches."""
    caplog.set_level(logging.DEBUG, "icechunk_async")

    def opened() -> int:
        return sum("opened repository" in it.message for it in caplog.records)

    session = repository.readonly_session("main")
    stores = [pickle.loads(pickle.dumps(session.store)) for _ in range(20)]
    sessions = [pickle.loads(pickle.dumps(session)) for _ in range(20)]
    assert all(it.snapshot_id == session.snapshot_id and it.read_only for it in sessions)
    assert not opened()
    assert all(_values(it) == [7, 7, 0, 0] for it in stores)
    assert all(min(it.store.list()) == "a/c/0" for it in sessions)
    assert opened() == 1
    del stores, sessions
    assert zarr.open_array(pickle.loads(pickle.dumps(session.store)), path="a", mode="r")[0] == 7
    assert opened() == 1  # the last few stay open, for the tasks to come


def test_a_session_and_its_stores_stay_together_in_one_pickle(repository: Repository) -> None:
    """As dask's graphs hold them."""
    session = repository.readonly_session("main")
    copy, store = pickle.loads(pickle.dumps((session, session.store)))
    assert store.session == copy
    assert copy != session


def test_a_writable_session_says_what_to_send_instead(repository: Repository) -> None:
    """Forks."""
    session = repository.writable_session("main")
    for value in (session, session.store):
        with pytest.raises(ValueError, match=r"Session\.fork\(\)"):
            pickle.dumps(value)


def test_forks_are_merged_without_being_opened(
    repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    """Forks that come back from workers cost nothing to merge."""
    session = repository.writable_session("main")
    fork = pickle.loads(pickle.dumps(session.fork()))
    zarr.open_array(fork.store, path="a")[2] = 9
    returned = pickle.loads(pickle.dumps(fork))
    assert returned.has_uncommitted_changes
    assert returned.snapshot_id == session.snapshot_id
    handles._recent.clear()

    caplog.set_level(logging.DEBUG, "icechunk_async")
    session.merge(returned)
    session.commit("merged")
    assert not any("opened repository" in it.message for it in caplog.records)
    assert _values(session.store) == [7, 7, 9, 0]


def test_only_forks_are_merged(repository: Repository) -> None:
    """Another session is not a fork."""
    session = repository.writable_session("main")
    with pytest.raises(SessionStateError, match="Only forks can be merged"):
        session.merge(repository.writable_session("main"))  # type: ignore[arg-type]


@pytest.mark.parametrize("pickled", [False, True])
def test_zarr_reads_in_every_way_it_knows(repository: Repository, *, pickled: bool) -> None:
    """Zarr reads on its own loop, in batches, and without a loop."""
    store = repository.readonly_session("main").store
    if pickled:
        store = pickle.loads(pickle.dumps(store))

    async def read() -> None:
        assert (await _bytes(store.get("a/c/0", _PROTOTYPE))) == b"\7"
        keys = [("a/c/0", _PROTOTYPE, None), ("a/c/3", _PROTOTYPE, None)]
        many = [(key, value) async for key, value in store._get_many(keys)]
        assert [(key, value is None) for key, value in many] == [("a/c/0", False), ("a/c/3", True)]
        ranges: list[ByteRequest] = [RangeByteRequest(0, 4), SuffixByteRequest(2)]
        batches = [it async for it in store.get_ranges("zarr.json", ranges, prototype=_PROTOTYPE)]
        assert batches
        assert [key async for key in store.list_dir("a/c")] == ["0", "1"]

    if pickled:
        assert store._supports_sync_io
    asyncio.run(read())
    assert _text(store.get_sync("a/c/1")) == b"\7"
    assert store.get_sync("a/c/2") is None
    parts = store.get_ranges_sync("zarr.json", [RangeByteRequest(0, 1)], prototype=_PROTOTYPE)
    assert [(index, _text(part)) for index, part in parts] == [(0, b"{")]


async def _bytes(value: object) -> bytes:
    return _text(await value)  # type: ignore[misc]


def _text(value: Buffer | None) -> bytes:
    assert value is not None
    return value.to_bytes()


def test_zarr_writes_in_every_way_unless_the_store_is_read_only(repository: Repository) -> None:
    """Each way also raises an error if the store is read-only."""
    session = repository.writable_session("main")
    writing, reading = session.store, session.store.with_read_only(read_only=True)
    assert isinstance(reading, IcechunkStore)
    value = cpu.Buffer.from_bytes(b"\1")

    async def write() -> None:
        await writing.set("a/c/0", value)
        await writing._set_many([("a/c/1", value), ("a/c/2", value)])
        await writing.delete("a/c/0")
        for refused in (
            reading.set("a/c/0", value),
            reading._set_many([("a/c/1", value)]),
            reading.set_if_not_exists("a/c/3", value),
            reading.delete("a/c/1"),
            reading.delete_dir("a"),
            reading.clear(),
        ):
            with pytest.raises(ReadOnlyError):
                await refused

    asyncio.run(write())
    writing.set_sync("a/c/3", value)
    writing.delete_sync("a/c/2")
    with pytest.raises(ReadOnlyError):
        reading.set_sync("a/c/3", value)
    with pytest.raises(ReadOnlyError):
        reading.delete_sync("a/c/3")
    with pytest.raises(ReadOnlyError):
        reading.set_virtual_ref("a/c/0", "file:///x", offset=0, length=1)
    assert _values(writing) == [0, 1, 0, 1]
    session.commit("written")
    with pytest.raises(ReadOnlyError):
        writing.set_sync("a/c/3", value)


def test_a_store_is_wrapped_and_opened_as_zarr_does(repository: Repository) -> None:
    """Its own tools take it."""
    store = repository.readonly_session("main").store
    assert zarr.open_array(WrapperStore(store), path="a", mode="r")[0] == 7
    assert zarr.open_array(store.with_read_only(read_only=True), path="a", mode="r")[0] == 7


def test_solvers_of_ones_own_may_be_asynchronous(repository: Repository, tmp_path: Path) -> None:
    """The library's protocol is taken as well as the official classes."""
    from icechunk_async.conflicts import Clash, Resolution

    class Theirs:
        async def solve(self, clash: Clash) -> list[Resolution]:
            await asyncio.sleep(0)
            return [Resolution.THEIRS] * len(clash.conflicts)

    first, second = (repository.writable_session("main") for _ in range(2))
    zarr.open_array(first.store, path="a")[0] = 1
    zarr.open_array(second.store, path="a")[:] = 2
    first.commit("first")
    second.commit("second", rebase_with=Theirs())  # type: ignore[arg-type]
    assert _values(second.store) == [1, 2, 2, 2]


def test_sessions_are_shown_by_rich() -> None:
    """Names and values, as in the text."""
    repository = Repository.create(in_memory_storage())
    session = repository.writable_session("main")
    console = Console(width=200, file=io.StringIO())
    console.print(session)
    printed = str(getattr(console.file, "getvalue")())  # noqa: B009 - rich's type is wider
    assert printed.startswith("Session(")
    assert session.snapshot_id in printed
    assert "branch='main'" in printed


def test_the_first_chunk_comes_over_the_connection_that_opened_the_repository(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zarr's loop would have to open its own connection first. Later reads stay on that loop."""
    loops: dict[str, list[str]] = {}
    get = AsyncStore.get

    async def noted(self: AsyncStore, key: str, *args: Any) -> Buffer | None:
        loops.setdefault(key, []).append(threading.current_thread().name)
        return await get(self, key, *args)

    monkeypatch.setattr(AsyncStore, "get", noted)
    monkeypatch.setattr(BlockingChunks, "of", lambda _: None)  # as where storage is far away
    array = zarr.open_array(repository.readonly_session("main").store, path="a", mode="r")
    assert array[0] == 7
    assert array[1] == 7
    assert set(loops["a/zarr.json"]) == {"zarr_io"}  # takes no request
    assert loops["a/c/0"] == ["icechunk-async-portal"]
    assert loops["a/c/1"] == ["zarr_io"]


def test_where_nothing_connects_every_chunk_is_read_where_it_is_asked_for(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hop would take longer than the read."""
    threads: set[str] = set()
    get = AsyncStore.get

    async def noted(self: AsyncStore, key: str, *args: Any) -> Buffer | None:
        threads.add(threading.current_thread().name)
        return await get(self, key, *args)

    monkeypatch.setattr(AsyncStore, "get", noted)
    assert _values(repository.readonly_session("main").store) == [7, 7, 0, 0]
    assert threads == {"zarr_io"}


def test_a_first_chunk_that_cannot_be_read_raises_as_any_other(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors are the facade's, and the next read tries again."""
    monkeypatch.setattr(BlockingChunks, "of", lambda _: None)
    store = repository.readonly_session("main").store
    array = zarr.open_array(store, path="a", mode="r")
    read = Workspace.read_chunk
    failures = [FormatError("damaged")]

    async def fail_once(self: Workspace, *args: Any, **more: Any) -> object:
        if failures:
            raise failures.pop()
        return await read(self, *args, **more)

    monkeypatch.setattr(Workspace, "read_chunk", fail_once)
    with pytest.raises(IcechunkError, match="damaged"):
        array[0]
    assert array[0] == 7
    with pytest.raises(IcechunkError, match="no key"):
        asyncio.run(store.get("no key", _PROTOTYPE))


def test_a_named_commit_is_published_once(repository: Repository) -> None:
    """A second session with the same transaction returns the first one's snapshot."""
    named = Transaction("loader", 1)
    published: list[str] = []
    for value in (5, 6):
        session = repository.writable_session("main")
        zarr.open_array(session.store, path="a", mode="r+")[0] = value
        published.append(session.commit("load", once=named))
    assert published[0] == published[1] == repository.lookup_branch("main")
    array = zarr.open_array(repository.readonly_session("main").store, path="a", mode="r")
    assert array[0] == 5


def test_a_commit_names_its_inputs_and_says_whether_it_had_landed(repository: Repository) -> None:
    """So does a transaction block. A read-only session and a fork committed nothing."""
    late = repository.writable_session("main")
    _put(late, 2)
    once = Transaction("derive", 1)
    landed = []
    for _ in range(2):
        with repository.transaction("main", message="derived", once=once) as store:
            _put(store.session, 3)
        landed.append(store.session.already_committed)
    assert landed == [False, True]
    with pytest.raises(ConflictError, match="an input of this commit"):
        late.commit("late", rebase_with=ConflictDetector(), unchanged=["a"])
    assert not late.already_committed
    assert not late.fork().already_committed
    assert not pickle.loads(pickle.dumps(repository.readonly_session("main"))).already_committed


def _put(session: Session, index: int) -> None:
    zarr.open_array(session.store, path="a")[index] = 9


def test_the_chunks_that_a_collection_deleted_are_named_until_they_are_written_again() -> None:
    """By array, coordinates as rows; none before, none for readers."""
    repository = Repository.create(memory_url())
    session = repository.writable_session("main")
    array = zarr.create_array(
        session.store, name="a", shape=(3000,), chunks=(1000,), dtype="f8", compressors=None
    )
    array[:2000] = 1.5
    assert session.collected_chunks == {}
    repository.garbage_collect(datetime.now(UTC))
    with pytest.raises(IcechunkError, match="Garbage was collected"):
        session.commit("refused")
    lost = session.collected_chunks
    assert {path: rows.tolist() for path, rows in lost.items()} == {"/a": [[0], [1]]}
    array[:2000] = 1.5
    assert session.collected_chunks == {}
    session.commit("all there")
    assert repository.readonly_session("main").collected_chunks == {}


def test_a_solver_refuses_another_word_for_the_chunk_that_is_kept() -> None:
    """When it is made, not in the middle of a commit."""
    wrong: Any
    for wrong in ("ours", 1, None, []):
        with pytest.raises(InvalidInputError, match=r"VersionSelection\.UseOurs"):
            BasicConflictSolver(on_chunk_conflict=wrong)
