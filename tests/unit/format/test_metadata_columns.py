"""Metadata values read by columns are those that are read one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.buffer import Buffer
from icechunk_async.format.flatbuffers.reading import Vectors
from icechunk_async.format.json import columns
from icechunk_async.format.json.columns import decode_flexbuffers
from icechunk_async.format.json.flexbuffers import decode_flexbuffer
from icechunk_async.format.json.flexbuffers_writing import encode_flexbuffer
from tests.helpers import examples

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

ROWS = 40
"""More than are read one by one."""
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8"), max_size=300),
    st.lists(st.integers(0, 300), max_size=3),
)


def vectors(values: Sequence[bytes]) -> Vectors:
    """Lay values one after the other, as a file has them."""
    sizes = np.array([len(it) for it in values], np.int64)
    return Vectors(Buffer(b"\0" + b"".join(values)), 1 + np.cumsum(sizes) - sizes, sizes, 1)


def one_by_one(values: Sequence[bytes]) -> Any:
    """Read each value; return them, or the class of the error."""
    try:
        return [decode_flexbuffer(it) for it in values]
    except FormatError:
        return FormatError


def together(values: Sequence[bytes]) -> Any:
    """Return the same by columns."""
    try:
        return decode_flexbuffers(vectors(values))
    except FormatError:
        return FormatError


@examples(60)
@given(st.lists(SCALARS, min_size=ROWS, max_size=ROWS + 10))
def test_values_are_the_same_by_columns(values: list[Any]) -> None:
    """Types too: `True` is not 1."""
    found = decode_flexbuffers(vectors([encode_flexbuffer(it) for it in values]))
    assert [(type(it), it) for it in found] == [(type(it), it) for it in values]


@examples(150)
@given(
    st.lists(SCALARS.map(encode_flexbuffer) | st.binary(max_size=12), min_size=1, max_size=4),
    st.binary(min_size=1, max_size=3),
    st.integers(0, 20),
)
def test_damaged_values_are_refused_by_columns_as_one_by_one(
    values: list[bytes], damage: bytes, at: int
) -> None:
    """Random bytes, and bytes that replace others."""
    raw = bytearray(values[0])
    raw[at : at + len(damage)] = damage
    damaged = [bytes(raw), *values] + [encode_flexbuffer("text")] * ROWS
    assert together(damaged) == one_by_one(damaged)


def test_each_byte_of_a_text_and_of_a_number_counts() -> None:
    """Sizes, offsets, types and widths are looked at as one by one."""
    fill = [encode_flexbuffer("text")] * ROWS
    for good in (encode_flexbuffer("abc"), encode_flexbuffer(300)):
        for at in range(len(good)):
            for byte in (0, 1, 2, 3, 4, 5, 8, 20, 21, 24, 36, 255):
                damaged = [good[:at] + bytes([byte]) + good[at + 1 :], *fill]
                assert together(damaged) == one_by_one(damaged), damaged[0]


def test_texts_that_are_not_utf8_are_refused() -> None:
    """As an error of the format."""
    good, bad = encode_flexbuffer("ab"), encode_flexbuffer("ab").replace(b"ab", b"\xff\xff")
    assert together([good] * ROWS + [bad]) is FormatError


def test_texts_and_whole_numbers_are_not_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A history has two or three such values for each snapshot."""

    def refuse(data: object) -> None:
        raise AssertionError(data)

    monkeypatch.setattr(columns, "decode_flexbuffer", refuse)
    monkeypatch.setattr(Vectors, "bytes", refuse)
    values: list[Any] = [
        "",
        "é",
        "a" * 250,
        0,
        7,
        -7,
        300,
        -300,
        2**40,
        2**64 - 1,
        -(2**63),
    ]
    found = decode_flexbuffers(vectors([encode_flexbuffer(it) for it in values * 16]))
    assert found == values * 16
