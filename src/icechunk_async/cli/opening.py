"""Opening the repository that a command is about, and finding what a REF stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from icechunk_async.errors import (
    BranchNotFoundError,
    InvalidInputError,
    NotFoundError,
    TagNotFoundError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from icechunk_async import Repository, Session
    from icechunk_async.cli.options import OptionPair
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.repository.virtual import VirtualAccess

__all__ = ["Target", "find_target", "on_repository", "open_session"]


@dataclass(frozen=True, slots=True)
class Target:
    """What a REF stands for."""

    ref: str
    snapshot_id: SnapshotId


def on_repository[D](
    url: str,
    options: Sequence[OptionPair] | None,
    read: Callable[[Repository], Awaitable[D]],
    *,
    authorize: Mapping[str, VirtualAccess] | None = None,
) -> Callable[[], Coroutine[Any, Any, D]]:
    """Answer what a command does: open the repository, ask it, close it."""

    def work() -> Coroutine[Any, Any, D]:
        from icechunk_async import Repository  # noqa: PLC0415  # slow to import

        opened = Repository.open(
            url, storage_options=dict(options or ()), authorize_virtual_chunk_access=authorize
        )
        return _ask(opened, read)

    return work


async def _ask[D](
    opened: AbstractAsyncContextManager[Repository], read: Callable[[Repository], Awaitable[D]]
) -> D:
    async with opened as repository:
        return await read(repository)


async def find_target(repository: Repository, ref: str, as_of: datetime | None = None) -> Target:
    """Find a branch, a tag or a snapshot id, in this order.

    Raises:
        NotFoundError: the text is none of these.
        InvalidInputError: ``as_of`` with something else than a branch.
        SnapshotNotFoundError: the branch had no snapshot yet at that time.
    """
    try:
        tip = await repository.lookup_branch(ref)
    except BranchNotFoundError:
        if as_of is not None:
            raise InvalidInputError(
                f"--as-of needs a branch, and there is no branch {ref!r}. A tag or a snapshot id "
                "names one moment already.",
                ref=ref,
            ) from None
        return Target(ref, await _find_fixed(repository, ref))
    if as_of is None:
        return Target(ref, tip)
    session = await repository.readonly_session(ref, as_of=as_of)
    return Target(ref, session.snapshot_id)


async def _find_fixed(repository: Repository, ref: str) -> SnapshotId:
    try:
        return await repository.lookup_tag(ref)
    except TagNotFoundError:
        pass
    try:
        return (await repository.lookup_snapshot(ref)).id
    except InvalidInputError:
        branches, tags = await repository.list_branches(), await repository.list_tags()
        raise NotFoundError(
            f"{ref!r} is no branch, tag or snapshot id. Branches here: {_some(branches)}. Tags "
            f"here: {_some(tags)}.",
            ref=ref,
        ) from None


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:20]) or "none"


async def open_session(
    repository: Repository, ref: str, as_of: datetime | None
) -> tuple[Target, Session]:
    """Answer what a REF stands for, and a session that reads it."""
    target = await find_target(repository, ref, as_of)
    return target, await repository.readonly_session(snapshot_id=target.snapshot_id)
