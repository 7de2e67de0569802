"""The repository: where sessions, branches, tags and history are had from."""

from __future__ import annotations

import logging
from abc import abstractmethod
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, Self

from icechunk_async._runtime import clock, telemetry
from icechunk_async._runtime.concurrency import gather
from icechunk_async._runtime.progress import no_progress
from icechunk_async.engine.files.packs import METADATA_NAME, stored_item, with_packing
from icechunk_async.engine.files.preload import preload
from icechunk_async.engine.history import opening
from icechunk_async.engine.history.protocol import (
    Expiration,
    FeatureFlag,
    check_moves_allowed,
    check_online,
    state_for,
)
from icechunk_async.engine.open import (
    Creation,
    Origin,
    Request,
    check_safe,
    early,
    open_location,
    open_parts,
)
from icechunk_async.engine.tree.workspace import Workspace
from icechunk_async.engine.upkeep.survey import Limits
from icechunk_async.errors import InvalidInputError, SnapshotNotFoundError
from icechunk_async.format.config import RepositoryConfig, merge
from icechunk_async.format.ids import ManifestId, SnapshotId
from icechunk_async.format.operations_log import Availability as RepoAvailability
from icechunk_async.format.operations_log import RepoStatus as StoredStatus
from icechunk_async.session import Session, SessionMode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping
    from contextlib import AbstractAsyncContextManager

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.commit.conflicts import ConflictSolver
    from icechunk_async.engine.files.packs import Packing
    from icechunk_async.engine.history.diff import Diff
    from icechunk_async.engine.history.graph import AncestryGraph
    from icechunk_async.engine.open import Location, Opened
    from icechunk_async.engine.upkeep.check import ReferenceReport
    from icechunk_async.engine.upkeep.collect import GarbageReport
    from icechunk_async.engine.upkeep.compact import CompactReport
    from icechunk_async.engine.upkeep.copy import CopyReport
    from icechunk_async.engine.upkeep.statistics import ChunkStorageStats
    from icechunk_async.engine.virtual.chunks import VirtualAccess
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.operations_log import Update
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.snapshot import ManifestFileInfo, Snapshot
    from icechunk_async.storage import Storage
    from icechunk_async.storage.cache.cached import CacheOptions, CacheStatistics
    from icechunk_async.storage.policies.hedge import HedgePolicy
    from icechunk_async.zarr.store import IcechunkStore

__all__ = [
    "AdministrationOperations",
    "FeatureFlag",
    "HistoryOperations",
    "RefOperations",
    "RepoAvailability",
    "RepoStatus",
    "Repository",
    "TransactionOperations",
    "UpkeepOperations",
    "as_snapshot_id",
    "checked_cutoff",
]


def as_snapshot_id(given: SnapshotId | str) -> SnapshotId:
    """Return an id given as such or as text."""
    return given if isinstance(given, SnapshotId) else SnapshotId.parse(given)


class RefOperations:
    """What can be done to branches and tags; a base of the repository."""

    def __init__(self, opened: Opened) -> None:
        """Work on an open repository."""
        self._opened = opened

    async def branches(self) -> Mapping[str, SnapshotId]:
        """Return every branch and its tip. Cost: one request; with format 1 one a branch."""
        return dict(await self._opened.history.branches())

    async def tags(self) -> Mapping[str, SnapshotId]:
        """Return every tag and its snapshot. Cost: one request; with format 1 two a tag."""
        return dict(await self._opened.history.tags())

    async def list_branches(self) -> set[str]:
        """Return the names of all branches."""
        return set(await self._opened.history.branches())

    async def lookup_branch(self, name: str) -> SnapshotId:
        """Return the tip of a branch.

        Raises:
            BranchNotFoundError: there is no such branch.
        """
        return await self._opened.history.branch_tip(name)

    async def create_branch(self, name: str, snapshot_id: SnapshotId | str) -> None:
        """Create a branch whose tip is a snapshot.

        Raises:
            BranchExistsError, SnapshotNotFoundError, InvalidRefNameError: nothing changed.
            OutcomeUnknownError: the storage never answered.

        Cancellation: the branch may have been created.
        """
        check_safe(self._opened.storage)
        await self._opened.history.create_branch(name, as_snapshot_id(snapshot_id))

    async def reset_branch(
        self,
        name: str,
        snapshot_id: SnapshotId | str,
        *,
        from_snapshot_id: SnapshotId | str | None = None,
    ) -> None:
        """Move a branch to any snapshot.

        Args:
            name: the branch.
            snapshot_id: its new tip.
            from_snapshot_id: move it only if this is its tip now.

        Raises:
            BranchNotFoundError, SnapshotNotFoundError: nothing changed.
            ConflictError: its tip is not ``from_snapshot_id``.
            OutcomeUnknownError: the storage never answered.

        Cancellation: the branch may have been moved.
        """
        check_safe(self._opened.storage)
        expected = None if from_snapshot_id is None else as_snapshot_id(from_snapshot_id)
        await self._opened.history.reset_branch(
            name, as_snapshot_id(snapshot_id), expected=expected
        )

    async def delete_branch(self, name: str) -> None:
        """Delete a branch; its snapshots stay until they are collected.

        Raises:
            BranchNotFoundError: there is no such branch.
            InvalidRefNameError: ``main`` cannot be deleted.
        """
        check_safe(self._opened.storage)
        await self._opened.history.delete_branch(name)

    async def list_tags(self) -> set[str]:
        """Return the names of all tags; deleted ones are not among them."""
        return set(await self._opened.history.tags())

    async def lookup_tag(self, name: str) -> SnapshotId:
        """Return the snapshot of a tag.

        Raises:
            TagNotFoundError: there is no such tag, or it was deleted.
        """
        return await self._opened.history.tag_target(name)

    async def create_tag(self, name: str, snapshot_id: SnapshotId | str) -> None:
        """Give a snapshot a name for good.

        Raises:
            TagExistsError, TagDeletedError, SnapshotNotFoundError, InvalidRefNameError: nothing
                changed.
            OutcomeUnknownError: the storage never answered.

        Cancellation: the tag may have been created.
        """
        check_safe(self._opened.storage)
        await self._opened.history.create_tag(name, as_snapshot_id(snapshot_id))

    async def delete_tag(self, name: str) -> None:
        """Delete a tag; its name is never used again.

        Raises:
            TagNotFoundError: there is no such tag.
        """
        check_safe(self._opened.storage)
        await self._opened.history.delete_tag(name)


