"""Metadata values: exact bytes, round trips, and bytes that nobody should trust."""

from __future__ import annotations

import math
import struct
from contextlib import suppress
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Any

import msgpack
import pytest
from flatbuffers import flexbuffers
from flatbuffers.flexbuffers import Type
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import FormatError, InvalidInputError, UnsupportedSpecVersionError
from icechunk_async.format.json import flexbuffers as reading
from icechunk_async.format.json.flexbuffers_writing import encode_flexbuffer
from icechunk_async.format.json.metadata import (
    decode_items,
    decode_value,
    encode_items,
    encode_value,
)
from icechunk_async.format.json.values import MAX_DEPTH, SignedInt
from tests.helpers import examples

# value, MessagePack, FlexBuffers; as the official engine writes them.
OFFICIAL_BYTES: list[tuple[Any, str, str]] = [
    (None, "c0", "000001"),
    (True, "c3", "016801"),
    (False, "c2", "006801"),
    (0, "00", "000801"),
    (200, "ccc8", "c80801"),
    (300, "cd012c", "2c010902"),
    (-5, "fb", "fb0401"),
    (-200, "d1ff38", "38ff0502"),
    (2**32, "cf0000000100000000", "00000000010000000b08"),
    (2**64 - 1, "cfffffffffffffffff", "ffffffffffffffff0b08"),
    (-(2**63), "d38000000000000000", "00000000000000800708"),
    (1.5, "cb3ff8000000000000", "0000c03f0e04"),
    (0.1, "cb3fb999999999999a", "9a9999999999b93f0f08"),
    (1e300, "cb7e37e43c8800759c", "9c7500883ce4377e0f08"),
    (-0.0, "cb8000000000000000", "000000800e04"),
    ("é", "a2c3a9", "02c3a900031401"),
    ("", "a0", "0000011401"),
    ("a\0b", "a3610062", "0361006200041401"),
    ([], "90", "00002801"),
    ([1], "9101", "0101013001"),
    ([1, 2, 300], "930102cd012c", "010002002c01065101"),
    ([1, 2, 3, 4, 5], "950102030405", "050102030405053001"),
    ([-1, -2], "92fffe", "fffe024001"),
    ([-1] * 5, "95" + "ff" * 5, "05ffffffffff052c01"),
    ([-1, 2], "92ff02", "02ff020408042801"),
    (
        [1, 2**64 - 1],
        "9201cfffffffffffffffff",
        "0100000000000000ffffffffffffffff104701",
    ),
    (
        [1.5, 2.5],
        "92cb3ff8000000000000cb4004000000000000",
        "0000c03f00002040084a01",
    ),
    ([1.5], "91cb3ff8000000000000", "010000000000c03f043601"),
    (
        [1.5, 0.1],
        "92cb3ff8000000000000cb3fb999999999999a",
        "000000000000f83f9a9999999999b93f104b01",
    ),
    ([True, False], "92c3c2", "020100029001"),
    ([None, None], "92c0c0", "0200000000042801"),
    (["a", "bb"], "92a161a26262", "0161000262620002070514140428" + "01"),
    ([1, "a"], "9201a161", "0161000201040814042801"),
    ([1, 2.5], "9201cb4004000000000000", "0200000001000000000020400a0e0a2a01"),
    ([[1, 2], [3, 4]], "9292010292" + "0304", "010203040205044444042801"),
    ({}, "80", "00000100002401"),
    ({"b": 1, "a": 2}, "82a16102a16201", "6100620002050402010202010808042401"),
    (
        {"é": 1, "z": 2, "": 3},
        "83a003a17a02a2c3a901",
        "007a00c3a9000307070603010303020108080806" + "2401",
    ),
    (
        {"a": {"c": 1, "b": [1, 2, 3]}, "z": None},
        "82a16182a16293010203a16301a17ac0",
        "610062000102036300020804020102" + "0b015008" + "7a000216040201020c00240004" + "2401",
    ),
    (
        [{"a": 1}, {"a": 2, "b": "x"}],
        "9281a1610182a16102a162a178",
        "6100010301010101086200017800020f0702010202090814021206242404" + "2801",
    ),
]

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
# Lists of one kind of number come out as typed vectors: make them common.
NUMBERS = (
    st.lists(st.integers(0, 2**64 - 1), max_size=6)
    | st.lists(st.integers(-(2**63), -1), max_size=6)
    | st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=6)
    | st.lists(st.booleans(), max_size=6)
)


