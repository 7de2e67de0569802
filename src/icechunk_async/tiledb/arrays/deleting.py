"""Apply delete conditions to cells: which of them are kept. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.errors import FormatError
from icechunk_async.tiledb.format.conditions import Combination, Comparison, Node, Operator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from icechunk_async.tiledb.arrays.cells import Cells
    from icechunk_async.tiledb.format.conditions import Condition

    type Mask = npt.NDArray[np.bool_]

__all__ = ["kept_cells"]

_COMPARE: Final[dict[Operator, Callable[[Any, Any], Any]]] = {
    Operator.LT: np.less,
    Operator.LE: np.less_equal,
    Operator.GT: np.greater,
    Operator.GE: np.greater_equal,
    Operator.EQ: np.equal,
    Operator.NE: np.not_equal,
}


def kept_cells(condition: Condition, columns: Mapping[str, Cells], count: int) -> Mask:
    """Return which cells a delete condition keeps.

    Args:
        condition: as stored, the negation of what the user gave.
        columns: the cells of all fields that it compares.
        count: the number of cells.

    Raises:
        FormatError: it compares a field that does not exist, or with a value of another size.
    """
    if isinstance(condition, Node):
        parts = [kept_cells(it, columns, count) for it in condition.parts]
        match condition.combination:
            case Combination.AND:
                every: Mask = np.logical_and.reduce(parts)
                return every
            case Combination.OR:
                some: Mask = np.logical_or.reduce(parts)
                return some
            case Combination.NOT:
                return ~parts[0]
    cells = columns.get(condition.field)
    if cells is None:
        raise FormatError(
            f"A delete condition of a TileDB array compares {condition.field!r}, which the array "
            "no longer has. Read it at an earlier time, or consolidate it with TileDB."
        )
    return _compare(condition, cells, count)


def _compare(it: Comparison, cells: Cells, count: int) -> Mask:
    if it.operator is Operator.ALWAYS_TRUE:
        return np.ones(count, bool)
    if it.operator is Operator.ALWAYS_FALSE:
        return np.zeros(count, bool)
    is_set = it.operator in (Operator.IN, Operator.NOT_IN)
    if not is_set and not it.value and cells.valid is not None:
        # Nothing to compare with stands for null.
        return ~cells.valid if it.operator is Operator.EQ else cells.valid.copy()
    values, convert = _comparable(cells)
    members = [convert(member) for member in (it.members if is_set else (it.value,))]
    if is_set:
        found = np.zeros(count, bool)
        for member in members:
            found |= _as_mask(np.equal(values, member), count)
        if it.operator is Operator.NOT_IN:
            found = ~found
    else:
        found = _as_mask(_COMPARE[it.operator](values, members[0]), count)
    # A comparison with a null is false, so that null cells are not kept.
    return found if cells.valid is None else found & cells.valid


def _as_mask(found: Any, count: int) -> Mask:
    return np.broadcast_to(np.asarray(found, bool), count).copy()


def _comparable(cells: Cells) -> tuple[npt.NDArray[Any], Callable[[bytes], Any]]:
    """Return values that can be compared, and a function that turns stored bytes into one."""
    field = cells.field
    if cells.offsets is not None or field.values != 1:
        # Of several values, and of variable length, TileDB compares the stored bytes.
        items = np.empty(len(cells), object)
        items[:] = cells.stored_items()
        return items, lambda data: data
    dtype = field.dtype

    def number(data: bytes) -> Any:
        if len(data) != dtype.itemsize:
            raise FormatError(
                f"A delete condition of a TileDB array compares {field.name!r}, of "
                f"{dtype.itemsize} bytes, with a value of {len(data)} bytes."
            )
        return np.frombuffer(data, dtype)[0]

    return cells.flat(), number
