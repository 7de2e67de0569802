"""Tracebacks of errors that this library raises on purpose: they show the caller's code.

Its sentence says what to do. The frames of the event loop and of the engine, and the errors of the
engine and of the storage's client that led to it, say nothing to a caller. Nothing is left out of
errors of other classes, and of the two whose reason is in their causes: a plain `StorageError` and
an `InternalError`.

With the environment variable `ICECHUNK_ASYNC_FULL_TRACEBACK` set to anything, nothing is left out.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Final

from icechunk_async.errors import IcechunkError, StorageError

__all__ = ["Shortened", "shown_cause"]

_VARIABLE: Final = "ICECHUNK_ASYNC_FULL_TRACEBACK"
_OURS: Final = sys.stdlib_module_names | {
    "anyio",
    "botocore",
    "httpx",
    "icechunk_async",
    "numcodecs",
    "numpy",
    "obstore",
    "xarray",
    "zarr",
}
"""Packages whose frames are not the caller's."""


def _is_whole(error: BaseException) -> bool:
    """Return whether nothing is left out of what is shown of an error."""
    if not isinstance(error, IcechunkError) or os.environ.get(_VARIABLE):
        return True
    classes = type(error).__mro__
    engines = next(it for it in classes if it.__module__ == IcechunkError.__module__)
    return engines is StorageError or any(it.__name__ == "InternalError" for it in classes)


class Shortened:
    """A block; an `IcechunkError` that leaves it has no traceback and no cause but the caller's.

    The caller's functions that ran within, such as hooks, stay in both. An error that the caller
    was handling when the block began stays its context, as Python has it. A class, because the
    generator of `contextmanager` would add frames.
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
        handled, self._handled = self._handled, None
        if error is None or _is_whole(error):
            return
        if error.__cause__ is not None:
            error.__cause__ = _callers_cause(error.__cause__)
        error.__context__ = None if handled is error else handled
        error.__suppress_context__ = error.__cause__ is not None
        error.__traceback__ = _callers(error.__traceback__)


def shown_cause(error: BaseException, reason: BaseException) -> BaseException | None:
    """Return the cause to show of an error: the reason, or an error of the caller's code.

    None if neither says more to a caller than the error.
    """
    return reason if _is_whole(error) else _callers_cause(reason)


def _callers_cause(error: BaseException) -> BaseException | None:
    """Return the first error, of this one and those that led to it, that the caller's code raised.

    None if the caller's code raised no error. Its traceback keeps the frames of the caller only.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        kept = _callers(link.__traceback__)
        if kept is not None:
            return link.with_traceback(kept)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return None


def _callers(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback with those frames that are the caller's."""
    kept: list[TracebackType] = []
    while traceback is not None:
        package = str(traceback.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _OURS:
            kept.append(traceback)
        traceback = traceback.tb_next
    found: TracebackType | None = None
    for it in reversed(kept):
        found = TracebackType(found, it.tb_frame, it.tb_lasti, it.tb_lineno)
    return found
