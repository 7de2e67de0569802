"""Filters that are expressions of Arrow: their columns, and where no row can pass. Pure.

What is known of some rows is an expression, too: coordinates and values lie between bounds. Arrow
simplifies the filter by what is known; where it becomes false, none of the rows can pass. Arrow
offers that for the files of a dataset, so each thing that is known stands for a file here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow import fs

from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["as_expression", "between", "joined", "may_match", "needed_columns"]


def between(name: str, low: Any, high: Any, *, nullable: bool = False) -> pc.Expression:
    """Return that a column lies between two scalars, both included, or may be null as well."""
    column: Any = pc.field(name)
    found: pc.Expression
    if nullable:
        # In this form Arrow understands it.
        is_null = column.is_null()
        found = ((column >= low) | is_null) & ((column <= high) | is_null)
    else:
        found = (column >= low) & (column <= high)
    return found


def joined(first: pc.Expression | None, second: pc.Expression | None) -> pc.Expression | None:
    """Return the filter that keeps what both keep; None keeps all rows."""
    if first is None or second is None:
        return second if first is None else first
    return first & second


def as_expression(filters: Any) -> pc.Expression | None:
    """Return a filter as an expression of Arrow.

    Args:
        filters: an expression; or a list of tuples such as ``("x", ">", 3)``, which must all hold;
            or a list of such lists, of which one must hold; or None.

    Raises:
        InvalidInputError: it is something else.
    """
    if filters is None or isinstance(filters, pc.Expression):
        return filters
    import pyarrow.parquet as pq  # noqa: PLC0415 -- slow to import

    try:
        found: pc.Expression = pq.filters_to_expression(filters)
    except (ValueError, TypeError, IndexError) as error:
        raise InvalidInputError(
            f"{filters!r:.200} is not a filter: {error}. Give an expression of pyarrow.compute, or "
            "a list of tuples such as ('x', '>', 3)."
        ) from error
    return found


def needed_columns(expression: pc.Expression, schema: pa.Schema) -> list[str]:
    """Return the columns that an expression refers to.

    Raises:
        InvalidInputError: it refers to one that does not exist, or cannot be computed.
    """
    _bind(expression, schema)
    # Arrow does not tell what an expression refers to, but refuses to bind it without that.
    return [
        name
        # One column is left out at a time. If the filter binds without it, it does not need it.
        for number, name in enumerate(schema.names)
        if not _binds(expression, schema.remove(number))
    ]


def _binds(expression: pc.Expression, schema: pa.Schema) -> bool:
    try:
        _bind(expression, schema)
    except InvalidInputError:
        return False
    return True


def _bind(expression: pc.Expression, schema: pa.Schema) -> None:
    try:
        schema.empty_table().filter(expression)
    except (
        pa.ArrowInvalid,
        pa.ArrowNotImplementedError,
        pa.ArrowKeyError,
        pa.ArrowTypeError,
    ) as error:
        raise InvalidInputError(
            f"The filter {str(expression)[:200]!r} cannot be applied: {error}. Columns: "
            f"{', '.join(schema.names)[:500]}."
        ) from error


_NAN: Final = re.compile(r"(?<![\w\"])nan(?![\w\"])")
"""NaN in the text of an expression; columns of that name only cost more reading."""


def may_match(
    expression: pc.Expression, schema: pa.Schema, known: Sequence[pc.Expression | None]
) -> npt.NDArray[np.bool_]:
    """Return for each thing of which something is known whether a row of it can pass a filter."""
    found = np.zeros(len(known), bool)
    if not len(known):
        return found
    if _NAN.search(str(expression)):
        # Arrow takes every comparison of bounds with NaN for fulfilled, and so its negation for
        # false, while it keeps each row of which no comparison is true.
        return np.ones(len(known), bool)
    always = pc.scalar(True)  # noqa: FBT003 -- Arrow's
    # No file is opened: Arrow only looks at what each is said to hold.
    dataset = ds.FileSystemDataset.from_paths(
        [str(number) for number in range(len(known))],
        schema=schema,
        format=ds.IpcFileFormat(),
        filesystem=fs.LocalFileSystem(),
        partitions=[always if it is None else it for it in known],
    )
    for fragment in dataset.get_fragments(filter=expression):
        found[int(fragment.path)] = True
    return found