def json_values(keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Values of any shape, with these keys in their maps."""
    return st.recursive(
        SCALARS | NUMBERS,
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(keys, inner, max_size=5),
        max_leaves=30,
    )


KEYS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
ASCII_KEYS = st.text(st.characters(min_codepoint=1, max_codepoint=127), max_size=8)
SPECS = st.sampled_from([1, 2])


def same(left: Any, right: Any) -> bool:
    """Equal in types and in the sign of zero, too."""
    return repr(left) == repr(right)


def in_key_order(value: Any) -> Any:
    """The value as it comes back: maps sorted by key."""
    match value:
        case dict():
            return {key: in_key_order(value[key]) for key in sorted(value)}
        case list():
            return [in_key_order(item) for item in value]
        case _:
            return value


@pytest.mark.parametrize(("value", "packed", "flexed"), OFFICIAL_BYTES)
def test_bytes_are_those_of_the_official_engine(value: Any, packed: str, flexed: str) -> None:
    """Both encodings of each value of the table agree to the byte, in both directions."""
    assert encode_value(value, 1).hex() == packed
    assert encode_value(value, 2).hex() == flexed
    assert same(decode_value(bytes.fromhex(packed), 1), in_key_order(value))
    assert same(decode_value(memoryview(bytes.fromhex(flexed)), 2), in_key_order(value))


@examples(300)
@given(json_values(KEYS), SPECS)
def test_values_read_back(value: Any, spec: int) -> None:
    """Every JSON value survives both encodings, with types and the order of keys."""
    assert same(decode_value(encode_value(value, spec), spec), in_key_order(value))


@examples(200)
@given(json_values(ASCII_KEYS))
def test_the_library_reads_our_flexbuffers(value: Any) -> None:
    """The library's reader, which knows ASCII keys only, finds the same value."""
    assert same(in_key_order(flexbuffers.Loads(encode_value(value, 2))), in_key_order(value))


@examples(200)
@given(json_values(ASCII_KEYS))
def test_flexbuffers_of_the_library_are_read(value: Any) -> None:
    """The library labels numbers otherwise and keeps lists untyped; the value is the same."""
    builder = flexbuffers.Builder()
    try:
        builder.Add(value)
    except (OverflowError, ValueError, RuntimeError):
        # Its Add knows neither integers above 2^63 nor floats beyond float32.
        return
    assert same(decode_value(bytes(builder.Finish()), 2), in_key_order(value))


class Number(IntEnum):
    """An integer with a name."""

    ONE = 1


class Word(StrEnum):
    """A text with a name."""

    ONE = "one"


def test_subclasses_and_tuples_are_stored_as_plain_values() -> None:
    """Enumerations, tuples and read-only maps become the JSON type that they stand for."""
    value: Any = MappingProxyType({Word.ONE: (Number.ONE, 2.0, Word.ONE)})
    for spec in (1, 2):
        assert same(decode_value(encode_value(value, spec), spec), {"one": [1, 2.0, "one"]})


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize("spec", [1, 2])
@pytest.mark.parametrize(
    ("value", "path", "problem"),
    [
        (2**64, "value", "more than 64 bits"),
        ([1, -(2**63) - 1], "value[1]", "more than 64 bits"),
        ({"a": [0, math.nan]}, "value['a'][1]", "nan"),
        ({"a": math.inf}, "value['a']", "inf"),
        (b"x", "value", "bytes"),
        ({"a": {"b": {1, 2}}}, "value['a']['b']", "set"),
        ({"a": {1: 2}}, "value['a'][1]", "no str"),
        ("\ud800", "value", "surrogates"),
        ({"a": {"\udfff": 2}}, "value['a']['\\udfff']", "surrogates"),
        (object(), "value", "object"),
        (1 + 2j, "value", "complex"),
    ],
)
def test_non_json_values_are_refused_with_their_path(
    value: Any, path: str, problem: str, spec: int
) -> None:
    """The message leads to the culprit and says what would be allowed."""
    with pytest.raises(InvalidInputError) as caught:
        encode_value(value, spec)
    assert caught.value.context["path"] == path
    assert str(caught.value).startswith(path)
    assert problem in str(caught.value)
    assert "Allowed: None, bool, finite float" in str(caught.value)


@pytest.mark.parametrize("spec", [1, 2])
def test_nesting_is_limited_on_both_sides(spec: int) -> None:
    """The deepest value that is written is read; one level more, or a cycle, is refused."""
    deepest: Any = 1
    for _ in range(MAX_DEPTH):
        deepest = {"a": deepest}
    assert decode_value(encode_value(deepest, spec), spec) == deepest
    for value in ([deepest], CYCLE):
        with pytest.raises(InvalidInputError, match="nested too deeply"):
            encode_value(value, spec)


def test_a_key_with_nul_is_refused_where_it_would_be_cut() -> None:
    """FlexBuffers ends keys at NUL; MessagePack and values do not mind."""
    assert decode_value(encode_value({"a\0b": "c\0d"}, 1), 1) == {"a\0b": "c\0d"}
    with pytest.raises(InvalidInputError, match=r"value\['x'\]\['a\\x00b'\].*NUL"):
        encode_value({"x": {"a\0b": 1}}, 2)


def test_items_are_sorted_by_the_bytes_of_their_names() -> None:
    """Case and accents count as bytes, and the map comes back in that order."""
    metadata: dict[str, Any] = {"é": 1, "z": [2], "B": {"b": 1, "a": 2}, "a": None}
    for spec in (1, 2):
        items = encode_items(metadata, spec)
        assert [name for name, _ in items] == ["B", "a", "z", "é"]
        assert decode_items(items, spec) == metadata


def test_a_bad_item_is_named() -> None:
    """Errors of items tell which item it was, when writing and when reading."""
    with pytest.raises(InvalidInputError, match=r"metadata\['author'\]\[0\] is of type bytes"):
        encode_items({"author": [b"x"]}, 2)
    with pytest.raises(InvalidInputError, match="metadata name 5"):
        encode_items({5: 1}, 2)  # type: ignore[dict-item]
    with pytest.raises(InvalidInputError, match="metadata name"):
        encode_items({"\ud800": 1}, 2)
    with pytest.raises(FormatError, match="metadata item 'author'"):
        decode_items([("author", b"")], 2)


def test_an_unknown_version_is_refused() -> None:
    """No version but 1 and 2 has an encoding."""
    with pytest.raises(InvalidInputError, match="spec version 3"):
        encode_value(1, 3)
    with pytest.raises(UnsupportedSpecVersionError, match="spec version 0"):
        decode_items([("a", b"\x01")], 0)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_read_as_null(number: float) -> None:
    """The official engine does the same, for scalars, vectors and both encodings."""
    assert decode_value(b"\xcb" + struct.pack(">d", number), 1) is None
    assert decode_value(b"\xca" + struct.pack(">f", number), 1) is None
    assert decode_value(encode_flexbuffer(number), 2) is None
    assert decode_value(encode_flexbuffer([number, 1.5]), 2) == [None, 1.5]


def test_every_flexbuffers_type_is_read() -> None:
    """Indirect numbers, keys as values, signed vectors and vectors of keys."""
    builder = flexbuffers.Builder()
    with builder.Vector():
        builder.IndirectInt(-7)
        builder.IndirectUInt(2**40)
        builder.IndirectFloat(2.5)
        builder.Key("key")
        with builder.TypedVector():
            builder.Key("one")
            builder.Key("two")
        builder.FixedTypedVectorFromElements([1, -2, 3], Type.INT)
        builder.Null()
    assert decode_value(bytes(builder.Finish()), 2) == [
        *(-7, 2**40, 2.5, "key"),
        ["one", "two"],
        [1, -2, 3],
        None,
    ]
    # A vector of strings in the deprecated type, which has no place for the width of sizes.
    deprecated = (
        b"\x01a\0\x02bb\0" + b"\x02\x07\x05" + bytes([2, Type.VECTOR_STRING_DEPRECATED << 2, 1])
    )
    assert decode_value(deprecated, 2) == ["a", "bb"]


def test_integers_can_be_kept_signed() -> None:
    """A ``SignedInt`` is labelled Int, alone and in vectors; the value is the same."""
    assert encode_flexbuffer(SignedInt(5)).hex() == "050401"
    assert encode_flexbuffer([SignedInt(5), SignedInt(6)]).hex() == "0506024001"
    assert decode_value(encode_flexbuffer([SignedInt(5), 6]), 2) == [5, 6]


BLOB = flexbuffers.Builder()
BLOB.Blob(b"xyz")

MALFORMED_FLEXBUFFERS = {
    "empty": "",
    "two bytes": "0001",
    "root width 3": "000803",
    "root width 0": "000800",
    "root before the buffer": "000808",
    "unknown type": "00fc01",
    "blob": BLOB.Finish().hex(),
    "half float": "00000d02",
    "offset before the buffer": "091401",
    "key before the buffer, found from its end": "0205001000042801",
    "string longer than the buffer": "ff6100021401",
    "string not UTF-8": "01ff00021401",
    "key without end": "61620210" + "01",
    "vector longer than the buffer": "ff01012801",
    "typed vector longer than the buffer": "ff01012c01",
    "fixed vector at the end": "00015b01",
    "map with a bad width of keys": "6100" + "0103" + "0101" + "03" + "01" + "0108" + "022401",
    "map without keys": "00002401",
}


@pytest.mark.parametrize("name", MALFORMED_FLEXBUFFERS)
def test_malformed_flexbuffers_are_format_errors(name: str) -> None:
    """Offsets, sizes, widths, types and texts that do not fit are refused."""
    with pytest.raises(FormatError):
        decode_value(bytes.fromhex(MALFORMED_FLEXBUFFERS[name]), 2)


def test_a_map_whose_keys_and_values_differ_in_number_is_refused() -> None:
    """Pairing them up to the shorter would invent a value."""
    data = bytearray(encode_value({"a": 1, "b": 2}, 2))
    at = data.index(bytes([2, 5, 4]))
    data[at] = 1
    with pytest.raises(FormatError, match="different numbers"):
        decode_value(bytes(data), 2)


@pytest.mark.parametrize(
    "data",
    [
        "",
        "c1",
        "c40161",
        "c70000",
        "d40000",
        "d6ff00000000",
        "0102",
        "92" + "01",
        "a3" + "6161",
        "a1ff",
        "81" + "0102",
        "81" + "c0c0",
        "81" + "9001",
        "ddffffffff",
        "dfffffffff",
        "dbffffffff",
        "cb00",
    ],
)
def test_malformed_messagepack_is_a_format_error(data: str) -> None:
    """Cut, trailing, binary and extension bytes, keys that are no text, absurd lengths."""
    with pytest.raises(FormatError):
        decode_value(bytes.fromhex(data), 1)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 100_000])
