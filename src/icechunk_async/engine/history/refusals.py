"""Errors about refs and settings, in the same words for every way of publishing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async._runtime import clock
from icechunk_async.engine.history.protocol import MAIN
from icechunk_async.errors import (
    BranchExistsError,
    BranchNotFoundError,
    ConflictError,
    InvalidRefNameError,
    RepositoryExistsError,
    SnapshotNotFoundError,
    TagDeletedError,
    TagExistsError,
    TagNotFoundError,
    WrongTypeError,
)
from icechunk_async.format.json.values import utf8

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.storage import Storage

__all__ = [
    "being_migrated",
    "branch_exists",
    "branch_moved",
    "branch_not_reset",
    "check_new_name",
    "config_changed",
    "migrated_meanwhile",
    "no_branch",
    "no_snapshot",
    "no_snapshot_yet",
    "no_tag",
    "refuse_main",
    "repository_exists",
    "snapshot_dropped",
    "source_is_gone",
    "tag_exists",
    "tag_was_deleted",
]

_NAMES_SHOWN = 20


def no_branch(name: str, known: Iterable[str] | None = None) -> BranchNotFoundError:
    """Return the error for a branch that does not exist; ``known`` are those that do, if read."""
    return BranchNotFoundError(f"There is no branch {name!r}.{_listed(known)}", branch=name)


def no_tag(name: str, known: Iterable[str] | None = None) -> TagNotFoundError:
    """Return the error for a tag that does not exist; ``known`` are those that do, if read."""
    if known is None:
        return TagNotFoundError(f"There is no tag {name!r}, or it was deleted.", tag=name)
    return TagNotFoundError(f"There is no tag {name!r}.{_listed(known)}", tag=name)


def _listed(known: Iterable[str] | None) -> str:
    if known is None:
        return ""
    return f" The repository has: {', '.join(sorted(known)[:_NAMES_SHOWN]) or 'none'}."


def no_snapshot(snapshot_id: SnapshotId) -> SnapshotNotFoundError:
    """Return the error for a snapshot that does not exist."""
    return SnapshotNotFoundError(
        f"There is no snapshot {snapshot_id} in this repository. It may have expired; 'ancestry' "
        "lists the snapshots of a branch.",
        snapshot_id=str(snapshot_id),
    )


def source_is_gone(source: SnapshotId) -> SnapshotNotFoundError:
    """Return the error for changes that refer to chunks of a snapshot which no longer exists."""
    return SnapshotNotFoundError(
        f"The session moved chunks to other places while it stood on snapshot {source}, which has "
        "expired or been collected since, and so may have been the chunks. Nothing was published. "
        "Move them again in a new session, and expire no snapshot that an open session began at.",
        snapshot_id=str(source),
    )


def check_new_name(name: str) -> None:
    """Refuse a name for a branch or tag that is a mistake: nothing, or a line read from a file.

    Other writers create such names, and they are read like any other.

    Raises:
        InvalidRefNameError: it is one.
        WrongTypeError: it is no text.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may
        raise WrongTypeError(
            f"The name of a branch or tag is text, not a {type(name).__name__}: {name!r:.100}"
        )
    if not name or name != name.strip() or utf8(name) is None:
        raise InvalidRefNameError(
            f"{name!r:.100} cannot name a branch or tag: use one or more characters, and no space "
            "or newline at the beginning or end.",
            name=name,
        )


def branch_exists(name: str) -> BranchExistsError:
    """Return the error for a branch name that is taken."""
    return BranchExistsError(
        f"There is a branch {name!r} already. Choose another name, or reset it.", branch=name
    )


def refuse_main(name: str) -> None:
    """Refuse to delete the branch that every repository has.

    Raises:
        InvalidRefNameError: ``name`` is ``main``.
    """
    if name == MAIN:
        raise InvalidRefNameError(
            f"The branch {MAIN!r} cannot be deleted: every repository has it. You can reset it.",
            code="cannot-delete-main",
        )


