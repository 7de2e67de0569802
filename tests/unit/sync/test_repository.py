"""Blocking repositories: their lifetime, and what they are made from."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async import errors
from icechunk_async._runtime.blocking import portal
from icechunk_async.format.operations_log import Availability
from icechunk_async.format.operations_log import RepoStatus as StoredStatus
from icechunk_async.storage import open_storage
from icechunk_async.sync import (
    InvalidInputError,
    RefNotFoundError,
    RepoAvailability,
    Repository,
    SessionStateError,
    Storage,
    StorageError,
    in_memory_storage,
    local_filesystem_storage,
)
from icechunk_async.versions import CellChanges, ChunkChanges
from icechunk_async_memory import MemoryStorage
from tests.helpers import memory_url

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from icechunk_async.storage import Storage as AsyncStorage


@pytest.mark.parametrize("spec", [1, 2])
def test_a_repository_from_creation_to_time_travel(spec: int, tmp_path: Path) -> None:
    """Blocking from end to end, with zarr's blocking functions."""
    with Repository.create(tmp_path / "repository", spec_version=spec) as repository:
        session = repository.writable_session("main")
        root = zarr.open_group(session.store, mode="w")
        array = root.create_array("a", shape=(10,), chunks=(5,), dtype="i4")
        array[:] = np.arange(10)
        assert session.has_uncommitted_changes
        assert session.status().new_arrays == {"/a"}
        first = session.commit("first", {"by": "test"})
        assert isinstance(first, str)
        repository.create_tag("v1", first)
        session = repository.writable_session("main")
        zarr.open_array(session.store, path="a")[0] = 99
        second = session.commit("second")
        tagged = zarr.open_array(repository.readonly_session(tag="v1").store, path="a", mode="r")
        newest = zarr.open_array(repository.readonly_session("main").store, path="a", mode="r")
        assert (tagged[0], newest[0]) == (0, 99)
        assert [info.id for info in repository.ancestry(branch="main")][:2] == [second, first]
        assert repository.list_tags() == {"v1"}


@pytest.mark.parametrize("form", ["path", "text", "url", "storage", "described"])
def test_a_place_is_given_in_many_ways(form: str, tmp_path: Path) -> None:
    """As the official engine asks for it, or as the library does."""
    root = tmp_path / "repository"
    forms: dict[str, Any] = {
        "path": root,
        "text": str(root),
        "url": root.as_uri(),
        "storage": local_filesystem_storage(str(root)),
        "described": Storage.from_url(root),
    }
    repository = Repository.create(forms[form])
    assert Repository.exists(root)
    assert Repository.open(repository.storage).list_branches() == {"main"}


def test_one_slash_after_a_scheme_is_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark writes `file:/...`, Databricks `dbfs:/...`; each made a directory of that name here."""
    monkeypatch.chdir(tmp_path)
    for look in (Repository.create, Repository.open, Repository.exists):
        with pytest.raises(StorageError, match="'dbfs:/mnt/x' has one slash after its scheme"):
            look("dbfs:/mnt/x")
        with pytest.raises(StorageError, match="URL is empty"):
            look("")
    Repository.create(f"file:{tmp_path}/repository")
    assert [it.name for it in tmp_path.iterdir()] == ["repository"]


async def _enter(manager: AbstractAsyncContextManager[AsyncStorage]) -> AsyncStorage:
    return await manager.__aenter__()


async def _leave(manager: AbstractAsyncContextManager[AsyncStorage]) -> None:
    await manager.__aexit__(None, None, None)


def test_an_open_storage_is_used_left_open_and_described_in_pickles() -> None:
    """It stays its owner's."""
    manager = open_storage(memory_url())
    storage = portal.run(_enter(manager))
    with Repository.create(storage) as repository:
        copy = pickle.loads(pickle.dumps(repository))
        assert copy.list_branches() == {"main"}
    assert Repository.exists(storage)
    portal.run(_leave(manager))


def test_errors_are_of_both_families() -> None:
    """Handlers written for the official engine catch them, and those written for the library."""
    repository = Repository.create(in_memory_storage())
    with pytest.raises(RefNotFoundError) as caught:
        repository.lookup_branch("other")
    assert isinstance(caught.value, errors.BranchNotFoundError)
    assert caught.value.__cause__ is None  # the same sentence once more
    with pytest.raises(InvalidInputError):
        repository.ancestry(branch="main", tag="v1")
    with pytest.raises(errors.InvalidRefNameError) as refused:
        repository.delete_branch("main")
    assert isinstance(refused.value, SessionStateError)
    assert refused.value.kind == "cannot-delete-main"


def test_a_repository_closes_when_asked_and_not_before() -> None:
    """A store alone keeps it open; closing ends it for all, and for good."""
    url = memory_url()
    repository = Repository.create(url)
    session = repository.writable_session("main")
    zarr.open_group(session.store, mode="w")
    session.commit("group")
    store = Repository.open(url).readonly_session("main").store
    gc.collect()
    assert zarr.open_group(store, mode="r").attrs.asdict() == {}
    repository.close()
    repository.close()
    with pytest.raises(errors.StorageClosedError):
        repository.list_branches()
    copy = pickle.loads(pickle.dumps(repository))
    assert copy.list_branches() == {"main"}
    copy.close()
    with pytest.raises(errors.StorageClosedError):
        copy.list_branches()


