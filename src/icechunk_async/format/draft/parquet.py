"""Read Parquet files that need not be trusted: any fault in them is a FormatError.

Before pyarrow reads a column, the sizes that its pages declare are added up and bounded
(`pages.measure`). Text and bytes are read as indices into their distinct values, because a value
that is stored once can stand for any number of rows.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from icechunk_async.errors import FormatError
from icechunk_async.format.draft.pages import measure
from icechunk_async.format.envelope import believable_bytes

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import numpy.typing as npt

__all__ = [
    "ParquetReader",
    "column_range",
    "distinct",
    "numbers",
    "parse_footer",
    "python_values",
    "write_parquet",
]

_ROWS_PER_BYTE: Final = 8
"""Rows of a file that are believed, a multiple of its size. Genuine files do not reach one."""
_FEW_ROWS: Final = 1 << 16
_LEVELS: Final = range(1, 23)


@contextmanager
def _faults(name: str) -> Generator[None]:
    """Turn the errors of pyarrow about a damaged file into FormatErrors."""
    try:
        yield
    except FormatError:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise FormatError(f"A {name} is damaged: {str(error)[:200]}.") from error
    except (MemoryError, OverflowError, AttributeError) as error:
        raise FormatError(f"A {name} cannot be read: {str(error)[:200]}.") from error


def parse_footer(data: bytes | memoryview, name: str) -> pq.FileMetaData:
    """Return the metadata at the end of a file, of which ``data`` may be only the end.

    Raises:
        FormatError: it is damaged.
    """
    with _faults(name):
        return pq.read_metadata(pa.BufferReader(_as_buffer(data)))


def _as_buffer(data: bytes | memoryview | npt.NDArray[np.uint8]) -> pa.Buffer:
    return pa.py_buffer(data)


def column_range(metadata: pq.FileMetaData, group: int, column: int) -> tuple[int, int]:
    """Return the bytes ``[start, stop)`` of a column in a group of rows.

    Raises:
        FormatError: they cannot be any.
    """
    with _faults("Parquet file"):
        chunk = metadata.row_group(group).column(column)
        start = chunk.data_page_offset
        first = chunk.dictionary_page_offset
        if first is not None and 0 < first < start:
            start = first
        stop = start + chunk.total_compressed_size
    if not 0 < start <= stop:
        raise FormatError("A Parquet file has a column outside of itself.")
    return start, stop


class ParquetReader:
    """A file, or those of its parts that were read."""

    def __init__(
        self,
        data: bytes | memoryview | npt.NDArray[np.uint8],
        name: str,
        *,
        schema: pa.Schema,
        metadata: pq.FileMetaData | None = None,
    ) -> None:
        """Open a file.

        Args:
            data: its bytes; those of parts that are not read yet mean nothing.
            name: how messages call it.
            schema: its columns; others are not read.
            metadata: its metadata, if that was read.

        Raises:
            FormatError: it is damaged, or lacks a column.
        """
        self._view = memoryview(data)
        self._name = name
        with _faults(name):
            self.metadata = metadata or pq.read_metadata(pa.BufferReader(_as_buffer(data)))
            paths = [
                self.metadata.schema.column(at).path for at in range(self.metadata.num_columns)
            ]
            texts = [
                path
                for at, path in enumerate(paths)
                if self.metadata.schema.column(at).physical_type == "BYTE_ARRAY"
            ]
            self._columns = schema.names
            self._leaves = [
                at for at, path in enumerate(paths) if path.partition(".")[0] in schema.names
            ]
            self._file = pq.ParquetFile(
                pa.BufferReader(_as_buffer(data)),
                metadata=self.metadata,
                read_dictionary=texts,
                arrow_extensions_enabled=False,
            )
            found = self._file.schema_arrow.names
        self._sizes: dict[int, int] = {}
        missing = [it for it in schema.names if found.count(it) != 1]
        if missing:
            raise FormatError(f"A {name} needs one column {missing[0]!r}; it has {found!r:.200}.")
        if not 0 <= self.metadata.num_rows <= self._limit:
            raise FormatError(
                f"A {name} of {len(self._view)} bytes claims to have {self.metadata.num_rows} "
                f"rows; at most {self._limit} are believed."
            )

    @property
    def _limit(self) -> int:
        return _FEW_ROWS + _ROWS_PER_BYTE * len(self._view)

    def read(self, groups: Sequence[int] | None = None) -> pa.Table:
        """Read the columns of some groups of rows, by default of all.

        Raises:
            FormatError: they are damaged, or larger than is believed.
        """
        with _faults(self._name):
            wanted = range(self.metadata.num_row_groups) if groups is None else groups
            chosen = [it for it in wanted if self.metadata.row_group(it).num_rows]
            for group in chosen:
                self._check(group)
            table = self._file.read_row_groups(chosen, columns=self._columns, use_threads=False)
            table.validate()
            return table.select(self._columns)

    def _check(self, group: int) -> None:
        """Raise FormatError if a group of rows cannot be of this file, or is too large."""
        for leaf in self._leaves:
            start, stop = column_range(self.metadata, group, leaf)
            if stop > len(self._view):
                raise FormatError(f"A {self._name} has a column outside of itself.")
            found = measure(self._view[start:stop])
            self._sizes[group * self.metadata.num_columns + leaf] = found.size_bytes
            if found.num_values > self._limit:
                raise FormatError(
                    f"A {self._name} of {len(self._view)} bytes claims to have {found.num_values} "
                    f"values in a column; at most {self._limit} are believed."
                )
        if sum(self._sizes.values()) > believable_bytes(len(self._view)):
            raise FormatError(
                f"A {self._name} of {len(self._view)} bytes claims to hold more than "
                f"{believable_bytes(len(self._view))}, which is not believed."
            )


def _whole(column: Any) -> Any:
    """Return a column in one piece."""
    found = column.combine_chunks()
    if isinstance(found, pa.ChunkedArray):
        found = pa.concat_arrays(found.chunks) if found.num_chunks else pa.array([], found.type)
    return found


def numbers(column: Any, kind: pa.DataType, name: str, null: int | None = None) -> npt.NDArray[Any]:
    """Return a column of numbers; ``null`` stands for those that are missing.

    Raises:
        FormatError: one is missing, or does not fit.
    """
    with _faults(name):
        array = _whole(column).cast(kind)
        if array.null_count:
            if null is None:
                raise FormatError(f"A {name} lacks a number that it needs.")
            array = array.fill_null(null)
        values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
        return values


def distinct(
    column: Any, kind: pa.DataType, name: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return a column of text or bytes as its distinct values.

    Args:
        column: read by `ParquetReader`.
        kind: ``pa.binary()`` or ``pa.string()``.
        name: how messages call the file.

    Returns:
        The index of each row's value, -1 for null; the bounds of the values, one more than there
        are; and their bytes.

    Raises:
        FormatError: it has other values.
    """
    with _faults(name):
        array = _whole(column)
        if not isinstance(array.type, pa.DictionaryType):
            array = array.cast(kind).dictionary_encode()
        values = array.dictionary.cast(kind)
        indices = array.indices.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
        if values.null_count:
            raise FormatError(f"A {name} has nulls among its distinct values.")
        if len(indices) and not -1 <= indices.min() <= indices.max() < len(values):
            raise FormatError(f"A {name} refers to values that it does not have.")
        if not len(values):
            return indices, np.zeros(1, np.int64), np.empty(0, np.uint8)
        _, bounds, data = values.buffers()
        places = np.frombuffer(bounds, np.int32)[values.offset : values.offset + len(values) + 1]
        raw = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
        return indices, places.astype(np.int64), raw


