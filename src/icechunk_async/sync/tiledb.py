"""TileDB arrays and groups, for code that blocks.

The counterparts of `icechunk_async.tiledb`: what is awaited there returns here::

    from icechunk_async.sync import tiledb

    with tiledb.open_array("s3://bucket/array") as array:
        values = array.read([slice(0, 100), slice(0, 100)], ["temperature"])

Arrays and groups are used inside of the ``with`` block that opened them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from icechunk_async import tiledb
from icechunk_async._runtime.blocking.pairs import asked, text_of
from icechunk_async._runtime.blocking.portal import blocking, run
from icechunk_async._runtime.blocking.tracebacks import managed
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.sync.errors import translated
from icechunk_async.sync.opening import Held
from icechunk_async.sync.storage import Storage
from icechunk_async.tiledb import TileDBArray as AsyncArray
from icechunk_async.tiledb import TileDBGroup as AsyncGroup

if TYPE_CHECKING:
    import os
    from collections.abc import Coroutine, Generator, Iterator, Mapping, Sequence
    from datetime import datetime

    import pyarrow as pa

    from icechunk_async.session import Session as AsyncSession
    from icechunk_async.storage import Storage as AsyncStorage
    from icechunk_async.sync.repository import Repository
    from icechunk_async.sync.session import Session
    from icechunk_async.tiledb.dataset import TileDBDataset

    type Location = str | os.PathLike[str] | Storage
    type Moment = int | datetime

__all__ = [
    "IngestedArray",
    "Scan",
    "TileDBArray",
    "TileDBGroup",
    "VirtualTiles",
    "ingest_array",
    "open_array",
    "open_group",
    "write_virtual_array",
]

VirtualTiles = tiledb.VirtualTiles


def _run[T](work: Coroutine[Any, Any, T]) -> T:
    with translated():
        return run(work)


def _place(
    location: Location, options: Mapping[str, object] | None
) -> tuple[str | os.PathLike[str] | AsyncStorage, Mapping[str, object] | None]:
    if not isinstance(location, Storage):
        return location, options
    place, own = _run(location.place())
    return place, {**own, **(options or {})}


@managed
def open_array(
    location: Location,
    *,
    start: Moment | None = None,
    end: Moment | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> Generator[TileDBArray]:
    """Open a TileDB array for the length of a ``with`` block.

    Args:
        location: URL or path of the array's folder, or a `Storage` at that place. A URL may say
            what is there: ``tiledb+s3://bucket/array``, ``tiledb:///data/array``.
        start: see only what was written from this time on: a datetime, or milliseconds since 1970.
        end: see only what was written until this time.
        storage_options: options of the storage backend.

    Raises:
        IcechunkError: as `icechunk_async.tiledb.open_array`.
    """
    place, options = _place(location, storage_options)
    opening = tiledb.open_array(place, start=start, end=end, storage_options=options)
    with translated(), blocking(opening) as array:
        yield TileDBArray(array)


@managed
def open_group(
    location: Location,
    *,
    start: Moment | None = None,
    end: Moment | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> Generator[TileDBGroup]:
    """Open a TileDB group for the length of a ``with`` block; arguments as `open_array`.

    Raises:
        IcechunkError: as `icechunk_async.tiledb.open_group`.
    """
    place, options = _place(location, storage_options)
    opening = tiledb.open_group(place, start=start, end=end, storage_options=options)
    with translated(), blocking(opening) as group:
        yield TileDBGroup(group)


@dataclass(frozen=True, slots=True)
class Scan:
    """A scan of a sparse array: some columns of the rows that pass a filter."""

    native: tiledb.Scan
    """The asynchronous scan."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of the batches."""
        return self.native.schema

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Iterate over rows, a batch for each part of the array that has any.

        While a batch is used, the next one is not read. Memory: one part.
        """
        for part in _run(self.native.plan()):
            batch = _run(self.native.read(part))
            if batch.num_rows:
                yield batch

    def to_table(self) -> pa.Table:
        """Return all rows. Memory: the rows, and a part."""
        return _run(self.native.to_table())


def _group(native: AsyncGroup) -> TileDBGroup:
    return TileDBGroup(native)


@dataclass(frozen=True, slots=True)
class TileDBArray:
    """A TileDB array, seen in a range of times. Made by `open_array`."""

    native: AsyncArray
    """The asynchronous array."""

    @property
    def handle(self) -> Held[AsyncArray]:
        """The asynchronous array, to be asked."""
        return Held(self.native)

    @property
    def schema(self) -> tiledb.Schema:
        """The dimensions, the attributes, and how they are stored."""
        return self.native.schema

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of cells of the domain along each dimension of a dense array."""
        with translated():
            return self.native.shape

    read, read_async = asked(AsyncArray.read)
    scan, scan_async = asked(AsyncArray.scan, Scan)

    def dataset(self) -> TileDBDataset:
        """Return a sparse array as a ``pyarrow.dataset.Dataset``; blocks.

        DuckDB, Polars and others that take datasets read it: of the columns and filters that they
        ask for, tiles that cannot hold such rows are not read. It has the methods ``to_batches``,
        ``to_reader``, ``to_table``, ``head``, ``count_rows``, ``scanner``, ``filter`` and
        ``get_fragments``, and is used inside of the ``with`` block that opened the array.

        Raises:
            InvalidInputError: the array is dense.
            MissingDriverError: ``pyarrow`` is not installed: it comes with the extra ``parquet``.
        """
        reader = _run(self.native.sparse_reader())
        # Imported late: needs Arrow, which takes a second and is optional.
        from icechunk_async.tiledb.dataset import TileDBDataset  # noqa: PLC0415

        return TileDBDataset(reader, errors=translated)

    enumerations, enumerations_async = asked(AsyncArray.enumerations)
    label, label_async = asked(AsyncArray.label)
    metadata, metadata_async = asked(AsyncArray.metadata)


