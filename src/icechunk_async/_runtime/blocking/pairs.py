"""A method that blocks and its `_async` twin, from one declaration.

    @awaited
    async def lookup_branch_async(self, branch: str) -> str:
        \"\"\"Return the id of the snapshot at the tip of a branch.\"\"\"
        return str(await self.handle.ask(lambda it: it.lookup_branch(branch)))

    lookup_branch = blocking(lookup_branch_async)

Both have the signature and the docstring that are written once, for type checkers as well. The
body always runs on the portal's loop. A plain function that returns a coroutine can be declared
in the same way: what it does before it returns is done on the caller's thread, so warnings point
to the caller's line.

What the native method says already is not said again. `twin_of` takes the docstring of one whose
arguments or result are converted here, and `asked` declares one that is the same here:

    @twin_of(AsyncRepository.lookup_tag)
    async def lookup_tag_async(self, tag: str) -> str: ...

    list_tags_async = asked(AsyncRepository.list_tags)
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Concatenate, Protocol

from icechunk_async._runtime.blocking.portal import run, run_async
from icechunk_async._runtime.blocking.tracebacks import Shortened

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

__all__ = ["asked", "awaited", "blocking", "twin_of"]


class _Handle[N](Protocol):
    """The handle of a native repository or session."""

    async def ask[T](self, question: Callable[[N], Awaitable[T]], /) -> T: ...


class _Asking[N](Protocol):
    """A class of the facade with such a handle."""

    @property
    def handle(self) -> _Handle[N]: ...


def awaited[**P, T](
    work: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return a coroutine function that any event loop can await; `work` runs on the portal's."""

    @functools.wraps(work)
    async def method(*args: P.args, **kwargs: P.kwargs) -> T:
        with Shortened():
            return await run_async(work(*args, **kwargs))

    return method


def twin_of[**P, T](
    native: Callable[..., object],
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Decorate as `awaited`, and take the docstring from a native method."""

    def declare(work: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        work.__doc__ = native.__doc__
        return awaited(work)

    return declare


def asked[N, **P, T](
    native: Callable[Concatenate[N, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return the `_async` twin of a native method that takes and returns the same here."""

    @functools.wraps(native)
    async def work(self: _Asking[N], /, *args: P.args, **kwargs: P.kwargs) -> T:
        def question(it: N) -> Awaitable[T]:  # by name: forks override some methods
            method: Callable[P, Awaitable[T]] = getattr(it, native.__name__)
            return method(*args, **kwargs)

        return await self.handle.ask(question)

    work.__name__, work.__qualname__ = f"{work.__name__}_async", f"{work.__qualname__}_async"
    return awaited(work)


def blocking[**P, T](
    twin: Callable[P, Coroutine[Any, Any, T]], known: Callable[P, T | None] | None = None
) -> Callable[P, T]:
    """Return the function that blocks until the work of an `awaited` one is done.

    The twin of a class or static method is wrapped again: `classmethod(blocking(open_async))`.
    Where ``known`` returns a result, from memory, that is returned on the caller's thread.
    """
    declared: Any = getattr(twin, "__func__", twin)
    work: Callable[P, Coroutine[Any, Any, T]] = declared.__wrapped__

    @functools.wraps(work)
    def method(*args: P.args, **kwargs: P.kwargs) -> T:
        with Shortened():
            if known is not None:
                found = known(*args, **kwargs)
                if found is not None:
                    return found
            return run(work(*args, **kwargs))

    method.__name__ = method.__name__.removesuffix("_async")
    method.__qualname__ = method.__qualname__.removesuffix("_async")
    return method
