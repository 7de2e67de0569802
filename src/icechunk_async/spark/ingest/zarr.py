"""Zarr stores of format 2 and 3: chunks are known from a listing, metadata is read."""

from __future__ import annotations

import json
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.ingest.scan import Places, Scanned, ScannedArray, SourceState, grid
from icechunk_async.zarr.virtual.zarr2 import array_document

if TYPE_CHECKING:
    from icechunk_async.engine.virtual.chunks import VirtualChunks
    from icechunk_async.spark.ingest.source import FolderListing

__all__ = ["scan_zarr"]

_AT_ONCE: Final = 32
_V3: Final = "zarr.json"
_V2: Final = (".zgroup", ".zarray", ".zattrs")
_NO_NODE: Final = (*_V2, ".zmetadata")


async def scan_zarr(virtual: VirtualChunks, listing: FolderListing) -> Scanned:
    """Read the metadata of a store; its chunks are known from the listing.

    Raises:
        InvalidInputError: it is no Zarr store, or has an array that cannot be referred to.
        InvalidMetadataError: an array of format 2 cannot be expressed in format 3.

    Cost: one request for each group and array.
    """
    wanted = [key for key in listing.urls if key.rpartition("/")[2] in (_V3, *_V2)]

    async def read(key: str) -> dict[str, Any]:
        retrieved = await virtual.fetch(listing.urls[key])
        try:
            document: dict[str, Any] = json.loads(bytes(retrieved.data))
        except ValueError as error:
            raise InvalidInputError(f"{listing.urls[key]!r} is no JSON: {error}.") from error
        return document

    documents = dict(zip(wanted, await bounded_map(read, wanted, limit=_AT_ONCE), strict=True))
    found = _Found(listing)
    for key, document in documents.items():
        path, _, name = key.rpartition("/")
        if name == _V3:
            found.add_v3(path, document)
        elif name == ".zarray":
            found.add_v2(path, document, documents.get(f"{path}/.zattrs".lstrip("/"), {}))
        elif name == ".zgroup":
            found.groups[path] = documents.get(f"{path}/.zattrs".lstrip("/"), {})
    if not found.groups and not found.arrays:
        raise InvalidInputError(f"{listing.root!r} is no Zarr store: it has no metadata.")
    return found.scanned()


@dataclass(slots=True)
class _Chunks:
    """The chunks of one array, collected from keys."""

    document: dict[str, Any]
    prefix: str
    separator: str
    coords: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    keys: list[str] = field(default_factory=list[str])
    grid: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Compute the grid."""
        self.grid = grid(self.document)

    def add(self, name: str, key: str) -> None:
        """Add a chunk, given the part of its key after the array."""
        rank = len(self.document["shape"])
        inner = name.removeprefix(self.prefix) if name.startswith(self.prefix) else None
        if rank == 0:
            coords: tuple[int, ...] | None = () if name in ("c", "0") else None
        else:
            parts = (inner or "").lstrip(self.separator).split(self.separator)
            digits = inner is not None and len(parts) == rank and all(it.isdigit() for it in parts)
            coords = tuple(map(int, parts)) if digits else None
        # Shrinking an array can leave chunks behind that are not part of it.
        if coords is not None and all(a < b for a, b in zip(coords, self.grid, strict=True)):
            self.coords.append(coords)
            self.keys.append(key)


class _Found:
    def __init__(self, listing: FolderListing) -> None:
        self._listing = listing
        self.groups: dict[str, dict[str, Any]] = {}
        self.arrays: dict[str, _Chunks] = {}

    def add_v3(self, path: str, document: dict[str, Any]) -> None:
        if document.get("node_type") == "group":
            self.groups[path] = document.get("attributes") or {}
            return
        if document.get("storage_transformers"):
            raise _refused(path, "it has storage transformers, which change its keys or bytes")
        if document.get("chunk_grid", {}).get("name") != "regular":
            raise _refused(path, "its chunks are not all of one shape")
        encoding: dict[str, Any] = document.get("chunk_key_encoding", {})
        is_v2 = encoding.get("name") == "v2"
        configuration: dict[str, str] = encoding.get("configuration") or {}
        separator = configuration.get("separator", "." if is_v2 else "/")
        # Keys in the repository are its own. Those of the source are only needed to sort its
        # chunks.
        document = {
            **document,
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        }
        self.arrays[path] = _Chunks(document, "" if is_v2 else "c", separator)

    def add_v2(self, path: str, document: dict[str, Any], attributes: dict[str, Any]) -> None:
        text = array_document(path, document, attributes)
        separator = document.get("dimension_separator") or "."
        self.arrays[path] = _Chunks(json.loads(text), "", separator)

    def scanned(self) -> Scanned:
        """Return the contents, with chunks sorted into their arrays."""
        for key in self._listing.urls:
            if key.rpartition("/")[2] in (_V3, *_NO_NODE):
                continue
            path = key.rpartition("/")[0]
            # Chunks are any number of folders below their array: with the separator `/` as many as
            # it has axes.
            while path not in self.arrays and path:
                path = path.rpartition("/")[0]
            chunks = self.arrays.get(path)
            if chunks is not None:
                chunks.add(key.removeprefix(f"{path}/") if path else key, key)
        order = [key for it in self.arrays.values() for key in it.keys]
        infos = self._listing.infos
        # Sizes and times are those of the listing: no request for any chunk.
        states = tuple(
            SourceState(infos[key].size_bytes, "", None, clock.to_us(infos[key].last_modified))
            for key in order
        )
        arrays: dict[str, ScannedArray] = {}
        first = 0
        for path, it in self.arrays.items():
            count = len(it.keys)
            coords = np.array(it.coords, np.uint32).reshape(count, len(it.document["shape"]))
            sizes = np.array([infos[key].size_bytes for key in it.keys], np.uint64)
            codes = np.arange(first, first + count, dtype=np.uint32)
            places = Places(coords, codes, np.zeros(count, np.uint64), sizes)
            arrays[path] = ScannedArray(it.document, places)
            first += count
        # A store may be a single array, and a repository needs a root.
        groups = {"": {}, **self.groups}
        return Scanned(groups, arrays, tuple(self._listing.urls[key] for key in order), states)


def _refused(path: str, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"The array {path!r} cannot be referred to: {why}. Leave it out with skip=[{path!r}]."
    )
