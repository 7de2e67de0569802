"""HDF5 and NetCDF-4 files: the location of each chunk, and the codecs that decode it.

A file is refused with a reason unless all of it is understood: an array that cannot be read later
would be worse than none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.errors import InvalidInputError, MissingDriverError
from icechunk_async.spark.ingest.scan import (
    Places,
    Scanned,
    ScannedArray,
    divided,
    document_of,
    fill_value,
    pieces,
    plain,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import BinaryIO

    from icechunk_async.spark.ingest.scan import SourceState
    from icechunk_async.spark.ingest.source import RemoteFile

__all__ = ["MAGIC", "scan_hdf5"]

MAGIC: Final = b"\x89HDF\r\n\x1a\n"
# The library of NetCDF writes this text into scales that stand for a dimension alone.
_NO_VARIABLE: Final = "This is a netCDF dimension but not a netCDF variable"
_INTERNAL: Final = frozenset(
    {
        *("CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST", "DIMENSION_LABELS"),
        *("_Netcdf4Dimid", "_Netcdf4Coordinates", "_NCProperties", "_nc3_strict"),
    }
)
_CONTIGUOUS: Final = 1
_CHUNKED: Final = 2
"""Layouts of HDF5's own header."""
# A few links can show one group in any number of places: ten groups with two links each to the next
# are a thousand paths.
_MOST_NODES: Final = 100_000
# By the numbers that the filter stores.
_BLOSC: Final = ("blosclz", "lz4", "lz4hc", "snappy", "zlib", "zstd")
_REFUSED: Final = {
    4: "szip",
    5: "nbit",
    6: "scaleoffset",
    32000: "lzf",
    32004: "lz4 (with the framing of HDF5)",
    32008: "bitshuffle",
}


def scan_hdf5(
    file: BinaryIO | RemoteFile,
    url: str,
    state: SourceState,
    *,
    concat_dim: str | None = None,
    skip: Sequence[str] = (),
) -> Scanned:
    """Read the metadata and the chunk index of a file, and none of its data.

    Args:
        file: the file.
        url: its URL.
        state: its state.
        concat_dim: contiguous arrays get chunks of length 1 along this dimension, if it is their
            first, so that files of different lengths go together.
        skip: paths of arrays and groups to leave out.

    Raises:
        InvalidInputError: an array cannot be referred to; the message says why.
        InvalidMetadataError: Zarr format 3 does not have the type or a filter of an array.
        OSError: the file is damaged.
    """
    groups: dict[str, Mapping[str, Any]] = {}
    arrays: dict[str, ScannedArray] = {}
    left_out = {it.strip("/") for it in skip}
    with _h5py().File(file, "r") as opened:
        # HDF5 counts offsets from the end of that block, and references from the start of the file.
        if opened.userblock_size:
            raise InvalidInputError(f"{url!r} has a user block, so its offsets are not known.")
        waiting: list[tuple[str, Any, tuple[Any, ...]]] = [("", opened, ())]
        while waiting:
            path, group, above = waiting.pop()
            if group in above:
                raise _refused(path, "it is a link to a group that it is in")
            groups[path] = _attributes(group)
            # For each group, as the library of NetCDF does: dimensions of equal length are one
            # within it.
            unnamed: dict[int, str] = {}
            for name in group:
                below = f"{path}/{name}".strip("/")
                if below in left_out:
                    continue
                if len(groups) + len(waiting) + len(arrays) > _MOST_NODES:
                    raise InvalidInputError(
                        f"{url!r} has more than {_MOST_NODES:,} groups and arrays, or links that "
                        "show some of them in many places. Leave the links out with skip=."
                    )
                item = _opened(below, group, name)
                if hasattr(item, "items"):
                    waiting.append((below, item, (*above, group)))
                elif hasattr(item, "shape") and not _is_only_dimension(item):
                    arrays[below] = _array(below, item, unnamed, concat_dim)
    return Scanned(groups, arrays, (url,), (state,))


