"""Iterators that can be used in ``for`` and in ``async for``."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Self, cast

from icechunk_async._runtime.blocking.portal import run, run_async
from icechunk_async._runtime.blocking.tracebacks import Shortened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

__all__ = ["AsyncCloseableIterator", "in_memory"]


def in_memory[T](pages: Iterator[list[T]]) -> Iterator[T]:
    """Return an iterator over the items of pages that are made on the caller's thread.

    Errors of theirs show the caller. Cost: no step of the interpreter for an item.
    """
    return chain.from_iterable(_shortened(pages))


def _shortened[T](pages: Iterator[T]) -> Iterator[T]:
    with Shortened():
        yield from pages


_LARGEST_BATCH: Final = 256
# Of large items fewer wait in memory: together they have at most this number of parts.
_LARGEST_PARTS: Final = 100_000


class AsyncCloseableIterator[T]:
    """Iterates over the items of an asynchronous iterator that runs on the portal's loop.

    Items are fetched in batches of doubling size: a long iteration takes few turns of the loop,
    and one that ends early has fetched at most twice the items that were used. Of pages the last
    one is fetched whole.
    """

    def __init__(self, items: AsyncIterator[T], *, parts: int = 1) -> None:
        """Iterate over `items`, which has no other user.

        Args:
            items: the iterator.
            parts: the size of each item. Fewer large items are fetched ahead, so that the memory
                of used ones can be used again.
        """
        self._items = items
        self._largest_batch = min(_LARGEST_BATCH, max(1, _LARGEST_PARTS // max(1, parts)))
        self._paged = False
        self._ready: deque[T] = deque()
        self._failure: BaseException | None = None
        self._ended = False
        self._batch = 1

    @classmethod
    def of_pages(cls, pages: AsyncIterator[list[T]]) -> Self:
        """Iterate over the items of `pages`, which has no other user."""
        made = cls(cast("AsyncIterator[Any]", pages))
        made._paged = True
        return made

    def __iter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    def __next__(self) -> T:
        # Outside of the block below, which takes longer than an item: most items are here already.
        try:
            return self._ready.popleft()
        except IndexError:
            pass
        with Shortened():
            if not self._ended:
                run(self._fetch())
            if not self._ready:
                self._end()
                raise StopIteration
        return self._ready.popleft()

    async def __anext__(self) -> T:
        try:
            return self._ready.popleft()
        except IndexError:
            pass
        with Shortened():
            if not self._ended:
                await run_async(self._fetch())
            if not self._ready:
                self._end()
                raise StopAsyncIteration
        return self._ready.popleft()

    def begun(self) -> Self:
        """Fetch the first item, so that errors in the arguments are raised now."""
        with Shortened():
            run(self._fetch())
        return self

    async def aclose(self) -> None:
        """End the iteration, and drop the items that were not used."""
        self._ended = True
        self._ready.clear()
        await run_async(self._close())

    async def _fetch(self) -> None:
        """Fetch a batch; an error is kept until the items before it are used."""
        try:
            while len(self._ready) < self._batch:
                item: Any = await anext(self._items)
                if self._paged:
                    self._ready.extend(item)
                else:
                    self._ready.append(item)
        except StopAsyncIteration:
            self._ended = True
        except Exception as error:
            self._ended = True
            if not self._ready:
                raise
            # Items that came before it were loaded, and a `for` loop sees them before the error, as
            # it would if each were fetched alone.
            self._failure = error
        self._batch = min(2 * self._batch, self._largest_batch)

    def _end(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    async def _close(self) -> None:
        close = getattr(self._items, "aclose", None)
        if close is not None:
            await close()
