"""Sparse TileDB arrays as datasets of pyarrow, for programs that take those.

Scans of the array answer such programs: tiles that cannot hold rows of a filter are not read.
pyarrow blocks, and so do these; `icechunk_async.sync.tiledb` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final, NoReturn

import pyarrow.compute as pc

from icechunk_async._runtime.blocking.portal import run
from icechunk_async.datasets.rows import (
    BATCH_ROWS,
    RowDataset,
    RowFragment,
    RowReading,
    RowScanner,
    needed_by,
)
from icechunk_async.zarr.queries.expressions import joined

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from contextlib import AbstractContextManager

    import pyarrow as pa

    from icechunk_async.datasets.rows import Columns
    from icechunk_async.tiledb.arrays.sparse import Scan, ScanPart, SparseReader

    type Errors = Callable[[], AbstractContextManager[None]]

__all__ = ["TileDBDataset", "TileDBFragment"]

_PART_BYTES: Final = 16 << 20
"""Bytes of the columns of a part, roughly."""


class _Rows(RowReading):
    """The rows of an array, or of some parts of it.

    Cost: that of a scan of the array. Memory: a part of some 16 MiB, besides the result.
    """

    _reader: SparseReader
    _parts: tuple[ScanPart, ...] | None
    _errors: Errors

    def _translated(self) -> AbstractContextManager[None]:
        return self._errors()

    def _scan(
        self, columns: Columns, expression: pc.Expression | None, batch_size: int | None
    ) -> RowScanner:
        reader = self._reader
        names = None if columns is None else needed_by(columns, reader.arrow_schema)
        scan = reader.scan(names, expression)
        batches = self._batches(scan, batch_size or BATCH_ROWS)
        shown = columns if isinstance(columns, Mapping) else None
        return RowScanner(scan.schema, batches, shown, translated=self._errors)

    def _batches(self, scan: Scan, most_rows: int) -> Generator[pa.RecordBatch]:
        """Iterate over rows; one part is in memory at a time."""
        parts = self._parts
        for part in run(scan.plan(part_bytes=_PART_BYTES)) if parts is None else parts:
            batch = run(scan.read(part))
            # Slices share the memory of the part.
            for start in range(0, batch.num_rows, most_rows):
                yield batch.slice(start, most_rows)

    def _count(self) -> int | None:
        """Return the number of cells, unless some are deleted or hidden by others."""
        reader = self._reader
        # Then only reading tells which cells count.
        if reader.may_repeat() or reader.deletions:
            return None
        if any(it.footer.has_cell_times or it.footer.has_deletes for it in reader.fragments):
            return None
        parts = self._parts
        if parts is None:
            parts = tuple(run(reader.scan([], None).plan()))
        return sum(it.cells for it in parts)


class TileDBFragment(_Rows, RowFragment):
    """A part of a dataset, which can be read apart from the others. Made by `get_fragments`."""

    def __init__(
        self,
        reader: SparseReader,
        part: ScanPart,
        expression: pc.Expression | None,
        errors: Errors = nullcontext,
    ) -> None:
        """Keep the rows to read."""
        self._errors = errors
        self._reader = reader
        self._parts = (part,)
        self._filter = expression

    @property
    def physical_schema(self) -> pa.Schema:
        """The dimensions and attributes."""
        return self._reader.arrow_schema

    @property
    def partition_expression(self) -> pc.Expression:
        """True: nothing is said about the rows of a part."""
        return pc.scalar(True)  # noqa: FBT003 -- Arrow's


class TileDBDataset(_Rows, RowDataset):
    """A sparse TileDB array as a dataset. Made by `TileDBArray.dataset`.

    It is used inside of the ``with`` block that opened the array.
    """

    def __init__(
        self,
        reader: SparseReader,
        expression: pc.Expression | None = None,
        errors: Errors = nullcontext,
    ) -> None:
        """Keep the rows to read; ``errors`` makes a block that raises those callers expect."""
        self._errors = errors
        super().__init__(reader.arrow_schema)
        self._reader = reader
        self._filter = expression
        self._parts = None

    def filter(self, expression: pc.Expression) -> TileDBDataset:
        """Return a dataset of the rows that also pass an expression."""
        return TileDBDataset(self._reader, joined(self._filter, expression), self._errors)

    def get_fragments(
        self,
        filter: pc.Expression | None = None,  # noqa: A002 -- pyarrow's
    ) -> Iterator[TileDBFragment]:
        """Return parts of the rows, each to be read by itself: together they are all of them.

        Args:
            filter: only rows that pass.
        """
        with self._errors():
            scan = self._reader.scan(None, joined(self._filter, filter))
            parts = run(scan.plan(part_bytes=_PART_BYTES))
        for part in parts:
            # Of rows that do not pass, a part may hold copies that tiles hide which are left out.
            yield TileDBFragment(self._reader, part, scan.expression, self._errors)

    def __reduce__(self) -> NoReturn:
        """Raise `TypeError`: an open array stays in its process."""
        raise TypeError(
            "A dataset of an open TileDB array cannot be pickled. Pickle the URL, and open the "
            "array where it is read."
        )
