"""Bounds of Parquet files: the sizes that the headers of their pages declare.

A reader allocates what a page's header says before it looks at the page. So the headers are read
here first: Thrift structures in the compact protocol, one before each page (parquet-format,
"PageHeader").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Column", "measure"]

type _Fields = Mapping[int, int | _Fields]

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS: Final = (4, 5, 6)
_MAX_DEPTH: Final = 6
_MAX_HEADER_BYTES: Final = 1 << 16
_UNCOMPRESSED, _COMPRESSED = 2, 3
_DATA, _DICTIONARY, _DATA_V2 = 5, 7, 8
_NUM_VALUES: Final = 1


@dataclass(frozen=True, slots=True)
class Column:
    """The pages of a column in one group of rows."""

    size_bytes: int
    """Decompressed."""
    num_values: int
    """Nulls included."""


def measure(data: memoryview) -> Column:
    """Return the sizes that the headers of consecutive pages declare.

    Raises:
        FormatError: a header is damaged, or the pages do not fill ``data``.

    Cost: some microseconds a page.
    """
    position = size_bytes = num_values = 0
    while position < len(data):
        header, length = _Thrift(data[position : position + _MAX_HEADER_BYTES]).read()
        packed, unpacked = _number(header, _COMPRESSED), _number(header, _UNCOMPRESSED)
        size_bytes += unpacked
        for kind in (_DATA, _DATA_V2):
            num_values += _number(header[kind], _NUM_VALUES) if kind in header else 0
        if _DICTIONARY in header:
            _number(header[_DICTIONARY], _NUM_VALUES)
        position += length + packed
    if position != len(data):
        raise _damaged()
    return Column(size_bytes, num_values)


def _number(fields: _Fields | int, key: int) -> int:
    value = None if isinstance(fields, int) else fields.get(key)
    if isinstance(value, int) and value >= 0:
        return value
    raise _damaged()


def _damaged() -> FormatError:
    return FormatError("A Parquet file has a page whose header cannot be read.")


class _Thrift:
    """Reads one structure: its numbers and inner structures; all else is passed over."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def read(self) -> tuple[_Fields, int]:
        """Return the fields, and how many bytes they took."""
        try:
            return self._struct(0), self._at
        except IndexError:
            raise _damaged() from None

    def _struct(self, depth: int) -> _Fields:
        if depth > _MAX_DEPTH:
            raise _damaged()
        fields: dict[int, int | _Fields] = {}
        key = 0
        while head := self._byte():
            key = key + (head >> 4) if head >> 4 else self._signed()
            kind = head & 15
            value = int(kind == _TRUE) if kind in {_TRUE, _FALSE} else self._value(kind, depth)
            if value is not None:
                fields[key] = value
        return fields

    def _value(self, kind: int, depth: int) -> int | _Fields | None:
        if kind in _INTEGERS:
            return self._signed()
        if kind == _STRUCT:
            return self._struct(depth + 1)
        if kind in {_TRUE, _FALSE, _BYTE}:  # as items, booleans take a byte
            self._byte()
        elif kind == _DOUBLE:
            self._skip(8)
        elif kind == _BINARY:
            self._skip(self._unsigned())
        elif kind in {_LIST, _SET}:
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._unsigned()
            self._items(count, [head & 15], depth)
        elif kind == _MAP:
            count = self._unsigned()
            head = self._byte() if count else 0
            self._items(count, [head >> 4, head & 15], depth)
        else:
            raise _damaged()
        return None

    def _items(self, count: int, kinds: list[int], depth: int) -> None:
        if depth >= _MAX_DEPTH or count > len(self._data) - self._at:
            raise _damaged()
        for _ in range(count):
            for kind in kinds:
                self._value(kind, depth + 1)

    def _skip(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise _damaged()

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise _damaged()

    def _signed(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)
