"""Metadata values, JSON, to bytes and back: MessagePack in version 1, FlexBuffers in version 2.

Which of the two it is depends on the header of the file that holds the bytes, not on the
repository: a migrated repository has both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from icechunk_async.errors import (
    FormatError,
    InvalidInputError,
    UnsupportedSpecVersionError,
    WrongTypeError,
)
from icechunk_async.format.flatbuffers.blocks import REF, Shape, blob, string, table, vector
from icechunk_async.format.json.values import JSON, checked_json, utf8

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async.format.flatbuffers.blocks import Block
    from icechunk_async.format.flatbuffers.reading import Tables
    from icechunk_async.format.flatbuffers.single import Row

    type RawMetadata = tuple[tuple[str, bytes], ...]
    """Names and encoded values."""

__all__ = [
    "JSON",
    "check_metadata",
    "decode_items",
    "decode_value",
    "encode_items",
    "encode_value",
    "items_block",
    "read_each",
    "read_items",
]

_ITEM: Final = Shape(REF, REF)


def encode_value(value: JSON, spec_version: int, *, name: str = "value") -> bytes:
    """Write one value as the official engine does, byte for byte.

    Args:
        value: None, bool, int from -2^63 to 2^64-1, finite float, str, list, dict.
        spec_version: 1 or 2, that of the file's header.
        name: how messages call the value.

    Raises:
        InvalidInputError: the value, or something in it, is not JSON; names the path to it.
    """
    if spec_version not in (1, 2):
        raise InvalidInputError(f"spec version {spec_version} has no metadata encoding; use 1 or 2")
    plain = checked_json(value, name, nul_in_keys=spec_version == 1)
    if spec_version == 1:
        from icechunk_async.format.json.messagepack import encode_messagepack  # noqa: PLC0415 -- loaded when it is used

        return encode_messagepack(plain)
    from icechunk_async.format.json.flexbuffers_writing import encode_flexbuffer  # noqa: PLC0415 -- needs NumPy

    return encode_flexbuffer(plain)


def decode_value(data: bytes | memoryview, spec_version: int) -> JSON:
    """Read one value from bytes that need not be trusted.

    NaN and infinities, which JSON lacks, become None as in the official engine. Time and memory are
    in proportion to the bytes.

    Raises:
        FormatError: the bytes are damaged, hold what JSON cannot, or nest too deeply.
    """
    match spec_version:
        case 1:
            from icechunk_async.format.json.messagepack import decode_messagepack  # noqa: PLC0415 -- loaded when it is used

            return decode_messagepack(data)
        case 2:
            from icechunk_async.format.json.flexbuffers import decode_flexbuffer  # noqa: PLC0415 -- on use

            return decode_flexbuffer(data)
        case _:
            raise UnsupportedSpecVersionError(
                f"metadata of spec version {spec_version} cannot be read; known are 1 and 2",
                found=spec_version,
            )


def check_metadata(given: object) -> None:
    """Raise `WrongTypeError` unless it is a mapping; `encode_items` checks what is in it."""
    if not isinstance(given, Mapping):
        raise WrongTypeError(
            "Metadata map names to JSON values, such as {'source': 'ERA5'}; this "
            f"{type(given).__name__} does not: {given!r:.100}"
        )


def encode_items(metadata: Mapping[str, JSON], spec_version: int) -> list[tuple[str, bytes]]:
    """Write a metadata map item by item, in the order of the UTF-8 bytes of the names.

    Raises:
        InvalidInputError: a name is no text, or a value is not JSON; a `WrongTypeError` if its
            type is to blame.
    """
    check_metadata(metadata)
    items: list[tuple[str, bytes]] = []
    given: Mapping[object, JSON] = cast("Any", metadata)
    for name, value in given.items():
        if not _is_text(name):
            problem = InvalidInputError if isinstance(name, str) else WrongTypeError
            raise problem(
                f"the metadata name {name!r:.64} cannot be stored; names are str with a UTF-8 form"
            )
        called = f"metadata[{name!r:.64}]"
        items.append((str(name), encode_value(value, spec_version, name=called)))
    # By code points, which is the order of UTF-8 bytes; names differ, so values are never compared.
    return sorted(items)


def decode_items(items: Iterable[tuple[str, bytes]], spec_version: int) -> dict[str, JSON]:
    """Read a metadata map; of several items with one name the last counts.

    Raises:
        FormatError: a value is damaged; names the item.
    """
    metadata: dict[str, JSON] = {}
    for name, data in items:
        try:
            metadata[name] = decode_value(data, spec_version)
        except UnsupportedSpecVersionError:
            raise
        except FormatError as error:
            raise FormatError(
                f"metadata item {name!r:.64}: {error.message}", item=name, **error.context
            ) from error
    return metadata


def read_items(tables: Tables) -> RawMetadata:
    """Read MetadataItem tables; values stay encoded."""
    names = tables.strings(0, required="name")
    # Not decoded here: a repo info is written again with each commit, and its values go over byte
    # for byte.
    values = tables.vector(1, 1, 1, required="value").bytes()
    return tuple(zip(names, values, strict=True))


def read_each(rows: Iterable[Row]) -> RawMetadata:
    """Read MetadataItem tables one by one; as `read_items`."""
    return tuple([(it.text(0, required="name"), it.blob(1, required="value")) for it in rows])


def items_block(items: Iterable[tuple[str, bytes]]) -> Block:
    """Build MetadataItem tables."""
    return vector([table(_ITEM, string(name), blob(value)) for name, value in items])


def _is_text(name: object) -> bool:
    return isinstance(name, str) and utf8(name) is not None
