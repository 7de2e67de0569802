"""Conflicts between commits, and solvers for them, in the classes of the official package."""

from __future__ import annotations

import re
from inspect import isawaitable, iscoroutinefunction
from typing import TYPE_CHECKING, Any, Self, cast, override

import anyio.to_thread

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.text import printable
from icechunk_async.engine.commit import conflicts as native
from icechunk_async.errors import WrongTypeError
from icechunk_async.sync.official.display import Choice, Displayed, public
from icechunk_async.sync.official.mirrors import mirrors

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
    """The kind of a conflict."""

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
        # The official text of a kind: "Chunk double update".
        return re.sub(r"(?<=.)([A-Z])", r" \1", self.name).capitalize()


@mirrors(native.Conflict)
@public("conflicts")
@dataclass(frozen=True, repr=False)
class Conflict(Displayed):
    """One conflict between a session and a newer commit.

    Attributes:
        conflict_type: its kind.
        path: the node.
        conflicted_chunks: the coordinates of the chunks that both changed, for chunk conflicts.

    Raises:
        TypeError: `conflict_type` has another type.
    """

    conflict_type: ConflictType
    path: str
    conflicted_chunks: list[list[int]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.conflict_type, ConflictType):  # pyright: ignore[reportUnnecessaryIsInstance]
            found = type(cast("object", self.conflict_type)).__name__
            raise TypeError(f"Conflict(conflict_type=...) is of type {found}; use a ConflictType.")

    @override
    def _rows(self) -> list[tuple[str, object]]:
        return [
            ("conflict_type", repr(self.conflict_type)),
            ("path", printable(self.path)),
            ("conflicted_chunks", self.conflicted_chunks),
        ]

    @classmethod
    def from_native(cls, value: native.Conflict) -> Self:
        """Return the counterpart of a conflict of the engine."""
        # Lists, and None instead of an empty one, as officially.
        chunks = [list(coords) for coords in value.coords] or None
        return cls(ConflictType(value.kind.value), value.path, chunks)


@public("conflicts")
class VersionSelection(Choice):
    """The side of a chunk conflict that is kept."""

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
    """Decides about conflicts when a session is rebased. Subclasses define `solve`.

    Unlike the official class it can be subclassed; see `icechunk_async.conflicts.ConflictSolver`.
    """

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Raise an error for this class itself, which decides nothing."""
        del args, kwargs
        # The official class cannot be made in Python either.
        if cls is ConflictSolver:
            raise TypeError(
                "ConflictSolver decides nothing. Use ConflictDetector or BasicConflictSolver, or "
                "a subclass that defines solve()."
            )
        return object.__new__(cls)

    def solve(
        self, clash: native.Clash
    ) -> Sequence[native.Resolution] | Awaitable[Sequence[native.Resolution]]:
        """Return a resolution for each of `clash.conflicts`, in order.

        A plain function runs on a separate thread, so it may block. It may also be a coroutine
        function.

        Raises:
            NotImplementedError: the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no solve().")

    def to_native(self) -> native.ConflictSolver:
        """Return the engine's counterpart."""
        return _Adapter(self)


class _Adapter:
    """A solver of the user, with the interface of the engine's."""

    def __init__(self, solver: ConflictSolver) -> None:
        self._solver = solver

    async def solve(self, clash: native.Clash) -> Sequence[native.Resolution]:
        """Call a plain function on a thread, since it may block; await an asynchronous one."""
        solve: Any = self._solver.solve
        if iscoroutinefunction(solve):
            found = solve(clash)
        else:
            found = await anyio.to_thread.run_sync(solve, clash)
        # A lambda or a partial of a coroutine function is no coroutine function itself.
        found = await found if isawaitable(found) else found
        return cast("Sequence[native.Resolution]", found)


@public("conflicts")
@dataclass(frozen=True)
class ConflictDetector(ConflictSolver):
    """Accepts no conflict: a rebase succeeds only without any."""

    @override
    def to_native(self) -> native.ConflictSolver:
        return native.ConflictDetector()


@public("conflicts")
@dataclass(frozen=True, kw_only=True)
class BasicConflictSolver(ConflictSolver):
    """The common policies; by default our chunks replace theirs.

    Attributes:
        on_chunk_conflict: the chunk that is kept if both wrote it.
        fail_on_delete_of_updated_array: whether deleting an array that they changed is a failure.
        fail_on_delete_of_updated_group: the same for groups.
    """

    on_chunk_conflict: VersionSelection = VersionSelection.UseOurs
    fail_on_delete_of_updated_array: bool = False
    fail_on_delete_of_updated_group: bool = False

    def __post_init__(self) -> None:
        """Refuse another word for the chunk that is kept, before a commit depends on it."""
        if not isinstance(self.on_chunk_conflict, VersionSelection):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise WrongTypeError(
                f"on_chunk_conflict={self.on_chunk_conflict!r} is no VersionSelection. Give "
                "VersionSelection.Fail, VersionSelection.UseOurs or VersionSelection.UseTheirs."
            )

    @override
    def to_native(self) -> native.ConflictSolver:
        return native.BasicConflictSolver(
            _SELECTIONS[self.on_chunk_conflict],
            self.fail_on_delete_of_updated_array,
            self.fail_on_delete_of_updated_group,
        )
