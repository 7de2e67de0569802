"""What the packages of this library that build on the facade may reach of its objects.

Spark's jobs and xarray's writers need the native repository or session behind a blocking one. They
ask here, so that the facade can change its insides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from icechunk_async.sync.handles import RepositoryHandle
    from icechunk_async.sync.repository import Repository
    from icechunk_async.sync.session import Session
    from icechunk_async.sync.session_handles import SessionHandle

__all__ = ["repository_handle", "session_handle"]


def repository_handle(repository: Repository) -> RepositoryHandle:
    """Return the handle that a repository shares with all that was made from it."""
    return repository._repository  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def session_handle(session: Session) -> SessionHandle:
    """Return the handle that a session, or a fork, shares with its stores."""
    return session._session  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
