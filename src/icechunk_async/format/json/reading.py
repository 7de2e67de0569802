"""Read JSON documents that need not be trusted: any fault in them is a FormatError.

A document is parsed as a whole, so that time and memory are in proportion to its bytes.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from icechunk_async.errors import FormatError
from icechunk_async.format.json.values import MAX_DEPTH, is_list, is_object

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Part", "parse_json"]

_SHOWN: Final = 60
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""The beginning of an escape that is half of a character, and means nothing without the other."""


def parse_json(data: bytes | memoryview, name: str) -> Part:
    """Parse a document that is an object; messages call it ``name``.

    Raises:
        FormatError: it is no JSON in UTF-8, has lone surrogates, nests too deeply, or is no object.
    """
    raw = bytes(data)
    try:
        document = json.loads(str(raw, "utf-8"))
        # Halves of characters can come from escapes alone, as the rest was decoded as UTF-8.
        if _SURROGATE.search(raw):
            json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FormatError(f"A {name} is not JSON, or is truncated: {error}.") from error
    if not is_object(document):
        raise FormatError(f"A {name} is not a JSON object: {raw[:_SHOWN]!r}.")
    # Code that gets the values walks them recursively: to compare, to write, to check them.
    if _is_deep(document, MAX_DEPTH):
        raise FormatError(f"A {name} is nested more than {MAX_DEPTH} deep.")
    return Part(document, f"A {name}")


def _is_deep(value: Any, depth: int) -> bool:
    """Return whether lists and objects are inside one another more than ``depth`` times."""
    # Level by level instead of by recursion, which deep values would take to the stack's end.
    level: list[Any] = [value]
    for _ in range(depth + 1):
        inner: list[Any] = []
        for it in level:
            inner += it.values() if is_object(it) else it
        level = [it for it in inner if is_object(it) or is_list(it)]
        if not level:
            return False
    return True


class Part:
    """An object of a document, and how messages call it."""

    __slots__ = ("members", "name")

    def __init__(self, members: Mapping[str, Any], name: str) -> None:
        """Read ``members``."""
        self.members = members
        self.name = name

    def fault(self, problem: str) -> FormatError:
        """Return the error for a fault of this part."""
        return FormatError(f"{self.name} {problem}.")

    def has(self, key: str) -> bool:
        """Return whether a member is there and not null."""
        return self.members.get(key) is not None

    def only(self, key: str) -> bool:
        """Return whether this is the only member."""
        return list(self.members) == [key]

    def text(self, key: str) -> str:
        """Return a member that is text.

        Raises:
            FormatError: it is missing, or of another kind.
        """
        value = self.members.get(key)
        if isinstance(value, str):
            return value
        raise self._wrong(key, "text")

    def json_object(self, key: str) -> dict[str, Any]:
        """Return a member that is an object; as `text`."""
        value = self.members.get(key)
        if is_object(value):
            return value
        raise self._wrong(key, "an object")

    def json_list(self, key: str) -> list[Any]:
        """Return a member that is a list; as `text`."""
        value = self.members.get(key)
        if is_list(value):
            return value
        raise self._wrong(key, "a list")

    def _wrong(self, key: str, kind: str) -> FormatError:
        found = repr(self.members[key])[:_SHOWN] if key in self.members else "missing"
        return self.fault(f"needs {kind} as {key!r}, which is {found}")

    def part(self, key: str) -> Part:
        """Return a member that is an object, to be read in turn."""
        return Part(self.json_object(key), f"{self.name}, in {key!r},")

    def parts(self, key: str) -> list[Part]:
        """Return a member that is a list of objects, to be read in turn."""
        name = f"{self.name}, in {key!r},"
        return [self.as_part(it, name) for it in self.json_list(key)]

    def as_part(self, value: object, name: str) -> Part:
        """Return a value that must be an object as a part."""
        if is_object(value):
            return Part(value, name)
        raise self.fault(f"has {value!r:.60} in place of an object")

    def natural(self, key: str, limit: int) -> int:
        """Return a member that is an integer from 0 to below ``limit``; as `text`."""
        if key not in self.members:
            raise self._wrong(key, "an integer")
        return self.check_natural(self.members[key], limit)

    def naturals(self, key: str, limit: int) -> list[int]:
        """Return a member that is a list of integers from 0 to below ``limit``; as `text`."""
        return [self.check_natural(it, limit) for it in self.json_list(key)]

    def check_natural(self, value: object, limit: int) -> int:
        """Return a value that must be an integer from 0 to below ``limit``."""
        # `true` is an integer of Python, and 1.0 is not.
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit:
            return value
        raise self.fault(f"has {value!r:.60} in place of an integer from 0 to {limit - 1}")

    def check_naturals(self, value: object, limit: int) -> list[int]:
        """Return a value that must be a list of integers from 0 to below ``limit``."""
        if is_list(value):
            return [self.check_natural(it, limit) for it in value]
        raise self.fault(f"has {value!r:.60} in place of a list of integers")
