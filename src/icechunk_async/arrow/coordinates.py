"""Coordinates of an open group, of which the chunks that were read last stay in memory.

A scan reads cells part by part. All parts need coordinates, and mostly of the same chunk: the whole
axis often is one. Without this, each part would fetch and decode that chunk again.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import xarray
from xarray.backends import BackendArray
from xarray.core import indexing

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    type _Box = tuple[tuple[int, int], ...]

__all__ = ["KEPT_BYTES", "keep_coordinates"]

KEPT_BYTES: Final = 16 << 20
"""Values of one coordinate that are kept; where a part needs chunks of more, none are."""
_ASSUMED_BYTES: Final = 128
"""Of a text of any length, with the object that holds it."""


def keep_coordinates(dataset: xarray.Dataset) -> xarray.Dataset:
    """Return a lazy dataset whose coordinates keep the chunks that were read last.

    The dataset must be of one snapshot. Memory: up to 16 MiB for each coordinate, for which a text
    of any length is taken for 128 bytes.
    """
    kept: dict[Any, xarray.Variable] = {}
    for name in dataset.coords:
        variable = dataset.variables[name]
        lazy = indexing.LazilyIndexedArray(_Kept(variable))
        kept[name] = xarray.Variable(variable.dims, lazy, variable.attrs, variable.encoding)
    dataset.coords.update(xarray.Coordinates(kept, indexes={}))
    return dataset


class _Kept(BackendArray):
    """The decoded values of a coordinate."""

    def __init__(self, variable: xarray.Variable) -> None:
        self.shape = variable.shape
        self.dtype = cast("Any", variable).dtype
        self._variable = variable
        self._last: tuple[_Box, npt.NDArray[Any]] | None = None

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self._read
        )

    def _read(self, key: tuple[int | slice[Any, Any, Any], ...]) -> npt.NDArray[Any]:
        wanted: list[tuple[int, int]] = []
        for it, length in zip(key, self.shape, strict=True):
            start, stop, step = (
                it.indices(length) if isinstance(it, slice) else (int(it), int(it) + 1, 1)
            )
            # A reversed or thinned part is rare, and would need more than it returns.
            if step != 1:
                return self._variable[key].to_numpy()
            wanted.append((start, stop))
        last = self._last  # once: other threads may replace it
        if last is None or not _holds(last[0], wanted):
            last = self._load(tuple(wanted))
        box, values = last
        return values[
            tuple(
                slice(start - first, stop - first) if isinstance(it, slice) else start - first
                for it, (start, stop), (first, _) in zip(key, wanted, box, strict=True)
            )
        ]

    def _load(self, wanted: _Box) -> tuple[_Box, npt.NDArray[Any]]:
        """Read values, with the rest of their chunks if these can be kept."""
        box = self._whole_chunks(wanted)
        dtype: np.dtype[Any] = np.dtype(self.dtype)
        width = _ASSUMED_BYTES if dtype.kind in ("O", "T") else dtype.itemsize
        if width * prod(stop - start for start, stop in box) > KEPT_BYTES:
            return wanted, self._variable[_slices(wanted)].to_numpy()
        values = self._variable[_slices(box)].to_numpy()
        values.flags.writeable = False  # of all who are given a part of them
        # One assignment of a pair: a thread that reads it meanwhile sees the old box with its
        # values, or the new one with its own.
        self._last = box, values
        return box, values

    def _whole_chunks(self, wanted: _Box) -> _Box:
        encoding = self._variable.encoding
        chunks: Sequence[Any] = encoding.get("shards") or encoding.get("chunks") or self.shape
        return tuple(
            # Irregular grids list the size of every chunk.
            (start - start % size, min(-(-stop // size) * size, length))
            if isinstance(size, int) and size > 0
            else (start, stop)
            for (start, stop), size, length in zip(wanted, chunks, self.shape, strict=True)
        )


def _slices(box: _Box) -> tuple[slice[Any, Any, Any], ...]:
    return tuple(slice(*span) for span in box)


def _holds(box: _Box, wanted: Sequence[tuple[int, int]]) -> bool:
    return all(
        first <= start and stop <= last
        for (first, last), (start, stop) in zip(box, wanted, strict=True)
    )
