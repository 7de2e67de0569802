"""Spec 1: one small object a branch or tag; ancestry is in the snapshots themselves.

A branch moves by compare-and-set of its object (spec 1, "References").
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async.engine.history.doubt import Doubt
from icechunk_async.engine.history.protocol import (
    Amend,
    Commit,
    Detach,
    Kept,
    StoredConfig,
    unsupported_by_spec_1,
)
from icechunk_async.engine.history.ref_files import upkeep as spec1_upkeep
from icechunk_async.engine.history.repo_info import edits
from icechunk_async.errors import (
    BranchNotFoundError,
    ConflictError,
    FormatError,
    InvalidRefNameError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    SnapshotNotFoundError,
    TagNotFoundError,
)
from icechunk_async.format.config import decode_config, encode_config
from icechunk_async.format.layout import (
    BRANCH_PREFIX,
    CONFIG,
    REFS,
    TAG_PREFIX,
    backup_key,
    branch_key,
    new_backup_name,
    snapshot_key,
    tag_key,
    tombstone_key,
)
from icechunk_async.format.refs import decode_ref, encode_ref
from icechunk_async.format.repo_info import SnapshotInfo
from icechunk_async.storage import ABSENT, ByteRange, CommonPrefix

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from collections.abc import Set as AbstractSet

    from icechunk_async._runtime.backoff import Backoff
    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.history.protocol import Expiration, ParentOf, Publication
    from icechunk_async.engine.history.repo_info.edits import Edit
    from icechunk_async.format.config import RepositoryConfig
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.operations_log import Update
    from icechunk_async.format.repo_info import RepoInfo
    from icechunk_async.storage import Expected, Storage, Version

    type _Refusal = Callable[[str, SnapshotId, SnapshotId | None], ConflictError]

__all__ = ["RefFilesHistory", "SeenRef"]

_CONCURRENT_REFS: Final = 32
# Some stores percent-encode other characters in keys, and such refs drop out of their listings.
_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class SeenRef:
    """A ref and the version of the object that it was read from."""

    target: SnapshotId
    version: Version


class RefFilesHistory:
    """A :class:`~icechunk_async.engine.history.History` of spec 1.

    The last state seen of each branch is remembered: a commit tries on top of it without
    reading first.
    """

    spec_version = 1

    def __init__(
        self, storage: Storage, assets: Assets, main: SeenRef, *, backoff: Backoff
    ) -> None:
        """Read and write the refs of ``storage``; ``main`` was just read or written."""
        self._storage = storage
        self._assets = assets
        self._backoff = backoff
        self._seen = {edits.MAIN: main}

    async def branches(self) -> dict[str, SnapshotId]:
        """Return every branch and its tip. Cost: a listing, and one request a branch."""
        names = await self._names(BRANCH_PREFIX)
        refs = await bounded_map(self._read_branch, names, limit=_CONCURRENT_REFS)
        return {name: ref.target for name, ref in zip(names, refs, strict=True) if ref is not None}

    async def tags(self) -> dict[str, SnapshotId]:
        """Return every tag that was not deleted. Cost: a listing, and two requests a tag."""
        names = await self._names(TAG_PREFIX)
        targets = await bounded_map(self._read_tag, names, limit=_CONCURRENT_REFS)
        return {
            name: target for name, target in zip(names, targets, strict=True) if target is not None
        }

    async def branch_tip(self, name: str) -> SnapshotId:
        """Return the tip of a branch. Cost: one request."""
        return (await self._branch(name)).target

    async def tag_target(self, name: str) -> SnapshotId:
        """Return the snapshot of a tag. Cost: two requests at once."""
        target = await self._read_tag(name)
        if target is None:
            raise TagNotFoundError(f"There is no tag {name!r}, or it was deleted.", tag=name)
        return target

    def last_seen(self, branch: str | None, tag: str | None) -> SnapshotId | None:
        """Return where a branch was when it was last read; tags are not remembered."""
        ref = self._seen.get(branch) if branch is not None and tag is None else None
        return None if ref is None else ref.target

    async def check_writable(self) -> None:
        """Do nothing: spec 1 has no repository status."""

    async def check_moves_allowed(self) -> None:
        """Refuse: spec 1 has no place for moves."""
        raise unsupported_by_spec_1("moves of nodes")

    async def check_feature(self, name: str) -> None:
        """Do nothing: spec 1 has no feature flags."""

    async def repo_info(self) -> RepoInfo:
        """Refuse: spec 1 has no repo info."""
        raise unsupported_by_spec_1("repository metadata, status or feature flags")

    async def change(self, edit: Edit, *, despite_status: bool = False) -> None:
        """Refuse: spec 1 has no repo info."""
        del edit, despite_status
        await self.repo_info()

    async def create_branch(self, name: str, snapshot_id: SnapshotId) -> None:
        """Create a branch."""
        _check_name(name)
        await self._assets.snapshot(snapshot_id)
        if not await self._create(branch_key(name), encode_ref(snapshot_id)):
            raise edits.branch_exists(name)

    async def reset_branch(
        self, name: str, snapshot_id: SnapshotId, *, expected: SnapshotId | None = None
    ) -> None:
        """Move a branch to another snapshot."""
        ref, _ = await gather(self._branch(name), self._assets.snapshot(snapshot_id))
        if expected is not None and ref.target != expected:
            raise edits.not_reset(name, expected, ref.target)
        await self._move(name, ref, snapshot_id, edits.not_reset)

    async def delete_branch(self, name: str) -> None:
        """Delete a branch."""
        edits.refuse_main(name)
        await self._branch(name)
        for failure in await self._storage.delete([branch_key(name)]):
            raise failure.error
        self._seen.pop(name, None)

    async def create_tag(self, name: str, snapshot_id: SnapshotId) -> None:
        """Create a tag."""
        _check_name(name)
        await self._assets.snapshot(snapshot_id)
        if await self._exists(tombstone_key(name)):
            raise edits.tag_was_deleted(name)
        if not await self._create(tag_key(name), encode_ref(snapshot_id)):
            raise edits.tag_exists(name)

    async def delete_tag(self, name: str) -> None:
        """Delete a tag for good: a tombstone is put beside it."""
        await self.tag_target(name)
        if not await self._create(tombstone_key(name), b""):
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
                # The child that we remember may have got another parent when this one expired.
                parent = await self._stored_parent(child)
                if parent is None or parent in seen:
                    raise
                current = parent
                continue
            yield info
            child, current = current, info.parent_id

    async def _stored_parent(self, child: SnapshotId | None) -> SnapshotId | None:
        """Return the parent that a snapshot's file names now; None if there is no telling."""
        if child is None:
            return None
        self._assets.forget_snapshot(child)
        return (await self._assets.snapshot(child)).parent_id

    async def publish(self, publication: Publication, store: Callable[[], Awaitable[None]]) -> None:
        """Store a snapshot's files, then move the branch."""
        match publication:
            case Commit(branch, parent_id, snapshot):
                ref = self._seen.get(branch)
                if ref is None or ref.target != parent_id:
                    ref = await self._branch(branch)
                    if ref.target != parent_id:
                        raise edits.moved(branch, parent_id, ref.target)
                await self._check_sources(publication.sources - {parent_id})
                await store()
                await self._move(branch, ref, snapshot.id, edits.moved)
            case Amend():
                raise unsupported_by_spec_1("amendments of commits")
            case Detach(parent_id):
                if not await self._is_stored(parent_id):
                    raise edits.unknown_snapshot(parent_id)
                await self._check_sources(publication.sources - {parent_id})
                await store()
                await self._storage.sync()

    async def _check_sources(self, sources: AbstractSet[SnapshotId]) -> None:
        """Refuse if a snapshot was collected. Cost: a request for each."""
        for source in sorted(sources):
            if not await self._is_stored(source):
                raise edits.source_is_gone(source)

    async def _is_stored(self, snapshot_id: SnapshotId) -> bool:
        """Return whether a snapshot's file is there now, whatever is cached."""
        try:
            await self._storage.get(snapshot_key(snapshot_id), ByteRange(0, 1))
        except ObjectNotFoundError:
            return False
        return True

    def operations(self) -> AsyncIterator[Update]:
        """Refuse: spec 1 keeps no operations log."""
        raise unsupported_by_spec_1("operations log")

    async def load_config(self) -> StoredConfig:
        """Read ``config.yaml``. Cost: one request."""
        try:
            retrieved = await self._storage.get(CONFIG)
        except ObjectNotFoundError:
            return StoredConfig(None, ABSENT)
        return StoredConfig(decode_config(retrieved.data, 1), retrieved.version)

    async def save_config(self, config: RepositoryConfig, replacing: StoredConfig) -> None:
        """Replace ``config.yaml``, keeping a backup of what was there."""
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
                return  # an earlier try of ours landed without an answer
            raise edits.config_changed() from error
        except OutcomeUnknownError as error:
            with Doubt(error):
                if not await self._holds(CONFIG, data):
                    raise

    async def expire(self, rule: Expiration, *, dry_run: bool) -> frozenset[SnapshotId]:
        """Drop old snapshots. Cost: reads all there are, and writes one for each ref."""
        return await spec1_upkeep.expire(self, self._storage, self._assets, rule, dry_run=dry_run)

    async def reachable(self, parent_of: ParentOf) -> frozenset[SnapshotId]:
        """Return every snapshot that a branch or tag leads to. Cost: reads them all."""
        return await spec1_upkeep.reachable(self, self._storage, parent_of)

    async def release(
        self, old: AbstractSet[SnapshotId], parent_of: ParentOf, *, dry_run: bool
    ) -> Kept:
        """Return what refs lead to. Cost: reads all refs, and of snapshots what is new."""
        del old, dry_run
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
            raise BranchNotFoundError(f"There is no branch {name!r}.", branch=name)
        return ref

    async def _read_branch(self, name: str) -> SeenRef | None:
        """Read a branch as of now and remember it."""
        try:
            retrieved = await self._storage.get(branch_key(name))
        except ObjectNotFoundError:
            self._seen.pop(name, None)
            return None
        ref = self._seen[name] = SeenRef(decode_ref(retrieved.data), retrieved.version)
        return ref

    async def _read_tag(self, name: str) -> SnapshotId | None:
        """Return a tag's target; a tombstone hides it."""
        found, deleted = await gather(self._read(tag_key(name)), self._exists(tombstone_key(name)))
        return None if found is None or deleted else decode_ref(found)

    async def _read(self, key: str) -> bytes | memoryview | None:
        try:
            return (await self._storage.get(key)).data
        except ObjectNotFoundError:
            return None

    async def _exists(self, key: str) -> bool:
        return await self._read(key) is not None

    async def _holds(self, key: str, data: bytes) -> bool:
        found = await self._read(key)
        return found is not None and bytes(found) == data

    async def _create(self, key: str, data: bytes) -> bool:
        """Create an object; answer whether it was not there before.

        A lost answer is settled by reading back: what we find there, if it is what we wrote,
        is what the caller asked for.
        """
        try:
            await self._storage.put(key, data, if_version=ABSENT)
        except PreconditionFailedError:
            return False
        except OutcomeUnknownError as error:
            with Doubt(error):
                if not await self._holds(key, data):
                    raise
        return True

    async def _move(self, branch: str, ref: SeenRef, target: SnapshotId, refusal: _Refusal) -> None:
        """Compare-and-set a branch from ``ref`` to ``target``."""
        with Doubt() as doubt:
            for attempt in range(1, self._backoff.max_tries + 1):
                try:
                    version = await self._storage.put(
                        branch_key(branch), encode_ref(target), if_version=ref.version
                    )
                except PreconditionFailedError:
                    pass  # somebody else was first, or an answer of ours was lost
                except OutcomeUnknownError as error:
                    doubt.begin(error, ref.version)
                else:
                    self._seen[branch] = SeenRef(target, version)
                    return
                now = await self._read_branch(branch)
                if now is not None and await self._is_ancestor(target, now.target, ref.target):
                    return
                doubt.settle(None if now is None else now.version)
                if now is None or now.target != ref.target:
                    raise refusal(branch, ref.target, None if now is None else now.target)
                ref = now
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
