"""Kerchunk references, as JSON or as a directory of Parquet files."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow.parquet as pq

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.ingest.scan import Places, Scanned, ScannedArray
from icechunk_async.spark.ingest.source import Source
from icechunk_async.zarr.virtual.kerchunk import location_of, read_references

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from icechunk_async.engine.virtual.chunks import VirtualChunks
    from icechunk_async.spark.ingest.scan import SourceState
    from icechunk_async.spark.ingest.source import FolderListing
    from icechunk_async.zarr.virtual.kerchunk import References

__all__ = ["scan_kerchunk", "scan_kerchunk_parquet"]

_ABOUT: Final = ".zmetadata"
"""The file of a folder of references that has the documents of its arrays."""
_AT_ONCE: Final = 32
_WHOLE: Final = 0
"""The length that means a whole object in Parquet references."""


async def scan_kerchunk(virtual: VirtualChunks, document: bytes) -> Scanned:
    """Parse a JSON document of references, and look up the objects that they refer to.

    Raises:
        InvalidInputError, InvalidMetadataError: as for `write_kerchunk_references`.
        VirtualChunkError: an object does not exist, or its container is not authorised.

    Cost: one request for each distinct object.
    """
    return await _scanned(virtual, read_references(document, path="/"))


async def _scanned(virtual: VirtualChunks, found: References) -> Scanned:
    # References say nothing of the state of what they refer to, so each object is asked once.
    states = await _states(virtual, found.urls)
    groups: dict[str, Mapping[str, Any]] = {"": {}}
    arrays: dict[str, ScannedArray] = {}
    for node in found.nodes:
        document = json.loads(node.document)
        path = node.path.strip("/")
        chunks = node.chunks
        if chunks is None:
            groups[path] = document.get("attributes") or {}
            continue
        # A reference without a length is to the whole object, which a manifest cannot say.
        for row in chunks.whole:
            chunks.lengths[row] = states[chunks.codes[row]].size_bytes
        places = Places(
            chunks.coordinates().astype(np.uint32),
            np.array(chunks.codes, np.uint32),
            np.array(chunks.offsets, np.uint64),
            np.array(chunks.lengths, np.uint64),
        )
        arrays[path] = ScannedArray(document, places, chunks.inline)
    return Scanned(groups, arrays, found.urls, states)


async def _states(virtual: VirtualChunks, urls: tuple[str, ...]) -> tuple[SourceState, ...]:
    async def state(url: str) -> SourceState:
        return (await Source.open(virtual, url)).state

    return tuple(await bounded_map(state, urls, limit=_AT_ONCE))


async def scan_kerchunk_parquet(virtual: VirtualChunks, listing: FolderListing) -> Scanned:
    """Read a directory of references, in which files of each array have a fixed number of rows.

    References stay in columns; only inline chunks become Python objects.

    Raises:
        InvalidInputError: the folder holds no references; or as `scan_kerchunk`.

    Other errors and cost are those of `scan_kerchunk`, plus one request for each file.
    """
    if _ABOUT not in listing.urls:
        raise InvalidInputError(
            f"{listing.root!r} has no {_ABOUT!r}, so it holds no kerchunk references: a folder of "
            "them has that beside a folder for each array. Check the URL, or name the kind of the "
            "source with kind=."
        )
    data = (await virtual.fetch(listing.urls[_ABOUT])).data
    try:
        whole: dict[str, Any] = json.loads(bytes(data))
        metadata, rows = whole["metadata"], int(whole["record_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{listing.root!r} holds no kerchunk references: {error!r:.200}."
        ) from error
    found = read_references(metadata, path="/")
    codes: dict[str, int] = {}
    arrays: dict[str, ScannedArray] = {}
    groups: dict[str, Mapping[str, Any]] = {"": {}}
    for node in found.nodes:
        path, document = node.path.strip("/"), json.loads(node.document)
        if node.array is None:
            groups[path] = document.get("attributes") or {}
            continue
        grid = node.array.grid
        parts = [
            # One after the other: each is decoded whole, and the columns of all are kept.
            _Part.read(await virtual.fetch(listing.urls[key]), number * rows, grid, codes)
            for number, key in _files(listing, path)
        ]
        places = Places.joined([it.places for it in parts], len(grid))
        inline = {place: it for part in parts for place, it in part.inline.items()}
        arrays[path] = ScannedArray(document, places, inline)
    urls = tuple(location_of(url, {}) for url in codes)
    states = await _states(virtual, urls)
    return Scanned(
        groups, {it: _sized(array, states) for it, array in arrays.items()}, urls, states
    )


def _files(listing: FolderListing, path: str) -> list[tuple[int, str]]:
    """Return the numbers and keys of an array's files, in order."""
    found: list[tuple[int, str]] = []
    for key in listing.urls:
        folder, _, name = key.rpartition("/")
        parts = name.split(".")
        if folder == path and len(parts) == 3 and parts[0] == "refs" and parts[1].isdigit():
            found.append((int(parts[1]), key))
    return sorted(found)


class _Part:
    """The references of one file."""

    def __init__(self, places: Places, inline: dict[tuple[int, ...], bytes]) -> None:
        self.places = places
        self.inline = inline

    @classmethod
    def read(
        cls, retrieved: Any, first: int, grid: tuple[int, ...], codes: dict[str, int]
    ) -> _Part:
        table: Any = pq.read_table(io.BytesIO(bytes(retrieved.data)))
        # Files have a fixed number of rows, of which the last has more than the grid.
        count = min(table.num_rows, max(0, int(np.prod(grid, dtype=np.int64)) - first))
        table = table.slice(0, count)
        paths: Any = table.column("path").combine_chunks()
        paths = paths if hasattr(paths, "dictionary") else paths.dictionary_encode()
        names: list[str] = paths.dictionary.to_pylist()
        # Each file has its own dictionary of paths. These are their numbers among all.
        mine = np.array([codes.setdefault(name, len(codes)) for name in names], np.int64)
        # Null is a chunk that does not exist, or is inline.
        indices = paths.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        rows = np.flatnonzero(indices >= 0)
        places = Places(
            _coordinates(rows + first, grid),
            mine[indices[rows]].astype(np.uint32) if len(mine) else np.empty(0, np.uint32),
            _column(table, "offset")[rows],
            _column(table, "size")[rows],
        )
        inline: dict[tuple[int, ...], bytes] = {}
        if "raw" in table.column_names:
            for row, data in enumerate(table.column("raw").to_pylist()):
                if data is not None and indices[row] < 0:
                    at: list[int] = _coordinates(np.array([row + first]), grid)[0].tolist()
                    inline[tuple(at)] = data
        return cls(places, inline)


def _coordinates(rows: npt.NDArray[np.int64], grid: tuple[int, ...]) -> npt.NDArray[np.uint32]:
    if not grid:
        return np.empty((len(rows), 0), np.uint32)
    return np.stack(np.unravel_index(rows, grid), axis=1).astype(np.uint32)


def _column(table: Any, name: str) -> npt.NDArray[np.uint64]:
    column: npt.NDArray[Any] = table.column(name).fill_null(0).to_numpy()
    return column.astype(np.uint64)


def _sized(array: ScannedArray, states: tuple[SourceState, ...]) -> ScannedArray:
    """Fill in the lengths of whole objects."""
    places = array.places
    sizes = np.array([it.size_bytes for it in states] or [0], np.uint64)
    lengths = np.where(places.lengths == _WHOLE, sizes[places.codes], places.lengths)
    filled = Places(places.coords, places.codes, places.offsets, lengths)
    return ScannedArray(array.document, filled, array.inline)
