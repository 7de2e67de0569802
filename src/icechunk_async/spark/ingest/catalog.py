"""The record of ingested files: one row for each, kept as an array beside the data.

It is written in the same commit as the data, so it is true of every snapshot. The array holds the
bytes of an Arrow stream, which other programs can read.
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import pyarrow as pa
import zarr
from pyarrow import ipc

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from zarr.abc.store import Store

__all__ = ["CATALOG", "Catalog", "Entry"]

CATALOG: Final = "_ingest"
"""Name of the catalog's group, below that of the data."""
_FILES: Final = "files"
_ABOUT: Final = (
    "The files that were ingested into the group above, as the bytes of an Arrow IPC stream. "
    "Written by icechunk_async.spark.ingest_virtual."
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One ingested file."""

    location: str
    stamp: str
    """Stamp of its state when it was ingested; see `SourceState.stamp`."""
    group: str
    """Path of the group of its arrays."""
    start: int
    """Index at which it begins along the dimension of concatenation."""
    count: int
    """Length of the file along that dimension; 0 if files are not concatenated."""
    references: int
    arrays: tuple[str, ...] | None = None
    """Paths of its arrays within its group; None if files are concatenated, which all have the
    arrays of the catalog, and in catalogs of before this was recorded."""

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Self:
        """Return the entry of a row of the table."""
        arrays: list[str] | None = row.pop("arrays", None)
        return cls(**row, arrays=None if arrays is None else tuple(arrays))


_TYPES: Final = {
    **dict.fromkeys(("start", "count", "references"), pa.int64()),
    "arrays": pa.list_(pa.string()),
}
_SCHEMA: Final = pa.schema([(it.name, _TYPES.get(it.name, pa.string())) for it in fields(Entry)])


@dataclass(frozen=True, slots=True)
class Catalog:
    """All ingested files, in the order of their data."""

    entries: tuple[Entry, ...] = ()
    concat_dim: str | None = None
    arrays: tuple[str, ...] = ()
    """Paths of the concatenated arrays, relative to the group."""
    loaded: tuple[str, ...] = ()
    """Those of the arrays whose data was copied."""
    attributes: Mapping[str, Sequence[str]] = field(default_factory=dict["str", "Sequence[str]"])
    """Names of the attributes that groups got from concatenated files, by path."""
    by_location: dict[str, Entry] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the entries."""
        found = {it.location: it for it in self.entries}
        object.__setattr__(self, "by_location", found)

    def table(self) -> pa.Table:
        """Return the entries as a table."""
        return table_of(self.entries)

    @classmethod
    def read(cls, store: Store, group: str) -> Self:
        """Read the catalog from a session; it has no entries if nothing was ingested.

        Raises:
            FormatError: the array in its place is not a catalog.
        """
        path = f"{group}/{CATALOG}/{_FILES}".strip("/")
        try:
            array = zarr.open_array(store, path=path, mode="r")  # pyright: ignore[reportUnknownMemberType]
        except FileNotFoundError:
            return cls()
        try:
            attributes: dict[str, Any] = dict(array.attrs)
            with ipc.open_stream(np.asarray(array[...]).tobytes()) as reader:
                rows = reader.read_all().to_pylist()
            settings = attributes["ingest"]
            return cls(
                tuple(Entry.of_row(row) for row in rows),
                settings["concat_dim"],
                tuple(settings["arrays"]),
                tuple(settings["loaded"]),
                dict(settings["attributes"]),
            )
        except (KeyError, TypeError, ValueError, pa.ArrowInvalid) as error:
            raise FormatError(
                f"The array {path!r} is not a list of ingested files. Delete it to start over, or "
                "ingest into another group."
            ) from error

    def write(self, store: Store, group: str) -> None:
        """Write the catalog in a session."""
        table = self.table()
        sink = pa.BufferOutputStream()
        with ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        written: Any = sink.getvalue()
        data = np.frombuffer(written, np.uint8)
        array = zarr.create_array(  # pyright: ignore[reportUnknownMemberType]
            store,
            name=f"{group}/{CATALOG}/{_FILES}".strip("/"),
            shape=data.shape,
            chunks=data.shape,
            dtype="u1",
            overwrite=True,
            dimension_names=["byte"],
            attributes={
                "about": _ABOUT,
                "ingest": {
                    "concat_dim": self.concat_dim,
                    "arrays": list(self.arrays),
                    "loaded": list(self.loaded),
                    "attributes": {path: list(names) for path, names in self.attributes.items()},
                },
            },
        )
        array[...] = data


def table_of(entries: Iterable[Entry]) -> pa.Table:
    """Return entries as a table."""
    rows = list(entries)
    columns = {name: [getattr(row, name) for row in rows] for name in _SCHEMA.names}
    return pa.Table.from_batches([pa.RecordBatch.from_pydict(columns, _SCHEMA)], _SCHEMA)
