"""A budget that follows what the store can do, and is fair to those who wait."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from icechunk_async.errors import (
    NameResolutionError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PermissionDeniedError,
    StorageUnavailableError,
    ThrottledError,
    UnreachableError,
)
from icechunk_async.storage import ByteRange, DeleteFailure
from icechunk_async.storage.policies.limit import Budget, Limited
from icechunk_async.testing.latency import LatencyStorage
from tests.unit.storage.scripted import Scripted, in_virtual_time, with_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async.storage import RangeRequest, Retrieved, Storage

_MIB = 1 << 20


async def _fail(budget: Budget, *errors: Exception) -> None:
    """Let requests that run at the same time fail."""

    async def run(error: Exception) -> None:
        async with budget.place():
            await asyncio.sleep(0)
            raise error

    async def one(error: Exception) -> None:
        with pytest.raises(type(error)):
            await run(error)

    async with asyncio.TaskGroup() as group:
        for error in errors:
            group.create_task(one(error))


@pytest.mark.parametrize(
    "error",
    [ThrottledError, UnreachableError, StorageUnavailableError, OutcomeUnknownError],
)
async def test_overload_shrinks_the_budget(error: type[Exception]) -> None:
    """It shrinks by a factor, once for all concurrent requests, and never to zero."""
    budget = Budget(100)
    await _fail(budget, *(error("busy") for _ in range(50)))
    assert budget.limit == 70
    await _fail(budget, error("busy"))
    assert budget.limit == 49
    for _ in range(50):
        await _fail(budget, error("busy"))
    assert budget.limit == 1


@pytest.mark.parametrize("error", [ObjectNotFoundError, PermissionDeniedError, NameResolutionError])
async def test_errors_without_overload_leave_the_budget(error: type[Exception]) -> None:
    """The store answered, or was never reached."""
    budget = Budget(100)
    await _fail(budget, error("no"))
    assert budget.limit == 100


async def test_a_cancelled_request_leaves_the_budget() -> None:
    """The caller lost patience; that may have many reasons."""
    budget = Budget(10)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0), budget.place():
            await asyncio.sleep(1)
    assert budget.limit == 10
    for _ in range(4):
        await _fail(budget, ThrottledError("busy"))
    assert budget.limit == 2

    async def hold() -> None:
        async with budget.place():
            await asyncio.sleep(1)

    for _ in range(20):  # all places were needed, but nothing was answered
        held = [asyncio.ensure_future(hold()) for _ in range(2)]
        await asyncio.sleep(0)
        for task in held:
            task.cancel()
        await asyncio.wait(held)
    assert budget.limit == 2


async def test_failed_deletions_count_as_overload() -> None:
    """A deletion raises nothing."""

    class Busy(Scripted):
        async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
            """Delete nothing."""
            return [DeleteFailure(key, ThrottledError("busy")) for key in keys]

    budget = Budget(10)

    async def use(plain: Storage) -> None:
        assert len(await Limited(Busy(plain), budget).delete(["a", "b"])) == 2

    await with_memory(use)
    assert budget.limit == 7


async def test_successes_let_the_budget_grow_back() -> None:
    """It grows by about one place per round, only while all places are in use, up to its limit."""
    budget = Budget(10)
    for _ in range(4):
        await _fail(budget, ThrottledError("busy"))
    assert budget.limit == 2

    async def answer() -> None:
        async with budget.place():
            await asyncio.sleep(0)

    for _ in range(100):
        await answer()  # alone: nobody knows whether more would go
    assert budget.limit == 2

    async def round_of(places: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(places):
                group.create_task(answer())

    for expected in (3, 4, 5):
        await round_of(2 * budget.limit)
        assert expected - 1 <= budget.limit <= expected + 1
    for _ in range(20):
        await round_of(30)
    assert budget.limit == 10


async def test_a_shrunken_budget_takes_its_places_back_as_they_are_freed() -> None:
    """No request gets a place while more are held than the budget has."""
    budget = Budget(4)
    held = [await budget.acquire(None, 1) for _ in range(4)]
    budget.release(held.pop(), overloaded=True)  # 2 places, 3 held
    assert budget.limit == 2
    waiting = asyncio.ensure_future(budget.acquire(None, 1))
    await asyncio.sleep(0)
    budget.release(held.pop())
    await asyncio.sleep(0)
    assert not waiting.done()
    budget.release(held.pop())
    await asyncio.wait_for(waiting, 60)


def _finished(reads: list[tuple[str, RangeRequest]]) -> list[tuple[float, int]]:
    """Return when each of the reads, asked for in this order, was answered; 4 at a time."""

    async def scenario() -> list[tuple[float, int]]:
        async def use(plain: Storage) -> list[tuple[float, int]]:
            for key in {key for key, _ in reads}:
                await plain.put(key, b"x")
            storage = Limited(LatencyStorage(plain, seconds=1), Budget(4))
            finished: list[tuple[float, int]] = []

            async def read(number: int, key: str, wanted: RangeRequest) -> Retrieved:
                retrieved = await storage.get(key, wanted)
                finished.append((asyncio.get_running_loop().time(), number))
                return retrieved

            async with asyncio.TaskGroup() as group:
                for number, (key, wanted) in enumerate(reads):
                    group.create_task(read(number, key, wanted))
            return finished

        return await with_memory(use)

    return in_virtual_time(scenario)[0]


@pytest.mark.parametrize(
    ("small", "bulk_bytes"),
    [
        (("manifests/m", None), 8 * _MIB),
        (("manifests/m", None), 10),
        (("chunks/a", ByteRange(0, 10)), 8 * _MIB),
    ],
    ids=["metadata beside large chunks", "metadata beside small chunks", "a small chunk"],
)
def test_a_small_read_does_not_wait_for_an_earlier_bulk(
    small: tuple[str, RangeRequest], bulk_bytes: int
) -> None:
    """It is among the next to be sent, in a scan that takes 100 seconds."""
    bulk: list[tuple[str, RangeRequest]] = [("chunks/b", ByteRange(0, bulk_bytes))] * 400
    finished = {number: at for at, number in _finished([*bulk, small])}
    assert max(finished.values()) == 101.0
    assert finished[400] == 2.0


def test_small_reads_do_not_starve_a_bulk() -> None:
    """Both get on: the shares are equal in what they cost, not in numbers."""
    small: list[tuple[str, RangeRequest]] = [("manifests/m", None)] * 400
    bulk: list[tuple[str, RangeRequest]] = [("chunks/b", ByteRange(0, _MIB))] * 40
    order = [number for _, number in _finished([*small, *bulk])]
    first_half = order[: len(order) // 2]
    assert 8 <= sum(number >= 400 for number in first_half) <= 16


def test_reads_of_one_kind_are_served_in_order() -> None:
    """First come, first served."""
    finished = {number: at for at, number in _finished([("chunks/a", ByteRange(0, 10))] * 50)}
    assert [finished[number] for number in range(50)] == sorted(finished.values())


async def test_cancelled_waiters_are_dropped() -> None:
    """Thousands that time out while every place hangs leave nothing behind."""
    budget = Budget(1)
    await budget.acquire(None, 1)
    waiting = asyncio.ensure_future(budget.acquire("last", 1))
    for number in range(2000):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await budget.acquire(number, 1)
    assert len(budget._heap) < 20
    budget.release()
    await asyncio.wait_for(waiting, 60)
    assert not budget._heap
    assert not budget._ends


async def test_any_number_of_flows_is_served_and_forgotten() -> None:
    """An endless stream of new flows starves no waiter."""
    budget = Budget(1)
    await budget.acquire(None, 1)
    old = [asyncio.ensure_future(budget.acquire("old", 1)) for _ in range(5)]
    await asyncio.sleep(0)
    new = [asyncio.ensure_future(budget.acquire(number, 1)) for number in range(3)]
    served = 0
    for number in range(3, 2000):
        await asyncio.sleep(0)
        new.append(asyncio.ensure_future(budget.acquire(number, 1)))
        budget.release()
        await asyncio.sleep(0)
        served += 1
        if all(task.done() for task in old):
            break
    assert served < 1000
    assert len(budget._ends) < 100
    for task in [*old, *new]:
        budget.release()
        await task
