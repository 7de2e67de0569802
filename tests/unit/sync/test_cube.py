"""History as a dimension through the facade: blocking, pickled, and computed by Dask."""

from __future__ import annotations

import asyncio
import pickle
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
import zarr

import icechunk_async.sync as icechunk
from icechunk_async import Repository as AsyncRepository
from icechunk_async import errors
from icechunk_async.config import HttpStore, RepositoryConfig, VirtualChunkContainer
from icechunk_async.credentials import HttpBearerToken
from icechunk_async.datasets.cube import open_cube
from icechunk_async.errors import MissingDriverError
from icechunk_async.handles import Here

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from icechunk_async.engine.open import Engine, Origin

VERSIONS = 12


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[icechunk.Repository]:
    """Make a repository in which one chunk of an array of 4 x 2 chunks changes with each commit."""
    storage = icechunk.local_filesystem_storage(str(tmp_path / "repository"))
    with icechunk.Repository.create(storage) as repository:
        session = repository.writable_session("main")
        zarr.create_array(
            session.store, name="a", data=np.zeros((40, 40)), chunks=(10, 20), fill_value=0
        )
        session.commit("version 0")
        for number in range(1, VERSIONS):
            session = repository.writable_session("main")
            array = zarr.open_array(session.store, path="a")
            row, column = divmod(number % 8, 2)
            array[10 * row : 10 * row + 10, 20 * column : 20 * column + 20] = _noise(number)
            session.commit(f"version {number}")
        yield repository


def _noise(seed: int) -> Any:
    return np.random.default_rng(seed).random((10, 20))


def _stack(repository: icechunk.Repository) -> Any:
    infos = list(repository.ancestry(branch="main"))[:-1][::-1]
    sessions = [repository.readonly_session(snapshot_id=info.id) for info in infos]
    return np.stack(
        [np.asarray(zarr.open_array(it.store, path="a", mode="r")[:]) for it in sessions]
    )


def test_a_dataset_reads_when_it_is_looked_at(repository: icechunk.Repository) -> None:
    """Parts of it, and all; as a stack of checkouts."""
    dataset = repository.cube("/a")
    expected = _stack(repository)
    assert dataset.a.dims == ("known_at", "dim_0", "dim_1")
    np.testing.assert_array_equal(dataset.a[3, 5:25:2].values, expected[3, 5:25:2])
    np.testing.assert_array_equal(dataset.a.values, expected)
    last = next(iter(repository.ancestry(branch="main")))
    assert dataset.snapshot_id.values[-1] == last.id
    assert dataset.committed_at.values[-1] == np.datetime64(last.written_at.replace(tzinfo=None))


async def test_it_can_be_opened_on_an_event_loop(repository: icechunk.Repository) -> None:
    """And loaded there."""
    dataset = await (await repository.cube_async("a", limit=2)).load_async()
    assert dataset.a.shape == (2, 40, 40)


def test_a_pickled_dataset_opens_the_repository_again(repository: icechunk.Repository) -> None:
    """In a copy, which does not hold values."""
    expected = _stack(repository)
    data = pickle.dumps(repository.cube("a"))
    assert len(data) < expected.nbytes / 10
    repository.close()
    np.testing.assert_array_equal(pickle.loads(data).a.values, expected)


_ELSEWHERE = """
import pickle, sys
from pathlib import Path
dataset = pickle.loads(Path(sys.argv[1]).read_bytes())
print(dataset.a.values.tolist())
assert not [it for it in sys.modules if it.startswith("icechunk_async.sync")]
"""


async def _native_cube(place: Path) -> bytes:
    """Return the pickled dataset of an array, made by a repository of asyncio."""
    async with AsyncRepository.create(place) as repository:
        session = await repository.writable_session("main")
        await zarr.api.asynchronous.create_array(session.store, name="a", data=np.arange(3.0))
        await session.commit("three")
        return pickle.dumps(await repository.cube("a"))


async def test_that_of_a_native_repository_pickles_too(tmp_path: Path) -> None:
    """It opens in another process without the facade."""
    pickled = tmp_path / "pickled"
    pickled.write_bytes(await _native_cube(tmp_path / "native"))
    command = [sys.executable, "-c", _ELSEWHERE, str(pickled)]
    printed = await asyncio.to_thread(subprocess.check_output, command, encoding="utf-8")
    assert printed == "[[0.0, 1.0, 2.0]]\n"


