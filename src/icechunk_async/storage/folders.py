"""Looking into a folder of a local disk: names first, and the state of those that matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

__all__ = ["FolderListing", "ObjectStates"]


@dataclass(frozen=True, slots=True)
class ObjectStates:
    """What is known of some objects, a row each, in the order in which they were asked for."""

    present: npt.NDArray[np.bool_]
    """Whether there is such an object."""
    sizes_bytes: npt.NDArray[np.int64]
    modified_us: npt.NDArray[np.int64]
    """When each was written, in microseconds since 1970."""


@runtime_checkable
class FolderListing(Protocol):
    """Also lists one folder in no order, where asking for each object's state is what costs.

    An addition to :class:`~icechunk_async.storage.Storage`, whose listings tell the size and the
    time of every object.
    """

    async def list_names(self, folder: str) -> list[str]:
        """Answer the names of what is directly in a folder, objects or not; none without it.

        Cancellation: no effect. Memory: the names.
        """
        ...

    async def states(self, folder: str, names: Sequence[str]) -> ObjectStates:
        """Answer the states of objects directly in a folder.

        Cancellation: no effect.
        """
        ...
