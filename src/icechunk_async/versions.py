"""Changes between snapshots, reports of merges, and merges whose conflicts are settled by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from icechunk_async.engine.commit.conflicts import ConflictDetector, ConflictKind
from icechunk_async.engine.versions.blame import Blame
from icechunk_async.engine.versions.feed import Change, ChunkChange, ChunkChanges, NodeChange
from icechunk_async.engine.versions.pending import PendingState, encode_pending
from icechunk_async.engine.versions.pictures import ChangeMap
from icechunk_async.engine.versions.report import MergeConflict, MergeReport
from icechunk_async.errors import (
    FormatError,
    InvalidInputError,
    InvalidMetadataError,
    MergeConflictError,
    SessionStateError,
)
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.zarr.values import CellChanges, ValueDiff, cells_of_chunks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

    from icechunk_async.engine.changes.detect import Conflict
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates
    from icechunk_async.session import Session

__all__ = [
    "Blame",
    "CellChanges",
    "Change",
    "ChangeMap",
    "ChunkChange",
    "ChunkChanges",
    "MergeConflict",
    "MergeReport",
    "NodeChange",
    "PendingMerge",
    "ValueDiff",
]


class PendingMerge:
    """A merge that is not committed yet, with the conflicts that are open.

    Its session stands on the tip of the branch and has all changes that do not clash; what clashes
    is as the branch has it. Settle each conflict with `keep_branch`, `take_source`, or, after
    writing what is right into the session, `resolved`. Then `commit`. Made by
    ``Repository.begin_merge``. `to_bytes` keeps it, half settled, for another process or day.
    """

    def __init__(
        self,
        session: Session,
        sides: tuple[Session, Session],
        report: MergeReport,
        message: str,
        properties: Mapping[str, JSON],
        *,
        clashes: Sequence[Conflict],
        still_open: Collection[int] | None = None,
    ) -> None:
        """Begin with a session that has the changes that do not clash.

        Args:
            session: has them.
            sides: read the branch before the merge, and the source.
            report: of the merge.
            message: of the commit, if the caller gives none.
            properties: of the commit.
            clashes: the conflicts of the report, with their node ids.
            still_open: the numbers of those that are open; None: all.
        """
        self.session = session
        """Reads the state to be committed, and takes changes."""
        self.report = report
        """The changes and the conflicts as they were at the beginning."""
        self._sides = sides
        self._source = sides[1].workspace
        self._message = message
        self._properties = properties
        self._clashes = tuple(clashes)
        numbered = enumerate(report.conflicts)
        self._open = [it for at, it in numbered if still_open is None or at in still_open]

    @property
    def conflicts(self) -> tuple[MergeConflict, ...]:
        """The conflicts that are open."""
        return tuple(self._open)

    def keep_branch(self, *conflicts: MergeConflict) -> None:
        """Settle conflicts by leaving things as the branch has them; all if none is named."""
        self._close(conflicts or self.conflicts)

    def resolved(self, *conflicts: MergeConflict) -> None:
        """Settle conflicts by what was written into the session; all if none is named."""
        self._close(conflicts or self.conflicts)

    async def take_source(self, *conflicts: MergeConflict) -> None:
        """Settle conflicts by making things as the source has them; all if none is named.

        Chunks that both wrote become the source's, by reference. A document that both changed
        becomes the source's; a node that the source deleted is deleted.

        Raises:
            InvalidInputError: that alone does not settle one of them, for example chunks of an
                array that was deleted or got another codec. Write what is right into the session.
            FormatError: the source is damaged.

        Cancellation: some conflicts may be settled.

        Cost: one request for each manifest that holds the chunks.
        """
        for conflict in conflicts or self.conflicts:
            self._check(conflict)
            await self._take(conflict)
            # One after the other: if one cannot be taken, those before it are settled, in the
            # session and here.
            self._open.remove(conflict)

    async def to_bytes(self) -> bytes:
        """Return the present state of the merge, to be continued with ``Repository.resume_merge``.

        That may be in another process, and later. The bytes have what was settled and written so
        far, and which conflicts are open; they have no secret, and nothing of where the
        repository is. What is changed here afterwards is not in them. Of several who continue one
        merge and commit, one succeeds.

        Garbage collection takes the chunks that were written here for garbage: let it spare what
        is younger than a merge may take. A commit notices if some were collected.

        Raises:
            SessionStateError: the merge was committed.
            StorageError: some chunks are not stored; call again.

        Cancellation: no effect on the merge.

        Cost: requests for the chunks that wait to be packed; some 12 to 25 bytes a chunk.
        """
        if self.session.read_only:
            raise SessionStateError(
                f"The merge was committed, as snapshot {self.session.snapshot_id}: there is "
                "nothing to be continued."
            )
        workspace, report = self.session.workspace, self.report
        with workspace.lock:  # no await in between: what is settled is among the changes
            target_id, changes = workspace.base.id, workspace.changes.copy()
            # By their places, which are those of `clashes`: a conflict in the report has no id.
            opened = frozenset(at for at, it in enumerate(report.conflicts) if it in self._open)
        await self.session.store_pending_chunks()
        self.session.abandon()  # it can be dropped without a warning
        return encode_pending(
            PendingState(
                report.branch,
                report.base_id,
                report.source_id,
                target_id,
                changes,
                self._message,
                report.changes,
                self._clashes,
                opened,
            )
        )

    async def cells(self, conflict: MergeConflict) -> AsyncIterator[CellChanges]:
        """Iterate over the cells in which both sides of a conflict about chunks differ.

        Chunks that both wrote may agree in most of their cells. The values before are those of the
        branch when the merge began, those after are the source's.

        Args:
            conflict: one of the report, open or settled.

        Yields:
            The cells of one chunk that differ.

        Raises:
            InvalidInputError: the conflict is not about chunks, or one side deleted the array, or
                gave it other codecs, chunks, type or fill value.
            FormatError: a chunk is damaged.

        Cost: both versions of each chunk of the conflict. Memory: 256 MiB or two chunks.
        """
        if conflict not in self.report.conflicts or not conflict.coords:
            raise InvalidInputError(
                f"{conflict.kind.name} at {conflict.path!r} is not a conflict about chunks in this "
                "merge, so it has no cells."
            )
        node_id = self._clashes[self.report.conflicts.index(conflict)].node_id
        assert node_id is not None  # of chunks
        coords = np.array(conflict.coords, np.uint32)
        before, after = self._sides
        async for cells in cells_of_chunks(before.store, after.store, node_id, coords):
            yield cells

    async def commit(
        self, message: str | None = None, metadata: Mapping[str, JSON] | None = None
    ) -> SnapshotId:
        """Commit the merge. The session only reads afterwards.

        If others committed to the branch meanwhile, the merge is replayed on top, unless they
        changed the same.

        Args:
            message: says what was done.
            metadata: properties of the snapshot, laid over the default ones.

        Raises:
            MergeConflictError: conflicts are open; nothing was published.
            NothingToCommitError: the merge changes nothing on the branch.
            RebaseFailedError: others changed the same meanwhile. Begin the merge again.
            OutcomeUnknownError: the storage never answered; commit again.

        Cancellation: the commit may have been published.
        """
        if self._open:
            named = ", ".join(repr(it.path) for it in self._open[:5])
            raise MergeConflictError(
                f"{len(self._open)} conflict(s) of the merge are open, at {named}. Nothing was "
                "published. Settle them with keep_branch, take_source or resolved.",
                report=self.report,
            )
        return await self.session.commit(
            message or self._message,
            {**self._properties, **(metadata or {})},
            # People decided on what both sides had; what others changed at the same places since
            # then they did not see. That is a new conflict, and nothing is decided for them.
            rebase_with=ConflictDetector(),
        )

    def _close(self, conflicts: tuple[MergeConflict, ...]) -> None:
        for conflict in conflicts:
            self._check(conflict)
        self._open = [it for it in self._open if it not in conflicts]

    def _check(self, conflict: MergeConflict) -> None:
        if conflict not in self._open:
            raise InvalidInputError(
                f"{conflict.kind.name} at {conflict.path!r} is not an open conflict of this merge."
            )

    async def _take(self, conflict: MergeConflict) -> None:
        workspace, path = self.session.workspace, conflict.path
        match conflict.kind:
            case ConflictKind.CHUNK_DOUBLE_UPDATE:
                await self._take_chunks(path, conflict.coords)
            case ConflictKind.ZARR_METADATA_DOUBLE_UPDATE:
                node, there = self._source.node(path), workspace.node(path)
                if node is None or there is None:
                    raise _not_alone(conflict)
                try:
                    workspace.set_node(path, node.user_data, node.array)
                except InvalidMetadataError as error:  # it came from the storage, not from a caller
                    raise FormatError(
                        f"The source of the merge has a damaged node at {path!r}. {error}"
                    ) from error
            case ConflictKind.DELETE_OF_UPDATED_ARRAY | ConflictKind.DELETE_OF_UPDATED_GROUP:
                workspace.delete_node(path)
            case _:
                raise _not_alone(conflict)

    async def _take_chunks(self, path: str, coords: tuple[Coordinates, ...]) -> None:
        refs: dict[Coordinates, ChunkRef | None] = {}
        for at in coords:
            handle = await self._source.find_chunk(path, at)
            # None deletes: where the source has no chunk, taking its side removes ours.
            refs[at] = None if handle is None else handle.ref
        workspace = self.session.workspace
        with workspace.lock:
            workspace.set_refs(path, ChunkRefs.from_mapping(len(coords[0]), refs))
            # The chunks belong to the source's snapshot. The commit requires that it still is in
            # the history, or collection may have taken them.
            workspace.changes.sources |= {self._source.base.id}


def _not_alone(conflict: MergeConflict) -> InvalidInputError:
    return InvalidInputError(
        f"{conflict.kind.name} at {conflict.path!r} is not settled by taking the source's side "
        "alone. Write what is right into the session, and call resolved."
    )
