"""Format 2: one repo info object holds refs, ancestry, configuration and the operations log."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import closing, gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.files.binary_layout import BinaryLayout
from icechunk_async.engine.history.outcomes import create_object, read_if_there
from icechunk_async.engine.history.protocol import (
    MAIN,
    SAFE_UPDATES,
    Amend,
    Capabilities,
    Commit,
    Detach,
    Kept,
    StoredConfig,
)
from icechunk_async.engine.history.refusals import repository_exists
from icechunk_async.engine.history.repo_info import edits
from icechunk_async.engine.history.repo_info.file import RepoInfoFile, Seen, read_info
from icechunk_async.engine.history.settings import OwnSettings, check_unprotected
from icechunk_async.engine.history.way import Found, Way, as_it_is
from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import FileType
from icechunk_async.format.layout import REPO_INFO, backup_key
from icechunk_async.format.operations_log import (
    Availability,
    ExpirationRan,
    GarbageCollectionRan,
    RepoInitialized,
    RepoStatus,
    Update,
)
from icechunk_async.format.repo_info import RepoInfo, SnapshotInfo, encode_repo_info

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Mapping,
        Sequence,
    )
    from collections.abc import Set as AbstractSet
    from datetime import datetime

    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.history.collections import Guard
    from icechunk_async.engine.history.protocol import (
        Audit,
        Expiration,
        FeatureFlag,
        ParentOf,
        Publication,
    )
    from icechunk_async.engine.history.repo_info.file import Unchanged
    from icechunk_async.engine.history.way import Creating, HistorySettings
    from icechunk_async.format.config import RepositoryConfig
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.operations_log import UpdateDetail
    from icechunk_async.format.repo_info.snapshot_columns import Page
    from icechunk_async.storage import Retrieved, Storage

__all__ = [
    "LAYOUT",
    "PLAIN",
    "REPO_INFO_WAY",
    "Kind",
    "RepoInfoHistory",
    "create_repo_info",
    "read_repo_info",
]


class RepoInfoState:
    """A `RepositoryState` of format 2."""

    def __init__(self, file: RepoInfoFile) -> None:
        """Read and write the repo info."""
        self._file = file

    async def info(self) -> RepoInfo:
        """Return the whole state. Cost: one conditional request."""
        return (await self._file.refresh()).info

    def seen(self) -> RepoInfo:
        """Return the newest state that was read or written; from any thread."""
        return self._file.seen.info

    def known_now(self) -> RepoInfo | None:
        """Return the whole state as of now if that needs no waiting; from any thread."""
        return self._file.known_now()

    async def replace_metadata(self, metadata: Mapping[str, JSON]) -> None:
        """Replace the repository's metadata."""
        await self._file.update(edits.replace_metadata(metadata))

    async def merge_metadata(
        self, items_for: Callable[[RepoInfo], Mapping[str, JSON]]
    ) -> dict[str, JSON]:
        """Lay items over the repository's metadata and return all of it."""
        merged: dict[str, JSON] = {}

        def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
            nonlocal merged  # of the try that lands
            changed, detail = edits.merge_metadata(items_for(info))(info)
            merged = changed.metadata
            return changed, detail

        await self._file.update(edit)
        return merged

    async def set_status(self, status: RepoStatus) -> None:
        """Replace the repository's status."""
        # Else nobody could set a repository back to online.
        await self._file.update(edits.change_status(status), despite_status=True)

    def check_online(self) -> None:
        """Refuse changes while the status, as last seen, forbids them."""
        edits.check_online(self._file.seen.info)

    def check_unprotected(self, branch: str) -> None:
        """Refuse a direct change of a branch that, as last seen, is protected."""
        check_unprotected(self._file.seen.info, branch)

    async def feature_flags(self) -> list[FeatureFlag]:
        """Return every known feature flag. Cost: one conditional request."""
        return edits.feature_flags(await self.info())

    async def set_feature_flag(self, name: str, setting: bool | None) -> None:  # noqa: FBT001
        """Switch a feature on (True), off (False), or back to its default (None)."""
        await self._file.update(edits.set_feature_flag(name, setting))

    async def check_feature(self, name: str) -> None:
        """Refuse an operation whose feature flag is off. Cost: one conditional request."""
        edits.check_feature(await self.info(), name)

    async def operations(self) -> AsyncIterator[Update]:
        """Iterate over the operations log, newest first.

        Cost: one request for each ``num_updates_per_repo_info_file`` entries.
        """
        updates = self.updates(await self.info())
        async with closing(updates):
            async for update in updates:
                yield update

    async def updates(self, newest: RepoInfo) -> AsyncGenerator[Update]:
        """Iterate over the operations log as of one state of the repo info.

        Raises:
            FormatError: the backups that continue it lead back to one that was read.
        """
        info: RepoInfo | None = newest
        backup: str | None = None
        read: set[str] = set()
        while info is not None:  # else old backups were removed, and the log begins later
            for update in info.updates[:1]:
                # A backup's newest entry does not name the backup: it is the file itself.
                yield update if backup is None else edits.with_backup(update, backup)
            for update in info.updates[1:]:
                yield update
            backup = info.before_updates
            if backup is None:
                return
            # Backups are bytes that need not be trusted: names that lead back would be followed for
            # ever.
            if backup in read:
                raise FormatError(
                    f"The operations log forms a circle: {backup_key(backup)!r} continues it twice."
                )
            read.add(backup)
            info = await self._file.read_backup(backup)


