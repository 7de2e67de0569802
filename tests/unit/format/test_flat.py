"""Reading FlatBuffers by the column: what is in them, and what is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.buffer import Buffer
from icechunk_async.format.flatbuffers.reading import ManyVTables, Tables, Vectors
from icechunk_async.format.flatbuffers.splicing import Spans
from tests.unit.format.forge import Forge


def rows_of(forge: Forge, tables: list[int]) -> Tables:
    """Return tables of a forged buffer, as rows."""
    return Tables(Buffer(bytes(forge.data)), np.array(tables, np.int64))


def numbers(*values: int, width: int = 4) -> bytes:
    """Return little-endian words."""
    return b"".join(value.to_bytes(width, "little") for value in values)


def one_string(raw: bytes, *, nul: bool = True) -> Tables:
    """Return a table whose slot 0 is a string at the end of the buffer."""
    forge = Forge()
    table = forge.table(forge.vtable({0: 4}, 8), bytes(4))
    forge.link(table + 4, forge.string(raw, nul=nul))
    return rows_of(forge, [table])


@pytest.mark.parametrize("size", range(8))
def test_a_buffer_without_room_for_a_table_is_refused(size: int) -> None:
    """From nothing at all on."""
    with pytest.raises(FormatError):
        Tables.root(Buffer(bytes(size)))


def test_the_root_is_found_by_the_first_word() -> None:
    """The word may point anywhere."""
    forge = Forge()
    data = forge.finish(forge.table(forge.vtable({0: 4}, 8), numbers(77)))
    assert Tables.root(Buffer(data)).scalar(0, 4).tolist() == [77]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_scalars_of_every_width_are_read(width: int) -> None:
    """Unsigned, little-endian."""
    forge = Forge()
    value = 0x0123456789ABCDEF % (1 << 8 * width)
    body = bytes(4) + numbers(value, width=width)
    table = forge.table(forge.vtable({0: 8}, 8 + width), body, align=8)
    assert rows_of(forge, [table]).scalar(0, width).tolist() == [value]


def test_absent_scalars_have_their_default() -> None:
    """Absent by a distance of 0, or because the vtable is too short."""
    forge = Forge()
    long = forge.vtable({0: 0, 1: 4}, 8)
    short = forge.vtable({}, 4)
    tables = rows_of(forge, [forge.table(long, numbers(5)), forge.table(short)])
    assert tables.scalar(0, 4, 9).tolist() == [9, 9]
    assert tables.scalar(1, 4, 9).tolist() == [5, 9]
    assert tables.scalar(7, 4).tolist() == [0, 0]


def test_presence_is_told_by_row() -> None:
    """The rows may have one vtable or several."""
    forge = Forge()
    one, other = forge.vtable({0: 4}, 8), forge.vtable({1: 4}, 8)
    tables = [forge.table(one, bytes(4)), forge.table(other, bytes(4)), forge.table(one, bytes(4))]
    assert rows_of(forge, tables).has(0).tolist() == [True, False, True]
    assert rows_of(forge, tables[:1] + tables[2:]).has(0).tolist() == [True, True]
    assert rows_of(forge, tables[:1] + tables[2:]).has(3).tolist() == [False, False]


def test_a_vtable_may_lie_behind_its_table() -> None:
    """The distance is signed."""
    forge = Forge()
    forge.align(4)
    table = forge.raw(bytes(4) + numbers(42))
    forge.word(table, table - forge.vtable({0: 4}, 8))
    assert rows_of(forge, [table]).scalar(0, 4).tolist() == [42]


def test_rows_are_selected_by_index_and_by_mask() -> None:
    """In the order asked for."""
    forge = Forge()
    vtable = forge.vtable({0: 4}, 8)
    tables = rows_of(forge, [forge.table(vtable, numbers(value)) for value in (1, 2, 3)])
    assert tables.select(np.array([2, 0])).scalar(0, 4).tolist() == [3, 1]
    assert tables.select(np.array([False, True, True])).scalar(0, 4).tolist() == [2, 3]
    assert tables.row(1).scalar(0, 4).tolist() == [2]


def test_zero_rows_are_handled() -> None:
    """Every accessor answers nothing."""
    tables = rows_of(Forge(), [])
    assert len(tables) == 0
    assert tables.scalar(0, 8).tolist() == []
    assert tables.struct(0, 12, field="id").shape == (0, 12)
    assert tables.strings(1, required="name") == []
    assert len(tables.vector(2, 4, 4).tables()) == 0
    assert len(tables.tables(3, required="data")) == 0
    ((rows, matrix),) = tables.vector(2, 4, 4).matrices(64)
    assert rows is None
    assert matrix.shape == (0, 0)


def test_structs_need_no_alignment() -> None:
    """Ids lie where they happen to."""
    forge = Forge()
    table = forge.table(forge.vtable({0: 5}, 17), b"." + bytes(range(12)) + bytes(3))
    assert rows_of(forge, [table]).struct(0, 12, field="id").tobytes() == bytes(range(12))


def test_vectors_of_all_rows_are_read_one_after_the_other() -> None:
    """Of equal and of different lengths, present and absent."""
    forge = Forge()
    vtable, without = forge.vtable({0: 4}, 8), forge.vtable({}, 4)
    parts = [[1, 2], [], [3, 4, 5]]
    tables = []
    for part in parts:
        tables.append(forge.table(vtable, bytes(4)))
        forge.link(tables[-1] + 4, forge.vector([numbers(item) for item in part]))
    tables.append(forge.table(without))
    vectors = rows_of(forge, tables).vector(0, 4, 4)
    assert vectors.counts.tolist() == [2, 0, 3, 0]
    assert vectors.words().tolist() == [1, 2, 3, 4, 5]
    assert vectors.structs().shape == (5, 4)
    assert vectors.bytes() == [b"".join(numbers(it) for it in part) for part in [*parts, []]]
    assert bytes(vectors.raw(2)) == numbers(3, 4, 5)
    assert vectors.row(0).words().tolist() == [1, 2]
    assert vectors.select(np.array([2, 0])).words().tolist() == [3, 4, 5, 1, 2]


def test_strings_are_utf8() -> None:
    """Anything else is refused."""
    assert one_string("é/𝄞".encode()).strings(0) == ["é/𝄞"]
    for raw in (b"\xff", b"\xed\xa0\x80", b"\xc3"):
        with pytest.raises(FormatError, match="not UTF-8"):
            one_string(raw).strings(0)


def test_a_string_may_lack_its_terminator() -> None:
    """At the very end of the buffer too."""
    assert one_string(b"last", nul=False).strings(0) == ["last"]


def test_an_absent_string_is_empty() -> None:
    """Whether it is there tells ``has``."""
    forge = Forge()
    tables = rows_of(forge, [forge.table(forge.vtable({}, 4))])
    assert tables.strings(0) == [""]
    assert not tables.has(0).any()


def test_vectors_of_strings_are_followed() -> None:
    """Two offsets away."""
    forge = Forge()
    table = forge.table(forge.vtable({0: 4}, 8), bytes(4))
    texts = [forge.string(b"one"), forge.string(b"two")]
    forge.link(table + 4, forge.offsets([10**6, 10**6]))
    vector = len(forge.data) - 12
    for row, text in enumerate(reversed(texts)):  # offsets only lead forward: write them again
        forge.link(vector + 4 + 4 * row, forge.string(bytes(forge.data[text + 4 : text + 7])))
    assert rows_of(forge, [table]).vector(0, 4, 4).texts() == ["two", "one"]


def test_a_required_field_must_be_in_every_row() -> None:
    """The error names it."""
    forge = Forge()
    tables = rows_of(
        forge,
        [forge.table(forge.vtable({0: 4}, 16), bytes(12)), forge.table(forge.vtable({}, 4))],
    )
    with pytest.raises(FormatError, match="required field 'id'"):
        tables.struct(0, 12, field="id")
    with pytest.raises(FormatError, match="required field 'list'"):
        tables.vector(0, 4, 4, required="list")
    with pytest.raises(FormatError, match="required field 'data'"):
        tables.tables(0, required="data")


@pytest.mark.parametrize(
    ("fields", "size"), [({0: 8}, 8), ({0: 5}, 8), ({0: 65532}, 8), ({0: 4}, 7)]
)
def test_a_field_outside_of_its_table_is_refused(fields: dict[int, int], size: int) -> None:
    """It is refused even where the buffer continues."""
    forge = Forge()
    table = forge.table(forge.vtable(fields, size), bytes(100))
    with pytest.raises(FormatError, match="field outside of itself"):
        rows_of(forge, [table]).scalar(0, 4)


@pytest.mark.parametrize("back", [-1000, 1000, 9, 2**31 - 1, -(2**31)])
def test_a_vtable_outside_of_the_buffer_is_refused(back: int) -> None:
    """Before it and behind it; also one at an odd place."""
    forge = Forge()
    table = forge.table(forge.vtable({0: 4}, 8), bytes(4))
    forge.word(table, back)
    with pytest.raises(FormatError):
        rows_of(forge, [table])


def test_a_table_that_claims_to_go_past_the_end_is_refused() -> None:
    """Its own size or its vtable's."""
    forge = Forge()
    table = forge.table(forge.vtable({}, 400))
    with pytest.raises(FormatError, match="outside of itself"):
        rows_of(forge, [table])
    forge = Forge()
    vtable = forge.vtable({}, 4)
    forge.word(vtable, 400, 2)
    table = forge.table(vtable)
    with pytest.raises(FormatError, match="outside of itself"):
        rows_of(forge, [table])


