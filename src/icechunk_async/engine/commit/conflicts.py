"""Conflict solvers: decide what happens if a session and a newer commit changed the same.

A solver decides each conflict and can read both sides and their common base. The stock solvers
follow the official engine's policies.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.detect import Conflict, ConflictKind
from icechunk_async.engine.tree.workspace import document_of
from icechunk_async.errors import WrongTypeError
from icechunk_async.format.json.metadata import encode_items
from icechunk_async.format.manifest.chunk import Coordinates
from icechunk_async.format.paths import check_path
from icechunk_async.format.repo_info import SnapshotInfo

if TYPE_CHECKING:
    from icechunk_async.engine.changes.change_set import ChangeSet
    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.ids import NodeId, SnapshotId
    from icechunk_async.format.manifest.chunk import ChunkRef
    from icechunk_async.format.snapshot import Node, Snapshot
    from icechunk_async.format.transaction_log import TransactionLog

__all__ = [
    "Answer",
    "BasicConflictSolver",
    "ChunkAnswers",
    "Clash",
    "Conflict",
    "ConflictDetector",
    "ConflictKind",
    "ConflictSolver",
    "Preparation",
    "PreparingSolver",
    "Resolution",
    "Settled",
    "Side",
    "TouchedBy",
    "VersionSelection",
    "check_solver",
]


class Resolution(Enum):
    """How one conflict ends."""

    OURS = "ours"
    """Keep this session's change on top of the newer commit."""
    THEIRS = "theirs"
    """Undo this session's change, as far as it clashes."""
    FAIL = "fail"
    """Give up: the rebase fails and reports the conflict."""


type ChunkAnswers = Mapping[Coordinates, Resolution | bytes | None]
"""For a conflict about chunks, a decision for each; bytes replace it, None deletes it."""
type Answer = Resolution | ChunkAnswers | bytes
"""The decision of a solver about one conflict. Where both changed the metadata of a
node, bytes are the document (``zarr.json``) that it gets."""


class Side:
    """One state of the hierarchy, for a solver to read."""

    def __init__(self, workspace: Workspace) -> None:
        """Read from a workspace."""
        self._workspace = workspace

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot that it stands on."""
        return self._workspace.base

    @property
    def id(self) -> SnapshotId:
        """The snapshot's id."""
        return self._workspace.base.id

    @property
    def message(self) -> str:
        """The snapshot's message."""
        return self._workspace.base.message

    def node(self, path: str) -> Node | None:
        """Return the node at a path; None if there is no node."""
        return self._workspace.node(check_path(path))

    def metadata(self, path: str) -> dict[str, Any] | None:
        """Return the metadata document (``zarr.json``) of a node; None if there is no node.

        Raises:
            FormatError: the document is damaged.
        """
        node = self.node(path)
        return None if node is None else document_of(node)

    def metadata_of(self, conflict: Conflict) -> dict[str, Any] | None:
        """Return the document of the node that a conflict is about, wherever it is on this side."""
        nodes, node_id = self._workspace.base.nodes, conflict.node_id
        # A merge may have moved it on one side.
        path = None if node_id is None else nodes.path_of(node_id)
        return self.metadata(conflict.path if path is None else path)

    async def chunk_ref(self, path: str, coords: Coordinates) -> ChunkRef | None:
        """Return where the bytes of a chunk are. Cost: at most one request, for a manifest."""
        handle = await self._workspace.find_chunk(check_path(path), coords)
        return None if handle is None else handle.ref

    async def read_chunk(self, path: str, coords: Coordinates) -> bytes | None:
        """Return the stored bytes of a chunk; None if it was never written or is deleted.

        Cost: one request, and one for the manifest unless that is cached.
        """
        data = await self._workspace.read_chunk(check_path(path), coords)
        # Solvers are code of others, which may keep or compare what they get: a view of a cached
        # object would keep all of that in memory.
        return None if data is None else bytes(data)


@dataclass(frozen=True, slots=True)
class Clash:
    """The input of a solver: one newer commit, and every conflict with it."""

    conflicts: Sequence[Conflict]
    base: Side
    """The snapshot that both began with."""
    ours: Side
    """The base with the session's changes."""
    theirs: Side
    """The newer commit."""
    theirs_log: TransactionLog
    """The log of the newer commit, or of one that expired before it."""
    who: Callable[[Conflict], Awaitable[TouchedBy]] | None = None
    """See `commits`."""

    async def commits(self, conflict: Conflict) -> TouchedBy:
        """Return the commits of both sides that touched what is in conflict, newest first.

        With their messages, times and properties, such as an author. In a rebase *ours* has none,
        since it is not committed, and *theirs* is the newer commit.

        Cost: in a merge the logs of the commits since the common ancestor, once.
        """
        if self.who is not None:
            return await self.who(conflict)
        it = self.theirs.snapshot
        items = tuple(encode_items(it.metadata, 2))
        return (), (SnapshotInfo(it.id, it.parent_id, it.flushed_at, it.message, items),)


