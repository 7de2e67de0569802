"""Tables, vectors and strings as blocks that can lie anywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.format.flatbuffers.blocks import (
    REF,
    Shape,
    blob,
    finish,
    string,
    strings,
    structs,
    table,
    vector,
)
from icechunk_async.format.flatbuffers.buffer import Buffer
from icechunk_async.format.flatbuffers.reading import Tables

INNER = Shape("B", "H", "8s", "Q", REF, "12s", "i", "I")
OUTER = Shape(REF, "B", REF, REF, REF)

type Row = tuple[int, int, bytes, int, str, bytes, int, int]
ROWS = st.lists(
    st.tuples(
        st.integers(0, 255),
        st.integers(0, 65535),
        st.binary(min_size=8, max_size=8),
        st.integers(0, (1 << 64) - 1),
        st.text(max_size=20),
        st.binary(min_size=12, max_size=12),
        st.integers(-(1 << 31), (1 << 31) - 1),
        st.integers(0, (1 << 32) - 1),
    ),
    max_size=5,
)


def written(rows: list[Row], texts: list[str], raw: bytes) -> bytes:
    """Write one table with all kinds of fields below it."""
    tables = [table(INNER, *row[:4], string(row[4]), *row[5:]) for row in rows]
    words = b"".join(row[3].to_bytes(8, "little") for row in rows)
    return finish(table(OUTER, vector(tables), 7, strings(texts), blob(raw), structs(words, 8)))


@given(rows=ROWS, texts=st.lists(st.text(max_size=20), max_size=4), raw=st.binary(max_size=30))
def test_everything_reads_back(rows: list[Row], texts: list[str], raw: bytes) -> None:
    """Rows of any length read back. Numbers that are 0 are left out and read as 0."""
    root = Tables.root(Buffer(written(rows, texts, raw)))
    assert int(root.scalar(1, 1)[0]) == 7
    assert root.vector(2, 4, 4).texts() == texts
    assert bytes(root.vector(3, 1, 1).raw(0)) == raw
    assert root.vector(4, 8, 8).words().tolist() == [row[3] for row in rows]
    inner = root.vector(0, 4, 4).tables()
    for slot, width in ((0, 1), (1, 2), (3, 8), (7, 4)):
        assert inner.scalar(slot, width).tolist() == [row[slot] for row in rows]
        assert inner.has(slot).tolist() == [row[slot] != 0 for row in rows]
    assert inner.scalar(6, 4).astype("<i4").tolist() == [row[6] for row in rows]
    assert [it.tobytes() for it in inner.struct(2, 8, field="id")] == [row[2] for row in rows]
    assert [it.tobytes() for it in inner.struct(5, 12, field="id")] == [row[5] for row in rows]
    assert inner.strings(4) == [row[4] for row in rows]


@given(rows=ROWS, texts=st.lists(st.text(max_size=20), max_size=4), raw=st.binary(max_size=30))
def test_everything_is_aligned(rows: list[Row], texts: list[str], raw: bytes) -> None:
    """Readers in other languages refuse words that are not where the processor wants them."""
    payload = written(rows, texts, raw)
    assert len(payload) % 8 == 0
    root = Tables.root(Buffer(payload))
    inner = root.vector(0, 4, 4).tables()
    for slot, width in ((1, 2), (3, 8), (6, 4), (7, 4)):
        there = inner.select(np.flatnonzero(inner.has(slot)))
        assert (there.places(slot, width, field="word") % width == 0).all()
    for slot, width in ((0, 4), (2, 4), (3, 1), (4, 8)):
        start = int(root.vector(slot, width, width).starts[0])
        assert start % max(width, 4) == 0


def test_omitted_fields_take_no_room() -> None:
    """Tables of one shape may have fewer fields than it."""
    shape = Shape("I", REF, "Q")
    full, empty = table(shape, 1, string("x"), 3), table(shape, None, None, 0)
    assert len(empty[0]) == 8
    assert len(full[0]) > len(empty[0])
    assert not Tables.root(Buffer(finish(empty))).has(0)[0]


def test_empty_text_is_present() -> None:
    """It is no default."""
    payload = finish(table(Shape(REF), string("")))
    assert Tables.root(Buffer(payload)).strings(0) == [""]


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_vectors_of_any_length_are_read_in_order(count: int) -> None:
    """Each item follows the one before."""
    texts = [f"text {number}" for number in range(count)]
    root = Tables.root(Buffer(finish(table(Shape(REF), strings(texts)))))
    assert root.vector(0, 4, 4).texts() == texts
