"""Conflicts between commits, and solvers for them, in the classes of the official package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from inspect import isawaitable, iscoroutinefunction
from typing import TYPE_CHECKING, Any, Self, cast, override

import anyio.to_thread

from icechunk_async.engine.commit import conflicts as native
from icechunk_async.sync._display import Choice, Displayed, public
from icechunk_async.sync._mirrors import mirrors

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

__all__ = [
    "BasicConflictSolver",
    "Conflict",
    "ConflictDetector",
    "ConflictSolver",
    "ConflictType",
    "VersionSelection",
]


@public("conflicts")
class ConflictType(Choice):
    """What clashes."""

    NewNodeConflictsWithExistingNode = 1
    NewNodeInInvalidGroup = 2
    ZarrMetadataDoubleUpdate = 3
    ZarrMetadataUpdateOfDeletedArray = 4
    ZarrMetadataUpdateOfDeletedGroup = 5
    ChunkDoubleUpdate = 6
    ChunksUpdatedInDeletedArray = 7
    ChunksUpdatedInUpdatedArray = 8
    DeleteOfUpdatedArray = 9
    DeleteOfUpdatedGroup = 10
    MoveOperationCannotBeRebased = 11

    @override
    def __repr__(self) -> str:
        return self.name

    @override
    def __str__(self) -> str:
        return re.sub(r"(?<=.)([A-Z])", r" \1", self.name).capitalize()


@mirrors(native.Conflict)
@public("conflicts")
@dataclass(frozen=True, repr=False)
class Conflict(Displayed):
    """One clash between a session and a newer commit.

    Attributes:
        conflict_type: what clashes.
        path: the node.
        conflicted_chunks: for chunk conflicts, the coordinates of the chunks that both changed.

    Raises:
        TypeError: ``conflict_type`` is none.
    """

    conflict_type: ConflictType
    path: str
    conflicted_chunks: list[list[int]] | None = None

    def __post_init__(self) -> None:
        """Refuse what is no type."""
        if not isinstance(self.conflict_type, ConflictType):  # pyright: ignore[reportUnnecessaryIsInstance]
            found = type(cast("object", self.conflict_type)).__name__
            raise TypeError(f"Conflict(conflict_type=...) is of type {found}; use a ConflictType.")

    @override
    def _rows(self) -> list[tuple[str, object]]:
        return [
            ("conflict_type", repr(self.conflict_type)),
            ("path", self.path),
            ("conflicted_chunks", self.conflicted_chunks),
        ]

    @classmethod
    def from_native(cls, value: native.Conflict) -> Self:
        """Return the counterpart of a conflict of the engine."""
        chunks = [list(coords) for coords in value.coords] or None
        return cls(ConflictType(value.kind.value), value.path, chunks)


@public("conflicts")
class VersionSelection(Choice):
    """Which side of a chunk conflict stays."""

    Fail = 0
    UseOurs = 1
    UseTheirs = 2


_SELECTIONS = {
    VersionSelection.Fail: native.VersionSelection.FAIL,
    VersionSelection.UseOurs: native.VersionSelection.USE_OURS,
    VersionSelection.UseTheirs: native.VersionSelection.USE_THEIRS,
}


@public("conflicts")
class ConflictSolver:
    """Decides what becomes of conflicts when a session is rebased. Subclasses define ``solve``.

    The official class has no subclasses in Python; here they are what
    ``icechunk_async.conflicts.ConflictSolver`` describes.
    """

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Refuse to make one that decides nothing."""
        del args, kwargs
        if cls is ConflictSolver:
            raise TypeError(
                "ConflictSolver decides nothing. Use ConflictDetector or BasicConflictSolver, or "
                "a subclass that defines solve()."
            )
        return object.__new__(cls)

    def solve(
        self, clash: native.Clash
    ) -> Sequence[native.Resolution] | Awaitable[Sequence[native.Resolution]]:
        """Return a resolution for each of ``clash.conflicts``, in order.

        A plain function runs on a thread of its own, so it may block; it may also be
        asynchronous.

        Raises:
            NotImplementedError: the subclass defines none.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no solve().")

    def to_native(self) -> native.ConflictSolver:
        """Return the engine's counterpart."""
        return _Adapter(self)


class _Adapter:
    """A solver of the user's, as the engine asks it."""

    def __init__(self, solver: ConflictSolver) -> None:
        self._solver = solver

    async def solve(self, clash: native.Clash) -> Sequence[native.Resolution]:
        """Ask on a thread, where it may block; or here, where it is asynchronous."""
        solve: Any = self._solver.solve
        if iscoroutinefunction(solve):
            answer = solve(clash)
        else:
            answer = await anyio.to_thread.run_sync(solve, clash)
        found = await answer if isawaitable(answer) else answer
        return cast("Sequence[native.Resolution]", found)


@public("conflicts")
@dataclass(frozen=True)
class ConflictDetector(ConflictSolver):
    """Accepts no conflict: a rebase succeeds only where nothing clashes."""

    @override
    def to_native(self) -> native.ConflictSolver:
        return native.ConflictDetector()


@public("conflicts")
@dataclass(frozen=True, kw_only=True)
class BasicConflictSolver(ConflictSolver):
    """The stock policies; note that by default our chunks replace theirs.

    Attributes:
        on_chunk_conflict: which chunk stays, where both wrote it.
        fail_on_delete_of_updated_array: whether a deletion of what they changed is a failure.
        fail_on_delete_of_updated_group: the same for groups.
    """

    on_chunk_conflict: VersionSelection = VersionSelection.UseOurs
    fail_on_delete_of_updated_array: bool = False
    fail_on_delete_of_updated_group: bool = False

    @override
    def to_native(self) -> native.ConflictSolver:
        return native.BasicConflictSolver(
            _SELECTIONS[self.on_chunk_conflict],
            self.fail_on_delete_of_updated_array,
            self.fail_on_delete_of_updated_group,
        )
