"""Spec 2: one repo info object holds refs, ancestry, configuration and the operations log.

Every change reads the object, edits it as a value, keeps a backup copy of what it replaces, and
writes the result on condition that nobody else wrote meanwhile (spec, "Repo info file").
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import gather
from icechunk_async.engine.history.doubt import Doubt
from icechunk_async.engine.history.protocol import Amend, Commit, Detach, Kept, StoredConfig
from icechunk_async.engine.history.repo_info import edits
from icechunk_async.engine.history.repo_info import expire as expire_edits
from icechunk_async.engine.history.repo_info.edits import MOVE_NODE, check_feature
from icechunk_async.errors import (
    ConflictError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    RepositoryNotFoundError,
)
from icechunk_async.format.config import decode_config, encode_config
from icechunk_async.format.envelope import FileType, pack, unpack
from icechunk_async.format.layout import REPO_INFO, backup_key, new_backup_name
from icechunk_async.format.operations_log import Availability, ExpirationRan, GarbageCollectionRan
from icechunk_async.format.repo_info import decode_repo_info, encode_repo_info

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from collections.abc import Set as AbstractSet

    from icechunk_async._runtime.backoff import Backoff
    from icechunk_async.engine.history.protocol import Expiration, ParentOf, Publication
    from icechunk_async.engine.history.repo_info.edits import Edit
    from icechunk_async.format.config import RepositoryConfig
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.operations_log import Update, UpdateDetail
    from icechunk_async.format.repo_info import RepoInfo, SnapshotInfo
    from icechunk_async.storage import Retrieved, Storage, Version

__all__ = ["RepoInfoHistory", "RepoState", "read_state"]

type _Store = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RepoState:
    """A repo info and the version of the object that it was read from."""

    info: RepoInfo
    version: Version


def read_state(retrieved: Retrieved) -> RepoState:
    """Decode what was read under the key of the repo info."""
    info = decode_repo_info(unpack(retrieved.data, FileType.REPO_INFO))
    return RepoState(info, retrieved.version)


class RepoInfoHistory:
    """A :class:`~icechunk_async.engine.history.History` of spec 2.

    The newest state seen is remembered: a commit tries on top of it without reading first.
    """

    spec_version = 2

    def __init__(
        self,
        storage: Storage,
        state: RepoState,
        *,
        backoff: Backoff,
        max_updates: int,
        compression_level: int,
    ) -> None:
        """Begin with a state just read or written."""
        self._storage = storage
        self._state = state
        self._backoff = backoff
        self._max_updates = max_updates
        self._level = compression_level

    async def branches(self) -> Mapping[str, SnapshotId]:
        """Return every branch and its tip. Cost: one conditional request."""
        return (await self._refresh()).info.branches

    async def tags(self) -> Mapping[str, SnapshotId]:
        """Return every tag that was not deleted. Cost: one conditional request."""
        return (await self._refresh()).info.tags

    async def branch_tip(self, name: str) -> SnapshotId:
        """Return the tip of a branch. Cost: one conditional request."""
        return edits.find_branch(await self.branches(), name)

    async def tag_target(self, name: str) -> SnapshotId:
        """Return the snapshot of a tag. Cost: one conditional request."""
        return edits.find_tag(await self.tags(), name)

    def last_seen(self, branch: str | None, tag: str | None) -> SnapshotId | None:
        """Return where a branch or tag was when it was last read."""
        info = self._state.info
        return info.tags.get(tag) if tag is not None else info.branches.get(branch or "")

    async def check_writable(self) -> None:
        """Refuse if the repository's status forbids changes, as last seen."""
        edits.check_online(self._state.info)

    async def check_moves_allowed(self) -> None:
        """Refuse if the feature flag is off. Cost: one conditional request."""
        check_feature((await self._refresh()).info, MOVE_NODE)

    async def check_feature(self, name: str) -> None:
        """Refuse if a feature flag forbids an operation, as last seen."""
        check_feature(self._state.info, name)

    async def repo_info(self) -> RepoInfo:
        """Return the repo info as of now. Cost: one conditional request."""
        return (await self._refresh()).info

    async def change(self, edit: Edit, *, despite_status: bool = False) -> None:
        """Apply an edit of the repo info. Cost: two requests where nobody else writes."""
        await self._update(edit, despite_status=despite_status)

    async def create_branch(self, name: str, snapshot_id: SnapshotId) -> None:
        """Create a branch."""
        await self._update(edits.create_branch(name, snapshot_id))

    async def reset_branch(
        self, name: str, snapshot_id: SnapshotId, *, expected: SnapshotId | None = None
    ) -> None:
        """Move a branch to another snapshot."""
        await self._update(edits.reset_branch(name, snapshot_id, expected))

    async def delete_branch(self, name: str) -> None:
        """Delete a branch."""
        await self._update(edits.delete_branch(name))

    async def create_tag(self, name: str, snapshot_id: SnapshotId) -> None:
        """Create a tag."""
        await self._update(edits.create_tag(name, snapshot_id))

    async def delete_tag(self, name: str) -> None:
        """Delete a tag for good."""
        await self._update(edits.delete_tag(name))

    async def snapshot_info(self, snapshot_id: SnapshotId) -> SnapshotInfo:
        """Return a snapshot's place in history. Cost: none, if it is known here already."""
        known = self._state.info.snapshots.get(snapshot_id)
        return known or edits.find_snapshot((await self._refresh()).info, snapshot_id)

    async def ancestry(self, snapshot_id: SnapshotId) -> AsyncIterator[SnapshotInfo]:
        """Iterate from a snapshot to its root. Cost: at most one conditional request."""
        await self.snapshot_info(snapshot_id)
        for info in self._state.info.ancestry(snapshot_id):
            yield info

    async def publish(self, publication: Publication, store: _Store) -> None:
        """Store a snapshot's files, then make it known in one atomic step."""
        known: RepoState | None = self._state
        match publication:
            case Commit(branch, expected) | Amend(branch, expected):
                if self._state.info.branches.get(branch) != expected:
                    known = None  # find out before files are stored for nothing
            case Detach():
                pass
        if self._state.info.status.availability is not Availability.ONLINE:
            known = None  # find out whether it is online again
        await self._update(
            edits.publication_edit(publication),
            store=store,
            known=known,
            snapshot_id=publication.snapshot.id,
        )

    async def operations(self) -> AsyncIterator[Update]:
        """Iterate over the operations log, newest first.

        Cost: one request for each ``num_updates_per_repo_info_file`` entries.
        """
        info = (await self._refresh()).info
        backup: str | None = None
        while True:
            first, *others = info.updates
            # In a backup its newest entry has no path of its own: it is the file itself.
            yield first if backup is None else edits.with_backup(first, backup)
            for update in others:
                yield update
            backup = info.before_updates
            if backup is None:
                return
            try:
                retrieved = await self._storage.get(backup_key(backup))
            except ObjectNotFoundError:
                return  # somebody removed old backups; the log simply begins later
            info = read_state(retrieved).info

    async def load_config(self) -> StoredConfig:
        """Read the persisted configuration from the newest state seen. Cost: none."""
        raw = self._state.info.raw_config
        return StoredConfig(None if raw is None else decode_config(raw, 2), raw)

    async def save_config(self, config: RepositoryConfig, replacing: StoredConfig) -> None:
        """Persist a configuration."""
        expected = replacing.state
        assert expected is None or isinstance(expected, bytes)
        await self._update(edits.config_edit(encode_config(config, 2), expected))

    async def expire(self, rule: Expiration, *, dry_run: bool) -> frozenset[SnapshotId]:
        """Drop old snapshots from the history. Cost: of one change of the repo info."""
        expired: frozenset[SnapshotId] = frozenset()

        def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
            nonlocal expired  # of the newest state: that of the try that lands
            next_info, expired = expire_edits.expire(info, rule)
            return next_info, ExpirationRan()

        await self._apply(edit, dry_run=dry_run)
        return expired

    async def reachable(self, parent_of: ParentOf) -> frozenset[SnapshotId]:
        """Return every snapshot that a branch or tag leads to. Cost: a conditional request."""
        del parent_of
        return frozenset(expire_edits.reachable((await self._refresh()).info))

    async def release(
        self, old: AbstractSet[SnapshotId], parent_of: ParentOf, *, dry_run: bool
    ) -> Kept:
        """Drop snapshots from the repo info. Cost: of one change of it."""
        del parent_of
        released = self._state.info

        def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
            nonlocal released  # the newest state: that of the try that lands
            released = expire_edits.release(info, old)
            return released, GarbageCollectionRan()

        await self._apply(edit, dry_run=dry_run)
        pruned = {log for it in released.snapshots.values() for log in it.pruned_ancestor_logs}
        snapshots = frozenset(released.snapshots)
        return Kept(snapshots, snapshots | pruned)

    async def _apply(self, edit: Edit, *, dry_run: bool) -> None:
        """Carry an edit out, or only see what comes of it."""
        if not dry_run:
            await self._update(edit)
            return
        info = (await self._refresh()).info
        edits.check_online(info)
        edit(info)

    async def _refresh(self) -> RepoState:
        """Return the state as of now."""
        seen = self._state
        try:
            retrieved = await self._storage.get_if_changed(REPO_INFO, seen.version)
        except ObjectNotFoundError as error:
            raise RepositoryNotFoundError(
                f"The repository at {self._storage.description.url!r} was removed: its "
                f"{REPO_INFO!r} object is gone."
            ) from error
        return seen if retrieved is None else self._remember(read_state(retrieved))

    def _remember(self, state: RepoState) -> RepoState:
        """Keep the newer of two states; there is no await between looking and keeping."""
        if state.info.updates[0].updated_at >= self._state.info.updates[0].updated_at:
            self._state = state
        return state

    async def _update(
        self,
        edit: Edit,
        *,
        store: _Store | None = None,
        known: RepoState | None = None,
        snapshot_id: SnapshotId | None = None,
        despite_status: bool = False,
    ) -> None:
        """Apply an edit to the newest state, and write it; again where somebody was first.

        Args:
            edit: refuses, or answers the next state.
            store: stores files that the edit refers to; awaited once.
            known: a state to try first, without reading.
            snapshot_id: the snapshot that the edit adds, if it adds one.
            despite_status: write even while the repository's status forbids changes.
        """
        attempts: list[str] = []
        state = known or await self._refresh()
        with Doubt() as doubt:
            for attempt in range(1, self._backoff.max_tries + 1):
                if not despite_status:
                    edits.check_online(state.info)
                next_info, detail = edit(state.info)
                backup = new_backup_name(REPO_INFO)
                attempts.append(backup)
                next_info = edits.push_update(
                    next_info, detail, clock.now_us(), backup, self._max_updates
                )
                if store is None:
                    ready = await self._back_up(state, backup)
                else:
                    ready, _ = await gather(self._back_up(state, backup), store())
                    store = None
                try:
                    if ready:
                        self._remember(RepoState(next_info, await self._write(next_info, state)))
                        return
                except PreconditionFailedError:
                    pass  # somebody else was first
                except OutcomeUnknownError as error:
                    doubt.begin(error, state.version)
                state = await self._refresh()
                if _landed(state.info, attempts, snapshot_id):
                    return
                doubt.settle(state.version)
                await self._backoff.wait(attempt)
            raise doubt.error or ConflictError(
                f"The repository changed each of {self._backoff.max_tries} times that this change "
                "was tried; nothing was changed. Try again when fewer writers are at work."
            )

    async def _back_up(self, state: RepoState, name: str) -> bool:
        """Copy the object that is about to be replaced; answer whether it still was that."""
        try:
            await self._storage.copy(REPO_INFO, backup_key(name), if_version=state.version)
        except (PreconditionFailedError, OutcomeUnknownError):
            return False
        return True

    async def _write(self, info: RepoInfo, state: RepoState) -> Version:
        data = pack(encode_repo_info(info), FileType.REPO_INFO, 2, level=self._level)
        return await self._storage.put(REPO_INFO, data, if_version=state.version)


def _landed(info: RepoInfo, attempts: list[str], snapshot_id: SnapshotId | None) -> bool:
    """Return whether one of our writes is part of this state.

    Each attempt took a backup of its own, and the log names the backups of those that landed.
    """
    backups = {info.before_updates, *(update.backup_path for update in info.updates)}
    return not backups.isdisjoint(attempts) or snapshot_id in info.snapshots