type TouchedBy = tuple[tuple[SnapshotInfo, ...], tuple[SnapshotInfo, ...]]
"""Commits of *ours* and of *theirs*."""


class ConflictSolver(Protocol):
    """Decides conflicts. Any object with this method is one; it may be ``async`` or not."""

    def solve(self, clash: Clash) -> Sequence[Answer] | Awaitable[Sequence[Answer]]:
        """Return a decision for each of ``clash.conflicts``, in order.

        * A `Resolution` decides a conflict as a whole.
        * If both changed chunks, a mapping decides each of ``conflict.coords``: a resolution,
          the bytes that the chunk gets, or None to delete it. Those left out are not settled.
        * If both changed the metadata of a node, bytes are the document that it gets.

        A decision that is not possible counts as `Resolution.FAIL`. ``OURS`` is possible for
        chunk conflicts, for deletions of updated nodes, and for chunks in an array whose metadata
        was updated, if they lie in its grid; ``THEIRS`` for every conflict but a move.

        Cancellation: the rebase ends where it is; see ``Session.rebase``.
        """
        ...


def check_solver(given: object) -> None:
    """Raise `WrongTypeError` unless it is a solver, before a commit depends on it."""
    # A class has the method as well. Without this it would be called at the first conflict, perhaps
    # years later.
    if isinstance(given, type) or not callable(getattr(given, "solve", None)):
        shown = given.__name__ if isinstance(given, type) else f"{given!r:.100}"
        raise WrongTypeError(
            f"A conflict solver is an object with a method 'solve', such as BasicConflictSolver() "
            f"or ConflictDetector(), not {shown}."
        )


@dataclass(frozen=True, slots=True)
class Preparation:
    """Both sides before conflicts are looked for, and our changes, which may be edited."""

    base: Workspace
    """Reads the snapshot that both began with."""
    ours: Workspace
    """Reads our side; edits of ``changes`` do not show in it."""
    branch: Workspace
    """Reads the newer commit."""
    changes: ChangeSet
    """Ours, to be made on the newer commit. Nodes may be edited for which both sides changed the
    metadata document."""
    store: Callable[[bytes], Awaitable[ChunkRef]]
    """Stores the bytes of a chunk."""


type Settled = Mapping[NodeId, frozenset[Coordinates]]
"""Arrays whose metadata and grid fit the newer commit now, and their chunks that hold the data of
both sides. Other chunks are compared with those of the commit as in any array."""


@runtime_checkable
class PreparingSolver(Protocol):
    """A solver that brings changes together before they are compared chunk by chunk."""

    async def prepare(self, preparation: Preparation) -> Settled:
        """Edit ``preparation.changes``, and return what is settled by that."""
        ...


class ConflictDetector:
    """Accepts no conflict: a rebase succeeds only if nothing clashes."""

    async def solve(self, clash: Clash) -> Sequence[Answer]:
        """Fail every conflict."""
        return [Resolution.FAIL] * len(clash.conflicts)


class VersionSelection(Enum):
    """The side of a chunk conflict that stays."""

    FAIL = "fail"
    USE_OURS = "ours"
    USE_THEIRS = "theirs"


@dataclass(frozen=True, slots=True)
class BasicConflictSolver:
    """The official engine's stock policies; note that by default our chunks replace theirs."""

    on_chunk_conflict: VersionSelection = VersionSelection.USE_OURS
    fail_on_delete_of_updated_array: bool = False
    fail_on_delete_of_updated_group: bool = False

    async def solve(self, clash: Clash) -> Sequence[Answer]:
        """Resolve chunk conflicts and deletions by policy; fail all others."""
        return [self._resolve(conflict.kind) for conflict in clash.conflicts]

    def _resolve(self, kind: ConflictKind) -> Resolution:
        match kind:
            case ConflictKind.CHUNK_DOUBLE_UPDATE:
                return Resolution(self.on_chunk_conflict.value)
            case ConflictKind.DELETE_OF_UPDATED_ARRAY:
                fail = self.fail_on_delete_of_updated_array
            case ConflictKind.DELETE_OF_UPDATED_GROUP:
                fail = self.fail_on_delete_of_updated_group
            case _:
                fail = True
        return Resolution.FAIL if fail else Resolution.OURS