def test_deep_bytes_are_a_format_error(depth: int) -> None:
    """Nesting beyond the limit is refused before the stack is in danger."""
    with pytest.raises(FormatError, match="nested more than"):
        decode_value(b"\x91" * depth + b"\xc0", 1)
    # Each vector: its size, the offset of the one before, that one's type.
    inner = bytes([1, 0, 0]) + bytes([1, 3, Type.VECTOR << 2]) * (depth - 1)
    with pytest.raises(FormatError, match="nested more than"):
        decode_value(inner + bytes([2, Type.VECTOR << 2, 1]), 2)


def test_shared_offsets_cannot_multiply_values() -> None:
    """A buffer of 300 bytes that unfolds to ten to the twentieth values is refused at once."""
    builder = flexbuffers.Builder()
    builder.UInt(1)
    for _ in range(20):
        inner = builder.LastValue
        with builder.Vector():
            builder.ReuseValue(inner)
            for _ in range(9):
                builder.ReuseValue(inner)
        # The first use is the value itself, still on the stack below the vector.
        outer = builder.LastValue
        builder._stack[:] = [outer]  # type: ignore[attr-defined]
    data = bytes(builder.Finish())
    assert len(data) < 600
    with pytest.raises(FormatError, match="beyond all proportion"):
        decode_value(data, 2)


