"""The record of ingested files: one row for each, kept as an array beside the data.

It is written in the same commit as the data, so it is true of every snapshot. The array holds one
text of JSON for each file, which other programs can read, in chunks: an ingest writes those whose
files changed, and those that are new. Earlier versions wrote all files as the bytes of one Arrow
stream, which is read still, and replaced when something changes.
"""

from __future__ import annotations

import json
from dataclasses import field, fields
from itertools import zip_longest
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
    "The files that were ingested into the group above, one in each text of JSON, in the order of "
    "their data. Written by icechunk_async.spark.ingest_virtual."
)
_FILES_A_CHUNK: Final = 1024
"""Some 20 kB once they are compressed: what is written anew when one file changes."""


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

    def text(self) -> str:
        """Return the entry as JSON. Equal entries give equal texts."""
        row = {name: getattr(self, name) for name in _SCHEMA.names}
        return json.dumps({name: it for name, it in row.items() if it is not None})


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
        # Made once: plans look up each file, and a search among a million for each would be
        # quadratic.
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
            settings = attributes["ingest"]
            return cls(
                tuple(Entry.of_row(row) for row in _rows(array)),
                settings["concat_dim"],
                tuple(settings["arrays"]),
                tuple(settings["loaded"]),
                dict(settings["attributes"]),
            )
        except (KeyError, TypeError, ValueError, RecursionError, pa.ArrowException) as error:
            raise FormatError(
                f"The array {path!r} is not a list of ingested files. Delete it to start over, or "
                "ingest into another group."
            ) from error

    def write(self, store: Store, group: str) -> None:
        """Write the catalog in a session, in place of the one that is there.

        Cost: reads the catalog that is there. Writes the chunks, of 1,024 files each, of which an
        entry differs.
        """
        path = f"{group}/{CATALOG}/{_FILES}".strip("/")
        texts = [it.text() for it in self.entries]
        array, before = self._opened(store, path)
        if array is None:
            array = zarr.create_array(  # pyright: ignore[reportUnknownMemberType]
                store,
                name=path,
                shape=(len(texts),),
                chunks=(_FILES_A_CHUNK,),
                dtype="string",
                overwrite=True,
                dimension_names=["file"],
                attributes=self._attributes(),
            )
        else:
            # In place, so that chunks whose files did not change are not written again.
            if array.shape != (len(texts),):
                array.resize((len(texts),))
            if dict(array.attrs) != self._attributes():
                array.attrs.put(self._attributes())
        differing = {
            row // _FILES_A_CHUNK
            for row, (old, new) in enumerate(zip_longest(before, texts))
            # Rows beyond the end went with the resize.
            if old != new and row < len(texts)
        }
        for chunk in sorted(differing):
            rows = slice(chunk * _FILES_A_CHUNK, (chunk + 1) * _FILES_A_CHUNK)
            array[rows] = np.array(texts[rows], object)

    def _attributes(self) -> dict[str, Any]:
        return {
            "about": _ABOUT,
            "ingest": {
                "concat_dim": self.concat_dim,
                "arrays": list(self.arrays),
                "loaded": list(self.loaded),
                "attributes": {path: list(names) for path, names in self.attributes.items()},
            },
        }

    @staticmethod
    def _opened(store: Store, path: str) -> tuple[Any, list[str]]:
        """Return the array that is there, and its texts; None if it has to be made anew."""
        try:
            array: Any = zarr.open_array(store, path=path, mode="r+")  # pyright: ignore[reportUnknownMemberType]
        except FileNotFoundError:
            return None, []
        # The catalog of an earlier version, or something else: it is replaced as a whole.
        if array.dtype.kind != "T" or array.chunks != (_FILES_A_CHUNK,):
            return None, []
        return array, array[...].tolist()


def _rows(array: zarr.Array[Any]) -> list[dict[str, Any]]:
    """Return the rows of a catalog.

    Raises:
        TypeError, ValueError, RecursionError, pa.ArrowException: the array is something else.
    """
    values = np.asarray(array[...])
    if values.dtype.kind != "T":
        with ipc.open_stream(values.tobytes()) as reader:
            old: list[dict[str, Any]] = reader.read_all().to_pylist()
            return old
    rows: list[Any] = [json.loads(it) for it in values.tolist()]
    # The array is data like any other, which anyone may have written.
    if not all(isinstance(it, dict) and None not in it.values() for it in rows):
        raise TypeError("not every text is an object without null")
    pa.Table.from_pylist(rows, _SCHEMA)  # refuses values of other types
    return rows


def table_of(entries: Iterable[Entry]) -> pa.Table:
    """Return entries as a table."""
    rows = list(entries)
    columns = {name: [getattr(row, name) for row in rows] for name in _SCHEMA.names}
    return pa.Table.from_batches([pa.RecordBatch.from_pydict(columns, _SCHEMA)], _SCHEMA)