def _h5py() -> Any:
    try:
        return import_module("h5py")
    except ModuleNotFoundError as error:
        raise MissingDriverError(
            "Ingesting HDF5 and NetCDF-4 files needs h5py where tasks run. Install it there: "
            "pip install h5py",
            module=error.name,
        ) from error


def _opened(path: str, group: Any, name: str) -> Any:
    """Return a member of a group; None for a link to nothing.

    Raises:
        InvalidInputError: it is in another file.
    """
    # h5py opens no second file beside one that Python reads, and returns None: the data would be
    # missing without a word.
    if isinstance(group.get(name, getlink=True), _h5py().ExternalLink):
        raise _refused(path, "it is a link to another file")
    return group.get(name)


def _is_only_dimension(dataset: Any) -> bool:
    return str(_plain(dataset.attrs.get("NAME", ""))).startswith(_NO_VARIABLE)


def _array(
    path: str, dataset: Any, unnamed: dict[int, str], concat_dim: str | None
) -> ScannedArray:
    if dataset.shape is None:
        raise _refused(path, "it has no data at all (a null dataspace)")
    if dataset.is_virtual or dataset.external:
        raise _refused(path, "its data is in other files")
    dtype = _dtype(path, dataset)
    names = [_dimension(dataset, axis, unnamed) for axis in range(len(dataset.shape))]
    chunks = _chunks(dataset, names, concat_dim)
    old: dict[str, Any] = {
        "zarr_format": 2,
        "shape": list(dataset.shape),
        "chunks": list(chunks),
        "dtype": dtype.str,
        "fill_value": fill_value(dataset.fillvalue, dtype),
        "order": "C",
        "filters": _filters(path, dataset, dtype) or None,
        "compressor": None,
    }
    mask = dataset.attrs.get("_FillValue")
    fill = None if mask is None else np.asarray(mask, dtype).reshape(-1)[0].item()
    document = document_of(path, old, _attributes(dataset), names, fill)
    if 0 in dataset.shape:
        return ScannedArray(document, Places.none(len(chunks)))
    match dataset.id.get_create_plist().get_layout():
        case layout if layout == _CHUNKED:
            return ScannedArray(document, _chunked(path, dataset, chunks))
        case layout if layout == _CONTIGUOUS:
            return ScannedArray(document, _contiguous(dataset, chunks))
        case _:  # compact: stored inside of the metadata, so there is no range to refer to
            data = np.ascontiguousarray(dataset[()]).astype(dtype, copy=False)
            origin = (0,) * len(chunks)
            return ScannedArray(document, Places.none(len(chunks)), {origin: data.tobytes()})


def _dtype(path: str, dataset: Any) -> np.dtype[Any]:
    """Return the type of the stored elements.

    Raises:
        InvalidInputError: Zarr has no such type, or elements are stored outside of chunks.
    """
    dtype: np.dtype[Any] = dataset.dtype
    if dtype.kind in "biufcS" and dtype.fields is None:
        return dtype
    what = "text of varying length" if _h5py().check_string_dtype(dtype) else f"of type {dtype}"
    raise _refused(
        path, f"its elements are {what}, which HDF5 does not store in chunks the way Zarr does"
    )


def _dimension(dataset: Any, axis: int, unnamed: dict[int, str]) -> str:
    """Return the name of a dimension; without a scale, a name for its length."""
    scales = dataset.dims[axis]
    if len(scales):
        return str(scales[0].name).rpartition("/")[2]
    if dataset.is_scale and len(dataset.shape) == 1:
        return str(dataset.name).rpartition("/")[2]
    size = dataset.shape[axis]
    # Named as the NetCDF library and xarray name dimensions without a scale.
    return unnamed.setdefault(size, f"phony_dim_{len(unnamed)}")