def test_misaligned_numbers_are_refused() -> None:
    """The official reader refuses them too."""
    forge = Forge()
    table = forge.table(forge.vtable({0: 5, 1: 6}, 20), bytes(16))
    tables = rows_of(forge, [table])
    for slot, width in ((0, 2), (0, 4), (1, 4), (1, 8)):
        with pytest.raises(FormatError, match="misaligned"):
            tables.scalar(slot, width)
    assert tables.scalar(1, 2).tolist() == [0]


def test_misaligned_items_are_refused_unless_there_are_none() -> None:
    """Writers place empty vectors without care."""
    forge = Forge()
    table = forge.table(forge.vtable({0: 4}, 8), bytes(4))
    forge.align(8)
    forge.link(table + 4, forge.raw(numbers(1) + bytes(8)))
    with pytest.raises(FormatError, match="misaligned"):
        rows_of(forge, [table]).vector(0, 8, 8)
    forge.link(table + 4, forge.align(8))
    forge.raw(numbers(0))
    assert rows_of(forge, [table]).vector(0, 8, 8).counts.tolist() == [0]


@pytest.mark.parametrize("offset", [0, 2, 5, 4000, 2**31, 2**32 - 4, 2**32 - 1])
def test_offsets_that_lead_nowhere_are_refused(offset: int) -> None:
    """To themselves, to odd places, past the end: offsets are unsigned."""
    forge = Forge()
    table = forge.table(forge.vtable({0: 4}, 8), numbers(offset))
    forge.raw(bytes(40))
    with pytest.raises(FormatError):
        rows_of(forge, [table]).vector(0, 4, 4)