def tag_exists(name: str) -> TagExistsError:
    """Return the error for a tag name that is taken."""
    return TagExistsError(
        f"There is a tag {name!r} already, and tags do not move. Choose another name.", tag=name
    )


def tag_was_deleted(name: str) -> TagDeletedError:
    """Return the error for the name of a deleted tag."""
    return TagDeletedError(
        f"A tag {name!r} was deleted, and its name is never used again, so that one release is "
        "never taken for another. Choose another name.",
        tag=name,
    )


def branch_moved(branch: str, expected: SnapshotId, actual: SnapshotId | None) -> ConflictError:
    """Return the error for a commit to a branch that moved; ``actual`` is None if it is gone."""
    return ConflictError(
        f"{_moved(branch, expected, actual)}; nothing was published. Rebase the session "
        "(rebase_with=...), or begin a new one.",
        branch=branch,
        expected_parent=str(expected),
        actual_parent=None if actual is None else str(actual),
    )


def branch_not_reset(branch: str, expected: SnapshotId, actual: SnapshotId | None) -> ConflictError:
    """Return the error for a reset of a branch that moved; ``actual`` is None if it is gone."""
    return ConflictError(
        f"{_moved(branch, expected, actual)}; the branch was not reset. Look at what it holds "
        "before you reset it again.",
        branch=branch,
        expected_parent=str(expected),
        actual_parent=None if actual is None else str(actual),
        code="branch-update-conflict",
    )


def _moved(branch: str, expected: SnapshotId, actual: SnapshotId | None) -> str:
    found = f"is now at {actual}" if actual is not None else "is gone"
    return (
        f"Branch {branch!r} was expected at snapshot {expected} and {found}: another writer was "
        "first"
    )


def config_changed() -> ConflictError:
    """Return the error for a stored configuration that changed since it was read."""
    return ConflictError(
        "Somebody changed the repository's configuration since it was read; nothing was saved. "
        "Open the repository again and repeat the change.",
        code="config-updated",
    )


def being_migrated() -> ConflictError:
    """Return the error for a change of a layout before version 1 that a migration has frozen."""
    return ConflictError(
        "The repository is being migrated to format version 2, or was since it was opened here. "
        "Nothing was changed. Open the repository again; if that does not help, the migration was "
        "interrupted: call icechunk_async.upkeep.upgrade again."
    )


def migrated_meanwhile() -> ConflictError:
    """Return the error for the refs of format 1 of a repository that has format 2 by now."""
    return ConflictError(
        "The repository was migrated to format version 2 since it was opened here, and its "
        "branches and tags are kept elsewhere now. Nothing was changed; open the repository again."
    )


def repository_exists(storage: Storage, what: str) -> RepositoryExistsError:
    """Return the error for a location that cannot take a new repository."""
    url = storage.description.url
    return RepositoryExistsError(
        f"A repository cannot be created at {url!r}: {what} is there already. Open it, or choose "
        "an empty location.",
        url=url,
    )


_NO_SNAPSHOT_THEN = "no-snapshot-at-time"


def no_snapshot_yet(moment_us: int, first: SnapshotInfo | None) -> SnapshotNotFoundError:
    """Return the error for a time before the ``first`` snapshot of a branch."""
    moment = clock.from_us(moment_us).isoformat()
    when = first.written_at.isoformat() if first is not None else "never"
    return SnapshotNotFoundError(
        f"The branch had no snapshot yet at {moment}; its first is of {when}.",
        as_of=moment,
        code=_NO_SNAPSHOT_THEN,
    )


def snapshot_dropped(moment_us: int, tip: SnapshotId | None = None) -> SnapshotNotFoundError:
    """Return the error for a time at which a branch was at a snapshot that was dropped since."""
    moment = clock.from_us(moment_us).isoformat()
    which = f"snapshot {tip}" if tip is not None else "a snapshot"
    return SnapshotNotFoundError(
        f"At {moment} the branch was at {which}, which was dropped from the history since, by "
        "expiration or garbage collection. Name a later time, or a snapshot of its ancestry.",
        as_of=moment,
        code=_NO_SNAPSHOT_THEN,
    )
