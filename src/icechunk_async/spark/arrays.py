"""Arrays of a store or session, as the parts of this package open them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import zarr

if TYPE_CHECKING:
    from icechunk_async.repository.workspace import Workspace
    from icechunk_async.sync import Session
    from icechunk_async.sync.store import IcechunkStore

__all__ = ["open_array", "workspace_of"]


def open_array(store: IcechunkStore, path: str, *, write: bool = False) -> zarr.Array[Any]:
    """Open an array that is there.

    Args:
        store: of a session.
        path: of the array.
        write: it may be changed.

    Raises:
        FileNotFoundError: there is none.
    """
    opening = cast("Any", zarr.open_array)  # pyright: ignore[reportUnknownMemberType]
    array: zarr.Array[Any] = opening(store, path=path, mode="r+" if write else "r", zarr_format=3)
    return array


def workspace_of(session: Session) -> Workspace:
    """Answer what a session knows of its nodes and references; blocks where it must be opened."""
    handle = session._session  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    return handle.now().workspace
