"""Filters undo what encoders do that were written from their description."""

from __future__ import annotations

import bz2
import struct
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import lz4

from icechunk_async.errors import FormatError, UnsupportedFeatureError
from icechunk_async.tiledb.format.cursor import Cursor
from icechunk_async.tiledb.format.filters.pipeline import (
    Filter,
    FilterCode,
    decode_pipeline,
    filters_from_json,
    filters_to_json,
)
from icechunk_async.tiledb.format.tiles import TileForm, decode_generic
from icechunk_async.tiledb.format.types import Datatype
from tests.helpers import examples
from tests.unit.tiledb import encoders
from tests.unit.tiledb.encoders import container

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.tiledb.encoders import Streams

    type Step = Callable[[bytes, bytes], Streams]

_INTEGERS = {
    Datatype.INT8: "i1",
    Datatype.UINT8: "u1",
    Datatype.INT16: "<i2",
    Datatype.UINT16: "<u2",
    Datatype.INT32: "<i4",
    Datatype.UINT32: "<u4",
    Datatype.INT64: "<i8",
    Datatype.UINT64: "<u8",
    Datatype.DATETIME_NS: "<i8",
}
_KINDS = st.sampled_from(list(_INTEGERS.items()))


def _steps(dtype: str, *, rising: bool, window: int) -> dict[FilterCode, Step]:
    """Return an encoder for each filter that works on any integers."""
    width = np.dtype(dtype).itemsize
    found: dict[FilterCode, Step] = {
        FilterCode.GZIP: encoders.gzipped,
        FilterCode.RLE: lambda meta, data: encoders.run_lengths(meta, data, width),
        FilterCode.DELTA: lambda meta, data: encoders.delta(meta, data, dtype),
        FilterCode.BYTESHUFFLE: lambda meta, data: encoders.byte_shuffled(meta, data, width),
        FilterCode.BITSHUFFLE: lambda meta, data: encoders.bit_shuffled(meta, data, width),
        FilterCode.XOR: lambda meta, data: encoders.xored(meta, data, width),
        FilterCode.MD5: lambda meta, data: encoders.checked(meta, data, "md5"),
        FilterCode.SHA256: lambda meta, data: encoders.checked(meta, data, "sha256"),
    }
    if width > 1:
        found[FilterCode.BIT_WIDTH_REDUCTION] = lambda meta, data: encoders.reduced(
            meta, data, dtype, window
        )
    if rising:
        found[FilterCode.DOUBLE_DELTA] = lambda meta, data: encoders.double_delta(meta, data, dtype)
        found[FilterCode.POSITIVE_DELTA] = lambda meta, data: encoders.positive_delta(
            meta, data, dtype, window // width * width
        )
    return found