def test_a_vector_that_holds_itself_is_refused() -> None:
    """Offsets lead backwards, yet a vector reaches forward over its own slots."""
    vector = bytes([2, 0, 1, Type.VECTOR << 2, Type.VECTOR << 2])
    with pytest.raises(FormatError):
        decode_value(vector + bytes([4, Type.VECTOR << 2, 1]), 2)


def test_overlapping_texts_cannot_multiply_bytes() -> None:
    """Keys that start at each letter of one long text would be copied a thousand times over."""
    text = b"x" * 20_000 + b"\0"
    slots = range(len(text) + 4 - len(text) % 4, 10**9, 4)
    count = 5_000
    body = text + b"\0" * (slots[0] - len(text) - 4) + struct.pack("<I", count)
    keys = b"".join(struct.pack("<I", len(body) + 4 * place - place) for place in range(count))
    data = body + keys
    root = struct.pack("<I", len(data) - len(body)) + bytes([Type.VECTOR_KEY << 2 | 2, 4])
    with pytest.raises(FormatError, match="overlapping"):
        decode_value(data + root, 2)


def test_keys_shared_by_many_maps_are_legitimate() -> None:
    """A thousand records with one long key are ten times their bytes, and honest."""
    records = [{"k" * 200: number} for number in range(1000)]
    data = encode_value(records, 2)
    assert len(data) < 20_000
    assert decode_value(data, 2) == records


