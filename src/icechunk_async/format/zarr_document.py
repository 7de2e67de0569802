"""Read ``zarr.json``: the data that a snapshot stores about an array beside the document itself."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError, InvalidMetadataError
from icechunk_async.format.json.values import is_list, is_object, utf8
from icechunk_async.format.manifest import MAX_RANK
from icechunk_async.format.snapshot import ArrayData, Dimension

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Document", "parse_document", "same_chunk_format"]

_MAX_CHUNKS: Final = (1 << 32) - 1
_MAX_LENGTH: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Document:
    """A metadata document that was understood."""

    array: ArrayData | None
    """None for a group."""
    regular_grid: bool = True


def parse_document(data: bytes, path: str) -> Document:
    """Read a metadata document.

    Raises:
        InvalidMetadataError: it is no document of Zarr format 3, or an array in it has a shape,
            chunk grid, chunk key encoding or dimension names that cannot be stored.
    """
    try:
        # As text: of bytes `json` also takes UTF-16, UTF-32 and marks of byte order, which other
        # readers do not.
        document = json.loads(str(data, "utf-8"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise _invalid(path, f"it is no JSON ({error})") from error
    if not is_object(document):
        raise _invalid(path, "it is no JSON object")
    # The official engine does not look at it, so documents without one may be stored.
    zarr_format = document.get("zarr_format", 3)
    if zarr_format != 3:
        raise _invalid(path, f"its zarr_format is {zarr_format!r}, and only 3 is stored")
    match node_type := document.get("node_type"):
        case "group":
            return Document(None)
        case "array":
            return _array(document, path)
        case _:
            raise _invalid(path, f"its node_type is {node_type!r}, not 'array' or 'group'")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name that is given twice: readers differ in which value they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} is given twice")
    return found


def same_chunk_format(one: bytes, other: bytes) -> bool:
    """Return whether the bytes of a chunk mean the same under two documents of arrays.

    Attributes and the shape make no difference; everything else may.

    Raises:
        FormatError: one of them is no JSON object.
    """
    return _chunk_format(one) == _chunk_format(other)


def _chunk_format(data: bytes) -> dict[str, Any]:
    try:
        document: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError("A metadata document in a snapshot is no JSON.") from error
    if not is_object(document):
        raise FormatError("A metadata document in a snapshot is no JSON object.")
    return {key: it for key, it in document.items() if key not in {"attributes", "shape"}}


def _array(document: dict[str, Any], path: str) -> Document:
    shape = _shape(document.get("shape"), path)
    encoding = document.get("chunk_key_encoding")
    if encoding is not None and not _is_default_encoding(encoding):
        raise _invalid(
            path, "its chunk_key_encoding is not 'default' with separator '/', the only one stored"
        )
    grid = document.get("chunk_grid")
    configuration = grid.get("configuration") if is_object(grid) else None
    if not is_object(grid) or not is_object(configuration):
        raise _invalid(path, "it has no chunk_grid with a configuration")
    match name := grid.get("name"):
        case "regular":
            counts = _regular(configuration.get("chunk_shape"), shape, path)
        case "rectilinear":
            counts = _rectilinear(configuration.get("chunk_shapes"), shape, path)
        case _:
            raise _invalid(path, f"its chunk grid is {name!r}, not 'regular' or 'rectilinear'")
    for count in counts:
        # Coordinates have 32 bits in manifests. The official engine casts, and stores another
        # number.
        if count > _MAX_CHUNKS:
            raise _invalid(path, f"it has {count} chunks along an axis; at most {_MAX_CHUNKS} fit")
    dimensions = tuple(Dimension(*pair) for pair in zip(shape, counts, strict=True))
    names = _names(document.get("dimension_names"), len(shape), path)
    return Document(ArrayData(dimensions, names), regular_grid=name == "regular")


def _shape(shape: Any, path: str) -> list[int]:
    # Also no booleans, which are integers of Python, and no floats: `[1.0]` is not `[1]` to other
    # readers.
    if not _are_sizes(shape, minimum=0) or max(shape, default=0) > _MAX_LENGTH:
        raise _invalid(path, f"its shape is {shape!r}, not a list of lengths")
    if len(shape) > MAX_RANK:
        raise _invalid(path, f"it has {len(shape)} axes; at most {MAX_RANK} are stored")
    return shape


def _are_sizes(value: Any, *, minimum: int) -> TypeGuard[list[int]]:
    return is_list(value) and all(_is_size(item, minimum) for item in value)


def _is_size(value: Any, minimum: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _is_default_encoding(encoding: Any) -> bool:
    if not is_object(encoding) or encoding.get("name") != "default":
        return bool(encoding == "default")  # the short form of an extension without configuration
    configuration: Any = encoding.get("configuration") or {}
    return is_object(configuration) and configuration.get("separator", "/") == "/"


def _regular(chunks: Any, shape: Sequence[int], path: str) -> list[int]:
    if not _are_sizes(chunks, minimum=0) or len(chunks) != len(shape):
        raise _invalid(path, f"its chunk_shape is {chunks!r}; it needs {len(shape)} sizes")
    # On an empty axis the official engine takes a chunk length of 0, for no chunks.
    if any(length and not chunk for length, chunk in zip(shape, chunks, strict=True)):
        raise _invalid(path, f"its chunk_shape {chunks!r} has a size of 0")
    return [
        -(-length // chunk) if chunk else 0 for length, chunk in zip(shape, chunks, strict=True)
    ]


def _rectilinear(axes: Any, shape: Sequence[int], path: str) -> list[int]:
    """Count chunks where each axis lists sizes, runs ``[size, repeats]``, or is one size."""
    if not is_list(axes) or len(axes) != len(shape):
        raise _invalid(path, f"its chunk_shapes need {len(shape)} axes")
    counts: list[int] = []
    for axis, length in zip(axes, shape, strict=True):
        if _is_size(axis, 1):
            counts.append(-(-length // axis))
            continue
        if not is_list(axis):
            raise _invalid(path, "its chunk_shapes hold something else than sizes and runs")
        counts.append(sum(_repeats(item, path) for item in axis))
    return counts


def _repeats(item: Any, path: str) -> int:
    """Return the number of chunks in an item of ``chunk_shapes``."""
    if _is_size(item, 1):
        return 1
    if _are_sizes(item, minimum=0) and len(item) == 2:
        return item[1]
    raise _invalid(path, "its chunk_shapes hold something else than sizes and runs")


def _names(names: Any, rank: int, path: str) -> tuple[str | None, ...] | None:
    if names is None:
        return None
    if (
        not is_list(names)
        or len(names) != rank
        or not all(name is None or isinstance(name, str) for name in names)
    ):
        raise _invalid(path, f"its dimension_names are {names!r}; it needs {rank} names or nulls")
    for name in names:
        if name is not None and utf8(name) is None:
            raise _invalid(path, f"the dimension name {name!r} has lone surrogates")
    # Empty names are unnamed dimensions in the file, as the official engine stores them.
    return tuple(name or None for name in names)


def _invalid(path: str, problem: str) -> InvalidMetadataError:
    return InvalidMetadataError(
        f"The metadata document of {path!r} cannot be stored: {problem}. Nothing was changed.",
        path=path,
    )
