"""Rewriting every manifest of a snapshot, split by the rules in force."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import no_progress
from icechunk_async.engine.changes.change_set import ChangeSet, WorkingTree
from icechunk_async.engine.commit.flush import (
    Flusher,
    count_cells,
    plan_cells,
    put_digests,
    root_of,
    with_digests,
    within,
)
from icechunk_async.engine.commit.guard import RewriteGuard
from icechunk_async.engine.commit.once import repeated
from icechunk_async.engine.commit.shared import MOST_REFS, length_for_appends
from icechunk_async.engine.history import Amend, Commit, check_online, check_unprotected
from icechunk_async.errors import (
    InvalidInputError,
    OutcomeUnknownError,
    SessionStateError,
    StorageUnavailableError,
)
from icechunk_async.format.config import (
    ManifestConfig,
    ManifestSplitCondition,
    ManifestSplitDimCondition,
    ManifestSplittingConfig,
    RepositoryConfig,
)
from icechunk_async.format.config.codec import splitting_to_json
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.snapshot import Snapshot
from icechunk_async.format.transaction_log import TransactionLog

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from typing import Literal

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.changes.splitting import CellPlan
    from icechunk_async.engine.commit.flush import Flushed
    from icechunk_async.engine.history import Publication
    from icechunk_async.engine.open import Engine
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.snapshot import ManifestRef

__all__ = [
    "RewritePlan",
    "Rewriting",
    "begin_rewriting",
    "nothing_published",
    "plan_rewriting",
    "publish_rewritten",
    "rewrite_manifests",
    "split_appends",
]

_METHODS: Final = ("new_commit", "amend")
_RESERVED: Final = "__icechunk"


@dataclass(frozen=True, slots=True)
class Rewriting:
    """A rewrite in progress: the state that its end must agree with."""

    branch: str
    base: Snapshot
    """The tip of the branch, whose manifests are rewritten."""
    log: TransactionLog | None
    """The tip's log if the new snapshot replaces the tip; otherwise None."""
    guard: RewriteGuard
    """Notices collections that may delete the new manifests."""


@dataclass(frozen=True, slots=True)
class RewritePlan:
    """The manifests of a branch before and after a rewrite."""

    snapshot_id: SnapshotId
    """The tip of the branch."""
    arrays: int
    """Arrays whose references would be divided among manifests in another way."""
    manifests: int
    """Manifests of the tip."""
    manifests_after: int
    """Manifests afterwards, at most: a part without references needs none, and small arrays share.

    The present number if no array changes."""


async def plan_rewriting(engine: Engine, branch: str) -> RewritePlan:
    """Compare the manifests of a branch's tip with the rules in force.

    Raises:
        BranchNotFoundError: there is no such branch.

    Cost: reads the tip's snapshot, and no manifest.
    """
    base = await engine.assets.snapshot(await engine.history.branch_tip(branch))
    # Small arrays share manifests. Whether such a one is as the rules want it does not show in
    # boxes.
    uses = Counter(
        ref.manifest_id
        for node in base.nodes.values()
        if node.array is not None
        for ref in node.array.manifests
    )
    splitting = engine.manifest_options.splitting
    arrays = after = 0
    for node in base.nodes.values():
        if node.array is None:
            continue
        old = node.array.manifests
        infos = (base.manifests.get(it.manifest_id) for it in old if uses[it.manifest_id] > 1)
        # More than a commit would put together: an array in it grew since.
        shared = any(it is not None and it.num_chunk_refs > MOST_REFS for it in infos)
        cells = plan_cells(node, splitting)
        if shared or cells is None or not _is_split(old, cells):
            arrays += 1
        after += count_cells(node, base, splitting) if cells is None else len(cells)
    return RewritePlan(base.id, arrays, len(uses), after if arrays else len(uses))


def _is_split(old: Sequence[ManifestRef], cells: Sequence[CellPlan]) -> bool:
    """Return whether each of the old manifests is the only one of a cell, and within it."""
    return len(cells) == len(old) and all(
        len(it.sources) == 1 and (not it.box or within(it.sources[0].extents, it.box))
        for it in cells
    )


async def begin_rewriting(
    engine: Engine, branch: str, commit_method: Literal["new_commit", "amend"]
) -> Rewriting:
    """Check that a rewrite is allowed, and load its base; nothing is stored."""
    if commit_method not in _METHODS:
        raise InvalidInputError(
            f"{commit_method!r} is not a way to commit; use 'new_commit' or 'amend'."
        )
    engine.check_safe()
    history, assets = engine.history, engine.assets
    if commit_method == "amend":
        history.capabilities.require("amend")
    base = await assets.snapshot(await history.branch_tip(branch))
    # After the tip was read, which is when the history is known.
    check_online(history)
    check_unprotected(history, branch)
    log = await _amended_log(engine, base) if commit_method == "amend" else None
    return Rewriting(branch, base, log, await RewriteGuard.begin(history, engine.storage))


