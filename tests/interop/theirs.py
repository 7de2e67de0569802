"""The official engine, in the plain words of ``answers``.

Importing this skips the importing test module where the official wheel is missing.
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async.engine.commit.conflicts import ConflictKind
from tests.interop.answers import Clash, Commit, Operation, Policy, Touched
from tests.interop.ours import url_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from datetime import datetime
    from pathlib import Path

    from zarr.abc.store import Store

    from tests.interop.answers import Repo, Settings, Work

icechunk: Any = pytest.importorskip("icechunk", reason="the official wheel is not installed")

__all__ = ["Theirs", "icechunk", "open_official", "their_config", "their_solver"]


def their_config(settings: Settings) -> Any:
    """Return a configuration in the official classes."""
    config = icechunk.RepositoryConfig(
        inline_chunk_threshold_bytes=settings.inline,
        num_updates_per_repo_info_file=settings.max_updates,
    )
    if settings.compress_from is not None:
        make = icechunk.ManifestVirtualChunkLocationCompressionConfig
        compression = make(min_num_chunks=settings.compress_from)
        config.manifest = icechunk.ManifestConfig(virtual_chunk_location_compression=compression)
    if settings.splits:
        rules = []
        for (kind, regex), dims in settings.splits:
            make = getattr(icechunk.ManifestSplitCondition, kind)
            condition = make() if kind == "AnyArray" else make(regex)
            rules.append((condition, tuple((_dimension(dim), size) for dim, size in dims)))
        splitting = icechunk.ManifestSplittingConfig(tuple(rules))
        config.manifest = icechunk.ManifestConfig(splitting=splitting)
    if settings.source is not None:
        store = icechunk.local_filesystem_store(str(settings.source))
        container = icechunk.VirtualChunkContainer(url_of(settings.source), store)
        config.set_virtual_chunk_container(container)
    return config


def _dimension(dim: str | int | None) -> Any:
    conditions = icechunk.ManifestSplitDimCondition
    if dim is None:
        return conditions.Any()
    return conditions.Axis(dim) if isinstance(dim, int) else conditions.DimensionName(dim)


def their_solver(policy: Policy) -> Any:
    """Return a conflict solver of the official engine."""
    if policy.name == "detector":
        return icechunk.ConflictDetector()
    choice = {"ours": "UseOurs", "theirs": "UseTheirs", "fail": "Fail"}[policy.chunks]
    return icechunk.BasicConflictSolver(
        on_chunk_conflict=getattr(icechunk.VersionSelection, choice),
        fail_on_delete_of_updated_array=policy.fail_array,
        fail_on_delete_of_updated_group=policy.fail_group,
    )


def open_official(root: Path, source: Path | None = None) -> Any:
    """Open a repository with the official engine."""
    storage = icechunk.local_filesystem_storage(str(root))
    access = None
    if source is not None:
        access = {url_of(source): icechunk.credentials.LocalFileSystemAccess}
    return icechunk.Repository.open(storage, authorize_virtual_chunk_access=access)


def touched(diff: Any) -> Touched:
    """Return a diff as plain values."""
    return Touched(
        frozenset(diff.new_groups),
        frozenset(diff.new_arrays),
        frozenset(diff.deleted_groups),
        frozenset(diff.deleted_arrays),
        frozenset(diff.updated_groups),
        frozenset(diff.updated_arrays),
        {path: sorted(map(tuple, chunks)) for path, chunks in diff.updated_chunks.items()},
        tuple(diff.moved_nodes),
    )


class _Work:
    def __init__(self, session: Any) -> None:
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
        solver = their_solver(Policy()) if rebasing else None
        tip = await self.session.commit_async(
            message, metadata, rebase_with=solver, allow_empty=empty
        )
        return str(tip)

    async def amend(self, message: str, metadata: Mapping[str, Any] | None = None) -> str:
        return str(await self.session.amend_async(message, metadata=metadata))

    async def flush(self, message: str) -> str:
        return str(await self.session.flush_async(message))

    async def rebase(self, policy: Policy) -> list[Clash]:
        try:
            await self.session.rebase_async(their_solver(policy))
        except icechunk.RebaseFailedError as error:
            return sorted(
                Clash(
                    ConflictKind(int(it.conflict_type)),
                    it.path,
                    tuple(sorted(map(tuple, it.conflicted_chunks or []))),
                )
                for it in error.conflicts
            )
        return []

    def status(self) -> Touched:
        return touched(self.session.status())


class _Repo:
    def __init__(self, repository: Any) -> None:
        self.repository = repository

    async def branches(self) -> dict[str, str]:
        names = await self.repository.list_branches_async()
        return {name: await self.repository.lookup_branch_async(name) for name in sorted(names)}

    async def tags(self) -> dict[str, str]:
        names = await self.repository.list_tags_async()
        return {name: await self.repository.lookup_tag_async(name) for name in sorted(names)}

    async def create_branch(self, name: str, snapshot: str) -> None:
        await self.repository.create_branch_async(name, snapshot)

    async def reset_branch(self, name: str, snapshot: str, expected: str | None = None) -> None:
        await self.repository.reset_branch_async(name, snapshot, from_snapshot_id=expected)

    async def delete_branch(self, name: str) -> None:
        await self.repository.delete_branch_async(name)

    async def create_tag(self, name: str, snapshot: str) -> None:
        await self.repository.create_tag_async(name, snapshot)

    async def delete_tag(self, name: str) -> None:
        await self.repository.delete_tag_async(name)

    async def ancestry(self, snapshot: str) -> list[Commit]:
        return [
            Commit(
                info.id,
                info.parent_id,
                info.written_at,
                info.message,
                json.dumps(dict(info.metadata), sort_keys=True),
            )
            async for info in self.repository.async_ancestry(snapshot_id=snapshot)
        ]

    async def diff(self, start: str, end: str) -> Touched:
        diff = await self.repository.diff_async(from_snapshot_id=start, to_snapshot_id=end)
        return touched(diff)

    async def operations(self) -> list[Operation]:
        return [
            Operation(type(it.kind).__name__, _detail(it.kind), it.updated_at, it.backup_path)
            async for it in self.repository.ops_log_async()
        ]

    async def reading(self, snapshot: str) -> Store:
        session = await self.repository.readonly_session_async(snapshot_id=snapshot)
        store: Store = session.store
        return store

    async def as_of(self, branch: str, moment: datetime) -> str:
        session = await self.repository.readonly_session_async(branch, as_of=moment)
        return str(session.snapshot_id)

    async def work(self, branch: str = "main") -> Work:
        return _Work(await self.repository.writable_session_async(branch))


def _detail(kind: Any) -> dict[str, Any]:
    values = {name: getattr(kind, name) for name in dir(kind) if name[0].islower()}
    if "status" in values:
        status = values["status"]
        name = str(status.availability).rpartition(".")[2].lower()
        values["status"] = (name, status.limited_availability_reason)
    return values


class Theirs:
    """The reference."""

    name = "theirs"

    async def create(self, root: Path, spec: int, settings: Settings | None = None) -> None:
        """Create a repository in a directory."""
        config = None if settings is None else their_config(settings)
        storage = icechunk.local_filesystem_storage(str(root))
        await icechunk.Repository.create_async(storage, spec_version=spec, config=config)

    @asynccontextmanager
    async def open(self, root: Path, source: Path | None = None) -> AsyncIterator[Repo]:
        """Open a repository; ``source`` authorises the container of that directory."""
        yield _Repo(open_official(root, source))
