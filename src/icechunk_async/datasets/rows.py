"""Datasets of pyarrow whose rows this library reads, for programs that take such datasets.

DuckDB, Polars, DataFusion and others ask a dataset for columns, and for the rows that pass an
expression. pyarrow makes datasets of files that it reads itself. So `RowDataset` is a subclass with
other methods to read; below it is a file that cannot be opened. Parts of pyarrow that go around the
methods get an error that says so, and never other rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Any, Final, NoReturn

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs

from icechunk_async._runtime.blocking.tracebacks import Shortened
from icechunk_async.errors import InvalidInputError
from icechunk_async.zarr.queries.expressions import joined, needed_columns

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    import pyarrow.compute as pc

    type Columns = Sequence[str] | Mapping[str, pc.Expression] | None

__all__ = [
    "BATCH_ROWS",
    "RowDataset",
    "RowFragment",
    "RowReading",
    "RowScanner",
    "needed_by",
    "refuse",
]

BATCH_ROWS: Final = 131_072
"""The most rows of a batch, unless another number is given; as pyarrow has it."""
# Programs that take datasets pass some of these on.
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
"""Arguments of pyarrow that change no row."""


def refuse(*_: object, **__: object) -> NoReturn:
    """Raise `NotImplementedError`: pyarrow itself finds no rows."""
    raise NotImplementedError(
        "pyarrow cannot read these rows itself. Call to_reader(), to_batches() or to_table() of "
        "the dataset, and pass on what they return."
    )


# All methods of the interface that opens files, of which none is there.
_NoFiles: Final[Any] = type(
    "_NoFiles",
    (fs.FileSystemHandler,),
    {
        **dict.fromkeys(fs.FileSystemHandler.__abstractmethods__, refuse),
        "get_type_name": lambda _: "icechunk-async",  # pyright: ignore[reportUnknownLambdaType]
        "normalize_path": lambda _, path: path,  # pyright: ignore[reportUnknownLambdaType]
    },
)


def needed_by(columns: Columns, schema: pa.Schema) -> list[str]:
    """Return the names of the columns that are asked for, or that expressions refer to.

    Raises:
        InvalidInputError: there is no such column, or an expression cannot be computed.
    """
    if columns is None:
        return schema.names
    if isinstance(columns, str):
        raise InvalidInputError(f"columns= is the text {columns!r}. Give a list of names.")
    if isinstance(columns, Mapping):
        # Whether a value is there is a condition, and refers to the same columns.
        found = [needed_columns(it.is_valid(), schema) for it in columns.values()]
        return list(dict.fromkeys(name for names in found for name in names))
    for name in columns:
        if name not in schema.names:
            raise InvalidInputError(
                f"There is no column {name!r}. The table has {', '.join(schema.names)}."
            )
    return list(columns)


class RowScanner:
    """The rows of one scan, read when they are asked for; it can be used once.

    It has the methods of a `pyarrow.dataset.Scanner` without being one: Arrow's scanners read ahead
    in threads, which continue after a query has enough rows, also while the process ends.
    """

    def __init__(
        self,
        schema: pa.Schema,
        batches: Generator[pa.RecordBatch],
        columns: Columns = None,
        expression: pc.Expression | None = None,
        translated: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Keep the work to do.

        Args:
            schema: the columns of the batches.
            batches: rows.
            columns: the columns to show; all if None.
            expression: the filter to apply.
            translated: makes a block that raises the errors that callers expect.
        """
        self._translated = translated
        self._schema = schema
        self._batches = batches
        self._columns: Any = columns
        if columns is not None:
            self._columns = dict(columns) if isinstance(columns, Mapping) else list(columns)
        self._filter = expression
        # By Arrow itself, on no rows: the names and types of computed columns, and errors before
        # anything is read.
        self._projected = self._shown(schema.empty_table()).schema

    @property
    def dataset_schema(self) -> pa.Schema:
        """The columns that are read."""
        return self._schema

    @property
    def projected_schema(self) -> pa.Schema:
        """The columns of the rows."""
        return self._projected

    def to_batches(self) -> Generator[pa.RecordBatch]:
        """Iterate over the rows, in batches that are not empty.

        Raises:
            IcechunkError: reading failed.
        """
        with Shortened(), self._translated(), closing(self._batches):
            for batch in self._batches:
                # A batch at a time, so that a caller who has enough leaves the rest unread.
                found = self._shown(pa.Table.from_batches([batch])).to_batches()
                yield from (it for it in found if it.num_rows)

    def to_reader(self) -> pa.RecordBatchReader:
        """Return the rows as a stream of Arrow."""
        return pa.RecordBatchReader.from_batches(self._projected, self.to_batches())

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Return the rows as a stream of Arrow's C interface."""
        return self.to_reader().__arrow_c_stream__(requested_schema)

    def to_table(self) -> pa.Table:
        """Return all rows."""
        return pa.Table.from_batches(self.to_batches(), schema=self._projected)

    def head(self, num_rows: int) -> pa.Table:
        """Return the first rows; nothing more is read once there are enough."""
        found: list[pa.RecordBatch] = []
        with closing(self.to_batches()) as batches:
            while num_rows > 0 and (batch := next(batches, None)) is not None:
                found.append(batch.slice(0, num_rows))
                num_rows -= found[-1].num_rows
        return pa.Table.from_batches(found, schema=self._projected)

    def count_rows(self) -> int:
        """Return the number of rows."""
        return sum(it.num_rows for it in self.to_batches())

    def _shown(self, rows: pa.Table) -> pa.Table:
        """Return those rows that the filter keeps, with the columns asked for."""
        if self._filter is None and (self._columns is None or self._columns == self._schema.names):
            return rows
        # Threads have nothing to share of a batch, and would change the order of its rows.
        return ds.dataset(rows).to_table(
            columns=self._columns, filter=self._filter, use_threads=False
        )


