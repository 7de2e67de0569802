"""The history of the alpha: branches are numbered files, and ancestry is in the snapshots."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async.engine.history.alpha.branches import (
    AlphaRefs,
    Seen,
    SeenEntries,
    check_name,
    is_open,
)
from icechunk_async.engine.history.alpha.layout import ALPHA_LAYOUT
from icechunk_async.engine.history.numbers import Numbered
from icechunk_async.engine.history.outcomes import create_object, read_if_there
from icechunk_async.engine.history.protocol import (
    MAIN,
    SAFE_CREATIONS,
    Amend,
    Audit,
    Capabilities,
    Commit,
    Detach,
    Fault,
    StoredConfig,
)
from icechunk_async.engine.history.refusals import (
    being_migrated,
    branch_exists,
    branch_moved,
    branch_not_reset,
    config_changed,
    migrated_meanwhile,
    no_branch,
    no_snapshot_yet,
    no_tag,
    refuse_main,
    repository_exists,
    tag_exists,
)
from icechunk_async.engine.history.way import Found, Way
from icechunk_async.errors import ConflictError, FormatError
from icechunk_async.format.alpha.references import (
    ATTRIBUTES,
    CHUNKS,
    CONFIGS,
    MANIFESTS,
    REFS,
    SNAPSHOTS,
    BranchState,
    RefData,
    branch_prefix,
    decode_ref,
    encode_ref,
    tag_key,
)
from icechunk_async.format.config.codec import decode_config, encode_config
from icechunk_async.format.layout import REPO_INFO
from icechunk_async.format.repo_info import SnapshotInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from collections.abc import Set as AbstractSet
    from datetime import datetime

    from icechunk_async._runtime.backoff import Backoff
    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.history.collections import Guard
    from icechunk_async.engine.history.protocol import Expiration, Kept, ParentOf, Publication
    from icechunk_async.engine.history.way import Creating, HistorySettings
    from icechunk_async.format.config import RepositoryConfig
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.storage import Storage

__all__ = ["ALPHA_WAY", "AlphaHistory"]

_NAME: Final = "alpha"
_FOLDERS: Final = (f"{CHUNKS}/", MANIFESTS, ATTRIBUTES, SNAPSHOTS, CONFIGS, REFS)
"""The references last: they show that there was a repository."""
_CAPABILITIES: Final = Capabilities(
    "the alpha layout",
    "Format version 2 has: migrate the repository with icechunk_async.upkeep.upgrade.",
)
_CONFIG_SUFFIX: Final = ".yaml"
_MAX_AHEAD: Final = 32
"""Ancestors that are read at the same time."""


class AlphaHistory:
    """A `History` of the alpha."""

    layout = _NAME
    spec_version = 0
    capabilities = _CAPABILITIES
    storage_needs = SAFE_CREATIONS
    state = None

    def __init__(
        self, storage: Storage, assets: Assets, main: Seen, settings: HistorySettings
    ) -> None:
        """Read and write the references of ``storage``; ``main`` was just read or written."""
        self._storage = storage
        self._assets = assets
        self._backoff = settings.backoff
        self._refs = AlphaRefs(storage, settings.known.part(SeenEntries))
        known = self._refs.seen.get(MAIN)
        if known is not None and known.number >= main.number and known != main:
            self._refs.seen.clear()  # of a repository that was removed and created anew, perhaps
        self._refs.seen[MAIN] = main
        self.migration = _Migration(self._refs, settings.backoff)

    async def branches(self) -> dict[str, SnapshotId]:
        """Return every branch and its tip. Cost: see `AlphaRefs.branches`."""
        found = await self._refs.branches()
        return {name: it.ref.snapshot_id for name, it in found.items() if is_open(it)}

    async def tags(self) -> dict[str, SnapshotId]:
        """Return every tag. Cost: a listing, and one request a tag."""
        return {name: it.snapshot_id for name, it in (await self._refs.tags()).items()}

    async def branch_tip(self, name: str) -> SnapshotId:
        """Return the tip of a branch. Cost: one request, and one more if it moved."""
        return (await self._branch(name)).ref.snapshot_id

    async def tip_at(self, name: str, moment_us: int) -> SnapshotId:
        """Return where a branch was at a time, by its numbered files.

        Cost: some requests; their number grows with the logarithm of that of the entries since.
        """
        newest = await self._branch(name)
        later = newest.number + 1  # the oldest known to be later than the time
        step = 1
        number = newest.number
        ref = newest.ref
        # First backwards in steps of 1, 2, 4 and so on, then by halves in between: who asks for a
        # time of yesterday does not read the entries of years. Times ascend, see `_append`.
        while ref.timestamp_us > moment_us:
            if number == 0:
                return await self._ancestor_at(ref.snapshot_id, moment_us)
            later, number = number, max(0, number - step)
            step *= 2
            ref = await self._refs.entry(name, number)
        while later - number > 1:
            middle = (number + later) // 2
            found = await self._refs.entry(name, middle)
            if found.timestamp_us > moment_us:
                later = middle
            else:
                number, ref = middle, found
        if ref.state is BranchState.DELETED:
            raise no_snapshot_yet(moment_us, None)
        return ref.snapshot_id

    async def _ancestor_at(self, tip: SnapshotId, moment_us: int) -> SnapshotId:
        """Return the newest ancestor from before a time: the branch was created later."""
        first: SnapshotInfo | None = None
        async for info in self.ancestry(tip):
            if info.flushed_at <= moment_us:
                return info.id
            first = info
        raise no_snapshot_yet(moment_us, first)

    async def tag_target(self, name: str) -> SnapshotId:
        """Return the snapshot of a tag. Cost: one request."""
        found = await self._refs.tag(name)
        if found is None:
            raise no_tag(name)
        return found.snapshot_id

    def last_seen(self, branch: str | None, tag: str | None) -> SnapshotId | None:
        """Return where a branch was when it was last read; None for tags."""
        seen = self._refs.seen.get(branch) if branch is not None and tag is None else None
        return None if seen is None else seen.ref.snapshot_id

    async def create_branch(self, name: str, snapshot_id: SnapshotId) -> None:
        """Create a branch, in place of a deleted one if there was one of its name."""
        check_name(name)
        _, newest = await gather(self._assets.snapshot(snapshot_id), self._refs.newest(name))
        if is_open(newest):
            raise branch_exists(name)
        if not await self._append(name, newest, snapshot_id, clock.now_us()):
            raise branch_exists(name)
        await self._check_not_missed(f"the branch {name!r}")

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
        seen, _ = await gather(self._branch(name), self._assets.snapshot(snapshot_id))
        if expected is not None and seen.ref.snapshot_id != expected:
            raise branch_not_reset(name, expected, seen.ref.snapshot_id)
        self._check_open(seen)
        if not await self._append(name, seen, snapshot_id, clock.now_us()):
            now = await self._branch(name)
            raise branch_not_reset(name, seen.ref.snapshot_id, now.ref.snapshot_id)

    async def delete_branch(self, name: str) -> None:
        """Delete a branch, by an entry that says so; its files stay.

        A commit at the same time either comes before and is deleted with it, or is refused.
        """
        refuse_main(name)
        for attempt in range(1, self._backoff.max_tries + 1):
            seen = await self._branch(name)
            self._check_open(seen)
            if await self._append(
                name, seen, seen.ref.snapshot_id, clock.now_us(), BranchState.DELETED
            ):
                return
            await self._backoff.wait(attempt)
        raise ConflictError(
            f"Branch {name!r} moved each of {self._backoff.max_tries} times that it was to be "
            "deleted; nothing was deleted. Try again when fewer writers are at work.",
            branch=name,
        )

    async def create_tag(self, name: str, snapshot_id: SnapshotId) -> None:
        """Create a tag."""
        check_name(name)
        await self._assets.snapshot(snapshot_id)
        data = encode_ref(RefData(snapshot_id, clock.now_us()))
        if await create_object(self._storage, tag_key(name), data) is None:
            raise tag_exists(name)
        await self._check_not_missed(f"the tag {name!r}")

    async def delete_tag(self, name: str) -> None:
        """Refuse: tags of the alpha are never deleted."""
        del name
        self.capabilities.require("tag_deletion")

    async def snapshot_info(self, snapshot_id: SnapshotId) -> SnapshotInfo:
        """Return a snapshot's place in history. Cost: one request unless cached."""
        it = await self._assets.snapshot(snapshot_id)
        return SnapshotInfo.of(it.id, it.parent_id, it.flushed_at, it.message, it.metadata)

    def known_snapshot(self, snapshot_id: SnapshotId) -> SnapshotInfo | None:
        """Return None: it is in a separate file, which may have left the cache."""
        del snapshot_id
        return None

    async def ancestry_pages(self, snapshot_id: SnapshotId) -> AsyncIterator[list[SnapshotInfo]]:
        """Iterate as `ancestry`, one at a time: each costs a request."""
        async for info in self.ancestry(snapshot_id):
            yield [info]

    async def ancestry(self, snapshot_id: SnapshotId) -> AsyncIterator[SnapshotInfo]:
        """Iterate from a snapshot to its root.

        Cost: one request a snapshot unless cached. More and more are read at the same time, as the
        snapshots list their ancestors.
        """
        seen: set[SnapshotId] = set()
        wanted, ahead = [snapshot_id], 1
        while wanted:
            for info in await bounded_map(self.snapshot_info, wanted, limit=_MAX_AHEAD):
                if info.id in seen:
                    raise FormatError(f"The ancestry of snapshot {snapshot_id} forms a circle.")
                seen.add(info.id)
                yield info
            last = await self._assets.snapshot(wanted[-1])
            # Doubled each round: who looks at the newest few pays for few, and a long walk is not
            # one request after the other.
            ahead = min(2 * ahead, _MAX_AHEAD)
            wanted = [it.id for it in last.ancestors[:ahead]]

    def log_position(self) -> int:
        """Return 0: there is no operations log."""
        return 0

    async def publish(
        self, publication: Publication, store: Callable[[], Awaitable[None]], guard: Guard
    ) -> None:
        """Store a snapshot's files, then add the next entry of the branch's sequence.

        No garbage is ever collected in this layout, so the guard is not asked.
        """
        del guard
        match publication:
            case Commit(branch, parent_id, snapshot):
                seen = self._refs.seen.get(branch)
                if seen is None or seen.ref.snapshot_id != parent_id:
                    seen = await self._branch(branch)
                    if seen.ref.snapshot_id != parent_id:
                        raise branch_moved(branch, parent_id, seen.ref.snapshot_id)
                self._check_open(seen)
                # Everything that the entry leads to is stored before it: a reader may follow it at
                # once.
                await store()
                await self._move(branch, seen, snapshot.id, snapshot.flushed_at)
            case Amend():
                self.capabilities.require("amend")
            case Detach():
                await store()
                await self._storage.sync()

    async def _move(self, branch: str, seen: Seen, target: SnapshotId, moment_us: int) -> None:
        """Move a branch from where it was seen to a new snapshot."""
        parent_id = seen.ref.snapshot_id
        for attempt in range(1, self._backoff.max_tries + 1):
            if await self._append(branch, seen, target, moment_us):
                return
            now = await self._refs.newest(branch)
            tip = now.ref.snapshot_id if now is not None and is_open(now) else None
            if now is None or tip != parent_id:
                await self._check_not_migrated()
                raise branch_moved(branch, parent_id, tip)
            self._check_open(now)
            # A branch that was reset to where it is, or a migration that was undone: nobody's
            # changes are in between.
            seen = now  # another entry for the same snapshot
            await self._backoff.wait(attempt)
        raise ConflictError(
            f"Branch {branch!r} was written each of {self._backoff.max_tries} times that this "
            "change was tried; nothing was published. Try again when fewer writers are at work.",
            branch=branch,
        )

    async def load_config(self) -> StoredConfig:
        """Read the newest configuration. Cost: two requests."""
        return await _load_config(self._storage)

    async def save_config(self, config: RepositoryConfig, replacing: StoredConfig) -> None:
        """Store a configuration as the next number of its sequence."""
        number = replacing.state
        assert number is None or isinstance(number, int)
        after = -1 if number is None else number
        data = encode_config(config, 1)
        if not await _configs(self._storage).append(after + 1, data, self._backoff):
            raise config_changed()
        await self._check_not_missed("the configuration")

    async def expire(self, rule: Expiration, *, dry_run: bool) -> frozenset[SnapshotId]:
        """Refuse: snapshots name their ancestors, and never change."""
        del rule, dry_run
        self.capabilities.require("expiration")
        return frozenset()

    async def audit(self) -> Audit:
        """Read all references anew, and report what is damaged.

        Cost: a listing for each branch; one request for each branch and tag.
        """
        return await audit(self._storage)

    async def reachable(self, parent_of: ParentOf) -> frozenset[SnapshotId]:
        """Refuse: no garbage is collected in this layout."""
        del parent_of
        self.capabilities.require("upkeep")
        return frozenset()

    async def release(
        self, old: AbstractSet[SnapshotId], parent_of: ParentOf, *, cutoff: datetime | None
    ) -> Kept:
        """Refuse: no garbage is collected in this layout."""
        del old, parent_of, cutoff
        self.capabilities.require("upkeep")
        raise AssertionError("the layout has no upkeep")

    async def _branch(self, name: str) -> Seen:
        """Return the newest entry of a branch that was not deleted."""
        seen = await self._refs.newest(name)
        if seen is None or not is_open(seen):
            raise no_branch(name)
        return seen

    async def _append(
        self,
        branch: str,
        after: Seen | None,
        target: SnapshotId,
        moment_us: int,
        state: BranchState = BranchState.OPEN,
    ) -> bool:
        """Add an entry after one that was seen; its time is later than that one's."""
        number = None if after is None else after.number
        earliest = 0 if after is None else after.ref.timestamp_us + 1
        ref = RefData(target, max(moment_us, earliest), state)
        return await self._refs.append(branch, number, ref, self._backoff)

    def _check_open(self, seen: Seen) -> None:
        """Refuse to add to a branch that a migration closed."""
        if seen.ref.state is BranchState.MIGRATED:
            raise being_migrated()

    async def _check_not_missed(self, what: str) -> None:
        """Raise `ConflictError` if a migration may have read too early what was just written.

        It freezes ``main`` before it reads for the last time. Cost: one request, and one more if
        the branch moved.
        """
        try:
            main = await self._refs.newest(MAIN)
        # A migration deletes the numbered files once its repo info is in force.
        except FormatError:  # perhaps its files are being deleted
            main = None
        if main is not None and main.ref.state is not BranchState.MIGRATED:
            return
        await self._check_not_migrated()
        raise ConflictError(
            f"The repository is being migrated to format version 2, and {what} was written too "
            "late to be certain to be part of it. Open the repository again when the migration "
            "has ended, and look."
        )

    async def _check_not_migrated(self) -> None:
        """Raise `ConflictError` if the repository is one of format 2 by now. Cost: one request."""
        if await read_if_there(self._storage, REPO_INFO) is not None:
            raise migrated_meanwhile()