@dataclass(frozen=True, slots=True)
class TileDBGroup:
    """A TileDB group, seen in a range of times. Made by `open_group`."""

    native: AsyncGroup
    """The asynchronous group."""

    @property
    def handle(self) -> Held[AsyncGroup]:
        """The asynchronous group, to be asked."""
        return Held(self.native)

    @property
    def members(self) -> Mapping[str, tiledb.GroupMember]:
        """Arrays and groups by name."""
        return self.native.members

    array, array_async = asked(AsyncGroup.array, TileDBArray)
    group, group_async = asked(AsyncGroup.group, _group)
    metadata, metadata_async = asked(AsyncGroup.metadata)


@dataclass(frozen=True, slots=True)
class IngestedArray:
    """A snapshot that `ingest_array` committed."""

    snapshot_id: str
    end: int
    """The time up to which fragments are seen, in milliseconds since 1970."""
    referenced: int
    """Chunks that refer to a tile."""
    copied: int
    """Chunks whose cells were copied."""


@text_of(tiledb.ingest_array)
def ingest_array(
    repository: Repository,
    location: Location,
    path: str,
    *,
    branch: str = "main",
    history: bool = False,
    attributes: Sequence[str] | None = None,
    copy: bool = False,
    validity: bool = False,
    validate_containers: bool = True,
    storage_options: Mapping[str, object] | None = None,
) -> tuple[IngestedArray, ...]:
    place, options = _place(location, storage_options)
    found = run(
        repository.handle.ask(
            lambda opened: tiledb.ingest_array(
                opened,
                place,
                path,
                branch=branch,
                history=history,
                attributes=attributes,
                copy=copy,
                validity=validity,
                validate_containers=validate_containers,
                storage_options=options,
            )
        )
    )
    return tuple(
        IngestedArray(str(it.snapshot_id), it.end, it.referenced, it.copied) for it in found
    )


@text_of(tiledb.write_virtual_array)
def write_virtual_array(
    session: Session,
    array: TileDBArray,
    path: str = "/",
    *,
    attributes: Sequence[str] | None = None,
    copy: bool = False,
    validity: bool = False,
    overwrite: bool = False,
    location: str | None = None,
    validate_containers: bool = True,
) -> VirtualTiles:
    return run(
        session.handle.ask(
            lambda opened: tiledb.write_virtual_array(
                cast("AsyncSession", opened),
                array.native,
                path,
                attributes=attributes,
                copy=copy,
                validity=validity,
                overwrite=overwrite,
                location=location,
                validate_containers=validate_containers,
            )
        )
    )
