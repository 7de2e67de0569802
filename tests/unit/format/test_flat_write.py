"""Writing FlatBuffers: layout, words, vtables; and table by table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import InvalidInputError
from icechunk_async.format.envelope import MAX_PAYLOAD_BYTES
from icechunk_async.format.flatbuffers import writing
from icechunk_async.format.flatbuffers.blocks import Shape
from icechunk_async.format.flatbuffers.buffer import Buffer, as_array
from icechunk_async.format.flatbuffers.writing import Layout, column_vector, vtable
from tests.unit.format.table_builder import Field, Scalar, Struct, TableBuilder
from tests.unit.format.wire import root


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 2, 4, 8]))))
def test_places_are_aligned_and_apart(parts: list[tuple[int, int]]) -> None:
    """Each begins where the one before ends, or a little later."""
    layout = Layout()
    end = layout.size
    for size, align in parts:
        position = layout.place(size, align)
        assert position % align == 0
        assert end <= position < end + align
        end = position + size
    assert layout.size == end


@given(st.integers(0, 50), st.sampled_from([(1, 1), (4, 4), (8, 4), (8, 8), (12, 1), (32, 8)]))
def test_vectors_have_aligned_counts_and_items(before: int, item: tuple[int, int]) -> None:
    """The count lies directly before the items."""
    size, align = item
    layout = Layout()
    layout.place(before, 1)
    position = layout.place_vector(3, size, align)
    assert position % 4 == 0
    assert (position + 4) % align == 0
    assert layout.size == position + 4 + 3 * size


def test_a_layout_beyond_two_gigabytes_is_refused_before_it_is_made() -> None:
    """With advice; nothing is allocated."""
    layout = Layout()
    layout.place(MAX_PAYLOAD_BYTES, 1)
    with pytest.raises(InvalidInputError, match="splitting"):
        layout.output()


def test_outputs_are_zero_where_nothing_was_put() -> None:
    """Padding tells nothing about the writer's memory."""
    layout = Layout()
    at = layout.place(40, 8)
    out = layout.output()
    out.put(at, b"x")
    assert bytes(out.finish(at)) == b"\x08\0\0\0Ichkx" + bytes(39)


def test_offset_vectors_lead_to_their_targets() -> None:
    """Each item counts from its own place."""
    layout = Layout()
    at = layout.place_vector(3, 4, 4)
    targets = np.array([400, 200, 300])
    layout.place(400, 4)
    out = layout.output()
    out.offset_vector(at, targets)
    buffer = Buffer(out.finish(0))
    found = as_array(buffer.targets(np.array([at + 4, at + 8, at + 12])))
    assert found.tolist() == targets.tolist()


def test_words_may_be_negative() -> None:
    """Distances back to vtables are signed."""
    layout = Layout()
    at = layout.place(8, 4)
    out = layout.output()
    out.word(at, -2)
    out.word(at + 4, 2**32 - 1)
    assert bytes(out.finish(0))[8:] == b"\xfe\xff\xff\xff\xff\xff\xff\xff"


def test_vtables_end_with_the_last_field() -> None:
    """Sizes first, then a distance for every slot, 0 for those without a field."""
    assert vtable({0: 4, 3: 8}, 12).hex() == "0c000c000400" + "00000000" + "0800"
    assert vtable({}, 4).hex() == "04000400"


@pytest.mark.parametrize("count", [0, 1, 5, 8])
def test_a_few_tables_are_written_as_many_are(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one and by columns the bytes are the same, with fields that are left out."""
    shape = Shape("12s", "Q", "I")
    ids = np.arange(12 * count, dtype=np.uint8).reshape(-1, 12)
    sizes = np.array([0, 5, 1 << 60, 0, 7, 9, 0, 1][:count], np.uint64)
    counts = np.array([3, 0, 1, 0, (1 << 32) - 1, 2, 2, 0][:count], np.uint32)
    few = column_vector(shape, (ids, sizes, counts))
    monkeypatch.setattr(writing, "_FEW_ROWS", -1)
    assert few == column_vector(shape, (ids, sizes, counts))


def test_scalars_at_their_default_are_left_out() -> None:
    """All official writers do this. A default may differ from 0."""
    out = TableBuilder()
    fields = {
        0: Scalar(0, 1),
        1: Scalar(1, 1, default=1),
        2: Scalar(0, 1, default=1),
        3: Scalar(0, 4, signed=True),
        4: Scalar(-1, 4, signed=True),
        5: Scalar(2**64 - 1, 8),
        6: Scalar(2**16 - 1, 2),
        7: None,
    }
    table = root(out.finish(out.table(fields)))
    assert table.slots == {2, 4, 5, 6}
    assert table.number(2, 1) == 0
    assert table.number(4, 4, signed=True) == -1
    assert table.number(5, 8) == 2**64 - 1
    assert table.number(6, 2) == 2**16 - 1


def test_builders_write_everything_that_tables_refer_to() -> None:
    """Strings, blobs, structs, tables, and vectors of them."""
    out = TableBuilder()
    inner = [out.table({0: Scalar(number, 4)}) for number in (1, 2)]
    fields: dict[int, Field] = {
        0: out.string("é"),
        1: out.blob(memoryview(b"blob")),
        2: out.structs(bytes(range(24)), 12, 1),
        3: out.strings(["a", ""]),
        4: out.offsets(inner),
        5: Struct(b"twelve bytes"),
        6: out.table({}),
        7: out.structs(b"", 32, 8),
    }
    table = root(out.finish(out.table(fields)))
    assert table.string(0) == "é"
    assert table.blob(1) == b"blob"
    assert table.structs(2, 12, 1) == [bytes(range(12)), bytes(range(12, 24))]
    assert table.strings(3) == ["a", ""]
    assert [it.number(0, 4) for it in table.tables(4)] == [1, 2]
    assert table.raw(5, 12) == b"twelve bytes"
    assert table.table(6).slots == set()
    assert table.structs(7, 32, 8) == []


@given(st.lists(st.binary(max_size=9)), st.sampled_from([(16, 8), (32, 8), (8, 4), (12, 1)]))
def test_struct_vectors_are_aligned_wherever_they_come(
    before: list[bytes], item: tuple[int, int]
) -> None:
    """Anything may have been written before them."""
    size, align = item
    out = TableBuilder()
    for raw in before:
        out.blob(raw)
    raw = bytes(range(size)) * 2
    table = root(out.finish(out.table({0: out.structs(raw, size, align)})))
    assert table.structs(0, size, align) == [raw[:size]] * 2
