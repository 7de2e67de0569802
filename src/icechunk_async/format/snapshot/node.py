"""One node of a snapshot: its values, and the kinds of nodes that a file has."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.reading import Tables
    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest.chunk import Extents

__all__ = [
    "ARRAY",
    "GROUP",
    "ArrayData",
    "Dimension",
    "ManifestRef",
    "Node",
    "kinds_of",
    "no_length",
    "unknown_kind",
]

ARRAY: Final = 1
GROUP: Final = 2


@dataclass(frozen=True, slots=True)
class Dimension:
    """One axis of an array."""

    array_length: int
    """Elements along the axis."""
    num_chunks: int
    """Chunks along the axis."""


@dataclass(frozen=True, slots=True)
class ManifestRef:
    """A manifest that holds references of an array, and the box of the grid they lie in.

    The box of a 0-dimensional array is empty and holds its one chunk.
    """

    manifest_id: ManifestId
    extents: Extents


@dataclass(frozen=True, slots=True)
class ArrayData:
    """The data of an array in a snapshot besides its metadata document."""

    dimensions: tuple[Dimension, ...]
    dimension_names: tuple[str | None, ...] | None = None
    manifests: tuple[ManifestRef, ...] = ()

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        return tuple(dimension.num_chunks for dimension in self.dimensions)


@dataclass(frozen=True, slots=True)
class Node:
    """One array or group."""

    id: NodeId
    path: str
    """Absolute, ``/`` for the root."""
    user_data: bytes = field(repr=False)
    """The metadata document (``zarr.json``), byte for byte as Zarr gave it."""
    array: ArrayData | None = None
    """None for a group."""


def kinds_of(tables: Tables) -> npt.NDArray[np.uint8]:
    """Return whether each node is an `ARRAY` or a `GROUP`.

    Raises:
        FormatError: one is neither.
    """
    kinds = tables.scalar(3, 1)
    if np.any((kinds != ARRAY) & (kinds != GROUP)):
        raise unknown_kind()
    return kinds


def unknown_kind() -> FormatError:
    """Return the error for a node of another kind."""
    return FormatError("A snapshot has a node that is neither an array nor a group.")


def no_length() -> FormatError:
    """Return the error for chunks that have no length along an axis."""
    return FormatError("A snapshot has an array with chunks of length 0.")
