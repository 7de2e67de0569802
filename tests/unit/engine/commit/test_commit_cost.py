"""The number of requests that must follow one another, and the number of all requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from tests.helpers import make_array, memory_url, read, write

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

CHUNK = b"x" * 1000  # more than is stored inline


def run[T](work: Coroutine[Any, Any, T]) -> T:
    """Run on a loop whose clock jumps, so that seconds count requests in a row."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


async def _prepared(url: str, spec: int) -> None:
    async with Repository.create(url, spec_version=spec) as repository:
        session = await repository.writable_session("main")
        for number in range(3):
            await make_array(session, f"a{number}", (10,), (1,))
            await write(session, f"a{number}/c/0", CHUNK)
        await session.commit("first")


@pytest.mark.parametrize("spec", [1, 2])
def test_a_commit_is_two_requests_after_the_last_chunk(spec: int) -> None:
    """Manifests, snapshot, log and backup go together; then the reference moves."""

    async def scenario() -> tuple[float, dict[str, int]]:
        url = memory_url()
        await _prepared(url, spec)
        async with open_storage(url) as plain:
            storage = LatencyStorage(plain, seconds=1)
            async with Repository.open(storage) as repository:
                session = await repository.writable_session("main")
                for number in range(3):
                    await write(session, f"a{number}/c/1", CHUNK)
                await read(session, "a0/c/0")  # the manifests that will change are known
                await read(session, "a1/c/0")
                await read(session, "a2/c/0")
                storage.forget()
                begin = asyncio.get_running_loop().time()
                await session.commit("second")
                return asyncio.get_running_loop().time() - begin, dict(storage.requests)

    seconds, requests = run(scenario())
    assert seconds == 2
    # In format 2 the operations log tells whether garbage was collected, in format 1 a listing.
    more = {"copy": 1} if spec == 2 else {"list_prefix": 1}
    # One manifest of three arrays, a snapshot, a log, and the reference or the repo info.
    assert requests == {"put": 4, **more}


@pytest.mark.parametrize("spec", [1, 2])
def test_opening_and_reading_a_chunk_cold_is_four_requests_in_a_row(spec: int) -> None:
    """The repository's refs, the snapshot, the manifest, the chunk."""

    async def scenario() -> tuple[float, dict[str, int]]:
        url = memory_url()
        await _prepared(url, spec)
        async with open_storage(url) as plain:
            storage = LatencyStorage(plain, seconds=1)
            begin = asyncio.get_running_loop().time()
            async with Repository.open(storage) as repository:
                session = await repository.readonly_session("main")
                assert await read(session, "a1/c/0") == CHUNK
            return asyncio.get_running_loop().time() - begin, dict(storage.requests)

    seconds, requests = run(scenario())
    assert seconds == 4
    assert sum(requests.values()) == 7  # three to open, the ref and the snapshot at once, two more


@pytest.mark.parametrize("spec", [1, 2])
def test_creating_a_repository_is_few_requests_in_a_row(spec: int) -> None:
    """Look and list at once, write the first snapshot, publish it."""

    async def scenario() -> float:
        async with open_storage(memory_url()) as plain:
            storage = LatencyStorage(plain, seconds=1)
            begin = asyncio.get_running_loop().time()
            async with Repository.create(storage, spec_version=spec):
                return asyncio.get_running_loop().time() - begin

    assert run(scenario()) == 3


def test_a_thousand_inline_chunks_cost_no_request() -> None:
    """Small chunks travel in the manifest."""

    async def scenario() -> int:
        url = memory_url()
        await _prepared(url, 2)
        async with open_storage(url) as plain:
            storage = LatencyStorage(plain, seconds=1)
            async with Repository.open(storage) as repository:
                session = await repository.writable_session("main")
                await make_array(session, "small", (1000,), (1,))
                storage.forget()
                for number in range(1000):
                    await write(session, f"small/c/{number}", b"\x01")
                return sum(storage.requests.values())

    assert run(scenario()) == 0
