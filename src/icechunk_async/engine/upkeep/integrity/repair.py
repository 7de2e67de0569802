"""Repair a repository from the report of a verification: first a plan to look at, then its steps.

A plan looks at the repository anew, so what an earlier run repaired is not in it: after a crash,
plan again from the same report. Every step leaves the repository readable as before or better.
Damaged objects are copied to ``quarantine/`` before anything replaces or removes them.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Final, Literal

from icechunk_async._runtime import telemetry
from icechunk_async._runtime.concurrency import closing
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import Progress, no_progress
from icechunk_async.engine.history import check_online
from icechunk_async.engine.history.outcomes import create_object, read_if_there
from icechunk_async.engine.upkeep.integrity.drop import Damage, Drop, commit_drop, plan_drop
from icechunk_async.engine.upkeep.integrity.rebuild import rebuilt_log
from icechunk_async.engine.upkeep.integrity.structure import log_problem, stored, uncached
from icechunk_async.errors import (
    ConflictError,
    FormatError,
    IcechunkError,
    ObjectNotFoundError,
    PreconditionFailedError,
    SnapshotNotFoundError,
)
from icechunk_async.format.envelope import FileType, unpack
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.layout import REPO_INFO, backup_key, new_backup_name, transaction_key
from icechunk_async.format.repo_info import decode_repo_info
from icechunk_async.storage import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.open import Engine
    from icechunk_async.engine.upkeep.integrity.report import Finding, VerifyReport
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.transaction_log import TransactionLog
    from icechunk_async.storage import Retrieved, Storage

__all__ = ["QUARANTINE", "RepairPlan", "RepairStep", "plan_repair", "restore_repo_object"]

QUARANTINE: Final = "quarantine/"
"""Copies of damaged objects. Nothing reads them, and garbage collection leaves them alone."""


@dataclass(frozen=True, slots=True)
class RepairStep:
    """One step of a repair."""

    action: Literal["rebuild log", "drop chunks", "quarantine", "restore repo"]
    target: str
    """A branch, or the key of an object."""
    detail: str


@dataclass(slots=True)
class RepairPlan:
    """The steps of a repair. Nothing is changed before `apply`."""

    steps: tuple[RepairStep, ...]
    unrepairable: tuple[str, ...]
    """Sentences about damage that the plan leaves."""
    _engine: Engine = field(repr=False)
    _logs: tuple[TransactionLog, ...] = field(default=(), repr=False)
    _drops: tuple[Drop, ...] = field(default=(), repr=False)
    _damaged: tuple[str, ...] = field(default=(), repr=False)

    async def apply(self, progress: ProgressCallback | None = None) -> dict[str, SnapshotId]:
        """Carry out the steps, in their order.

        Returns:
            The new tip of each branch that got a commit.

        Raises:
            ConflictError: another writer changed a branch or a log since the plan was made. What
                was done until then stays. Plan again.
            RepositoryReadOnlyError: the repository's status forbids changes.
            UnsafeStorageError: changes could be lost on this storage.
            StorageError: the storage failed. Plan again.

        Cancellation: some of the steps may be done. Plan again.
        """
        engine, told = self._engine, progress or no_progress
        engine.check_safe()
        check_online(engine.history)
        total = len(self.steps)
        done = 0
        tips: dict[str, SnapshotId] = {}
        with telemetry.span("repair", steps=total):
            # Logs first: they change nothing that is read. Then commits, which make references to
            # damaged objects unnecessary at the tips. Only then do the objects go.
            for log in self._logs:
                await _replace_log(engine, log)
                told(Progress("repairing", done := done + 1, total))
            for drop in self._drops:
                tips[drop.branch] = await commit_drop(engine, drop)
                told(Progress("repairing", done := done + 1, total))
            for key in self._damaged:
                await _move_away(engine, key)
                told(Progress("repairing", done := done + 1, total))
            await engine.storage.sync()
        return tips


async def plan_repair(
    engine: Engine,
    report: VerifyReport,
    branches: Sequence[str] | None,
    moved: Mapping[str, str],
) -> RepairPlan:
    """Plan the repair of what a report names; see `Repository.plan_repair`."""
    engine.history.capabilities.require("upkeep")
    steps: list[RepairStep] = []
    left: list[str] = []
    by_kind: dict[str, list[Finding]] = {}
    for it in report.findings:
        by_kind.setdefault(it.kind, []).append(it)
    logs: list[TransactionLog] = []
    for it in by_kind.pop("transaction log", []):
        log = await _plan_log(engine, it, left)
        if log is not None:
            logs.append(log)
            detail = "made anew from the manifests of its snapshot and of the one before"
            steps.append(RepairStep("rebuild log", it.location, detail))
    chunks = [it for kind in ("chunk", "virtual", "manifest") for it in by_kind.pop(kind, [])]
    damage = await Damage.of(engine, chunks)
    drops: list[Drop] = []
    for branch in branches if branches is not None else sorted(await engine.history.branches()):
        drop = await plan_drop(engine, branch, damage, moved)
        if drop is not None:
            drops.append(drop)
            steps.append(RepairStep("drop chunks", branch, drop.detail()))
    damaged = [key for key in damage.removable() if await _is_there(stored(engine), key)]
    steps += [RepairStep("quarantine", it, f"moved to {QUARANTINE + it!r}") for it in damaged]
    left += [
        f"{it.detail} {_ADVICE.get(it.kind, '')}".rstrip()
        for some in by_kind.values()
        for it in some
    ]
    return RepairPlan(tuple(steps), tuple(left), engine, tuple(logs), tuple(drops), tuple(damaged))


_ADVICE: Final = {
    "snapshot": "Restore it from a copy, or reset the branches that lead to it.",
    "ref": "Create the branch or tag again.",
    "config": "Save the configuration again.",
    "proposal": "Propose again, and delete the objects of this one; no commit is lost.",
    "sums": "Delete it and make the sums again; no data is lost.",
}


async def _plan_log(engine: Engine, it: Finding, left: list[str]) -> TransactionLog | None:
    """Return the log to write; None if the log is sound by now, or cannot be made."""
    assets = uncached(engine)
    snapshot_id = SnapshotId.parse(it.location.partition("/")[2])
    if await _is_log_sound(assets, snapshot_id, it.problem):
        return None
    try:
        info = await _heir(engine, snapshot_id)
        return replace(await rebuilt_log(assets, info.id, info.parent_id), id=snapshot_id)
    except IcechunkError as error:
        left.append(f"{it.detail} It cannot be made anew: {error}")
        return None


async def _is_log_sound(assets: Assets, snapshot_id: SnapshotId, problem: str) -> bool:
    """Return whether a log does not have the problem that was reported, or no longer has it."""
    try:
        log = await assets.transaction_log(snapshot_id)
        # It can be read, so a log that was missing or damaged is there again.
        if problem != "disagrees":
            return True
        return log_problem(log, await assets.read_snapshot(snapshot_id)) is None
    except (FormatError, ObjectNotFoundError, SnapshotNotFoundError):
        return False


async def _heir(engine: Engine, snapshot_id: SnapshotId) -> SnapshotInfo:
    """Return a snapshot; for an expired one, that which is compared with its log.

    The changes from the parent of that one up to it include those of the expired commit.
    """
    if engine.history.state is not None:
        known = (await engine.history.state.info()).snapshots
        # Its own snapshot is gone; the log is kept for rebasing over the one that took its place.
        for it in known.values() if snapshot_id not in known else ():
            if snapshot_id in it.pruned_ancestor_logs:
                return it
    return await engine.history.snapshot_info(snapshot_id)


async def _is_there(storage: Storage, key: str) -> bool:
    return await read_if_there(storage, key) is not None


async def _replace_log(engine: Engine, log: TransactionLog) -> None:
    """Store a log in place of a damaged or missing one."""
    storage, key = stored(engine), transaction_key(log.id)
    packed = await engine.assets.pack_transaction_log(log)
    found = await read_if_there(storage, key)
    if found is None:
        if await create_object(storage, key, packed) is None:
            raise _changed(key)
    else:
        await storage.put(QUARANTINE + key, found.data)
        try:
            await storage.put(key, packed, if_version=found.version)
        except PreconditionFailedError as error:
            raise _changed(key) from error
    if engine.cache is not None:  # which keeps logs, as nothing else changes them
        await engine.cache.forget([key])


def _changed(key: str) -> ConflictError:
    return ConflictError(f"{key!r} changed since the repair was planned. Plan again.")


async def _move_away(engine: Engine, key: str) -> None:
    """Copy an object to the quarantine, then delete it, also from the cache."""
    storage = stored(engine)
    found = await read_if_there(storage, key)
    if found is None:
        return
    await storage.put(QUARANTINE + key, found.data)
    await storage.sync()  # the copy must outlive the object
    for failure in await engine.storage.delete([key]):
        raise failure.error


async def restore_repo_object(storage: Storage, *, dry_run: bool) -> RepairStep | None:
    """Replace a missing or damaged ``repo`` object by its newest backup that can be read.

    Args:
        storage: of a repository of format version 2.
        dry_run: only return the step.

    Returns:
        The step; None if the object can be read, or there is no backup.

    Raises:
        ConflictError: another writer was first; nothing was changed.
    """
    found = await read_if_there(storage, REPO_INFO)
    if found is not None and _is_sound(found.data):
        return None
    backup = await _newest_sound_backup(storage)
    if backup is None:
        return None
    entry, data = backup
    when = f"{entry.last_modified:%Y-%m-%d %H:%M:%S} UTC"
    detail = (
        f"from {entry.key!r}, the state before the last change ({when}). What was committed "
        "after it is in no branch any more; its files stay until garbage is collected."
    )
    if not dry_run:
        await _put_back(storage, data, found)
    return RepairStep("restore repo", REPO_INFO, detail)


async def _newest_sound_backup(storage: Storage) -> tuple[ObjectInfo, bytes] | None:
    entries = storage.list_prefix(f"overwritten/{REPO_INFO}.")  # the newest sort first
    async with closing(entries):
        async for entry in entries:
            if not isinstance(entry, ObjectInfo):
                continue
            backup = await read_if_there(storage, entry.key)
            if backup is not None and _is_sound(backup.data):
                return entry, bytes(backup.data)
    return None


async def _put_back(storage: Storage, data: bytes, found: Retrieved | None) -> None:
    if found is not None:
        await storage.put(QUARANTINE + backup_key(new_backup_name(REPO_INFO)), found.data)
        try:
            await storage.put(REPO_INFO, data, if_version=found.version)
        except PreconditionFailedError as error:
            raise _changed(REPO_INFO) from error
    elif await create_object(storage, REPO_INFO, data) is None:
        raise _changed(REPO_INFO)
    await storage.sync()


def _is_sound(data: bytes | memoryview) -> bool:
    try:
        decode_repo_info(unpack(data, FileType.REPO_INFO)).check()
    except FormatError:
        return False
    return True