class _Migration:
    """Freezes branches by an entry that says so."""

    folders = _FOLDERS

    def __init__(self, refs: AlphaRefs, backoff: Backoff) -> None:
        self._refs = refs
        self._backoff = backoff

    async def is_frozen(self) -> bool:
        main = await self._refs.newest(MAIN)
        return main is not None and main.ref.state is BranchState.MIGRATED

    async def freeze(self) -> None:
        await self._set(BranchState.OPEN, BranchState.MIGRATED)

    async def thaw(self) -> None:
        await self._set(BranchState.MIGRATED, BranchState.OPEN)

    async def _set(self, before: BranchState, after: BranchState) -> None:
        """Give every branch in one state another; again if others are first."""
        for attempt in range(1, self._backoff.max_tries + 1):
            found = await self._refs.branches()
            left = {name: it for name, it in found.items() if it.ref.state is before}
            if not left:
                return
            for name, it in left.items():
                moment_us = max(clock.now_us(), it.ref.timestamp_us + 1)
                ref = RefData(it.ref.snapshot_id, moment_us, after)
                await self._refs.append(name, it.number, ref, self._backoff)
            await self._backoff.wait(attempt)
        raise ConflictError(
            f"Branches moved each of {self._backoff.max_tries} times that they were to be frozen "
            "for a migration. Stop all writers and call upgrade again."
        )


