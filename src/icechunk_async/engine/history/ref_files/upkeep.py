"""Expiration, reachability and audit, where ancestry is in the snapshots themselves (spec 1)."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.history.outcomes import read_if_there
from icechunk_async.engine.history.protocol import MAIN, Audit, Fault
from icechunk_async.errors import (
    ConflictError,
    FormatError,
    IcechunkError,
    NotFoundError,
    RepositoryNotFoundError,
)
from icechunk_async.format.config.codec import decode_config
from icechunk_async.format.envelope import FileType, unpack
from icechunk_async.format.layout import CONFIG, REFS, REPO_INFO, branch_key, snapshot_key
from icechunk_async.format.refs import decode_ref
from icechunk_async.format.repo_info import SnapshotInfo
from icechunk_async.format.snapshot import with_parent
from icechunk_async.storage import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.history.protocol import Expiration, History, ParentOf
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.storage import Storage

__all__ = ["Cut", "audit", "cut_history", "expire", "line_of", "reachable"]

_AT_ONCE: Final = 32
_FILE: Final = "/ref.json"
_TOMBSTONE: Final = f"{_FILE}.deleted"
"""Beside the file of a deleted tag, which stays: the name is never used again."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The changes that expiration makes to a history."""

    parents: Mapping[SnapshotId, SnapshotId]
    """Snapshots that get another parent."""
    released: frozenset[SnapshotId]
    """Snapshots that left some history, and old tips that became children of the root: the official
    engine reports both."""


def cut_history(
    tips: Iterable[SnapshotId],
    infos: Mapping[SnapshotId, SnapshotInfo],
    older_than_us: int,
    keep: frozenset[SnapshotId] = frozenset(),
) -> Cut:
    """Decide how to shorten the histories of refs.

    In each the oldest snapshot that is not old, or the tip where all are, becomes a child of the
    root.

    Args:
        tips: where branches and tags point, in the order in which they are looked at.
        infos: all that the tips lead to.
        older_than_us: what is old.
        keep: what counts as recent whatever its age.
    """
    parents: dict[SnapshotId, SnapshotId] = {}
    released: set[SnapshotId] = set()
    for tip in tips:
        line = list(line_of(tip, infos, parents))
        root = line[-1]
        recent = [it for it in line if it in keep or infos[it].flushed_at >= older_than_us]
        last = recent[-1] if recent else tip
        between = line[line.index(last) + 1 : -1]
        if between:
            parents[last] = root
            # As the official engine counts.
            released.update(between if recent else [tip, *between])
    return Cut(parents, frozenset(released))


def line_of(
    tip: SnapshotId,
    infos: Mapping[SnapshotId, SnapshotInfo],
    parents: Mapping[SnapshotId, SnapshotId],
) -> Iterable[SnapshotId]:
    """Iterate from a snapshot to its root, by other parents where some are given.

    Raises:
        FormatError: the parents form a circle.
    """
    current: SnapshotId | None = tip
    # A line without a circle has no more than all snapshots; stored parents may form one.
    for _ in range(len(infos)):
        if current is None:
            return
        yield current
        current = parents.get(current, infos[current].parent_id)
    if current is not None:
        raise FormatError(f"The ancestry of snapshot {tip} forms a circle.")


async def expire(
    history: History, storage: Storage, assets: Assets, rule: Expiration, *, dry_run: bool
) -> frozenset[SnapshotId]:
    """Shorten histories by rewriting snapshots, then delete refs whose tip is old.

    In this order, so that if it ends early the history is right, only longer than asked for.
    """
    tags, branches = await _read_refs(history, storage)
    tips = [names[name] for names in (tags, branches) for name in sorted(names)]
    infos: dict[SnapshotId, SnapshotInfo] = {}

    async def parent_of(snapshot_id: SnapshotId) -> SnapshotId | None:
        it = await assets.read_snapshot(snapshot_id)
        infos[it.id] = SnapshotInfo(it.id, it.parent_id, it.flushed_at, it.message)
        return it.parent_id

    await _walk(tips, parent_of)
    cut = cut_history(tips, infos, rule.older_than_us, rule.keep)
    if dry_run:
        return cut.released

    async def move(entry: tuple[SnapshotId, SnapshotId]) -> None:
        await _give_parent(storage, assets, *entry)

    await bounded_map(move, cut.parents.items(), limit=_AT_ONCE)
    # First the shortened history, then the refs: without the sync a power cut could keep the
    # deletions alone.
    await storage.sync()
    if rule.delete_tags:
        for name in _old_refs(tags, infos, rule):
            await _delete_tag(history, name)
    if rule.delete_branches:
        for name in _old_refs(branches, infos, rule):
            if name != MAIN:
                await _delete_branch(history, name, branches[name])
    return cut.released