def test_what_was_opened_is_closed_with_its_last_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No with block is needed in a notebook."""
    closed: list[str] = []
    close = MemoryStorage.close

    def noticed(storage: MemoryStorage) -> Any:
        closed.append(repr(storage))
        return close(storage)

    monkeypatch.setattr(MemoryStorage, "close", noticed)
    url = memory_url()
    repository = Repository.create(url)
    store = repository.writable_session("main").store
    del repository
    gc.collect()
    mine = f"MemoryStorage({url!r})"
    assert mine not in closed
    del store
    gc.collect()
    # The loop's thread may hold what it answered until its next turns, and closing takes some.
    for _ in range(1000):
        if mine in closed:
            break
        portal.run(asyncio.sleep(0))
    assert closed.count(mine) == 1
    assert Repository.exists(url)


def test_a_repository_that_is_closed_while_it_opens_does_not_stay_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread closes it, and the waiting caller gets an error."""
    begun, let_go = threading.Event(), threading.Event()
    closed: list[MemoryStorage] = []
    get, close = MemoryStorage.get, MemoryStorage.close

    async def held(storage: MemoryStorage, key: str) -> Any:
        begun.set()
        await asyncio.to_thread(let_go.wait)
        return await get(storage, key)

    def noticed(storage: MemoryStorage) -> Any:
        closed.append(storage)
        return close(storage)

    copy = pickle.loads(pickle.dumps(Repository.create(memory_url())))
    monkeypatch.setattr(MemoryStorage, "get", held)
    monkeypatch.setattr(MemoryStorage, "close", noticed)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(copy.list_branches)
        assert begun.wait(60)
        before = len(closed)
        copy.close()
        let_go.set()
        with pytest.raises(errors.StorageClosedError):
            answer.result()
    assert len(closed) == before + 1


def test_many_tasks_of_many_loops_share_a_repository() -> None:
    """They await it on any loop. Its connections belong to a single one."""
    repository = Repository.create(in_memory_storage())

    async def many() -> set[str]:
        calls = [repository.lookup_branch_async("main") for _ in range(50)]
        return set(await asyncio.gather(*calls))

    assert asyncio.run(many()) == asyncio.run(many()) == {repository.lookup_branch("main")}


def test_reopening_lays_over_and_replaces() -> None:
    """As its documentation says; the copy that is pickled says the same."""
    from icechunk_async.sync import RepositoryConfig

    repository = Repository.create(
        in_memory_storage(), RepositoryConfig(inline_chunk_threshold_bytes=3)
    )
    again = repository.reopen(RepositoryConfig(max_concurrent_requests=7))
    for each in (again, pickle.loads(pickle.dumps(again))):
        assert each.config.inline_chunk_threshold_bytes == 3
        assert each.config.max_concurrent_requests == 7
    assert repository.config.max_concurrent_requests != 7


def test_a_repository_that_is_offline_counts_as_read_only() -> None:
    """The official package has no word for it; an engine may have stored it."""
    with Repository.create(in_memory_storage()) as repository:
        offline = StoredStatus(Availability.OFFLINE, 0, "moving")
        portal.run(
            repository.handle.ask(
                lambda it: it.engine.state_to_change("status").set_status(offline)
            )
        )
        assert repository.status.availability is RepoAvailability.read_only
        assert repository.status.limited_availability_reason == "moving"


def test_creating_and_opening_are_logged_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    """With the place and the format, as `ICECHUNK_LOG=debug` shows them."""
    caplog.set_level(logging.DEBUG, "icechunk_async")
    url = memory_url()
    with Repository.create(url, spec_version=1):
        assert f"created repository {url!r} of format version 1" in caplog.messages
        assert not any("opened" in it for it in caplog.messages)
    with Repository.create(memory_url()) as repository:
        repository.reopen().close()
    assert sum("opened repository" in it for it in caplog.messages) == 1


def test_changes_are_told_to_blocking_callers() -> None:
    """As columns, as values, and by the commit that wrote each chunk."""
    with Repository.create(in_memory_storage()) as repository:
        session = repository.writable_session("main")
        array = zarr.create_array(session.store, name="a", data=np.ones(4), chunks=(2,))
        begin = session.commit("ones")
        session = repository.writable_session("main")
        array = zarr.open_array(session.store, path="a")
        array[2:] = 5
        tip = session.commit("fives")
        (chunks,) = repository.changes(begin)
        assert isinstance(chunks, ChunkChanges)
        assert (chunks.path, chunks.coords.tolist()) == ("/a", [[1]])
        (cells,) = repository.changes(begin, level="cell")
        assert isinstance(cells, CellChanges)
        assert (cells.before.tolist(), cells.after.tolist()) == ([1, 1], [5, 5])
        assert [it.path for it in repository.changed_cells(begin, paths=["a"])] == ["/a"]
        with pytest.raises(InvalidInputError, match="level must be"):
            next(repository.changes(begin, level="row"))  # type: ignore[arg-type]
        (values,) = repository.diff_values(begin, tip)
        assert (values.changed, values.mean_change) == (2, 4.0)
        found = repository.blame("a")
        assert [str(found.commits[it].id) for it in found.written_by.tolist()] == [begin, tip]

        async def same() -> int:
            async with contextlib.aclosing(repository.changes_async(begin, tip)) as changes:
                return len([it async for it in changes])

        assert asyncio.run(same()) == 1
        assert len([*repository.changed_cells_async(begin, tip)]) == 1
