"""The repo info besides references: metadata, status, feature flags, operations log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.engine.history.repo_info import edits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from icechunk_async.engine.history.protocol import FeatureFlag
    from icechunk_async.engine.history.repo_info.file import RepoInfoFile
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.operations_log import RepoStatus, Update, UpdateDetail
    from icechunk_async.format.repo_info import RepoInfo

__all__ = ["RepoInfoState"]


class RepoInfoState:
    """A `RepositoryState` of format 2."""

    def __init__(self, file: RepoInfoFile) -> None:
        """Read and write the repo info."""
        self._file = file

    async def info(self) -> RepoInfo:
        """Return the whole state. Cost: one conditional request."""
        return (await self._file.refresh()).info

    async def replace_metadata(self, metadata: Mapping[str, JSON]) -> None:
        """Replace the repository's metadata."""
        await self._file.update(edits.replace_metadata(metadata))

    async def merge_metadata(
        self, items_for: Callable[[RepoInfo], Mapping[str, JSON]]
    ) -> dict[str, JSON]:
        """Lay items over the repository's metadata and return all of it."""
        merged: dict[str, JSON] = {}

        def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
            nonlocal merged  # of the try that lands
            changed, detail = edits.merge_metadata(items_for(info))(info)
            merged = changed.metadata
            return changed, detail

        await self._file.update(edit)
        return merged

    async def set_status(self, status: RepoStatus) -> None:
        """Replace the repository's status."""
        await self._file.update(edits.change_status(status), despite_status=True)

    def check_online(self) -> None:
        """Refuse changes while the status, as last seen, forbids them."""
        edits.check_online(self._file.seen.info)

    async def feature_flags(self) -> list[FeatureFlag]:
        """Return every known feature flag. Cost: one conditional request."""
        return edits.feature_flags(await self.info())

    async def set_feature_flag(self, name: str, setting: bool | None) -> None:  # noqa: FBT001
        """Switch a feature on (True), off (False), or back to its default (None)."""
        await self._file.update(edits.set_feature_flag(name, setting))

    async def check_feature(self, name: str) -> None:
        """Refuse an operation whose feature flag is off. Cost: one conditional request."""
        edits.check_feature(await self.info(), name)

    async def operations(self) -> AsyncIterator[Update]:
        """Iterate over the operations log, newest first.

        Cost: one request for each ``num_updates_per_repo_info_file`` entries.
        """
        info: RepoInfo | None = await self.info()
        backup: str | None = None
        while info is not None:  # else old backups were removed, and the log begins later
            first, *others = info.updates
            # A backup's newest entry does not name the backup: it is the file itself.
            yield first if backup is None else edits.with_backup(first, backup)
            for update in others:
                yield update
            backup = info.before_updates
            if backup is None:
                return
            info = await self._file.read_backup(backup)
