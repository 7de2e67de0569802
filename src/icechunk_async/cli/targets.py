"""Find what the user's REF names: a branch, a tag or a snapshot id."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.versions.naming import find_ref
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from datetime import datetime

    from icechunk_async import Repository, Session, SnapshotId

__all__ = ["CONCURRENT_LOOKUPS", "Target", "find_target", "open_session", "ref_targets"]

# In layouts with a file for each ref, each look-up is a request.
CONCURRENT_LOOKUPS = 16


@dataclass(frozen=True, slots=True)
class Target:
    """A REF and the snapshot that it names."""

    ref: str
    snapshot_id: SnapshotId


async def find_target(repository: Repository, ref: str, as_of: datetime | None = None) -> Target:
    """Find a branch, a tag or a snapshot id, in this order; see `find_ref`.

    Raises:
        NotFoundError: the text names no branch, tag or snapshot.
        InvalidInputError: ``as_of`` was given with something other than a branch.
        SnapshotNotFoundError: the branch had no snapshot yet at that time.
    """
    if as_of is None:
        return Target(ref, await find_ref(repository.engine, ref))
    if ref not in await repository.list_branches():
        raise InvalidInputError(
            f"--as-of needs a branch, and there is no branch {ref!r}. A tag or a snapshot id "
            "names one moment already.",
            ref=ref,
        )
    session = await repository.readonly_session(ref, as_of=as_of)
    return Target(ref, session.snapshot_id)


async def open_session(
    repository: Repository, ref: str, as_of: datetime | None
) -> tuple[Target, Session]:
    """Return the target of a REF, and a session that reads it."""
    target = await find_target(repository, ref, as_of)
    # By the id that is shown: a branch that moves in between would be read at another snapshot.
    return target, await repository.readonly_session(snapshot_id=target.snapshot_id)


async def ref_targets(repository: Repository, kind: str) -> list[tuple[str, SnapshotId]]:
    """Return branches or tags and the snapshots that they name, ascending by name.

    Args:
        repository: the open repository.
        kind: ``branch`` or ``tag``.
    """
    history = repository.engine.history
    targets = await (history.branches() if kind == "branch" else history.tags())
    return sorted(targets.items())
