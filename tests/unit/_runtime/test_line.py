"""Lines of tasks: order, leaving, overtaking, several event loops."""

from __future__ import annotations

import asyncio
import threading

import pytest

from icechunk_async._runtime.line import Line
from icechunk_async.testing.virtual_time import VirtualTimeLoop


def patient() -> float:
    """Wait for a minute for a sign of life."""
    return 60.0


async def _work(line: Line, name: int, done: list[int], seconds: float = 1.0) -> None:
    with line.join() as place:
        await place.wait(patient)
        await asyncio.sleep(seconds)
        done.append(name)


def virtually(scenario: asyncio.Future[None] | object) -> None:
    """Run a scenario on a loop whose clock jumps."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(scenario)  # type: ignore[arg-type]


def test_turns_come_in_the_order_of_arrival() -> None:
    """One after the other, each as soon as the one before it is done."""

    async def scenario() -> None:
        line, done = Line(), list[int]()
        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(_work(line, number, done))
        assert done == [0, 1, 2, 3, 4]
        assert asyncio.get_running_loop().time() == 5

    virtually(scenario())


def test_who_gives_up_lets_the_next_one_in() -> None:
    """While waiting, and during the turn."""

    async def scenario() -> None:
        line, done = Line(), list[int]()
        tasks = [asyncio.create_task(_work(line, number, done)) for number in range(4)]
        await asyncio.sleep(0.5)
        tasks[2].cancel()
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert done == [1, 3]
        assert asyncio.get_running_loop().time() == 2.5

    virtually(scenario())


def test_a_turn_without_a_sign_of_life_is_overtaken() -> None:
    """The others wait once; who gives signs may take any time."""

    async def scenario() -> None:
        line, done = Line(), list[int]()

        async def alive() -> None:
            with line.join() as place:
                await place.wait(patient)
                for _ in range(10):
                    await asyncio.sleep(50)
                    place.give_sign()
                done.append(0)

        async with asyncio.TaskGroup() as group:
            group.create_task(alive())
            silent = group.create_task(_work(line, 1, done, seconds=1e6))
            await asyncio.sleep(0)
            for number in range(2, 5):
                group.create_task(_work(line, number, done))
            await asyncio.sleep(0)
            await asyncio.sleep(510)
            assert done == [0]
            await asyncio.sleep(130)  # a sign was missed after one to two times the patience
            assert done == [0, 2, 3, 4]
            group.create_task(_work(line, 5, done))
            await asyncio.sleep(2)
            assert done == [0, 2, 3, 4, 5]  # at once: the silent one is in no line any more
            silent.cancel()

    virtually(scenario())


def test_work_of_a_turn_does_not_wait_for_it() -> None:
    """It would wait for itself, also in tasks that it starts."""

    async def scenario() -> None:
        line, done = Line(), list[int]()
        with line.join() as place:
            await place.wait(patient)
            await _work(line, 0, done)
            async with asyncio.TaskGroup() as group:
                group.create_task(_work(line, 1, done))
        await _work(line, 2, done)
        assert done == [0, 1, 2]

    virtually(scenario())


def test_tasks_of_several_event_loops_share_a_line() -> None:
    """Never two at a time; a loop that ended is passed over."""
    line, inside, most = Line(), list[int](), list[int]()

    async def abandoned() -> None:
        place = line.join()
        place.has_turn = False  # it is never left

    async def many(first: int) -> None:
        async def one(number: int) -> None:
            with line.join() as place:
                await place.wait(patient)
                inside.append(number)
                most.append(len(inside))
                await asyncio.sleep(0.0005)
                inside.remove(number)

        async with asyncio.TaskGroup() as group:
            for number in range(first, first + 20):
                group.create_task(one(number))

    async def scenario() -> None:
        with line.join() as place:
            await place.wait(patient)
            thread = threading.Thread(target=asyncio.run, args=(abandoned(),))
            thread.start()
            await asyncio.to_thread(thread.join)
        threads = [
            threading.Thread(target=asyncio.run, args=(many(100 * number),)) for number in range(3)
        ]
        for thread in threads:
            thread.start()
        await many(1000)
        for thread in threads:
            await asyncio.to_thread(thread.join)

    asyncio.run(scenario())
    assert most == [1] * 80


def test_turns_of_several_event_loops_come_in_the_order_of_arrival() -> None:
    """However late a thread wakes up."""
    line, done = Line(), list[int]()
    came = threading.Semaphore(0)

    async def wait(number: int) -> None:
        with line.join() as place:
            came.release()
            await place.wait(patient)
            done.append(number)

    def come(number: int) -> threading.Thread:
        thread = threading.Thread(target=asyncio.run, args=(wait(number),))
        thread.start()
        came.acquire()
        return thread

    async def scenario() -> list[threading.Thread]:
        with line.join():
            return [await asyncio.to_thread(come, number) for number in range(6)]

    for thread in asyncio.run(scenario()):
        thread.join()
    assert done == list(range(6))


@pytest.mark.parametrize("number", [0, 3])
def test_places_are_prepared_in_the_order_of_the_line(number: int) -> None:
    """And not for work of a turn, which is in no line."""

    async def scenario() -> None:
        line, prepared = Line(), list[int]()
        with line.join(lambda: prepared.append(number)), line.join(lambda: prepared.append(99)):
            assert prepared == [number]

    virtually(scenario())
