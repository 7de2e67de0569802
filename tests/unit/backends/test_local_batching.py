"""How the local backend gets off the event loop and back: rarely, and without getting stuck."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import threading
import time
from collections import Counter
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async.errors import ObjectNotFoundError, StorageClosedError
from icechunk_async.storage import BlockingStorage, open_storage
from icechunk_async_local import at_once, filesystems
from icechunk_async_local.batching import Helpers, Lane, _Call, _hand_over
from icechunk_async_local.durability import Ledger
from icechunk_async_local.files import Files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from pathlib import Path


@pytest.fixture
def lane() -> Iterator[Lane]:
    """Make a lane of two threads."""
    lane = Lane("test", 2)
    yield lane
    lane.executor.shutdown(wait=True)


@pytest.fixture
def hops(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count jobs that go to threads, and callbacks that come back, where nothing is slow.

    What is slow may take more threads, which other tests are about: it depends on the machine.
    """
    monkeypatch.setattr(Lane, "patience_seconds", math.inf)
    monkeypatch.setattr(Ledger, "slow_seconds", math.inf)
    counted: Counter[str] = Counter()
    submit = Lane.__init__.__globals__["ThreadPoolExecutor"].submit

    def counted_submit(self: Any, fn: Any, *arguments: Any) -> Future[Any]:
        counted["jobs"] += 1
        job: Future[Any] = submit(self, fn, *arguments)
        return job

    loop_class = asyncio.SelectorEventLoop
    call = loop_class.call_soon_threadsafe

    def counted_call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        counted["callbacks"] += 1
        return call(self, *arguments, **keywords)

    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor.submit", counted_submit)
    monkeypatch.setattr(loop_class, "call_soon_threadsafe", counted_call)
    return counted


async def test_reads_of_one_turn_share_a_hop(tmp_path: Path, hops: Counter[str]) -> None:
    """A hundred small reads at once are a few jobs and a few callbacks, not a hundred."""
    async with open_storage(tmp_path) as storage:
        keys = [f"chunks/{number}" for number in range(100)]
        for key in keys:
            await storage.put(key, key.encode())
        hops.clear()
        found = await bounded_map(storage.get, keys, limit=100)
        assert [bytes(answer.data).decode() for answer in found] == keys
        assert hops["jobs"] <= 10
        assert hops["callbacks"] <= 20


async def test_puts_of_one_turn_share_a_hop(tmp_path: Path, hops: Counter[str]) -> None:
    """The same holds for writes without a condition."""
    async with open_storage(tmp_path, durability="none") as storage:
        await storage.put("chunks/first", b"x")
        hops.clear()
        keys = [f"chunks/{number}" for number in range(100)]
        await bounded_map(lambda key: storage.put(key, b"x"), keys, limit=100)
        assert hops["jobs"] <= 20


async def test_deletions_of_a_quick_disk_share_a_hop(tmp_path: Path, hops: Counter[str]) -> None:
    """Threads would only compete for the interpreter."""
    async with open_storage(tmp_path, durability="none") as storage:
        keys = [f"chunks/{number}" for number in range(100)]
        await bounded_map(lambda key: storage.put(key, b"x"), keys, limit=100)
        hops.clear()
        assert not await storage.delete([*keys, "chunks/missing"])
        assert (hops["jobs"], hops["callbacks"]) == (1, 1)
        assert [entry async for entry in storage.list_prefix()] == []


