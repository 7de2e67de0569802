"""Repositories for code that blocks."""

from __future__ import annotations

import weakref
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self

from icechunk_async.repository.repository import Repository as AsyncRepository
from icechunk_async.sync.portal import iterate, run, run_later
from icechunk_async.sync.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime
    from types import TracebackType

    from icechunk_async.format.config import RepositoryConfig
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.metadata import JSON
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.updates import Update
    from icechunk_async.repository.diff import Diff
    from icechunk_async.repository.opened import Location
    from icechunk_async.repository.virtual import VirtualAccess
    from icechunk_async.storage import Storage
    from icechunk_async.storage.cache import CacheOptions, CacheStatistics

__all__ = ["Repository"]


class Repository:
    """A versioned Zarr hierarchy in a storage; every method blocks until it is done.

    What it opened is closed by :meth:`close`, at the end of a ``with`` block, or when nothing
    refers to it any more. Arguments, results and errors are those of
    :class:`icechunk_async.Repository`.
    """

    def __init__(self, repository: AsyncRepository, stack: AsyncExitStack) -> None:
        """Use :meth:`create`, :meth:`open` or :meth:`open_or_create`."""
        self._repository = repository
        self._stack = stack
        self._forgotten = weakref.finalize(self, _close_later, stack)

    @classmethod
    def _enter(cls, manager: AbstractAsyncContextManager[AsyncRepository]) -> Self:
        stack = AsyncExitStack()
        return cls(run(stack.enter_async_context(manager)), stack)

    @classmethod
    def create(
        cls,
        location: Location,
        *,
        spec_version: int = 2,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Mapping[str, VirtualAccess] | None = None,
        storage_options: Mapping[str, object] | None = None,
        cache: CacheOptions | None = None,
        check_clean_root: bool = True,
        probe: bool | None = None,
    ) -> Self:
        """Create a repository and open it."""
        return cls._enter(
            AsyncRepository.create(
                location,
                spec_version=spec_version,
                config=config,
                authorize_virtual_chunk_access=authorize_virtual_chunk_access,
                storage_options=storage_options,
                cache=cache,
                check_clean_root=check_clean_root,
                probe=probe,
            )
        )

    @classmethod
    def open(
        cls,
        location: Location,
        *,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Mapping[str, VirtualAccess] | None = None,
        storage_options: Mapping[str, object] | None = None,
        cache: CacheOptions | None = None,
    ) -> Self:
        """Open a repository; its format version is found out."""
        return cls._enter(
            AsyncRepository.open(
                location,
                config=config,
                authorize_virtual_chunk_access=authorize_virtual_chunk_access,
                storage_options=storage_options,
                cache=cache,
            )
        )

    @classmethod
    def open_or_create(
        cls,
        location: Location,
        *,
        spec_version: int = 2,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Mapping[str, VirtualAccess] | None = None,
        storage_options: Mapping[str, object] | None = None,
        cache: CacheOptions | None = None,
        check_clean_root: bool = True,
        probe: bool | None = None,
    ) -> Self:
        """Open the repository at a location, or create one if there is none."""
        return cls._enter(
            AsyncRepository.open_or_create(
                location,
                spec_version=spec_version,
                config=config,
                authorize_virtual_chunk_access=authorize_virtual_chunk_access,
                storage_options=storage_options,
                cache=cache,
                check_clean_root=check_clean_root,
                probe=probe,
            )
        )

    @staticmethod
    def exists(location: Location, *, storage_options: Mapping[str, object] | None = None) -> bool:
        """Tell whether a location holds a repository."""
        return run(AsyncRepository.exists(location, storage_options=storage_options))

    @staticmethod
    def fetch_spec_version(
        location: Location, *, storage_options: Mapping[str, object] | None = None
    ) -> int:
        """Answer the format version of the repository at a location; 0 if there is none."""
        return run(AsyncRepository.fetch_spec_version(location, storage_options=storage_options))

    def close(self) -> None:
        """Close what was opened; sessions and stores cannot be used afterwards."""
        if self._forgotten.detach() is not None:
            run(self._stack.aclose())

    def __enter__(self) -> Self:
        """Answer the repository; it closes with the block."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close what was opened."""
        self.close()

    def __repr__(self) -> str:
        """Show where it is."""
        return repr(self._repository)

    @property
    def storage(self) -> Storage:
        """The repository's (asynchronous) storage."""
        return self._repository.storage

    @property
    def cache_statistics(self) -> CacheStatistics | None:
        """What the cache has done so far; None where none was asked for."""
        return self._repository.cache_statistics

    @property
    def spec_version(self) -> int:
        """The format version that new files are written to."""
        return self._repository.spec_version

    @property
    def config(self) -> RepositoryConfig:
        """The configuration in force."""
        return self._repository.config

    @property
    def authorized_virtual_prefixes(self) -> frozenset[str]:
        """URL prefixes of the virtual chunk containers that this handle may read."""
        return self._repository.authorized_virtual_prefixes

    @property
    def default_commit_metadata(self) -> dict[str, JSON]:
        """Properties that every commit of this handle gets; a commit's own come on top."""
        return self._repository.default_commit_metadata

    def save_config(self) -> None:
        """Store the configuration in force."""
        run(self._repository.save_config())

    def branches(self) -> Mapping[str, SnapshotId]:
        """Answer every branch and its tip."""
        return run(self._repository.branches())

    def tags(self) -> Mapping[str, SnapshotId]:
        """Answer every tag and its snapshot."""
        return run(self._repository.tags())

    def list_branches(self) -> set[str]:
        """Answer the names of all branches."""
        return run(self._repository.list_branches())

    def lookup_branch(self, name: str) -> SnapshotId:
        """Answer the tip of a branch."""
        return run(self._repository.lookup_branch(name))

    def create_branch(self, name: str, snapshot_id: SnapshotId | str) -> None:
        """Create a branch whose tip is a snapshot."""
        run(self._repository.create_branch(name, snapshot_id))

    def reset_branch(
        self,
        name: str,
        snapshot_id: SnapshotId | str,
        *,
        from_snapshot_id: SnapshotId | str | None = None,
    ) -> None:
        """Move a branch to any snapshot."""
        run(self._repository.reset_branch(name, snapshot_id, from_snapshot_id=from_snapshot_id))

    def delete_branch(self, name: str) -> None:
        """Delete a branch."""
        run(self._repository.delete_branch(name))

    def list_tags(self) -> set[str]:
        """Answer the names of all tags."""
        return run(self._repository.list_tags())

    def lookup_tag(self, name: str) -> SnapshotId:
        """Answer the snapshot of a tag."""
        return run(self._repository.lookup_tag(name))

    def create_tag(self, name: str, snapshot_id: SnapshotId | str) -> None:
        """Give a snapshot a name for good."""
        run(self._repository.create_tag(name, snapshot_id))

    def delete_tag(self, name: str) -> None:
        """Delete a tag; its name is never used again."""
        run(self._repository.delete_tag(name))

    def lookup_snapshot(self, snapshot_id: SnapshotId | str) -> SnapshotInfo:
        """Answer when and why a snapshot was made, and its parent."""
        return run(self._repository.lookup_snapshot(snapshot_id))

    def ancestry(
        self,
        *,
        branch: str | None = None,
        tag: str | None = None,
        snapshot_id: SnapshotId | str | None = None,
    ) -> Iterator[SnapshotInfo]:
        """Iterate over snapshots, from the one named back to the first."""
        return iterate(self._repository.ancestry(branch=branch, tag=tag, snapshot_id=snapshot_id))

    def diff(
        self,
        *,
        from_branch: str | None = None,
        from_tag: str | None = None,
        from_snapshot_id: SnapshotId | str | None = None,
        to_branch: str | None = None,
        to_tag: str | None = None,
        to_snapshot_id: SnapshotId | str | None = None,
    ) -> Diff:
        """Answer what the commits after one snapshot up to another touched."""
        return run(
            self._repository.diff(
                from_branch=from_branch,
                from_tag=from_tag,
                from_snapshot_id=from_snapshot_id,
                to_branch=to_branch,
                to_tag=to_tag,
                to_snapshot_id=to_snapshot_id,
            )
        )

    def ops_log(self) -> Iterator[Update]:
        """Iterate over what was done to the repository, newest first."""
        return iterate(self._repository.ops_log())

    def readonly_session(
        self,
        branch: str | None = None,
        *,
        tag: str | None = None,
        snapshot_id: SnapshotId | str | None = None,
        as_of: datetime | None = None,
    ) -> Session:
        """Begin a session that reads one snapshot."""
        return Session(
            run(
                self._repository.readonly_session(
                    branch, tag=tag, snapshot_id=snapshot_id, as_of=as_of
                )
            ),
            self,
        )

    def writable_session(self, branch: str) -> Session:
        """Begin a transaction on a branch."""
        return Session(run(self._repository.writable_session(branch)), self)


def _close_later(stack: AsyncExitStack) -> None:
    run_later(stack.aclose())
