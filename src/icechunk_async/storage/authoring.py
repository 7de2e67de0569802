"""What many backends do alike, so that each need not find out again: conditions and listings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from icechunk_async.errors import PreconditionFailedError
from icechunk_async.storage.protocol import Absent, CommonPrefix, ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from icechunk_async.storage.protocol import Expected, ListEntry, Version

__all__ = ["check_expected", "listed"]


def check_expected(key: str, expected: Expected, found: Version | Absent) -> None:
    """Refuse a write that expects another state than was found.

    The look that found it and the write that follows have to be one atomic step: both under one
    lock, or in one transaction.

    Args:
        key: of the object whose state counts.
        expected: as ``put`` and ``copy`` are given it.
        found: the object's version, or ``ABSENT``.

    Raises:
        PreconditionFailedError: they differ.
    """
    if expected is None or expected == found:
        return
    state = "does not exist" if isinstance(found, Absent) else f"is at {found}"
    raise PreconditionFailedError(
        f"{key!r} {state}, not {expected}; nothing was changed. Read it again.",
        key=key,
        expected=expected,
    )


def listed(
    objects: Iterable[ObjectInfo],
    prefix: str = "",
    start_after: str | None = None,
    delimiter: Literal["/"] | None = None,
) -> Iterator[ListEntry]:
    """Yield what a listing of these objects has to hold, see ``Storage.list_prefix``.

    For stores that do not group keys themselves. Of a listing in pages each is handed in by itself,
    with the last key of the page before as ``start_after``.

    Args:
        objects: in the order of their keys' UTF-8 bytes, which is that of ``str``; those that
            are not wanted are left out.
        prefix: see ``list_prefix``, as are the others.
        start_after: what is not greater is left out, groups included.
        delimiter: with ``"/"``, keys with a further ``/`` after the prefix are grouped.
    """
    last = start_after
    for found in objects:
        cut = found.key.find("/", len(prefix)) + 1 if delimiter else 0
        name = found.key[:cut] if cut else found.key
        if found.key.startswith(prefix) and (last is None or name > last):
            last = name
            yield CommonPrefix(name) if cut else found
