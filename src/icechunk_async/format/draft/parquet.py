"""Read Parquet files that need not be trusted: any fault in them is a FormatError.

Before pyarrow reads a column, the sizes that its pages declare are added up and bounded
(`pages.measure`). Text and bytes are read as indices into their distinct values, because a value
that is stored once can stand for any number of rows.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from icechunk_async.errors import FormatError
from icechunk_async.format.draft.pages import measure, read_footer
from icechunk_async.format.envelope import believable_bytes

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import numpy.typing as npt

    from icechunk_async.format.draft.pages import Footer, Group

__all__ = [
    "ParquetReader",
    "distinct",
    "numbers",
    "python_values",
    "write_parquet",
]

_ROWS_PER_BYTE: Final = 8
"""Rows of a file that are believed, a multiple of its size. Genuine files do not reach one."""
_FEW_ROWS: Final = 1 << 16
_LEVELS: Final = range(1, 23)
_PLAIN: Final[dict[str, Any]] = (
    {"arrow_extensions_enabled": False}
    if "arrow_extensions_enabled" in signature(pq.ParquetFile).parameters
    else {}
)
"""Text that is said to be JSON stays text, as it always does before pyarrow 21."""


@contextmanager
def _faults(name: str) -> Generator[None]:
    """Turn the errors of pyarrow about a damaged file into FormatErrors.

    Its exceptions derive from `ArrowException`, but those of reading and of memory, of text that is
    no UTF-8, and of columns that it cannot find. Others would be mistakes of this library, and stay
    what they are.
    """
    try:
        yield
    except MemoryError as error:
        raise FormatError(f"A {name} cannot be read: {str(error)[:200]}.") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
        raise FormatError(f"A {name} is damaged: {str(error)[:200]}.") from error


class ParquetReader:
    """A file, or those of its parts that were read."""

    def __init__(
        self,
        data: bytes | memoryview | npt.NDArray[np.uint8],
        name: str,
        *,
        schema: pa.Schema,
        footer: Footer | None = None,
    ) -> None:
        """Open a file.

        Args:
            data: its bytes; those of parts that are not read yet mean nothing.
            name: how messages call it.
            schema: its columns; others are not read.
            footer: its metadata, if that was read.

        Raises:
            FormatError: it is damaged, or lacks a column.
        """
        self._view = memoryview(data)
        self._name = name
        self._columns = schema.names
        self.footer = footer or read_footer(self._view, len(self._view), name)
        # A column of one repeated value takes a few bytes for any number of rows, so the file's
        # size alone bounds nothing.
        if self.footer.num_rows > self._limit:
            raise FormatError(
                f"A {name} of {len(self._view)} bytes claims to have {self.footer.num_rows} "
                f"rows; at most {self._limit} are believed."
            )
        columns = self.footer.groups[0].columns if self.footer.groups else ()
        with _faults(name):
            self._file = pq.ParquetFile(
                pa.BufferReader(pa.py_buffer(data)),
                # Equal texts stay one value, so that the memory is in proportion to the file.
                read_dictionary=[it.path for it in columns if it.is_bytes],
                **_PLAIN,
            )
            schema_found = self._file.schema_arrow
        found = schema_found.names
        missing = [it for it in schema.names if found.count(it) != 1]
        if missing:
            raise FormatError(f"A {name} needs one column {missing[0]!r}; it has {found!r:.200}.")
        for field in schema:
            kind = schema_found.field(found.index(field.name)).type
            if not _fits(kind, field.type):
                raise FormatError(
                    f"A {name} needs {field.type} in the column {field.name!r}, which has {kind}."
                )

    @property
    def _limit(self) -> int:
        return _FEW_ROWS + _ROWS_PER_BYTE * len(self._view)

    def read(self, groups: Sequence[int] | None = None) -> pa.Table:
        """Read the columns of some groups of rows, by default of all.

        Raises:
            FormatError: they are damaged, or larger than is believed.
        """
        wanted = range(len(self.footer.groups)) if groups is None else groups
        chosen = [it for it in wanted if self.footer.groups[it].num_rows]
        self._check([self.footer.groups[it] for it in chosen])
        with _faults(self._name):
            if not chosen:  # pyarrow 18 cannot read none
                return self._file.schema_arrow.empty_table().select(self._columns)
            # Without threads of pyarrow's: this runs on a worker thread, and a pool in it would
            # outnumber the processors.
            table = self._file.read_row_groups(chosen, columns=self._columns, use_threads=False)
            # pyarrow checks neither offsets nor indices by itself, and what follows trusts them.
            table.validate()
            return table.select(self._columns)

    def _check(self, groups: Sequence[Group]) -> None:
        """Raise FormatError if groups of rows cannot be of this file, or are too large."""
        size_bytes = 0
        num_values: Counter[str] = Counter()
        for column in (column for group in groups for column in group.columns):
            if column.path.partition(".")[0] in self._columns:
                pages = measure(self._view[column.start : column.stop])
                size_bytes += pages.size_bytes
                num_values[column.path] += pages.num_values
        most = max(num_values.values(), default=0)
        if most > self._limit:
            raise FormatError(
                f"A {self._name} of {len(self._view)} bytes claims to have {most} values in a "
                f"column; at most {self._limit} are believed."
            )
        if size_bytes > believable_bytes(len(self._view)):
            raise FormatError(
                f"A {self._name} of {len(self._view)} bytes claims to hold {size_bytes}, of which "
                f"at most {believable_bytes(len(self._view))} are believed."
            )


def _fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether a type has the structure of another one; the sizes of numbers do not count."""
    if isinstance(found, pa.DictionaryType):
        found = found.value_type
    if isinstance(wanted, pa.StructType):
        if not isinstance(found, pa.StructType) or found.num_fields != wanted.num_fields:
            return False
        fields = {found.field(at).name: found.field(at).type for at in range(found.num_fields)}
        inner = [wanted.field(at) for at in range(wanted.num_fields)]
        return all(it.name in fields and _fits(fields[it.name], it.type) for it in inner)
    if isinstance(wanted, _LISTS):
        return isinstance(found, _LISTS) and _fits(found.value_type, wanted.value_type)
    if pa.types.is_integer(wanted):
        return pa.types.is_integer(found)
    return found in _TEXTS


_LISTS: Final = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)
_TEXTS: Final = (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())


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
        # `validate` does not look at indices, and NumPy would take a negative one from the end.
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
        if any(ok and not 0 <= at < len(values) for at, ok in zip(places, valid, strict=True)):
            raise FormatError("A column refers to a value that its dictionary does not have.")
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
        # Of a fixed-size list pyarrow gives the values before a slice as well.
        bounds = [size * (array.offset + at) for at in range(len(array) + 1)]
    elif isinstance(kind, _LISTS):
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
        # The configuration may hold levels that other compressors know; `None` is zstd's default.
        compression_level=level if level in _LEVELS else None,
        use_dictionary=list(repeated),
        write_statistics=list(statistics),
    )
    return sink.getvalue().to_pybytes()
