"""A second reader of FlatBuffers, one table at a time and without mercy for misalignment.

It shares no code with the library, so that a test of bytes written does not trust the reader
that goes with the writer.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = ["Table", "root"]

_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}


@dataclass(frozen=True)
class Table:
    """One table of a buffer; absent fields are None."""

    data: bytes
    position: int

    @property
    def slots(self) -> set[int]:
        """The numbers of the fields that are present."""
        # a vtable of 10 bytes: two words of sizes, and three slots
        return {slot for slot in range(_u16(self.data, self.vtable) // 2 - 2) if self.at(slot)}

    @property
    def vtable(self) -> int:
        """Where the vtable begins."""
        assert self.position % 4 == 0
        distance: int = struct.unpack_from("<i", self.data, self.position)[0]
        return self.position - distance

    def at(self, slot: int) -> int | None:
        """Where a field begins."""
        vtable = self.vtable
        assert vtable % 2 == 0
        if 4 + 2 * slot >= _u16(self.data, vtable):
            return None
        distance = _u16(self.data, vtable + 4 + 2 * slot)
        # Within the table's own bytes, whose number is the vtable's second word.
        assert distance < _u16(self.data, vtable + 2)
        return self.position + distance if distance else None

    def number(self, slot: int, width: int, *, signed: bool = False) -> int | None:
        """Read an aligned number of ``width`` bytes."""
        at = self.at(slot)
        if at is None:
            return None
        assert at % width == 0
        code = _CODES[width].lower() if signed else _CODES[width]
        number: int = struct.unpack_from("<" + code, self.data, at)[0]
        return number

    def raw(self, slot: int, size: int) -> bytes | None:
        """Read an inline struct without alignment."""
        at = self.at(slot)
        return None if at is None else self.data[at : at + size]

    def table(self, slot: int) -> Table:
        """Follow a field to a table."""
        at = self.at(slot)
        assert at is not None
        return Table(self.data, self._follow(at))

    def tables(self, slot: int) -> list[Table]:
        """Follow a field to a vector of tables."""
        return [Table(self.data, target) for target in self._targets(slot)]

    def strings(self, slot: int) -> list[str]:
        """Follow a field to a vector of strings."""
        return [self._string(target) for target in self._targets(slot)]

    def string(self, slot: int) -> str | None:
        """Read a string, which ends with NUL."""
        at = self.at(slot)
        return None if at is None else self._string(self._follow(at))

    def structs(self, slot: int, size: int, align: int) -> list[bytes] | None:
        """Read a vector of structs, numbers or bytes."""
        at = self.at(slot)
        if at is None:
            return None
        vector = self._follow(at)
        count = _u32(self.data, vector)
        assert count == 0 or (vector + 4) % align == 0
        assert vector + 4 + size * count <= len(self.data)
        return [self.data[vector + 4 + size * n :][:size] for n in range(count)]

    def blob(self, slot: int) -> bytes | None:
        """Read a vector of bytes."""
        items = self.structs(slot, 1, 1)
        return None if items is None else b"".join(items)

    def words(self, slot: int) -> list[int]:
        """Read a vector of 32-bit words."""
        items = self.structs(slot, 4, 4)
        assert items is not None
        return [int.from_bytes(item, "little") for item in items]

    def _targets(self, slot: int) -> list[int]:
        at = self.at(slot)
        assert at is not None
        vector = self._follow(at)
        places = range(vector + 4, vector + 4 + 4 * _u32(self.data, vector), 4)
        return [self._follow(place) for place in places]

    def _follow(self, at: int) -> int:
        assert at % 4 == 0
        target = at + _u32(self.data, at)
        # Offsets are unsigned and lead forwards: children lie behind what refers to them.
        assert at < target < len(self.data)
        assert target % 4 == 0
        return target

    def _string(self, at: int) -> str:
        end = at + 4 + _u32(self.data, at)
        assert self.data[end] == 0
        return self.data[at + 4 : end].decode()


def root(data: bytes | memoryview) -> Table:
    """Return the root table of a buffer with the identifier of the format."""
    whole = bytes(data)
    assert whole[4:8] == b"Ichk"
    return Table(whole, _u32(whole, 0))


def _u16(data: bytes, at: int) -> int:
    word: int = struct.unpack_from("<H", data, at)[0]
    return word


def _u32(data: bytes, at: int) -> int:
    word: int = struct.unpack_from("<I", data, at)[0]
    return word
