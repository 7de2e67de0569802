"""The metadata of Parquet files that need not be trusted: groups of rows, columns, and their pages.

pyarrow allocates what the header of a page declares before it looks at the page, and ends the
process for some faults of the metadata. So both are read and checked here first (parquet-format,
"FileMetaData" and "PageHeader"). They are Thrift structures in the compact protocol, of which
`read_struct` reads any bytes safely.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "Column",
    "Fields",
    "Footer",
    "Group",
    "Pages",
    "Value",
    "measure",
    "read_footer",
    "read_struct",
]

_MAGIC: Final = b"PAR1"
_TRAILER: Final = 8
_MAX_HEADER_BYTES: Final = 1 << 16
_MAX_LEAVES: Final = 1000
_BYTE_ARRAY: Final = 6
_MAX_TYPE: Final = 7
_NUM_VALUES: Final = 1
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS: Final = (4, 5, 6)
_BOOLEANS: Final = (_TRUE, _FALSE)
_MAX_DEPTH: Final = 8


@dataclass(frozen=True, slots=True)
class Column:
    """A column in one group of rows."""

    path: str
    """Names from the outermost structure on, joined by dots."""
    is_bytes: bool
    """Whether its values are bytes or text."""
    start: int
    stop: int
    """Its bytes in the file, half-open."""
    bounds: tuple[bytes, bytes] | None
    """The smallest and the greatest value, as stored, if the writer stored them."""


@dataclass(frozen=True, slots=True)
class Group:
    """A group of rows."""

    num_rows: int
    columns: Sequence[Column]


@dataclass(frozen=True, slots=True)
class Footer:
    """The metadata of a file."""

    num_rows: int
    groups: Sequence[Group]


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of a column in one group of rows."""

    size_bytes: int
    """Decompressed."""
    num_values: int
    """Nulls included."""


def read_footer(tail: memoryview, size_bytes: int, name: str) -> Footer:
    """Read the metadata at the end of a file.

    Args:
        tail: the end of the file.
        size_bytes: the size of the file.
        name: how messages call it.

    Raises:
        FormatError: it is damaged, or not in ``tail``.
    """
    length = int.from_bytes(tail[-_TRAILER:-4], "little")
    if bytes(tail[-4:]) != _MAGIC or not 0 < length <= len(tail) - _TRAILER:
        raise FormatError(f"A {name} is no Parquet file, or is truncated.")
    metadata, _ = read_struct(tail[-_TRAILER - length : -_TRAILER])
    # Elements of the schema without children, behind the root. Each group of rows must have a
    # column for each.
    leaves = sum(_Part(it).get(5) is None for it in _Part(metadata).items(2)[1:])
    if not 0 < leaves <= _MAX_LEAVES:
        raise FormatError(f"A {name} has {leaves} columns.")
    groups = [_group(_Part(it), leaves, size_bytes, name) for it in _Part(metadata).items(4)]
    num_rows = _Part(metadata).number(3)
    if sum(it.num_rows for it in groups) != num_rows:
        raise FormatError(f"A {name} claims to have {num_rows} rows, and its groups have others.")
    return Footer(num_rows, groups)


class _Part:
    """A structure whose members must be of certain kinds."""

    def __init__(self, fields: Value | None) -> None:
        if not isinstance(fields, dict):
            raise _damaged()
        self._fields: Fields = fields

    def get(self, key: int) -> Value | None:
        return self._fields.get(key)

    def number(self, key: int) -> int:
        value = self._fields.get(key)
        if isinstance(value, int) and value >= 0:
            return value
        raise _damaged()

    def items(self, key: int) -> list[Any]:
        value = self._fields.get(key)
        if isinstance(value, list):
            return value
        raise _damaged()


def _damaged() -> FormatError:
    return FormatError("A Parquet file has metadata or a header that cannot be read.")


def _group(part: _Part, leaves: int, size_bytes: int, name: str) -> Group:
    num_rows = part.number(3)
    columns = [_column(_Part(it), size_bytes, name, num_rows) for it in part.items(1)]
    if len(columns) != leaves:
        raise FormatError(f"A {name} has a group of {len(columns)} of {leaves} columns.")
    return Group(num_rows, columns)


def _column(chunk: _Part, size_bytes: int, name: str, num_rows: int) -> Column:
    # Never written here, and the bytes of a repository must not name other files to read.
    if chunk.get(1) is not None or chunk.get(8) is not None or chunk.get(9) is not None:
        raise FormatError(f"A {name} has columns that are encrypted, or in another file.")
    it = _Part(chunk.get(3))
    kind = it.number(1)
    if it.get(2) is None or any(it.get(key) is None for key in (4, 5, 6)):
        raise _damaged()  # pyarrow needs them to be there
    # The dictionary, where there is one, comes before the pages of data.
    start, first = it.number(9), it.get(11)
    if isinstance(first, int) and 0 < first < start:
        start = first
    stop = start + it.number(7)
    is_inside = 0 < start <= stop <= size_bytes or not num_rows
    if kind > _MAX_TYPE or not is_inside:
        raise FormatError(f"A {name} has a column outside of itself.")
    try:
        path = b".".join(it.items(3)).decode()
    except (TypeError, UnicodeDecodeError):
        raise _damaged() from None
    return Column(path, kind == _BYTE_ARRAY, start, stop, _bounds(it.get(12)))


