"""Iterators that block and that are awaited."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from icechunk_async._runtime.blocking.iterators import AsyncCloseableIterator

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class _Numbers:
    """Makes numbers and remembers which."""

    def __init__(self, count: int, failure: Exception | None = None) -> None:
        self.made: list[int] = []
        self.closed = False
        self._count = count
        self._failure = failure

    async def make(self) -> AsyncIterator[int]:
        try:
            for number in range(self._count):
                self.made.append(number)
                yield number
            if self._failure is not None:
                raise self._failure
        finally:
            self.closed = True


def test_blocking_iteration_answers_everything_in_order() -> None:
    """However many there are."""
    assert list(AsyncCloseableIterator(_Numbers(1000).make())) == list(range(1000))
    assert list(AsyncCloseableIterator(_Numbers(0).make())) == []


async def test_asynchronous_iteration_answers_everything_in_order() -> None:
    """The iteration runs on a separate loop."""
    items = AsyncCloseableIterator(_Numbers(1000).make())
    assert [item async for item in items] == list(range(1000))


def test_one_that_is_left_early_has_made_little_more_than_was_used() -> None:
    """Each may cost a request."""
    numbers = _Numbers(1000)
    items = AsyncCloseableIterator(numbers.make())
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    assert len(numbers.made) == 3
    next(items)
    assert len(numbers.made) == 7


@pytest.mark.parametrize(
    ("parts", "made"), [(1, [1, 3, 3, 7]), (30_000, [1, 3, 3, 6]), (100_000, [1, 2, 3, 4])]
)
def test_of_large_items_few_are_made_ahead(parts: int, made: list[int]) -> None:
    """Columns of a million chunks would else be in memory all at once, unused."""
    numbers = _Numbers(1000)
    items = AsyncCloseableIterator(numbers.make(), parts=parts)
    found: list[int] = []
    for _ in range(4):
        next(items)
        found.append(len(numbers.made))
    assert found == made
    assert list(items) == list(range(4, 1000))


def test_it_stays_at_its_end() -> None:
    """Python's iterators must do so."""
    items = AsyncCloseableIterator(_Numbers(1).make())
    assert list(items) == [0]
    assert list(items) == []


def test_what_came_before_an_error_is_answered_first() -> None:
    """The error is raised once."""
    items = AsyncCloseableIterator(_Numbers(5, KeyError("broken")).make())
    assert [next(items) for _ in range(5)] == list(range(5))
    with pytest.raises(KeyError, match="broken"):
        next(items)
    assert list(items) == []


def test_an_error_of_the_first_item_is_said_when_it_begins() -> None:
    """Where the caller asked for something that does not exist."""
    with pytest.raises(KeyError, match="broken"):
        AsyncCloseableIterator(_Numbers(0, KeyError("broken")).make()).begun()
    assert list(AsyncCloseableIterator(_Numbers(3).make()).begun()) == [0, 1, 2]


async def test_closing_ends_it() -> None:
    """And what makes the items, at once."""
    numbers = _Numbers(1000)
    items = AsyncCloseableIterator(numbers.make())
    assert await anext(items) == 0
    await items.aclose()
    assert numbers.closed
    assert [item async for item in items] == []


async def test_pages_are_drawn_as_their_items_are_needed() -> None:
    """A long one at once; of short ones as many as items would be."""
    made: list[int] = []

    async def make() -> AsyncIterator[list[int]]:
        for size in (1, 0, 500, 1, 1, 1, 1):
            made.append(size)
            yield [size] * size

    items = AsyncCloseableIterator[int].of_pages(make())
    assert await anext(items) == 1
    assert made == [1]
    assert [await anext(items) for _ in range(500)] == [500] * 500
    assert made == [1, 0, 500]
    assert [item async for item in items] == [1] * 4
