"""Sparse TileDB arrays as datasets of pyarrow, for programs that take those.

Such programs, DuckDB and Polars among them, ask a dataset for columns, and for the rows that pass
an expression. Scans of the array answer that: tiles that cannot hold such rows are not read.

pyarrow makes datasets of files that it reads itself. So `TileDBDataset` is a subclass with other
methods to read; below it is a file that cannot be opened. Parts of pyarrow that go around the
methods get an error that says so, and never other rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow import fs

from icechunk_async.errors import InvalidInputError
from icechunk_async.sync.bridge.portal import run
from icechunk_async.sync.errors import translated
from icechunk_async.tiledb.arrays.pruning import needed_columns

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Iterator, Sequence

    from icechunk_async.tiledb.arrays.sparse import Scan, ScanPart, SparseReader

    type Columns = Sequence[str] | Mapping[str, pc.Expression] | None

__all__ = ["TileDBDataset", "TileDBFragment"]

_BATCH_ROWS: Final = 131_072
"""Rows of a batch at most, unless said otherwise; as pyarrow has it."""
_IGNORED: Final = frozenset(
    {
        "batch_readahead",
        "cache_metadata",
        "fragment_readahead",
        "fragment_scan_options",
        "memory_pool",
        "use_threads",
    }
)
"""Arguments of pyarrow that mean nothing here."""
_PART_BYTES: Final = 16 << 20
"""Bytes of the columns of a part, roughly. pyarrow's own scanner may hold several ahead."""


def _run[T](work: Coroutine[Any, Any, T]) -> T:
    with translated():
        return run(work)


def _refuse(*_: object, **__: object) -> NoReturn:
    raise NotImplementedError(
        "pyarrow cannot read a TileDB array itself. Call to_reader(), to_batches() or to_table() "
        "of the dataset, and pass on what they return."
    )


# All methods of the interface that opens files, of which none is there.
_NoFiles: Final[Any] = type(
    "_NoFiles",
    (fs.FileSystemHandler,),
    {
        **dict.fromkeys(fs.FileSystemHandler.__abstractmethods__, _refuse),
        "get_type_name": lambda _: "tiledb",
        "normalize_path": lambda _, path: path,
    },
)


@dataclass(frozen=True, slots=True)
class _Query:
    """Some columns of the rows that pass a filter, in parts."""

    scan: Scan
    projection: Mapping[str, pc.Expression] | None
    """Expressions to compute of the columns, if they are not the result themselves."""
    schema: pa.Schema

    @classmethod
    def of(cls, reader: SparseReader, columns: Columns, expression: pc.Expression | None) -> _Query:
        """Return the query that some arguments ask for.

        Raises:
            InvalidInputError: a column does not exist, or an expression cannot be computed.
        """
        with translated():
            if isinstance(columns, str):
                raise InvalidInputError(f"columns= is the text {columns!r}. Give a list of names.")
            if not isinstance(columns, Mapping):
                scan = reader.scan(columns, expression)
                return cls(scan, None, scan.schema)
            known = reader.arrow_schema
            # Whether a value is there is a condition, and refers to the same columns.
            needed = [needed_columns(it.is_valid(), known) for it in columns.values()]
            found = list(dict.fromkeys(name for names in needed for name in names))
            scan = reader.scan(found, expression)
            return cls(scan, columns, _computed(known.empty_table(), columns).schema)

    def batches(
        self, parts: Sequence[ScanPart] | None, most_rows: int
    ) -> Generator[pa.RecordBatch]:
        """Iterate over rows; one part is in memory at a time."""
        if parts is None:
            parts = _run(self.scan.plan(part_bytes=_PART_BYTES))
        for part in parts:
            batch = _run(self.scan.read(part))
            if self.projection is not None and batch.num_rows:
                (batch,) = _computed(batch, self.projection).combine_chunks().to_batches()
            for start in range(0, batch.num_rows, most_rows):
                yield batch.slice(start, most_rows)


def _check_ignored(given: Mapping[str, object]) -> None:
    unknown = given.keys() - _IGNORED
    if unknown:
        raise TypeError(f"Datasets of TileDB arrays have no argument {min(unknown)!r}.")


def _computed(rows: Any, projection: Mapping[str, pc.Expression]) -> pa.Table:
    return ds.dataset(rows).to_table(columns=dict(projection), use_threads=False)


