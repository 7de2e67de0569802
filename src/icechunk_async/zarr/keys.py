"""Zarr store keys: metadata documents and chunks, parsed strictly."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import batched
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError, InvalidStoreKeyError
from icechunk_async.format.paths import check_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from icechunk_async.format.manifest.chunk import Coordinates

__all__ = [
    "ChunkKey",
    "ForeignKey",
    "MetadataKey",
    "StoreKey",
    "chunk_prefix",
    "metadata_key",
    "parse_chunk_keys",
    "parse_key",
]

_DOCUMENT: Final = "zarr.json"
# Zarr probes for these where the format of a hierarchy is not given. An error would stop it.
_FOREIGN: Final = frozenset({".zgroup", ".zarray", ".zattrs", ".zmetadata"})
# Ten digits hold every coordinate. More are no number here, which also keeps `int` from texts of
# any length.
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,9}")
# Manifests keep coordinates as 32-bit unsigned integers.
_MAX_COORDINATE: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class MetadataKey:
    """The metadata document of a node."""

    path: str
    """Absolute path of the node."""


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """A chunk of an array."""

    path: str
    """Absolute path of the array."""
    coords: Coordinates


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A document of Zarr format 2, which Icechunk does not store: always missing."""


type StoreKey = MetadataKey | ChunkKey | ForeignKey


# Zarr asks for one key several times, as for its existence and for its value. The bound is some
# megabytes.
@lru_cache(maxsize=1 << 15)
def parse_key(key: str) -> StoreKey:
    """Read a key: ``<path>/zarr.json``, ``<path>/c/<i>/<j>...`` or, without axes, ``<path>/c``.

    Coordinates are the longest run of canonical decimal numbers at the end that follows a
    segment ``c``.

    Raises:
        InvalidStoreKeyError: it is neither.
    """
    *parents, last = key.split("/")
    try:
        if last == _DOCUMENT:
            return MetadataKey(_node_path(parents))
        if last in _FOREIGN:
            return ForeignKey()
        segments = [*parents, last]
        end = len(segments)
        # From the end, as `c` and numbers are names that nodes may have, too.
        while end and _NUMBER.fullmatch(segments[end - 1]):
            end -= 1
        coords = tuple(map(int, segments[end:]))
        if end and segments[end - 1] == "c" and max(coords, default=0) <= _MAX_COORDINATE:
            return ChunkKey(_node_path(segments[: end - 1]), coords)
    except InvalidInputError as error:
        raise _invalid(key) from error
    raise _invalid(key)


def parse_chunk_keys(keys: Sequence[str]) -> tuple[str, list[Coordinates]]:
    """Return the array and the coordinates of chunks that are all of one array.

    Raises:
        InvalidStoreKeyError: a key is not that of a chunk, or of another array.
    """
    first = parse_key(keys[0])
    # An array without axes has a single chunk, of which there are not many.
    if not isinstance(first, ChunkKey) or not first.coords:
        raise _not_beside(keys[0])
    rank = len(first.coords)
    cut = len(keys[0]) - len("/".join(map(str, first.coords)))
    prefix, slashes = keys[0][:cut], keys[0].count("/")
    for key in keys:
        if not key.startswith(prefix) or key.count("/") != slashes:
            raise _not_beside(key)
    # All at once: it takes a fifth of parsing key by key, which is as long as reading a small file.
    text = "/".join([key[cut:] for key in keys])
    try:
        numbers = list(map(int, text.split("/")))
    except ValueError:
        numbers = []
    if "/".join(map(str, numbers)) != text or min(numbers) < 0 or max(numbers) > _MAX_COORDINATE:
        for key in keys:
            parse_key(key)  # which raises for the one that is wrong
        raise _not_beside(keys[0])
    return first.path, list(batched(numbers, rank))


def _not_beside(key: str) -> InvalidStoreKeyError:
    return InvalidStoreKeyError(
        f"{key[:200]!r} is not the key of a chunk, such as 'array/c/0/1', of the same array as the "
        "other keys.",
        key=key,
    )


def _node_path(segments: list[str]) -> str:
    # `check_path` takes leading and trailing slashes, and two keys would be one node.
    if "" in segments:
        raise InvalidInputError("a segment is empty")
    return check_path("/".join(segments))


def _invalid(key: str) -> InvalidStoreKeyError:
    return InvalidStoreKeyError(
        f"{key[:200]!r} is no key of an Icechunk store. Keys are 'path/zarr.json' and, with the "
        "default chunk key encoding, 'path/c/0/1'.",
        key=key,
    )


def metadata_key(path: str) -> str:
    """Return the key of a node's metadata document."""
    return _DOCUMENT if path == "/" else f"{path[1:]}/{_DOCUMENT}"


def chunk_prefix(path: str) -> str:
    """Return the common prefix of an array's chunk keys, up to and including ``c``."""
    return "c" if path == "/" else f"{path[1:]}/c"
