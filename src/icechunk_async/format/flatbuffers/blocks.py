"""Write FlatBuffers in blocks, for files that have few tables.

A block is a table, vector or string together with all that it refers to, as one run of bytes, so
that nothing in it depends on where it goes. Blocks are multiples of 8 bytes long and lie at
multiples of 8, which aligns everything in them. `writing` makes blocks of columns.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, chain
from struct import Struct, pack
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    type Part = bytes | memoryview
    type Block = tuple[bytes, int]
    """The bytes, and the position in them that offsets to it point to."""

__all__ = [
    "HEAD",
    "IDENTIFIER",
    "REF",
    "Long",
    "Shape",
    "blob",
    "finish",
    "long_table",
    "string",
    "strings",
    "structs",
    "table",
    "vector",
]

IDENTIFIER: Final = b"Ichk"
"""The file identifier that every writer sets and no reader checks."""
REF: Final = "->"
"""In a `Shape`: a block, referred to by an offset."""
_ALIGNMENTS: Final = {"B": 1, "H": 2, "I": 4, "i": 4, "Q": 8, "8s": 1, "12s": 1, REF: 4}
_WIDTHS: Final = {**_ALIGNMENTS, "8s": 8, "12s": 12}
_COUNT: Final = Struct("<I")
HEAD: Final = Struct("<I4s")
_ZEROS: Final = tuple(bytes(count) for count in range(9))


class Shape:
    """Where the fields of a table lie: one for each slot, in their order.

    Codes are those of `struct` for numbers and for ids in the table itself, `REF` for
    a block, and nothing for a slot that is always left out.
    """

    def __init__(self, *codes: str) -> None:
        """Lay out tables with these fields."""
        self.codes = codes
        used = max((slot for slot, code in enumerate(codes, 1) if code), default=0)
        vtable_bytes = 4 + 2 * used
        self.entry = vtable_bytes + -vtable_bytes % 4
        self.refs: list[tuple[int, int]] = []
        """Which of the values are blocks, and where their offsets lie."""
        self.places: list[int] = []
        """Where the fields lie in the block, in their order."""
        form, places, end = "", [0] * used, self.entry + 4
        for slot, code in enumerate(codes):
            if not code:
                continue
            # Counted from where the block begins, not the table: only the block is known to lie at
            # a multiple of 8.
            gap = -end % _ALIGNMENTS[code]
            form += "x" * gap + ("I" if code == REF else code)
            end += gap
            if code == REF:
                self.refs.append((slot, end))
            places[slot] = end - self.entry
            self.places.append(end)
            end += _WIDTHS[code]
        self.end = end + -end % 8
        # The table's size is declared without the padding behind it.
        vtable = pack(f"<{2 + used}H", vtable_bytes, end - self.entry, *places)
        # The vtable lies before its table, so the signed distance back to it is positive.
        self.head = vtable + bytes(self.entry - vtable_bytes) + _COUNT.pack(self.entry)
        self.fields = Struct("<" + form + "x" * (self.end - end))

    @lru_cache(maxsize=256)  # noqa: B019 -- there are a few dozen shapes, all of them constants
    def without(self, absent: tuple[bool, ...]) -> Shape:
        """Return the shape of tables that leave some slots out."""
        codes = ("" if gone else it for it, gone in zip(self.codes, absent, strict=True))
        return Shape(*codes)


class Long:
    """The bytes of a block that is too large to be copied more than once, in pieces."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """Take the pieces, which follow one another."""
        self.parts = parts
        self._size = sum(map(len, parts))

    def __len__(self) -> int:
        """Count the bytes."""
        return self._size


def table(
    shape: Shape, *values: Any, join: Callable[[list[Any]], Any] = b"".join
) -> tuple[Any, int]:
    """Build a table; ``None`` leaves a slot out, and so do numbers that are 0, the default.

    ``join`` makes one object of its pieces: of bytes, unless `long_table` wants another.
    """
    # All official writers leave numbers that equal the default out, and readers take an absent one
    # for it: a `parent_offset` that is left out means the snapshot 0. An absent parent is -1 and
    # stays.
    if None in values or 0 in values:
        values = tuple([value or None for value in values])
        shape = shape.without(tuple([value is None for value in values]))
    fields = list(values)
    parts = [shape.head, b""]
    end = shape.end
    for slot, place in shape.refs:
        data, entry = values[slot]
        # An offset counts from the field that holds it. All blocks are multiples of 8 bytes, so
        # what follows the table is aligned again.
        fields[slot] = end + entry - place
        parts.append(data)
        end += len(data)
    parts[1] = shape.fields.pack(*[it for it in fields if it is not None])
    return join(parts), shape.entry


def long_table(shape: Shape, *values: Any) -> tuple[Long, int]:
    """Build a table as `table`; what it refers to may be long."""

    def join(parts: list[Part | Long]) -> Long:
        nested = (part.parts if isinstance(part, Long) else (part,) for part in parts)
        return Long(list(chain.from_iterable(nested)))

    return table(shape, *values, join=join)


def vector(items: Sequence[Block]) -> Block:
    """Build a vector of tables or strings."""
    count = len(items)
    head = 4 + 4 * count
    gap = -head % 8
    ends = accumulate((len(data) for data, _ in items), initial=head + gap)
    offsets = [
        start + entry - place
        for start, (_, entry), place in zip(ends, items, range(4, head, 4), strict=False)
    ]
    data = pack(f"<{count + 1}I{gap}x", count, *offsets)
    return b"".join([data, *[data for data, _ in items]]), 0


def string(text: str) -> Block:
    """Build a string."""
    raw = text.encode()
    # One to eight zeros: a string ends with a NUL that its count leaves out.
    return b"".join([_COUNT.pack(len(raw)), raw, _ZEROS[8 - (4 + len(raw)) % 8]]), 0


def strings(texts: Iterable[str]) -> Block:
    """Build a vector of strings."""
    return vector([string(text) for text in texts])


def blob(raw: bytes | memoryview) -> Block:
    """Build a vector of bytes."""
    return b"".join([_COUNT.pack(len(raw)), raw, _ZEROS[-(4 + len(raw)) % 8]]), 0


def structs(raw: bytes, item_bytes: int) -> Block:
    """Build a vector of inline structs or words, given as their bytes; aligned to 8 bytes."""
    # Four bytes before the count, so that items with numbers of 8 bytes begin at a multiple of 8.
    # Verifiers refuse them elsewhere.
    return b"".join([bytes(4), _COUNT.pack(len(raw) // item_bytes), raw, _ZEROS[-len(raw) % 8]]), 4


def finish(root: Block) -> bytes:
    """Return the buffer with this root table."""
    data, entry = root
    return HEAD.pack(HEAD.size + entry, IDENTIFIER) + data