def mutations(data: bytes) -> st.SearchStrategy[bytes]:
    """The bytes with some replaced, inserted, removed, or the end cut off."""
    edit = st.tuples(st.integers(0, len(data)), st.binary(max_size=3), st.integers(0, 4))

    def apply(edits: list[tuple[int, bytes, int]]) -> bytes:
        changed = data
        for at, new, removed in edits:
            changed = changed[:at] + new + changed[at + removed :]
        return changed

    return st.lists(edit, min_size=1, max_size=6).map(apply)


SEED: Any = {
    "a": [1, 2, 300],
    "b": [-1] * 9,
    "c": {"é": None, "f": [1.5, 2.5], "g": [True, False], "h": ["x", "yy", {"a": "a"}]},
    "d": [[1, 2], [3, 4]],
    "e": 2**64 - 1,
}


@examples(1500)
@given(mutations(encode_value(SEED, 1)) | st.binary(max_size=40))
def test_damaged_messagepack_is_a_value_or_a_format_error(data: bytes) -> None:
    """Nothing else escapes, whatever the bytes."""
    with suppress(FormatError):
        decode_value(data, 1)


@examples(1500)
@given(mutations(encode_value(SEED, 2)) | st.binary(max_size=40))
def test_damaged_flexbuffers_are_a_value_or_a_format_error(data: bytes) -> None:
    """Nothing else escapes, whatever the bytes."""
    with suppress(FormatError):
        decode_value(data, 2)


@examples(100)
@given(json_values(KEYS))
def test_messagepack_is_what_the_library_packs(value: Any) -> None:
    """Sorted keys apart, version 1 is the library's default packing."""
    assert encode_value(value, 1) == msgpack.packb(in_key_order(value))


def test_types_have_the_numbers_of_the_library() -> None:
    """Reading does without it, since importing it imports NumPy; writing uses it."""
    assert {it.name: int(it) for it in reading.Type} == {it.name: int(it) for it in Type}
