"""Migration from format 1: read its refs, close them, and plan the repo info (spec, "Migration").

A branch is closed by replacing its file, in one atomic step, by contents that name no snapshot. A
writer that tries to move the branch afterwards fails, and one that moved it before is noticed.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import field, replace
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.backoff import Backoff
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import Progress, no_progress
from icechunk_async.engine.files.manifests import check_id
from icechunk_async.engine.history.outcomes import read_if_there
from icechunk_async.engine.history.protocol import MAIN
from icechunk_async.errors import (
    ConflictError,
    FormatError,
    IcechunkError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    SnapshotNotFoundError,
)
from icechunk_async.format.envelope import FileType, unpack
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.layout import (
    BRANCH_PREFIX,
    REFS,
    TAG_PREFIX,
    branch_key,
    snapshot_key,
    tag_key,
    tombstone_key,
)
from icechunk_async.format.operations_log import (
    Availability,
    BranchCreated,
    NewCommit,
    RepoInitialized,
    RepoMigrated,
    RepoStatus,
    TagCreated,
    TagDeleted,
    Update,
)
from icechunk_async.format.refs import (
    decode_closed_ref,
    decode_ref,
    encode_closed_ref,
    encode_ref,
)
from icechunk_async.format.repo_info import RepoInfo, SnapshotInfo
from icechunk_async.format.snapshot import decode_snapshot
from icechunk_async.storage import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.format.operations_log import UpdateDetail
    from icechunk_async.storage import Retrieved, Storage, Version

__all__ = [
    "OldBranch",
    "OldRefs",
    "RefFiles",
    "close_branches",
    "finished",
    "is_under_way",
    "known_snapshots",
    "load_infos",
    "migrated",
    "open_branches",
    "read_refs",
    "same_refs",
    "swap",
]


_CONCURRENT_SNAPSHOTS: Final = 64
_SNAPSHOTS: Final = "snapshots/"


async def load_infos(
    storage: Storage, tips: Iterable[SnapshotId], progress: ProgressCallback = no_progress
) -> dict[SnapshotId, SnapshotInfo]:
    """Return every snapshot that can be read, among them all that ``tips`` reach.

    Raises:
        SnapshotNotFoundError: one that they reach is missing.
        FormatError: one that they reach is damaged.

    Cost: one request for each snapshot, many at a time; following parents would be sequential.
    """
    entries = storage.list_prefix(_SNAPSHOTS)
    found = [_id_of(entry.key) async for entry in entries if isinstance(entry, ObjectInfo)]
    ids = [snapshot_id for snapshot_id in found if snapshot_id is not None]
    infos: dict[SnapshotId, SnapshotInfo] = {}
    done = 0

    async def load(snapshot_id: SnapshotId) -> None:
        nonlocal done
        with suppress(IcechunkError):  # maybe no ref needs it; if one does, it is read again below
            infos[snapshot_id] = await _load(storage, snapshot_id)
        done += 1
        progress(Progress("reading snapshots", done, len(ids)))

    await bounded_map(load, ids, limit=_CONCURRENT_SNAPSHOTS)
    walked: set[SnapshotId] = set()
    for tip in tips:
        current: SnapshotId | None = tip
        while current is not None and current not in walked:
            walked.add(current)
            if current not in infos:
                infos[current] = await _load(storage, current)
            current = infos[current].parent_id
    return infos


def _id_of(key: str) -> SnapshotId | None:
    try:
        return SnapshotId.parse(key.removeprefix(_SNAPSHOTS))
    except IcechunkError:
        return None


async def _load(storage: Storage, snapshot_id: SnapshotId) -> SnapshotInfo:
    try:
        retrieved = await storage.get(snapshot_key(snapshot_id))
    except ObjectNotFoundError as error:
        raise SnapshotNotFoundError(
            f"A branch or tag needs snapshot {snapshot_id}, which is missing, so the repository "
            "cannot be migrated. Delete the branch or tag, or restore the snapshot.",
            snapshot_id=str(snapshot_id),
        ) from error
    it = decode_snapshot(unpack(retrieved.data, FileType.SNAPSHOT))
    check_id(snapshot_key(snapshot_id), it.id, snapshot_id)
    return SnapshotInfo.of(it.id, it.parent_id, it.flushed_at, it.message, it.metadata)


_UNDER_WAY: Final = (
    "The repository is being migrated from format version 1. If no migration is running, one was "
    "interrupted: call icechunk_async.upkeep.upgrade again."
)
_REF_DELAY_US: Final = 1000
"""Assumed time from a snapshot to the creation of a ref to it, and from that to its deletion."""


@dataclass(frozen=True, slots=True)
class OldRefs:
    """The branches and tags of format 1."""

    branches: Mapping[str, SnapshotId]
    tags: Mapping[str, SnapshotId]
    """Without deleted ones."""
    deleted_tags: Mapping[str, SnapshotId | None]
    """With the snapshots that they named, if those are known."""


def migrated(
    refs: OldRefs,
    infos: Mapping[SnapshotId, SnapshotInfo],
    raw_config: bytes | None,
    now_us: int,
) -> RepoInfo:
    """Return the repo info of a repository under migration; it is read-only.

    Args:
        refs: all refs.
        infos: at least the snapshots that they reach.
        raw_config: the configuration in its new form.
        now_us: microseconds since the epoch.
    """
    tips = {**refs.branches, **refs.tags}.values()
    reached = {info.id: info for tip in tips for info in _ancestry(infos, tip)}
    # The first snapshot is the one without a parent: before 1.0 it had a random id.
    *_, root = _ancestry(infos, refs.branches[MAIN])
    log = _synthetic_log(refs, infos, reached)
    # Each entry must be later than the one before it (spec, "Operations log"), whatever this
    # machine's clock says.
    newest = max(now_us, log[0].updated_at + 1)
    return RepoInfo(
        branches=refs.branches,
        tags=refs.tags,
        deleted_tags=frozenset(refs.deleted_tags),
        snapshots=reached,
        status=RepoStatus(Availability.READ_ONLY, root.flushed_at, _UNDER_WAY),
        updates=(Update(RepoMigrated(1, 2), newest), *log),
        raw_config=raw_config,
    )


def is_under_way(info: RepoInfo) -> bool:
    """Return whether a migration wrote this and has not finished."""
    read_only = info.status.availability is Availability.READ_ONLY
    return read_only and any(isinstance(it.detail, RepoMigrated) for it in info.updates[:1])


def finished(info: RepoInfo) -> RepoInfo:
    """Return the repo info of a completed migration, which allows changes."""
    return replace(info, status=RepoStatus(Availability.ONLINE, info.status.set_at))


def same_refs(info: RepoInfo, refs: OldRefs) -> bool:
    """Return whether the old refs are still those that were migrated."""
    return (
        info.branches == refs.branches
        and info.tags == refs.tags
        and info.deleted_tags == frozenset(refs.deleted_tags)
    )


def known_snapshots(updates: list[Update], info: RepoInfo) -> set[SnapshotId]:
    """Return every snapshot that is or was part of a migrated repository."""
    details = [update.detail for update in updates]
    ids = (getattr(detail, "new_snapshot_id", None) for detail in details)
    return {*info.snapshots, *(it for it in ids if it is not None)}


def _ancestry(infos: Mapping[SnapshotId, SnapshotInfo], tip: SnapshotId) -> Iterator[SnapshotInfo]:
    seen: set[SnapshotId] = set()
    current: SnapshotId | None = tip
    while current is not None:
        if current in seen:
            raise FormatError(f"The ancestry of snapshot {tip} forms a circle.")
        seen.add(current)
        info = infos[current]
        yield info
        current = info.parent_id


def _synthetic_log(
    refs: OldRefs,
    infos: Mapping[SnapshotId, SnapshotInfo],
    reached: Mapping[SnapshotId, SnapshotInfo],
) -> list[Update]:
    """Return an operations log that could have led to these refs, newest first."""
    events: list[tuple[int, UpdateDetail]] = []
    attributed: set[SnapshotId] = set()
    root_us = 0
    for branch in sorted(refs.branches, key=lambda name: (name != MAIN, name)):
        line = list(_ancestry(infos, refs.branches[branch]))
        if branch == MAIN:
            root_us = line[-1].flushed_at
            events.append((root_us, RepoInitialized()))
            attributed.add(line[-1].id)
        else:
            events.append((line[0].flushed_at + _REF_DELAY_US, BranchCreated(branch)))
        for info in reversed(line):
            if info.id not in attributed:
                attributed.add(info.id)
                events.append((info.flushed_at, NewCommit(branch, info.id)))
    for tag, target in sorted(refs.tags.items()):
        events.append((reached[target].flushed_at + _REF_DELAY_US, TagCreated(tag)))
    for tag, gone in sorted(refs.deleted_tags.items(), key=lambda item: item[0]):
        # A tombstone has no contents. Only a tag's own file, which other engines may have removed,
        # says what it named.
        if gone is not None:
            since_us = reached[gone].flushed_at if gone in reached else root_us
            events.append((since_us + _REF_DELAY_US, TagCreated(tag)))
            events.append((since_us + 2 * _REF_DELAY_US, TagDeleted(tag, gone)))
    log: list[Update] = []
    last_us = 0
    for moment_us, detail in sorted(events, key=lambda event: event[0]):
        # Commits of version 1 may have equal times, entries of the log may not.
        last_us = max(moment_us, last_us + 1)
        log.append(Update(detail, last_us))
    return log[::-1]


_CONCURRENT_REFS: Final = 32
_SWAP: Final = Backoff(max_tries=10, initial_ms=50, max_ms=5000)


@dataclass(frozen=True, slots=True)
class OldBranch:
    """A branch file, and the version of the object that it was read from."""

    target: SnapshotId
    version: Version
    closed: bool


@dataclass(frozen=True, slots=True)
class RefFiles:
    """All objects below ``refs/`` at one moment."""

    branches: Mapping[str, OldBranch] = field(default_factory=dict[str, OldBranch])
    tags: Mapping[str, SnapshotId] = field(default_factory=dict[str, "SnapshotId"])
    deleted_tags: Mapping[str, SnapshotId | None] = field(
        default_factory=dict[str, "SnapshotId | None"]
    )
    keys: tuple[str, ...] = ()

    @property
    def refs(self) -> OldRefs:
        """Where branches and tags are, closed or not."""
        targets = {name: branch.target for name, branch in self.branches.items()}
        return OldRefs(targets, self.tags, self.deleted_tags)

    @property
    def any_closed(self) -> bool:
        """Whether a migration closed a branch."""
        return any(branch.closed for branch in self.branches.values())


async def read_refs(storage: Storage) -> RefFiles:
    """Read every ref file. Cost: a listing, and one request for each ref."""
    entries = storage.list_prefix(REFS)
    keys = tuple([entry.key async for entry in entries if isinstance(entry, ObjectInfo)])
    present = set(keys)
    branches = _names(keys, BRANCH_PREFIX)
    tags = _names(keys, TAG_PREFIX)
    # A branch that moves after it was read is noticed when it is closed, by its version.
    found = await bounded_map(
        lambda key: read_if_there(storage, key),
        [*map(branch_key, branches), *map(tag_key, tags)],
        limit=_CONCURRENT_REFS,
    )
    files = found[: len(branches)]
    old = {
        name: _branch(file) for name, file in zip(branches, files, strict=True) if file is not None
    }
    targets = {
        name: None if file is None else decode_ref(file.data)
        for name, file in zip(tags, found[len(branches) :], strict=True)
    }
    # A deleted tag keeps its file; the tombstone beside it decides, and blocks the name (spec,
    # "Tags").
    deleted = {name for name in tags if tombstone_key(name) in present}
    return RefFiles(
        old,
        {name: it for name, it in targets.items() if it is not None and name not in deleted},
        {name: targets[name] for name in sorted(deleted)},
        keys,
    )


def _names(keys: tuple[str, ...], prefix: str) -> list[str]:
    start = f"{REFS}{prefix}"
    return sorted({key[len(start) :].partition("/")[0] for key in keys if key.startswith(start)})


def _branch(file: Retrieved) -> OldBranch:
    closed = decode_closed_ref(file.data)
    target = decode_ref(file.data) if closed is None else closed
    return OldBranch(target, file.version, closed is not None)


async def close_branches(storage: Storage, files: RefFiles) -> None:
    """Close every branch where it was read, ``main`` first.

    Raises:
        ConflictError: a branch was moved or deleted since; those before it are closed.
    """
    # Without a readable ``main`` engines of version 1 cannot open the repository, so no further
    # writers come while the others are closed.
    for name, branch in sorted(files.branches.items(), key=lambda item: (item[0] != MAIN, item)):
        if not branch.closed:
            data = encode_closed_ref(branch.target)
            await swap(storage, branch_key(name), data, branch.version)


async def open_branches(storage: Storage, files: RefFiles) -> None:
    """Open every branch that is closed, where it was.

    Raises:
        ConflictError: another migration is at work on them.
    """
    for name, branch in files.branches.items():
        if branch.closed:
            await swap(storage, branch_key(name), encode_ref(branch.target), branch.version)


async def swap(storage: Storage, key: str, data: bytes, version: Version) -> Version:
    """Replace an object that must still be at ``version``; lost replies are settled.

    Raises:
        ConflictError: it is at another version, with other contents.
        OutcomeUnknownError: the storage never answered.
    """
    doubt: OutcomeUnknownError | None = None
    for attempt in range(1, _SWAP.max_tries + 1):
        try:
            return await storage.put(key, data, if_version=version)
        except PreconditionFailedError:
            # Refused, so this try did not land; whether an earlier one did, the contents tell.
            doubt = None
        except OutcomeUnknownError as error:
            doubt = error
        found = await read_if_there(storage, key)
        # The refusal may be of our second request, after the reply to the first was lost.
        if found is not None and bytes(found.data) == data:
            return found.version
        if found is None or found.version != version:
            state = "is gone" if found is None else "was changed"
            raise ConflictError(f"{key!r} {state}: another process is writing to the repository.")
        await _SWAP.wait(attempt)
    raise doubt or ConflictError(f"{key!r} could not be replaced: others keep writing it.")
