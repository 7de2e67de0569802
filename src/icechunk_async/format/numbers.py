"""Sequence numbers as letters, of which the newest comes first in a listing.

Number n is 1099511627775 - n in Crockford base32, eight letters, as in the names of the alpha's
branch files ("Creating and Updating Branches").
"""

from __future__ import annotations

from typing import Final

from icechunk_async.format.ids import ALPHABET

__all__ = ["LAST_NUMBER", "decode_number", "encode_number"]

LAST_NUMBER: Final = (1 << 40) - 1
"""The most that a sequence can count to: 1099511627775."""
_LETTERS: Final = 8
_VALUES: Final = {letter: value for value, letter in enumerate(ALPHABET)}


def encode_number(number: int) -> str:
    """Return the eight letters of a sequence number; greater numbers sort first."""
    rest = LAST_NUMBER - number
    return "".join(ALPHABET[rest >> place & 31] for place in range(5 * _LETTERS - 5, -1, -5))


def decode_number(text: str) -> int | None:
    """Return the sequence number that eight letters stand for; None if they stand for none."""
    if len(text) != _LETTERS or any(letter not in _VALUES for letter in text):
        return None
    rest = 0
    for letter in text:
        rest = rest << 5 | _VALUES[letter]
    return LAST_NUMBER - rest
