"""The questions to both engines, and their replies as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime
    from pathlib import Path

    from zarr.abc.store import Store

    from icechunk_async.engine.commit.conflicts import ConflictKind

__all__ = [
    "CONFIGS",
    "Clash",
    "Commit",
    "Engine",
    "Operation",
    "Policy",
    "Repo",
    "Settings",
    "Touched",
    "Work",
]


@dataclass(frozen=True)
class Settings:
    """A configuration that both engines can be given."""

    inline: int | None = None
    splits: tuple[tuple[tuple[str, str], tuple[tuple[str | int | None, int], ...]], ...] = ()
    """Rules: (kind of array condition, its regex), then pairs of (axis, name or any, chunks)."""
    source: Path | None = None
    """Directory of a virtual chunk container."""
    max_updates: int | None = None
    """Entries of the operations log per file."""
    compress_from: int | None = None
    """Virtual chunks of a manifest from which on locations are compressed."""


_ANY = (("AnyArray", ""), ((None, 3),))
_PATHS = (("path_matches", "^/a"), ((0, 2), ("^x$", 1)))
_NAMES = (("name_matches", "^c|größe"), ((1, 2), (None, 4)))
CONFIGS = (
    Settings(),
    Settings(inline=0, splits=(_ANY,)),
    Settings(inline=40, splits=(_PATHS, _NAMES)),
    Settings(inline=5000, splits=(_NAMES, _PATHS, _ANY), max_updates=3),
    Settings(max_updates=1),
)
"""Configurations that make the engines write manifests in different ways."""


@dataclass(frozen=True)
class Commit:
    """A snapshot's card."""

    id: str
    parent: str | None
    written_at: datetime
    message: str
    metadata: str
    """JSON with sorted keys, so that 1 and 1.0 differ."""


@dataclass(frozen=True)
class Touched:
    """A diff, or the status of a session."""

    new_groups: frozenset[str] = frozenset()
    new_arrays: frozenset[str] = frozenset()
    deleted_groups: frozenset[str] = frozenset()
    deleted_arrays: frozenset[str] = frozenset()
    updated_groups: frozenset[str] = frozenset()
    updated_arrays: frozenset[str] = frozenset()
    chunks: Mapping[str, list[tuple[int, ...]]] = field(default_factory=dict)
    moves: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Operation:
    """An entry of the operations log."""

    kind: str
    detail: Mapping[str, Any]
    at: datetime
    backup: str | None


@dataclass(frozen=True)
class Policy:
    """A conflict solver: the detector, or the basic one with its switches."""

    name: str = "basic"
    chunks: str = "ours"
    fail_array: bool = False
    fail_group: bool = False


@dataclass(frozen=True, order=True)
class Clash:
    """One conflict of a rebase."""

    kind: ConflictKind
    path: str
    coords: tuple[tuple[int, ...], ...] = ()


class Work(Protocol):
    """A writable session."""

    @property
    def store(self) -> Store:
        """Its Zarr store."""
        ...

    @property
    def snapshot(self) -> str:
        """The snapshot that it stands on."""
        ...

    async def commit(
        self,
        message: str,
        metadata: Mapping[str, Any] | None = None,
        *,
        empty: bool = False,
        rebasing: bool = False,
    ) -> str:
        """Commit, also over newer commits if ``rebasing``; answer the new snapshot."""
        ...

    async def amend(self, message: str, metadata: Mapping[str, Any] | None = None) -> str:
        """Amend the tip, and answer the new snapshot."""
        ...

    async def flush(self, message: str) -> str:
        """Make a detached snapshot."""
        ...

    async def rebase(self, policy: Policy) -> list[Clash]:
        """Rebase onto the tip; answer the conflicts that stood in the way, sorted."""
        ...

    def status(self) -> Touched:
        """Return the changes of the session."""
        ...


class Repo(Protocol):
    """An open repository."""

    async def branches(self) -> dict[str, str]:
        """Branches and their tips."""
        ...

    async def tags(self) -> dict[str, str]:
        """Tags and their snapshots."""
        ...

    async def create_branch(self, name: str, snapshot: str) -> None:
        """Create a branch."""
        ...

    async def reset_branch(self, name: str, snapshot: str, expected: str | None = None) -> None:
        """Move a branch, if it is where it is expected."""
        ...

    async def delete_branch(self, name: str) -> None:
        """Delete a branch."""
        ...

    async def create_tag(self, name: str, snapshot: str) -> None:
        """Create a tag."""
        ...

    async def delete_tag(self, name: str) -> None:
        """Delete a tag."""
        ...

    async def ancestry(self, snapshot: str) -> list[Commit]:
        """A snapshot and its ancestors, newest first."""
        ...

    async def diff(self, start: str, end: str) -> Touched:
        """Return the changes of the commits after one snapshot up to another."""
        ...

    async def operations(self) -> list[Operation]:
        """The operations log, newest first."""
        ...

    async def reading(self, snapshot: str) -> Store:
        """A store of one snapshot."""
        ...

    async def as_of(self, branch: str, moment: datetime) -> str:
        """The tip of a branch at a time."""
        ...

    async def work(self, branch: str = "main") -> Work:
        """Begin a writable session."""
        ...


class Engine(Protocol):
    """An implementation of Icechunk."""

    @property
    def name(self) -> str:
        """Ours or theirs."""
        ...

    async def create(self, root: Path, spec: int, settings: Settings | None = None) -> None:
        """Create a repository in a directory."""
        ...

    def open(self, root: Path, source: Path | None = None) -> AbstractAsyncContextManager[Repo]:
        """Open a repository; ``source`` authorises the container of that directory."""
        ...
