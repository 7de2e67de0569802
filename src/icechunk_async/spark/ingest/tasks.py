"""The work of a task: find out which files changed, and scan these by their format."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

import anyio
import anyio.to_thread
import numpy as np
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.ingest import netcdf3 as ingest_netcdf3
from icechunk_async.spark.ingest.grib import grib_file, scan_grib_index
from icechunk_async.spark.ingest.hdf5 import MAGIC, scan_hdf5
from icechunk_async.spark.ingest.kerchunk import scan_kerchunk, scan_kerchunk_parquet
from icechunk_async.spark.ingest.scan import Scanned, ScannedArray, encode_document
from icechunk_async.spark.ingest.source import Source, check_state, list_folder
from icechunk_async.spark.ingest.tiledb import scan_tiledb
from icechunk_async.spark.ingest.zarr import scan_zarr
from icechunk_async.spark.tasks import columns_of
from icechunk_async.storage import ByteRange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async.engine.virtual.chunks import VirtualChunks
    from icechunk_async.repository import Repository as AsyncRepository

    type Kind = Literal["auto", "hdf5", "zarr", "kerchunk", "grib-index", "tiledb"]

__all__ = [
    "COLUMNS",
    "FileWork",
    "ScanOptions",
    "can_be_looked_at",
    "load_values",
    "look_at_files",
    "reads_whole",
    "scan_files",
    "scan_source",
]

COLUMNS: Final = "location string, stamp string, reason string, scanned binary, milliseconds long"
_FOLDERS: Final = ("zarr", "tiledb")
_FOLDER_ENDS: Final = ("/", ".parq", ".parquet")
_AT_ONCE: Final = 32
_FOLDERS_AT_ONCE: Final = 4
"""The most listings at a time: each is in memory until it is complete, and may be long."""
# Copied arrays of all files travel to the driver, which holds them until the commit.
_MOST_LOADED_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class ScanOptions:
    """Options of a scan."""

    kind: Kind = "auto"
    concat_dim: str | None = None
    skip: tuple[str, ...] = ()
    load: tuple[str, ...] | None = None
    """Arrays to copy; None for the default of `_loaded`."""
    grib_codec: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class FileWork:
    """The files of one task, each with its stamp in the catalog, if it was ingested.

    Files that still have that stamp are not scanned.
    """

    options: ScanOptions
    files: tuple[tuple[str, str | None], ...]


async def scan_files(repository: AsyncRepository, work: FileWork) -> Mapping[str, Sequence[Any]]:
    """Scan files and return `COLUMNS`. An error of one file becomes the reason in its row."""
    virtual = repository.engine.virtual
    rows: list[tuple[Any, ...]] = []
    for location, known in work.files:
        began = time.monotonic()
        stamp: str | None = None
        reason: str | None = None
        scanned: bytes | None = None
        try:
            stamp, found = await scan_source(virtual, location, work.options, known)
            scanned = None if found is None else found.to_bytes()
        except Exception as error:  # noqa: BLE001 -- one bad file must not end the work of all
            reason = f"{type(error).__name__}: {error}"
        rows.append((location, stamp, reason, scanned, int((time.monotonic() - began) * 1000)))
    return columns_of(COLUMNS, rows)


def can_be_looked_at(location: str, options: ScanOptions) -> bool:
    """Return whether less than a scan can tell that a file did not change."""
    return _kind_of(location, options) != "kerchunk"


def reads_whole(location: str, options: ScanOptions) -> bool:
    """Return whether a scan reads all of a file, not only what it says about its chunks."""
    return _kind_of(location, options) in ("kerchunk", "grib-index")


async def look_at_files(repository: AsyncRepository, work: FileWork) -> Mapping[str, Sequence[Any]]:
    """Return `COLUMNS`, with a stamp for files that did not change and none for all others.

    The others have to be scanned, which says why if it cannot be done.
    """
    virtual = repository.engine.virtual
    # Made in the coroutine: it belongs to the loop that runs this task.
    listings = anyio.Semaphore(_FOLDERS_AT_ONCE)

    async def look(file: tuple[str, str | None]) -> tuple[Any, ...]:
        location, known = file
        began = time.monotonic()
        try:
            if _kind_of(location, work.options) in _FOLDERS:
                async with listings:
                    stamp = (await list_folder(virtual, location)).state.stamp
            else:
                stamp = await _stamp_of(virtual, location, work.options)
        except Exception:  # noqa: BLE001 -- the scan will say
            stamp = None
        found = stamp if stamp == known else None
        return location, found, None, None, int((time.monotonic() - began) * 1000)

    return columns_of(COLUMNS, await bounded_map(look, work.files, limit=_AT_ONCE))


async def _stamp_of(virtual: VirtualChunks, location: str, options: ScanOptions) -> str:
    """Return the stamp that `scan_source` would, of a file that `can_be_looked_at`."""
    source = await Source.open(virtual, location)
    if _kind_of(location, options) == "grib-index":
        return f"{source.state.stamp}+{(await grib_file(source)).state.stamp}"
    return source.state.stamp


async def scan_source(
    virtual: VirtualChunks, location: str, options: ScanOptions, known: str | None = None
) -> tuple[str, Scanned | None]:
    """Return the stamp of a source, and its contents unless it still has the known stamp.

    Raises:
        InvalidInputError, InvalidMetadataError: references cannot be made; the message says why.
        VirtualChunkError, StorageError: the source could not be read.
        OSError: the file is damaged.

    Cost: one request for an unchanged file; two for a GRIB index, whose file must not have changed
    either; a listing for a Zarr store or a TileDB array. Kerchunk references are always read, with
    one request for each object that they refer to.
    """
    kind = _kind_of(location, options)
    if kind in _FOLDERS or (kind == "kerchunk" and location.endswith(_FOLDER_ENDS)):
        stamp, found = await _scan_folder(virtual, location, kind, options, known)
        if found is None:
            return stamp, None
    else:
        source = await Source.open(virtual, location)
        stamp = source.state.stamp
        # The stamp is that of all objects which the references name: the document may be unchanged,
        # and they not. So it is read before anything can be skipped.
        if kind == "kerchunk":
            found = await scan_kerchunk(virtual, await source.read())
            stamp = found.stamp_with(stamp)
        elif kind == "grib-index":
            file = await grib_file(source)
            stamp = f"{stamp}+{file.state.stamp}"
            if stamp == known:
                return stamp, None
            found = await scan_grib_index(source, file, options.grib_codec)
        elif stamp == known:
            return stamp, None
        else:
            found = await _scan_file(source, options)
    if stamp == known:
        return stamp, None
    found = found.without(options.skip)
    found = await load_values(virtual, found, _loaded(found, options))
    found.check()
    return stamp, found


async def _scan_folder(
    virtual: VirtualChunks, location: str, kind: Kind, options: ScanOptions, known: str | None
) -> tuple[str, Scanned | None]:
    """Return the stamp of a source of many objects, and its contents as `scan_source` does."""
    listing = await list_folder(virtual, location)
    stamp = listing.state.stamp
    if kind == "kerchunk":
        found = await scan_kerchunk_parquet(virtual, listing)
        return found.stamp_with(stamp), found
    if stamp == known:
        return stamp, None
    if kind == "tiledb":
        return stamp, await scan_tiledb(virtual, listing, options.skip)
    return stamp, await scan_zarr(virtual, listing)


def _kind_of(location: str, options: ScanOptions) -> Kind:
    """Return the kind of a source, if need be by its name; others are HDF5 or NetCDF."""
    if options.kind != "auto":
        return options.kind
    name = location.rstrip("/").rpartition("/")[2].lower()
    if name.endswith((".json", ".parq", ".parquet")):
        return "kerchunk"
    if name.endswith((".idx", ".index")):
        return "grib-index"
    return "zarr" if name.endswith(".zarr") or location.endswith("/") else "hdf5"


async def _scan_file(source: Source, options: ScanOptions) -> Scanned:
    start = await source.read(ByteRange(0, len(MAGIC)))
    if start[:4] == b"GRIB":
        raise InvalidInputError(
            f"{source.url!r} is a GRIB file. Ingest its index ('.idx' or '.index') in its place."
        )
    is_classic = start[:3] == ingest_netcdf3.MAGIC
    if not is_classic and start != MAGIC:
        raise InvalidInputError(
            f"{source.url!r} is no HDF5 or NetCDF file: it begins with {start!r}. If it is of "
            "another kind, name that with kind=."
        )

    def scan() -> Scanned:
        about = source.url, source.state
        dim = options.concat_dim
        with source.file() as file:
            if is_classic:
                return ingest_netcdf3.scan_netcdf3(file, *about, concat_dim=dim)
            return scan_hdf5(file, *about, concat_dim=dim, skip=options.skip)

    # h5py blocks, and its reads come back to this loop through `RemoteFile`: on the loop itself it
    # would wait for ever.
    return await anyio.to_thread.run_sync(scan)


def _loaded(found: Scanned, options: ScanOptions) -> list[str]:
    """Return the paths of arrays to copy.

    By default the one-dimensional ones along the dimension of concatenation, and their bounds:
    their chunks are often longer than a file.
    """
    if options.load is not None:
        wanted = {it.strip("/") for it in options.load}
        return [path for path in found.arrays if path in wanted]
    if options.concat_dim is None:
        return []
    chosen: dict[str, None] = {}
    for path, array in found.arrays.items():
        if array.dimensions == (options.concat_dim,):
            chosen[path] = None
            bounds = array.document.get("attributes", {}).get("bounds")
            beside = f"{path.rpartition('/')[0]}/{bounds}".strip("/")
            if isinstance(bounds, str) and beside in found.arrays:
                chosen[beside] = None
    return list(chosen)


async def load_values(virtual: VirtualChunks, found: Scanned, paths: Sequence[str]) -> Scanned:
    """Read some arrays whole. Cost: one request for each chunk, or for adjacent chunks.

    Raises:
        InvalidInputError: an array is too large.
        VirtualSourceChangedError: the source changed since it was scanned.
    """
    arrays = dict(found.arrays)
    for path in paths:
        array = arrays[path]
        # By the shape, before anything is read: eight bytes are at least what numbers take.
        size = math.prod(array.shape) * 8
        if size > _MOST_LOADED_BYTES:
            raise InvalidInputError(
                f"The array {path!r} is too large to be copied (about {size} bytes). Name others "
                "in load=, or none: load=[]."
            )
        chunks = await _chunks(virtual, found, array)
        values = await anyio.to_thread.run_sync(_decode, array.document, chunks)
        arrays[path] = replace(array, values=values)
    return replace(found, arrays=arrays)


async def _chunks(virtual: VirtualChunks, found: Scanned, array: ScannedArray) -> dict[str, bytes]:
    places = array.places

    async def read(row: int) -> tuple[str, bytes]:
        start = int(places.offsets[row])
        wanted = ByteRange(start, start + int(places.lengths[row]))
        code = int(places.codes[row])
        retrieved = await virtual.fetch(found.urls[code], wanted)
        # Chunks are at the places of the scanned state. In a file that was replaced since, other
        # bytes are there.
        check_state(retrieved, found.urls[code], found.states[code])
        return _key(places.coords[row].tolist()), bytes(retrieved.data)

    read_chunks = dict(await bounded_map(read, range(len(places)), limit=_AT_ONCE))
    return {**read_chunks, **{_key(it): data for it, data in array.inline.items()}}


def _key(coords: Sequence[int]) -> str:
    return "/".join(["c", *map(str, coords)])


def _decode(document: dict[str, Any], chunks: dict[str, bytes]) -> npt.NDArray[Any]:
    make = default_buffer_prototype().buffer.from_bytes
    # Decoded by Zarr itself, from a store of the bytes alone: what is copied is what readers of the
    # references would see.
    held = {"zarr.json": make(encode_document(document))}
    held.update({key: make(data) for key, data in chunks.items()})
    array = zarr.open_array(MemoryStore(held), mode="r")  # pyright: ignore[reportUnknownMemberType]
    return np.asarray(array[...])
