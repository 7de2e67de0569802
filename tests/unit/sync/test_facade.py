"""Repositories and sessions for code that blocks."""

from __future__ import annotations

import gc
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

import icechunk_async
import icechunk_async.sync
from icechunk_async.errors import ConflictError, StorageClosedError
from icechunk_async.repository.conflicts import ConflictDetector
from icechunk_async.sync import Repository
from icechunk_async_memory import MemoryStorage
from tests.helpers import memory_url

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["Repository", "Session"])
def test_the_facade_offers_every_method_with_the_same_arguments(name: str) -> None:
    """Nothing that is asynchronous lacks its blocking form."""
    asynchronous = getattr(icechunk_async, name)
    blocking = getattr(icechunk_async.sync, name)
    for member, value in inspect.getmembers(asynchronous):
        if member.startswith("_") or not callable(value):
            continue
        wanted = inspect.signature(value)
        found = inspect.signature(getattr(blocking, member))
        assert list(found.parameters.values()) == list(wanted.parameters.values()), member
    properties = {
        member for member, value in inspect.getmembers(asynchronous) if isinstance(value, property)
    } - {"workspace", "spec_version"}
    assert properties <= set(dir(blocking))


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
        repository.create_tag("v1", first)
        session = repository.writable_session("main")
        zarr.open_array(session.store, path="a")[0] = 99
        second = session.commit("second", rebase_with=ConflictDetector())
        tagged = zarr.open_array(repository.readonly_session(tag="v1").store, path="a", mode="r")
        newest = zarr.open_array(repository.readonly_session("main").store, path="a", mode="r")
        assert (tagged[0], newest[0]) == (0, 99)
        assert [info.id for info in repository.ancestry(branch="main")][:2] == [second, first]
        diff = repository.diff(from_tag="v1", to_branch="main")
        assert diff.updated_chunks["/a"].tolist() == [[0]]
        assert repository.list_tags() == {"v1"}
        if spec == 2:
            assert len(list(repository.ops_log())) == 4
    assert Repository.exists(tmp_path / "repository")
    assert Repository.fetch_spec_version(tmp_path / "repository") == spec
    assert not Repository.exists(tmp_path / "elsewhere")


def test_errors_are_those_of_the_library() -> None:
    """With their data."""
    repository = Repository.create(memory_url())
    first = repository.writable_session("main")
    second = repository.writable_session("main")
    for session in (first, second):
        zarr.open_group(session.store, mode="w")
    first.commit("first")
    with pytest.raises(ConflictError) as caught:
        second.commit("second")
    assert caught.value.context["branch"] == "main"


def test_a_repository_closes_when_asked_and_not_before() -> None:
    """A store alone keeps it open; closing ends it for all."""
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
    with pytest.raises(StorageClosedError):
        repository.list_branches()


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
    assert Repository.exists(url)  # answered after what was asked for before
    assert closed.count(mine) == 2  # the repository's, and that of the look just now