@given(st.data())
@examples(400)
def test_every_filter_undoes_its_encoder(data: st.DataObject) -> None:
    """Of one chunk or several, of all integers, alone or before a compressor."""
    datatype, dtype = data.draw(_KINDS)
    info = np.iinfo(dtype)
    rising = data.draw(st.booleans())
    numbers = st.integers(int(info.min), int(info.max))
    chunks = [
        np.array(it, dtype)
        for it in data.draw(st.lists(st.lists(numbers, min_size=1, max_size=70), max_size=3))
    ]
    if rising:
        chunks = [np.sort(it // 4) for it in chunks]
    steps = _steps(dtype, rising=rising, window=data.draw(st.sampled_from((8, 24, 64, 256))))
    first = data.draw(st.sampled_from(list(steps)))
    rest = data.draw(
        st.lists(st.sampled_from((FilterCode.GZIP, FilterCode.MD5, FilterCode.SHA256)), max_size=2)
    )
    encoded: list[tuple[int, Streams]] = []
    for chunk in chunks:
        streams: Streams = b"", chunk.tobytes()
        for code in (first, *rest):
            streams = steps[code](*streams)
        encoded.append((chunk.nbytes, streams))
    form = TileForm(tuple(map(Filter, (first, *rest))), datatype, np.dtype(dtype).itemsize, 22)
    plain = b"".join(it.tobytes() for it in chunks)
    assert form.decode(container(encoded), len(plain)).tobytes() == plain


@given(st.binary(max_size=40_000), st.sampled_from((1, 2, 4, 8)))
@examples(100)
def test_shuffles_undo_parts_of_any_length(data: bytes, width: int) -> None:
    """Also those that are no whole number of values, or longer than a block."""
    datatype = {1: Datatype.UINT8, 2: Datatype.INT16, 4: Datatype.FLOAT32, 8: Datatype.INT64}[width]
    for code, shuffle in (
        (FilterCode.BYTESHUFFLE, encoders.byte_shuffled),
        (FilterCode.BITSHUFFLE, encoders.bit_shuffled),
    ):
        form = TileForm((Filter(code),), datatype, width, 22)
        tile = container([(len(data), shuffle(b"", data, width))])
        assert form.decode(tile, len(data)).tobytes() == data


@given(st.lists(st.sampled_from((b"", b"a", b"bc", b"ddd" * 20)), max_size=60))
@examples(100)
def test_text_filters_give_back_strings_and_offsets(values: list[bytes]) -> None:
    """Run lengths and dictionaries."""
    plain = b"".join(values)
    for code, encode in (
        (FilterCode.RLE, encoders.runs_of_text),
        (FilterCode.DICTIONARY, encoders.dictionary),
    ):
        form = TileForm((Filter(code),), Datatype.STRING_ASCII, 1, 22, is_variable=True)
        assert form.folds_offsets
        tile = container([(len(plain), encode(values))])
        data, offsets = form.decode_strings(tile, len(plain), len(values))
        assert data.tobytes() == plain
        bounds = [*offsets.tolist(), len(plain)]
        assert [plain[a:b] for a, b in pairwise(bounds)] == values


def test_library_compressors_are_undone() -> None:
    """The encoders are those of the libraries."""
    data = bytes(range(200)) * 30
    lz4_block = bytes(lz4.compress(data))[4:]
    for code, stored in (
        (FilterCode.ZSTD, zstandard.compress(data)),
        (FilterCode.BZIP2, bz2.compress(data)),
        (FilterCode.LZ4, lz4_block),
    ):
        meta = struct.pack("<IIII", 0, 1, len(data), len(stored))
        form = TileForm((Filter(code),), Datatype.UINT8, 1, 22)
        tile = container([(len(data), (meta, stored))])
        assert form.decode(tile, len(data)).tobytes() == data


def test_float_scale_gives_scaled_integers() -> None:
    """In the float type of the field."""
    values = np.array([1.5, 2.0, -3.25], "<f4")
    scale = Filter(FilterCode.FLOAT_SCALE, scale=0.25, offset=1.5, byte_width=2)
    streams = encoders.scaled(b"", values.tobytes(), "<f4", scale)
    form = TileForm((scale,), Datatype.FLOAT32, 4, 22)
    assert form.decode(container([(12, streams)]), 12).tobytes() == values.tobytes()


def test_moments_have_no_widths_to_reduce_before_version_20() -> None:
    """By the version of the fragment, the filter does nothing or reduces."""
    values = np.arange(100, 140, dtype="<i8").tobytes()
    for code, encode in (
        (FilterCode.BIT_WIDTH_REDUCTION, encoders.reduced),
        (FilterCode.POSITIVE_DELTA, encoders.positive_delta),
    ):
        old = TileForm((Filter(code),), Datatype.DATETIME_DAY, 8, 19)
        tile = container([(len(values), (b"", values))])
        assert old.decode(tile, len(values)).tobytes() == values
        new = TileForm((Filter(code),), Datatype.DATETIME_DAY, 8, 20)
        tile = container([(len(values), encode(b"", values, "<i8", 64))])
        assert new.decode(tile, len(values)).tobytes() == values


def test_delta_that_lost_bytes_is_refused() -> None:
    """TileDB drops what is no whole value, and returns wrong data."""
    data = b"0123456789"
    stored = encoders.delta(b"", data[:8], "<i4")[1]
    meta = struct.pack("<IIII", 0, 1, len(data), len(stored))
    for code in (FilterCode.DELTA, FilterCode.DOUBLE_DELTA):
        body = stored if code is FilterCode.DELTA else b"\x1f" + stored
        head = meta[:12] + struct.pack("<I", len(body))
        form = TileForm((Filter(code),), Datatype.INT32, 4, 22)
        with pytest.raises(FormatError, match="cannot be recovered"):
            form.decode(container([(len(data), (head, body))]), len(data))


def test_delta_with_one_value_too_many_is_read() -> None:
    """TileDB 2.16 wrote that."""
    values = np.array([5, 7, 2], "<i4")
    _, stored = encoders.delta(b"", values.tobytes(), "<i4")
    meta = struct.pack("<IIII", 0, 1, 12, len(stored) + 4)
    form = TileForm((Filter(FilterCode.DELTA),), Datatype.INT32, 4, 19)
    tile = container([(12, (meta, stored + b"\0\0\0\0"))])
    assert form.decode(tile, 12).tobytes() == values.tobytes()


def test_wrong_digest_is_an_error() -> None:
    """Of either kind."""
    for code in (FilterCode.MD5, FilterCode.SHA256):
        meta, data = encoders.checked(b"", b"data", code.name.lower())
        form = TileForm((Filter(code),), Datatype.UINT8, 1, 22)
        with pytest.raises(FormatError, match="digest is another one"):
            form.decode(container([(4, (meta, b"dada"))]), 4)
        assert form.decode(container([(4, (meta, data))]), 4).tobytes() == b"data"


@pytest.mark.parametrize("code", [FilterCode.WEBP, FilterCode.AES_256_GCM, FilterCode.BITSORT])
def test_unsupported_filter_is_named(code: FilterCode) -> None:
    """When its field is read; other fields are not concerned."""
    with pytest.raises(UnsupportedFeatureError) as refused:
        TileForm((Filter(code),), Datatype.UINT8, 1, 22)
    assert refused.value.context["feature"] == f"filter {code.name.lower().replace('_', '-')}"
    assert str(refused.value)


def test_unknown_filter_is_named() -> None:
    """One of a newer TileDB."""
    pipeline = struct.pack("<IIBI", 65536, 1, 77, 0)
    with pytest.raises(UnsupportedFeatureError, match="the filter 77"):
        decode_pipeline(Cursor(pipeline, "pipeline"))


@given(
    st.lists(
        st.builds(
            Filter,
            st.sampled_from(FilterCode),
            st.none() | st.sampled_from(Datatype),
            st.floats(allow_nan=False, allow_infinity=False),
            st.floats(allow_nan=False, allow_infinity=False),
            st.sampled_from((1, 2, 4, 8)),
        ),
        max_size=4,
    )
)
@examples(100)
def test_filters_survive_json(filters: list[Filter]) -> None:
    """With the options that decoding needs."""
    found = filters_from_json(filters_to_json(tuple(filters)))
    for one, other in zip(found, filters, strict=True):
        assert one.code is other.code
        assert one.reinterpret is other.reinterpret
        if one.code is FilterCode.FLOAT_SCALE:
            assert one == other


@pytest.mark.parametrize(
    "document", [None, {}, [{}], [{"name": "none such"}], [{"name": "xor", "byte_width": 3}], 7]
)
def test_json_that_describes_no_filters_is_refused(document: Any) -> None:
    """It comes from an array's metadata."""
    if document == {}:
        assert filters_from_json(document) == ()
        return
    with pytest.raises(FormatError):
        filters_from_json(document)


@given(st.binary(max_size=3000))
@examples(50)
def test_generic_tiles_give_back_their_contents(body: bytes) -> None:
    """And nothing may follow them."""
    tile = encoders.generic(body)
    assert decode_generic(tile, "thing") == body
    with pytest.raises(FormatError, match="should have"):
        decode_generic(tile + b"x", "thing")
    with pytest.raises(FormatError):
        decode_generic(tile[:-1], "thing")


def test_encrypted_files_are_refused_by_name() -> None:
    """As soon as their header says so."""
    tile = bytearray(encoders.generic(b"secret"))
    tile[29] = 1
    with pytest.raises(UnsupportedFeatureError, match="is encrypted"):
        decode_generic(bytes(tile), "schema")
