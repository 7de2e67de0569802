"""Small requests to S3 through zarr.

Processor time of this process, since that is what bounds how many requests a second it can make.
The server is another process, on loopback. 64 requests at a time.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import zarr

from benchmarks.peers import IdleStore, chunked, create, numbers, tip_store
from benchmarks.results import ZARR_ALONE
from benchmarks.s3_peers import (
    BUCKET,
    OBSTORE,
    PLAIN,
    blocking_storage,
    plain_store,
    session_on_zarrs_loop,
)
from benchmarks.s3_server import KEYS
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.storage import open_storage
from icechunk_async_s3.connections import prepare
from icechunk_async_s3.options import make_options

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    import numpy as np

    from benchmarks.contest import Contest
    from benchmarks.s3_server import S3Server

CHUNK_BYTES = 8000


@pytest.fixture
def at_once() -> Iterator[None]:
    """Let zarr ask for 64 chunks at a time."""
    with zarr.config.set({"async.concurrency": 64}):
        yield


def opened(
    stack: ExitStack, end: str, count: int, chunk_bytes: int, *, filled: bool
) -> dict[str, Any]:
    """Open an array of everybody's own in a bucket, empty or filled and read-only."""
    data = numbers(count, chunk_bytes)
    arrays: dict[str, Any] = {}
    prefix = uuid4().hex
    for name in ("ours", OBSTORE):
        place = f"{prefix}/{name.replace(', ', '-').replace(' ', '-')}"
        if filled:
            session = create("ours", blocking_storage("ours", end, place)).writable_session("main")
            chunked(session.store, count, chunk_bytes)[:] = data
            session.commit("filled")
        session = stack.enter_context(session_on_zarrs_loop(name, end, place, writable=not filled))
        arrays[name] = _array(session.store, count, chunk_bytes, filled=filled)
    storage = blocking_storage("official", end, f"{prefix}/official")
    session = create("official", storage).writable_session("main")
    array = chunked(session.store, count, chunk_bytes)
    if filled:
        array[:] = data
        session.commit("filled")
        array = zarr.open_array(tip_store("official", storage), path="a", mode="r")
    arrays["official"] = array
    arrays[PLAIN] = chunked(plain_store(end, f"{prefix}/plain"), count, chunk_bytes)
    if filled:
        arrays[PLAIN][:] = data
    return arrays


def _array(store: Any, count: int, chunk_bytes: int, *, filled: bool) -> Any:
    if filled:
        return zarr.open_array(store, path="a", mode="r")
    return chunked(store, count, chunk_bytes)


def reading(array: Any, expected: np.ndarray[Any, Any]) -> Callable[[], None]:
    """Return a function that reads an array and checks its last value."""

    def read() -> None:
        assert array[:][-1] == expected[-1]

    return read


def writing(array: Any, data: np.ndarray[Any, Any]) -> Callable[[], None]:
    """Return a function that writes an array."""

    def write() -> None:
        array[:] = data

    return write


@pytest.mark.parametrize("metric", ["cpu seconds", "seconds"])
@pytest.mark.parametrize("method", ["GET", "PUT"])
@pytest.mark.usefixtures("at_once")
def test_small_requests(contest: Contest, s3: S3Server, method: str, metric: str) -> None:
    """Chunks of 8 KB, one object each, 64 at a time."""
    count = contest.pick(20, 1000)
    data = numbers(count, CHUNK_BYTES)
    make = reading if method == "GET" else writing
    with ExitStack() as stack:
        arrays = opened(stack, s3.endpoint(), count, CHUNK_BYTES, filled=method == "GET")
        work = {name: make(array, data) for name, array in arrays.items()}
        for name, one in work.items():
            s3.counts()
            one()
            # A request a chunk; repositories read a manifest once.
            assert count <= sum(s3.counts().values()) <= count + 4, name
        idle = chunked(IdleStore(CHUNK_BYTES), count, CHUNK_BYTES)
        work[ZARR_ALONE] = make(idle, data * 0)
        contest.race(
            f"S3: {method} 8 KB through zarr, 64 at a time",
            work,
            operations=count,
            metric=metric,
            rounds=15,
            targets={"official": 1} if metric == "cpu seconds" else {},
        )


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_beside_the_stock_client(contest: Contest, s3: S3Server, method: str) -> None:
    """The storage of ours beside the operations of the client library that it is built on."""
    count = contest.pick(20, 1000)
    options: dict[str, Any] = {"endpoint_url": s3.endpoint(), "allow_http": True, **KEYS}
    with asyncio.Runner() as runner:
        storage = open_storage(f"s3://{BUCKET}/{uuid4().hex}", **options)
        ours = runner.run(storage.__aenter__())
        wiring = prepare(make_options(None, options), BUCKET)
        client: Any = runner.run(wiring.stock.client())

        async def one_of_ours(key: str) -> None:
            if method == "GET":
                assert len((await ours.get(key)).data) == CHUNK_BYTES
            else:
                await ours.put(key, bytes(CHUNK_BYTES))

        async def one_of_theirs(key: str) -> None:
            if method == "GET":
                answer = await client.get_object(Bucket=BUCKET, Key=key)
                async with answer["Body"] as body:
                    assert len(await body.read()) == CHUNK_BYTES
            else:
                await client.put_object(Bucket=BUCKET, Key=key, Body=bytes(CHUNK_BYTES))

        keys = [f"chunks/{number}" for number in range(count)]
        if method == "GET":
            runner.run(_each(lambda key: ours.put(key, bytes(CHUNK_BYTES)), keys))
            runner.run(
                _each(
                    lambda key: client.put_object(Bucket=BUCKET, Key=key, Body=bytes(CHUNK_BYTES)),
                    keys,
                )
            )
        contest.race(
            f"S3: {method} 8 KB, the storage alone, 32 at a time",
            {
                "ours": lambda: runner.run(_each(one_of_ours, keys)),
                "aiobotocore": lambda: runner.run(_each(one_of_theirs, keys)),
            },
            operations=count,
            metric="cpu seconds",
            rounds=5,
        )
        runner.run(wiring.stock.close())
        runner.run(storage.__aexit__(None, None, None))


async def _each(one: Callable[[str], Awaitable[object]], keys: Sequence[str]) -> None:
    await bounded_map(one, keys, limit=32)
