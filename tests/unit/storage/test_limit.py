"""One budget of requests for everything."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack

import pytest

from icechunk_async.storage import open_storage
from icechunk_async.storage.policies.limit import Budget, Limited
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import memory_url


async def test_concurrent_requests_never_exceed_the_budget() -> None:
    """This holds for all operations. A listing counts while it fetches."""

    class Watching(WrappedStorage):
        running = most = 0

        async def before(self, operation: str, key: str) -> None:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0)

        async def after(self, operation: str, key: str) -> None:
            self.running -= 1

    async with open_storage(memory_url()) as plain:
        watching = Watching(plain)
        storage = Limited(watching, Budget(3))
        version = await storage.put("k", b"x")
        async with asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(storage.get("k"))
                group.create_task(storage.put(f"p{number}", b"x"))
                group.create_task(storage.copy("k", f"c{number}"))
                group.create_task(storage.get_if_changed("k", version))
                group.create_task(storage.delete([f"d{number}"]))
        assert watching.most == 3
        assert len([entry async for entry in storage.list_prefix()]) == 21


async def test_places_are_given_in_order_and_not_lost_by_cancellation() -> None:
    """A waiter may be cancelled just as its turn comes."""
    budget = Budget(1)
    order: list[int] = []

    async def hold(number: int) -> None:
        async with budget.place():
            order.append(number)
            await asyncio.sleep(0)

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(budget.place())
        tasks = [asyncio.ensure_future(hold(number)) for number in range(6)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
    tasks[0].cancel()  # its turn was just granted
    await asyncio.wait(tasks)
    assert order == [2, 3, 4, 5]
    await asyncio.wait_for(hold(7), 60)


def test_one_budget_serves_several_event_loops() -> None:
    """Places pass from loop to loop without a stall."""
    budget = Budget(2)
    running = most = 0
    lock = threading.Lock()

    async def use() -> None:
        nonlocal running, most
        async with budget.place():
            with lock:
                running += 1
                most = max(most, running)
            await asyncio.sleep(0.0005)
            with lock:
                running -= 1

    async def many() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(50):
                group.create_task(use())

    threads = [threading.Thread(target=lambda: asyncio.run(many())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)
    assert not any(thread.is_alive() for thread in threads)
    assert most == 2


def test_a_waiter_whose_loop_ended_does_not_keep_a_place() -> None:
    """The next one gets it."""
    budget = Budget(1)

    async def scenario() -> None:
        loop = asyncio.new_event_loop()
        async with budget.place():
            dead = loop.create_task(budget.acquire(None, 1))
            loop.call_soon(loop.stop)
            await asyncio.to_thread(loop.run_forever)
            loop.close()
            dead._log_destroy_pending = False  # type: ignore[attr-defined]
        await asyncio.wait_for(budget.acquire(None, 1), 60)

    asyncio.run(scenario())


def test_a_budget_of_nothing_is_refused() -> None:
    """It would answer nobody."""
    with pytest.raises(ValueError, match="at least one place"):
        Budget(0)
