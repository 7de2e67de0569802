"""What scanners of files share: data stored in one piece, fill values, attributes as JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.spark.ingest_scan import Places

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["LARGE_BYTES", "SMALL_BYTES", "along_first", "divided", "fill_value", "pieces", "plain"]

LARGE_BYTES: Final = 32 << 20
"""What is stored in one piece, and larger, is divided along its first axis,"""
SMALL_BYTES: Final = 1 << 20
"""but not into pieces smaller than this."""


def divided(
    shape: Sequence[int], names: Sequence[str], itemsize: int, concat_dim: str | None
) -> tuple[int, ...]:
    """Answer a shape of chunks for an array that is stored in one piece.

    Args:
        shape: of the array.
        names: of its dimensions.
        itemsize: bytes of an element.
        concat_dim: files are concatenated along it: if it is the first one, it has steps of one.
    """
    if not shape:
        return ()
    sizes = [max(size, 1) for size in shape]
    if names[0] == concat_dim and len(sizes) > 1:
        return (1, *sizes[1:])
    row_bytes = math.prod(sizes[1:]) * itemsize
    most = max(1, min(sizes[0], LARGE_BYTES // row_bytes))
    # A chunk that reaches beyond the end of its array would be no whole one.
    rows = next(it for it in range(most, 0, -1) if sizes[0] % it == 0)
    # One large chunk is better than very many small ones.
    return (rows if rows * row_bytes >= SMALL_BYTES else sizes[0], *sizes[1:])


def pieces(offset: int, shape: Sequence[int], chunks: Sequence[int], itemsize: int) -> Places:
    """Answer where the chunks of :func:`divided` are, of an array that is not empty."""
    if not chunks:
        return Places.of_one(np.empty((1, 0)), [offset], [itemsize])
    size_bytes = math.prod(chunks) * itemsize
    numbers = np.arange(shape[0] // chunks[0])
    coords = along_first(numbers, len(chunks))
    return Places.of_one(coords, offset + numbers * size_bytes, [size_bytes] * len(numbers))


def along_first(numbers: npt.NDArray[np.integer], rank: int) -> npt.NDArray[np.uint32]:
    """Answer coordinates that differ along the first axis; ``(n, rank)``."""
    coords = np.zeros((len(numbers), rank), np.uint32)
    coords[:, 0] = numbers
    return coords


def fill_value(fill: Any, dtype: np.dtype[Any]) -> Any:
    """Answer what stands for chunks that are not there, as metadata of format 2 has it."""
    value = np.asarray(fill, dtype)[()]
    match dtype.kind:
        case "f" if not np.isfinite(value):
            return "NaN" if np.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case "c" | "S":
            return None
        case _:
            return value.item()


def plain(value: Any) -> Any:
    """Answer an attribute as JSON, None if it cannot be; one of length 1 is a scalar.

    NaN and infinite numbers mean nothing in JSON.
    """
    array = np.atleast_1d(value)
    if array.dtype.fields is not None or array.dtype.kind not in "biufSUO":
        return None
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return None
    items: list[Any] = array.tolist()
    found = [it.decode(errors="replace") if isinstance(it, bytes) else it for it in items]
    if not all(isinstance(it, (str, int, float, bool, list)) for it in found):
        return None
    return found[0] if len(found) == 1 else found