class HistoryOperations(RefOperations):
    """What can be asked about history; a base of the repository."""

    async def lookup_snapshot(self, snapshot_id: SnapshotId | str) -> SnapshotInfo:
        """Return when and why a snapshot was made, and its parent.

        Raises:
            SnapshotNotFoundError: the repository has no such snapshot.
        """
        return await self._opened.history.snapshot_info(as_snapshot_id(snapshot_id))

    async def ancestry(
        self,
        *,
        branch: str | None = None,
        tag: str | None = None,
        snapshot_id: SnapshotId | str | None = None,
    ) -> AsyncIterator[SnapshotInfo]:
        """Iterate over snapshots, from the one named back to the first.

        Exactly one of the arguments is given; ``main`` if none is.
        """
        start = await self._resolve(branch, tag, snapshot_id)
        async for info in self._opened.history.ancestry(start):
            yield info

    async def diff(
        self,
        *,
        from_branch: str | None = None,
        from_tag: str | None = None,
        from_snapshot_id: SnapshotId | str | None = None,
        to_branch: str | None = None,
        to_tag: str | None = None,
        to_snapshot_id: SnapshotId | str | None = None,
    ) -> Diff:
        """Return what the commits after one snapshot up to another touched.

        One argument names the older snapshot, one the newer.

        Raises:
            InvalidInputError: the older is not an ancestor of the newer.
        """
        from icechunk_async.engine.history.diff import diff_snapshots  # noqa: PLC0415 -- not without need

        start, end = await gather(
            self._resolve(from_branch, from_tag, from_snapshot_id, default=None),
            self._resolve(to_branch, to_tag, to_snapshot_id, default=None),
        )
        return await diff_snapshots(self._opened.history, self._opened.assets, start, end)

    async def ops_log(self) -> AsyncIterator[Update]:
        """Iterate over what was done to the repository, newest first.

        Raises:
            UnsupportedBySpecError: format version 1 keeps no such log.
        """
        async for update in state_for(self._opened.history, "operations_log").operations():
            yield update

    async def ancestry_graph(
        self,
        *,
        branch: str | None = None,
        tag: str | None = None,
        snapshot_id: SnapshotId | str | None = None,
        plain: bool = False,
    ) -> AncestryGraph:
        """Draw history: text when printed, SVG in a notebook.

        At most one of the first three is given, and its ancestry is drawn; if none is, that of
        all branches.

        Args:
            branch: draw its ancestry.
            tag: draw its ancestry.
            snapshot_id: draw its ancestry.
            plain: without colours.

        Raises:
            BranchNotFoundError, TagNotFoundError, SnapshotNotFoundError: there is none.

        Cost: as :meth:`ancestry`, for each branch down to what is known already.
        """
        from icechunk_async.engine.history.graph import (  # noqa: PLC0415 -- not without need
            AncestryGraph,
            lay_out,
        )

        history = self._opened.history
        branches, tags = await gather(history.branches(), history.tags())
        starts = list(branches.values())
        if not (branch is tag is snapshot_id is None):
            starts = [await self._resolve(branch, tag, snapshot_id)]
        infos: dict[SnapshotId, SnapshotInfo] = {}
        for start in starts:
            async for info in history.ancestry(start):
                if info.id in infos:
                    break
                infos[info.id] = info
        return AncestryGraph(lay_out(infos.values(), branches, tags), plain=plain)

    async def _resolve(
        self,
        branch: str | None,
        tag: str | None,
        snapshot_id: SnapshotId | str | None,
        *,
        default: str | None = "main",
    ) -> SnapshotId:
        given = [it for it in (branch, tag, snapshot_id) if it is not None]
        if len(given) > 1 or (not given and default is None):
            raise InvalidInputError(
                "Name one of a branch, a tag and a snapshot id"
                + (", not several." if given else ".")
            )
        if tag is not None:
            return await self._opened.history.tag_target(tag)
        if snapshot_id is not None:
            return as_snapshot_id(snapshot_id)
        return await self._opened.history.branch_tip(
            branch if branch is not None else default or ""
        )


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
        """Return the repository's own metadata.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1.
        """
        return (await state_for(self._opened.history, "metadata").info()).metadata

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
        await state_for(self._opened.history, "metadata").replace_metadata(metadata)

    async def update_metadata(self, metadata: Mapping[str, JSON]) -> dict[str, JSON]:
        """Lay items over the repository's own metadata, name by name; answer all of it.

        Errors and cancellation as :meth:`set_metadata`.
        """
        check_safe(self._opened.storage)
        return await state_for(self._opened.history, "metadata").merge_metadata(lambda _: metadata)

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
        await state_for(self._opened.history, "metadata").merge_metadata(
            lambda info: {METADATA_NAME: with_packing(stored_item(info), self.packing)}
        )

    async def get_status(self) -> RepoStatus:
        """Return whether the repository may be changed at present.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1.
        """
        stored = (await state_for(self._opened.history, "status").info()).status
        return RepoStatus(stored.availability, clock.from_us(stored.set_at), stored.reason)

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
        set_at = clock.now_us() if status.set_at is None else clock.to_us(status.set_at)
        stored = StoredStatus(status.availability, set_at, status.limited_availability_reason)
        await state_for(self._opened.history, "status").set_status(stored)

    async def feature_flags(self) -> list[FeatureFlag]:
        """Return every feature flag: ``move_node``, ``create_tag`` and ``delete_tag``.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1.
        """
        return await state_for(self._opened.history, "feature_flags").feature_flags()

    async def enabled_feature_flags(self) -> list[FeatureFlag]:
        """Return the feature flags that are on."""
        return [flag for flag in await self.feature_flags() if flag.enabled]

    async def disabled_feature_flags(self) -> list[FeatureFlag]:
        """Return the feature flags that are off."""
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
        state = state_for(self._opened.history, "feature_flags")
        check_safe(self._opened.storage)
        await state.set_feature_flag(name, setting)

    async def list_manifest_files(self, snapshot_id: SnapshotId | str) -> list[ManifestFileInfo]:
        """Return the manifests that a snapshot uses, by id.

        Raises:
            SnapshotNotFoundError: there is no such snapshot.

        Cost: one request unless the snapshot is cached.
        """
        snapshot = await self._opened.assets.snapshot(as_snapshot_id(snapshot_id))
        return sorted(snapshot.manifests.values(), key=lambda info: info.id)

    async def inspect_snapshot(self, snapshot_id: SnapshotId | str) -> dict[str, JSON]:
        """Return what a snapshot file holds, for people and for debugging.

        Keys and values are those of the official engine's call of this name.

        Raises:
            SnapshotNotFoundError: there is no such snapshot.
        """
        from icechunk_async.engine.upkeep import inspect  # noqa: PLC0415 -- not without need

        return await inspect.inspect_snapshot(self._opened, as_snapshot_id(snapshot_id))

    async def inspect_repo_info(self) -> dict[str, JSON]:
        """Return what the repo info file holds; see :meth:`inspect_snapshot`.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1.
        """
        from icechunk_async.engine.upkeep import inspect  # noqa: PLC0415 -- not without need

        return await inspect.inspect_repo_info(self._opened)

    async def inspect_manifest(self, manifest_id: ManifestId | str) -> dict[str, JSON]:
        """Return how many references of which kind a manifest holds; see :meth:`inspect_snapshot`.

        Raises:
            ObjectNotFoundError: there is no such manifest.
        """
        if not isinstance(manifest_id, ManifestId):
            manifest_id = ManifestId.parse(manifest_id)
        from icechunk_async.engine.upkeep import inspect  # noqa: PLC0415 -- not without need

        return await inspect.inspect_manifest(self._opened, manifest_id)

    async def inspect_transaction_log(self, snapshot_id: SnapshotId | str) -> dict[str, JSON]:
        """Return what a commit touched, by node id; see :meth:`inspect_snapshot`.

        For a snapshot below which others expired, what those touched is joined with it.

        Raises:
            ObjectNotFoundError: there is no such log; format 1 has none for the first snapshot.
        """
        from icechunk_async.engine.upkeep import inspect  # noqa: PLC0415 -- not without need

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
        from icechunk_async.engine.upkeep.rewrite import rewrite_manifests  # noqa: PLC0415 -- as above

        return await rewrite_manifests(
            self._opened,
            message,
            branch=branch,
            metadata={**self.default_commit_metadata, **(metadata or {})},
            commit_method=commit_method,
            progress=progress or no_progress,
        )