class _Rows:
    """The methods of a dataset and of a part of one that read rows.

    All take the same arguments, and those of pyarrow that mean nothing here.

    Args:
        columns: names; or by name an expression to compute; all dimensions and attributes if None.
        filter: only rows for which an expression of ``pyarrow.compute`` is true.
        batch_size: rows of a batch at most.

    Raises:
        InvalidInputError: a column does not exist, or an expression cannot be computed.
        IcechunkError: reading failed; as `icechunk_async.tiledb.Scan`.

    Cost: that of a scan of the array. Memory: a part of some 16 MiB, besides the result.
    """

    _reader: SparseReader
    _filter: pc.Expression | None
    _parts: tuple[ScanPart, ...] | None

    def _query(self, columns: Columns, expression: pc.Expression | None) -> _Query:
        own = self._filter
        if own is not None:
            expression = own if expression is None else own & expression
        return _Query.of(self._reader, columns, expression)

    def to_batches(
        self,
        columns: Columns = None,
        filter: pc.Expression | None = None,  # noqa: A002 -- pyarrow's
        batch_size: int = _BATCH_ROWS,
        **ignored: object,
    ) -> Iterator[pa.RecordBatch]:
        """Iterate over rows, which come in no particular order."""
        _check_ignored(ignored)
        return self._query(columns, filter).batches(self._parts, batch_size)

    def to_reader(
        self,
        columns: Columns = None,
        filter: pc.Expression | None = None,  # noqa: A002 -- pyarrow's
        batch_size: int = _BATCH_ROWS,
        **ignored: object,
    ) -> pa.RecordBatchReader:
        """Return a reader of the rows, which can be read once."""
        _check_ignored(ignored)
        query = self._query(columns, filter)
        return pa.RecordBatchReader.from_batches(
            query.schema, query.batches(self._parts, batch_size)
        )

    def to_table(
        self,
        columns: Columns = None,
        filter: pc.Expression | None = None,  # noqa: A002 -- pyarrow's
        batch_size: int = _BATCH_ROWS,
        **ignored: object,
    ) -> pa.Table:
        """Return all rows."""
        _check_ignored(ignored)
        query = self._query(columns, filter)
        return pa.Table.from_batches(query.batches(self._parts, batch_size), query.schema)

    def head(
        self,
        num_rows: int,
        columns: Columns = None,
        filter: pc.Expression | None = None,  # noqa: A002 -- pyarrow's
        batch_size: int = _BATCH_ROWS,
        **ignored: object,
    ) -> pa.Table:
        """Return some rows, any ones; no part is read once there are enough."""
        _check_ignored(ignored)
        query = self._query(columns, filter)
        found: list[pa.RecordBatch] = []
        with closing(query.batches(self._parts, batch_size)) as batches:
            while num_rows > 0 and (batch := next(batches, None)) is not None:
                found.append(batch.slice(0, num_rows))
                num_rows -= found[-1].num_rows
        return pa.Table.from_batches(found, query.schema)

    def count_rows(
        self,
        filter: pc.Expression | None = None,  # noqa: A002 -- pyarrow's
        **ignored: object,
    ) -> int:
        """Return the number of rows.

        No tile is read if there is no filter, and neither deletions nor cells that others hide.
        """
        _check_ignored(ignored)
        query = self._query([], filter)
        if query.scan.expression is None and self._is_plain():
            parts = self._parts
            parts = tuple(_run(query.scan.plan())) if parts is None else parts
            return sum(it.cells for it in parts)
        return sum(it.num_rows for it in query.batches(self._parts, _BATCH_ROWS))

    def scanner(
        self,
        columns: Columns = None,
        filter: pc.Expression | None = None,  # noqa: A002 -- pyarrow's
        batch_size: int = _BATCH_ROWS,
        **ignored: object,
    ) -> ds.Scanner:
        """Return a scanner of pyarrow, which can be used once.

        It reads ahead on threads of pyarrow: up to 16 batches are in memory, of up to 16 MiB.
        """
        _check_ignored(ignored)
        query = self._query(columns, filter)
        batches = query.batches(self._parts, batch_size)
        return ds.Scanner.from_batches(batches, schema=query.schema)

    def take(self, *_: object, **__: object) -> NoReturn:
        """Raise `NotImplementedError`: rows have no numbers, since they come in any order."""
        raise NotImplementedError(
            "Rows of a TileDB array come in no particular order, so none has a number. Choose rows "
            "with filter=, or take them from a table that to_table() returned."
        )

    def _is_plain(self) -> bool:
        """Return whether every stored cell is a row."""
        reader = self._reader
        if reader.may_repeat() or reader.deletions:
            return False
        return not any(it.footer.has_cell_times or it.footer.has_deletes for it in reader.fragments)


class TileDBFragment(_Rows):
    """A part of a dataset, which can be read apart from the others. Made by `get_fragments`."""

    def __init__(
        self, reader: SparseReader, part: ScanPart, expression: pc.Expression | None
    ) -> None:
        """Keep the rows to read."""
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


class TileDBDataset(_Rows, ds.FileSystemDataset):
    """A sparse TileDB array as a dataset. Made by `TileDBArray.dataset`.

    It is used inside of the ``with`` block that opened the array.
    """

    def __init__(self, reader: SparseReader, expression: pc.Expression | None = None) -> None:
        """Keep the rows to read."""
        no_files = fs.PyFileSystem(_NoFiles())
        form = ds.IpcFileFormat()
        nothing = form.make_fragment("tiledb", no_files)
        super().__init__([nothing], reader.arrow_schema, form, no_files)
        self._reader = reader
        self._filter = expression
        self._parts = None

    def filter(self, expression: pc.Expression) -> TileDBDataset:
        """Return a dataset of the rows that also pass an expression."""
        own = self._filter
        return TileDBDataset(self._reader, expression if own is None else own & expression)

    def get_fragments(
        self,
        filter: pc.Expression | None = None,  # noqa: A002 -- pyarrow's
    ) -> Iterator[TileDBFragment]:
        """Return parts of the rows, each to be read by itself: together they are all of them.

        Args:
            filter: only rows that pass.
        """
        scan = self._query(None, filter).scan
        for part in _run(scan.plan(part_bytes=_PART_BYTES)):
            # Of rows that do not pass, a part may hold copies that tiles hide which are left out.
            yield TileDBFragment(self._reader, part, scan.expression)

    def replace_schema(self, schema: pa.Schema) -> NoReturn:
        """Raise `NotImplementedError`: columns have the types of the array."""
        del schema
        raise NotImplementedError(
            "A TileDB array has its own types. Give columns= as a dict of expressions that cast."
        )

    def __reduce__(self) -> NoReturn:
        """Raise `TypeError`: an open array stays in its process."""
        raise TypeError(
            "A dataset of an open TileDB array cannot be pickled. Pickle the URL, and open the "
            "array where it is read."
        )
