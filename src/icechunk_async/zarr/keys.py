"""Zarr store keys: metadata documents and chunks, parsed strictly."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError, InvalidStoreKeyError
from icechunk_async.format.paths import check_path

if TYPE_CHECKING:
    from icechunk_async.format.manifest.refs import Coordinates

__all__ = [
    "ChunkKey",
    "ForeignKey",
    "MetadataKey",
    "StoreKey",
    "chunk_prefix",
    "metadata_key",
    "parse_key",
]

_DOCUMENT: Final = "zarr.json"
_FOREIGN: Final = frozenset({".zgroup", ".zarray", ".zattrs", ".zmetadata"})
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,9}")
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
        while end and _NUMBER.fullmatch(segments[end - 1]):
            end -= 1
        coords = tuple(map(int, segments[end:]))
        if end and segments[end - 1] == "c" and max(coords, default=0) <= _MAX_COORDINATE:
            return ChunkKey(_node_path(segments[: end - 1]), coords)
    except InvalidInputError as error:
        raise _invalid(key) from error
    raise _invalid(key)


def _node_path(segments: list[str]) -> str:
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
