"""Check that an array can have a chunk, and word the refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.errors import InvalidCoordinatesError, InvalidInputError

if TYPE_CHECKING:
    from icechunk_async.format.manifest.refs import Coordinates, Extents
    from icechunk_async.format.snapshot import ArrayData

__all__ = ["bad_rank", "covers", "in_grid", "no_bytes", "outside"]


def in_grid(coords: Coordinates, array: ArrayData) -> bool:
    """Return whether an array can have a chunk at ``coords``."""
    if len(coords) != len(array.dimensions):
        return False
    for at, dimension in zip(coords, array.dimensions, strict=True):
        if not 0 <= at < dimension.num_chunks:
            return False
    return True


def covers(extents: Extents, coords: Coordinates) -> bool:
    """Return whether a box holds ``coords``; one of another number of axes does not."""
    if len(extents) != len(coords):
        return False
    for at, (start, stop) in zip(coords, extents, strict=True):  # noqa: SIM110 -- hot
        if not start <= at < stop:
            return False
    return True


def bad_rank(path: str, found: int, rank: int) -> InvalidCoordinatesError:
    """Return the error for coordinates with another number of axes than the array."""
    return InvalidCoordinatesError(
        f"A chunk of {path!r} was named by {found} coordinates, and the array has {rank} axes.",
        path=path,
    )


def outside(
    path: str, coords: Coordinates, grid: Coordinates, *, count: int = 1
) -> InvalidCoordinatesError:
    """Return the error for ``count`` chunks outside of the grid, ``coords`` the first of them."""
    more = f" ({count} such chunks)" if count > 1 else ""
    return InvalidCoordinatesError(
        f"Chunk {coords} lies outside of the grid of {path!r}, which has {grid} chunks{more}. "
        "Nothing was stored. Resize the array first.",
        path=path,
        coords=coords,
    )


def no_bytes(path: str) -> InvalidInputError:
    """Return the error for a chunk without bytes."""
    return InvalidInputError(
        f"A chunk of {path!r} was given no bytes. Delete the chunk instead, if it should hold "
        "fill values.",
        code="zero-length-chunk",
    )
