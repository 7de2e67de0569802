"""Dask arrays written by threads, processes and clusters, merged into one change set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from dask.local import get_sync

import icechunk_async.sync as icechunk
from icechunk_async.sync.dask import (
    SimpleGraph,
    computing_meta,
    merge_sessions_array_kwargs,
    session_merge_reduction,
    store_dask,
)
from icechunk_async.sync.distributed import extract_session, merge_sessions
from tests.unit.dask_processes import process_pool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VALUES = np.arange(9000, dtype="i4").reshape(100, 90)


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[icechunk.Repository]:
    """Make a repository with an array of 10 x 3 chunks."""
    storage = icechunk.local_filesystem_storage(str(tmp_path / "repository"))
    with icechunk.Repository.create(storage) as repository:
        session = repository.writable_session("main")
        _array(session, "a")
        session.commit("empty")
        yield repository


def _array(session: icechunk.Session, name: str) -> None:
    zarr.create_array(session.store, name=name, shape=(100, 90), chunks=(10, 30), dtype="i4")


def _open(session: icechunk.Session, name: str = "a") -> zarr.Array[Any]:
    return zarr.open_array(session.store, path=name, mode="r" if session.read_only else "r+")


def _committed(repository: icechunk.Repository, name: str = "a") -> Any:
    return _open(repository.readonly_session("main"), name)[:]


@pytest.mark.parametrize("scheduler", ["threads", "processes", "sync"])
def test_blocks_are_written_wherever_they_are_computed(
    repository: icechunk.Repository, scheduler: str
) -> None:
    """Blocks of several chunks each; the tree of merges has several levels."""
    session = repository.writable_session("main")
    _array(session, "b")  # not committed when the workers begin
    fork = session.fork()
    source = da.from_array(VALUES, chunks=(20, 30))
    with dask.config.set(pool=process_pool() if scheduler == "processes" else None):
        merged = store_dask(
            sources=[source, source + 1],
            targets=[_open(fork), _open(fork, "b")],
            split_every=2,
            scheduler=scheduler,
        )
    assert not session.status().updated_chunks
    session.merge(merged)
    session.commit("filled")
    assert (_committed(repository) == VALUES).all()
    assert (_committed(repository, "b") == VALUES + 1).all()


@pytest.mark.filterwarnings("default")  # the cluster's own, about its processes and ports
def test_a_cluster_writes_too(repository: icechunk.Repository, cluster: Any) -> None:
    """Workers are processes that never saw the repository."""
    session = repository.writable_session("main")
    with cluster.get_client():
        source = da.from_array(VALUES, chunks=(10, 30))
        session.merge(store_dask(sources=[source], targets=[_open(session.fork())]))
    session.commit("filled")
    assert (_committed(repository) == VALUES).all()


def test_regions_are_filled_and_the_rest_stays(repository: icechunk.Repository) -> None:
    """Blocks may begin and end inside of a chunk, if no other block is in it."""
    session = repository.writable_session("main")
    source = da.from_array(VALUES[:45, :60], chunks=((5, 30, 10), 30))
    region = (slice(15, 60), slice(30, 90))
    merged = store_dask(sources=[source], targets=[_open(session.fork())], regions=[region])
    session.merge(merged)
    session.commit("a part")
    expected = np.zeros_like(VALUES)
    expected[region] = VALUES[:45, :60]
    assert (_committed(repository) == expected).all()


@pytest.mark.parametrize(
    ("chunks", "region"),
    [
        ((25, 30), None),
        ((10, 45), None),
        ((10, 30), (slice(5, 100), slice(None))),
    ],
)
def test_blocks_that_share_a_chunk_are_refused_before_anything_is_written(
    repository: icechunk.Repository, chunks: Any, region: Any
) -> None:
    """One could overwrite the other's part."""
    session = repository.writable_session("main")
    rows = 100 if region is None else 95
    source = da.from_array(VALUES[:rows], chunks=chunks)
    fork = session.fork()
    with pytest.raises(icechunk.InvalidInputError, match="Rechunk the source"):
        store_dask(
            sources=[source], targets=[_open(fork)], regions=None if region is None else [region]
        )
    assert not fork.has_uncommitted_changes


