"""Read a repo info and the backups that continue its log, and report what is damaged (format 2)."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from icechunk_async.engine.history.outcomes import read_if_there
from icechunk_async.engine.history.protocol import MAIN, Audit, Fault
from icechunk_async.engine.history.repo_info import edits
from icechunk_async.engine.history.repo_info.file import read_info
from icechunk_async.errors import FormatError, IcechunkError
from icechunk_async.format.config.codec import decode_config
from icechunk_async.format.layout import REPO_INFO, backup_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from icechunk_async.format.operations_log import Update
    from icechunk_async.format.repo_info import RepoInfo
    from icechunk_async.storage import Storage

__all__ = ["audit"]


async def audit(storage: Storage) -> Audit:
    """Read the repo info; see `History.audit`.

    Cost: one request, and one for each backup that continues the operations log.
    """
    retrieved = await read_if_there(storage, REPO_INFO)
    if retrieved is None:
        return Audit({}, {}, (_fault("missing", f"{REPO_INFO!r} is missing."),))
    try:
        info = read_info(retrieved).info
        info.check()
    except FormatError as error:
        return Audit({}, {}, (_fault("unreadable", str(error)),))
    faults = list(_faults_of(info))
    log_faults, unread = await _follow_log(storage, info)
    refs = {
        **{f"branch.{name}": tip for name, tip in info.branches.items()},
        **{f"tag.{name}": target for name, target in info.tags.items()},
    }
    return Audit(refs, info.snapshots, (*faults, *log_faults), unread)


def _fault(problem: str, detail: str, kind: str = "repo") -> Fault:
    return Fault(kind, REPO_INFO, problem, detail)


def _faults_of(info: RepoInfo) -> Iterator[Fault]:
    """Return the faults within one repo info."""
    if MAIN not in info.branches:
        yield _fault("disagrees", f"It has no branch {MAIN!r}, which every repository has.")
    try:
        edits.reachable(info)
    except FormatError as error:
        yield _fault("disagrees", str(error))
    try:
        if info.raw_config is not None:
            decode_config(info.raw_config, 2)
    except IcechunkError as error:
        yield _fault("unreadable", str(error), "config")
    try:
        # Values stay encoded until they are asked for, so decoding is what finds damage in them.
        _ = info.metadata
        for it in info.snapshots.values():
            _ = it.metadata
    except IcechunkError as error:
        yield _fault("unreadable", str(error))
    if not _descends(info.updates):
        detail = "The times of the operations log do not descend."
        yield _fault("disagrees", detail, "operations log")


def _descends(updates: Sequence[Update]) -> bool:
    return all(later.updated_at > earlier.updated_at for later, earlier in pairwise(updates))


async def _follow_log(
    storage: Storage, info: RepoInfo
) -> tuple[tuple[Fault, ...], tuple[str, ...]]:
    """Read the backups that continue the operations log, to its beginning or the first fault."""
    seen: set[str] = set()
    oldest = info.updates[-1].updated_at if info.updates else None
    while (name := info.before_updates) is not None:
        key = backup_key(name)
        retrieved = await read_if_there(storage, key)
        if retrieved is None:  # old backups may be removed: nothing but the log needs them
            gone = f"operations before those in {key!r}: that backup was removed"
            return (), (gone,)
        try:
            info = read_info(retrieved).info
            info.check()
        except FormatError as error:
            return (Fault("operations log", key, "unreadable", f"{key!r}: {error}"),), ()
        newest = info.updates[0].updated_at if info.updates else None
        # Times must descend from file to file, which ends every circle of backups. Those of a log
        # without entries have no times, hence the names.
        follows = oldest is None or newest is None or newest < oldest
        follows = follows and name not in seen
        seen.add(name)
        if not follows or not _descends(info.updates):
            detail = f"{key!r} does not continue the operations log."
            return (Fault("operations log", key, "disagrees", detail),), ()
        oldest = info.updates[-1].updated_at if info.updates else oldest
    return (), ()
