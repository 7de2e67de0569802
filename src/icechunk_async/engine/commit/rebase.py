"""Replay a session's changes on top of newer commits; a solver settles conflicts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from itertools import batched, takewhile
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime import telemetry
from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async.engine.changes.change_set import WorkingTree
from icechunk_async.engine.changes.detect import clears, detect_conflicts
from icechunk_async.engine.commit.conflicts import (
    Clash,
    ConflictKind,
    Preparation,
    PreparingSolver,
    Resolution,
    Side,
    check_solver,
)
from icechunk_async.engine.history.diff import load_logs
from icechunk_async.engine.tree.workspace import Workspace
from icechunk_async.errors import (
    ConflictError,
    InvalidInputError,
    RebaseFailedError,
    SnapshotNotFoundError,
)
from icechunk_async.format.zarr_document import parse_document, same_chunk_format

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from icechunk_async.engine.changes.change_set import ChangeSet, Deleted
    from icechunk_async.engine.commit.conflicts import (
        Answer,
        ChunkAnswers,
        Conflict,
        ConflictSolver,
        Settled,
        TouchedBy,
    )
    from icechunk_async.engine.history import History
    from icechunk_async.format.ids import NodeId, SnapshotId
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.format.transaction_log import TransactionLog

__all__ = ["Settlement", "commits_after", "describe", "rebase", "without_settled"]


_CONCURRENT_CHUNKS: Final = 16
_ABOUT_METADATA: Final = frozenset(
    {
        ConflictKind.ZARR_METADATA_DOUBLE_UPDATE,
        ConflictKind.CHUNKS_UPDATED_IN_UPDATED_ARRAY,
    }
)
# Where our side can stand whatever the other did: a chunk is written whole, and what is deleted has
# no contents.
_ALWAYS_OURS: Final = frozenset(
    {
        ConflictKind.CHUNK_DOUBLE_UPDATE,
        ConflictKind.DELETE_OF_UPDATED_ARRAY,
        ConflictKind.DELETE_OF_UPDATED_GROUP,
    }
)


class Settlement:
    """Settles the conflicts of changes with another snapshot that they are to be made on."""

    def __init__(
        self,
        home: Workspace,
        changes: ChangeSet,
        theirs: Snapshot,
        *,
        ours: Snapshot | None = None,
        who: Callable[[Conflict], Awaitable[TouchedBy]] | None = None,
    ) -> None:
        """Change ``changes`` so that ``theirs`` can stand.

        Args:
            home: stands on the snapshot that both sides began with.
            changes: a copy of those of ``home``, or those of another snapshot.
            theirs: the other snapshot.
            ours: the snapshot whose changes they are; None: they are of ``home``, unpublished.
            who: returns the commits behind a conflict, see `Clash.commits`.
        """
        self._home = home
        self._changes = changes
        self._theirs = theirs
        self._snapshot = ours
        self._who = who

    async def settle(self, log: TransactionLog, solver: ConflictSolver) -> None:
        """Let a solver decide every conflict with the nodes and chunks that a log lists.

        Raises:
            RebaseFailedError: one is not settled.
            InvalidInputError: the solver returned something invalid.
        """
        settled = await self.prepare(solver)
        ours = WorkingTree(self._home.base.nodes, self._changes)
        conflicts = without_settled(detect_conflicts(ours, log, self._theirs), settled)
        unsolved = await self.decide(conflicts, log, solver)
        if unsolved:
            raise RebaseFailedError(
                f"The session's changes clash with commit {log.id}: {describe(unsolved)}. "
                "Nothing was published and no change was lost. Choose a solver that decides "
                "these, or begin a new session and make the changes again.",
                snapshot_id=str(log.id),
                conflicts=conflicts,
            )

    async def prepare(self, solver: ConflictSolver) -> Settled:
        """Let a solver bring changes together before conflicts are looked for."""
        # Optional, so that a solver needs only `solve`.
        if not isinstance(solver, PreparingSolver):
            return {}
        base, snapshot = self._home.base, self._snapshot
        # A copy, because the solver edits the changes themselves, and must see both before and
        # after.
        ours = self._reading(base, self._changes.copy())
        return await solver.prepare(
            Preparation(
                self._reading(base),
                ours if snapshot is None else self._reading(snapshot),
                self._reading(self._theirs),
                self._changes,
                self._home.store_bytes,
            )
        )

    async def decide(
        self, conflicts: Sequence[Conflict], log: TransactionLog, solver: ConflictSolver
    ) -> list[Conflict]:
        """Let a solver decide conflicts, and return those that it does not settle.

        Raises:
            InvalidInputError: the solver returned something invalid.
        """
        if not conflicts:
            return []
        check_solver(solver)
        base, snapshot = self._home.base, self._snapshot
        clash = Clash(
            tuple(conflicts),
            base=self._side(base),
            ours=self._side(base, self._changes) if snapshot is None else self._side(snapshot),
            theirs=self._side(self._theirs),
            theirs_log=log,
            who=self._who,
        )
        solved = solver.solve(clash)
        answers = await solved if inspect.isawaitable(solved) else solved
        if len(answers) != len(conflicts):
            raise InvalidInputError(
                f"A conflict solver returned {len(answers)} resolutions for {len(conflicts)} "
                "conflicts; it must return one for each."
            )
        return [
            conflict
            for conflict, answer in zip(conflicts, answers, strict=True)
            if not await self._apply(conflict, answer)
        ]

    def _side(self, base: Snapshot, changes: ChangeSet | None = None) -> Side:
        return Side(self._reading(base, changes))

    def _reading(self, base: Snapshot, changes: ChangeSet | None = None) -> Workspace:
        home = self._home
        workspace = Workspace(
            base,
            home.assets,
            home.virtual,
            inline_threshold_bytes=home.inline_threshold_bytes,
            read_only=True,
            packs=home.packs,
        )
        if changes is not None:
            workspace.rebase_to(base, changes)
        return workspace

    async def _apply(self, conflict: Conflict, answer: Answer) -> bool:
        """Change the session as the solver decided; return whether that settles the conflict."""
        match answer:
            case Resolution.OURS:
                return conflict.kind in _ALWAYS_OURS or self._fits(conflict)
            case Resolution.THEIRS:
                return self.take_back(conflict)
            case Resolution.FAIL:
                return False
            case bytes() if conflict.kind is ConflictKind.ZARR_METADATA_DOUBLE_UPDATE:
                return self._put_document(conflict, answer)
            case Mapping() if conflict.kind is ConflictKind.CHUNK_DOUBLE_UPDATE:
                return await self._put_chunks(conflict, answer)
            case _:
                raise InvalidInputError(
                    f"A conflict solver returned {answer!r:.200} for {conflict.kind.name} at "
                    f"{conflict.path!r}. It must return a Resolution; or, where both changed "
                    "chunks, a mapping from coordinates; or, where both changed the metadata of a "
                    "node, the bytes of a document."
                )

    def _fits(self, conflict: Conflict) -> bool:
        """Return whether our chunks lie in the grid that their update gave the array."""
        node = self._theirs.nodes.get(conflict.path)
        ours = None if conflict.node_id is None else self._changes.chunks.get(conflict.node_id)
        if conflict.kind is not ConflictKind.CHUNKS_UPDATED_IN_UPDATED_ARRAY or ours is None:
            return False
        # At the same path may be another array by now, whose chunks mean something else.
        if node is None or node.array is None or node.id != conflict.node_id:
            return False
        box = tuple((0, size) for size in node.array.grid)
        return bool(ours.columns().inside(box).all())

    def take_back(self, conflict: Conflict) -> bool:
        """Undo the part of the changes that clashes; return whether that settles it."""
        changes, node_id = self._changes, conflict.node_id
        if node_id is None:
            return False
        match conflict.kind:
            case ConflictKind.CHUNK_DOUBLE_UPDATE:
                if node_id in changes.chunks:
                    changes.chunks[node_id].drop(np.array(conflict.coords, np.uint32))
            case (
                ConflictKind.NEW_NODE_CONFLICTS_WITH_EXISTING_NODE
                | ConflictKind.NEW_NODE_IN_INVALID_GROUP
            ):
                kept = {path: it for path, it in changes.new.items() if it.id != node_id}
                changes.new = kept
                changes.chunks.pop(node_id, None)
            case ConflictKind.DELETE_OF_UPDATED_ARRAY | ConflictKind.DELETE_OF_UPDATED_GROUP:
                gone = changes.deleted.pop(node_id, None)
                if gone is not None:
                    self._take_back_replacement(gone)
            case (
                ConflictKind.CHUNKS_UPDATED_IN_DELETED_ARRAY
                | ConflictKind.CHUNKS_UPDATED_IN_UPDATED_ARRAY
            ):
                changes.chunks.pop(node_id, None)
                self._take_back_new_meaning(node_id)
            case ConflictKind.MOVE_OPERATION_CANNOT_BE_REBASED:
                return False
            case ConflictKind.ZARR_METADATA_DOUBLE_UPDATE:
                self._take_back_document(node_id)
            case _:
                changes.updated.pop(node_id, None)
                changes.chunks.pop(node_id, None)
        return True

    def _take_back_replacement(self, kept: Deleted) -> None:
        """Undo the creation of a node in the place of one that is kept, and of those below it.

        What was created in a group that took the place of a group can stay.
        """
        changes, below = self._changes, kept.path.rstrip("/") + "/"
        for path, node in [*changes.new.items()]:
            if path == kept.path or (kept.is_array and path.startswith(below)):
                del changes.new[path]
                changes.chunks.pop(node.id, None)

    def _take_back_new_meaning(self, node_id: NodeId) -> None:
        """Undo a new document under which the chunks that are kept mean something else, or end."""
        ours, path = self._changes.updated.get(node_id), self._theirs.nodes.path_of(node_id)
        theirs = None if path is None else self._theirs.nodes[path]
        if ours is None or theirs is None or ours.array is None or theirs.array is None:
            return
        # The other document may have another rank; formats are compared first.
        sizes = zip(ours.array.grid, theirs.array.grid, strict=False)
        if not same_chunk_format(ours.user_data, theirs.user_data) or any(a < b for a, b in sizes):
            del self._changes.updated[node_id]

    def _take_back_document(self, node_id: NodeId) -> None:
        """Leave a node its new document, and keep our chunks if they mean the same under it."""
        ours, chunks = self._changes.updated.pop(node_id, None), self._changes.chunks
        path = self._theirs.nodes.path_of(node_id)
        theirs = None if path is None else self._theirs.nodes[path]
        mine = chunks.get(node_id)
        if mine is None or ours is None or theirs is None or theirs.array is None:
            return
        if mine.kept_grid is None and same_chunk_format(ours.user_data, theirs.user_data):
            mine.clip(theirs.array.grid)
        else:
            del chunks[node_id]

    def _put_document(self, conflict: Conflict, document: bytes) -> bool:
        """Give a node a document on top of the one that the newer commit gave it."""
        document = self._home.assets.layout.document(conflict.path, document)
        parsed = parse_document(document, conflict.path)
        theirs = self._theirs.nodes.get(conflict.path)
        if theirs is None or theirs.id != conflict.node_id:
            return False  # they deleted it as well, which is a separate conflict
        self._changes.updated.pop(theirs.id, None)
        WorkingTree(self._theirs.nodes, self._changes).set_node(
            conflict.path, document, parsed.array
        )
        return True

    async def _put_chunks(self, conflict: Conflict, answers: ChunkAnswers) -> bool:
        """Settle chunks one by one; nothing changes unless all are settled."""
        wanted = set(conflict.coords)
        if foreign := [coords for coords in answers if coords not in wanted]:
            raise InvalidInputError(
                f"A conflict solver decided chunk {foreign[0]} of {conflict.path!r}, about "
                "which there is no conflict."
            )
        decided = [(coords, answers.get(coords, Resolution.FAIL)) for coords in conflict.coords]
        # Before anything is stored: after a failure all changes are still there.
        if any(answer is Resolution.FAIL for _, answer in decided):
            return False
        merged = [
            (coords, answer)
            for coords, answer in decided
            if answer is None or isinstance(answer, bytes)
        ]
        # Chunks of no bytes are refused on every write, as by the official engine.
        if any(answer == b"" for _, answer in merged):
            raise InvalidInputError(
                f"A conflict solver returned no bytes for a chunk of {conflict.path!r}; None "
                "deletes it."
            )
        refs = await bounded_map(self._store, merged, limit=_CONCURRENT_CHUNKS)
        assert conflict.node_id is not None  # chunk conflicts are about a node
        changes = self._changes.chunks[conflict.node_id]
        theirs = [coords for coords, answer in decided if answer is Resolution.THEIRS]
        if theirs:
            # Dropped, not set: the chunk is in the newer commit already.
            changes.drop(np.array(theirs, np.uint32).reshape(len(theirs), changes.rank))
        for coords, ref in refs:
            changes.set(coords, ref)
        return True

    async def _store(
        self, chunk: tuple[Coordinates, bytes | None]
    ) -> tuple[Coordinates, ChunkRef | None]:
        coords, data = chunk
        return coords, None if data is None else await self._home.store_bytes(data)


def without_settled(conflicts: Sequence[Conflict], settled: Settled) -> list[Conflict]:
    """Leave out conflicts that a solver has settled before."""
    left: list[Conflict] = []
    for it in conflicts:
        if it.node_id is None or it.node_id not in settled:
            left.append(it)
        elif it.kind is ConflictKind.CHUNK_DOUBLE_UPDATE:
            coords = tuple(at for at in it.coords if at not in settled[it.node_id])
            if coords:
                left.append(replace(it, coords=coords))
        elif it.kind not in _ABOUT_METADATA:
            left.append(it)
    return left


def describe(conflicts: Sequence[Conflict]) -> str:
    """Return the first few of some conflicts in words."""
    parts = [
        f"{conflict.kind.name.lower().replace('_', ' ')} at {conflict.path!r}"
        + (f" ({len(conflict.coords)} chunk(s))" if conflict.coords else "")
        for conflict in conflicts[:5]
    ]
    more = f", and {len(conflicts) - 5} more" if len(conflicts) > 5 else ""
    return "; ".join(parts) + more


_AT_ONCE: Final = 64
"""Commits whose logs are in memory at the same time."""
_CONCURRENT_SNAPSHOTS: Final = 16
_CONCURRENT_COMMITS: Final = 32


async def rebase(
    workspace: Workspace,
    history: History,
    branch: str,
    solver: ConflictSolver,
    *,
    tip: SnapshotId | None = None,
) -> list[SnapshotInfo]:
    """Move a workspace to the tip of its branch, commit by commit; return the commits.

    Args:
        workspace: is changed.
        history: of the repository.
        branch: whose tip is the goal.
        solver: decides conflicts.
        tip: where the branch was when it was last read; None to read it now.

    Raises:
        RebaseFailedError: a conflict that the solver did not settle. The workspace stands on
            the last commit that did not clash, with its changes.
        ConflictError: the branch was reset: the workspace's base is no longer part of it. Or the
            base expired, and what was committed since is not known (format 1).
        BranchNotFoundError: the branch is gone.

    Cancellation: the workspace stands on its old base or on a commit after it, with its
    changes.

    Cost: a request for the tip unless it is given; then for up to 64 commits the logs of all and
    the last snapshot, at the same time. From the first commit whose log does not rule out a
    clash, the snapshots of all, and that of the commit before it, also at the same time.
    """
    with telemetry.span("rebase", branch=branch):
        commits = await commits_after(history, branch, workspace.base.id, tip)
        for some in batched(commits, _AT_ONCE):
            await _replay(workspace, some, solver)
        return commits


async def _replay(
    workspace: Workspace, commits: Sequence[SnapshotInfo], solver: ConflictSolver
) -> None:
    """Move a workspace to the last of some commits that follow its base."""
    assets = workspace.assets

    # Without the log of an expired commit its changes would be overwritten unseen, so each is
    # needed here, unlike in a diff that is only shown.
    async def load(info: SnapshotInfo) -> list[TransactionLog]:
        return await load_logs(assets, [info], need_pruned=True, own_from_memory=True)

    logs, last = await gather(
        bounded_map(load, commits, limit=_CONCURRENT_COMMITS),
        assets.snapshot_of_commit(commits[-1].id),
    )
    clear = list(
        takewhile(
            lambda index: all(clears(log, workspace.tree) for log in logs[index]),
            range(len(commits)),
        )
    )
    # Logs list nodes by id, and say nothing of paths: whether a new node of ours is in the place of
    # theirs only a snapshot shows. Most logs rule out a clash by themselves.
    # From the first commit whose log is not enough, each snapshot is needed, because a solver may
    # change the session's changes. The one before it is needed too: a failed rebase stands on it.
    wanted = range(max(0, len(clear) - 1), len(commits) - 1)
    snapshots = await bounded_map(
        assets.snapshot, [commits[index].id for index in wanted], limit=_CONCURRENT_SNAPSHOTS
    )
    for theirs, touched in zip([*snapshots, last], logs[wanted.start :], strict=True):
        await _settle(workspace, theirs, touched, solver)


async def _settle(
    workspace: Workspace, theirs: Snapshot, logs: Sequence[TransactionLog], solver: ConflictSolver
) -> None:
    """Move a workspace to a newer commit, settling what clashes with its logs."""
    # On a copy: a conflict that is not settled must leave the session with all its changes, on the
    # last commit that did not clash.
    changes = workspace.changes.copy()
    created = [node.id for node in changes.new.values()]
    # Theirs may have chosen the same ids, which conflicts are found by.
    if ids := workspace.assets.layout.numbered(created, theirs.nodes):
        changes.renumber(ids)
    settlement = Settlement(workspace, changes, theirs)
    for log in logs:
        await settlement.settle(log, solver)
    changes.deleted = {
        node_id: gone
        for node_id, gone in changes.deleted.items()
        if theirs.nodes.path_of(node_id) is not None  # else they deleted it too
    }
    changes.moves = changes.moves.replay(theirs.nodes)
    workspace.rebase_to(theirs, changes, replayed=True)


async def _why_not_part(history: History, base_id: SnapshotId) -> str:
    """Return why a session's base is not among the ancestors of the tip of its branch."""
    if not history.capabilities.expiration:
        return "the branch was reset."
    if not history.capabilities.operations_log:
        return (
            "the branch was reset, or the base expired. Format version 1 does not record what "
            "commits touched that expired, so conflicts with them cannot be found."
        )
    try:
        await history.snapshot_info(base_id)
    except SnapshotNotFoundError:
        return (
            "it expired, and the history does not say what the commits touched that expired with "
            "it (versions of the official engine before 2.1 forget that), or the branch was reset."
        )
    return "the branch was reset or its tip amended."


async def commits_after(
    history: History, branch: str, base_id: SnapshotId, tip: SnapshotId | None
) -> list[SnapshotInfo]:
    """Return the commits of a branch after a snapshot, oldest first.

    If the snapshot expired, the oldest commit that is left remembers the logs of those that went
    with it: the ones after the snapshot stay with that commit.
    """
    if tip is None or tip == base_id:  # the tip that was read last may be out of date
        tip = await history.branch_tip(branch)
    commits: list[SnapshotInfo] = []
    async for info in history.ancestry(tip):
        if info.id == base_id:
            return commits[::-1]
        if base_id in info.pruned_ancestor_logs:
            place = info.pruned_ancestor_logs.index(base_id)
            after = info.pruned_ancestor_logs[place + 1 :]
            return [*commits, replace(info, pruned_ancestor_logs=after)][::-1]
        commits.append(info)
    why = await _why_not_part(history, base_id)
    raise ConflictError(
        f"Branch {branch!r} is at {tip}, and the session's base {base_id} is no longer part of "
        f"it: {why} Begin a new session.",
        branch=branch,
        expected_parent=str(base_id),
        actual_parent=str(tip),
    )
