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
from icechunk_async._runtime.blocking.portal import blocking, run
from icechunk_async._runtime.blocking.tracebacks import managed
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.sync.errors import translated
from icechunk_async.sync.storage import Storage

if TYPE_CHECKING:
    import os
    from collections.abc import Coroutine, Generator, Iterator, Mapping, Sequence
    from datetime import datetime

    import numpy.typing as npt
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


@dataclass(frozen=True, slots=True)
class TileDBArray:
    """A TileDB array, seen in a range of times. Made by `open_array`.

    Methods raise and cost what those of `icechunk_async.tiledb.TileDBArray` do.
    """

    native: tiledb.TileDBArray
    """The asynchronous array."""

    @property
    def schema(self) -> tiledb.Schema:
        """The dimensions, the attributes, and how they are stored."""
        return self.native.schema

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of cells of the domain along each dimension of a dense array."""
        with translated():
            return self.native.shape

    def read(
        self,
        region: Sequence[slice | int] | None = None,
        attributes: Sequence[str] | None = None,
    ) -> dict[str, npt.NDArray[Any]]:
        """Read a region of a dense array; blocks.

        Args:
            region: coordinates along each dimension, as slices without a step, or single ones. They
                are those of the domain, which need not begin at 0. None, and a missing end, is the
                end of the domain.
            attributes: names; all if None.

        Returns:
            By attribute an array of the shape of the region.
        """
        return _run(self.native.read(region, attributes))

    def scan(self, columns: Sequence[str] | None = None, filters: object = None) -> Scan:
        """Plan a scan of a sparse array; blocks.

        Args:
            columns: dimensions and attributes; all if None.
            filters: only rows that pass: an expression of ``pyarrow.compute``; or tuples such as
                ``("x", ">", 3)``, which must all hold; or lists of tuples, of which one must hold.
        """
        return Scan(_run(self.native.scan(columns, filters)))

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

    def enumerations(self) -> dict[str, tiledb.Enumeration]:
        """Return the enumeration of each attribute that has one, by the attribute's name."""
        return _run(self.native.enumerations())

    def label(self, name: str, region: slice | None = None) -> npt.NDArray[Any]:
        """Read a label of a dimension: a value for each coordinate of a region, or of all."""
        return _run(self.native.label(name, region))

    def metadata(self) -> dict[str, tiledb.MetadataValue]:
        """Return the key-value metadata of the array at this time."""
        return _run(self.native.metadata())


@dataclass(frozen=True, slots=True)
class TileDBGroup:
    """A TileDB group, seen in a range of times. Made by `open_group`."""

    native: tiledb.TileDBGroup
    """The asynchronous group."""

    @property
    def members(self) -> Mapping[str, tiledb.GroupMember]:
        """Arrays and groups by name."""
        return self.native.members

    def array(self, name: str) -> TileDBArray:
        """Open a member that is an array, at the time of the group.

        Raises:
            NotFoundError: there is no such member, or no array at its place.
            InvalidInputError: the member is a group, or lies outside of this group's storage.
        """
        return TileDBArray(_run(self.native.array(name)))

    def group(self, name: str) -> TileDBGroup:
        """Open a member that is a group, at the time of this one; errors as `array`."""
        return TileDBGroup(_run(self.native.group(name)))

    def metadata(self) -> dict[str, tiledb.MetadataValue]:
        """Return the key-value metadata of the group at this time."""
        return _run(self.native.metadata())


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
    """Write a dense TileDB array into a group of a branch, and commit it; again, only what is new.

    Args:
        repository: a repository whose containers cover the array.
        location: URL or path of the array, or a `Storage` at that place.
        path: of the group.
        branch: the branch to commit to.
        history: commit a snapshot for each moment at which fragments were written, the oldest
            first, and again only for those since the last run; otherwise one snapshot.
        attributes: names; all if None.
        copy: copy tiles that cannot be referred to, all text, and cells of variable length.
        validity: write attributes that may be null, each with an array of 0 for null and 1.
        validate_containers: refuse an array that no container covers.
        storage_options: options of the storage of the array.

    Returns:
        The snapshots, none if there is nothing new.

    Raises:
        IcechunkError: as `icechunk_async.tiledb.ingest_array`. Snapshots that were committed before
            stay.
    """
    place, options = _place(location, storage_options)
    found = _run(
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
    """Write a dense TileDB array into a session as a group of arrays, one for each attribute.

    Args:
        session: a writable session.
        array: the array, opened at the time that is wanted.
        path: of the group.
        attributes: names; all if None.
        copy: copy tiles that cannot be referred to: those that were written in part, or whose cells
            come from several fragments, and those of text and of cells of variable length.
        validity: write attributes that may be null, each with an array of 0 for null and 1.
        overwrite: replace what is at the path.
        location: URL of the array in references, if it is not that by which it was opened.
        validate_containers: refuse an array that no container covers.

    Returns:
        The numbers of chunks.

    Raises:
        IcechunkError: as `icechunk_async.tiledb.write_virtual_array`.
    """
    return _run(
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
