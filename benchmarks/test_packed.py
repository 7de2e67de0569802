"""Small chunks that share objects.

10,000 chunks of 10 KB, written through zarr, from numbers in memory to a commit. Ours once with
packing and once without; on the local disk ours is synced, the official engine's is not.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import tensorstore
import zarr

from benchmarks.peers import IdleStore, chunked, create, numbers, pipeline
from benchmarks.results import ZARR_ALONE
from benchmarks.s3_peers import BUCKET, blocking_storage, s3_options
from benchmarks.tensorstores import tensorstore_array
from icechunk_async import Packing, Repository

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.attic import Attic
    from benchmarks.contest import Contest
    from benchmarks.s3_server import S3Server

CHUNK_BYTES = 10_000
MOST_OBJECTS = 100
UNPACKED = "ours, without packing"


def _write(url: str, options: dict[str, Any], setting: Any, data: Any) -> None:
    """Write with our asynchronous classes on the loop that zarr runs."""
    sync = zarr.core.sync.sync
    stack = AsyncExitStack()
    creating: Any = Repository.create

    async def opened() -> Any:
        repository = creating(url, storage_options=options, packing=setting, probe=False)
        return await (await stack.enter_async_context(repository)).writable_session("main")

    try:
        session = sync(opened())
        chunked(session.store, len(data) * 8 // CHUNK_BYTES, CHUNK_BYTES)[:] = data
        sync(session.commit("filled"))
    finally:
        sync(stack.aclose())


def _write_official(storage: Any, data: Any) -> None:
    session = create("official", storage).writable_session("main")
    chunked(session.store, len(data) * 8 // CHUNK_BYTES, CHUNK_BYTES)[:] = data
    session.commit("filled")


def _write_ocdbt(directory: str, data: Any) -> None:
    """Write to TensorStore's database, which packs chunks, in one transaction."""
    array = tensorstore_array("ocdbt", directory, len(data) * 8 // CHUNK_BYTES, CHUNK_BYTES)
    transaction = tensorstore.Transaction()
    array.with_transaction(transaction).write(data).result()
    transaction.commit_async().result()


def _write_nowhere(data: Any) -> None:
    store = IdleStore(CHUNK_BYTES)
    chunked(store, len(data) * 8 // CHUNK_BYTES, CHUNK_BYTES)[:] = data


@pytest.mark.parametrize("codecs", ["default", "fused", "icechunk"])
def test_local(contest: Contest, tmp_path: Path, attic: Attic, codecs: str) -> None:
    """On the local disk."""
    count = contest.pick(50, 10_000)
    data = numbers(count, CHUNK_BYTES)

    def fresh(name: str) -> str:
        attic.put_away(tmp_path / name)
        # What the turn before left unwritten would be written in this one.
        os.sync()
        return str(tmp_path / name)

    def ours(setting: Any) -> Callable[[str], None]:
        return lambda directory: _write(f"file://{directory}", {}, setting, data)

    with pipeline(codecs):
        contest.race(
            f"local: write {count:,} chunks of 10 KB, packed, {codecs} pipeline",
            {
                "ours": ours(Packing()),
                UNPACKED: ours(Packing.off()),
                "official": lambda directory: _write_official(directory, data),
                # The one other format here that packs chunks into larger files.
                "tensorstore ocdbt": lambda directory: _write_ocdbt(directory, data),
                ZARR_ALONE: lambda _: _write_nowhere(data),
            },
            rounds=3,
            setup=fresh,
            targets={"official": 5, **({"tensorstore ocdbt": 0.5} if codecs == "icechunk" else {})},
        )
    objects = len(list((tmp_path / "ours" / "chunks").iterdir()))
    assert objects <= MOST_OBJECTS
    contest.add(
        f"local: write {count:,} chunks of 10 KB, packed, {codecs} pipeline",
        {"ours": [float(objects)], "official": [float(count)]},
        metric="objects",
    )


@pytest.mark.parametrize(
    ("codecs", "concurrency"),
    [("default", 10), ("default", 64), ("fused", 64), ("icechunk", 10)],
)
def test_far(contest: Contest, s3: S3Server, codecs: str, concurrency: int) -> None:
    """On S3, 20 ms away, with Zarr's default number of concurrent chunks, or more."""
    count = contest.pick(50, 10_000)
    data = numbers(count, CHUNK_BYTES)
    end = s3.endpoint("near" if contest.is_quick else "20 ms")

    def ours(setting: Any) -> Callable[[], None]:
        url = f"s3://{BUCKET}"
        return lambda: _write(f"{url}/{uuid4().hex}", s3_options(end), setting, data)

    with pipeline(codecs), zarr.config.set({"async.concurrency": concurrency}):
        contest.race(
            f"S3 20 ms away: write {count:,} chunks of 10 KB, packed, {codecs} pipeline, "
            f"{concurrency} at a time",
            {
                "ours": ours(Packing()),
                UNPACKED: ours(Packing.off()),
                "official": lambda: _write_official(
                    blocking_storage("official", end, uuid4().hex), data
                ),
                ZARR_ALONE: lambda: _write_nowhere(data),
            },
            rounds=3,
            targets={"official": 5},
        )
