"""Files about commits: consolidated ones, what to ignore, what to vacuum, and footers."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.tiledb.format.conditions import decode_condition
from icechunk_async.tiledb.format.cursor import Cursor, text_of
from icechunk_async.tiledb.format.tiles import decode_generic, generic_length

if TYPE_CHECKING:
    from icechunk_async.tiledb.format.conditions import Condition

__all__ = [
    "ConsolidatedCommits",
    "FooterPlace",
    "decode_consolidated",
    "decode_footers",
    "decode_lines",
    "last_part",
]

_DELETE: Final = ".del"
_END: Final = b"\n"
_MAX_LINE: Final = 1 << 16
"""Lines and binary conditions alternate, so the search for a line's end has one itself."""


@dataclass(frozen=True, slots=True)
class ConsolidatedCommits:
    """The contents of a file of consolidated commits."""

    commits: tuple[str, ...]
    """Names of commit files, without their folder."""
    conditions: dict[str, Condition]
    """Delete conditions by the name of their file."""


@dataclass(frozen=True, slots=True)
class FooterPlace:
    """A footer in a file of consolidated fragment metadata."""

    fragment: str
    """The fragment's name."""
    data: memoryview
    """The footer, without its own length; what follows belongs to the next one."""


def last_part(uri: str) -> str:
    """Return the last part of a URI or a path, which is a name."""
    # Before version 19 vacuumed fragments are listed by absolute URIs, wrong once an array moved.
    return uri.rstrip("/").rpartition("/")[2]


def decode_lines(data: bytes | memoryview) -> list[str]:
    """Return the names on the lines of a file of names: the last part of each URI."""
    return [last_part(text_of(it)) for it in bytes(data).split(_END) if it]


def decode_consolidated(data: bytes | memoryview) -> ConsolidatedCommits:
    """Read a file of consolidated commits: lines, of which some are followed by a condition.

    Raises:
        FormatError: it is damaged.
    """
    cursor = Cursor(data, "file of consolidated commits")
    whole = bytes(data)
    commits: list[str] = []
    conditions: dict[str, Condition] = {}
    while cursor.remaining:
        start = cursor.position
        end = whole.find(_END, start, start + _MAX_LINE)
        if end < 0:
            raise cursor.damaged("a line does not end")
        name = last_part(text_of(cursor.take(end - start)))
        cursor.take(1)
        commits.append(name)
        if name.endswith(_DELETE):
            body = cursor.take(cursor.u64())
            conditions[name] = decode_condition(body[: generic_length(body, "delete condition")])
    return ConsolidatedCommits(tuple(commits), conditions)


def decode_footers(data: bytes | memoryview) -> list[FooterPlace]:
    """Read a file of consolidated fragment metadata: the footers of many fragments.

    Raises:
        FormatError: it is damaged.
    """
    what = "file of consolidated fragment metadata"
    plain = memoryview(decode_generic(data, what))
    # A generic tile with a count, though TileDB's notes on the format have a bare list.
    cursor = Cursor(plain, what)
    number = cursor.count(cursor.u32(), 16, "fragments")
    entries = [(last_part(cursor.text64()), cursor.u64()) for _ in range(number)]
    first = cursor.position
    found: list[FooterPlace] = []
    # No length is stored with a footer here: it ends where the next one begins.
    following = dict(pairwise([*sorted({at for _, at in entries}), len(plain)]))
    for fragment, at in entries:
        if not first <= at < len(plain):
            raise cursor.damaged(f"the footer of {fragment!r} is not in it")
        found.append(FooterPlace(fragment, plain[at : following[at]]))
    return found
