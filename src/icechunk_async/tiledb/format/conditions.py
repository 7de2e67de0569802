"""Delete conditions: trees of comparisons, which say what cells are kept.

TileDB stores the negation of the condition that the user gave, so true means that a cell stays. A
comparison with a null is false.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.tiledb.format.cursor import Cursor
from icechunk_async.tiledb.format.tiles import decode_generic

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Combination", "Comparison", "Condition", "Node", "Operator", "decode_condition"]

_MAX_DEPTH: Final = 100
"""Each level takes a few bytes of a file, and a frame of the interpreter's stack here."""


class Operator(IntEnum):
    """A comparison by its code in files."""

    LT = 0
    LE = 1
    GT = 2
    GE = 3
    EQ = 4
    NE = 5
    IN = 6
    NOT_IN = 7
    ALWAYS_TRUE = 253
    ALWAYS_FALSE = 254


class Combination(IntEnum):
    """How the parts of a node are combined."""

    AND = 0
    OR = 1
    NOT = 2


@dataclass(frozen=True, slots=True)
class Comparison:
    """A field compared with one value, or with a set of values."""

    field: str
    operator: Operator
    value: bytes
    """The stored bytes of the value; empty compares with null."""
    members: tuple[bytes, ...] = ()
    """The values of the set."""

    def fields(self) -> Iterator[str]:
        """Iterate over the fields that are compared."""
        yield self.field


@dataclass(frozen=True, slots=True)
class Node:
    """Several conditions combined."""

    combination: Combination
    parts: tuple[Condition, ...]

    def fields(self) -> Iterator[str]:
        """Iterate over the fields that are compared."""
        for it in self.parts:
            yield from it.fields()


type Condition = Comparison | Node


def decode_condition(data: bytes | memoryview) -> Condition:
    """Read a file with a delete condition.

    Raises:
        FormatError: it is damaged.
    """
    cursor = Cursor(decode_generic(data, "delete condition"), "delete condition")
    found = _tree(cursor, 0)
    cursor.finish()
    return found


def _tree(cursor: Cursor, depth: int) -> Condition:
    if depth > _MAX_DEPTH:
        raise cursor.damaged("it is nested too deeply")
    if not cursor.flag():
        code = cursor.u8()
        # A part takes 10 bytes at least: its kind, its combination, and a count.
        number = cursor.count(cursor.u64(), 10, "parts")
        if code not in tuple(Combination) or not number:
            raise cursor.damaged(f"it combines {number} parts by {code}")
        return Node(Combination(code), tuple(_tree(cursor, depth + 1) for _ in range(number)))
    code = cursor.u8()
    if code not in tuple(Operator):
        raise cursor.damaged(f"it has the unknown comparison {code}")
    operator = Operator(code)
    field = cursor.text32()
    value = cursor.bytes64()
    if operator not in (Operator.IN, Operator.NOT_IN):
        return Comparison(field, operator, value)
    # Their length in bytes comes first. Where the last value ends is not among them.
    starts = cursor.array("<u8", cursor.u64() // 8).tolist()
    if value and not starts:
        raise cursor.damaged("it has values and no offsets of them")
    spans = list(pairwise([*starts, len(value)]))
    if any(a > b or b > len(value) for a, b in spans):
        raise cursor.damaged("the offsets of its values do not rise")
    members = tuple(value[a:b] for a, b in spans)
    return Comparison(field, operator, b"", members)
