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
arguments are converted here, `asked` declares both methods of a pair that takes the same here, and
`iterated` does so for iterators. The class has the native object in a `handle`, which is asked. The
results may be converted, and arguments with a method `to_native` are:

    @twin_of(AsyncRepository.lookup_tag)
    async def lookup_tag_async(self, tag: str) -> str: ...

    list_tags, list_tags_async = asked(AsyncRepository.list_tags)
    undo, undo_async = asked(AsyncRepository.undo, str)
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Concatenate, cast, overload

from icechunk_async._runtime.blocking.iterators import AsyncCloseableIterator
from icechunk_async._runtime.blocking.portal import run, run_async
from icechunk_async._runtime.blocking.tracebacks import Shortened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

    type Pair[**P, T] = tuple[
        Callable[Concatenate[Any, P], T], Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]
    ]
    type IteratorPair[**P, T] = tuple[
        Callable[Concatenate[Any, P], Iterator[T]],
        Callable[Concatenate[Any, P], AsyncCloseableIterator[T]],
    ]

__all__ = ["asked", "awaited", "blocking", "iterated", "owned", "text_of", "twin_of"]


def awaited[**P, T](
    work: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return a coroutine function that any event loop can await; `work` runs on the portal's."""

    @functools.wraps(work)
    async def method(*args: P.args, **kwargs: P.kwargs) -> T:
        with Shortened():
            return await run_async(work(*args, **kwargs))

    return method


def text_of[**P, T](
    native: Callable[..., object],
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Take the docstring from a native function or method."""

    def declare(work: Callable[P, T]) -> Callable[P, T]:
        work.__doc__ = native.__doc__
        return work

    return declare


def twin_of[**P, T](
    native: Callable[..., object],
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Decorate as `awaited`, and take the docstring from a native method."""
    return lambda work: awaited(text_of(native)(work))


@overload
def asked[N, **P, T](
    native: Callable[Concatenate[N, P], Coroutine[Any, Any, T]],
    *,
    check: Callable[..., None] | None = None,
) -> Pair[P, T]: ...
@overload
def asked[N, **P, T, R](
    native: Callable[Concatenate[N, P], Coroutine[Any, Any, T]],
    convert: Callable[[T], R],
    *,
    known: Callable[Concatenate[Any, P], R | None] | None = None,
    check: Callable[..., None] | None = None,
) -> Pair[P, R]: ...
def asked(native: Any, convert: Any = None, *, known: Any = None, check: Any = None) -> Any:
    """Return a method that blocks and its `_async` twin, which take what a native method takes.

    Args:
        native: the native method.
        convert: makes the result of its result.
        known: see `blocking`.
        check: gets the arguments first, and raises an error for those that the native method
            would take.
    """
    if convert is None:
        return _asked(native, None, None, known, check)

    def make(_: object, found: Any) -> Any:
        return convert(found)

    return _asked(native, make, _named(convert), known, check)


def owned[N, **P, T, R](
    native: Callable[Concatenate[N, P], Coroutine[Any, Any, T]],
    convert: Callable[[Any, T], R],
    *,
    known: Callable[Concatenate[Any, P], R | None] | None = None,
    check: Callable[..., None] | None = None,
) -> Pair[P, R]:
    """Return a pair as `asked` does, where the result needs the handle that was asked as well."""
    made: Pair[P, R] = _asked(native, convert, _named(convert), known, check)
    return made


def _asked(native: Any, make: Any, returned: str | None, known: Any, check: Any) -> Any:
    @functools.wraps(native)
    async def work(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if check is not None:
            check(*args, **kwargs)
        found = await self.handle.ask(_question(native, args, kwargs))
        return found if make is None else make(self.handle, found)

    twin = awaited(_returning(_twin(work), returned))
    return blocking(twin, known), twin


@overload
def iterated[N, **P, T](
    native: Callable[Concatenate[N, P], AsyncIterator[T]],
    *,
    parts: Callable[P, int] | int = 1,
    ahead: bool = True,
) -> IteratorPair[P, T]: ...
@overload
def iterated[N, **P, T, R](
    native: Callable[Concatenate[N, P], AsyncIterator[T]],
    convert: Callable[[T], R],
    *,
    parts: Callable[..., int] | int = 1,
    ahead: bool = True,
) -> IteratorPair[P, R]: ...
def iterated(native: Any, convert: Any = None, *, parts: Any = 1, ahead: bool = True) -> Any:
    """Return a method that returns an iterator and its `_async` twin for ``async for``.

    Args:
        native: the native method, which takes the same.
        convert: makes an item of each of its items.
        parts: the size of each item, see `AsyncCloseableIterator`; or a function that tells it from
            the arguments.
        ahead: fetch the first item when the method that blocks is called, for errors in the
            arguments.
    """

    @functools.wraps(native)
    def twin(self: Any, /, *args: Any, **kwargs: Any) -> AsyncCloseableIterator[Any]:
        items = self.handle.each(_question(native, args, kwargs), convert or _unchanged)
        size: Any = parts(*args, **kwargs) if callable(parts) else parts
        return AsyncCloseableIterator(items, parts=size)

    @functools.wraps(native)
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Iterator[Any]:
        items = twin(self, *args, **kwargs)
        return items.begun() if ahead else items

    # ``AsyncIterator[str]`` becomes ``str``; annotations are text.
    item = _named(convert) or native.__annotations__["return"].partition("[")[2][:-1]
    _returning(method, f"Iterator[{item}]")
    return method, _returning(_twin(twin), f"AsyncCloseableIterator[{item}]")


def _question(native: Any, args: Any, kwargs: Any) -> Callable[[Any], Any]:
    """Return a question by the name of a method: forks override some."""
    given = [_converted(it) for it in args]
    named = {name: _converted(it) for name, it in kwargs.items()}
    return lambda it: getattr(it, native.__name__)(*given, **named)


def _converted(argument: Any) -> Any:
    convert = getattr(argument, "to_native", None)
    return argument if convert is None else convert()


def _twin(made: Any) -> Any:
    """Give a function that wraps a native method the name of a twin."""
    made.__name__, made.__qualname__ = f"{made.__name__}_async", f"{made.__qualname__}_async"
    return made


def _returning(made: Any, returned: str | None) -> Any:
    """Let the signature of a function name the class that it returns."""
    if returned is not None:
        made.__signature__ = inspect.signature(made).replace(return_annotation=returned)
    return made


def _named(convert: Any) -> str | None:
    """Return the name of the class that a function returns; None if there is no function."""
    if convert is None:
        return None
    cls = convert if isinstance(convert, type) else getattr(convert, "__self__", None)
    return cls.__name__ if isinstance(cls, type) else convert.__annotations__["return"]


def _unchanged(item: Any) -> Any:
    return item


def blocking[**P, T](
    twin: Callable[P, Coroutine[Any, Any, T]], known: Callable[P, T | None] | None = None
) -> Callable[P, T]:
    """Return the function that blocks until the work of an `awaited` one is done.

    The twin of a class or static method is wrapped again: `classmethod(blocking(open_async))`.
    Where ``known`` returns a result, from memory, that is returned on the caller's thread.
    """
    # A class or static method holds the function that was decorated.
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
    # Python names the function that was given the wrong arguments: that is what was called.
    for inner in (work, known):
        if inner is not None:
            cast("Any", inner).__qualname__ = method.__qualname__
    return method
