"""Write arrays through zarr.

From numbers in memory to a commit, on the local disk, one object a chunk. Ours is synced to the
disk when the commit returns, and so is TensorStore's; the official engine's and zarr's are not.
Before each turn everything that is still to be written to the disk is written, so that nobody pays
for another, and no file is deleted before the end, since creating others is slow for minutes then.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.contest import FLOOR
from benchmarks.peers import (
    IdleStore,
    chunked,
    create,
    numbers,
    other_stores,
    pipeline,
)
from benchmarks.results import ZARR_ALONE
from benchmarks.tensorstores import tensorstore_array

if TYPE_CHECKING:
    import numpy as np

    from benchmarks.attic import Attic
    from benchmarks.contest import Contest

DURABILITY = "ours and TensorStore's are synced to the disk, the others are not"


def _write_files(data: np.ndarray[Any, Any], file_bytes: int, directory: str) -> None:
    Path(directory).mkdir()
    view = memoryview(data).cast("B")
    for number, begin in enumerate(range(0, len(view), file_bytes)):
        descriptor = os.open(f"{directory}/{number}", os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, view[begin : begin + file_bytes])
        os.close(descriptor)


@pytest.mark.parametrize("codecs", ["default", "fused", "icechunk"])
@pytest.mark.parametrize(
    ("count", "chunk_bytes", "target"),
    [(10_000, 10_000, 1.2), (1000, 2**20, 1.0), (20_000, 400, None)],
    ids=["10-kb", "1-mb", "inline"],
)
def test_write(
    contest: Contest,
    tmp_path: Path,
    attic: Attic,
    codecs: str,
    count: int,
    chunk_bytes: int,
    target: float | None,
) -> None:
    """``a[:] = numbers``, and what makes it last."""
    chunks = contest.pick(20, count)
    inline = chunk_bytes < 512
    data = numbers(chunks, chunk_bytes)

    def fresh(name: str) -> str:
        attic.put_away(tmp_path / name)
        os.sync()
        return str(tmp_path / name)

    def engine(name: str) -> Any:
        def write(directory: str) -> None:
            repository = create(name, directory, inline=512 if inline else 0)
            session = repository.writable_session("main")
            chunked(session.store, chunks, chunk_bytes)[:] = data
            session.commit("filled")

        return write

    def plain(name: str) -> Any:
        def write(directory: str) -> None:
            chunked(other_stores(directory)[name], chunks, chunk_bytes)[:] = data

        return write

    def tensorstore(driver: str) -> Any:
        def write(directory: str) -> None:
            tensorstore_array(driver, directory, chunks, chunk_bytes).write(data).result()

        return write

    def alone(_: str) -> None:
        chunked(IdleStore(chunk_bytes), chunks, chunk_bytes)[:] = data

    plain_names = ("zarr LocalStore", "zarr ObjectStore (obstore)")
    size = "400 B, inline" if inline else "10 KB" if chunk_bytes < 2**20 else "1 MB"
    with pipeline(codecs):
        contest.race(
            f"zarr: write {chunks:,} chunks of {size}, {codecs} pipeline",
            {
                "ours": engine("ours"),
                "official": engine("official"),
                **{name: plain(name) for name in plain_names},
                **{f"tensorstore {it}": tensorstore(it) for it in ("zarr3", "ocdbt")},
                ZARR_ALONE: alone,
                FLOOR: partial(_write_files, data, chunk_bytes),
            },
            rounds=3,
            warmup_rounds=0,
            setup=fresh,
            targets={} if target is None else {"official": target},
            floor="create, write and close the files",
            note=DURABILITY,
        )
    for path in list(tmp_path.iterdir()):
        attic.put_away(path)
