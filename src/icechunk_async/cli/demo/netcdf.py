"""NetCDF-4 files, which are HDF5: their variables, and where in the file each chunk's bytes are.

Only what the sample files use is understood: numbers, uncompressed, without external storage.
For arbitrary files see the VirtualiZarr project.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import h5py
import numpy as np
import numpy.typing as npt

from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.format.metadata import JSON

__all__ = ["NetCDF", "Variable", "read_data", "read_netcdf"]

# What the NetCDF and HDF5 libraries keep for themselves.
_INTERNAL: Final = frozenset(
    {"CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST", "_Netcdf4Dimid", "_Netcdf4Coordinates"}
)
_NO_VARIABLE: Final = "This is a netCDF dimension but not a netCDF variable"


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable, and where its bytes are: one row a chunk, in row-major order of the grid."""

    name: str
    dimensions: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_shape: tuple[int, ...]
    fill_value: np.generic
    attributes: dict[str, JSON]
    offsets: npt.NDArray[np.uint64]
    """First byte of each chunk in the file."""
    lengths: npt.NDArray[np.uint64]
    """Bytes of each chunk; 0 for one that was never written."""

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        return _grid(self.shape, self.chunk_shape)

    @property
    def endian(self) -> Literal["little", "big"]:
        """The order of the bytes of a number in the file."""
        order = self.dtype.byteorder
        return "big" if order == ">" or (order == "=" and sys.byteorder == "big") else "little"


@dataclass(frozen=True, slots=True)
class NetCDF:
    """What a file holds, without the data."""

    path: Path
    attributes: dict[str, JSON]
    variables: dict[str, Variable]


def read_netcdf(path: Path) -> NetCDF:
    """Read the variables and the chunk index of a file, and none of its data.

    Raises:
        InvalidInputError: a variable is stored in a way that is not understood.
    """
    with h5py.File(path) as file:
        variables = [
            _variable(name, dataset)
            for name, dataset in file.items()
            if not str(_plain(dataset.attrs.get("NAME", ""))).startswith(_NO_VARIABLE)
        ]
        return NetCDF(path, _attributes(file), {it.name: it for it in variables})


def read_data(path: Path, name: str, selection: object = ...) -> npt.NDArray[Any]:
    """Read a variable, or a part of it."""
    with h5py.File(path) as file:
        return file[name][selection]


def _variable(name: str, dataset: h5py.Dataset) -> Variable:
    if dataset.dtype.kind not in "fiu":
        raise InvalidInputError(f"Variable {name!r} is of type {dataset.dtype}, not of numbers.")
    if dataset.id.get_create_plist().get_nfilters():
        raise InvalidInputError(f"Variable {name!r} is compressed, which is not understood here.")
    # A dataset that is not chunked is one chunk; HDF5 stores whole chunks also at the edges, as
    # Zarr does.
    chunk_shape = dataset.chunks or tuple(max(size, 1) for size in dataset.shape)
    offsets, lengths = _chunk_index(name, dataset, chunk_shape)
    return Variable(
        name,
        # A coordinate variable is the scale of its own axis, and has none attached.
        tuple(axis[0].name.rpartition("/")[2] if len(axis) else name for axis in dataset.dims),
        dataset.shape,
        dataset.dtype,
        chunk_shape,
        dataset.fillvalue,
        _attributes(dataset),
        offsets,
        lengths,
    )


def _grid(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // chunk) for size, chunk in zip(shape, chunk_shape, strict=True))


def _chunk_index(
    name: str, dataset: h5py.Dataset, chunk_shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Answer offset and length of each chunk, in row-major order of the grid."""
    grid = _grid(dataset.shape, chunk_shape)
    offsets = np.zeros(grid, np.uint64)
    lengths = np.zeros(grid, np.uint64)
    match dataset.id.get_create_plist().get_layout():
        case h5py.h5d.CHUNKED:

            def visit(chunk: h5py.StoreInfo) -> None:
                pairs = zip(chunk.chunk_offset, chunk_shape, strict=True)
                at = tuple(start // size for start, size in pairs)
                offsets[at], lengths[at] = chunk.byte_offset, chunk.size

            dataset.id.chunk_iter(visit)
        case h5py.h5d.CONTIGUOUS:
            offset = dataset.id.get_offset()
            if offset is not None:  # else it was never written
                offsets[...], lengths[...] = offset, dataset.id.get_storage_size()
        case _:
            raise InvalidInputError(f"Variable {name!r} is stored in a way that has no chunks.")
    expected = math.prod(chunk_shape) * dataset.dtype.itemsize
    if np.any((lengths != 0) & (lengths != expected)):
        raise InvalidInputError(f"Variable {name!r} has chunks of another size than {expected}.")
    return offsets.ravel(), lengths.ravel()


def _attributes(holder: h5py.Dataset | h5py.File) -> dict[str, JSON]:
    return {name: _plain(value) for name, value in holder.attrs.items() if name not in _INTERNAL}


def _plain(value: Any) -> JSON:
    """Answer an attribute as JSON; one of length 1 is a scalar, as in NetCDF."""
    items: list[Any] = np.atleast_1d(value).tolist()
    plain = [item.decode() if isinstance(item, bytes) else item for item in items]
    return plain[0] if len(plain) == 1 else plain
