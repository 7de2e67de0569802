"""Reading a repository's history: ancestry, differences, what was done to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async._concurrency import gather
from icechunk_async.errors import InvalidInputError
from icechunk_async.repository.refs import RefOperations, as_snapshot_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.updates import Update
    from icechunk_async.repository.ancestry_graph import AncestryGraph
    from icechunk_async.repository.diff import Diff

__all__ = ["HistoryOperations"]


class HistoryOperations(RefOperations):
    """What can be asked about history; a base of the repository."""

    async def lookup_snapshot(self, snapshot_id: SnapshotId | str) -> SnapshotInfo:
        """Answer when and why a snapshot was made, and its parent.

        Raises:
            SnapshotNotFoundError: the repository has no such snapshot.
        """
        return await self._opened.history.snapshot_info(as_snapshot_id(snapshot_id))

    async def ancestry(
        self,
        *,
        branch: str | None = None,
        tag: str | None = None,
        snapshot_id: SnapshotId | str | None = None,
    ) -> AsyncIterator[SnapshotInfo]:
        """Iterate over snapshots, from the one named back to the first.

        Exactly one of the arguments is given; ``main`` if none is.
        """
        start = await self._resolve(branch, tag, snapshot_id)
        async for info in self._opened.history.ancestry(start):
            yield info

    async def diff(
        self,
        *,
        from_branch: str | None = None,
        from_tag: str | None = None,
        from_snapshot_id: SnapshotId | str | None = None,
        to_branch: str | None = None,
        to_tag: str | None = None,
        to_snapshot_id: SnapshotId | str | None = None,
    ) -> Diff:
        """Answer what the commits after one snapshot up to another touched.

        One argument names the older snapshot, one the newer.

        Raises:
            InvalidInputError: the older is not an ancestor of the newer.
        """
        from icechunk_async.repository.diff import diff_snapshots  # noqa: PLC0415 -- not without need

        start, end = await gather(
            self._resolve(from_branch, from_tag, from_snapshot_id, default=None),
            self._resolve(to_branch, to_tag, to_snapshot_id, default=None),
        )
        return await diff_snapshots(self._opened.history, self._opened.assets, start, end)

    async def ops_log(self) -> AsyncIterator[Update]:
        """Iterate over what was done to the repository, newest first.

        Raises:
            UnsupportedBySpecError: format version 1 keeps no such log.
        """
        async for update in self._opened.history.operations():
            yield update

    async def ancestry_graph(
        self,
        *,
        branch: str | None = None,
        tag: str | None = None,
        snapshot_id: SnapshotId | str | None = None,
        plain: bool = False,
    ) -> AncestryGraph:
        """Draw history: text when printed, SVG in a notebook.

        At most one of the first three is given, and its ancestry is drawn; if none is, that of
        all branches.

        Args:
            branch: draw its ancestry.
            tag: draw its ancestry.
            snapshot_id: draw its ancestry.
            plain: without colours.

        Raises:
            BranchNotFoundError, TagNotFoundError, SnapshotNotFoundError: there is none.

        Cost: as :meth:`ancestry`, for each branch down to what is known already.
        """
        from icechunk_async.repository.ancestry_graph import (  # noqa: PLC0415 -- as above
            AncestryGraph,
            lay_out,
        )

        history = self._opened.history
        branches, tags = await gather(history.branches(), history.tags())
        starts = list(branches.values())
        if not (branch is tag is snapshot_id is None):
            starts = [await self._resolve(branch, tag, snapshot_id)]
        infos: dict[SnapshotId, SnapshotInfo] = {}
        for start in starts:
            async for info in history.ancestry(start):
                if info.id in infos:
                    break
                infos[info.id] = info
        return AncestryGraph(lay_out(infos.values(), branches, tags), plain=plain)

    async def _resolve(
        self,
        branch: str | None,
        tag: str | None,
        snapshot_id: SnapshotId | str | None,
        *,
        default: str | None = "main",
    ) -> SnapshotId:
        given = [it for it in (branch, tag, snapshot_id) if it is not None]
        if len(given) > 1 or (not given and default is None):
            raise InvalidInputError(
                "Name one of a branch, a tag and a snapshot id"
                + (", not several." if given else ".")
            )
        if tag is not None:
            return await self._opened.history.tag_target(tag)
        if snapshot_id is not None:
            return as_snapshot_id(snapshot_id)
        return await self._opened.history.branch_tip(
            branch if branch is not None else default or ""
        )