async def audit(storage: Storage) -> Audit:
    """Read every reference of the alpha; see `History.audit`."""
    refs = AlphaRefs(storage)
    found: dict[str, SnapshotId] = {}
    faults: list[Fault] = []
    names = await refs.names()
    for name, is_branch in names:
        key = branch_prefix(name) if is_branch else tag_key(name)
        try:
            if is_branch:
                await _check_numbers(refs.numbered(name))
                seen = await refs.newest(name)
                if seen is not None and is_open(seen):
                    found[f"branch.{name}"] = seen.ref.snapshot_id
            else:
                tag = await refs.tag(name)
                if tag is not None:
                    found[f"tag.{name}"] = tag.snapshot_id
        except FormatError as error:
            faults.append(Fault("ref", key, "unreadable", f"{key!r}: {error}"))
    if (MAIN, True) not in names:
        detail = f"{branch_prefix(MAIN)!r} is missing, and every repository has it."
        faults.append(Fault("ref", branch_prefix(MAIN), "missing", detail))
    return Audit(found, None, tuple(faults))


async def _check_numbers(numbered: Numbered) -> None:
    """Raise FormatError if a sequence does not go down to 0 without a gap."""
    newer: int | None = None
    async for number in numbered.numbers():
        if newer is not None:
            numbered.check_follows(newer, number)
        newer = number
    if newer:
        numbered.check_follows(newer, None)


