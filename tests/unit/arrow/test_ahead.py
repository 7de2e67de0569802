"""The next part is read while the last one is in use, and no further."""

from __future__ import annotations

import threading
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING

import pytest

from icechunk_async._runtime.blocking.portal import run
from icechunk_async.arrow.rows import one_ahead

if TYPE_CHECKING:
    from collections.abc import Iterator

PLACE: ContextVar[str] = ContextVar("place")


class Result:
    """The result for an item, to which references can be counted."""

    def __init__(self, item: int) -> None:
        self.item = item


class Work:
    """Notes what is done, and on which thread."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.asked: list[int] = []
        self.done = [threading.Event() for _ in range(10)]
        self.threads: dict[int, str] = {}
        self.alive = weakref.WeakSet[Result]()
        self.most = 0

    def items(self, count: int) -> Iterator[int]:
        """Return numbers, and note which were asked for."""
        for item in range(count):
            self.asked.append(item)
            yield item

    def __call__(self, item: int) -> Result:
        """Return a result."""
        assert PLACE.get() == "here"
        self.begun.append(item)
        self.threads[item] = threading.current_thread().name
        found = Result(item)
        self.alive.add(found)
        self.most = max(self.most, len(self.alive))
        self.done[item].set()
        return found


@pytest.fixture
def work() -> Iterator[Work]:
    """Work that needs a variable of the context; no thread is left behind."""
    token = PLACE.set("here")
    yield Work()
    PLACE.reset(token)
    assert not [it for it in threading.enumerate() if it.name.startswith("icechunk-rows")]


def test_the_first_result_causes_no_other_work(work: Work) -> None:
    """A caller that stops there has read the first item alone."""
    found = one_ahead(work.items(5), work, lambda _: True)
    assert next(found).item == 0
    found.close()
    assert (work.begun, work.asked) == ([0], [0])


def test_one_item_is_worked_on_ahead(work: Work) -> None:
    """On a thread, while the caller has the result before; two results are alive at most."""
    found = one_ahead(work.items(6), work, lambda _: True)
    for item in range(6):
        assert next(found).item == item
        if 1 <= item < 5:
            assert work.done[item + 1].wait(60)
        assert work.begun == list(range(min(item + 2, 6) if item else 1))
    assert next(found, None) is None
    here = threading.current_thread().name
    assert [work.threads[it] == here for it in range(6)] == [True, True, *[False] * 4]
    assert work.most <= 2


def test_large_items_are_alone(work: Work) -> None:
    """None is worked on before the last one is out of use."""
    found = one_ahead(work.items(5), work, lambda _: False)
    for item in range(5):
        assert next(found).item == item
        assert work.begun == list(range(item + 1))
    assert next(found, None) is None
    assert work.most == 1


@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_an_error_comes_where_its_result_would(work: Work, at: int) -> None:
    """The results before it come first; no later item is worked on."""

    def fails(item: int) -> Result:
        if item == at:
            work.begun.append(item)
            raise ValueError(item)
        return work(item)

    found = one_ahead(work.items(9), fails, lambda _: True)
    for item in range(at):
        assert next(found).item == item
    with pytest.raises(ValueError, match=str(at)):
        next(found)
    assert work.begun == list(range(at + 1))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_there_may_be_few_items(work: Work, count: int) -> None:
    """Or none."""
    results = [it.item for it in one_ahead(work.items(count), work, lambda _: True)]
    assert results == list(range(count))


def test_collection_on_the_loop_does_not_wait_for_it() -> None:
    """The work may need the loop: waiting for each other, both would hang."""
    begun, closed, ended = (threading.Event() for _ in range(3))
    in_time: list[bool] = []

    def needs_the_loop(item: int) -> None:
        if item == 2:
            begun.set()
            in_time.append(closed.wait(30))
            ended.set()

    found = one_ahead(range(3), needs_the_loop, lambda _: True)
    next(found)
    next(found)
    assert begun.wait(60)

    async def collect() -> None:
        found.close()
        closed.set()

    run(collect())
    assert ended.wait(60)
    assert in_time == [True]


def test_collection_on_the_own_thread_does_not_wait_for_it() -> None:
    """No thread can join itself."""
    paused, ended = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def collects(item: int) -> None:
        if item == 2:
            paused.wait(60)
            try:
                found.close()
            except RuntimeError as error:
                errors.append(error)
            ended.set()

    found = one_ahead(range(3), collects, lambda _: True)
    next(found)
    next(found)
    paused.set()
    assert ended.wait(60)
    assert not errors
