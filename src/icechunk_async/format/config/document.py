"""A configuration as a document: what the stored forms have in common, and typed reading of it.

YAML and FlexBuffers hold the same document. Only YAML has scalars without a type, and tags.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, cast

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from enum import StrEnum

    from icechunk_async.format.json.values import JSON

__all__ = [
    "Document",
    "Plain",
    "Scalar",
    "Variant",
    "as_json",
    "is_null",
    "read_boolean",
    "read_choice",
    "read_integer",
    "read_list",
    "read_map",
    "read_pair",
    "read_text",
    "read_variant",
    "wrong",
]

# The core schema of YAML 1.2, which the official engine reads by: "yes", "on" and 010 are not of
# it.
_NULLS: Final = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS: Final = {"true": True, "True": True, "TRUE": True} | dict.fromkeys(
    ("false", "False", "FALSE"), False
)
# Digits are limited, far beyond any field: of thousands of them int() would raise another error.
_INTEGER: Final = re.compile(r"[-+]?(0|[1-9][0-9]{0,30})|0o[0-7]{1,30}|0x[0-9a-fA-F]{1,30}")


class Plain(str):
    """A scalar written without quotes: text, number, boolean or null as the reader needs it."""

    __slots__ = ()

    def resolved(self) -> int | bool | str | None:
        """Return the YAML 1.2 value; numbers with a fraction stay text."""
        if self in _NULLS:
            return None
        if self in _BOOLS:
            return _BOOLS[self]
        return int(self, 0) if _INTEGER.fullmatch(self) else str(self)


@dataclass(frozen=True, slots=True)
class Variant:
    """A choice that carries a value: a tag in YAML, a map of one entry elsewhere."""

    name: str
    value: Document


type Scalar = bool | int | str | None
type Document = Scalar | list[Document] | dict[str, Document] | Variant


def as_json(document: Document) -> JSON:
    """Return the document without tags: a choice becomes a map of one entry."""
    match document:
        case Variant(name, value):
            return {name: as_json(value)}
        case dict():
            return {key: as_json(value) for key, value in document.items()}
        case list():
            return [as_json(item) for item in document]
        case _:
            return document


def is_null(raw: object) -> bool:
    """Return whether a value of a document is null."""
    return raw is None or (isinstance(raw, Plain) and raw.resolved() is None)


def read_map(raw: object, where: str) -> Mapping[str, object]:
    """Return a map; null is an empty one.

    Raises:
        FormatError: it is no map.
    """
    if is_null(raw):
        return {}
    if not isinstance(raw, dict):
        raise wrong(where, raw, "a map")
    return cast("dict[str, object]", raw)


def read_list(raw: object, where: str) -> list[object]:
    """Return a list.

    Raises:
        FormatError: it is no list.
    """
    if not isinstance(raw, list):
        raise wrong(where, raw, "a list")
    return cast("list[object]", raw)


def read_pair(raw: object, where: str, allowed: str) -> tuple[object, object]:
    """Return the two items of a list; ``allowed`` says in the message what they are.

    Raises:
        FormatError: it is no list of two.
    """
    items = read_list(raw, where)
    if len(items) != 2:
        raise wrong(where, items, allowed)
    return items[0], items[1]


def read_integer(raw: object, where: str) -> int:
    """Return an integer.

    Raises:
        FormatError: it is no integer.
    """
    value = raw.resolved() if isinstance(raw, Plain) else raw
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(where, raw, "an integer")
    return value


def read_boolean(raw: object, where: str) -> bool:
    """Return a boolean.

    Raises:
        FormatError: it is no boolean.
    """
    value = raw.resolved() if isinstance(raw, Plain) else raw
    if not isinstance(value, bool):
        raise wrong(where, raw, "true or false")
    return value


def read_text(raw: object, where: str) -> str:
    """Return text.

    Raises:
        FormatError: it is no text.
    """
    if not isinstance(raw, str):
        raise wrong(where, raw, "text")
    return str(raw)


def read_choice(cls: type[StrEnum], raw: object, where: str) -> StrEnum:
    """Return a member of an enumeration.

    Raises:
        FormatError: it is no name of one.
    """
    name = read_variant(raw, where)[0]
    try:
        return cls(name)
    except ValueError:
        raise wrong(where, raw, f"one of {', '.join(cls)}") from None


def read_variant(raw: object, where: str) -> tuple[str, object]:
    """Read a choice: its name, and the value it carries.

    Names are compared in snake case, since old files have them in camel case.

    Raises:
        FormatError: it is neither a name nor a map of one.
    """
    # Text is a choice without a value, a map of one entry a choice with one.
    value: object = None
    if isinstance(raw, str):
        name = raw
    else:
        entries = list(read_map(raw, where).items())
        if len(entries) != 1:
            raise wrong(where, raw, "a name, or a map of one name and its value")
        ((name, value),) = entries
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower(), value


def wrong(where: str, raw: object, allowed: str) -> FormatError:
    """Return the error for a value; ``where`` names it, ``allowed`` says what it may be."""
    # Only the type is shown: options of stores may be secrets.
    found = "null" if is_null(raw) else f"of type {type(raw).__name__}"
    if isinstance(raw, (int, Plain)) and "store" not in where:
        found = f"{raw!r:.64}"
    return FormatError(f"{where} is {found}; allowed: {allowed}.", field=where)
