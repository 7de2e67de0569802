"""Bounded, structured concurrency with plain errors."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from icechunk_async._runtime.concurrency import (
    AnyLoopLock,
    Background,
    Outlasting,
    SingleFlight,
    bounded_map,
    gather,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


async def test_results_keep_the_order_of_the_items() -> None:
    """Results do not come in the order of completion."""

    async def slow_first(item: int) -> int:
        await asyncio.sleep(0.001 * (5 - item))
        return item * 10

    assert await bounded_map(slow_first, range(5), limit=5) == [0, 10, 20, 30, 40]
    assert await bounded_map(slow_first, iter([3, 1]), limit=1) == [30, 10]
    assert await bounded_map(slow_first, [], limit=3) == []


@pytest.mark.parametrize("limit", [1, 3, 8])
async def test_no_more_than_the_limit_run_at_a_time(limit: int) -> None:
    """And as many as that, where there is enough to do."""
    running = most = 0

    async def watch(_: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    await bounded_map(watch, range(30), limit=limit)
    assert most == limit


async def test_lazy_input_is_consumed_only_as_needed() -> None:
    """A long listing need not fit in memory."""
    drawn = 0

    def items() -> Iterator[int]:
        nonlocal drawn
        for number in range(100):
            drawn += 1
            yield number

    async def check(item: int) -> None:
        await asyncio.sleep(0)
        assert drawn <= item + 6

    await bounded_map(check, items(), limit=5)
    assert drawn == 100


async def test_many_items_cost_no_task_each() -> None:
    """A hundred thousand take little more memory than their results."""

    async def same(item: int) -> int:
        return item

    gc.collect()
    tracemalloc.start()
    try:
        await bounded_map(same, range(100_000), limit=64)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 30 << 20


async def test_first_failure_is_raised_without_a_group() -> None:
    """With its own cause, no group around it, and the others cancelled."""
    cancelled: list[int] = []

    async def work(item: int) -> None:
        if item == 2:
            try:
                raise KeyError("inner")  # noqa: TRY301
            except KeyError as error:
                raise ValueError("outer") from error
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    with pytest.raises(ValueError, match="outer") as caught:
        await bounded_map(work, range(5), limit=5)
    assert isinstance(caught.value.__cause__, KeyError)
    assert sorted(cancelled) == [0, 1, 3, 4]


async def test_further_failures_are_noted() -> None:
    """On the one that is raised."""

    async def fail(item: int) -> None:
        await asyncio.sleep(0)
        raise ValueError(f"number {item}")

    with pytest.raises(ValueError, match="number 0") as caught:
        await bounded_map(fail, range(3), limit=3)
    assert "2 more concurrent failures" in caught.value.__notes__[0]
    assert "number 2" in caught.value.__notes__[0]


async def test_one_failure_of_several_tasks_is_one() -> None:
    """They may have waited for the same thing; nothing is noted then."""
    failure = ValueError("the same")

    async def fail(_item: int) -> None:
        await asyncio.sleep(0)
        raise failure

    with pytest.raises(ValueError, match="the same") as caught:
        await bounded_map(fail, range(3), limit=3)
    assert not hasattr(caught.value, "__notes__")


async def test_gather_answers_in_order_and_cancels_the_rest_on_failure() -> None:
    """Different things at once."""

    async def answer(value: object) -> object:
        await asyncio.sleep(0)
        return value

    assert await gather(answer(1), answer("two"), answer(None)) == (1, "two", None)
    waiting = asyncio.Event()

    async def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await gather(fail(), waiting.wait())


async def test_call_that_ends_as_cancelled_is_not_left_out() -> None:
    """Though nobody cancelled it: fewer results than items would be taken for all of them."""
    called: list[int] = []

    async def call(number: int) -> int:
        called.append(number)
        await asyncio.sleep(0)
        if number == 1:
            raise asyncio.CancelledError
        return number

    with pytest.raises(asyncio.CancelledError):
        await bounded_map(call, range(100), limit=2)
    assert len(called) < 5  # the others stop as well
    with pytest.raises(asyncio.CancelledError):
        await gather(call(0), call(1), call(2))


async def test_a_limit_below_one_is_refused() -> None:
    """It would never end."""
    with pytest.raises(ValueError, match="at least 1"):
        await bounded_map(asyncio.sleep, [0], limit=0)


class _Loads:
    """Counts loads; each waits until it is let go."""

    def __init__(self) -> None:
        self.count = 0
        self.cancelled = 0
        self.gate = asyncio.Event()

    async def load(self) -> int:
        self.count += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.count


async def test_concurrent_loads_of_a_key_are_one() -> None:
    """Later ones load again; other keys are their own."""
    flights: SingleFlight[str, int] = SingleFlight()
    loads = _Loads()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(flights.run("a", loads.load)) for _ in range(5)]
        other = group.create_task(flights.run("b", loads.load))
        await asyncio.sleep(0)
        loads.gate.set()
    assert len({task.result() for task in tasks}) == 1
    assert other.result() in {1, 2}
    assert loads.count == 2
    assert await flights.run("a", loads.load) == 3


async def test_a_waiter_leaves_alone_and_the_last_cancels_the_load() -> None:
    """The others get their answer; nothing runs on for nobody."""
    flights: SingleFlight[str, int] = SingleFlight()
    loads = _Loads()
    first, second = (asyncio.ensure_future(flights.run("a", loads.load)) for _ in range(2))
    await asyncio.sleep(0.001)
    first.cancel()
    await asyncio.wait([first])
    assert not second.done()
    loads.gate.set()
    assert await second == 1

    loads = _Loads()
    lonely = asyncio.ensure_future(flights.run("b", loads.load))
    await asyncio.sleep(0.001)
    lonely.cancel()
    await asyncio.wait([lonely])
    assert loads.cancelled == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_failed_load_fails_every_waiter_and_is_forgotten() -> None:
    """The next one tries again."""
    flights: SingleFlight[str, int] = SingleFlight()
    tries = 0

    async def fail_once() -> int:
        nonlocal tries
        tries += 1
        await asyncio.sleep(0)
        if tries == 1:
            raise OSError("first")
        return tries

    results = await asyncio.gather(
        *(flights.run("a", fail_once) for _ in range(3)), return_exceptions=True
    )
    assert [str(result) for result in results] == ["first"] * 3
    assert await flights.run("a", fail_once) == 2


@pytest.mark.parametrize("eager", [False, True])
async def test_an_eager_load_that_need_not_wait_costs_no_turn_of_the_loop(*, eager: bool) -> None:
    """Its result, or its error, is there at once."""
    flights: SingleFlight[str, int] = SingleFlight(eager=eager)
    others: list[str] = []
    asyncio.get_running_loop().call_soon(others.append, "had a turn")

    async def load() -> int:
        return 1

    async def fail() -> int:
        raise OSError("damaged")

    assert await flights.run("a", load) == 1
    with pytest.raises(OSError, match="damaged"):
        await flights.run("b", fail)
    assert bool(others) is not eager


async def test_eager_loads_that_wait_are_joined() -> None:
    """As others are; the last waiter that leaves cancels the load."""
    flights: SingleFlight[str, int] = SingleFlight(eager=True)
    loads = _Loads()
    waiters = [asyncio.ensure_future(flights.run("a", loads.load)) for _ in range(3)]
    await asyncio.sleep(0)
    waiters.pop().cancel()
    await asyncio.sleep(0)
    loads.gate.set()
    assert await asyncio.gather(*waiters) == [1, 1]
    assert (loads.count, loads.cancelled) == (1, 0)

    loads = _Loads()
    lonely = asyncio.ensure_future(flights.run("a", loads.load))
    await asyncio.sleep(0)
    lonely.cancel()
    await asyncio.wait([lonely])
    assert (loads.count, loads.cancelled) == (1, 1)


def test_each_event_loop_has_its_own_flights() -> None:
    """A loop that ended leaves nothing that another would wait for."""
    flights: SingleFlight[str, int] = SingleFlight()
    calls = 0

    async def load() -> int:
        nonlocal calls
        calls += 1
        with anyio.move_on_after(0.01):
            await asyncio.Event().wait()
        return calls

    for expected in (1, 2):
        assert asyncio.run(flights.run("a", load)) == expected


def test_one_task_of_all_event_loops_holds_a_lock() -> None:
    """Each thread has a loop with several tasks; a task that is cancelled does not take it."""
    lock, inside, most = AnyLoopLock(), list[int](), list[int]()

    async def work() -> None:
        async with lock:
            inside.append(1)
            await asyncio.sleep(0.001)
            most.append(len(inside))
            inside.pop()

    async def run() -> None:
        await asyncio.gather(*(work() for _ in range(3)))

    async def give_up() -> None:
        async with lock:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(work(), 0.02)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(asyncio.run, run()) for _ in range(2)]:
            done.result()
    asyncio.run(give_up())
    asyncio.run(run())
    assert most == [1] * 9


async def test_background_work_ends_with_its_block() -> None:
    """Nobody waits for it before, and nothing of it is left afterwards."""
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("work")

    async with Background() as background:
        background.start(work)
        await asyncio.sleep(0)
        assert not ended
    assert ended == ["work"]
    background.start(work)  # too late
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_background_work_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Its failure reaches no one else."""

    async def work() -> None:
        raise ValueError("boom")

    async with Background() as background:
        background.start(work)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [str(it.exc_info[1]) for it in caplog.records if it.exc_info] == ["boom"]