@pytest.mark.parametrize("count", [3, 1000, 2**30, 2**31, 2**32 - 1])
def test_a_vector_past_the_end_is_refused(count: int) -> None:
    """However many items it claims to have, nothing is reserved for them."""
    forge = Forge()
    table = forge.table(forge.vtable({0: 4}, 8), bytes(4))
    forge.link(table + 4, forge.raw(numbers(count) + bytes(20)))
    with pytest.raises(FormatError, match="outside of itself"):
        rows_of(forge, [table]).vector(0, 8, 1)


def sharing(tables: int, items: int) -> Vectors:
    """Return vectors of many tables which are all the same one."""
    forge = Forge()
    vtable = forge.vtable({0: 4}, 8)
    rows = [forge.table(vtable, bytes(4)) for _ in range(tables)]
    vector = forge.vector([numbers(4)] * items)
    for row in rows:
        forge.link(row + 4, vector)
    forge.raw(bytes(8))
    return rows_of(forge, rows).vector(0, 4, 4)


def test_sharing_is_read_within_bounds() -> None:
    """Some is legitimate; a file that unfolds to many times its size is not."""
    assert sharing(4, 100).words().sum() == 1600
    many = sharing(1000, 1000)
    for unfold in (many.words, many.structs, many.bytes, many.tables, lambda: many.matrices(1000)):
        with pytest.raises(FormatError, match="not genuine"):
            unfold()


