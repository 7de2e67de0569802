"""Bringing data in: copied decade by decade, or referred to where it is."""
# Zarr's annotations of stores name optional packages.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from zarr.api.asynchronous import open_array, open_group
from zarr.codecs import BytesCodec

from icechunk_async.cli.demo.netcdf import read_data

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zarr.core.group import AsyncGroup

    from icechunk_async import IcechunkStore, Repository, SnapshotId
    from icechunk_async.cli.demo.netcdf import NetCDF, Variable

__all__ = ["copy_years", "refer_to_file"]

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
    modified = await asyncio.to_thread(_modified, source.path)
    session = await repository.writable_session("main")
    root = await open_group(store=session.store, mode="a")
    created = await root.create_group(group, attributes=source.attributes)
    for variable in source.variables.values():
        await _create_like_file(created, variable)
        session.store.set_virtual_refs_arr(
            f"{group}/{variable.name}",
            chunk_grid_shape=variable.grid,
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
