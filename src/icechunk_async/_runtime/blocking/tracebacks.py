"""Tracebacks of errors that this library raises on purpose: they show the caller's code.

Its sentence says what to do. The frames of the event loop, of the engine and of the storage's
client say nothing to a caller, nor do the engine's errors that led to it. What is kept as a cause:

* the error of a function of the caller, such as a hook, with the caller's frames;
* of storage that failed and of packages that cannot be imported, the error of the storage's client,
  of the operating system or of the import, without frames, unless the sentence quotes it.

Nothing is left out of errors of other classes, and of the two whose reason may be anywhere: a plain
`StorageError` and an `InternalError`.

With the environment variable `ICECHUNK_ASYNC_FULL_TRACEBACK` set to anything, nothing is left out.
"""

from __future__ import annotations

import functools
import os
import sys
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, override

from icechunk_async.errors import IcechunkError, MissingDriverError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

__all__ = ["OUR_FILES", "Shortened", "managed", "shown_cause"]

OUR_FILES: Final = (str(Path(__file__).parents[2]),)
"""Of the library: with them as `skip_file_prefixes` a warning shows the caller's line."""
_VARIABLE: Final = "ICECHUNK_ASYNC_FULL_TRACEBACK"
_LIBRARIES: Final = sys.stdlib_module_names | {
    *("adlfs", "aiobotocore", "aiohappyeyeballs", "aiohttp", "azure", "botocore", "fsspec"),
    *("gcsfs", "google", "obstore", "opentelemetry", "requests", "urllib3"),
    *("aiofiles", "anyio", "flatbuffers", "msgpack", "numcodecs", "numpy", "tenacity"),
    *("typing_extensions", "virtualizarr", "xarray", "yaml", "zarr", "zstandard"),
}
"""Packages whose frames are not the caller's: those that call us, or that we call.

A frame of any other package is shown: a line too many is better than one too few.
"""
_OURS: Final = frozenset(
    {
        *("icechunk_async", "pyspark_icechunk"),
        *("icechunk_async_azure", "icechunk_async_fsspec", "icechunk_async_gcs"),
        *("icechunk_async_http", "icechunk_async_local", "icechunk_async_memory"),
        *("icechunk_async_obstore", "icechunk_async_s3"),
    }
)
"""The packages of this distribution. Backends of others may be named alike, and are shown."""


def _is_whole(error: BaseException) -> bool:
    """Return whether nothing is left out of what is shown of an error."""
    if not isinstance(error, IcechunkError) or os.environ.get(_VARIABLE):
        return True
    # The first class that the library's own module defines: errors of the facade derive from those.
    classes = type(error).__mro__
    engines = next(it for it in classes if it.__module__ == IcechunkError.__module__)
    return engines is StorageError or any(it.__name__ == "InternalError" for it in classes)


class Shortened:
    """A block; an `IcechunkError` that leaves it has only the caller's frames, and `shown_cause`.

    An error that the caller was handling when the block began stays its context, as Python has it.
    A class, because the generator of `contextmanager` would add frames.
    """

    __slots__ = ("_handled",)

    def __enter__(self) -> None:
        """Keep the error that the caller handles."""
        self._handled = sys.exception()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Dropped, since an error holds frames, and with them whatever those refer to.
        handled, self._handled = self._handled, None
        if error is None or _is_whole(error):
            return
        if error.__cause__ is not None:
            error.__cause__ = shown_cause(error, error.__cause__)
        error.__context__ = None if handled is error else handled
        error.__suppress_context__ = error.__cause__ is not None
        error.__traceback__ = _callers(error.__traceback__)


def managed[**P, T](
    work: Callable[P, Generator[T]],
) -> Callable[P, AbstractContextManager[T]]:
    """Decorate as `contextlib.contextmanager` does; errors show the caller's ``with`` line."""
    plain = contextmanager(work)

    @functools.wraps(work)
    def method(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Managed(functools.partial(plain, *args, **kwargs))

    return method


class _Managed[T](AbstractContextManager[T, bool | None], ContextDecorator):
    """A context manager that is made anew for each block."""

    def __init__(self, make: Callable[[], AbstractContextManager[T]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[T]] = []
        """A stack, since a function that is decorated with it may call itself."""

    @override
    def __enter__(self) -> T:
        with Shortened():
            manager = self._make()
            found = manager.__enter__()
        self._entered.append(manager)
        return found

    @override
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        with Shortened():
            return self._entered.pop().__exit__(exc_type, error, traceback)


def shown_cause(error: BaseException, reason: BaseException) -> BaseException | None:
    """Return the cause to show of an error, which is one of those that led to it.

    None if no cause says more to a caller than the error. The cause returned has lost the frames
    that are not the caller's; one that was not raised in the caller's code has lost its own causes
    as well, which hold frames.
    """
    if _is_whole(error):
        return reason
    # The latest error with a frame of the caller is the one of the caller's function, such as a
    # hook.
    for link in _chain(reason):
        kept = _callers(link.__traceback__)
        if kept is not None:
            return link.with_traceback(kept)
    if not isinstance(error, StorageError | MissingDriverError):
        return None
    outside = next((it for it in _chain(reason) if not isinstance(it, IcechunkError)), None)
    if outside is None or _words(outside) in str(error):
        return None
    outside.__cause__ = outside.__context__ = None
    return outside.with_traceback(None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Return an error and those that led to it, as Python shows them, the last one first."""
    # Code of others may have made a circle of causes.
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _words(error: BaseException) -> str:
    """Return the text of an error; of one of the operating system, what the system said."""
    # Without the number and the path, which our sentence says in another form.
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _callers(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback with those frames that are the caller's."""
    kept: list[TracebackType] = []
    while traceback is not None:
        package = str(traceback.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _LIBRARIES and package not in _OURS:
            kept.append(traceback)
        traceback = traceback.tb_next
    found: TracebackType | None = None
    # Made anew from the end: the frames that are left out may be in a traceback that others hold.
    for it in reversed(kept):
        found = TracebackType(found, it.tb_frame, it.tb_lasti, it.tb_lineno)
    return found