def python_values(column: Any, name: str) -> list[Any]:
    """Return a column as Python values; equal texts of one page are one object.

    Structures are dicts and lists are lists.

    Raises:
        FormatError: it has values of a kind that no schema of the first draft has.
    """
    with _faults(name):
        return _python(_whole(column))


def _python(array: Any) -> list[Any]:
    kind = array.type
    valid: list[bool] = array.is_valid().to_pylist()
    if isinstance(kind, pa.DictionaryType):
        values = array.dictionary.to_pylist()
        places = array.indices.fill_null(0).to_pylist()
        if any(ok and at < 0 for at, ok in zip(places, valid, strict=True)):
            raise IndexError("a value has a negative index")
        return [values[at] if ok else None for at, ok in zip(places, valid, strict=True)]
    if isinstance(kind, pa.StructType):
        names = [kind.field(at).name for at in range(kind.num_fields)]
        fields = [_python(it) for it in array.flatten()]
        rows = zip(*fields, strict=True) if fields else ((),) * len(array)
        return [
            dict(zip(names, row, strict=True)) if ok else None
            for row, ok in zip(rows, valid, strict=True)
        ]
    if isinstance(kind, pa.FixedSizeListType):
        size = kind.list_size
        bounds = [size * (array.offset + at) for at in range(len(array) + 1)]
    elif isinstance(kind, pa.ListType | pa.LargeListType):
        bounds = array.offsets.to_pylist()
    elif pa.types.is_integer(kind):
        integers: list[Any] = array.to_pylist()
        return integers
    else:
        texts: list[Any] = array.cast(pa.binary()).to_pylist()
        return texts
    values = _python(array.values)
    return [values[bounds[at] : bounds[at + 1]] if ok else None for at, ok in enumerate(valid)]


def write_parquet(
    table: pa.Table,
    level: int,
    *,
    rows: int = 1 << 16,
    statistics: Sequence[str] = (),
    repeated: Sequence[str] = (),
) -> bytes:
    """Return the file of a table.

    Args:
        table: what to write.
        level: of zstd.
        rows: in a group.
        statistics: columns whose smallest and greatest value in each group are stored.
        repeated: columns that have few distinct values.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        row_group_size=rows,
        compression="zstd",
        compression_level=level if level in _LEVELS else None,
        use_dictionary=list(repeated),
        write_statistics=list(statistics),
    )
    return sink.getvalue().to_pybytes()
