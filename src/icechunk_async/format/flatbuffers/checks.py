"""Limits of all readers of FlatBuffers, and the errors for hostile ones.

Imports nothing that takes long: most files are read without columns, and so without NumPy.
"""

from __future__ import annotations

import sys
from typing import Final

from icechunk_async.errors import FormatError

__all__ = [
    "FEW",
    "MAX_REPEATED_TABLES",
    "MAX_SHARING",
    "beyond_table",
    "columns_pay",
    "lacking",
    "lookups_pay_for_all",
    "misaligned",
    "outside",
    "pointless",
    "unfolded",
]

MAX_SHARING: Final = 16
"""The maximum ratio of unfolded strings and numbers to the size of the file.

Writers may let several tables point at one string or vector. A file in which everything points
at everything would unfold without end; genuine ones stay far below this.
"""
MAX_REPEATED_TABLES: Final = 1
"""The maximum ratio of unfolded vectors of tables to the size of the file: writers do not share
them, and each item costs far more than one of a string."""
FEW: Final = 32
"""For fewer tables columns cost more than one table after the other."""
_MANY: Final = 1024
"""To read this number of tables one by one takes half as long as to import NumPy."""

_DECODED_PER_LOOKUP: Final = 64
"""Items that are decoded by columns in the time of a lookup that halves a sorted list."""


def columns_pay(count: int) -> bool:
    """Return whether to read ``count`` tables by columns, which needs NumPy."""
    return count >= (FEW if "numpy" in sys.modules else _MANY)


def lookups_pay_for_all(lookups: int, count: int) -> bool:
    """Return whether lookups in a list took about as long as decoding all of it."""
    return lookups > FEW + count // _DECODED_PER_LOOKUP


def outside() -> FormatError:
    """Return the error for bytes that are not there."""
    return FormatError("A FlatBuffer refers to bytes outside of itself.")


def beyond_table() -> FormatError:
    """Return the error for a field that is not inside of its table."""
    return FormatError("A FlatBuffer table has a field outside of itself.")


def misaligned() -> FormatError:
    """Return the error for a word at a place where none can be."""
    return FormatError("A FlatBuffer holds a misaligned value.")


def pointless() -> FormatError:
    """Return the error for an offset of 0."""
    return FormatError("A FlatBuffer holds an offset that points at itself.")


def lacking(field: str) -> FormatError:
    """Return the error for a required field that is absent."""
    return FormatError(f"A FlatBuffer table lacks its required field {field!r}.")


def unfolded(size: int, size_bytes: int) -> FormatError:
    """Return the error for contents that would grow without end."""
    return FormatError(f"A FlatBuffer of {size} bytes unfolds to {size_bytes}: it is not genuine.")
