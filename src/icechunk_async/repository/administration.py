"""Running a repository: its metadata, status, feature flags, files and manifests."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from icechunk_async import _clock
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.config import RepositoryConfig, merge
from icechunk_async.format.ids import ManifestId
from icechunk_async.format.updates import Availability as RepoAvailability
from icechunk_async.format.updates import RepoStatus as StoredStatus
from icechunk_async.repository.history import administration as edits
from icechunk_async.repository.history.administration import FeatureFlag, unsupported_by_spec_1
from icechunk_async.repository.opened import check_safe, open_parts
from icechunk_async.repository.packing import METADATA_NAME, stored_item, with_packing
from icechunk_async.repository.progress import no_progress
from icechunk_async.repository.refs import as_snapshot_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.metadata import JSON
    from icechunk_async.format.repo_info import RepoInfo
    from icechunk_async.format.snapshot import ManifestFileInfo
    from icechunk_async.format.updates import UpdateDetail
    from icechunk_async.repository.opened import Opened, Request
    from icechunk_async.repository.packing import Packing
    from icechunk_async.repository.progress import ProgressCallback
    from icechunk_async.repository.virtual import VirtualAccess

__all__ = ["AdministrationOperations", "FeatureFlag", "RepoAvailability", "RepoStatus"]


@dataclass(frozen=True, slots=True)
class RepoStatus:
    """Whether a repository may be changed at present; honoured by writers, not enforced."""

    availability: RepoAvailability
    set_at: datetime | None = None
    """When it was set (aware, UTC); None, where it is about to be set, stands for now."""
    limited_availability_reason: str | None = None
    """Why it may not be changed, for people."""


class AdministrationOperations:
    """What whoever runs a repository does with it; a base of the repository."""

    _opened: Opened
    _request: Request
    default_commit_metadata: dict[str, JSON]

    if TYPE_CHECKING:  # the repository's own

        def __init__(self, opened: Opened, request: Request) -> None: ...

    def reopen(
        self,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Mapping[str, VirtualAccess] | None = None,
    ) -> AbstractAsyncContextManager[Self]:
        """Open the same storage again, with another configuration or other authorisations.

        Args:
            config: laid over the configuration in force here.
            authorize_virtual_chunk_access: in place of those given here, as in :meth:`open`;
                None keeps them.

        Raises:
            RepositoryNotFoundError: the repository is gone.
            VirtualContainerError: a container was authorised that the repository lacks.
        """
        config = merge(self._opened.config, config or RepositoryConfig())
        authorized = authorize_virtual_chunk_access
        return self._reopen(
            replace(
                self._request,
                config=config,
                authorized=self._request.authorized if authorized is None else dict(authorized),
            )
        )

    @asynccontextmanager
    async def _reopen(self, request: Request) -> AsyncGenerator[Self]:
        async with open_parts(request, None, or_open=False) as opened:
            again = type(self)(opened, request)
            again.default_commit_metadata = dict(self.default_commit_metadata)
            yield again

    async def get_metadata(self) -> dict[str, JSON]:
        """Answer the repository's own metadata.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1.
        """
        return (await self._opened.history.repo_info()).metadata

    async def set_metadata(self, metadata: Mapping[str, JSON]) -> None:
        """Replace the repository's own metadata, JSON values by name.

        Raises:
            InvalidInputError: a value is not JSON; nothing changed.
            RepositoryReadOnlyError: the repository's status forbids changes.
            UnsupportedBySpecError: the repository is of format version 1.
            OutcomeUnknownError: the storage never answered.

        Cancellation: the metadata may have been replaced.
        """
        check_safe(self._opened.storage)
        await self._opened.history.change(edits.replace_metadata(metadata))

    async def update_metadata(self, metadata: Mapping[str, JSON]) -> dict[str, JSON]:
        """Lay items over the repository's own metadata, name by name; answer all of it.

        Errors and cancellation as :meth:`set_metadata`.
        """
        check_safe(self._opened.storage)
        edit = edits.merge_metadata(metadata)
        merged: dict[str, JSON] = {}

        def remembering(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
            nonlocal merged
            changed, detail = edit(info)
            merged = changed.metadata
            return changed, detail

        await self._opened.history.change(remembering)
        return merged

    @property
    def packing(self) -> Packing:
        """Which chunks share objects: as given at opening, or else as the repository says."""
        return self._opened.packing

    async def save_packing(self) -> None:
        """Store the setting in force, for everyone who opens the repository from now on.

        It is an item of the repository's metadata, ``icechunk-async``, and lost with it; the
        official engine keeps it and writes as it always does.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1, which has no place for
                it. Give ``packing`` at each opening.
            RepositoryReadOnlyError, OutcomeUnknownError: as :meth:`set_metadata`.

        Cancellation: it may have been stored.
        """
        check_safe(self._opened.storage)
        await self._opened.history.change(
            lambda info: edits.merge_metadata(
                {METADATA_NAME: with_packing(stored_item(info), self.packing)}
            )(info)
        )

    async def get_status(self) -> RepoStatus:
        """Answer whether the repository may be changed at present.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1.
        """
        stored = (await self._opened.history.repo_info()).status
        return RepoStatus(stored.availability, _clock.from_us(stored.set_at), stored.reason)

    async def set_status(self, status: RepoStatus) -> None:
        """Allow or forbid changes of the repository, for everyone.

        Writers honour it from their next change on: sessions cannot commit, refs do not move.
        Reading is always possible. It is not enforced by the storage.

        Raises:
            InvalidInputError: ``OFFLINE``, which only this library would honour.
            UnsupportedBySpecError: the repository is of format version 1.
            OutcomeUnknownError: the storage never answered.

        Cancellation: the status may have been set.
        """
        if status.availability is RepoAvailability.OFFLINE:
            raise InvalidInputError(
                "A repository cannot be set offline: the official engine would take it for "
                "online. Use RepoAvailability.READ_ONLY."
            )
        check_safe(self._opened.storage)
        set_at = _clock.now_us() if status.set_at is None else _clock.to_us(status.set_at)
        stored = StoredStatus(status.availability, set_at, status.limited_availability_reason)
        await self._opened.history.change(edits.change_status(stored), despite_status=True)

    async def feature_flags(self) -> list[FeatureFlag]:
        """Answer every feature flag: ``move_node``, ``create_tag`` and ``delete_tag``.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1.
        """
        return edits.feature_flags(await self._opened.history.repo_info())

    async def enabled_feature_flags(self) -> list[FeatureFlag]:
        """Answer the feature flags that are on."""
        return [flag for flag in await self.feature_flags() if flag.enabled]

    async def disabled_feature_flags(self) -> list[FeatureFlag]:
        """Answer the feature flags that are off."""
        return [flag for flag in await self.feature_flags() if not flag.enabled]

    async def set_feature_flag(self, name: str, setting: bool | None) -> None:  # noqa: FBT001
        """Switch a feature on (True), off (False), or back to its default (None).

        What is off is refused with ``FeatureDisabledError`` by everyone, the official engine
        included.

        Raises:
            InvalidInputError: there is no such flag.
            RepositoryReadOnlyError: the repository's status forbids changes.
            UnsupportedBySpecError: the repository is of format version 1.
            OutcomeUnknownError: the storage never answered.

        Cancellation: the flag may have been set.
        """
        if self._opened.history.spec_version == 1:
            raise unsupported_by_spec_1("feature flags")
        check_safe(self._opened.storage)
        await self._opened.history.change(edits.set_feature_flag(name, setting))

    async def list_manifest_files(self, snapshot_id: SnapshotId | str) -> list[ManifestFileInfo]:
        """Answer the manifests that a snapshot uses, by id.

        Raises:
            SnapshotNotFoundError: there is no such snapshot.

        Cost: one request unless the snapshot is cached.
        """
        snapshot = await self._opened.assets.snapshot(as_snapshot_id(snapshot_id))
        return sorted(snapshot.manifests.values(), key=lambda info: info.id)

    async def inspect_snapshot(self, snapshot_id: SnapshotId | str) -> dict[str, JSON]:
        """Answer what a snapshot file holds, for people and for debugging.

        Keys and values are those of the official engine's call of this name.

        Raises:
            SnapshotNotFoundError: there is no such snapshot.
        """
        from icechunk_async.repository import inspect  # noqa: PLC0415 -- not without need

        return await inspect.inspect_snapshot(self._opened, as_snapshot_id(snapshot_id))

    async def inspect_repo_info(self) -> dict[str, JSON]:
        """Answer what the repo info file holds; see :meth:`inspect_snapshot`.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1.
        """
        from icechunk_async.repository import inspect  # noqa: PLC0415 -- not without need

        return await inspect.inspect_repo_info(self._opened)

    async def inspect_manifest(self, manifest_id: ManifestId | str) -> dict[str, JSON]:
        """Answer how many references of which kind a manifest holds; see :meth:`inspect_snapshot`.

        Raises:
            ObjectNotFoundError: there is no such manifest.
        """
        if not isinstance(manifest_id, ManifestId):
            manifest_id = ManifestId.parse(manifest_id)
        from icechunk_async.repository import inspect  # noqa: PLC0415 -- not without need

        return await inspect.inspect_manifest(self._opened, manifest_id)

    async def inspect_transaction_log(self, snapshot_id: SnapshotId | str) -> dict[str, JSON]:
        """Answer what a commit touched, by node id; see :meth:`inspect_snapshot`.

        For a snapshot below which others expired, what those touched is joined with it.

        Raises:
            ObjectNotFoundError: there is no such log; format 1 has none for the first snapshot.
        """
        from icechunk_async.repository import inspect  # noqa: PLC0415 -- not without need

        return await inspect.inspect_transaction_log(self._opened, as_snapshot_id(snapshot_id))

    async def rewrite_manifests(
        self,
        message: str,
        *,
        branch: str,
        metadata: Mapping[str, JSON] | None = None,
        commit_method: Literal["new_commit", "amend"] = "new_commit",
        progress: ProgressCallback | None = None,
    ) -> SnapshotId:
        """Write all manifests of a branch's tip anew, split as the configuration in force says.

        Arrays and chunks stay as they are. The new snapshot records the rules of splitting in
        its property ``__icechunk``.

        Args:
            message: the commit's message.
            branch: whose tip is rewritten.
            metadata: properties of the commit.
            commit_method: make a commit on top of the tip, or put it in the tip's place.
            progress: told how many of the arrays are done.

        Raises:
            BranchNotFoundError: there is no such branch.
            ConflictError: somebody committed meanwhile; nothing was published. Try again.
            RepositoryReadOnlyError: the repository's status forbids changes.
            UnsupportedBySpecError: to amend in a repository of format version 1.
            SessionStateError: to amend the first snapshot of a repository, or one that moved nodes.
            OutcomeUnknownError: the storage never answered; look at the branch to know.

        Cancellation: the commit may have been published.

        Cost: reads and writes every manifest once, a few at a time; those few are in memory.
        """
        from icechunk_async.repository.rewrite_manifests import (  # noqa: PLC0415 -- as above
            rewrite_manifests,
        )

        return await rewrite_manifests(
            self._opened,
            message,
            branch=branch,
            metadata={**self.default_commit_metadata, **(metadata or {})},
            commit_method=commit_method,
            progress=progress or no_progress,
        )