def test_wrong_arguments_are_named(repository: icechunk.Repository) -> None:
    """Before anything is computed."""
    fork = repository.writable_session("main").fork()
    source = da.from_array(VALUES, chunks=(10, 30))
    with pytest.raises(icechunk.InvalidInputError, match="0 sources"):
        store_dask(sources=[], targets=[])
    with pytest.raises(icechunk.InvalidInputError, match="2 sources and 1 targets"):
        store_dask(sources=[source, source], targets=[_open(fork)])
    with pytest.raises(icechunk.InvalidInputError, match="2 regions"):
        store_dask(sources=[source], targets=[_open(fork)], regions=[(slice(None),) * 2] * 2)
    with pytest.raises(icechunk.InvalidInputError, match="compute, lock"):
        store_dask(sources=[source], targets=[_open(fork)], lock=True, compute=False)


def test_targets_are_arrays_of_a_fork(repository: icechunk.Repository) -> None:
    """A session would be committed without the values, which are in the fork that is returned."""
    session = repository.writable_session("main")
    source = da.from_array(VALUES, chunks=(10, 30))
    for target in (_open(session), _open(repository.readonly_session("main"))):
        with pytest.raises(icechunk.InvalidInputError, match=r"'a' is .* Session\.fork\(\)\.store"):
            store_dask(sources=[source], targets=[target], scheduler="sync")
    assert not session.has_uncommitted_changes


def test_a_worker_that_fails_makes_nothing_visible(repository: icechunk.Repository) -> None:
    """Its error arrives; the session has none of the changes."""

    def fail(block: Any) -> Any:
        raise ValueError(f"no data: {block.shape}")

    session = repository.writable_session("main")
    source = da.from_array(VALUES, chunks=(10, 30)).map_blocks(
        fail, dtype="i4", meta=np.empty((0, 0), "i4")
    )
    with pytest.raises(ValueError, match="no data"):
        store_dask(sources=[source], targets=[_open(session.fork())], scheduler="threads")
    assert not session.has_uncommitted_changes


def test_sessions_are_found_and_merged(repository: icechunk.Repository) -> None:
    """Nested as reductions leave them; one that is there twice counts once."""
    session = repository.writable_session("main")
    forks = [session.fork() for _ in range(3)]
    for number, fork in enumerate(forks):
        _open(fork)[number * 10 : (number + 1) * 10] = number + 1
    assert extract_session(_open(forks[0])) == forks[0]
    merged = merge_sessions([forks[0], [forks[1]]], forks[0], (forks[2],))
    assert merged is forks[0]
    session.merge(merged)
    session.commit("three")
    assert (np.unique(_committed(repository)) == [0, 1, 2, 3]).all()
    with pytest.raises(icechunk.InvalidInputError, match="no forks"):
        merge_sessions()
    with pytest.raises(icechunk.InvalidInputError, match="Session"):
        merge_sessions(session)  # type: ignore[arg-type]
    with pytest.raises(icechunk.InvalidInputError, match="MemoryStore"):
        extract_session(zarr.create_array({}, shape=(1,), dtype="i4"))


def test_arrays_whose_blocks_are_arrays_of_forks_are_merged(
    repository: icechunk.Repository,
) -> None:
    """As ``dask.array.store`` answers them, for those who write by themselves."""
    session = repository.writable_session("main")
    target = _open(session.fork())
    stored = da.store(
        [da.from_array(VALUES, chunks=(50, 90))],
        [cast("Any", target)],
        lock=False,
        compute=False,
        return_stored=True,
        load_stored=False,
    )
    array = stored[0] if isinstance(stored, tuple) else stored
    merged = session_merge_reduction(array, split_every=None, scheduler="sync")
    again = merge_sessions_array_kwargs([merged], merged, axis=(0,), keepdims=False)
    assert again is merged
    session.merge(merged)
    session.commit("merged")
    assert (_committed(repository) == VALUES).all()


def test_a_reduction_is_asked_for_its_type_without_running() -> None:
    """Dask does so once, on no data."""

    @computing_meta
    def merge(*_: Any, **__: Any) -> str:
        return "merged"

    assert merge(computing_meta=False) == "merged"
    assert merge(computing_meta=True).dtype == object


def test_a_graph_is_tasks_by_key() -> None:
    """Dask runs graphs of this form."""
    graph: SimpleGraph = {"two": (len, [1, 2])}
    assert get_sync(graph, "two") == 2
