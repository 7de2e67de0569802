"""Work on the next item while the result of the last one is in use."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.blocking import portal

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

__all__ = ["one_ahead"]

_THREADS: Final = "icechunk-rows"


def one_ahead[T, R](
    items: Iterable[T], work: Callable[[T], R], is_small: Callable[[T], bool]
) -> Generator[R]:
    """Return the results of some work on items, in order.

    From the second item on, the next one is worked on meanwhile, on a thread. A caller that stops
    after the first result has caused no other work.

    Args:
        items: what to work on.
        work: called with an item, on one thread at a time, in a copy of the caller's context.
        is_small: whether an item may be worked on while the result of another is in use.

    Close the generator, or use it up: then no thread of it is left. If it is garbage collected,
    on any thread, work that has started ends by itself.

    Memory: two results of small items, or of one that is not and one that is.
    """
    rest = iter(items)
    item = next(rest, None)
    if item is not None:
        yield work(item)
        item = next(rest, None)
    if item is None:
        return
    pool = ThreadPoolExecutor(1, _THREADS)
    begun: Future[R] | None = None
    try:
        while item is not None:
            done = [work(item) if begun is None else begun.result()]
            item, begun = next(rest, None), None
            if item is not None and is_small(item):
                begun = pool.submit(copy_context().run, work, item)
            yield done.pop()  # which is not referred to here while it is in use
    finally:
        pool.shutdown(wait=_may_wait(), cancel_futures=True)


def _may_wait() -> bool:
    """Return whether this is no thread that the work needs: collection may run on these, too."""
    return not portal.is_here() and not threading.current_thread().name.startswith(_THREADS)