async def test_background_work_is_not_started_from_another_loop() -> None:
    """Tasks of a loop that may end before the block could not be waited for."""
    begun: list[int] = []

    async def work() -> None:
        begun.append(1)

    async with Background() as background:

        async def elsewhere() -> None:
            background.start(work)
            await asyncio.sleep(0)

        await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
        background.start(work)
        await asyncio.sleep(0)
    assert begun == [1]


async def test_a_call_outlasts_whoever_waits_for_it() -> None:
    """It is waited for to settle, and cancelled, and named, if it takes too long."""
    calls, gate, done = Outlasting(), anyio.Event(), list[str]()

    async def write(name: str) -> str:
        await gate.wait()
        done.append(name)
        return name

    for name in ("first", "second"):
        with anyio.move_on_after(0):
            await calls.run(name, write(name))
    assert not done
    gate.set()
    assert await calls.settle(60) == ()
    assert sorted(done) == ["first", "second"]

    assert await calls.run("third", write("third")) == "third"
    with anyio.move_on_after(0):
        await calls.run("fourth", anyio.sleep_forever())
    assert await calls.settle(0.01) == ("fourth",)
    assert await calls.settle(60) == ()


async def test_a_call_that_outlasts_raises_to_whoever_waits() -> None:
    """And to nobody else: not to the event loop."""
    calls, told = Outlasting(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    async def fail() -> None:
        await anyio.lowlevel.checkpoint()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await calls.run("seen", fail())
    with anyio.move_on_after(0):
        await calls.run("unseen", fail())
    assert await calls.settle(60) == ()
    gc.collect()
    assert not told
