"""Making FlatBuffers word by word, among them some that no builder would make."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Forge"]


class Forge:
    """A buffer that grows; every method answers where what it wrote begins."""

    def __init__(self) -> None:
        """Begin with a root offset that is still to be set, and the identifier."""
        self.data = bytearray(b"\0\0\0\0Ichk")

    def align(self, size: int, offset: int = 0) -> int:
        """Pad so that ``offset`` bytes from here is a multiple of ``size``."""
        self.data += bytes(-(len(self.data) + offset) % size)
        return len(self.data)

    def raw(self, raw: bytes) -> int:
        """Write bytes unchanged."""
        self.data += raw
        return len(self.data) - len(raw)

    def word(self, at: int, value: int, width: int = 4) -> None:
        """Overwrite one word; it may be negative."""
        self.data[at : at + width] = value.to_bytes(width, "little", signed=value < 0)

    def link(self, at: int, target: int) -> None:
        """Let the offset at ``at`` lead to ``target``."""
        self.word(at, (target - at) % (1 << 32))

    def vtable(self, fields: Mapping[int, int], size: int) -> int:
        """Write a vtable: distances of fields, and the size of the table."""
        slots = [fields.get(slot, 0) for slot in range(max(fields, default=-1) + 1)]
        self.align(2)
        return self.raw(_words([4 + 2 * len(slots), size, *slots], 2))

    def table(self, vtable: int, body: bytes = b"", align: int = 4) -> int:
        """Write a table: the distance to its vtable, then its fields unchanged."""
        at = self.align(align)
        self.raw(bytes(4) + body)
        self.word(at, at - vtable)
        return at

    def vector(self, items: Sequence[bytes], align: int = 4) -> int:
        """Write a vector of inline items."""
        self.align(max(align, 4), 4)
        return self.raw(_words([len(items)]) + b"".join(items))

    def string(self, text: bytes, *, nul: bool = True) -> int:
        """Write a string."""
        self.align(4)
        return self.raw(_words([len(text)]) + text + b"\0" * nul)

    def offsets(self, targets: Sequence[int]) -> int:
        """Write a vector of offsets to what was written before or will be."""
        at = self.align(4)
        self.raw(_words([len(targets)]) + bytes(4 * len(targets)))
        for row, target in enumerate(targets):
            self.link(at + 4 + 4 * row, target)
        return at

    def finish(self, root: int) -> bytes:
        """Set the root table and answer the buffer."""
        self.link(0, root)
        return bytes(self.data)


def _words(values: Iterable[int], width: int = 4) -> bytes:
    return b"".join(value.to_bytes(width, "little") for value in values)