class RowReading(ABC):
    """The methods of a dataset, and of a part of one, that read rows.

    All take the same arguments, and those of pyarrow that change no row: `columns` has names, or by
    name an expression to compute, and is None for all columns; `filter` is an expression of
    `pyarrow.compute` that rows have to fulfil; `batch_size` is the most rows of a batch.

    Raises:
        InvalidInputError: there is no such column, or an expression cannot be computed.
        IcechunkError: reading failed.
    """

    _filter: pc.Expression | None
    """Rows that do not pass are not part of this; None for all."""

    def _translated(self) -> AbstractContextManager[None]:
        """Return a block that raises the errors that callers expect."""
        return nullcontext()

    @abstractmethod
    def _scan(
        self, columns: Columns, expression: pc.Expression | None, batch_size: int | None
    ) -> RowScanner:
        """Return the scanner of some columns of the rows that pass a filter, the own one in it."""

    @abstractmethod
    def _count(self) -> int | None:
        """Return the number of all rows, if no row has to be read for it."""

    def scanner(
        self,
        columns: Columns = None,
        filter: pc.Expression | None = None,  # noqa: A002 -- pyarrow's
        batch_size: int | None = None,
        **ignored: object,
    ) -> RowScanner:
        """Return a scanner of the rows, which can be used once.

        The thread that asks for the first rows reads them, and no more. Later ones may be read
        ahead on another thread, which ends when the rows are used up or closed.
        """
        # Arguments that would change rows must not pass in silence.
        unknown = ignored.keys() - _IGNORED
        if unknown:
            raise TypeError(f"Datasets of this library have no argument {min(unknown)!r}.")
        with self._translated():
            return self._scan(columns, joined(self._filter, filter), batch_size)

    def to_batches(
        self,
        columns: Columns = None,
        filter: pc.Expression | None = None,  # noqa: A002 -- pyarrow's
        batch_size: int | None = None,
        **options: Any,
    ) -> Iterator[pa.RecordBatch]:
        """Iterate over the rows, in batches."""
        found = self.scanner(columns=columns, filter=filter, batch_size=batch_size, **options)
        return found.to_batches()

    def to_reader(
        self,
        columns: Columns = None,
        filter: pc.Expression | None = None,  # noqa: A002 -- pyarrow's
        batch_size: int | None = None,
        **options: Any,
    ) -> pa.RecordBatchReader:
        """Return a reader of the rows, which can be read once."""
        found = self.scanner(columns=columns, filter=filter, batch_size=batch_size, **options)
        return found.to_reader()

    def to_table(
        self,
        columns: Columns = None,
        filter: pc.Expression | None = None,  # noqa: A002 -- pyarrow's
        batch_size: int | None = None,
        **options: Any,
    ) -> pa.Table:
        """Return all rows."""
        found = self.scanner(columns=columns, filter=filter, batch_size=batch_size, **options)
        return found.to_table()

    def head(self, num_rows: int, columns: Columns = None, **options: Any) -> pa.Table:
        """Return some rows; no more is read once there are enough."""
        return self.scanner(columns=columns, **options).head(num_rows)

    def count_rows(
        self,
        filter: pc.Expression | None = None,  # noqa: A002 -- pyarrow's
        **options: Any,
    ) -> int:
        """Return the number of rows; none is read if all count and their number is known."""
        if joined(self._filter, filter) is None:
            with self._translated():
                known = self._count()
            if known is not None:
                return known
        return self.scanner(columns=[], filter=filter, **options).count_rows()

    def take(self, *_: object, **__: object) -> NoReturn:
        """Raise `NotImplementedError`: rows have no numbers, since they come chunk by chunk."""
        raise NotImplementedError(
            "Rows come in no particular order, so none has a number. Choose rows with filter=, or "
            "take them from a table that to_table() returned."
        )

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Return all rows as a stream of Arrow's C interface."""
        return self.scanner().__arrow_c_stream__(requested_schema)


