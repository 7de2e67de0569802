"""Carrying out what a conflict solver answered."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._concurrency import bounded_map
from icechunk_async.errors import InvalidInputError, RebaseFailedError, UnsupportedBySpecError
from icechunk_async.repository.changes import WorkingTree
from icechunk_async.repository.conflicts import Clash, ConflictKind, Resolution, Side
from icechunk_async.repository.detection import detect_conflicts
from icechunk_async.repository.workspace import Workspace

if TYPE_CHECKING:
    from icechunk_async.format.chunk_refs import ChunkRef, Coordinates
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.format.transaction_log import TransactionLog
    from icechunk_async.repository.changes import ChangeSet
    from icechunk_async.repository.conflicts import Answer, ChunkAnswers, Conflict, ConflictSolver

__all__ = ["Settlement"]

_CONCURRENT_CHUNKS: Final = 16
_ALWAYS_OURS: Final = frozenset(
    {
        ConflictKind.CHUNK_DOUBLE_UPDATE,
        ConflictKind.DELETE_OF_UPDATED_ARRAY,
        ConflictKind.DELETE_OF_UPDATED_GROUP,
    }
)


class Settlement:
    """Settles the conflicts of a session's changes with one newer commit."""

    def __init__(self, home: Workspace, changes: ChangeSet, theirs: Snapshot) -> None:
        """Change ``changes``, a copy of those of ``home``, so that ``theirs`` can stand."""
        self._home = home
        self._changes = changes
        self._theirs = theirs
        self._ours = WorkingTree(home.base.nodes, changes)

    async def settle(self, log: TransactionLog, solver: ConflictSolver) -> None:
        """Let a solver decide every conflict with what a log says was touched.

        Raises:
            RebaseFailedError: one is not settled.
            InvalidInputError: the solver's answers make no sense.
        """
        conflicts = detect_conflicts(self._ours, log, self._theirs)
        if not conflicts:
            return
        clash = Clash(
            tuple(conflicts),
            base=self._side(self._home.base),
            ours=self._side(self._home.base, self._changes),
            theirs=self._side(self._theirs),
            theirs_log=log,
        )
        solved = solver.solve(clash)
        answers = await solved if inspect.isawaitable(solved) else solved
        if len(answers) != len(conflicts):
            raise InvalidInputError(
                f"A conflict solver answered {len(answers)} resolutions for {len(conflicts)} "
                "conflicts; it must answer one for each."
            )
        unsolved = [
            conflict
            for conflict, answer in zip(conflicts, answers, strict=True)
            if not await self._apply(conflict, answer)
        ]
        if unsolved:
            raise RebaseFailedError(
                f"The session's changes clash with commit {log.id}: {_describe(unsolved)}. "
                "Nothing was published and no change was lost. Choose a solver that decides "
                "these, or begin a new session and make the changes again.",
                snapshot_id=str(log.id),
                conflicts=conflicts,
            )

    def _side(self, base: Snapshot, changes: ChangeSet | None = None) -> Side:
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
        return Side(workspace)

    async def _apply(self, conflict: Conflict, answer: Answer) -> bool:
        """Change the session as the solver decided; answer whether that settles the conflict."""
        match answer:
            case Resolution.OURS:
                return conflict.kind in _ALWAYS_OURS or self._fits(conflict)
            case Resolution.THEIRS:
                return self._take_back(conflict)
            case Resolution.FAIL:
                return False
            case bytes() if conflict.kind is ConflictKind.ZARR_METADATA_DOUBLE_UPDATE:
                return self._put_document(conflict, answer)
            case Mapping() if conflict.kind is ConflictKind.CHUNK_DOUBLE_UPDATE:
                return await self._put_chunks(conflict, answer)
            case _:
                raise InvalidInputError(
                    f"A conflict solver answered {answer!r:.200} to {conflict.kind.name} at "
                    f"{conflict.path!r}. It must answer a Resolution; or, where both changed "
                    "chunks, a mapping from coordinates; or, where both changed the metadata of a "
                    "node, the bytes of a document."
                )

    def _fits(self, conflict: Conflict) -> bool:
        """Tell whether our chunks lie in the grid that their update gave the array."""
        node = self._theirs.nodes.get(conflict.path)
        ours = None if conflict.node_id is None else self._changes.chunks.get(conflict.node_id)
        if conflict.kind is not ConflictKind.CHUNKS_UPDATED_IN_UPDATED_ARRAY or ours is None:
            return False
        if node is None or node.array is None or node.id != conflict.node_id:
            return False
        box = tuple((0, size) for size in node.array.grid)
        return bool(ours.columns().inside(box).all())

    def _take_back(self, conflict: Conflict) -> bool:
        """Undo the part of the session's changes that clashes."""
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
                changes.deleted.pop(node_id, None)
            case (
                ConflictKind.CHUNKS_UPDATED_IN_DELETED_ARRAY
                | ConflictKind.CHUNKS_UPDATED_IN_UPDATED_ARRAY
            ):
                changes.chunks.pop(node_id, None)
            case ConflictKind.MOVE_OPERATION_CANNOT_BE_REBASED:
                return False
            case _:
                changes.updated.pop(node_id, None)
                changes.chunks.pop(node_id, None)
        return True

    def _put_document(self, conflict: Conflict, document: bytes) -> bool:
        """Give a node a document on top of the one that the newer commit gave it."""
        # Only the layer above knows Zarr's documents.
        from icechunk_async.zarr.documents import parse_document  # noqa: PLC0415

        parsed = parse_document(document, conflict.path)
        if not parsed.regular_grid and self._home.assets.spec_version == 1:
            raise UnsupportedBySpecError(
                f"A conflict solver gave {conflict.path!r} a rectilinear chunk grid, and format "
                "version 1 stores regular grids only. Migrate the repository to version 2."
            )
        theirs = self._theirs.nodes.get(conflict.path)
        if theirs is None or theirs.id != conflict.node_id:
            return False  # it was deleted as well, which is a conflict of its own
        self._changes.updated.pop(theirs.id, None)
        WorkingTree(self._theirs.nodes, self._changes).set_node(
            conflict.path, document, parsed.array
        )
        return True

    async def _put_chunks(self, conflict: Conflict, answers: ChunkAnswers) -> bool:
        """Settle chunks one by one; nothing is changed unless all are settled."""
        wanted = set(conflict.coords)
        if foreign := [coords for coords in answers if coords not in wanted]:
            raise InvalidInputError(
                f"A conflict solver answered for chunk {foreign[0]} of {conflict.path!r}, about "
                "which there is no conflict."
            )
        decided = [(coords, answers.get(coords, Resolution.FAIL)) for coords in conflict.coords]
        if any(answer is Resolution.FAIL for _, answer in decided):
            return False
        merged = [
            (coords, answer)
            for coords, answer in decided
            if answer is None or isinstance(answer, bytes)
        ]
        if any(answer == b"" for _, answer in merged):
            raise InvalidInputError(
                f"A conflict solver answered no bytes for a chunk of {conflict.path!r}; None "
                "deletes it."
            )
        refs = await bounded_map(self._store, merged, limit=_CONCURRENT_CHUNKS)
        assert conflict.node_id is not None  # chunk conflicts are about a node
        changes = self._changes.chunks[conflict.node_id]
        theirs = [coords for coords, answer in decided if answer is Resolution.THEIRS]
        if theirs:
            changes.drop(np.array(theirs, np.uint32).reshape(len(theirs), changes.rank))
        for coords, ref in refs:
            changes.set(coords, ref)
        return True

    async def _store(
        self, chunk: tuple[Coordinates, bytes | None]
    ) -> tuple[Coordinates, ChunkRef | None]:
        coords, data = chunk
        return coords, None if data is None else await self._home.store_bytes(data)


def _describe(conflicts: list[Conflict]) -> str:
    parts = [
        f"{conflict.kind.name.lower().replace('_', ' ')} at {conflict.path!r}"
        + (f" ({len(conflict.coords)} chunk(s))" if conflict.coords else "")
        for conflict in conflicts[:5]
    ]
    more = f", and {len(conflicts) - 5} more" if len(conflicts) > 5 else ""
    return "; ".join(parts) + more