_log = logging.getLogger(__name__)

_DEFAULT = Limits()


class UpkeepOperations:
    """What keeps a repository small; a base of the repository."""

    _opened: Opened
    default_commit_metadata: dict[str, JSON]

    async def expire_snapshots(
        self,
        older_than: datetime,
        *,
        delete_expired_branches: bool = False,
        delete_expired_tags: bool = False,
        dry_run: bool = False,
    ) -> set[SnapshotId]:
        """Drop old snapshots from the history. Their files stay until garbage collection.

        The first snapshot stays, and so do the tips of branches and tags, unless those are to be
        deleted, too; ``main`` always stays. What is kept and stood on a dropped snapshot becomes
        a child of the first one. With format 2 it remembers what the dropped commits touched, so
        that diffs and rebases over the gap stay right; with format 1 that is lost.

        Args:
            older_than: drop snapshots made before this time, by their writers' clocks; a time
                without a zone is UTC.
            delete_expired_branches: delete branches whose tip is dropped. With format 1 a commit
                made to such a branch at the very moment can be lost with it.
            delete_expired_tags: delete tags whose snapshot is dropped; their names are never
                used again.
            dry_run: change nothing, and answer what would be dropped.

        Returns:
            The snapshots that were dropped. With format 1 old tips that stay are among them.

        Raises:
            RepositoryReadOnlyError: the repository's status forbids changes; nothing changed.
            OutcomeUnknownError: the storage never answered. Calling again is safe.
            FeatureDisabledError: tags would be deleted, and the repository forbids that.

        Cost: with format 2 one change of the repository, as for creating a branch. With format 1
        every snapshot is read, one after the other in each branch, and one in each written.

        Cancellation: it may have happened, with format 1 also in part; the history is whole in
        any case, and calling again finishes the work.
        """
        rule = Expiration(clock.to_us(older_than), delete_expired_branches, delete_expired_tags)
        if not dry_run:
            check_safe(self._opened.storage)
        with telemetry.span("expire", dry_run=dry_run):
            released = set(await self._opened.history.expire(rule, dry_run=dry_run))
        _log.info("%d snapshot(s) expired%s", len(released), " (dry run)" * dry_run)
        return released

    async def garbage_collect(
        self,
        delete_object_older_than: datetime,
        *,
        dry_run: bool = False,
        max_snapshots_in_memory: int = _DEFAULT.snapshots,
        max_compressed_manifest_mem_bytes: int = _DEFAULT.manifest_bytes,
        max_concurrent_manifest_fetches: int = _DEFAULT.manifests,
        progress: ProgressCallback | None = None,
    ) -> GarbageReport:
        """Delete the objects that no branch and no tag leads to.

        Choose a time before the beginning of every session that is still open anywhere: what an
        open session wrote belongs to no branch yet, and only its age protects it. With format 1
        nobody must create or reset branches and tags meanwhile; with format 2 they may.

        Args:
            delete_object_older_than: spare what was written at this time or later, by the
                storage's clock; not in the future, by this machine's clock and by that one. A
                time without a zone is UTC.
            dry_run: change nothing, and answer what would be deleted.
            max_snapshots_in_memory: read as many snapshots at a time.
            max_compressed_manifest_mem_bytes: read manifests of as many bytes at a time.
            max_concurrent_manifest_fetches: read as many manifests at a time.
            progress: told how far it is, see
                :class:`~icechunk_async._runtime.progress.Progress`.

        Returns:
            What was deleted, and what could not be: after a failure the folders that come later
            are left alone, since what remained may refer to what is in them.

        Raises:
            InvalidInputError: the time is in the future, by either clock; nothing was deleted.
            RepositoryReadOnlyError: the repository's status forbids changes.
            FormatError, SnapshotNotFoundError: a file is damaged or missing that the repository
                needs; nothing was deleted.
            ConflictError: the repository changed each time that its history was to be written;
                nothing was deleted.
            StorageError: listing failed; what was deleted until then was garbage.

        Cost: every snapshot and manifest in use is read; every object is listed, and garbage
        deleted, 1000 with each request where the storage can. Memory: 12 bytes for each chunk in
        use, and what is read at a time.

        Cancellation: part of the garbage may be deleted, and nothing else is. With format 2
        snapshots that nothing led to may be unknown already. Calling again finishes the work.
        """
        limits = _limits(
            max_snapshots_in_memory,
            max_concurrent_manifest_fetches,
            max_compressed_manifest_mem_bytes,
        )
        cutoff = checked_cutoff(delete_object_older_than)
        if not dry_run:
            check_safe(self._opened.storage)
        from icechunk_async.engine.upkeep.collect import collect_garbage  # noqa: PLC0415 -- not without need

        with telemetry.span("garbage_collect", dry_run=dry_run):
            report = await collect_garbage(
                self._opened,
                cutoff,
                dry_run=dry_run,
                limits=limits,
                progress=progress,
            )
        _log.info("garbage collected%s: %s", " (dry run)" * dry_run, report)
        for failure in report.failures:
            _log.warning("%r could not be deleted: %s", failure.key, failure.error)
        return report

    async def compact(
        self,
        branch: str,
        *,
        min_live_share: float = 0.5,
        message: str = "Compact chunk objects",
        metadata: Mapping[str, JSON] | None = None,
        dry_run: bool = False,
        progress: ProgressCallback | None = None,
    ) -> CompactReport:
        """Write chunks anew that lie in objects of which a branch's tip uses little, and commit.

        For objects that several chunks share, see :class:`~icechunk_async.Packing`: they are
        garbage only as a whole. Arrays and chunks stay as they are, so the commit is no conflict
        for other writers; what those change meanwhile is left to them.

        Other branches, tags and older snapshots go on using the old objects. So expire snapshots
        afterwards, and collect garbage: the space is free once nothing leads to the old objects.

        Args:
            branch: whose tip is looked at.
            min_live_share: of an object's bytes; those that are used less are left empty. Above 0
                and at most 1.
            message: the commit's message.
            metadata: properties of the commit.
            dry_run: write nothing, and answer what would be done.
            progress: told how many bytes are done.

        Raises:
            BranchNotFoundError: there is no such branch.
            InvalidInputError: the share is none.
            RepositoryReadOnlyError: the repository's status forbids changes.
            ConflictError: the branch was reset meanwhile; nothing was published.
            RebaseFailedError: somebody moved nodes meanwhile; likewise. Call again.
            OutcomeUnknownError: the storage never answered; calling again is safe.

        Cancellation: the commit may have been published; else there is more garbage.

        Cost: lists all chunk objects and reads all manifests of the tip; reads and writes the
        chunks that move, neighbours together. Memory: 28 bytes for each chunk object, the
        references of one array, and what is read at a time.
        """
        from icechunk_async.engine.upkeep.compact import compact  # noqa: PLC0415 -- not without need

        with telemetry.span("compact", branch=branch, dry_run=dry_run):
            report = await compact(
                self._opened,
                branch,
                min_live_share=min_live_share,
                message=message,
                metadata={**self.default_commit_metadata, **(metadata or {})},
                dry_run=dry_run,
                progress=progress or no_progress,
            )
        _log.info("branch %r compacted%s: %s", branch, " (dry run)" * dry_run, report)
        return report

    async def chunk_storage_stats(
        self,
        *,
        max_snapshots_in_memory: int = _DEFAULT.snapshots,
        max_compressed_manifest_mem_bytes: int = _DEFAULT.manifest_bytes,
        max_concurrent_manifest_fetches: int = _DEFAULT.manifests,
        progress: ProgressCallback | None = None,
    ) -> ChunkStorageStats:
        """Count the bytes of all chunks that branches and tags lead to, in every snapshot.

        A byte of a chunk object or of another's object counts once, however many chunks share
        it, so that objects which hold several chunks are counted as what they are.

        Args as :meth:`garbage_collect`.

        Raises:
            FormatError, SnapshotNotFoundError: a file is damaged or missing.

        Cost: every snapshot and manifest in use is read; 32 bytes of memory for each range.

        Cancellation: no effect.
        """
        limits = _limits(
            max_snapshots_in_memory,
            max_concurrent_manifest_fetches,
            max_compressed_manifest_mem_bytes,
        )
        from icechunk_async.engine.upkeep.statistics import measure_chunks  # noqa: PLC0415 -- not without need

        return await measure_chunks(self._opened, limits, progress)

    async def check_references(
        self, *, progress: ProgressCallback | None = None
    ) -> ReferenceReport:
        """Look whether every object is there that branches and tags lead to, and long enough.

        Snapshots and manifests are read; transaction logs and chunks are looked for; objects that
        virtual chunks are in are asked for their state, which is compared with what references
        are guarded with. Chunks are not read: what they hold is not checked.

        Args:
            progress: told how far it is.

        Returns:
            What was looked for, and each object that is missing, too short, changed, damaged or
            not to be had. Virtual objects of containers that were not authorised are counted.

        Raises:
            StorageError: a listing failed.

        Cost: every snapshot and manifest in use is read, and all objects are listed; a request
        for each virtual object. Memory: some 40 bytes for each chunk object in use.

        Cancellation: no effect.
        """
        from icechunk_async.engine.upkeep.check import check_references  # noqa: PLC0415 -- not without need

        with telemetry.span("check_references"):
            return await check_references(self._opened, progress or no_progress)

    async def copy_to(
        self,
        destination: Location,
        *,
        storage_options: Mapping[str, object] | None = None,
        progress: ProgressCallback | None = None,
    ) -> CopyReport:
        """Copy the whole repository to another storage, or bring an earlier copy up to date.

        Every object is copied byte for byte, with its name: ids, times and messages stay, and
        virtual chunks still refer to where they did. The references come last, so the destination
        shows the repository as it was when the copy began, and never a part of a snapshot. A copy
        that was interrupted is continued by calling this again. Writers need not stop.

        Args:
            destination: URL, path or open storage: empty, or with an earlier copy.
            storage_options: keyword arguments for the storage of a URL, see ``open_storage``.
            progress: told how many objects were looked at.

        Returns:
            How many objects and bytes were copied, and how many were there already.

        Raises:
            RepositoryExistsError: the destination holds something that no copy put there, or
                somebody committed to the copy; nothing was written.
            ConflictError: somebody else changed the copy meanwhile, or garbage collection deletes
                objects as fast as they are copied; the destination shows what it did before.
            UnsafeStorageError: this storage cannot list, or the destination cannot be written
                safely; nothing was written.
            OutcomeUnknownError: no answer came when the references were written; copy again.

        Cost: at most five requests, besides listing the references of format version 1, if nothing
        changed. Else all objects are listed on both sides, and each that is missing is read and
        written once. Memory: 256 MiB, or one object if that is larger.

        Cancellation: the destination shows what it did before, or the new state (format version
        1: each branch and tag by itself).
        """
        from icechunk_async.engine.upkeep.copy import copy_to  # noqa: PLC0415 -- not without need

        with telemetry.span("copy_to"):
            return await copy_to(
                self._opened, destination, storage_options or {}, progress or no_progress
            )