_CAPABILITIES: Final = Capabilities(
    "format version 2",
    amend=True,
    move_nodes=True,
    metadata=True,
    status=True,
    feature_flags=True,
    operations_log=True,
    repo_info_file=True,
    tag_deletion=True,
    expiration=True,
    upkeep=True,
    sums=True,
    leases=True,
    proposals=True,
    protection=True,
)


async def _nothing_to_tidy(storage: Storage, older_than: datetime) -> None:
    del storage, older_than


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the layouts that have a repo info."""

    layout: str
    capabilities: Capabilities
    storage_needs: Sequence[str]
    view: Callable[[Storage], Storage] = as_it_is
    """Shows a storage as one with an object ``repo``, which can be replaced; see `Way.view`."""
    tidy: Callable[[Storage, datetime], Awaitable[None]] = _nothing_to_tidy
    """Deletes from such a storage what the history does not need from before a time."""


PLAIN: Final = Kind("format-2", _CAPABILITIES, SAFE_UPDATES)


class RepoInfoHistory:
    """A `History` of format 2."""

    spec_version = 2
    migration = None

    def __init__(
        self,
        storage: Storage,
        seen: Seen,
        settings: HistorySettings,
        kind: Kind,
        is_unchanged: Unchanged | None,
    ) -> None:
        """Begin with a state just read or written."""
        self.layout = kind.layout
        self.capabilities = kind.capabilities
        self.storage_needs = kind.storage_needs
        self._tidy = kind.tidy
        self._storage = storage
        self._file = RepoInfoFile(storage, seen, settings, kind.layout, is_unchanged)
        self._state = RepoInfoState(self._file)

    @property
    def state(self) -> RepoInfoState:
        """Metadata, status, feature flags and the operations log."""
        return self._state

    async def branches(self) -> Mapping[str, SnapshotId]:
        """Return every branch and its tip. Cost: one conditional request."""
        return (await self._file.refresh()).info.branches

    async def tags(self) -> Mapping[str, SnapshotId]:
        """Return every tag that was not deleted. Cost: one conditional request."""
        return (await self._file.refresh()).info.tags

    async def branch_tip(self, name: str) -> SnapshotId:
        """Return the tip of a branch. Cost: one conditional request."""
        return edits.find_branch(await self.branches(), name)

    async def tip_at(self, name: str, moment_us: int) -> SnapshotId:
        """Return where a branch was. Cost: a conditional request, and one a backup of the log."""
        info = (await self._file.refresh()).info
        from icechunk_async.engine.history.repo_info.past import PastTip  # noqa: PLC0415 -- loaded when it is used

        past = PastTip(info, name, edits.find_branch(info.branches, name), moment_us)
        updates = self._state.updates(info)
        async with closing(updates):
            async for update in updates:
                past.see(update)
                if past.is_over:
                    break
        return past.end()

    async def tag_target(self, name: str) -> SnapshotId:
        """Return the snapshot of a tag. Cost: one conditional request."""
        return edits.find_tag(await self.tags(), name)

    def last_seen(self, branch: str | None, tag: str | None) -> SnapshotId | None:
        """Return where a branch or tag was when it was last read."""
        info = self._file.seen.info
        return info.tags.get(tag) if tag is not None else info.branches.get(branch or "")

    async def create_branch(self, name: str, snapshot_id: SnapshotId) -> None:
        """Create a branch."""
        await self._file.update(edits.create_branch(name, snapshot_id))

    async def reset_branch(
        self,
        name: str,
        snapshot_id: SnapshotId,
        *,
        expected: SnapshotId | None = None,
        approved: frozenset[str] | None = None,
    ) -> None:
        """Move a branch to another snapshot."""
        await self._file.update(edits.reset_branch(name, snapshot_id, expected, approved))

    async def delete_branch(self, name: str) -> None:
        """Delete a branch."""
        await self._file.update(edits.delete_branch(name))

    async def create_tag(self, name: str, snapshot_id: SnapshotId) -> None:
        """Create a tag."""
        await self._file.update(edits.create_tag(name, snapshot_id))

    async def delete_tag(self, name: str) -> None:
        """Delete a tag for good."""
        await self._file.update(edits.delete_tag(name))

    async def snapshot_info(self, snapshot_id: SnapshotId) -> SnapshotInfo:
        """Return a snapshot's place in history. Cost: none if it was seen before."""
        known = self.known_snapshot(snapshot_id)
        return known or edits.find_snapshot((await self._file.refresh()).info, snapshot_id)

    def known_snapshot(self, snapshot_id: SnapshotId) -> SnapshotInfo | None:
        """Return a snapshot's place in history if it was seen before; from any thread."""
        return self._file.seen.info.snapshots.get(snapshot_id)

    async def ancestry(self, snapshot_id: SnapshotId) -> AsyncIterator[SnapshotInfo]:
        """Iterate from a snapshot to its root. Cost: at most one conditional request."""
        # One state is walked to its end: a change meanwhile would mix two histories.
        for info in (await self._listing(snapshot_id)).ancestry(snapshot_id):
            yield info

    async def ancestry_pages(self, snapshot_id: SnapshotId) -> AsyncIterator[Page]:
        """Iterate as `ancestry`, several at a time."""
        for page in (await self._listing(snapshot_id)).ancestry_pages(snapshot_id):
            yield page

    async def _listing(self, snapshot_id: SnapshotId) -> RepoInfo:
        """Return a state that lists a snapshot: the newest seen, or else the one as of now.

        That may not be the newest seen by its time: an older repository can have been put in the
        place of one that this process had open.
        """
        info = self._file.seen.info
        # What was seen may be older than an expiration: the history is then a longer one, and no
        # wrong one.
        if snapshot_id not in info.snapshots:
            info = (await self._file.refresh()).info
            edits.find_snapshot(info, snapshot_id)
        return info

    def log_position(self) -> int:
        """Return the time of the newest entry of the operations log that was seen."""
        return self._file.seen.info.updated_at

    async def publish(
        self, publication: Publication, store: Callable[[], Awaitable[None]], guard: Guard
    ) -> None:
        """Store a snapshot's files, then make it known in one atomic step."""
        from icechunk_async.engine.history.collections import collected_since, read_notes  # noqa: PLC0415 -- on use

        from_seen = True
        stored = False

        async def store_once() -> None:
            nonlocal stored
            stored = True
            await store()

        async def admit(info: RepoInfo, _: RepoInfo) -> None:
            # A collection that is in no state up to the one that a try replaces makes the try
            # fail, and is looked at before the next.
            ran = collected_since(info, guard.since_us)
            if ran:
                notes = {it.ran_at_us: it for it in await read_notes(self._storage)}
                ran = [notes.get(it.ran_at_us, it) for it in ran]
            # Also where none ran: a writer that loses many races looks at each entry once.
            await guard.admit(ran, info.updated_at, stored=stored)

        match publication:
            case Commit(branch, expected) | Amend(branch, expected):
                if self._file.seen.info.branches.get(branch) != expected:
                    from_seen = False  # find out before storing files in vain
            case Detach():
                pass
        if self._file.seen.info.status.availability is not Availability.ONLINE:
            from_seen = False  # it may be online again
        await self._file.update(
            edits.publication_edit(publication),
            store=store_once,
            admit=admit,
            from_seen=from_seen,
            snapshot_id=publication.snapshot.id,
        )

    async def load_config(self) -> StoredConfig:
        """Return the configuration in the newest state seen. Cost: none."""
        from icechunk_async.format.config.codec import decode_config  # noqa: PLC0415 -- on use

        raw = self._file.seen.info.raw_config
        return StoredConfig(None if raw is None else decode_config(raw, 2), raw)

    async def save_config(self, config: RepositoryConfig, replacing: StoredConfig) -> None:
        """Store a configuration."""
        from icechunk_async.format.config.codec import encode_config  # noqa: PLC0415 -- on use

        expected = replacing.state
        assert expected is None or isinstance(expected, bytes)
        await self._file.update(edits.config_edit(encode_config(config, 2), expected))

    async def expire(self, rule: Expiration, *, dry_run: bool) -> frozenset[SnapshotId]:
        """Drop old snapshots from the history. Cost: that of one change of the repo info."""
        expired: frozenset[SnapshotId] = frozenset()

        def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
            nonlocal expired  # of the try that lands
            next_info, expired = edits.expire(info, rule)
            return next_info, ExpirationRan()

        await (self._file.preview(edit) if dry_run else self._file.update(edit))
        return expired

    async def audit(self) -> Audit:
        """Read the repo info anew, and report what is damaged."""
        from icechunk_async.engine.history.repo_info.audit import audit  # noqa: PLC0415 -- loaded when it is used

        return await audit(self._storage)

    async def reachable(self, parent_of: ParentOf) -> frozenset[SnapshotId]:
        """Return every snapshot that a branch or tag leads to. Cost: a conditional request."""
        del parent_of
        return frozenset(edits.reachable((await self._file.refresh()).info))

    async def release(
        self, old: AbstractSet[SnapshotId], parent_of: ParentOf, *, cutoff: datetime | None
    ) -> Kept:
        """Drop unreachable snapshots from the repo info.

        Cost: that of one change of it, and that of `leave_note`.
        """
        from icechunk_async.engine.history.collections import leave_note  # noqa: PLC0415 -- on use

        del parent_of
        released = self._file.seen.info

        def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
            nonlocal released  # of the try that lands
            released = edits.release(info, old)
            return released, GarbageCollectionRan()

        if cutoff is None:
            await self._file.preview(edit)
        else:
            deletes_before = cutoff

            async def note(_: RepoInfo, next_info: RepoInfo) -> None:
                # Before anybody can see that it ran. A note of a lost race does no harm.
                await leave_note(self._storage, next_info.updated_at, deletes_before)

            await self._file.update(edit, admit=note)
            await self._tidy(self._storage, cutoff)
        pruned = {log for it in released.snapshots.values() for log in it.pruned_ancestor_logs}
        snapshots = frozenset(released.snapshots)
        return Kept(snapshots, snapshots | pruned)


