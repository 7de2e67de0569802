"""Read many FlexBuffers at once: short texts and whole numbers by columns, others one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.format.flatbuffers.reading import Vectors
from icechunk_async.format.json.flexbuffers import Type, decode_flexbuffer

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.format.json.values import JSON

    type _Mask = npt.NDArray[np.bool_]

__all__ = ["decode_flexbuffers"]

_FEWEST: Final = 32
"""Fewer are read one by one in less time."""
_TEXT_BYTES: Final = 5
"""A short text's size, NUL, offset, type and width take a byte each."""


def decode_flexbuffers(values: Vectors) -> list[JSON]:
    """Read values from the bytes of each row, which need not be trusted.

    Raises:
        FormatError: as `decode_flexbuffer` for one of them.

    Cost: what is a text of at most 250 bytes or a whole number takes a few steps for all rows.
    """
    # Rows of fewer than 3 bytes are damaged: they go one by one, where the error is raised.
    if len(values) < _FEWEST or int(values.counts.min()) < 3:
        return [decode_flexbuffer(raw) for raw in values.bytes()]
    data, starts, sizes = values.buffer.u8, values.starts, values.counts
    values.buffer.check_unfolded(int(sizes.sum()))
    values.buffer.require(starts, sizes)
    ends = starts + sizes
    kinds, widths = data[ends - 2], data[ends - 1]
    # Each row once: as a text, as a number, or by the reader that knows everything.
    found = np.empty(len(values), object)
    texts = _are_short_texts(data, starts, sizes)
    if texts.any():
        letters = Vectors(values.buffer, starts[texts] + 1, sizes[texts] - _TEXT_BYTES, 1)
        found[texts] = letters.decode()
    left = ~texts
    for width in (1, 2, 4, 8):
        for kind, sign in ((Type.INT, "i"), (Type.UINT, "u")):
            # A number, its type and its width, and nothing else: any other layout of it is legal,
            # too, and left to the reader.
            some = left & (sizes == width + 2) & (widths == width) & (kinds >> 2 == kind)
            if some.any():
                rows = values.buffer.rows(starts[some], width)
                numbers: Any = np.ascontiguousarray(rows).view(f"<{sign}{width}")
                found[some] = numbers[:, 0].tolist()
                left &= ~some
    others = np.flatnonzero(left)
    if len(others):
        each = values.select(others).bytes()
        for row, raw in zip(others.tolist(), each, strict=True):
            found[row] = decode_flexbuffer(raw)
    decoded: list[JSON] = found.tolist()
    return decoded


def _are_short_texts(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
) -> _Mask:
    """Return which rows are a text, its size a byte before it and nothing beside them."""
    ends = starts + sizes
    kinds, widths = data[ends - 2], data[ends - 1]
    likely: _Mask = (
        (widths == 1) & (kinds == Type.STRING << 2) & (sizes >= _TEXT_BYTES) & (sizes < 256)
    )
    at = np.flatnonzero(likely)
    lengths = sizes[at] - _TEXT_BYTES
    # Size, text, NUL, offset back to the text, type, width: `02 c3 a9 00 03 14 01` is "é".
    likely[at] = (data[starts[at]] == lengths) & (data[ends[at] - 3] == lengths + 1)
    return likely
