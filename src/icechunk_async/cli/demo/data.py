"""Bring data in: copied decade by decade, or as references to the file that holds it."""
# Zarr's annotations of stores name optional packages.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import math
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import cftime
import h5py
import iris_sample_data
import numpy as np
import numpy.typing as npt
from zarr.api.asynchronous import open_array, open_group
from zarr.codecs import BytesCodec

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from zarr.core.group import AsyncGroup

    from icechunk_async import IcechunkStore, Repository, SnapshotId
    from icechunk_async.format.json.metadata import JSON

__all__ = [
    "COPIED",
    "REFERRED",
    "NetCDF",
    "Sources",
    "Variable",
    "copy_years",
    "find_sources",
    "read_data",
    "read_netcdf",
    "refer_to_file",
]


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
    """The structure of a file, without the data."""

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
        # A coordinate variable is itself the scale of its axis, and has none attached.
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
    """Return offset and length of each chunk, in row-major order of the grid."""
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
    # Read as a chunk of Zarr without codecs, other lengths would be refused, or be other values.
    expected = math.prod(chunk_shape) * dataset.dtype.itemsize
    if np.any((lengths != 0) & (lengths != expected)):
        raise InvalidInputError(f"Variable {name!r} has chunks of another size than {expected}.")
    return offsets.ravel(), lengths.ravel()


def _attributes(holder: h5py.Dataset | h5py.File) -> dict[str, JSON]:
    return {name: _plain(value) for name, value in holder.attrs.items() if name not in _INTERNAL}


def _plain(value: Any) -> JSON:
    """Return an attribute as JSON; one of length 1 is a scalar, as in NetCDF."""
    items: list[Any] = np.atleast_1d(value).tolist()
    plain = [item.decode() if isinstance(item, bytes) else item for item in items]
    return plain[0] if len(plain) == 1 else plain


COPIED: Final = "A1B"
"""The scenario that is copied."""
REFERRED: Final = "E1"
"""The scenario that stays in its file."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Two climate projections of the UK Met Office, yearly means on the same grid."""

    copied: NetCDF
    referred: NetCDF
    years: list[int]
    """The year of each step of the time axis; the same for both."""

    @property
    def container(self) -> str:
        """URL prefix of the directory with the file that is referred to."""
        return f"{self.referred.path.parent.as_uri()}/"


def find_sources() -> Sources:
    """Find the files of the package ``iris-sample-data`` and read their headers."""
    directory = Path(iris_sample_data.path).resolve()
    copied, referred = (
        read_netcdf(directory / f"{name}_north_america.nc") for name in (COPIED, REFERRED)
    )
    return Sources(copied, referred, _years(copied))


def _years(file: NetCDF) -> list[int]:
    """Decode the time axis, which counts hours in a calendar of twelve months of 30 days."""
    attributes = file.variables["time"].attributes
    times: list[cftime.datetime] = cftime.num2date(
        read_data(file.path, "time"),
        units=str(attributes["units"]),
        calendar=str(attributes["calendar"]),
    ).tolist()
    return [moment.year for moment in times]


_YEARS_IN_A_COMMIT: Final = 10


async def copy_years(
    repository: Repository,
    source: NetCDF,
    group: str,
    years: list[int],
    advance: Callable[[int], None],
) -> None:
    """Copy a file whose first axis is years, with one commit a decade.

    Readers see whole decades: what a session writes is published by its commit, all at once.
    """
    for start in range(0, len(years), _YEARS_IN_A_COMMIT):
        stop = min(start + _YEARS_IN_A_COMMIT, len(years))
        session = await repository.writable_session("main")
        if start == 0:
            await _create_group(session.store, source, group)
        for variable in source.variables.values():
            if _grows(variable):
                array = await open_array(
                    store=session.store, path=f"{group}/{variable.name}", mode="r+"
                )
                rows = await asyncio.to_thread(
                    read_data, source.path, variable.name, slice(start, stop)
                )
                await array.append(rows)
        await session.commit(
            f"{group}: {years[start]} to {years[stop - 1]}", metadata={"source": source.path.name}
        )
        advance(stop - start)


def _grows(variable: Variable) -> bool:
    return variable.dimensions[:1] == ("time",)


async def _create_group(store: IcechunkStore, source: NetCDF, name: str) -> None:
    """Create a group and its arrays; those with a time axis have no rows yet."""
    root = await open_group(store=store, mode="a")
    group = await root.create_group(name, attributes=source.attributes)
    for variable in source.variables.values():
        # One chunk a map, as in the file; what is small goes into one chunk whole.
        is_map = len(variable.shape) == 3
        array = await group.create_array(
            variable.name,
            shape=(0, *variable.shape[1:]) if _grows(variable) else variable.shape,
            chunks=variable.chunk_shape if is_map else variable.shape,
            dtype=variable.dtype.newbyteorder("="),
            fill_value=variable.fill_value,
            dimension_names=variable.dimensions,
            attributes=variable.attributes,
        )
        if not _grows(variable):
            whole = await asyncio.to_thread(read_data, source.path, variable.name)
            await array.setitem(..., whole)


async def refer_to_file(repository: Repository, source: NetCDF, group: str) -> SnapshotId:
    """Add every variable of a file as virtual chunks: the bytes stay in the file.

    Reads are refused once the file is modified, since its bytes might mean something else then.
    """
    url = source.path.as_uri()
    # Recorded with each reference, by which readers notice that the file changed.
    modified = await asyncio.to_thread(_modified, source.path)
    session = await repository.writable_session("main")
    root = await open_group(store=session.store, mode="a")
    created = await root.create_group(group, attributes=source.attributes)
    for variable in source.variables.values():
        await _create_like_file(created, variable)
        session.store.set_virtual_refs_arr(
            f"{group}/{variable.name}",
            chunk_grid_shape=variable.grid,
            # Empty where nothing was written: no reference, and the fill value is read.
            locations=[url if length else "" for length in variable.lengths],
            offsets=variable.offsets,
            lengths=variable.lengths,
            checksum=modified,
        )
    return await session.commit(
        f"{group}: refer to {source.path.name}", metadata={"source": source.path.name}
    )


async def _create_like_file(group: AsyncGroup, variable: Variable) -> None:
    """Create an array whose chunks are, byte for byte, what the file holds."""
    await group.create_array(
        variable.name,
        shape=variable.shape,
        chunks=variable.chunk_shape,
        dtype=variable.dtype.newbyteorder("="),
        serializer=BytesCodec(endian=variable.endian),
        filters=None,
        compressors=None,
        fill_value=variable.fill_value,
        dimension_names=variable.dimensions,
        attributes=variable.attributes,
    )


def _modified(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)
