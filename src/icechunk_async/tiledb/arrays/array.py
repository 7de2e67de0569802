"""TileDB arrays, opened at a time."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError, MissingDriverError
from icechunk_async.storage import open_storage
from icechunk_async.storage.policies.limit import Budget
from icechunk_async.storage.policies.stack import with_policies
from icechunk_async.storage.policies.values import Policies
from icechunk_async.tiledb.arrays.dense import DenseGrid, overlap, read_dense
from icechunk_async.tiledb.arrays.directory import AT_ONCE, ArrayDirectory, read_timed
from icechunk_async.tiledb.arrays.folder import Folder, storage_location
from icechunk_async.tiledb.arrays.fragments import load_fragments
from icechunk_async.tiledb.format.history import ALL_TIME, Window, visible
from icechunk_async.tiledb.format.metadata import apply_metadata, decode_metadata
from icechunk_async.tiledb.format.schema import Attribute, decode_enumeration

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async.storage import Storage
    from icechunk_async.tiledb.arrays.cells import Cells
    from icechunk_async.tiledb.arrays.dense import Box
    from icechunk_async.tiledb.arrays.fragments import Fragment
    from icechunk_async.tiledb.arrays.sparse import Scan, SparseReader
    from icechunk_async.tiledb.format.conditions import Condition
    from icechunk_async.tiledb.format.history import Deletion
    from icechunk_async.tiledb.format.metadata import MetadataValue
    from icechunk_async.tiledb.format.schema import Enumeration, Schema

    type Moment = int | datetime
    type Location = str | os.PathLike[str] | Storage

__all__ = ["CONCURRENT_REQUESTS", "TileDBArray", "open_array", "open_folder", "window_of"]

CONCURRENT_REQUESTS: Final = 256
_METADATA: Final = "__meta"
_ENUMERATIONS: Final = "__schema/__enumerations"


def window_of(start: Moment | None, end: Moment | None) -> Window:
    """Return a range of times from milliseconds since 1970, or moments; None is no limit.

    Raises:
        InvalidInputError: it ends before it begins.
    """
    first = ALL_TIME.start if start is None else _milliseconds(start)
    last = ALL_TIME.end if end is None else _milliseconds(end)
    if not 0 <= first <= last <= ALL_TIME.end:
        raise InvalidInputError(
            f"The times from {start!r} to {end!r} are not a range. Give milliseconds since 1970 or "
            "moments, the earlier one first."
        )
    return Window(first, last)


def _milliseconds(moment: Moment) -> int:
    return clock.to_us(moment) // 1000 if isinstance(moment, datetime) else moment


@asynccontextmanager
async def open_folder(
    location: Location,
    storage_options: Mapping[str, object] | None = None,
    *,
    requests: int = CONCURRENT_REQUESTS,
) -> AsyncGenerator[Folder]:
    """Open the folder of an array or a group, by URL, path, or as an open storage at that place.

    Nothing is retried or joined on an open storage; wrap it as you like. Else there are at most
    ``requests`` at a time.
    """
    if not isinstance(location, str | os.PathLike):
        yield Folder(location, url=location.description.url.rstrip("/"))
        return
    if isinstance(location, str):
        location = storage_location(location)
    options = {**(storage_options or {}), "read_only": True}
    async with open_storage(location, **options) as storage:
        # Files of TileDB are written once, under names that are not used again.
        policies = with_policies(storage, Budget(requests), Policies(), immutable=lambda _: True)
        yield Folder(policies, url=storage.description.url.rstrip("/"))


@asynccontextmanager
async def open_array(
    location: Location,
    *,
    start: Moment | None = None,
    end: Moment | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> AsyncGenerator[TileDBArray]:
    """Open a TileDB array for the length of an ``async with`` block.

    Args:
        location: URL or path of the array's folder, or an open storage whose keys are below it. A
            URL may say what is there: ``tiledb+s3://bucket/array``, ``tiledb:///data/array``.
        start: see only what was written from this time on: a datetime, or milliseconds since 1970.
        end: see only what was written until this time.
        storage_options: options of the storage backend.

    Raises:
        InvalidURLError: the URL is not one of a storage.
        NotFoundError: there is no array.
        FormatError: a file of the array is damaged.
        UnsupportedSpecVersionError: it was written by a TileDB that is too old or too new.
        UnsupportedFeatureError: it is encrypted, or has something else that is not supported; the
            message names it.
        StorageError: the storage failed.

    Cost: four listings at a time, a request for the schema, and one for the footer of each fragment
    unless their footers were consolidated.
    """
    window = window_of(start, end)
    async with open_folder(location, storage_options) as folder:
        yield await TileDBArray.load(folder, window)


@dataclass(frozen=True, slots=True)
class TileDBArray:
    """A TileDB array, seen in a range of times. Made by `open_array`."""

    folder: Folder
    directory: ArrayDirectory
    window: Window
    schema: Schema
    fragments: tuple[Fragment, ...]
    """The fragments that are seen, the oldest first."""
    deletions: tuple[tuple[Deletion, Condition], ...]

    @classmethod
    async def load(
        cls, folder: Folder, window: Window = ALL_TIME, directory: ArrayDirectory | None = None
    ) -> TileDBArray:
        """Load an array; see `open_array`.

        Args:
            folder: that of the array.
            window: the range of times.
            directory: the listing of the array, if it was listed before.
        """
        if directory is None:
            directory = await ArrayDirectory.load(folder)
        # The schema of the end decides which fields there are. Each fragment is read by the schema
        # that it was written with, which its footer names.
        _, schema = await directory.schema_at(window.end)
        # After the schema: a fragment that lies partly in the window counts in sparse arrays only.
        seen = visible(directory.commits, window, is_sparse=schema.is_sparse)
        fragments = await load_fragments(directory, seen.fragments)
        conditions = await directory.conditions(seen.deletions)
        deletions = tuple(zip(seen.deletions, conditions, strict=True))
        return cls(folder, directory, window, schema, fragments, deletions)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of cells of the domain along each dimension of a dense array."""
        return tuple(high - low for low, high in self.grid().domain)

    async def read(
        self,
        region: Sequence[slice | int] | None = None,
        attributes: Sequence[str] | None = None,
    ) -> dict[str, npt.NDArray[Any]]:
        """Read a region of a dense array.

        Args:
            region: coordinates along each dimension, as slices without a step, or single ones. They
                are those of the domain, which need not begin at 0. None, and a missing end, is the
                end of the domain.
            attributes: names; all if None.

        Returns:
            By attribute an array of the shape of the region; with another dimension for cells of
            several values. Moments are ``datetime64``; cells of variable length are objects; cells
            that may be null are masked.

        Raises:
            InvalidInputError: the array is sparse, or the region or an attribute does not exist.
            FormatError: a tile is damaged.

        Cost: one request for each tile and file, joined where they follow one another. Memory: the
        region, and 64 tiles or 16 MiB of them.
        """
        grid = self.grid()
        box, shape = _box_of(grid, region)
        cells = await read_dense(grid, self.attributes(attributes), box)
        return {name: _shaped(it.to_numpy(), shape) for name, it in cells.items()}

    async def read_cells(
        self, box: Box, attributes: Sequence[str] | None = None
    ) -> dict[str, Cells]:
        """Read a box of a dense array as columns of cells in row-major order.

        Args:
            box: half-open ranges along each dimension, counted from the beginning of the domain.
            attributes: as for `read`.

        Raises, cost: as `read`.
        """
        return await read_dense(self.grid(), self.attributes(attributes), box)

    def grid(self) -> DenseGrid:
        """Return the tiles of a dense array.

        Raises:
            InvalidInputError: the array is sparse.
        """
        if self.schema.is_sparse:
            raise InvalidInputError(
                f"The TileDB array at {self.folder.shown!r} is sparse. Scan it with `scan`."
            )
        return DenseGrid(self.schema, self.fragments)

    def attributes(self, names: Sequence[str] | None = None) -> list[Attribute]:
        """Return attributes by name; all if None.

        Raises:
            InvalidInputError: there is no such attribute.
        """
        known = {it.name: it for it in self.schema.attributes}
        if names is None:
            return list(known.values())
        missing = [it for it in names if it not in known]
        if missing:
            raise InvalidInputError(
                f"The TileDB array has no attribute {missing[0]!r}. It has "
                f"{', '.join(map(repr, known))}."
            )
        return [known[it] for it in dict.fromkeys(names)]

    async def scan(self, columns: Sequence[str] | None = None, filters: object = None) -> Scan:
        """Plan a scan of a sparse array; iterate over its `batches`, or collect a table.

        Args:
            columns: dimensions and attributes; all if None.
            filters: only rows that pass: an expression of ``pyarrow.compute``; or tuples such as
                ``("x", ">", 3)``, which must all hold; or lists of tuples, of which one must hold.
                Tiles that hold no such row are not read.

        Raises:
            InvalidInputError: the array is dense, a column does not exist, or the filter cannot be
                applied.
            MissingDriverError: ``pyarrow`` is not installed.

        Cost: a request for each enumeration.
        """
        reader = await self.sparse_reader()
        return reader.scan(columns, reader.expression(filters))

    async def sparse_reader(self) -> SparseReader:
        """Return a reader that plans scans of a sparse array.

        Raises:
            InvalidInputError: the array is dense.
            MissingDriverError: ``pyarrow`` is not installed.

        Cost: a request for each enumeration.
        """
        if not self.schema.is_sparse:
            raise InvalidInputError(
                f"The TileDB array at {self.folder.shown!r} is dense. Read it with `read`."
            )
        kind = await anyio.to_thread.run_sync(_load_sparse)
        enumerations = await self.enumerations()
        return kind(self.schema, self.fragments, self.window, self.deletions, enumerations)

    async def enumerations(self) -> dict[str, Enumeration]:
        """Return the enumeration of each attribute that has one, by the attribute's name.

        Cost: a request for each.
        """
        wanted = [
            (it.name, self.schema.enumerations[it.enumeration])
            for it in self.schema.attributes
            if it.enumeration is not None and it.enumeration in self.schema.enumerations
        ]

        async def load(file: str) -> Enumeration:
            return decode_enumeration(await self.folder.read(f"{_ENUMERATIONS}/{file}"))

        found = await bounded_map(load, [file for _, file in wanted], limit=AT_ONCE)
        return {name: it for (name, _), it in zip(wanted, found, strict=True)}

    async def label(self, name: str, region: slice | None = None) -> npt.NDArray[Any]:
        """Read a label of a dimension: a value for each coordinate.

        Args:
            name: of the label.
            region: coordinates of the dimension; the whole domain if None.

        Raises:
            InvalidInputError: there is no such label, or it lies in another storage.
            FormatError: a file is damaged.
        """
        known = {it.name: it for it in self.schema.labels}
        label = known.get(name)
        if label is None:
            raise InvalidInputError(
                f"The TileDB array has no label {name!r}. It has "
                f"{', '.join(map(repr, known)) or 'none'}."
            )
        folder = self.folder.member(label.uri, is_relative=label.is_relative)
        if folder is None:
            raise InvalidInputError(
                f"The label {name!r} lies elsewhere, at {label.uri!r}. Open that URL as an array."
            )
        # A label is a separate array with other fragments, seen at the same time as this one.
        array = await TileDBArray.load(folder, self.window)
        found = await array.read([region or slice(None)], [label.attribute])
        return found[label.attribute]

    async def metadata(self) -> dict[str, MetadataValue]:
        """Return the key-value metadata of the array at this time.

        Cost: a listing, and a request for each file.
        """
        return await load_metadata(self.folder, self.window)


