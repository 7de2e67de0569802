"""Building FlatBuffers table by table, also such as no writer makes.

A thin, typed layer over the ``flatbuffers`` library: it knows the inline structs of the schema
and the rule that whatever a table refers to is written before the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import flatbuffers

from icechunk_async.format.flatbuffers.blocks import IDENTIFIER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Offset", "Scalar", "Struct", "TableBuilder"]


@dataclass(frozen=True, slots=True)
class Offset:
    """Something written earlier."""

    position: int


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number of ``width`` bytes, left out of its table when it is ``default``."""

    value: int
    width: int
    default: int = 0
    signed: bool = False


@dataclass(frozen=True, slots=True)
class Struct:
    """Bytes that lie in the table itself, without alignment: an object id."""

    raw: bytes


type Field = Offset | Scalar | Struct | None


class TableBuilder:
    """Writes one FlatBuffer, children first."""

    def __init__(self, size_hint: int = 1024) -> None:
        """Begin an empty buffer."""
        self._builder = flatbuffers.Builder(size_hint)

    def string(self, text: str) -> Offset:
        """Write a string."""
        return Offset(self._builder.CreateString(text))

    def blob(self, raw: bytes | memoryview) -> Offset:
        """Write a vector of bytes."""
        return Offset(self._builder.CreateByteVector(bytes(raw)))

    def structs(self, raw: bytes, item_size: int, align: int) -> Offset:
        """Write a vector of inline structs or words, given as their bytes."""
        builder = self._builder
        builder.StartVector(item_size, len(raw) // item_size, align)
        builder.head -= len(raw)
        builder.Bytes[builder.head : builder.head + len(raw)] = raw
        return Offset(builder.EndVector())

    def offsets(self, items: Sequence[Offset]) -> Offset:
        """Write a vector of tables or strings."""
        self._builder.StartVector(4, len(items), 4)
        # The buffer grows from its end to its beginning.
        for item in reversed(items):
            self._builder.PrependUOffsetTRelative(item.position)
        return Offset(self._builder.EndVector())

    def strings(self, texts: Iterable[str]) -> Offset:
        """Write a vector of strings."""
        return self.offsets([self.string(text) for text in texts])

    def table(self, fields: Mapping[int, Field]) -> Offset:
        """Write a table; ``fields`` maps slots to values, None leaves the slot out."""
        builder = self._builder
        builder.StartObject(max(fields, default=-1) + 1)
        for slot, field in fields.items():
            match field:
                case None:
                    pass
                case Offset(position):
                    builder.PrependUOffsetTRelativeSlot(slot, position, 0)
                case Struct(raw):
                    # Alignment 1: ids are structs of bytes.
                    builder.Prep(1, len(raw))
                    builder.head -= len(raw)
                    builder.Bytes[builder.head : builder.head + len(raw)] = raw
                    builder.PrependStructSlot(slot, builder.Offset(), 0)
                case Scalar(value, default=default) if value == default:
                    pass
                case Scalar(value, width, default, signed):
                    self._scalar(slot, value, width, default, signed=signed)
        return Offset(builder.EndObject())

    def _scalar(self, slot: int, value: int, width: int, default: int, *, signed: bool) -> None:
        builder = self._builder
        match width, signed:
            case 1, False:
                builder.PrependUint8Slot(slot, value, default)
            case 2, False:
                builder.PrependUint16Slot(slot, value, default)
            case 4, False:
                builder.PrependUint32Slot(slot, value, default)
            case 4, True:
                builder.PrependInt32Slot(slot, value, default)
            case 8, False:
                builder.PrependUint64Slot(slot, value, default)
            case _:
                raise AssertionError(f"the schema has no scalar of {width} bytes")

    def finish(self, root: Offset) -> bytes:
        """End the buffer with its root table and answer it."""
        self._builder.Finish(root.position, file_identifier=IDENTIFIER)
        return bytes(self._builder.Output())