def _limits(snapshots: int, manifests: int, manifest_bytes: int) -> Limits:
    if min(snapshots, manifests, manifest_bytes) < 1:
        raise InvalidInputError(
            "The limits on what is held in memory must be at least 1; "
            f"{min(snapshots, manifests, manifest_bytes)} was given."
        )
    return Limits(snapshots, manifests, manifest_bytes)


def checked_cutoff(moment: datetime) -> datetime:
    """Return a time before which garbage may be deleted, with its zone.

    Raises:
        InvalidInputError: it is in the future.
    """
    if clock.to_us(moment) > clock.now_us():
        raise InvalidInputError(
            f"Garbage collection was asked to delete what is older than {moment.isoformat()}, "
            "which is in the future: it would delete what sessions write at this moment. Name a "
            "time before the beginning of the oldest session that is still open."
        )
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


class TransactionOperations:
    """Transactions of an open repository; a base of the repository."""

    @abstractmethod
    async def writable_session(self, branch: str) -> Session:
        """Begin a transaction on a branch."""

    @asynccontextmanager
    async def transaction(
        self,
        branch: str,
        *,
        message: str,
        metadata: Mapping[str, JSON] | None = None,
        rebase_with: ConflictSolver | None = None,
        rebase_tries: int = 1000,
        timeout_seconds: float | None = None,
    ) -> AsyncGenerator[IcechunkStore]:
        """Commit what is written in the block, all at once when it ends.

        If the block fails or is cancelled, nothing is committed; no other writer ever sees a
        part of it. Its store only reads afterwards.

        Args:
            branch: where to commit.
            message: says what was done, for people.
            metadata: properties of the snapshot; see ``Session.commit``, also for what follows.
            rebase_with: where another writer was first, replay the block's changes on top.
            rebase_tries: how often at most.
            timeout_seconds: how long the commit may take; the block may take as long as it likes.

        Raises:
            NothingToCommitError: the block changed nothing.
            ConflictError, RebaseFailedError, OutcomeUnknownError: as ``Session.commit``. The
                session is at ``store.session``, with its changes.
            BranchNotFoundError, RepositoryReadOnlyError, UnsafeStorageError: before the block.

        Cancellation: within the block nothing is committed; while it is committed, it may be.
        """
        session = await self.writable_session(branch)
        yield session.store
        await session.commit(
            message,
            metadata,
            rebase_with=rebase_with,
            rebase_tries=rebase_tries,
            timeout_seconds=timeout_seconds,
        )