def _configs(storage: Storage) -> Numbered:
    return Numbered(storage, CONFIGS, _CONFIG_SUFFIX)


async def _load_config(storage: Storage) -> StoredConfig:
    configs = _configs(storage)
    number = await configs.newest()
    retrieved = None if number is None else await configs.read(number)
    return StoredConfig(None if retrieved is None else decode_config(retrieved.data, 1), number)


async def _detect(storage: Storage) -> Callable[[], Found] | None:
    if not storage.capabilities.listing:
        # Web servers cannot list; the later formats open from fixed keys.
        return None  # the newest number of a branch is found in a listing
    newest = await AlphaRefs(storage).numbered(MAIN).newest()
    if newest is None:
        return None
    retrieved, config = await gather(
        AlphaRefs(storage).numbered(MAIN).read(newest), _load_config(storage)
    )
    if retrieved is None:
        return None
    return lambda: _found(config.config, Seen(newest, decode_ref(retrieved.data)))


def _found(config: RepositoryConfig | None, main: Seen) -> Found:
    return Found(_NAME, ALPHA_LAYOUT, config, partial(_open, main))


def _open(main: Seen, storage: Storage, assets: Assets, settings: HistorySettings) -> AlphaHistory:
    return AlphaHistory(storage, assets, main, settings)


async def _create(new: Creating) -> Found:
    # Before the entry, which makes the repository: readers that find it find all else.
    await new.assets.put_snapshot(new.snapshot)
    configs = _configs(new.storage)
    if new.config is not None:
        data = encode_config(new.config, 1)
        if await create_object(new.storage, configs.key(0), data) is None:
            raise repository_exists(new.storage, repr(configs.key(0)))
    ref = RefData(new.snapshot.id, new.snapshot.flushed_at)
    key = AlphaRefs(new.storage).numbered(MAIN).key(0)
    if await create_object(new.storage, key, encode_ref(ref)) is None:
        raise repository_exists(new.storage, repr(key))
    return _found(new.config, Seen(0, ref))


ALPHA_WAY: Final = Way(
    _NAME, 0, lambda: ALPHA_LAYOUT, SAFE_CREATIONS, branch_prefix(MAIN), _detect, _create, _FOLDERS
)
