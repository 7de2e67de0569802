"""Sessions: one consistent view of a hierarchy, and one transaction on a branch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.errors import SessionStateError
from icechunk_async.repository.changes import ChangeSet
from icechunk_async.repository.forking import Forking
from icechunk_async.repository.node_operations import NodeOperations
from icechunk_async.repository.publishing import SessionMode
from icechunk_async.repository.virtual_listing import virtual_locations

if TYPE_CHECKING:
    from icechunk_async.format.ids import NodeId, SnapshotId
    from icechunk_async.repository.diff import Diff
    from icechunk_async.zarr.store import IcechunkStore

__all__ = ["Session", "SessionMode"]


class Session(NodeOperations, Forking):
    """A snapshot to read, and for a writable session one transaction on a branch.

    Made by ``Repository.readonly_session``, ``Repository.writable_session`` and
    ``Repository.rearrange_session``. Nothing that a
    session changed is visible to anyone else before :meth:`commit`; a session that is dropped
    leaves nothing behind but objects for garbage collection.

    One session may be used from several tasks and event loops (Zarr has its own).
    """

    def __reduce__(self) -> str:
        """Refuse to pickle, and say what to send instead."""
        raise SessionStateError(
            "A session does not pickle: its connections stay here, and a copy of a writable one "
            "could not commit. To write elsewhere send a fork, 'await session.fork()', and merge "
            "it when it is back. To read, open the repository in the other process "
            f"with readonly_session(snapshot_id={str(self.snapshot_id)!r})."
        )

    def __repr__(self) -> str:
        """Show mode, branch and snapshot."""
        where = f" on {self._branch!r}" if self._branch is not None else ""
        return f"<{self._mode.value} session{where} at {self.snapshot_id}>"

    @property
    def mode(self) -> SessionMode:
        """What the session may do; it only reads once it was committed."""
        return self._mode

    @property
    def read_only(self) -> bool:
        """Whether the session only reads."""
        return self._mode is SessionMode.READONLY

    @property
    def snapshot_id(self) -> SnapshotId:
        """The snapshot that the session stands on."""
        return self.workspace.base.id

    @property
    def spec_version(self) -> int:
        """The format version that new files are written to."""
        return self._history.spec_version

    @property
    def branch(self) -> str | None:
        """The branch that a writable session commits to."""
        return self._branch

    @property
    def store(self) -> IcechunkStore:
        """A Zarr store of the session's hierarchy, for ``zarr`` and ``xarray``."""
        # The one convenience that looks up to a higher layer.
        from icechunk_async.zarr.store import IcechunkStore  # noqa: PLC0415

        return IcechunkStore(self, read_only=self.read_only)

    def status(self) -> Diff:
        """Answer what the session changed so far."""
        from icechunk_async.repository.diff import diff_of_log  # noqa: PLC0415 -- not without need

        workspace = self.workspace
        with workspace.lock:
            tree, changes = workspace.tree, workspace.changes
            paths: dict[NodeId, str] = {it: gone.path for it, gone in changes.deleted.items()}
            paths.update((node.id, path) for path, node in changes.new.items())
            log = changes.log(workspace.base.id)
            return diff_of_log(log, lambda it: paths.get(it) or tree.base.path_of(it))

    async def all_virtual_chunk_locations(self) -> list[str]:
        """Answer the URL of the object behind every virtual chunk, array by array.

        There is an entry for each chunk; names of containers are replaced by their prefixes.

        Cost: one request for each manifest that is not cached; no object is made per chunk.
        """
        return await virtual_locations(self.workspace)

    def discard_changes(self) -> None:
        """Forget every change of the session.

        Raises:
            ReadOnlyError: the session cannot change anything, or is being committed.
        """
        workspace = self.workspace
        with workspace.lock:
            workspace.check_open()
            workspace.rebase_to(workspace.base, ChangeSet())
