"""Format 1: one small object for each branch or tag; ancestry is in the snapshots themselves.

A branch moves by compare-and-set of its object (spec 1, "References").
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.files.binary_layout import BinaryLayout
from icechunk_async.engine.history.collections import leave_note, read_notes
from icechunk_async.engine.history.outcomes import Doubt, create_object, read_if_there
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
from icechunk_async.engine.history.refusals import (
    branch_exists,
    branch_moved,
    branch_not_reset,
    config_changed,
    migrated_meanwhile,
    no_branch,
    no_snapshot,
    no_snapshot_yet,
    no_tag,
    refuse_main,
    repository_exists,
    source_is_gone,
    tag_exists,
    tag_was_deleted,
)
from icechunk_async.engine.history.way import Found
from icechunk_async.errors import (
    ConflictError,
    FormatError,
    InvalidRefNameError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    SnapshotNotFoundError,
    TagNotFoundError,
    UnsafeStorageError,
)
from icechunk_async.format.layout import (
    BRANCH_PREFIX,
    CONFIG,
    REFS,
    REPO_INFO,
    TAG_PREFIX,
    backup_key,
    branch_key,
    new_backup_name,
    snapshot_key,
    tag_key,
    tombstone_key,
)
from icechunk_async.format.refs import decode_ref, encode_ref, encode_renewed_ref
from icechunk_async.format.repo_info import SnapshotInfo
from icechunk_async.storage import ABSENT, BlockingStorage, ByteRange, CommonPrefix

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from collections.abc import Set as AbstractSet
    from datetime import datetime

    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.history.collections import Collection, Guard
    from icechunk_async.engine.history.protocol import Audit, Expiration, ParentOf, Publication
    from icechunk_async.engine.history.way import HistorySettings
    from icechunk_async.format.config import RepositoryConfig
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.storage import Expected, Storage, Version

    type _Refusal = Callable[[str, SnapshotId, SnapshotId | None], ConflictError]

    from icechunk_async.engine.history.way import Creating
    from icechunk_async.storage import Retrieved

__all__ = ["RefFilesHistory", "SeenRef", "create", "detect"]

_CONCURRENT_REFS: Final = 32
_LAYOUT: Final = BinaryLayout(1)
_MAIN_KEY: Final = branch_key(MAIN)
_NONCE_BYTES: Final = 8
# Some stores percent-encode other characters in keys, and such refs drop out of their listings.
_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class SeenRef:
    """A ref and the version of the object that it was read from."""

    target: SnapshotId
    version: Version


class _SeenRefs(dict[str, SeenRef]):
    """The last seen state of branches, by name; see `Known`."""


_CAPABILITIES: Final = Capabilities(
    "format version 1",
    "Format version 2 has: migrate the repository with icechunk_async.upkeep.upgrade.",
    tag_deletion=True,
    expiration=True,
    upkeep=True,
    sums=True,
    leases=True,
    proposals=True,
)


class RefFilesHistory:
    """A `History` of format 1.

    The last state seen of each branch is kept: a commit tries on top of it without reading first.
    """

    layout = "format-1"
    spec_version = 1
    capabilities = _CAPABILITIES
    storage_needs = SAFE_UPDATES
    migration = None
    state = None

    def __init__(
        self, storage: Storage, assets: Assets, main: SeenRef, settings: HistorySettings
    ) -> None:
        """Read and write the refs of ``storage``; ``main`` was just read or written."""
        self._storage = storage
        self._assets = assets
        self._backoff = settings.backoff
        self._seen = settings.known.part(_SeenRefs)
        self._seen[MAIN] = main
        self._known_notes: dict[str, Collection] = {}
        """The notes of collections that were there at the last commit, by name."""

    async def branches(self) -> dict[str, SnapshotId]:
        """Return every branch and its tip. Cost: a listing, and one request a branch."""
        names = await self._names(BRANCH_PREFIX)
        refs = await bounded_map(self._read_branch, names, limit=_CONCURRENT_REFS)
        found = {name: it.target for name, it in zip(names, refs, strict=True) if it is not None}
        # Every repository has it, so a migration may have removed the refs while they were listed.
        if MAIN not in found:
            await self._check_not_migrated()
        return found

    async def tags(self) -> dict[str, SnapshotId]:
        """Return every tag that was not deleted.

        Cost: a listing, two requests a tag, and another request.
        """
        names = await self._names(TAG_PREFIX)
        targets = await bounded_map(self._read_tag, names, limit=_CONCURRENT_REFS)
        # A migration removes the branch before the tags: where it is, no tag was removed.
        await self._check_main()
        return {
            name: target for name, target in zip(names, targets, strict=True) if target is not None
        }

    async def branch_tip(self, name: str) -> SnapshotId:
        """Return the tip of a branch. Cost: one request."""
        return (await self._branch(name)).target

    async def tip_at(self, name: str, moment_us: int) -> SnapshotId:
        """Return the newest ancestor of a branch from before a time. Cost: as `ancestry`."""
        first: SnapshotInfo | None = None
        async for info in self.ancestry(await self.branch_tip(name)):
            if info.flushed_at <= moment_us:
                return info.id
            first = info
        raise no_snapshot_yet(moment_us, first)

    async def tag_target(self, name: str) -> SnapshotId:
        """Return the snapshot of a tag. Cost: two requests at once."""
        target = await self._read_tag(name)
        if target is None:
            await self._check_not_migrated()
            raise no_tag(name)
        return target

    def last_seen(self, branch: str | None, tag: str | None) -> SnapshotId | None:
        """Return where a branch was when it was last read; None for tags."""
        ref = self._seen.get(branch) if branch is not None and tag is None else None
        return None if ref is None else ref.target

    async def create_branch(self, name: str, snapshot_id: SnapshotId) -> None:
        """Create a branch."""
        _check_name(name)
        await self._assets.snapshot(snapshot_id)
        if await create_object(self._storage, branch_key(name), encode_ref(snapshot_id)) is None:
            raise branch_exists(name)
        # After creating: a migration that listed the refs before does not know this one.
        await self._check_main(created=branch_key(name))

    async def reset_branch(
        self,
        name: str,
        snapshot_id: SnapshotId,
        *,
        expected: SnapshotId | None = None,
        approved: frozenset[str] | None = None,
    ) -> None:
        """Move a branch to another snapshot."""
        del approved  # no branch is protected
        ref, _ = await gather(self._branch(name), self._assets.snapshot(snapshot_id))
        if expected is not None and ref.target != expected:
            raise branch_not_reset(name, expected, ref.target)
        await self._move(name, ref, snapshot_id, branch_not_reset)

    async def delete_branch(self, name: str) -> None:
        """Delete a branch."""
        refuse_main(name)
        self._check_final_deletion(name)
        # To say that it does not exist: deleting an object that is missing is no error.
        await self._branch(name)
        for failure in await self._storage.delete([branch_key(name)]):
            raise failure.error
        self._seen.pop(name, None)

    def _check_final_deletion(self, name: str) -> None:
        """Refuse to delete a branch where a commit at the same time could bring it back."""
        capabilities = self._storage.capabilities
        if not capabilities.final_deletion:
            reason = capabilities.reasons.get("final_deletion", "no reason given")
            raise UnsafeStorageError(
                f"The branch {name!r} was not deleted: a commit to it at this moment could bring "
                f"it back, which nobody would notice ({reason}). Keep the branch, or migrate the "
                "repository to format 2, which deletes no references.",
                branch=name,
            )

    async def create_tag(self, name: str, snapshot_id: SnapshotId) -> None:
        """Create a tag."""
        _check_name(name)
        await self._assets.snapshot(snapshot_id)
        # Not one step with creating. But a tombstone appears only beside a tag, and nobody can have
        # created and deleted it in between without the creation below being refused.
        if await read_if_there(self._storage, tombstone_key(name)) is not None:
            raise tag_was_deleted(name)
        if await create_object(self._storage, tag_key(name), encode_ref(snapshot_id)) is None:
            raise tag_exists(name)
        await self._check_main(created=tag_key(name))

    async def delete_tag(self, name: str) -> None:
        """Delete a tag for good, by creating a tombstone beside it."""
        await self.tag_target(name)
        if await create_object(self._storage, tombstone_key(name), b"") is None:
            raise TagNotFoundError(f"The tag {name!r} was deleted already.", tag=name)

    async def snapshot_info(self, snapshot_id: SnapshotId) -> SnapshotInfo:
        """Return a snapshot's place in history. Cost: one request unless cached."""
        snapshot = await self._assets.snapshot(snapshot_id)
        return SnapshotInfo.of(
            snapshot.id,
            snapshot.parent_id,
            snapshot.flushed_at,
            snapshot.message,
            snapshot.metadata,
        )

    def known_snapshot(self, snapshot_id: SnapshotId) -> SnapshotInfo | None:
        """Return None: it is in a separate file, which may have left the cache."""
        del snapshot_id
        return None

    async def ancestry(self, snapshot_id: SnapshotId) -> AsyncIterator[SnapshotInfo]:
        """Iterate from a snapshot to its root. Cost: one request a snapshot unless cached."""
        seen: set[SnapshotId] = set()
        current: SnapshotId | None = snapshot_id
        child: SnapshotId | None = None
        while current is not None:
            if current in seen:
                raise FormatError(f"The ancestry of snapshot {snapshot_id} forms a circle.")
            seen.add(current)
            try:
                info = await self.snapshot_info(current)
            except SnapshotNotFoundError:
                # The cached child may have been given another parent when this one expired.
                parent = await self._stored_parent(child)
                if parent is None or parent in seen:
                    raise
                current = parent
                continue
            yield info
            child, current = current, info.parent_id

    async def ancestry_pages(self, snapshot_id: SnapshotId) -> AsyncIterator[list[SnapshotInfo]]:
        """Iterate as `ancestry`, one at a time: each costs a request."""
        async for info in self.ancestry(snapshot_id):
            yield [info]

    async def _stored_parent(self, child: SnapshotId | None) -> SnapshotId | None:
        """Return the parent that a snapshot's file names now; None for no snapshot."""
        if child is None:
            return None
        self._assets.forget_snapshot(child)
        return (await self._assets.snapshot(child)).parent_id

    def log_position(self) -> int:
        """Return 0: there is no operations log."""
        return 0

    async def publish(
        self, publication: Publication, store: Callable[[], Awaitable[None]], guard: Guard
    ) -> None:
        """Store a snapshot's files, then move the branch.

        Notes of collections are read after the branch, while the files are stored. A collection
        leaves its note and then renews the branch, so that one which comes later is noticed as a
        branch that changed.
        """

        async def look() -> None:
            await self._look(guard)

        async def store_and_look() -> None:
            # What was noted before the files are stored cannot reach them.
            await guard.admit(list(self._known_notes.values()), 0, stored=False)
            await gather(look(), store())

        match publication:
            case Commit(branch, parent_id, snapshot):
                ref = self._seen.get(branch)
                if ref is None or ref.target != parent_id:
                    ref = await self._branch(branch)
                    if ref.target != parent_id:
                        raise branch_moved(branch, parent_id, ref.target)
                await self._check_sources(publication.sources - {parent_id})
                await store_and_look()
                await self._move(branch, ref, snapshot.id, branch_moved, look)
            case Amend():
                self.capabilities.require("amend")
            case Detach(parent_id):
                await self._check_in_history(parent_id)
                await self._check_sources(publication.sources - {parent_id})
                await store_and_look()
                # No reference is written that would make these files durable.
                await self._storage.sync()

    async def _look(self, guard: Guard) -> None:
        """Read the notes, and have the new ones admitted. Cost: one request."""
        known = self._known_notes
        notes = await read_notes(self._storage)
        self._known_notes = {it.name: it for it in notes}
        await guard.admit([it for it in notes if it.name not in known], 0, stored=True)

    async def _check_in_history(self, snapshot_id: SnapshotId) -> None:
        """Refuse if no ref leads to a snapshot any more: the next collection would delete it.

        What is cached may be older than an expiration by somebody else, so nothing is taken from
        there.
        """
        branches, tags = await gather(self.branches(), self.tags())
        seen: set[SnapshotId] = set()
        for tip in {**branches, **tags}.values():
            current: SnapshotId | None = tip
            while current is not None and current not in seen:
                if current == snapshot_id:
                    return
                seen.add(current)
                current = (await self._assets.read_snapshot(current)).parent_id
        raise no_snapshot(snapshot_id)

    async def _check_sources(self, sources: AbstractSet[SnapshotId]) -> None:
        """Refuse if a snapshot was collected. Cost: one request for each."""
        for source in sorted(sources):
            if not await self._is_stored(source):
                raise source_is_gone(source)

    async def _is_stored(self, snapshot_id: SnapshotId) -> bool:
        """Return whether a snapshot's file exists now; the cache is not asked."""
        try:
            await self._storage.get(snapshot_key(snapshot_id), ByteRange(0, 1))
        except ObjectNotFoundError:
            return False
        return True

    async def load_config(self) -> StoredConfig:
        """Read ``config.yaml``. Cost: one request."""
        from icechunk_async.format.config.codec import decode_config  # noqa: PLC0415 -- on use

        retrieved = await read_if_there(self._storage, CONFIG)
        if retrieved is None:
            return StoredConfig(None, ABSENT)
        return StoredConfig(decode_config(retrieved.data, 1), retrieved.version)

    async def save_config(self, config: RepositoryConfig, replacing: StoredConfig) -> None:
        """Replace ``config.yaml``, keeping a backup of what was there."""
        from icechunk_async.format.config.codec import encode_config  # noqa: PLC0415 -- on use

        data = encode_config(config, 1)
        expected: Expected = replacing.state  # type: ignore[assignment]
        try:
            if expected is not ABSENT:
                await self._storage.copy(
                    CONFIG, backup_key(new_backup_name(CONFIG)), if_version=expected
                )
            await self._storage.put(CONFIG, data, if_version=expected)
        except (PreconditionFailedError, ObjectNotFoundError) as error:
            if await self._holds(CONFIG, data):
                return  # an earlier try of ours landed and its reply was lost
            raise config_changed() from error
        except OutcomeUnknownError as error:
            with Doubt(error):
                if not await self._holds(CONFIG, data):
                    raise

    async def expire(self, rule: Expiration, *, dry_run: bool) -> frozenset[SnapshotId]:
        """Drop old snapshots. Cost: reads all there are, and writes one for each ref."""
        from icechunk_async.engine.history.ref_files import upkeep  # noqa: PLC0415 -- loaded when it is used

        return await upkeep.expire(self, self._storage, self._assets, rule, dry_run=dry_run)

    async def audit(self) -> Audit:
        """Read all refs and the configuration anew, and report what is damaged.

        Cost: a listing, one request for each branch and two for each tag.
        """
        from icechunk_async.engine.history.ref_files.upkeep import audit  # noqa: PLC0415 -- loaded when it is used

        return await audit(self._storage)

    async def reachable(self, parent_of: ParentOf) -> frozenset[SnapshotId]:
        """Return every snapshot that a branch or tag leads to. Cost: reads them all."""
        from icechunk_async.engine.history.ref_files import upkeep  # noqa: PLC0415 -- loaded when it is used

        return await upkeep.reachable(self, self._storage, parent_of)

    async def release(
        self, old: AbstractSet[SnapshotId], parent_of: ParentOf, *, cutoff: datetime | None
    ) -> Kept:
        """Return the snapshots that refs lead to. Cost: reads refs, and snapshots not read yet.

        For a collection, the note comes first. Then every branch is written anew, so that a
        commit that did not see the note fails, and looks again. What landed before that is seen
        here. Two requests a branch.
        """
        del old
        if cutoff is not None:
            await leave_note(self._storage, clock.now_us(), cutoff)
            names = await self._names(BRANCH_PREFIX)
            await bounded_map(self._renew, names, limit=_CONCURRENT_REFS)
        reachable = await self.reachable(parent_of)
        return Kept(reachable, reachable)

    async def _names(self, prefix: str) -> list[str]:
        start = f"{REFS}{prefix}"
        entries = self._storage.list_prefix(start, delimiter="/")
        return [
            entry.prefix[len(start) : -1]
            async for entry in entries
            if isinstance(entry, CommonPrefix)
        ]

    async def _branch(self, name: str) -> SeenRef:
        ref = await self._read_branch(name)
        if ref is None:
            await self._check_not_migrated()
            raise no_branch(name)
        return ref

    async def _check_main(self, *, created: str | None = None) -> None:
        """Raise `ConflictError` if a migration removed the refs; ``created`` is removed, too."""
        if await read_if_there(self._storage, _MAIN_KEY) is None:
            try:
                await self._check_not_migrated()
            except ConflictError:
                for failure in await self._storage.delete([created] if created else []):
                    raise failure.error from None
                raise

    async def _check_not_migrated(self) -> None:
        """Raise `ConflictError` if the repository is one of format 2 by now. Cost: one request."""
        if await read_if_there(self._storage, REPO_INFO) is not None:
            raise migrated_meanwhile()

    async def _read_branch(self, name: str) -> SeenRef | None:
        """Read a branch as of now and remember it; return None if it is gone."""
        retrieved = await read_if_there(self._storage, branch_key(name))
        if retrieved is None:
            self._seen.pop(name, None)
            return None
        ref = self._seen[name] = SeenRef(decode_ref(retrieved.data), retrieved.version)
        return ref

    async def _renew(self, name: str) -> None:
        """Give a branch's file another version, and leave the branch where it is."""
        for attempt in range(1, self._backoff.max_tries + 1):
            ref = await self._read_branch(name)
            if ref is None:
                return
            # Stores that derive versions from contents would see no change in equal bytes.
            data = encode_renewed_ref(ref.target, clock.random_bytes(_NONCE_BYTES))
            try:
                version = await self._storage.put(branch_key(name), data, if_version=ref.version)
            # A commit was first, or the renewal may have landed; either way the branch is read
            # again.
            except (PreconditionFailedError, OutcomeUnknownError):
                await self._backoff.wait(attempt)
            else:
                self._seen[name] = SeenRef(ref.target, version)
                return
        raise ConflictError(
            f"Branch {name!r} moved each of {self._backoff.max_tries} times that garbage "
            "collection was about to read it; nothing was deleted. Try again when fewer writers "
            "are at work.",
            branch=name,
        )

    async def _read_tag(self, name: str) -> SnapshotId | None:
        """Return a tag's snapshot; None if there is no such tag, or a tombstone beside it."""
        found, tombstone = await gather(
            read_if_there(self._storage, tag_key(name)),
            read_if_there(self._storage, tombstone_key(name)),
        )
        return None if found is None or tombstone is not None else decode_ref(found.data)

    async def _holds(self, key: str, data: bytes) -> bool:
        found = await read_if_there(self._storage, key)
        return found is not None and bytes(found.data) == data

    async def _move(
        self,
        branch: str,
        ref: SeenRef,
        target: SnapshotId,
        refusal: _Refusal,
        look: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Compare-and-set a branch from ``ref`` to ``target``.

        ``look`` is awaited before another try, and refuses by raising.
        """
        with Doubt() as doubt:
            for attempt in range(1, self._backoff.max_tries + 1):
                try:
                    version = await self._storage.put(
                        branch_key(branch), encode_ref(target), if_version=ref.version
                    )
                except PreconditionFailedError:
                    pass  # another writer was first, or a reply to us was lost
                except OutcomeUnknownError as error:
                    doubt.begin(error, ref.version)
                else:
                    self._seen[branch] = SeenRef(target, version)
                    return
                # A refusal may be the answer to a repetition of a request of ours that landed; what
                # the branch leads to tells.
                now = await self._read_branch(branch)
                if now is not None and await self._is_ancestor(target, now.target, ref.target):
                    return
                doubt.settle(None if now is None else now.version)
                if now is None:
                    await self._check_not_migrated()
                if now is None or now.target != ref.target:
                    raise refusal(branch, ref.target, None if now is None else now.target)
                ref = now
                if look is not None:
                    await look()
                await self._backoff.wait(attempt)
            raise doubt.error or ConflictError(
                f"Branch {branch!r} was rewritten each of {self._backoff.max_tries} times that "
                "this change was tried; nothing was published. Try again when fewer writers are "
                "at work.",
                branch=branch,
            )

    async def _is_ancestor(self, wanted: SnapshotId, tip: SnapshotId, stop: SnapshotId) -> bool:
        """Return whether ``wanted`` lies between ``tip`` and ``stop``."""
        try:
            async for info in self.ancestry(tip):
                if info.id == wanted:
                    return True
                if info.id == stop:
                    return False
        except SnapshotNotFoundError:
            return False
        return False


def _check_name(name: str) -> None:
    if not _SAFE_NAME.fullmatch(name):
        raise InvalidRefNameError(
            f"{name!r} cannot name a branch or tag in a repository of format version 1: use "
            "letters, digits, '.', '_' and '-', and begin with a letter, a digit or '_'.",
            name=name,
        )


async def detect(storage: Storage) -> Callable[[], Found] | None:
    """Read what decides whether a storage holds a repository of format version 1; see `Way`."""
    if isinstance(storage, BlockingStorage):  # reads hardly wait, and tasks would take longer
        main = await read_if_there(storage, _MAIN_KEY)
        config = None if main is None else await read_if_there(storage, CONFIG)
    else:
        main, config = await gather(
            read_if_there(storage, _MAIN_KEY), read_if_there(storage, CONFIG)
        )
    return None if main is None else partial(_read, main, config)


def _read(main: Retrieved, config: Retrieved | None) -> Found:
    stored = None
    if config is not None:
        from icechunk_async.format.config.codec import decode_config  # noqa: PLC0415 -- on use

        stored = decode_config(config.data, 1)
    return _found(stored, SeenRef(decode_ref(main.data), main.version))


def _found(config: RepositoryConfig | None, main: SeenRef) -> Found:
    return Found(RefFilesHistory.layout, _LAYOUT, config, partial(_open, main))


def _open(
    main: SeenRef, storage: Storage, assets: Assets, settings: HistorySettings
) -> RefFilesHistory:
    return RefFilesHistory(storage, assets, main, settings)


async def create(new: Creating) -> Found:
    """Create a repository of format version 1.

    Raises:
        RepositoryExistsError: another writer was first.
    """
    from icechunk_async.format.config.codec import encode_config  # noqa: PLC0415 -- on use

    await new.assets.put_snapshot(new.snapshot)
    if new.config is not None:
        await _put(new.storage, CONFIG, encode_config(new.config, 1))
    # Last, because it makes the repository: readers that find it find all else.
    version = await _put(new.storage, _MAIN_KEY, encode_ref(new.snapshot.id))
    return _found(new.config, SeenRef(new.snapshot.id, version))


async def _put(storage: Storage, key: str, data: bytes) -> Version:
    version = await create_object(storage, key, data)
    if version is None:
        raise repository_exists(storage, repr(key))
    return version