def test_shared_vectors_of_tables_are_refused_sooner() -> None:
    """Each table costs far more than the offset to it."""
    shared = sharing(4, 100)
    with pytest.raises(FormatError, match="not genuine"):
        shared.tables()


def rows_of_words(parts: list[list[int]]) -> Vectors:
    """Return vectors of words."""
    forge = Forge()
    vtable = forge.vtable({0: 4}, 8)
    rows = []
    for items in parts:
        rows.append(forge.table(vtable, bytes(4)))
        forge.link(rows[-1] + 4, forge.vector([numbers(item) for item in items]))
    return rows_of(forge, rows).vector(0, 4, 4)


def test_words_of_equal_rows_are_one_matrix() -> None:
    """Of any width, none included."""
    ((rows, matrix),) = rows_of_words([[1, 2], [3, 4]]).matrices(64)
    assert rows is None
    assert matrix.tolist() == [[1, 2], [3, 4]]
    ((rows, matrix),) = rows_of_words([[], []]).matrices(64)
    assert rows is None
    assert matrix.shape == (2, 0)


def test_words_of_unequal_rows_are_a_matrix_for_each_width() -> None:
    """The commonest first, each with the rows that it holds."""
    found = rows_of_words([[1, 2], [3], [4, 5], [], [6, 7], [8]]).matrices(64)
    assert [(None if rows is None else rows.tolist(), it.tolist()) for rows, it in found] == [
        ([0, 2, 4], [[1, 2], [4, 5], [6, 7]]),
        ([1, 5], [[3], [8]]),
        ([3], [[]]),
    ]


def test_a_matrix_of_too_many_columns_is_refused() -> None:
    """No array has this number of axes. Among valid rows such a row is skipped."""
    with pytest.raises(FormatError, match="65 axes"):
        sharing(1, 65).matrices(64)
    ((rows, matrix),) = rows_of_words([[1], [1] * 65]).matrices(64)
    assert rows is not None
    assert (rows.tolist(), matrix.tolist()) == ([0], [[1]])


def test_vectors_are_mixed_by_mask() -> None:
    """Row by row from one or the other."""
    one, other = sharing(2, 1), sharing(2, 3)
    mixed = one.where(np.array([False, True]), other)
    assert mixed.counts.tolist() == [1, 3]
    assert mixed.starts.tolist() == [one.starts[0], other.starts[1]]


