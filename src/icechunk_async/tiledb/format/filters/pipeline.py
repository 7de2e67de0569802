"""Filter pipelines as plain values: from a schema file, and to and from JSON.

A pipeline lists filters in the order in which they were applied to a tile when it was written.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, cast

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError, UnsupportedFeatureError
from icechunk_async.tiledb.format.cursor import Cursor
from icechunk_async.tiledb.format.types import Datatype, datatype_of, is_time, stored_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "COMPRESSORS",
    "Filter",
    "FilterCode",
    "Filters",
    "decode_pipeline",
    "filters_from_json",
    "filters_to_json",
    "input_types",
]


class FilterCode(IntEnum):
    """A filter by its code in files."""

    NONE = 0
    GZIP = 1
    ZSTD = 2
    LZ4 = 3
    RLE = 4
    BZIP2 = 5
    DOUBLE_DELTA = 6
    BIT_WIDTH_REDUCTION = 7
    BITSHUFFLE = 8
    BYTESHUFFLE = 9
    POSITIVE_DELTA = 10
    AES_256_GCM = 11
    MD5 = 12
    SHA256 = 13
    DICTIONARY = 14
    FLOAT_SCALE = 15
    XOR = 16
    BITSORT = 17
    WEBP = 18
    DELTA = 19


COMPRESSORS: Final = frozenset(
    {
        FilterCode.GZIP,
        FilterCode.ZSTD,
        FilterCode.LZ4,
        FilterCode.RLE,
        FilterCode.BZIP2,
        FilterCode.DOUBLE_DELTA,
        FilterCode.DELTA,
    }
)
"""Filters that also compress what earlier filters left beside the data."""
_REFUSED: Final = {
    FilterCode.AES_256_GCM: "is encrypted (AES-256-GCM), and encrypted arrays are not supported",
    FilterCode.WEBP: "uses the filter WebP, which is not supported",
    FilterCode.BITSORT: "uses the filter bitsort, which TileDB has withdrawn",
}
_MAX_FILTERS: Final = 64
"""More than anyone combines; each may be told to work on all of a tile."""
_SIGNED: Final = {1: Datatype.INT8, 2: Datatype.INT16, 4: Datatype.INT32, 8: Datatype.INT64}
_KEEPS_TYPE: Final = Datatype.ANY
"""As the type to which a delta filter reinterprets its input: none."""


@dataclass(frozen=True, slots=True)
class Filter:
    """One filter of a pipeline, with the options that decoding needs."""

    code: FilterCode
    reinterpret: Datatype | None = None
    """Of delta and double delta: the type as which values are taken, if it is another."""
    scale: float = 1.0
    """Of float scale: values are ``scale * integer + offset``."""
    offset: float = 0.0
    byte_width: int = 8
    """Of float scale: bytes of the integers."""

    @property
    def name(self) -> str:
        """The name of the filter, in lower case with hyphens."""
        return self.code.name.lower().replace("_", "-")


type Filters = tuple[Filter, ...]
"""Filters in the order in which they were applied."""


def decode_pipeline(cursor: Cursor) -> Filters:
    """Read the description of a pipeline, leaving out filters that do nothing.

    The maximum size of chunks, which it begins with, matters to writers only.
    """
    cursor.u32()
    number = cursor.u32()
    if number > _MAX_FILTERS:
        raise cursor.damaged(f"a pipeline claims {number} filters")
    found: list[Filter] = []
    for _ in range(number):
        code = cursor.u8()
        # Skip by their length: versions differ in what options they write.
        options = Cursor(cursor.bytes32(), "filter options")
        try:
            known = FilterCode(code)
        except ValueError:
            raise UnsupportedFeatureError(
                f"A TileDB array uses the filter {code}, which this library does not know. "
                "Upgrade icechunk-async, or write the array anew without it.",
                feature=f"filter {code}",
            ) from None
        if known is not FilterCode.NONE:
            found.append(_filter(known, options))
    return tuple(found)


def _filter(code: FilterCode, options: Cursor) -> Filter:
    match code:
        case FilterCode.DOUBLE_DELTA | FilterCode.DELTA:
            options.take(5)  # compressor and level
            # Versions that had no type to reinterpret as wrote nothing more.
            kind = datatype_of(options.u8()) if options.remaining else _KEEPS_TYPE
            return Filter(code, None if kind is _KEEPS_TYPE else kind)
        case FilterCode.FLOAT_SCALE:
            scale, offset, width = options.f64(), options.f64(), options.u64()
            if width not in _SIGNED:
                raise options.damaged(f"a float scale filter has integers of {width} bytes")
            return Filter(code, scale=scale, offset=offset, byte_width=width)
        case _:
            return Filter(code)


def check_readable(filters: Filters) -> None:
    """Raise an error if tiles with these filters cannot be decoded.

    Raises:
        UnsupportedFeatureError: a filter is not supported; the message names it.
    """
    for it in filters:
        if it.code in _REFUSED:
            raise UnsupportedFeatureError(
                f"A field of a TileDB array {_REFUSED[it.code]}. Read the other fields, or write "
                "the array anew with another filter.",
                feature=f"filter {it.name}",
            )


def input_types(filters: Filters, datatype: Datatype) -> tuple[Datatype, ...]:
    """Return the type that each filter worked on, given the type of the field.

    Raises:
        FormatError: a filter cannot work on the type that reaches it.
    """
    check_readable(filters)
    found: list[Datatype] = []
    for it in filters:
        match it.code:
            case FilterCode.DOUBLE_DELTA | FilterCode.DELTA:
                datatype = datatype if it.reinterpret is None else it.reinterpret
                found.append(_check(it, datatype, floats=False))
            case FilterCode.FLOAT_SCALE:
                found.append(_check(it, datatype, floats=True))
                datatype = _SIGNED[it.byte_width]
            # Floats become integers of their width here, and the filters after it work on these.
            case FilterCode.XOR:
                found.append(datatype)
                datatype = _SIGNED[stored_dtype(datatype).itemsize]
            case _:
                found.append(datatype)
    return tuple(found)


def _check(it: Filter, datatype: Datatype, *, floats: bool) -> Datatype:
    if (stored_dtype(datatype).kind == "f") != floats:
        raise FormatError(
            f"A TileDB array has the filter {it.name} on values of the type {datatype.name}, on "
            "which it cannot work. The schema is damaged."
        )
    return datatype


def has_width_header(datatype: Datatype, version: int) -> bool:
    """Return whether bit width reduction and positive delta do anything with values of a type.

    Moments and times are left unchanged before version 20 of the fragment.
    """
    if is_time(datatype):
        return version >= 20
    return stored_dtype(datatype).kind in "iu"


def filters_to_json(filters: Filters) -> list[dict[str, Any]]:
    """Return filters as JSON, with the options that decoding needs."""
    found: list[dict[str, Any]] = []
    for it in filters:
        document: dict[str, Any] = {"name": it.name}
        if it.reinterpret is not None:
            document["reinterpret"] = it.reinterpret.name
        if it.code is FilterCode.FLOAT_SCALE:
            document |= {"scale": it.scale, "offset": it.offset, "byte_width": it.byte_width}
        found.append(document)
    return found


def filters_from_json(documents: object) -> Filters:
    """Read the result of `filters_to_json`.

    Raises:
        FormatError: it is something else.
    """
    try:
        return tuple(_from_json(it) for it in cast("Sequence[Mapping[str, Any]]", documents))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FormatError(
            f"{documents!r:.200} does not describe filters of TileDB: {error!r:.200}."
        ) from error


def _from_json(document: Mapping[str, Any]) -> Filter:
    code = FilterCode[str(document["name"]).upper().replace("-", "_")]
    kind = document.get("reinterpret")
    width = int(document.get("byte_width", 8))
    if width not in _SIGNED:
        raise ValueError(f"integers of {width} bytes")
    return Filter(
        code,
        None if kind is None else Datatype[kind],
        float(document.get("scale", 1.0)),
        float(document.get("offset", 0.0)),
        width,
    )