async def test_that_of_a_native_repository_opens_as_that_did(tmp_path: Path) -> None:
    """With its options, credentials for virtual chunks and settings."""
    prefix, access = "https://elsewhere.example/data/", HttpBearerToken("secret")
    container = VirtualChunkContainer(prefix, HttpStore())
    async with AsyncRepository.create(
        tmp_path / "native",
        storage_options={"durability": "none"},
        config=RepositoryConfig(virtual_chunk_containers=(container,)),
        authorize_virtual_chunk_access={prefix: access},
        verify_reads=True,
    ) as repository:
        data = pickle.dumps(Here(repository.engine))
        expected = repository.engine.origin

    async def origin(it: Engine) -> Origin:
        return it.origin

    assert await pickle.loads(data).run_async(origin) == expected
    assert expected.storage_options["durability"] == "none"
    assert (expected.authorized, expected.verify_reads) == ({prefix: access}, True)


def test_that_of_a_native_repository_raises_native_errors(
    tmp_path: Path, repository: icechunk.Repository
) -> None:
    """And one of the facade its own, each also in a copy."""
    native = pickle.loads(asyncio.run(_native_cube(tmp_path / "native")))
    blocking = pickle.loads(pickle.dumps(repository.cube("a")))
    repository.close()
    for name in ("native", "repository"):
        shutil.rmtree(tmp_path / name)
    with pytest.raises(errors.RepositoryNotFoundError) as raised:
        _ = native.a.values
    assert not isinstance(raised.value, icechunk.IcechunkError)
    with pytest.raises(icechunk.IcechunkError):
        _ = blocking.a.values


@pytest.mark.parametrize(
    "scheduler", ["threads", "sync", pytest.param("processes", marks=pytest.mark.thorough)]
)
def test_dask_computes_blocks(repository: icechunk.Repository, scheduler: str) -> None:
    """Of one chunk in space and all versions, unless others are asked for.

    A cluster, below, shows processes in every run.
    """
    expected = _stack(repository)
    dataset = repository.cube("a", chunks={})
    assert dataset.a.chunks == ((VERSIONS,), (10,) * 4, (20,) * 2)
    assert repository.cube("a", chunks={"known_at": 5}).a.chunks[0] == (5, 5, 2)
    assert dataset.committed_at.chunks is None
    with dask.config.set(scheduler=scheduler):
        largest = dataset.a.diff("known_at").max("known_at").compute()
    np.testing.assert_array_equal(largest.values, np.diff(expected, axis=0).max(axis=0))


@pytest.mark.filterwarnings("default")  # the cluster's own, about its processes and ports
def test_a_cluster_computes_too(repository: icechunk.Repository, cluster: Any) -> None:
    """Workers are processes that never saw the repository."""
    expected = _stack(repository)
    dataset = repository.cube("a", chunks={"known_at": 6})
    with cluster.get_client():
        np.testing.assert_array_equal(dataset.a.values, expected)


def test_bad_input_raises_errors_of_the_facade(repository: icechunk.Repository) -> None:
    """One sentence each."""
    with pytest.raises(icechunk.IcechunkError, match="no values along history"):
        repository.cube("b")
    with pytest.raises(icechunk.IcechunkError, match="along='days'"):
        repository.cube("a", along="weeks")  # type: ignore[arg-type]


def test_xarray_is_not_imported_on_the_event_loop(
    repository: icechunk.Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes a second, for which all who use the facade would have to wait."""
    name, loops = open_cube.__module__, list[object]()

    class Finder:
        """Looks who imports the module."""

        @staticmethod
        def find_spec(module: str, *_: object) -> None:
            if module == name:
                loops.append(asyncio._get_running_loop())

    monkeypatch.setattr(icechunk, "cube", sys.modules[name], raising=False)  # put back at the end
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    repository.cube("a")
    assert loops == [None]


def test_a_missing_xarray_is_named(
    repository: icechunk.Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the extra that installs it."""
    monkeypatch.setitem(sys.modules, "xarray", None)
    monkeypatch.delitem(sys.modules, open_cube.__module__)
    with pytest.raises(ImportError, match=r"icechunk-async\[xarray\]") as caught:
        repository.cube("a")
    assert isinstance(caught.value, MissingDriverError | icechunk.IcechunkError)