async def publish_rewritten(
    engine: Engine,
    begun: Rewriting,
    flushed: Flushed,
    message: str,
    metadata: Mapping[str, JSON],
) -> SnapshotId:
    """Publish a snapshot with manifests that are all stored."""
    assets, base = engine.assets, begun.base
    if assets.keeps_sums:
        flushed = await with_digests(assets, flushed, await assets.digests.load(base.id))
    snapshot = Snapshot(
        SnapshotId.random(assets.layout.id_bytes),
        base.id,
        max(clock.now_us(), base.flushed_at + 1),  # a clock that lags must not stop anyone
        message,
        {
            **_properties({**repeated(base), **metadata}, engine.manifest_options.splitting),
            **root_of(flushed),
        },
        flushed.nodes,
        flushed.files,
    )
    # On condition that the branch is where it was: a rewrite that lost the race holds manifests
    # without the other commit's chunks.
    publication: Publication = Commit(begun.branch, base.id, snapshot)
    if begun.log is not None:
        publication = Amend(begun.branch, base.id, snapshot)
    new_log = replace(begun.log or TransactionLog(snapshot.id), id=snapshot.id)

    async def store() -> None:
        with nothing_published():
            await gather(
                assets.put_snapshot(snapshot),
                assets.put_transaction_log(new_log),
                *put_digests(assets, snapshot.id, flushed),
            )

    await engine.history.publish(publication, store, begun.guard)
    return snapshot.id


async def rewrite_manifests(
    engine: Engine,
    message: str,
    *,
    branch: str,
    metadata: Mapping[str, JSON],
    commit_method: Literal["new_commit", "amend"],
    progress: ProgressCallback | None,
) -> SnapshotId:
    """Publish a snapshot like a branch's tip, but with new manifests, and return its id.

    See `Repository.rewrite_manifests`.
    """
    begun = await begin_rewriting(engine, branch, commit_method)
    flusher = Flusher(engine.assets, engine.manifest_options)
    with nothing_published():
        tree = WorkingTree(begun.base.nodes, ChangeSet())
        flushed = await flusher.rewrite(begun.base, tree, progress or no_progress)
    return await publish_rewritten(engine, begun, flushed, message, metadata)


@contextmanager
def nothing_published() -> Generator[None]:
    """Turn a lost reply about a file that nothing refers to yet into an ordinary failure."""
    try:
        yield
    except OutcomeUnknownError as error:
        raise StorageUnavailableError(
            f"A file of the new snapshot may not be stored: {error} Nothing was published; try "
            "again."
        ) from error


async def _amended_log(engine: Engine, base: Snapshot) -> TransactionLog:
    """Return the log of the tip, which the new snapshot takes over, since it touches nothing."""
    info = await engine.history.snapshot_info(base.id)
    if info.parent_id is None:
        raise SessionStateError(
            f"Snapshot {base.id} is the first of its repository and cannot be amended. Use "
            "commit_method='new_commit'.",
            code="no-amend-for-initial-commit",
        )
    log = await engine.assets.transaction_log(base.id)
    if log.moves:
        raise SessionStateError(
            f"Snapshot {base.id} moved nodes, and the official engine folds nothing into moves. "
            "Use commit_method='new_commit'."
        )
    return log


def _properties(
    metadata: Mapping[str, JSON], splitting: ManifestSplittingConfig | None
) -> dict[str, JSON]:
    """Return the properties of the commit, the rules of splitting among them."""
    rules: dict[str, Any] = {
        "splitting_config": splitting_to_json(splitting or ManifestSplittingConfig())
    }
    reserved: Any = metadata.get(_RESERVED)
    return {**metadata, _RESERVED: {**(reserved if isinstance(reserved, dict) else {}), **rules}}


async def split_appends(engine: Engine, dimension: str, branch: str) -> int:
    """Store a rule that splits manifests along a dimension; return the chunks of each."""
    engine.check_safe()
    snapshot = await engine.load(branch)
    arrays = (node.array for node in snapshot.nodes.values() if node.array is not None)
    length = length_for_appends(arrays, dimension)
    if length is None:
        raise InvalidInputError(
            f"No array on branch {branch!r} has a dimension {dimension!r}. Give a name from the "
            "arrays' dimension_names."
        )
    stored = await engine.history.load_config()
    config = _with_rule(stored.config or RepositoryConfig(), dimension, length)
    if config != stored.config:
        await engine.history.save_config(config, stored)
    return length


def _with_rule(config: RepositoryConfig, dimension: str, length: int) -> RepositoryConfig:
    """Return a configuration that splits all arrays along a dimension, in place of other rules."""
    everywhere = ManifestSplitCondition.any_array()
    axis = ManifestSplitDimCondition.DimensionName(f"^{re.escape(dimension)}$")
    manifest = config.manifest or ManifestConfig()
    rules = manifest.splitting.split_sizes if manifest.splitting is not None else None
    # The first rule that fits an axis counts, so those for other axes stay in force.
    others = [
        it for it in rules or () if it[0] != everywhere or [dim for dim, _ in it[1]] != [axis]
    ]
    splitting = ManifestSplittingConfig(((everywhere, ((axis, length),)), *others))
    return replace(config, manifest=replace(manifest, splitting=splitting))
