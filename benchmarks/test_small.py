"""Small repositories on the local disk.

What a program does that opens a repository for one chunk. Blocking classes of both engines; ours
is synced to the disk when a commit returns, the official engine's is not: it makes no call that
waits for the disk. *Ours, never synced* is opened with `durability: none`. TensorStore syncs each
chunk.
"""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zarr

from benchmarks.contest import FLOOR
from benchmarks.floors import sync_a_file
from benchmarks.peers import chunked, create, open_repository, other_stores, tip_store
from benchmarks.tensorstores import tensorstore_array
from icechunk_async.sync.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.contest import Contest

ENGINES = ("ours", "official")
DRIVERS = ("zarr3", "ocdbt")
UNSYNCED = "ours, never synced"
CHUNKS = 10
CHUNK_BYTES = 8000
SYNCED = "write a small file and sync it"


def _fill(folder: Path, spec: int) -> None:
    """Make one array for everybody."""
    for engine in ENGINES:
        session = create(engine, str(folder / engine), spec=spec).writable_session("main")
        chunked(session.store, CHUNKS, CHUNK_BYTES)[:] = 1
        session.commit("filled")
    chunked(other_stores(str(folder / "plain"))["zarr LocalStore"], CHUNKS, CHUNK_BYTES)[:] = 1
    for driver in DRIVERS:
        array = tensorstore_array(driver, str(folder / driver), CHUNKS, CHUNK_BYTES)
        array.write(1.0).result()


@pytest.mark.parametrize("spec", [2, 1])
def test_open_cold(contest: Contest, tmp_path: Path, spec: int) -> None:
    """Open, and read one number."""
    _fill(tmp_path, spec)

    def through_zarr(store: Callable[[], Any]) -> Callable[[], object]:
        return lambda: zarr.open_array(store(), path="a", mode="r")[2000]

    def tensorstore(driver: str) -> Callable[[], object]:
        def read() -> object:
            array = tensorstore_array(
                driver, str(tmp_path / driver), CHUNKS, CHUNK_BYTES, is_new=False
            )
            return array[2000].read().result()

        return read

    # Both engines open the same files.
    directory = str(tmp_path / "official")
    work: dict[str, Callable[[], object]] = {
        "ours": through_zarr(lambda: tip_store("ours", directory)),
        "official": through_zarr(lambda: tip_store("official", directory)),
        "zarr LocalStore": through_zarr(
            lambda: other_stores(str(tmp_path / "plain"))["zarr LocalStore"]
        ),
        **{f"tensorstore {driver}": tensorstore(driver) for driver in DRIVERS},
    }
    for name, read in work.items():
        assert read() == 1, name

    def read_files() -> None:
        folder = Path(directory)
        for path in (*folder.glob("repo"), *folder.glob("refs/*/*"), *folder.glob("snapshots/*")):
            path.read_bytes()
        for kind in ("manifests", "chunks"):
            next((folder / kind).iterdir()).read_bytes()

    contest.race(
        f"local: open cold and read a chunk, format {spec}",
        {**work, FLOOR: read_files},
        rounds=15,
        floor="read the same files",
    )


@pytest.mark.parametrize("spec", [2, 1])
def test_commit(contest: Contest, tmp_path: Path, spec: int) -> None:
    """Change a chunk and make it last."""
    _fill(tmp_path, spec)
    values = count(2)
    folder = tmp_path / "unsynced"
    shutil.copytree(tmp_path / "ours", folder)
    unsynced = Storage(folder.as_uri(), {"durability": "none"})

    def engine(name: str, storage: Any = None) -> Callable[[], None]:
        repository = open_repository(name, storage or str(tmp_path / name))

        def commit() -> None:
            session = repository.writable_session("main")
            zarr.open_array(session.store, path="a")[:1000] = next(values)
            session.commit("one chunk")

        return commit

    def tensorstore(driver: str) -> Callable[[], None]:
        array = tensorstore_array(driver, str(tmp_path / driver), CHUNKS, CHUNK_BYTES, is_new=False)
        return lambda: array[:1000].write(float(next(values))).result()

    contest.race(
        f"local: change a chunk and commit, format {spec}",
        {
            **{name: engine(name) for name in ENGINES},
            UNSYNCED: engine("ours", unsynced),
            **{f"tensorstore {driver}": tensorstore(driver) for driver in DRIVERS},
            FLOOR: lambda: sync_a_file(tmp_path),
        },
        rounds=15,
        floor=SYNCED,
    )


@pytest.mark.parametrize("spec", [2, 1])
def test_create(contest: Contest, tmp_path: Path, spec: int) -> None:
    """Create a repository, write ten chunks and commit."""

    def fresh(name: str) -> str:
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        return str(tmp_path / name)

    def engine(name: str) -> Callable[[str], None]:
        def work(directory: str) -> None:
            session = create(name, directory, spec=spec).writable_session("main")
            chunked(session.store, CHUNKS, CHUNK_BYTES)[:] = 1
            session.commit("filled")

        return work

    contest.race(
        f"local: create, write ten chunks and commit, format {spec}",
        {**{name: engine(name) for name in ENGINES}, FLOOR: lambda _: sync_a_file(tmp_path)},
        rounds=11,
        setup=fresh,
        floor=SYNCED,
    )