def _old_refs(
    refs: Mapping[str, SnapshotId], infos: Mapping[SnapshotId, SnapshotInfo], rule: Expiration
) -> list[str]:
    return [
        name
        for name, tip in sorted(refs.items())
        if infos[tip].flushed_at < rule.older_than_us and tip not in rule.keep
    ]


async def _give_parent(
    storage: Storage, assets: Assets, snapshot_id: SnapshotId, parent_id: SnapshotId
) -> None:
    """Rewrite a snapshot with another parent.

    Concurrent expirations write the same parent, the root, so no condition is needed.
    """
    key = snapshot_key(snapshot_id)
    # The stored bytes, of which only the parent is replaced: fields that this library does not know
    # stay.
    payload = unpack((await storage.get(key)).data, FileType.SNAPSHOT).payload
    try:
        await storage.put(key, assets.pack(with_parent(payload, parent_id), FileType.SNAPSHOT))
    finally:
        assets.forget_snapshot(snapshot_id)


async def _delete_tag(history: History, name: str) -> None:
    with suppress(NotFoundError):  # it was deleted meanwhile
        await history.delete_tag(name)


async def _delete_branch(history: History, name: str, tip: SnapshotId) -> None:
    """Delete a branch unless it moved; a commit between the look and the deletion is lost."""
    with suppress(NotFoundError):  # it was deleted meanwhile
        if await history.branch_tip(name) == tip:
            await history.delete_branch(name)


async def _walk(tips: Iterable[SnapshotId], parent_of: ParentOf) -> set[SnapshotId]:
    """Return every snapshot that tips lead to; each is read once."""
    seen: set[SnapshotId] = set()

    async def follow(tip: SnapshotId) -> None:
        current: SnapshotId | None = tip
        while current is not None and current not in seen:
            # Before the request, so that tips which share history do not both read it.
            seen.add(current)
            current = await parent_of(current)

    await bounded_map(follow, tips, limit=_AT_ONCE)
    return seen


async def reachable(
    history: History, storage: Storage, parent_of: ParentOf
) -> frozenset[SnapshotId]:
    """Return every snapshot that a branch or tag leads to."""
    tags, branches = await _read_refs(history, storage)
    return frozenset(await _walk({*tags.values(), *branches.values()}, parent_of))


async def _read_refs(
    history: History, storage: Storage
) -> tuple[Mapping[str, SnapshotId], Mapping[str, SnapshotId]]:
    """Return tags and branches, if they still are all that the repository needs.

    A migration makes the repo info before it removes a ref, and a handle that was
    opened before must not take what the migrated repository needs for garbage. So look for the
    repo info after reading the refs.

    Raises:
        ConflictError: the repository was migrated.
        RepositoryNotFoundError: it has no ``main``.
    """
    tags, branches = await gather(history.tags(), history.branches())
    if await read_if_there(storage, REPO_INFO) is not None:
        raise ConflictError(
            "The repository is being migrated to format version 2, or was since it was opened "
            "here, and its old branches and tags no longer say what it needs. Nothing was "
            "changed; open the repository again."
        )
    if MAIN not in branches:
        raise RepositoryNotFoundError(
            f"The repository at {storage.description.url!r} was removed since it was opened here: "
            f"its branch {MAIN!r} is gone. Nothing was changed."
        )
    return tags, branches


async def audit(storage: Storage) -> Audit:
    """Read every ref; see `History.audit`."""
    keys = [entry.key async for entry in storage.list_prefix(REFS) if isinstance(entry, ObjectInfo)]
    deleted = {key.removesuffix(".deleted") for key in keys if key.endswith(_TOMBSTONE)}
    refs: dict[str, SnapshotId] = {}
    faults: list[Fault] = []

    async def read(key: str) -> None:
        retrieved = await read_if_there(storage, key)
        if retrieved is None:  # it was deleted since it was listed
            return
        try:
            refs[key.removeprefix(REFS).removesuffix(_FILE)] = decode_ref(retrieved.data)
        except FormatError as error:
            faults.append(Fault("ref", key, "unreadable", f"{key!r}: {error}"))

    wanted = [key for key in keys if key.endswith(_FILE) and key not in deleted]
    await bounded_map(read, wanted, limit=_AT_ONCE)
    if branch_key(MAIN) not in keys:
        detail = f"{branch_key(MAIN)!r} is missing, and every repository has it."
        faults.append(Fault("ref", branch_key(MAIN), "missing", detail))
    config = await read_if_there(storage, CONFIG)
    try:
        if config is not None:
            decode_config(config.data, 1)
    except IcechunkError as error:
        faults.append(Fault("config", CONFIG, "unreadable", f"{CONFIG!r}: {error}"))
    return Audit(refs, None, tuple(sorted(faults, key=lambda it: it.key)))
