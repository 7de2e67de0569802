"""Conditions: columns compared with literals, all or some of which must hold.

Queries by value and the tables of Spark take the same conditions. Nothing here knows either: this
puts conditions together, and compares arrays of NumPy with literals.
"""

from __future__ import annotations

import math
import re
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    type Mask = npt.NDArray[np.bool_]
    type Tree[T] = T | Junction
    """Something, or such trees joined."""
    type Where = Tree[Predicate]

__all__ = [
    "MOMENT",
    "OPERATORS",
    "Junction",
    "Moment",
    "Predicate",
    "about",
    "columns_of",
    "combined",
    "joined",
    "leaves",
    "mapped",
    "offset_us",
    "split_by_column",
]

MOMENT: Final = re.compile(
    r"(?P<moment>-?\d{4,6}(?:-\d\d(?:-\d\d(?:[T ]\d\d(?::\d\d(?::\d\d(?:\.\d{1,6})?)?)?)?)?)?)"
    r"\s*(?P<zone>Z|UTC|[-+]\d\d:\d\d)?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Predicate:
    """A column compared with literals. Null satisfies the operator `null` only."""

    column: str
    op: str
    """`=`, `!=`, `<`, `<=`, `>`, `>=`, `in`, `not in`, `null`, `not null`."""
    values: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Moment:
    """A literal that is a moment and no text, such as `DATE '2020-01-31'`."""

    type: str
    """`DATE` or `TIMESTAMP`."""
    text: str

    def __str__(self) -> str:
        """Return it as SQL writes it."""
        return f"{self.type} '{self.text}'"


@dataclass(frozen=True, slots=True)
class Junction:
    """Conditions that must all hold, or any of them; at least two.

    There is no `not`: parsing leaves it to the comparisons. So if the parts of a junction are
    replaced by what holds wherever they hold, the whole holds wherever it held.
    """

    parts: tuple[Any, ...]
    is_any: bool


def joined[T](parts: Sequence[Tree[T]], *, is_any: bool) -> Tree[T]:
    """Return conditions, at least one, as one; without junctions that are within their like."""
    if len(parts) == 1:
        return parts[0]
    flat: list[Tree[T]] = []
    for it in parts:
        # Flat, so that parts about one column meet and are decided together, see `split_by_column`.
        if isinstance(it, Junction) and it.is_any == is_any:
            flat.extend(it.parts)
        else:
            flat.append(it)
    return Junction(tuple(flat), is_any)


def leaves[T](*trees: Tree[T]) -> Iterator[T]:
    """Iterate over what is joined, from left to right."""
    for it in trees:
        if isinstance(it, Junction):
            yield from leaves(*it.parts)
        else:
            yield it


def mapped[T, U](tree: Tree[T], made: Callable[[T], U]) -> Tree[U]:
    """Return a tree with something made of each leaf."""
    if isinstance(tree, Junction):
        return Junction(tuple(mapped(it, made) for it in tree.parts), tree.is_any)
    return made(tree)


def combined[T](tree: Tree[T], mask_of: Callable[[T], Mask]) -> Mask:
    """Return the mask of a tree, given those of its leaves, which can be broadcast together."""
    if isinstance(tree, Junction):
        masks = [combined(it, mask_of) for it in tree.parts]
        return reduce(np.logical_or if tree.is_any else np.logical_and, masks)
    return mask_of(tree)


def columns_of(*given: Where) -> list[str]:
    """Return the columns that conditions are about, each once."""
    return list(dict.fromkeys(it.column for it in leaves(*given)))


def about(where: Where, column: str) -> Where | None:
    """Return the condition on one column that another one implies; None for nothing."""
    if not isinstance(where, Junction):
        return where if where.column == column else None
    found = [about(it, column) for it in where.parts]
    known = [it for it in found if it is not None]
    # Of `x > 1 or y > 2` nothing follows for x alone: any x may do. Of `and` each part follows.
    if not known or (where.is_any and len(known) < len(found)):
        return None
    return joined(known, is_any=where.is_any)


def split_by_column[T](where: Where, made: Callable[[str, Where], T]) -> Tree[T]:
    """Return a tree whose leaves are made of the largest conditions on a single column."""
    columns = columns_of(where)
    if not isinstance(where, Junction) or len(columns) == 1:
        return made(columns[0], where)
    own: dict[str, list[Where]] = {}
    found: list[Tree[T]] = []
    for it in where.parts:
        # `x > 1 and y > 2 and x < 5` becomes (x > 1 and x < 5) and y > 2. Where a chunk has the
        # coordinates 0 and 9, one is above 1 and one below 5, and only together they show that no
        # cell is both.
        names = columns_of(it)
        if len(names) == 1:
            own.setdefault(names[0], []).append(it)
        else:
            found.append(split_by_column(it, made))
    found += [made(name, joined(some, is_any=where.is_any)) for name, some in own.items()]
    return joined(found, is_any=where.is_any)


def offset_us(zone: str) -> int:
    """Return how far a zone of a moment is before UTC, in microseconds."""
    if zone in {"Z", "UTC"}:
        return 0
    minutes = int(zone[1:3]) * 60 + int(zone[4:6])
    return (-1 if zone[0] == "-" else 1) * minutes * 60_000_000


# As Spark compares: NaN equals itself and is greater than all other numbers. NumPy says neither.
def _equal(values: npt.NDArray[Any], literal: Any) -> Mask:
    if isinstance(literal, float) and math.isnan(literal):
        return np.isnan(values)
    return np.asarray(values == literal, bool)


def _less(values: npt.NDArray[Any], literal: Any) -> Mask:
    if isinstance(literal, float) and math.isnan(literal):
        return ~np.isnan(values)
    return np.asarray(values < literal, bool)


def _among(values: npt.NDArray[Any], literals: Sequence[Any]) -> Mask:
    mask = np.zeros(values.shape, bool)
    for it in literals:
        mask |= _equal(values, it)
    return mask


OPERATORS: Final[dict[str, Callable[[npt.NDArray[Any], Sequence[Any]], Mask]]] = {
    "=": lambda values, it: _equal(values, it[0]),
    "!=": lambda values, it: ~_equal(values, it[0]),
    "<": lambda values, it: _less(values, it[0]),
    "<=": lambda values, it: _less(values, it[0]) | _equal(values, it[0]),
    ">": lambda values, it: ~(_less(values, it[0]) | _equal(values, it[0])),
    ">=": lambda values, it: ~_less(values, it[0]),
    "in": _among,
    "not in": lambda values, it: ~_among(values, it),
}
