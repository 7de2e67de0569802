"""The state that a copy is to show: its references, and the snapshots that they lead to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.files.assets import Assets
from icechunk_async.engine.files.binary_layout import BinaryLayout
from icechunk_async.engine.upkeep.copying.derivation import check_paths, derived_info
from icechunk_async.engine.upkeep.copying.marks import References
from icechunk_async.engine.upkeep.copying.selection import select_history, select_old_history
from icechunk_async.format.envelope import FileType, pack, unpack
from icechunk_async.format.layout import CONFIG, REPO_INFO, branch_key, snapshot_key, tag_key
from icechunk_async.format.refs import encode_ref
from icechunk_async.format.repo_info import SnapshotInfo, encode_repo_info
from icechunk_async.format.snapshot import with_parent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.engine.upkeep.copying.derivation import Derivation
    from icechunk_async.engine.upkeep.copying.selection import OldHistory, Selection
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.storage import Storage

__all__ = ["Plan", "assets_of", "make_plan"]

_LEVEL: Final = 3
_NO_CACHE: Final = 0
_TIPS_AT_ONCE: Final = 16
_NAMED_AT_MOST: Final = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """The state that the destination is to show, and the objects that it needs."""

    references: References
    snapshots: frozenset[SnapshotId] | None = None
    """The source's snapshots to copy; None for those that a listing shows."""
    rewritten: Mapping[str, bytes] | None = None
    """Snapshots that get another parent; format version 1."""
    lines: Mapping[SnapshotId, SnapshotInfo] | None = None
    """Snapshots of the source with the parents that they have in the copy, if they are derived."""


def assets_of(storage: Storage, spec_version: int, *, snapshot_nodes: int = _NO_CACHE) -> Assets:
    """Return the files of a repository; manifests are not cached."""
    return Assets(
        storage,
        BinaryLayout(spec_version),
        compression_level=_LEVEL,
        snapshot_nodes=snapshot_nodes,
        chunk_refs=_NO_CACHE,
    )


async def make_plan(
    assets: Assets, state: References, selection: Selection, derivation: Derivation
) -> Plan:
    """Decide what a copy of a state shows; nothing is written.

    Raises:
        NotFoundError: a selected name is neither a branch nor a tag, or a path is at no tip.
        SnapshotNotFoundError, FormatError: a snapshot is missing, or damaged.
    """
    if state.spec_version == 1:
        return await _plan_old(assets, state, selection, derivation)
    if selection.is_whole and derivation.changes_nothing:
        return Plan(state, frozenset(state.info.snapshots))
    info = select_history(state.info, selection)
    lines = None
    if not derivation.changes_nothing:
        # Of the origin: `derived_info` gives the snapshots other ids.
        lines = info.snapshots
        await _check_paths(assets, derivation, info.branches, info.tags)
        info = derived_info(info, derivation)
    data = pack(encode_repo_info(info), FileType.REPO_INFO, 2, level=_LEVEL)
    chosen = info.snapshots if lines is None else lines
    return Plan(References({REPO_INFO: data}), frozenset(chosen), lines=lines)


async def _check_paths(
    assets: Assets,
    derivation: Derivation,
    branches: Mapping[str, SnapshotId],
    tags: Mapping[str, SnapshotId],
) -> None:
    """Refuse paths that are at none of the tips."""
    if derivation.paths is None:
        return
    names = sorted({*branches, *tags})
    shown = ", ".join(names[:_NAMED_AT_MOST]) + (", ..." if len(names) > _NAMED_AT_MOST else "")
    ids = {*branches.values(), *tags.values()}
    tips = await bounded_map(assets.snapshot, sorted(ids), limit=_TIPS_AT_ONCE)
    check_paths(derivation.paths, tips, shown)


async def _plan_old(
    assets: Assets, state: References, selection: Selection, derivation: Derivation
) -> Plan:
    """Choose a part of a repository of format version 1, whose snapshots name their parents."""
    if selection.is_whole and derivation.changes_nothing:
        return Plan(state)
    branches, tags = state.refs.branches, state.refs.tags
    names = selection.find(branches, tags)
    infos: dict[SnapshotId, SnapshotInfo] = {}
    for (_, name), tip in state.refs.named():
        current: SnapshotId | None = tip if name in names else None
        while current is not None and current not in infos:
            # One after the other: in format 1 each file names the one before it.
            it = await assets.read_snapshot(current)
            infos[current] = SnapshotInfo(it.id, it.parent_id, it.flushed_at, it.message)
            current = it.parent_id
    chosen = select_old_history(branches, tags, infos, selection)
    if derivation.changes_nothing:
        objects = _ref_objects(chosen.branches, chosen.tags)
        if CONFIG in state.objects:
            objects[CONFIG] = state.objects[CONFIG]
        rewritten = await _with_parents(assets, chosen)
        return Plan(References(objects), chosen.snapshots, rewritten)
    await _check_paths(assets, derivation, chosen.branches, chosen.tags)
    lines = {
        it: replace(infos[it], parent_id=chosen.parents.get(it, infos[it].parent_id))
        for it in chosen.snapshots
    }

    def renamed(refs: Mapping[str, SnapshotId]) -> dict[str, SnapshotId]:
        return {name: derivation.named(tip, lines) for name, tip in refs.items()}

    objects = _ref_objects(renamed(chosen.branches), renamed(chosen.tags))
    config = derivation.config(state.objects.get(CONFIG), 1)
    if config is not None:
        objects[CONFIG] = config
    return Plan(References(objects), chosen.snapshots, lines=lines)


def _ref_objects(
    branches: Mapping[str, SnapshotId], tags: Mapping[str, SnapshotId]
) -> dict[str, bytes]:
    objects = {branch_key(name): encode_ref(tip) for name, tip in branches.items()}
    return objects | {tag_key(name): encode_ref(tip) for name, tip in tags.items()}


async def _with_parents(assets: Assets, chosen: OldHistory) -> dict[str, bytes]:
    """Return the files of snapshots that get another parent, by key."""
    rewritten: dict[str, bytes] = {}
    for snapshot_id, parent_id in chosen.parents.items():
        key = snapshot_key(snapshot_id)
        # Only the parent changes in its bytes, as in an expiration; all else stays as it was
        # written.
        payload = unpack((await assets.storage.get(key)).data, FileType.SNAPSHOT).payload
        rewritten[key] = assets.pack(with_parent(payload, parent_id), FileType.SNAPSHOT)
    return rewritten
