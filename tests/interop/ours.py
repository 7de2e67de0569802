"""Our engine, in the plain words of ``answers``."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import fields
from datetime import UTC
from typing import TYPE_CHECKING, Any

from icechunk_async import Repository, RepositoryConfig
from icechunk_async._runtime import clock
from icechunk_async.engine.commit.conflicts import (
    BasicConflictSolver,
    ConflictDetector,
    VersionSelection,
)
from icechunk_async.errors import RebaseFailedError
from icechunk_async.format.config import (
    LocalFileSystemStore,
    ManifestConfig,
    ManifestSplitCondition,
    ManifestSplitDimCondition,
    ManifestSplittingConfig,
    ManifestVirtualChunkLocationCompressionConfig,
    VirtualChunkContainer,
)
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.operations_log import FeatureFlagChanged, RepoStatusChanged
from tests.interop.answers import Clash, Commit, Operation, Policy, Touched

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from datetime import datetime
    from pathlib import Path

    from zarr.abc.store import Store

    from icechunk_async import Session
    from icechunk_async.engine.commit.conflicts import ConflictSolver
    from icechunk_async.engine.history.diff import Diff
    from tests.interop.answers import Repo, Settings, Work

__all__ = ["Ours", "our_config", "our_solver", "url_of"]

_KINDS = {"GarbageCollectionRan": "GCRan", "DetachedSnapshotCreated": "NewDetachedSnapshot"}
_FIELDS = {"previous_snapshot_id": "previous_snap_id", "new_snapshot_id": "new_snap_id"}


def url_of(directory: Path) -> str:
    """Return the prefix of a container of local files; the official engine wants it unescaped."""
    return f"file://{directory}/"


def our_config(settings: Settings) -> RepositoryConfig:
    """Return a configuration in our classes."""
    splitting = None
    if settings.splits:
        rules = []
        for (kind, regex), dims in settings.splits:
            make = getattr(ManifestSplitCondition, kind)
            condition = make() if kind == "AnyArray" else make(regex)
            rules.append((condition, tuple((_dimension(dim), size) for dim, size in dims)))
        splitting = ManifestSplittingConfig(tuple(rules))
    containers = None
    if settings.source is not None:
        store = LocalFileSystemStore(str(settings.source))
        containers = (VirtualChunkContainer(url_of(settings.source), store),)
    compression = None
    if settings.compress_from is not None:
        compression = ManifestVirtualChunkLocationCompressionConfig(settings.compress_from)
    manifest = None
    if splitting is not None or compression is not None:
        manifest = ManifestConfig(
            splitting=splitting, virtual_chunk_location_compression=compression
        )
    return RepositoryConfig(
        inline_chunk_threshold_bytes=settings.inline,
        virtual_chunk_containers=containers,
        manifest=manifest,
        num_updates_per_repo_info_file=settings.max_updates,
    )


def _dimension(dim: str | int | None) -> Any:
    match dim:
        case None:
            return ManifestSplitDimCondition.Any()
        case int():
            return ManifestSplitDimCondition.Axis(dim)
        case str():
            return ManifestSplitDimCondition.DimensionName(dim)


def our_solver(policy: Policy) -> ConflictSolver:
    """Return a conflict solver of ours."""
    if policy.name == "detector":
        return ConflictDetector()
    return BasicConflictSolver(
        VersionSelection(policy.chunks), policy.fail_array, policy.fail_group
    )


def touched(diff: Diff) -> Touched:
    """Return a diff as plain values."""
    return Touched(
        diff.new_groups,
        diff.new_arrays,
        diff.deleted_groups,
        diff.deleted_arrays,
        diff.updated_groups,
        diff.updated_arrays,
        {
            path: sorted(tuple(row) for row in coords.tolist())
            for path, coords in diff.updated_chunks.items()
        },
        diff.moved_nodes,
    )


class _Work:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.store: Store = session.store

    @property
    def snapshot(self) -> str:
        return str(self.session.snapshot_id)

    async def commit(
        self,
        message: str,
        metadata: Mapping[str, Any] | None = None,
        *,
        empty: bool = False,
        rebasing: bool = False,
    ) -> str:
        solver = our_solver(Policy()) if rebasing else None
        tip = await self.session.commit(
            message,
            metadata,
            rebase_with=solver,
            allow_empty=empty,
            allow_missing_forks=True,  # as the official engine does
        )
        return str(tip)

    async def amend(self, message: str, metadata: Mapping[str, Any] | None = None) -> str:
        return str(await self.session.amend(message, metadata))

    async def flush(self, message: str) -> str:
        return str(await self.session.flush(message))

    async def rebase(self, policy: Policy) -> list[Clash]:
        try:
            await self.session.rebase(our_solver(policy))
        except RebaseFailedError as error:
            conflicts: Any = error.context["conflicts"]
            return sorted(Clash(it.kind, it.path, tuple(sorted(it.coords))) for it in conflicts)
        return []

    def status(self) -> Touched:
        return touched(self.session.status())


class _Repo:
    def __init__(self, repository: Repository) -> None:
        self.repository = repository

    async def branches(self) -> dict[str, str]:
        names = await self.repository.list_branches()
        return {name: str(await self.repository.lookup_branch(name)) for name in sorted(names)}

    async def tags(self) -> dict[str, str]:
        names = await self.repository.list_tags()
        return {name: str(await self.repository.lookup_tag(name)) for name in sorted(names)}

    async def create_branch(self, name: str, snapshot: str) -> None:
        await self.repository.create_branch(name, snapshot)

    async def reset_branch(self, name: str, snapshot: str, expected: str | None = None) -> None:
        await self.repository.reset_branch(name, snapshot, from_snapshot_id=expected)

    async def delete_branch(self, name: str) -> None:
        await self.repository.delete_branch(name)

    async def create_tag(self, name: str, snapshot: str) -> None:
        await self.repository.create_tag(name, snapshot)

    async def delete_tag(self, name: str) -> None:
        await self.repository.delete_tag(name)

    async def ancestry(self, snapshot: str) -> list[Commit]:
        return [
            Commit(
                str(info.id),
                None if info.parent_id is None else str(info.parent_id),
                info.written_at,
                info.message,
                json.dumps(info.metadata, sort_keys=True),
            )
            async for info in self.repository.ancestry(snapshot_id=snapshot)
        ]

    async def diff(self, start: str, end: str) -> Touched:
        return touched(await self.repository.diff(from_snapshot_id=start, to_snapshot_id=end))

    async def operations(self) -> list[Operation]:
        return [
            Operation(
                _KINDS.get(type(it.detail).__name__, type(it.detail).__name__),
                _detail(it.detail),
                clock.from_us(it.updated_at),
                it.backup_path,
            )
            async for it in self.repository.ops_log()
        ]

    async def reading(self, snapshot: str) -> Store:
        return (await self.repository.readonly_session(snapshot_id=snapshot)).store

    async def as_of(self, branch: str, moment: datetime) -> str:
        session = await self.repository.readonly_session(branch, as_of=moment.astimezone(UTC))
        return str(session.snapshot_id)

    async def work(self, branch: str = "main") -> Work:
        return _Work(await self.repository.writable_session(branch))


def _detail(detail: Any) -> dict[str, Any]:
    match detail:
        case FeatureFlagChanged(flag, new_value, is_set):
            return {"id": flag, "new_value": new_value if is_set else None}
        case RepoStatusChanged(status):
            return {"status": (status.availability.name.lower(), status.reason)}
    values = {it.name: getattr(detail, it.name) for it in fields(detail)}
    return {
        _FIELDS.get(name, name): str(value) if isinstance(value, SnapshotId) else value
        for name, value in values.items()
    }


class Ours:
    """The engine under test."""

    name = "ours"

    async def create(self, root: Path, spec: int, settings: Settings | None = None) -> None:
        """Create a repository in a directory."""
        config = None if settings is None else our_config(settings)
        async with Repository.create(root, spec_version=spec, config=config):
            pass

    @asynccontextmanager
    async def open(self, root: Path, source: Path | None = None) -> AsyncIterator[Repo]:
        """Open a repository; ``source`` authorises the container of that directory."""
        access = None if source is None else {url_of(source): None}
        async with Repository.open(root, authorize_virtual_chunk_access=access) as repository:
            yield _Repo(repository)
