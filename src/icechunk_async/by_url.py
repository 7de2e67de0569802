"""Open what a URL names: a repository, a ref in it and a node."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from zarr.storage import StorePath

from icechunk_async.repository import Repository
from icechunk_async.urls import IcechunkURL

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from icechunk_async.engine.virtual.chunks import VirtualAccess
    from icechunk_async.format.config import RepositoryConfig

__all__ = ["open_url"]


@asynccontextmanager
async def open_url(
    url: str,
    *,
    writable: bool = False,
    config: RepositoryConfig | None = None,
    authorize_virtual_chunk_access: Mapping[str, VirtualAccess] | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> AsyncGenerator[StorePath]:
    """Open what a URL such as ``s3://bucket/repo/|icechunk:@branch.main/group`` names, for a block.

    Zarr takes it where it takes a store::

        async with open_url("s3://bucket/repo/|icechunk:@tag.v1/surface") as place:
            group = await zarr.api.asynchronous.open_group(place, mode="r")

    Its ``store`` is that of a session, at the snapshot that the ref names now; ``store.session``
    commits. `icechunk_async.sync.urls.open_url` does the same for code that blocks.

    Args:
        url: see `icechunk_async.urls`; a plain path or URL of a repository is the root of ``main``.
        writable: begin a session that writes, on the branch.
        config: see `Repository.open`.
        authorize_virtual_chunk_access: see `Repository.open`.
        storage_options: the backend's options, credentials among them.

    Raises:
        InvalidURLError: the URL cannot be understood.
        InvalidInputError: a session that writes was asked for, and the URL names no branch.
        RepositoryNotFoundError: there is no repository.
        BranchNotFoundError, TagNotFoundError, SnapshotNotFoundError: there is no such ref.

    Cancellation: nothing stays open.

    Cost: that of opening the repository, and of the session. Whether the node exists is not asked.
    """
    parsed = IcechunkURL.parse(url)
    # Refused before anything is opened: a URL with a tag cannot be written, whatever is there.
    written = parsed.written_branch() if writable else None
    async with Repository.open(
        parsed.location,
        config=config,
        authorize_virtual_chunk_access=authorize_virtual_chunk_access,
        storage_options=storage_options,
    ) as repository:
        if written is not None:
            session = await repository.writable_session(written)
        else:
            session = await repository.readonly_session(
                parsed.read_branch,
                tag=parsed.tag,
                snapshot_id=parsed.snapshot_id,
                as_of=parsed.as_of,
            )
        yield StorePath(session.store, parsed.group)