async def test_deletions_that_wait_for_the_disk_are_shared_by_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ext4 each waits some milliseconds, and several at once hardly longer."""
    monkeypatch.setattr(Lane, "patience_seconds", 0)
    monkeypatch.setattr("icechunk_async_local.batching._SLOW_CALL_SECONDS", 0)
    threads: set[int] = set()
    both = threading.Event()
    unlink = os.unlink

    def slow(name: Any, *, dir_fd: int | None = None) -> None:
        threads.add(threading.get_ident())
        if len(threads) == 2:
            both.set()
        if int(name) >= 32:  # deleted when the first groups have shown how slow it is
            assert both.wait(240)
        unlink(name, dir_fd=dir_fd)

    async with open_storage(tmp_path, durability="none") as storage:
        keys = [f"chunks/{number}" for number in range(100)]
        await bounded_map(lambda key: storage.put(key, b"x"), keys, limit=100)
        monkeypatch.setattr(os, "unlink", slow)
        assert not await storage.delete(keys)
        assert len(threads) >= 2
        assert [entry async for entry in storage.list_prefix()] == []


async def test_each_of_several_calls_ends_before_an_error_of_one(lane: Lane) -> None:
    """And the error of another is not left behind unseen."""
    ended: list[int] = []

    def call(number: int) -> int:
        ended.append(number)
        if number in (1, 2):
            raise OSError(number)
        return number

    with pytest.raises(OSError, match="1"):
        await lane.run_each([partial(call, number) for number in range(4)])
    assert sorted(ended) == [0, 1, 2, 3]
    assert await lane.run_each([partial(call, number) for number in (7, 8)]) == [7, 8]
    assert await lane.run_each(list[partial[int]]()) == []
    gc.collect()  # would tell of errors that nobody looked at


async def test_of_several_calls_those_that_did_not_begin_are_cancelled(lane: Lane) -> None:
    """Those that began end; results are dropped."""
    begun, released = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    later: list[int] = []

    def first() -> None:
        loop.call_soon_threadsafe(begun.set)
        assert released.wait(240)

    works: list[Callable[[], object]] = [first, *(partial(later.append, it) for it in range(3))]
    task = asyncio.create_task(lane.run_each(works))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    released.set()
    assert await lane.run(lambda: 5) == 5  # after the others in the queue
    assert later == []


async def test_each_operation_is_one_hop(tmp_path: Path, hops: Counter[str]) -> None:
    """However many system calls it takes; a listing is one hop for a thousand entries."""
    async with open_storage(tmp_path) as storage:
        keys = [f"{number % 7}/{number:04}" for number in range(1500)]
        await bounded_map(lambda key: storage.put(key, b"x"), keys, limit=64)
        version = await storage.put("refs/main", b"1")
        for operation, jobs in (
            (lambda: storage.put("refs/main", b"2", if_version=version), 1),
            (lambda: storage.copy("refs/main", "refs/other"), 1),
            (storage.sync, 1),
            (lambda: storage.delete(keys[:700]), 1),
        ):
            hops.clear()
            await operation()
            assert hops["jobs"] == jobs
        hops.clear()
        assert len([entry async for entry in storage.list_prefix()]) == 802
        assert hops["jobs"] == 1
        await bounded_map(lambda key: storage.put(key, b"x"), keys, limit=64)
        hops.clear()
        assert len([entry async for entry in storage.list_prefix()]) == 1502
        assert hops["jobs"] == 2


async def test_each_call_gets_its_own_result(lane: Lane) -> None:
    """Results and errors reach their callers."""

    def work(number: int) -> int:
        if number % 3 == 0:
            raise ValueError(number)
        return number

    async def call(number: int) -> object:
        try:
            return await lane.run(lambda: work(number))
        except ValueError as error:
            return error.args

    found = await bounded_map(call, range(100), limit=50)
    assert found == [(n,) if n % 3 == 0 else n for n in range(100)]


async def test_slow_calls_get_more_threads(lane: Lane) -> None:
    """A device that answers slowly is asked from several threads at once."""
    together = threading.Barrier(2)

    def first_slow() -> None:
        time.sleep(0.01)

    def meet() -> None:
        together.wait(60)  # fails unless two threads are here

    await gather(*(lane.run(work) for work in (first_slow, meet, meet)))


async def test_quick_results_do_not_wait_for_slow_ones() -> None:
    """Finished results are delivered while the thread is still busy."""
    lane = Lane("test", 1)
    release = threading.Event()

    def work() -> str:
        time.sleep(0.005)
        return "quick"

    quick = lane.run(work)

    async def then_release() -> str:
        found = await quick
        release.set()
        return found

    found = await gather(then_release(), lane.run(lambda: release.wait(60)))
    assert found == ("quick", True)
    lane.executor.shutdown(wait=True)


async def test_calls_that_run_alone_delay_no_others(lane: Lane) -> None:
    """A conditional write waits for the disk; plain writes of the same turn do not."""
    release = threading.Event()

    async def then_release() -> str:
        found = await lane.run(lambda: "quick")
        release.set()
        return found

    found = await gather(lane.run_alone(lambda: release.wait(60)), then_release())
    assert found == (True, "quick")


@pytest.mark.parametrize("way", ["run", "run_alone"])
async def test_cancelled_calls_are_not_started(lane: Lane, way: str) -> None:
    """A call that nobody waits for any more costs nothing."""
    began: list[int] = []
    release = threading.Event()
    blocked = [lane.hop(lambda: release.wait(60)) for _ in range(2)]

    async def cancel() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await getattr(lane, way)(lambda: began.append(1))
        task.uncancel()
        release.set()

    await gather(*blocked, cancel())
    await lane.run(lambda: began.append(2))
    assert began == [2]


async def test_loops_share_threads_and_nothing_else(lane: Lane) -> None:
    """Calls from several loops at once come back each to its own loop."""

    async def work(name: str) -> list[str]:
        loop = asyncio.get_running_loop()

        async def call(number: int) -> str:
            answer = await lane.run(lambda: f"{name}-{number}")
            assert asyncio.get_running_loop() is loop
            return answer

        return await bounded_map(call, range(500), limit=20)

    def run(name: str) -> list[str]:
        return asyncio.run(work(name))

    names = ("one", "two", "three")
    threads = [asyncio.to_thread(run, name) for name in names]
    found = await gather(*threads)
    assert list(found) == [[f"{name}-{n}" for n in range(500)] for name in names]
    # A thread that has just handed over may hold the loop it handed to.
    await asyncio.to_thread(lane.executor.shutdown, wait=True)
    gc.collect()
    assert len(lane._turns) == 0


async def test_a_loop_that_ended_is_not_waited_for(lane: Lane) -> None:
    """Results for a loop that is closed are dropped; others get theirs."""
    release = threading.Event()

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await lane.run(lambda: release.wait(60))

    await asyncio.to_thread(lambda: asyncio.run(leave()))
    release.set()
    assert await lane.run(lambda: "answer") == "answer"


async def test_a_loop_that_ended_keeps_nobody_from_an_answer() -> None:
    """Where one batch has results for a closed loop and for others, those get theirs."""
    ended = asyncio.new_event_loop()
    calls = [
        _Call(partial(str, result), loop.create_future())
        for loop, result in ((ended, "lost"), (asyncio.get_running_loop(), "answer"))
    ]
    for call in calls:
        call.do()
    ended.close()
    await asyncio.to_thread(_hand_over, calls)
    assert await calls[1].future == "answer"


@pytest.mark.parametrize("way", ["run", "hop", "run_alone"])
async def test_a_closed_lane_refuses_calls(way: str) -> None:
    """It says that the storage was closed, and leaves nobody waiting."""
    lane = Lane("test", 1)
    call: Callable[[Callable[[], str]], Any] = getattr(lane, way)
    assert await call(lambda: "open") == "open"
    await asyncio.to_thread(lane.close)
    with pytest.raises(StorageClosedError, match="Wait for its operations"):
        await call(lambda: "closed")


@pytest.mark.parametrize("way", ["run", "hop", "run_alone"])
async def test_errors_of_the_work_are_not_taken_for_a_closed_lane(lane: Lane, way: str) -> None:
    """A RuntimeError of the work stays one."""

    def fail() -> None:
        raise RuntimeError("of the work")

    with pytest.raises(RuntimeError, match="of the work"):
        await getattr(lane, way)(fail)


async def test_operations_under_way_end_before_the_storage_does(tmp_path: Path) -> None:
    """Operations started within the block have finished when it ends."""
    before = set(threading.enumerate())
    async with open_storage(tmp_path) as storage:
        pending = [asyncio.ensure_future(storage.put(f"a/{n}", b"x")) for n in range(50)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(list((tmp_path / "a").iterdir())) == 50
    versions = await asyncio.wait_for(gather(*pending), 60)
    assert len(set(versions)) == 50
    begun = set(threading.enumerate()) - before
    assert not [thread for thread in begun if thread.name.startswith("icechunk-")]


async def test_a_cancelled_put_never_writes_reused_buffer(tmp_path: Path) -> None:
    """The write continues with the original bytes."""
    blocked, go_on = threading.Event(), threading.Event()
    original = os.write

    def wait(fd: int, data: memoryview) -> int:
        blocked.set()
        go_on.wait(60)
        return original(fd, data)

    first = bytearray(b"first" * 1000)
    second = bytearray(b"second" * 1000)
    async with open_storage(tmp_path) as storage:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "write", wait)

            async def put_both() -> None:
                await gather(storage.put("a", memoryview(first)), storage.put("b", second))

            async def let_go() -> None:
                await asyncio.to_thread(blocked.wait, 240)
                raise LookupError  # cancels the puts

            with pytest.raises(LookupError):
                await gather(put_both(), let_go())
            first[:] = b"other" * 1000
            second[:] = b"others" * 1000
            go_on.set()
    assert (tmp_path / "a").read_bytes() == b"first" * 1000
    if (tmp_path / "b").exists():  # it may not have started
        assert (tmp_path / "b").read_bytes() == b"second" * 1000


async def test_reads_do_not_wait_for_locks(tmp_path: Path) -> None:
    """Reads proceed while many writers wait for a lock."""
    async with open_storage(tmp_path) as storage:
        version = await storage.put("refs/main", b"1")
        folder = os.open(tmp_path / "refs", os.O_RDONLY)
        assert filesystems.try_lock(folder, exclusive=True)

        async def read_then_release() -> None:
            for _ in range(100):
                assert (await storage.get("refs/main")).data == b"1"
            os.close(folder)

        writers = [storage.put(f"refs/{n}", b"x") for n in range(20)]
        updates = [storage.put("refs/main", b"2", if_version=version) for _ in range(1)]
        await gather(*writers, *updates, read_then_release())
        assert (await storage.get("refs/main")).data == b"2"


async def test_an_error_belongs_to_one_reader(tmp_path: Path) -> None:
    """Readers of missing objects in one batch get an error each, not one that they share."""
    async with open_storage(tmp_path) as storage:

        async def get(key: str) -> ObjectNotFoundError:
            with pytest.raises(ObjectNotFoundError) as caught:
                await storage.get(key)
            return caught.value

        errors = await bounded_map(get, ["a", "b", "a"], limit=3)
        assert [error.context["key"] for error in errors] == ["a", "b", "a"]
        assert len({id(error) for error in errors}) == 3


@pytest.mark.parametrize(
    ("size", "on_this_machine", "together"),
    [(10, True, 1), (1 << 17, True, 1), ((1 << 17) + 1, True, 2), (10, False, 2)],
)
async def test_small_blocking_writes_do_not_take_turns_at_each_call(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    on_this_machine: bool,  # noqa: FBT001
    together: int,
) -> None:
    """One after another; unless they are large, or a call asks another machine."""
    monkeypatch.setattr(at_once, "opens_without_requests", lambda _: on_this_machine)
    inside: list[int] = []
    most: list[int] = []
    entered = count()
    meet = threading.Barrier(together)
    write = Files.write

    def watched(self: Files, *arguments: Any) -> Any:
        inside.append(1)
        most.append(len(inside))
        if next(entered) < together:
            meet.wait(240)  # both at once, or it breaks
        try:
            return write(self, *arguments)
        finally:
            inside.pop()

    monkeypatch.setattr(Files, "write", watched)
    async with open_storage(tmp_path) as storage:
        assert isinstance(storage, BlockingStorage)
        puts = [partial(storage.put_blocking, f"a/{number}", bytes(size)) for number in range(8)]
        await asyncio.gather(*(asyncio.to_thread(put) for put in puts))
        assert [(await storage.get(f"a/{number}")).size_bytes for number in range(8)] == [size] * 8
    assert (max(most) == 1) == (together == 1)


def test_helpers_share_work_and_end() -> None:
    """All calls have returned when it is done, also where one fails; threads serve again."""
    helpers = Helpers("test", 3)
    here = threading.current_thread()
    for _ in range(3):
        together = threading.Barrier(4)
        threads: set[threading.Thread] = set()

        def work(
            together: threading.Barrier = together, threads: set[threading.Thread] = threads
        ) -> None:
            together.wait(60)
            threads.add(threading.current_thread())

        helpers.share(work, 5)  # more than there may be
        assert here in threads
        assert len(threads) == 4
        others = threads - {here}
    for fails_here in (True, False):
        ended: list[bool] = []
        both = threading.Barrier(2)

        def fail(
            both: threading.Barrier = both,
            ended: list[bool] = ended,
            *,
            fails_here: bool = fails_here,
        ) -> None:
            both.wait(60)
            is_here = threading.current_thread() is here
            ended.append(is_here)
            if is_here == fails_here:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            helpers.share(fail, 1)
        assert sorted(ended) == [False, True]
    helpers.share(lambda: None, 0)
    helpers.close()
    for thread in others:
        assert not thread.is_alive()


def test_helpers_that_cannot_start_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that exits begins no threads."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError

    monkeypatch.setattr(threading.Thread, "start", refuse)
    calls: list[int] = []
    Helpers("test", 3).share(lambda: calls.append(1), 3)
    assert calls == [1]
