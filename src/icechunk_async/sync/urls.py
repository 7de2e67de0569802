"""Repositories, refs and nodes that one URL names, for code that blocks.

`open_url` gives what Zarr and xarray open; `session_at` the session behind it. The plugins that
xarray, fsspec and Zarr find are in `icechunk_async.plugins`. `icechunk_async.urls` describes the
URLs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zarr.storage import StorePath

from icechunk_async.errors import InvalidInputError
from icechunk_async.sync.errors import translated
from icechunk_async.sync.repository import Repository
from icechunk_async.urls import IcechunkURL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.sync.config import RepositoryConfig
    from icechunk_async.sync.session import Session

__all__ = ["open_url", "repository_at", "session_at", "with_ref"]


class _Node(StorePath):
    """A node of a session's hierarchy; its store says so to xarray."""

    # xarray asks what it was given, which here is a path in a store.
    supports_consolidated_metadata = False


def open_url(
    url: str,
    *,
    writable: bool = False,
    config: RepositoryConfig | None = None,
    authorize_virtual_chunk_access: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> StorePath:
    """Open the node of a URL such as ``s3://bucket/repo/|icechunk:@branch.main/group``, for Zarr.

    Zarr and xarray take it where they take a store: ``zarr.open_group(open_url(url))``,
    ``xarray.open_zarr(open_url(url))``. Its ``store`` is that of a session, at the snapshot that
    the ref names now; ``store.session`` commits. The repository is open until nothing refers to it.

    Args:
        url: see `icechunk_async.urls`; a plain path or URL of a repository is the root of ``main``.
        writable: begin a session that writes, on the branch.
        config: see `Repository.open`.
        authorize_virtual_chunk_access: see `Repository.open`.
        storage_options: the backend's options, credentials among them.

    Raises:
        InvalidURLError: the URL cannot be understood.
        InvalidInputError: a session that writes was asked for, and the URL names no branch.
        RepositoryNotFoundError, RefNotFoundError, SnapshotNotFoundError: there is no such thing.

    Cost: that of opening the repository, and of the session. Whether the node exists is not asked.
    """
    with translated():
        parsed = IcechunkURL.parse(url)
        written = parsed.written_branch() if writable else None
    repository = repository_at(parsed, config, authorize_virtual_chunk_access, storage_options)
    if written is not None:
        session = repository.writable_session(written)
    else:
        session = session_at(repository, parsed)
    return _Node(session.store, parsed.group)


def repository_at(
    url: IcechunkURL,
    config: RepositoryConfig | None = None,
    authorize_virtual_chunk_access: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Repository:
    """Open the repository of a URL."""
    access = authorize_virtual_chunk_access
    return Repository.open(
        url.location,
        config,
        None if access is None else dict(access),
        storage_options=storage_options,
    )


def session_at(repository: Repository, url: IcechunkURL) -> Session:
    """Begin a session that reads what the ref of a URL names now.

    Raises:
        RefNotFoundError, SnapshotNotFoundError: there is no such ref.
    """
    return repository.readonly_session(
        url.read_branch, tag=url.tag, snapshot_id=url.snapshot_id, as_of=url.as_of
    )


def with_ref(url: IcechunkURL, ref: str | None, group: str | None) -> IcechunkURL:
    """Return a URL with the group of an argument below its own; the argument ``ref`` is not put in.

    Raises:
        InvalidInputError: the URL and the argument name a ref each, or the group is no path.
    """
    with translated():
        if ref is not None and not replace(url, path="/").is_plain:
            raise InvalidInputError(
                f"{url!r} names a state of the repository, and ref={ref!r} one more. Give one."
            )
        inner = "/".join(it for it in (url.group, (group or "").strip("/")) if it)
        return replace(url, path=inner)
