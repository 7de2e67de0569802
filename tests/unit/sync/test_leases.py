"""Leases through the facade."""

from __future__ import annotations

import asyncio
import pickle
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
import zarr
import zarr.api.asynchronous

from icechunk_async import sync as icechunk
from tests.helpers import memory_url


def test_leased_sessions_are_listed_spared_and_ended() -> None:
    """Also from code that blocks."""
    repository = icechunk.Repository.create(memory_url())
    session = repository.writable_session("main", lease=timedelta(hours=1), owner="me")
    (listed,) = repository.sessions()
    assert (str(listed.session_id), listed.owner) == (session.session_id, "me")
    array = zarr.create_array(session.store, name="a", shape=(2000,), chunks=(1000,), dtype="f8")
    array[:] = 1.5
    repository.garbage_collect(datetime.now(UTC))
    session.commit("kept")
    read = zarr.open_array(repository.readonly_session("main").store, path="a", mode="r")
    assert np.array_equal(np.asarray(read[:]), np.full(2000, 1.5))
    other = repository.writable_session("main", lease=True)
    repository.end_session(other.session_id)
    zarr.create_array(other.store, name="b", shape=(1,), dtype="f8")
    with pytest.raises(icechunk.SessionStateError, match="was ended"):
        other.commit("ended")
    with pytest.raises(icechunk.NotFoundError):
        repository.end_session("0" * 20)
    repository.close()


def test_a_session_is_spilled_and_resumed() -> None:
    """By its id, through another repository object."""
    url = memory_url()
    repository = icechunk.Repository.create(url)
    session = repository.writable_session("main", lease=True)
    zarr.create_array(session.store, name="a", shape=(5,), chunks=(5,), dtype="f8")[:] = 2.5
    session.spill()
    other = icechunk.Repository.open(url)
    resumed = other.resume_session(session.session_id, owner="second")
    assert np.array_equal(np.asarray(zarr.open_array(resumed.store, path="a")[:]), np.full(5, 2.5))
    with pytest.raises(icechunk.SessionStateError, match="'second' continues"):
        session.spill()
    with pytest.raises(icechunk.SessionStateError, match="A fork cannot be spilled"):
        resumed.fork().spill()
    resumed.commit("resumed")
    repository.close()
    other.close()


def test_forks_publish_and_see_each_other_before_the_one_commit() -> None:
    """Also after they were pickled, and through xarray's and Zarr's own stores."""
    repository = icechunk.Repository.create(memory_url())
    session = repository.writable_session("main", lease=True)
    zarr.create_array(session.store, name="a", shape=(4,), chunks=(1,), dtype="f8", fill_value=0)
    one, two = session.fork(), pickle.loads(pickle.dumps(session.fork()))
    zarr.open_array(one.store, path="a")[0] = 1.0
    assert one.publish()
    assert not one.publish()
    assert two.refresh()
    assert not two.refresh()
    array: Any = zarr.open_array(two.store, path="a")
    array[1] = array[0] + 1
    two.publish()
    assert session.refresh()
    assert not session.refresh()
    assert session.unmerged_forks == ()
    array = zarr.open_array(session.store, path="a")
    assert np.array_equal(np.asarray(array[:]), [1.0, 2.0, 0.0, 0.0])
    other = repository.writable_session("main").fork()
    with pytest.raises(icechunk.SessionStateError, match="lease=True"):
        other.publish()
    session.commit("one commit", allow_missing_forks=False)
    array[:1]  # a session that was committed reads on
    zarr.open_array(one.store, path="a")[2] = 3.0
    with pytest.raises(icechunk.SessionStateError, match="was committed as"):
        one.publish()
    repository.close()


async def test_publishing_and_refreshing_can_be_awaited() -> None:
    """On any loop."""
    repository = await icechunk.Repository.create_async(memory_url())
    session = await repository.writable_session_async("main", lease=True)
    fork = await asyncio.to_thread(session.fork)
    await zarr.api.asynchronous.create_array(fork.store, name="a", shape=(1,), dtype="f8")
    assert await fork.publish_async()
    assert await session.refresh_async()
    assert not await session.refresh_async()
    assert not fork.has_uncommitted_changes
    await session.commit_async("one commit")


async def test_the_awaitable_twins_do_the_same() -> None:
    """On any loop."""
    repository = await icechunk.Repository.create_async(memory_url())
    session = await repository.writable_session_async("main", lease=True)
    (listed,) = await repository.sessions_async()
    await session.spill_async()
    session = await repository.resume_session_async(session.session_id)
    await repository.end_session_async(session.session_id)
    assert str(listed.session_id) == session.session_id
    assert (await repository.sessions_async())[0].state.value == "ended"