@pytest.mark.parametrize("damage", ["none", "field", "table", "vtable", "odd vtable", "odd number"])
@pytest.mark.parametrize("vtables", [1, 2, 20])
@pytest.mark.parametrize("rows", [1, 4, 20])
def test_one_damaged_table_among_others_is_refused(rows: int, vtables: int, damage: str) -> None:
    """However many there are, and however many vtables they have."""
    forge = Forge()
    places = [forge.vtable({0: 4, 1: 8}, 12) for _ in range(min(rows, vtables))]
    tables = [
        forge.table(places[row % len(places)], numbers(row, 100 + row)) for row in range(rows)
    ]
    forge.raw(bytes(16))
    last = places[(rows - 1) % len(places)]
    match damage:
        case "field":
            forge.word(last + 6, 12, 2)
        case "table":
            forge.word(last + 2, 4 + len(forge.data) - tables[-1], 2)
        case "vtable":
            forge.word(last, 2 + len(forge.data) - last, 2)
        case "odd vtable":
            forge.word(tables[-1], tables[-1] - last + 1)
        case "odd number":
            forge.word(last + 6, 7, 2)
        case _:
            found = rows_of(forge, tables)
            assert found.scalar(0, 4).tolist() == list(range(rows))
            assert found.scalar(1, 4).tolist() == list(range(100, 100 + rows))
            assert found.scalar(2, 4, 5).tolist() == [5] * rows
            assert found.has(1).all()
            assert not found.has(2).any()
            return
    with pytest.raises(FormatError):
        rows_of(forge, tables).scalar(1, 4)


@pytest.mark.parametrize("vtables", [1, 2, 20])
def test_fields_of_later_versions_are_seen(vtables: int) -> None:
    """By table; of vtables that are far too long it is not asked which fields they have."""
    forge = Forge()
    places = [forge.vtable({0: 4, 2: 8 * (it % 2)}, 12) for it in range(vtables)]
    tables = [forge.table(places[it % vtables], bytes(8)) for it in range(20)]
    found = rows_of(forge, tables)
    later = [vtables > 1 and it % 2 == 1 for it in range(20)]
    assert found.reaches(1).tolist() == found.reaches(2).tolist() == later
    assert found.reaches(0).all()
    assert not found.reaches(3).any()


def test_long_vtables_are_not_searched_to_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each field would take a look at all tables."""
    forge = Forge()
    places = [forge.vtable({it: 4}, 8) for it in range(9, 20)]
    tables = [forge.table(place, bytes(4)) for place in places]
    forge.raw(bytes(1 << 16))
    for place in places:
        forge.word(place, 0xFFFE, 2)
    looked: list[int] = []
    has = ManyVTables.has

    def counted(vtables: ManyVTables, slot: int) -> object:
        looked.append(slot)
        return has(vtables, slot)

    monkeypatch.setattr(ManyVTables, "has", counted)
    assert rows_of(forge, tables).reaches(6).all()
    assert 0 < len(looked) < 20


@pytest.mark.parametrize("long", [0, 3, 5000, 2_000_000])
def test_many_strings_are_read(long: int) -> None:
    """Also long ones, and some with zeros in them."""
    forge = Forge()
    vtable = forge.vtable({0: 4}, 8)
    texts = [f"{it}{chr(8364) * (it % 3)}" for it in range(10_000)]
    for special in ("", "z" * long, "zero\0in it"):
        tables = [forge.table(vtable, bytes(4)) for _ in texts]
        for table, text in zip(tables, [*texts[1:], special], strict=True):
            forge.link(table + 4, forge.string(text.encode()))
        assert rows_of(forge, tables).strings(0, required="text") == [*texts[1:], special]
    forge.data[-5] = 0xFF
    with pytest.raises(FormatError, match="UTF-8"):
        rows_of(forge, tables).strings(0, required="text")


@pytest.mark.parametrize("vtable_size", [0, 2, 4, 5])
@pytest.mark.parametrize("count", [1, 40])
def test_spans_hold_what_is_read_whatever_sizes_are_declared(vtable_size: int, count: int) -> None:
    """Hostile files declare too little for the offset and the sizes, or half of a word more."""
    table = struct.pack("<iHH", -4, vtable_size, 0)  # the vtable comes after the table
    tables = Tables(Buffer(table * count + bytes(8)), np.arange(0, 8 * count, 8))
    whole, bare = Spans(tables, vtables=True), Spans(tables, vtables=False)
    assert (whole.high - whole.low).tolist() == [4 + max(4, vtable_size)] * count
    assert (bare.high - bare.low).tolist() == [4] * count