class RowFragment(RowReading):
    """A part of a dataset, which can be read apart from the others.

    As fragments of pyarrow have it, the first argument of its methods may be the schema of the
    dataset.
    """

    @property
    @abstractmethod
    def physical_schema(self) -> pa.Schema:
        """The columns."""

    def scanner(  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        schema: pa.Schema | None = None,
        columns: Columns = None,
        filter: pc.Expression | None = None,  # noqa: A002 -- pyarrow's
        batch_size: int | None = None,
        **ignored: object,
    ) -> RowScanner:
        """Return a scanner of the rows, which can be used once."""
        if schema is not None and schema != self.physical_schema:
            raise NotImplementedError(
                "Fragments have the columns of their dataset. Give columns= as a dict of "
                "expressions that cast."
            )
        return super().scanner(columns, filter, batch_size, **ignored)

    def to_batches(  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self, schema: pa.Schema | None = None, columns: Columns = None, **options: Any
    ) -> Iterator[pa.RecordBatch]:
        """Iterate over the rows, in batches."""
        return self.scanner(schema, columns, **options).to_batches()

    def to_table(  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self, schema: pa.Schema | None = None, columns: Columns = None, **options: Any
    ) -> pa.Table:
        """Return all rows."""
        return self.scanner(schema, columns, **options).to_table()


class RowDataset(RowReading, ds.FileSystemDataset):
    """A dataset of rows that this library reads."""

    def __init__(self, schema: pa.Schema) -> None:
        """Put a file below that cannot be opened."""
        no_files = fs.PyFileSystem(_NoFiles())
        form = ds.IpcFileFormat()
        # One fragment: without any, the dataset would be empty to those who go around the methods.
        super().__init__([form.make_fragment("rows", no_files)], schema, form, no_files)

    @abstractmethod
    def filter(self, expression: pc.Expression) -> RowDataset:
        """Return a dataset of the rows that also pass an expression."""

    def replace_schema(self, schema: pa.Schema) -> NoReturn:
        """Raise `NotImplementedError`: columns have the types of the arrays."""
        del schema
        raise NotImplementedError(
            "Columns have the types of the arrays. Give columns= as a dict of expressions that "
            "cast."
        )