class Repository(
    TransactionOperations, HistoryOperations, UpkeepOperations, AdministrationOperations
):
    """A versioned Zarr hierarchy in a storage.

    Opened by one of the class methods, which answer asynchronous context managers::

        async with Repository.open("file:///data/climate") as repository:
            session = await repository.readonly_session("main")

    What was opened closes with the block; sessions and stores cannot be used after it.
    """

    def __init__(self, opened: Opened, request: Request) -> None:
        """Use :meth:`create`, :meth:`open` or :meth:`open_or_create`."""
        super().__init__(opened)
        self._request = request
        self.default_commit_metadata: dict[str, JSON] = {}
        """Properties that every commit of this handle gets; a commit's own come on top."""

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
        hedge: HedgePolicy | None = None,
        packing: Packing | None = None,
        check_clean_root: bool = True,
        probe: bool | None = None,
    ) -> AbstractAsyncContextManager[Repository]:
        """Create a repository and open it.

        Args:
            location: a path, a URL, or an open storage (which is left open).
            spec_version: version of the format, 1 or 2.
            config: configuration; stored with the repository.
            authorize_virtual_chunk_access: see :meth:`open`.
            storage_options: the backend's options, where ``location`` is a path or URL.
            cache: see :meth:`open`.
            hedge: see :meth:`open`.
            packing: which chunks share objects; stored with a repository of format version 2.
            check_clean_root: refuse a location that holds anything.
            probe: begin with a trial of the storage's promises, see
                :func:`~icechunk_async.storage.probe.probe_storage`. None: unless the backend has
                made sure of them itself, as memory and local disks have. False accepts the risk.

        Raises:
            RepositoryExistsError: the location holds a repository, or anything at all.
            UnsafeStorageError: commits could be lost there; nothing was written.
            InvalidInputError: there is no such format version.

        Cancellation: the repository may have been created.
        """
        request = _request(location, storage_options, config, authorize_virtual_chunk_access)
        request = replace(request, cache=cache, hedge=hedge, packing=packing)
        return _open(cls, request, Creation(spec_version, check_clean_root, probe))

    @classmethod
    def open(
        cls,
        location: Location,
        *,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Mapping[str, VirtualAccess] | None = None,
        storage_options: Mapping[str, object] | None = None,
        cache: CacheOptions | None = None,
        hedge: HedgePolicy | None = None,
        packing: Packing | None = None,
    ) -> AbstractAsyncContextManager[Repository]:
        """Open a repository; its format version is found out.

        Args:
            location: a path, a URL, or an open storage (which is left open).
            config: laid over the stored configuration, for this handle only.
            authorize_virtual_chunk_access: containers of virtual chunks that may be read, by
                URL prefix: None, options for opening them, or an open storage.
            storage_options: the backend's options, where ``location`` is a path or URL.
            cache: keep what is read and never changes (chunks, manifests, snapshots,
                transaction logs) in memory and, where it names a directory, on disk. Virtual
                chunks are not kept.
            hedge: send a slow read of an immutable object a second time and take the first
                reply. None: never. Memory and local disks ignore it.
            packing: which chunks of this handle's sessions share objects; None: as stored.

        Raises:
            RepositoryNotFoundError: there is no repository.
            VirtualContainerError: a container was authorised that the repository lacks.
            FormatError: its files are damaged, or of a version that is too new.

        Cost: three requests at once.
        """
        request = _request(location, storage_options, config, authorize_virtual_chunk_access)
        request = replace(request, cache=cache, hedge=hedge, packing=packing)
        return _open(cls, request, None)

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
        hedge: HedgePolicy | None = None,
        packing: Packing | None = None,
        check_clean_root: bool = True,
        probe: bool | None = None,
    ) -> AbstractAsyncContextManager[Repository]:
        """Open the repository at a location, or create one if there is none.

        Args and errors as :meth:`open` and :meth:`create`; ``spec_version`` counts only for a
        repository that is created.
        """
        request = _request(location, storage_options, config, authorize_virtual_chunk_access)
        request = replace(request, cache=cache, hedge=hedge, packing=packing)
        creation = Creation(spec_version, check_clean_root, probe)
        return _open(cls, request, creation, or_open=True)

    @staticmethod
    async def exists(
        location: Location, *, storage_options: Mapping[str, object] | None = None
    ) -> bool:
        """Return whether a location holds a repository."""
        return await Repository.fetch_spec_version(location, storage_options=storage_options) > 0

    @staticmethod
    async def fetch_spec_version(
        location: Location, *, storage_options: Mapping[str, object] | None = None
    ) -> int:
        """Return the format version of the repository at a location; 0 if there is none."""
        request = _request(location, storage_options, None, None)
        async with open_location(request) as storage:
            found = await opening.find_expected(early(request, storage))
            return 0 if found is None else found.spec_version

    @staticmethod
    async def fetch_config(
        location: Location, *, storage_options: Mapping[str, object] | None = None
    ) -> RepositoryConfig | None:
        """Return the configuration stored with the repository at a location; None without one.

        Raises:
            RepositoryNotFoundError: there is no repository.
        """
        request = _request(location, storage_options, None, None)
        async with open_location(request) as storage:
            found = await opening.find_expected(early(request, storage))
            if found is None:
                raise opening.missing(storage)
            return found.config

    def __repr__(self) -> str:
        """Show where it is."""
        url = self.storage.description.url
        return f"<Icechunk repository (format {self.spec_version}) at {url!r}>"

    @property
    def engine(self) -> Opened:
        """The parts that serve this repository: for the facade, Spark and the command.

        They are not covered by the promises of public names.
        """
        return self._opened

    @property
    def storage(self) -> Storage:
        """The repository's storage; its requests count against the repository's budget."""
        return self._opened.storage

    @property
    def cache_statistics(self) -> CacheStatistics | None:
        """What the cache has done so far; None where none was asked for."""
        cache = self._opened.cache
        return None if cache is None else cache.statistics

    @property
    def spec_version(self) -> int:
        """The format version that new files are written to."""
        return self._opened.history.spec_version

    @property
    def config(self) -> RepositoryConfig:
        """The configuration in force: defaults, stored, and given at opening, in this order."""
        return self._opened.config

    @property
    def authorized_virtual_prefixes(self) -> frozenset[str]:
        """URL prefixes of the virtual chunk containers that this handle may read."""
        return self._opened.virtual.authorized_prefixes

    async def save_config(self) -> None:
        """Store the configuration in force, for everyone who opens the repository from now on.

        Raises:
            ConflictError: somebody else changed it meanwhile; nothing was stored.
        """
        check_safe(self.storage)
        history = self._opened.history
        await history.save_config(self.config, await history.load_config())

    async def readonly_session(
        self,
        branch: str | None = None,
        *,
        tag: str | None = None,
        snapshot_id: SnapshotId | str | None = None,
        as_of: datetime | None = None,
    ) -> Session:
        """Begin a session that reads one snapshot, whatever others commit meanwhile.

        Args:
            branch: read its tip; ``main`` if nothing is named.
            tag: read its snapshot.
            snapshot_id: read this snapshot.
            as_of: with a branch: read what was its tip at this time, by the writers' clocks.

        Raises:
            BranchNotFoundError, TagNotFoundError, SnapshotNotFoundError: there is none.
            InvalidInputError: more than one was named, or ``as_of`` without a branch.

        Cost: one request for the branch or tag, one for the snapshot unless it is cached.
        """
        if as_of is not None and (tag is not None or snapshot_id is not None):
            raise InvalidInputError(
                "as_of goes with a branch; a tag or a snapshot id names one moment already."
            )
        if as_of is not None:
            target = await self._as_of(await self._resolve(branch, tag, snapshot_id), as_of)
            base = await self._opened.assets.snapshot(target)
        elif snapshot_id is not None:
            target = await self._resolve(branch, tag, snapshot_id)
            await self._opened.history.snapshot_info(target)
            base = await self._opened.assets.snapshot(target)
        else:
            base = await self._load_tip(branch, tag)
        return self._session(base, branch=None, mode=SessionMode.READONLY)

    async def writable_session(self, branch: str) -> Session:
        """Begin a transaction on a branch.

        Raises:
            BranchNotFoundError: there is no such branch.
            RepositoryReadOnlyError: the repository's status forbids changes.
            UnsafeStorageError: commits could be lost on this storage.

        Cost: one request for the branch, one for the snapshot unless it is cached.
        """
        check_safe(self.storage)
        base = await self._load_tip(branch, None)
        check_online(self._opened.history)
        return self._session(base, branch=branch, mode=SessionMode.WRITABLE)

    async def rearrange_session(self, branch: str) -> Session:
        """Begin a transaction on a branch that moves nodes, see ``Session.move``, and only that.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1.
            FeatureDisabledError: its feature flag ``move_node`` is off.
            BranchNotFoundError, RepositoryReadOnlyError, UnsafeStorageError: as
                :meth:`writable_session`.

        Cost: one request more than :meth:`writable_session`.
        """
        check_safe(self.storage)
        await check_moves_allowed(self._opened.history)
        base = await self._load_tip(branch, None)
        check_online(self._opened.history)
        return self._session(base, branch=branch, mode=SessionMode.REARRANGE)

    async def _load_tip(self, branch: str | None, tag: str | None) -> Snapshot:
        """Return the snapshot of a ref as of now.

        The one last seen there is fetched while the ref is read: mostly it still is the one.
        """
        assets = self._opened.assets
        guess = self._opened.history.last_seen(branch or (None if tag else "main"), tag)
        if guess is None:
            return await assets.snapshot(await self._resolve(branch, tag, None))
        target, guessed = await gather(
            self._resolve(branch, tag, None), assets.snapshot_if_there(guess)
        )
        if guessed is not None and guessed.id == target:
            return guessed
        return await assets.snapshot(target)

    def _session(self, base: Snapshot, *, branch: str | None, mode: SessionMode) -> Session:
        opened = self._opened
        self._preload(base)
        workspace = Workspace(
            base,
            opened.assets,
            opened.virtual,
            inline_threshold_bytes=self.config.effective_inline_chunk_threshold_bytes,
            read_only=mode is SessionMode.READONLY,
            rearranging=mode is SessionMode.REARRANGE,
            packs=opened.new_packs() if mode is SessionMode.WRITABLE else None,
        )
        return Session(
            workspace,
            opened.history,
            opened.manifest_options,
            branch=branch,
            mode=mode,
            default_metadata=self.default_commit_metadata,
            origin=Origin.of(self._request, self.storage),
        )

    def _preload(self, base: Snapshot) -> None:
        """Begin to fetch the manifests that the configuration wants to be there."""
        config = self.config.effective_manifest.effective_preload
        max_refs = self.config.effective_caching.effective_num_chunk_refs
        assets = self._opened.assets
        self._opened.background.start(lambda: preload(base, assets, config, max_refs))

    async def _as_of(self, tip: SnapshotId, moment: datetime) -> SnapshotId:
        limit = clock.to_us(moment)
        first: SnapshotInfo | None = None
        async for info in self._opened.history.ancestry(tip):
            if info.flushed_at <= limit:
                return info.id
            first = info
        when = first.written_at.isoformat() if first is not None else "never"
        raise SnapshotNotFoundError(
            f"The branch had no snapshot yet at {moment.isoformat()}; its first is of {when}.",
            as_of=moment.isoformat(),
            code="no-snapshot-at-time",
        )


def _request(
    location: Location,
    storage_options: Mapping[str, object] | None,
    config: RepositoryConfig | None,
    authorized: Mapping[str, VirtualAccess] | None,
) -> Request:
    return Request(location, dict(storage_options or {}), config, dict(authorized or {}))


@asynccontextmanager
async def _open(
    cls: type[Repository], request: Request, creation: Creation | None, *, or_open: bool = False
) -> AsyncGenerator[Repository]:
    async with open_parts(request, creation, or_open=or_open) as opened:
        yield cls(opened, request)
