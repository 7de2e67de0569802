"""Thrift structures in the compact protocol, as in Parquet files; any bytes are safe to read.

The metadata of a Parquet file that need not be trusted cannot be left to pyarrow: of faults in it
some end the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Fields", "Value", "read_struct"]

type Value = int | bytes | Sequence[Value] | Fields
type Fields = Mapping[int, Value]
"""The members of a structure, by number."""

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS: Final = (4, 5, 6)
_BOOLEANS: Final = (_TRUE, _FALSE)
_MAX_DEPTH: Final = 8


def read_struct(data: memoryview) -> tuple[Fields, int]:
    """Return the structure that some bytes begin with, and how many they are.

    Numbers are integers, texts bytes; maps and floating-point numbers are left out.

    Raises:
        FormatError: they begin with none.

    Cost: time and memory in proportion to the bytes.
    """
    reader = _Reader(data)
    try:
        return reader.struct(0), reader.at
    except IndexError:
        raise _damaged() from None


def _damaged() -> FormatError:
    return FormatError("A Parquet file has a header that cannot be read.")


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    def struct(self, depth: int) -> Fields:
        if depth > _MAX_DEPTH:
            raise _damaged()
        fields: dict[int, Value] = {}
        key = 0
        while head := self._byte():
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
            raise _damaged()
        return None

    def _list(self, depth: int) -> list[Value]:
        head = self._byte()
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
            raise _damaged()

    def _bytes(self, count: int) -> bytes:
        self.at += count
        if self.at > len(self._data):
            raise _damaged()
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
            if shift > 63:
                raise _damaged()

    def _signed(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)