LAYOUT: Final = BinaryLayout(2)


async def _detect(storage: Storage) -> Callable[[], Found] | None:
    retrieved = await read_if_there(storage, REPO_INFO)
    return None if retrieved is None else partial(read_repo_info, retrieved, PLAIN)


def read_repo_info(retrieved: Retrieved, kind: Kind) -> Found:
    """Return the repository whose repo info was read.

    Raises:
        FormatError: it is damaged.
    """
    seen = read_info(retrieved)
    raw, config = seen.info.raw_config, None
    if raw is not None:
        from icechunk_async.format.config.codec import decode_config  # noqa: PLC0415 -- on use

        config = decode_config(raw, 2)
    return _found(kind, config, seen, OwnSettings.stored_in(seen.info))


def _found(kind: Kind, config: RepositoryConfig | None, seen: Seen, settings: OwnSettings) -> Found:
    return Found(kind.layout, LAYOUT, config, partial(_open, kind, seen), settings, view=kind.view)


def _open(
    kind: Kind, seen: Seen, storage: Storage, assets: Assets, settings: HistorySettings
) -> RepoInfoHistory:
    # A view shows an object that the storage itself may not have.
    is_unchanged = assets.is_unchanged if kind.view is as_it_is else None
    return RepoInfoHistory(storage, seen, settings, kind, is_unchanged)