def _chunks(dataset: Any, names: Sequence[str], concat_dim: str | None) -> tuple[int, ...]:
    """Return the chunk shape; contiguous data can be divided freely."""
    if dataset.chunks is not None:
        return tuple(dataset.chunks)
    if dataset.id.get_create_plist().get_layout() != _CONTIGUOUS:
        return tuple(max(size, 1) for size in dataset.shape)
    return divided(dataset.shape, names, dataset.dtype.itemsize, concat_dim)


def _chunked(path: str, dataset: Any, chunks: tuple[int, ...]) -> Places:
    starts: list[tuple[int, ...]] = []
    offsets: list[int] = []
    lengths: list[int] = []
    masked: list[int] = []

    def visit(chunk: Any) -> None:
        starts.append(chunk.chunk_offset)
        offsets.append(chunk.byte_offset)
        lengths.append(chunk.size)
        if chunk.filter_mask:
            masked.append(chunk.filter_mask)

    # One pass over the index. Asking for each chunk by its number walks the index anew each time.
    dataset.id.chunk_iter(visit)
    # The filters of a Zarr array hold for all of its chunks.
    if masked:
        raise _refused(path, f"its filters were left out for {len(masked)} of its chunks")
    coords = np.array(starts, np.int64).reshape(len(starts), len(chunks)) // np.array(chunks)
    # A dataset that was made smaller may keep chunks beyond its end.
    within = np.all(coords * np.array(chunks) < np.array(dataset.shape), axis=1)
    places = Places.of_one(coords, offsets, lengths)
    if within.all():
        return places
    return Places.of_one(coords[within], places.offsets[within], places.lengths[within])


def _contiguous(dataset: Any, chunks: tuple[int, ...]) -> Places:
    offset: int | None = dataset.id.get_offset()
    if offset is None:  # never written
        return Places.none(len(chunks))
    return pieces(offset, dataset.shape, chunks, dataset.dtype.itemsize)


def _filters(path: str, dataset: Any, dtype: np.dtype[Any]) -> list[dict[str, Any]]:
    """Return the filters as codecs, in the order in which they encode."""
    properties = dataset.id.get_create_plist()
    codecs: list[dict[str, Any]] = []
    for number in range(properties.get_nfilters()):
        code, _, values, name = properties.get_filter(number)
        match code:
            case 1:
                codecs.append({"id": "zlib", "level": values[0]})
            case 2:
                size = values[0] if values else dtype.itemsize
                codecs.append({"id": "shuffle", "elementsize": size})
            case 3:
                codecs.append({"id": "fletcher32"})
            case 307:
                codecs.append({"id": "bz2", "level": values[0] if values else 1})
            case 32001:
                codecs.append(_blosc(values))
            case 32015:
                codecs.append({"id": "zstd", "level": values[0] if values else 3})
            case _:
                known = _REFUSED.get(code) or name.decode(errors="replace") or "unknown"
                raise _refused(path, f"no codec of Zarr decodes its filter {known!r} ({code})")
    return codecs


def _blosc(values: Sequence[int]) -> dict[str, Any]:
    # The filter stores from four to seven numbers; what is left out has these defaults.
    level, shuffle, name = (*values[4:7], *(5, 1, 0)[max(0, len(values) - 4) :])
    return {
        "id": "blosc",
        "cname": _BLOSC[name],
        "clevel": level,
        "shuffle": shuffle,
        "blocksize": values[3] if len(values) > 3 else 0,
    }


def _attributes(holder: Any) -> dict[str, Any]:
    """Return the attributes that JSON can express."""
    names = [name for name in holder.attrs if name not in _INTERNAL and name != "_FillValue"]
    found = {name: _plain(holder.attrs[name]) for name in names}
    return {name: it for name, it in found.items() if it is not None}


def _plain(value: Any) -> Any:
    """Return an attribute as a JSON value, or None."""
    if isinstance(value, _h5py().Empty):
        return ""
    return plain(value)


def _refused(path: str, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"{path!r} cannot be referred to: {why}. Leave it out with skip=[{path!r}], or copy its "
        "data."
    )