def _bounds(statistics: Value | None) -> tuple[bytes, bytes] | None:
    if not isinstance(statistics, dict):
        return None
    least, most = statistics.get(6), statistics.get(5)  # not the old ones, whose order is unclear
    return (least, most) if isinstance(least, bytes) and isinstance(most, bytes) else None


_UNCOMPRESSED, _COMPRESSED = 2, 3

_DATA, _DICTIONARY, _DATA_V2 = 5, 7, 8


def measure(data: memoryview) -> Pages:
    """Return the sizes that the headers of consecutive pages declare.

    Raises:
        FormatError: a header is damaged, or the pages do not fill ``data``.

    Cost: some microseconds a page.
    """
    position = size_bytes = num_values = 0
    while position < len(data):
        fields, length = read_struct(data[position : position + _MAX_HEADER_BYTES])
        header = _Part(fields)
        packed, unpacked = header.number(_COMPRESSED), header.number(_UNCOMPRESSED)
        size_bytes += unpacked
        for kind in (_DATA, _DATA_V2, _DICTIONARY):
            if header.get(kind) is not None:
                count = _Part(header.get(kind)).number(_NUM_VALUES)
                num_values += 0 if kind == _DICTIONARY else count
        position += length + packed
    if position != len(data):
        raise _damaged()
    return Pages(size_bytes, num_values)


type Value = int | bytes | Sequence[Value] | Fields
type Fields = Mapping[int, Value]
"""The members of a structure, by number."""


def read_struct(data: memoryview) -> tuple[Fields, int]:
    """Return the structure that some bytes begin with, and how many they are.

    Numbers are integers, texts bytes; maps and floating-point numbers are left out.

    Raises:
        FormatError: they begin with none.

    Cost: time and memory in proportion to the bytes.
    """
    reader = _ThriftReader(data)
    try:
        return reader.struct(0), reader.at
    except IndexError:
        raise _unreadable() from None


def _unreadable() -> FormatError:
    return FormatError("A Parquet file has a header that cannot be read.")


class _ThriftReader:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    def struct(self, depth: int) -> Fields:
        if depth > _MAX_DEPTH:
            raise _unreadable()
        fields: dict[int, Value] = {}
        key = 0
        # A byte of zeros ends a structure. Each field takes one byte at least, so the loop ends
        # with the data.
        while head := self._byte():
            # The high half is how far this key is from the last one; 0 says that the key follows in
            # full.
            key = key + (head >> 4) if head >> 4 else self._signed()
            kind = head & 15
            if kind in _BOOLEANS:  # as members they are in the kind
                fields[key] = int(kind == _TRUE)
                continue
            value = self._value(kind, depth)
            if value is not None:
                fields[key] = value
        return fields

    def _value(self, kind: int, depth: int) -> Value | None:
        if kind in _INTEGERS:
            return self._signed()
        if kind == _BINARY:
            return self._bytes(self._unsigned())
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in _BOOLEANS or kind == _BYTE:
            return self._byte()
        if kind in {_LIST, _SET}:
            return self._list(depth)
        if kind == _DOUBLE:
            self._bytes(8)
        elif kind == _MAP:
            self._map(depth)
        else:
            raise _unreadable()
        return None

    def _list(self, depth: int) -> list[Value]:
        head = self._byte()
        # Up to 14 items are counted in the same byte.
        count = head >> 4 if head >> 4 < 15 else self._unsigned()
        self._check_items(count, depth)
        items = (self._value(head & 15, depth + 1) for _ in range(count))
        return [it for it in items if it is not None]

    def _map(self, depth: int) -> None:
        count = self._unsigned()
        self._check_items(count, depth)
        kinds = self._byte() if count else 0
        for _ in range(count):
            self._value(kinds >> 4, depth + 1)
            self._value(kinds & 15, depth + 1)

    def _check_items(self, count: int, depth: int) -> None:
        """Refuse more items than there are bytes: each takes at least one."""
        if depth >= _MAX_DEPTH or count > len(self._data) - self.at:
            raise _unreadable()

    def _bytes(self, count: int) -> bytes:
        self.at += count
        if self.at > len(self._data):
            raise _unreadable()
        return bytes(self._data[self.at - count : self.at])

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            # Ten bytes hold 64 bits; a longer number would grow without end.
            if shift > 63:
                raise _unreadable()

    def _signed(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)