async def create_repo_info(new: Creating, kind: Kind) -> Found:
    """Store the first snapshot, and then the repo info.

    Raises:
        RepositoryExistsError: another writer was first.
    """
    from icechunk_async.format.config.codec import encode_config  # noqa: PLC0415 -- on use
    from icechunk_async.format.transaction_log import TransactionLog  # noqa: PLC0415 -- on use

    snapshot, log = new.snapshot, TransactionLog(new.snapshot.id)
    await gather(new.assets.put_snapshot(snapshot), new.assets.put_transaction_log(log))
    entry = SnapshotInfo.of(
        snapshot.id, None, snapshot.flushed_at, snapshot.message, snapshot.metadata
    )
    info = RepoInfo(
        branches={MAIN: snapshot.id},
        tags={},
        deleted_tags=frozenset(),
        snapshots={snapshot.id: entry},
        status=RepoStatus(Availability.ONLINE, snapshot.flushed_at),
        updates=(Update(RepoInitialized(), snapshot.flushed_at),),
        raw_config=None if new.config is None else encode_config(new.config, 2),
        raw_metadata=new.settings.raw(),
    )
    data = new.assets.pack(encode_repo_info(info), FileType.REPO_INFO)
    version = await create_object(new.storage, REPO_INFO, data)
    if version is None:
        raise repository_exists(new.storage, repr(REPO_INFO))
    return _found(kind, new.config, Seen(info, version), new.settings)


async def _create(new: Creating) -> Found:
    return await create_repo_info(new, PLAIN)


REPO_INFO_WAY: Final = Way(
    PLAIN.layout, 2, lambda: LAYOUT, PLAIN.storage_needs, REPO_INFO, _detect, _create
)
