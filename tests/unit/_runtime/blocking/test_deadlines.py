"""Deadlines for all calls in a block."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr

from icechunk_async._runtime.blocking import portal
from icechunk_async.storage import open_storage
from icechunk_async.sync import Repository, RepositoryConfig, deadline
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import memory_url

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractAsyncContextManager

    from icechunk_async.storage import Storage


_VALUES = [0.5, 1.5, 2.5, 3.5]


@pytest.fixture
def slow() -> Iterator[LatencyStorage]:
    """A storage with a repository, as slow as its ``seconds`` say; no call waits at first."""
    manager = open_storage(memory_url())
    storage = LatencyStorage(portal.run(_enter(manager)), seconds=0)
    with (
        Repository.create(storage, RepositoryConfig(inline_chunk_threshold_bytes=0)) as repository,
        repository.transaction("main", message="data") as store,
    ):
        array = zarr.create_array(store, name="a", shape=(4,), chunks=(1,), dtype="f8")
        array[:] = np.array(_VALUES)
    yield storage
    portal.run(_leave(manager))


async def _enter(manager: AbstractAsyncContextManager[Storage]) -> Storage:
    return await manager.__aenter__()


async def _leave(manager: AbstractAsyncContextManager[Storage]) -> None:
    await manager.__aexit__(None, None, None)


_LONGER_AND_LONGER = (0.05, 1, 20)
"""Deadlines in seconds: on a busy machine the first may pass before the work has started."""


class _Forever:
    """Runs until it is cancelled, and then takes a moment to clean up."""

    def __init__(self) -> None:
        self.began = False
        self.cleaned_up = False

    async def run(self) -> None:
        self.began = True
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            self.cleaned_up = True


async def _answer() -> int:
    return 42


def test_a_call_that_takes_too_long_is_cancelled_and_waited_for() -> None:
    """No work continues behind the caller's back."""
    for seconds in _LONGER_AND_LONGER:
        forever = _Forever()
        with pytest.raises(TimeoutError, match=r"deadline (had )?passed"), deadline(seconds):
            portal.run(forever.run())
        if forever.began:
            break
    assert forever.cleaned_up


async def test_awaited_calls_keep_it_too() -> None:
    """On whatever loop they are awaited."""
    for seconds in _LONGER_AND_LONGER:
        forever = _Forever()
        with pytest.raises(TimeoutError, match=r"deadline (had )?passed"), deadline(seconds):
            await portal.run_async(forever.run())
        if forever.began:
            break
    assert forever.cleaned_up


def test_after_it_nothing_begins_any_more() -> None:
    """The later calls of the block fail at once, and those after the block do not."""
    began: list[int] = []

    async def begin() -> None:
        began.append(1)

    with deadline(0.01):
        time.sleep(0.02)
        with pytest.raises(TimeoutError, match="nothing was done"):
            portal.run(begin())
    assert not began
    assert portal.run(_answer()) == 42


def test_the_earliest_counts() -> None:
    """An inner block cannot ask for more time than an outer one has."""
    with deadline(0.05), deadline(3600), pytest.raises(TimeoutError):
        portal.run(_Forever().run())
    with deadline(240):
        with pytest.raises(TimeoutError), deadline(0.05):
            portal.run(_Forever().run())
        assert portal.run(_answer()) == 42


def test_other_threads_are_not_concerned() -> None:
    """Unless they copy the context."""
    answers: list[int] = []
    with deadline(0):
        thread = threading.Thread(target=lambda: answers.append(portal.run(_answer())))
        thread.start()
        thread.join()
    assert answers == [42]


def test_a_timeout_of_the_work_itself_is_its_own() -> None:
    """It is not mistaken for ours."""

    async def fail() -> None:
        raise TimeoutError("the work's own")

    with pytest.raises(TimeoutError, match="the work's own"), deadline(240):
        portal.run(fail())


def test_what_zarr_reads_keeps_it(slow: LatencyStorage) -> None:
    """Zarr runs its own loop, with the caller's context."""
    repository = Repository.open(slow)
    store = repository.readonly_session("main").store
    array = zarr.open_array(store, path="a", mode="r")
    slow.seconds = 3600
    with pytest.raises(TimeoutError, match=r"deadline (had )?passed"), deadline(0.2):
        array[:]
    slow.seconds = 0
    assert np.asarray(array[:]).tolist() == _VALUES


def test_a_commit_that_was_cut_off_can_be_finished(slow: LatencyStorage) -> None:
    """No change is lost, and nothing is published twice."""
    repository = Repository.open(slow)
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="a")[0] = 99
    slow.seconds = 3600
    with pytest.raises(TimeoutError), deadline(0.2):
        session.commit("late")
    slow.seconds = 0
    tip = session.commit("late")
    assert repository.lookup_branch("main") == tip
    assert [info.message for info in repository.ancestry(branch="main")] == [
        "late",
        "data",
        "Repository initialized",
    ]