async def load_metadata(folder: Folder, window: Window) -> dict[str, MetadataValue]:
    """Return the key-value metadata of an array or a group in a range of times."""
    return apply_metadata(map(decode_metadata, await read_timed(folder, _METADATA, window)))


def _load_sparse() -> type[SparseReader]:
    """Import what needs Arrow, which takes a second and is optional."""
    try:
        from icechunk_async.tiledb.arrays.sparse import SparseReader  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingDriverError(
            "Reading sparse TileDB arrays needs pyarrow, which is not installed. Install it with: "
            "pip install 'icechunk-async[parquet]'",
            module=error.name,
        ) from error
    return SparseReader


def _box_of(grid: DenseGrid, region: Sequence[slice | int] | None) -> tuple[Box, tuple[int, ...]]:
    """Return the cells of a region, and the shape of the result, without single coordinates."""
    domain = grid.domain
    given = [slice(None)] * len(domain) if region is None else list(region)
    if len(given) > len(domain):
        raise InvalidInputError(
            f"A region of {len(given)} dimensions was asked of an array of {len(domain)}."
        )
    given += [slice(None)] * (len(domain) - len(given))
    box: list[tuple[int, int]] = []
    shape: list[int] = []
    for it, origin, (_, size) in zip(given, grid.origin, domain, strict=True):
        if isinstance(it, slice):
            if it.step not in (None, 1):
                raise InvalidInputError(
                    f"{it} has a step, and regions have none. Slice the result."
                )
            low = 0 if it.start is None else int(it.start) - origin
            high = size if it.stop is None else int(it.stop) - origin
            shape.append(high - low)
        else:
            low = int(it) - origin
            high = low + 1
        box.append((low, high))
    found = tuple(box)
    # Also of an empty region, which overlaps with nothing.
    if overlap(found, domain) != found:
        spans = [
            f"{start} to {start + size - 1}"
            for start, (_, size) in zip(grid.origin, domain, strict=True)
        ]
        raise InvalidInputError(
            f"The region {given} is empty, or leaves the domain of the array: {', '.join(spans)}."
        )
    return found, tuple(shape)


def _shaped(values: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return values.reshape((*shape, *values.shape[1:]))
