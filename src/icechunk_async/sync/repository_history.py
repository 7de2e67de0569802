"""Looking at what was done: ancestry, differences, the log of operations, files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from icechunk_async.sync.asking import Asking
from icechunk_async.sync.conversion import check_one
from icechunk_async.sync.iterators import AsyncCloseableIterator
from icechunk_async.sync.snapshots import Diff, ManifestFileInfo, SnapshotInfo

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from icechunk_async.engine.history.diff import Diff as AsyncDiff
    from icechunk_async.engine.history.graph import AncestryGraph
    from icechunk_async.repository import Repository as AsyncRepository
    from icechunk_async.sync.ops import Update

__all__ = ["HistoryOperations"]


class HistoryOperations(Asking):
    """A base of the repository."""

    def ancestry(
        self,
        *,
        branch: str | None = None,
        tag: str | None = None,
        snapshot_id: str | None = None,
    ) -> Iterator[SnapshotInfo]:
        """Iterate over snapshots, from the one named back to the first.

        Exactly one of the arguments is given.

        Raises:
            RefNotFoundError, SnapshotNotFoundError: there is none.
        """
        return self.async_ancestry(branch=branch, tag=tag, snapshot_id=snapshot_id).begun()

    def async_ancestry(
        self,
        *,
        branch: str | None = None,
        tag: str | None = None,
        snapshot_id: str | None = None,
    ) -> AsyncCloseableIterator[SnapshotInfo]:
        """Iterate asynchronously over what :meth:`ancestry` answers."""
        check_one(branch, tag, snapshot_id)
        return AsyncCloseableIterator(
            self._repository.each(
                lambda it: it.ancestry(branch=branch, tag=tag, snapshot_id=snapshot_id),
                SnapshotInfo.from_native,
            )
        )

    def ancestry_graph(
        self,
        *,
        branch: str | None = None,
        tag: str | None = None,
        snapshot_id: str | None = None,
        plain: bool = False,
    ) -> AncestryGraph:
        """Draw history: text when printed, SVG in a notebook.

        Args:
            branch: draw its ancestry; if nothing is named, that of all branches is drawn.
            tag: draw its ancestry.
            snapshot_id: draw its ancestry.
            plain: without colours.
        """
        return self._ask(
            lambda it: it.ancestry_graph(
                branch=branch, tag=tag, snapshot_id=snapshot_id, plain=plain
            )
        )

    async def ancestry_graph_async(
        self,
        *,
        branch: str | None = None,
        tag: str | None = None,
        snapshot_id: str | None = None,
        plain: bool = False,
    ) -> AncestryGraph:
        """Await what :meth:`ancestry_graph` answers."""
        return await self._ask_async(
            lambda it: it.ancestry_graph(
                branch=branch, tag=tag, snapshot_id=snapshot_id, plain=plain
            )
        )

    def ops_log(self) -> Iterator[Update]:
        """Iterate over what was done to the repository, newest first; format version 2."""
        return self.ops_log_async().begun()

    def ops_log_async(self) -> AsyncCloseableIterator[Update]:
        """Iterate asynchronously over what :meth:`ops_log` answers."""
        from icechunk_async.sync.ops import Update  # noqa: PLC0415 -- not without need

        return AsyncCloseableIterator(
            self._repository.each(lambda it: it.ops_log(), Update.from_native)
        )

    def lookup_snapshot(self, snapshot_id: str) -> SnapshotInfo:
        """Return when and why a snapshot was made, and its parent.

        Raises:
            SnapshotNotFoundError: the repository has no such snapshot.
        """
        return SnapshotInfo.from_native(self._ask(lambda it: it.lookup_snapshot(snapshot_id)))

    async def lookup_snapshot_async(self, snapshot_id: str) -> SnapshotInfo:
        """Await what :meth:`lookup_snapshot` answers."""
        info = await self._ask_async(lambda it: it.lookup_snapshot(snapshot_id))
        return SnapshotInfo.from_native(info)

    def list_manifest_files(self, snapshot_id: str) -> list[ManifestFileInfo]:
        """Return the manifests that a snapshot uses."""
        found = self._ask(lambda it: it.list_manifest_files(snapshot_id))
        return [ManifestFileInfo.from_native(info) for info in found]

    async def list_manifest_files_async(self, snapshot_id: str) -> list[ManifestFileInfo]:
        """Await what :meth:`list_manifest_files` answers."""
        found = await self._ask_async(lambda it: it.list_manifest_files(snapshot_id))
        return [ManifestFileInfo.from_native(info) for info in found]

    def diff(
        self,
        *,
        from_branch: str | None = None,
        from_tag: str | None = None,
        from_snapshot_id: str | None = None,
        to_branch: str | None = None,
        to_tag: str | None = None,
        to_snapshot_id: str | None = None,
    ) -> Diff:
        """Return what the commits after one snapshot up to another touched.

        One argument names the older snapshot, one the newer.

        Raises:
            InvalidInputError: the older is not an ancestor of the newer.
        """
        starts = from_branch, from_tag, from_snapshot_id
        ends = to_branch, to_tag, to_snapshot_id
        return Diff.from_native(self._ask(_difference(starts, ends)))

    async def diff_async(
        self,
        *,
        from_branch: str | None = None,
        from_tag: str | None = None,
        from_snapshot_id: str | None = None,
        to_branch: str | None = None,
        to_tag: str | None = None,
        to_snapshot_id: str | None = None,
    ) -> Diff:
        """Await what :meth:`diff` answers."""
        starts = from_branch, from_tag, from_snapshot_id
        ends = to_branch, to_tag, to_snapshot_id
        return Diff.from_native(await self._ask_async(_difference(starts, ends)))

    def inspect_snapshot(self, snapshot_id: str) -> dict[str, Any]:
        """Return what the file of a snapshot says, for debugging."""
        return self._ask(lambda it: it.inspect_snapshot(snapshot_id))

    async def inspect_snapshot_async(self, snapshot_id: str) -> dict[str, Any]:
        """Await what :meth:`inspect_snapshot` answers."""
        return await self._ask_async(lambda it: it.inspect_snapshot(snapshot_id))

    def inspect_repo_info(self) -> dict[str, Any]:
        """Return what the repository's own file says, for debugging; format version 2."""
        return self._ask(lambda it: it.inspect_repo_info())

    async def inspect_repo_info_async(self) -> dict[str, Any]:
        """Await what :meth:`inspect_repo_info` answers."""
        return await self._ask_async(lambda it: it.inspect_repo_info())

    def inspect_manifest(self, manifest_id: str) -> dict[str, Any]:
        """Return what a manifest says, without its references, for debugging."""
        return self._ask(lambda it: it.inspect_manifest(manifest_id))

    async def inspect_manifest_async(self, manifest_id: str) -> dict[str, Any]:
        """Await what :meth:`inspect_manifest` answers."""
        return await self._ask_async(lambda it: it.inspect_manifest(manifest_id))

    def inspect_transaction_log(self, snapshot_id: str) -> dict[str, Any]:
        """Return what the log of a commit says, for debugging."""
        return self._ask(lambda it: it.inspect_transaction_log(snapshot_id))

    async def inspect_transaction_log_async(self, snapshot_id: str) -> dict[str, Any]:
        """Await what :meth:`inspect_transaction_log` answers."""
        return await self._ask_async(lambda it: it.inspect_transaction_log(snapshot_id))


def _difference(
    starts: tuple[str | None, str | None, str | None],
    ends: tuple[str | None, str | None, str | None],
) -> Callable[[AsyncRepository], Awaitable[AsyncDiff]]:
    check_one(*starts)
    check_one(*ends)
    return lambda it: it.diff(
        from_branch=starts[0],
        from_tag=starts[1],
        from_snapshot_id=starts[2],
        to_branch=ends[0],
        to_tag=ends[1],
        to_snapshot_id=ends[2],
    )
