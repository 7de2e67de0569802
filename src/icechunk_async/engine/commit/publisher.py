"""Publish a session: commit, amend, flush, rebase; and find out what an unknown outcome was."""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio

from icechunk_async._runtime import clock, telemetry
from icechunk_async._runtime.concurrency import gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.change_set import ChangeSet
from icechunk_async.engine.commit.conflicts import ConflictDetector, check_solver
from icechunk_async.engine.commit.flush import Flusher, put_digests, root_of, with_digests
from icechunk_async.engine.commit.guard import SessionGuard
from icechunk_async.engine.commit.inputs import Inputs
from icechunk_async.engine.commit.once import Record, newest_transactions, record_of, repeated
from icechunk_async.engine.commit.rebase import commits_after, rebase
from icechunk_async.engine.commit.turns import RESERVED, Writers
from icechunk_async.engine.history import (
    Amend,
    Commit,
    Detach,
    check_moves_allowed,
    check_unprotected,
)
from icechunk_async.engine.history.collections import DraftOutdatedError
from icechunk_async.engine.history.refusals import branch_moved
from icechunk_async.engine.tree.modes import SessionMode
from icechunk_async.engine.tree.workspace import Closed
from icechunk_async.errors import (
    ChunksCollectedError,
    ConflictError,
    FormatError,
    IcechunkError,
    InvalidInputError,
    NothingToCommitError,
    OutcomeUnknownError,
    RebaseFailedError,
    SessionStateError,
    SnapshotNotFoundError,
    StorageError,
    StorageUnavailableError,
)
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.json.metadata import check_metadata
from icechunk_async.format.json.values import check_text
from icechunk_async.format.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Generator, Mapping
    from contextlib import AbstractAsyncContextManager

    from icechunk_async.engine.commit.conflicts import ConflictSolver
    from icechunk_async.engine.commit.flush import Flushed, ManifestOptions
    from icechunk_async.engine.commit.once import Transaction
    from icechunk_async.engine.commit.turns import Turn
    from icechunk_async.engine.history import History, Publication
    from icechunk_async.engine.leases.keeper import Lease
    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.transaction_log import TransactionLog

__all__ = ["Publisher"]


_log = logging.getLogger(__name__)

_MANY_CHUNKS: Final = 1 << 14
_KEPT: Final = "kept_snapshot_id"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The arguments of a commit."""

    message: str
    metadata: Mapping[str, JSON] | None
    solver: ConflictSolver | None
    """None if nothing may be rebased."""
    once: Transaction | None
    inputs: Inputs
    tries: int
    """How often it is tried again."""
    allow_empty: bool
    notes_rebases: bool
    """Whether the snapshot tells how often it was rebased."""
    races: list[ConflictError] = field(default_factory=list[ConflictError])
    """Every race that was lost."""


class _LostRaceError(Exception):
    """Another writer was first."""

    def __init__(self, error: ConflictError) -> None:
        super().__init__(str(error))
        self.error = error


class Publisher:
    """Publishes the changes of one workspace, and remembers what may have been published."""

    def __init__(
        self,
        workspace: Workspace,
        history: History,
        options: ManifestOptions,
        *,
        branch: str | None,
        mode: SessionMode,
        default_metadata: Mapping[str, JSON],
        log: Callable[[SnapshotId], TransactionLog] | None = None,
        writers: Writers | None = None,
    ) -> None:
        """Stand on the workspace's base, which is the tip of ``branch`` in a writable session.

        ``log`` returns the log of a commit; by default it lists what the session changed.
        ``writers`` are those with which this one takes turns; by default it is alone.
        """
        self.workspace = workspace
        self.branch = branch
        self.mode = mode
        self.flusher = Flusher(workspace.assets, options)
        self.guard = SessionGuard(workspace, history, self.flusher)
        self._history = history
        self._default_metadata = default_metadata
        self.lease: Lease | None = None
        """Renewed before anything is published; None for a session without one."""
        self._given_log = log
        self._writers = writers or Writers()
        self._busy = False
        self._doubtful: dict[SnapshotId, Snapshot] = {}
        """Snapshots that may have been published, because no answer came."""
        self._record: Record | None = None
        """The transactions found last, for a base of the session."""
        self._already_committed = False
        self._kept: tuple[ChangeSet, Snapshot, SnapshotId] | None = None
        """The snapshot that the last try stored, after the changes and the base that it is of."""

    @property
    def outcome_unknown(self) -> bool:
        """Whether a snapshot may have been published without an answer."""
        return bool(self._doubtful)

    @property
    def has_uncommitted_changes(self) -> bool:
        """Whether a commit would change anything."""
        with self.workspace.lock:
            return not self.workspace.changes.is_empty()

    @property
    def already_committed(self) -> bool:
        """Whether ``commit(once=...)`` found its transaction on the branch and published none."""
        return self._already_committed

    async def commit(
        self,
        message: str,
        metadata: Mapping[str, JSON] | None = None,
        *,
        rebase_with: ConflictSolver | None = None,
        rebase_tries: int = 1000,
        timeout_seconds: float | None = None,
        allow_empty: bool = False,
        once: Transaction | None = None,
        unchanged: Collection[str] = (),
    ) -> SnapshotId:
        """Publish the changes as a new snapshot on the branch; see `Session.commit`."""
        _check_description(message, metadata)
        if rebase_with is not None:
            check_solver(rebase_with)
        wanted = _Wanted(
            message,
            metadata,
            rebase_with if rebase_tries > 0 else None,
            once,
            Inputs(unchanged, self.workspace.began_at),
            rebase_tries,
            allow_empty=allow_empty,
            notes_rebases=rebase_with is not None,
        )
        with self._publishing("commit", allow_empty=allow_empty or once is not None) as branch:
            # Work that is cut off here may have sent its last request: that is why `_doubtful` is
            # filled before it is sent.
            with anyio.move_on_after(timeout_seconds):
                try:
                    return await self._commit_on(branch, wanted)
                except (  # the refusals; other errors say nothing about what landed
                    ConflictError,
                    RebaseFailedError,
                    SnapshotNotFoundError,
                    ChunksCollectedError,
                ) as error:
                    # What is in the way may be this commit, or another one of its transaction.
                    landed = await self._find_landed(branch, once)
                    if landed is not None:
                        return self._finish(landed)
                    await self._keep_readable(error, message, metadata)
                    raise
            late = self._too_late(timeout_seconds, wanted.races)
            self._name_kept(late)  # no more requests: the time is used up
            raise late

    async def _commit_on(self, branch: str, wanted: _Wanted) -> SnapshotId:
        """Wait for a turn, and try until it lands."""
        # An earlier call ended in doubt. Publishing again what landed then would repeat changes
        # that others may have built on.
        if self._doubtful and (landed := await self._find_landed(branch, wanted.once)):
            return self._finish(landed)
        await self._prepare()
        base = self.workspace.base
        async with self._turn(branch) as turn:
            turn.stands_on(base.id, base.metadata)
            tip: SnapshotId | None = base.id
            if turn.must_look:
                tip = None  # nobody of this machine is in between
            elif turn.waited:
                tip = self._history.last_seen(branch, None)
            for tries_left in reversed(range(wanted.tries + 1)):
                turn.begin()
                try:
                    return await self._try_on(branch, wanted, turn, tip)
                except _LostRaceError as lost:
                    turn.lost()
                    wanted.races.append(lost.error)
                    if wanted.solver is None or not tries_left:
                        raise lost.error from lost.error.__cause__
                _log.debug("another writer of %r was first, %d time(s)", branch, len(wanted.races))
                tip = self._history.last_seen(branch, None)
                if tip == self.workspace.base.id:  # what the lost race showed is older than that
                    tip = None
        raise AssertionError("the last try returns or raises")

    def _turn(self, branch: str) -> AbstractAsyncContextManager[Turn]:
        assets = self.workspace.assets
        return self._writers.turn(branch, assets.storage, assets.backend)

    async def _try_on(
        self, branch: str, wanted: _Wanted, turn: Turn, tip: SnapshotId | None
    ) -> SnapshotId:
        """Try once, on top of the last seen tip of the branch.

        Raises:
            _LostRaceError: another writer was first.
        """
        once = wanted.once
        if wanted.solver is not None:
            landed = await self._catch_up(turn, tip, wanted.solver, once)
            if landed is not None:
                return self._finish(landed)
        if once is not None and (held := await self._find_in_base(once)):
            return self._finish(held)
        # A commit without changes is refused only if it never had any.
        if turn.rebases == 0:  # a solver may have taken every change back since
            self._check_changed(allow_empty=wanted.allow_empty)
        await wanted.inputs.check(self.workspace, self._history, branch)
        extra: JSON = turn.properties() if wanted.notes_rebases else None
        try:
            landed_id = await self._publish_on(branch, wanted.message, wanted.metadata, extra, once)
        except ConflictError as error:
            raise _LostRaceError(error) from error
        turn.landed(landed_id)
        return landed_id

    async def _prepare(self) -> None:
        """Build and store the manifests of many changes before it is the writer's turn.

        Others would have to wait for it. Where they change nothing meanwhile, manifests are used.
        """
        workspace = self.workspace
        if sum(it.count() for it in workspace.changes.chunks.values()) >= _MANY_CHUNKS:
            await workspace.store_packs()
            workspace.number_nodes()
            await self.flusher.store(await self.flusher.flush(workspace.base, workspace.tree))

    async def _catch_up(
        self,
        turn: Turn,
        tip: SnapshotId | None,
        solver: ConflictSolver,
        once: Transaction | None,
    ) -> Snapshot | None:
        """Move to the last seen tip of the branch, after others whose turn it is.

        Returns:
            The snapshot that makes another try needless, as `_find_landed`.
        """
        assert self.branch is not None
        tip = await self._let_others_go_first(self.branch, turn, tip)
        # Nothing newer was seen: the try itself finds out whether that still holds.
        if tip == self.workspace.base.id:
            return None
        # Before a solver is asked about a clash of these changes with themselves.
        if landed := await self._find_landed(self.branch, once):
            return landed
        passed = await self._rebase(self.branch, solver, tip)
        turn.rebased((it.id, it.metadata) for it in passed)
        if passed:
            telemetry.add("commit.rebases", 1)
        return None

    async def _let_others_go_first(
        self, branch: str, turn: Turn, tip: SnapshotId | None
    ) -> SnapshotId | None:
        """Pause while it is the turn of others; return the last seen tip, None to look again.

        Their commits are only counted here, by what the history tells. Each would cost a snapshot
        and a log, and only the last of them is a state to rebase onto.
        """
        while (pause := turn.pause()) > 0:
            await anyio.sleep(pause)
            turn.begin()
            base_id = self.workspace.base.id
            commits = await commits_after(self._history, branch, base_id, None)
            tip = commits[-1].id if commits else base_id
            if not turn.saw((it.id, it.metadata) for it in commits):
                turn.nobody_came()
                break
        return tip

    async def _rebase(
        self, branch: str, solver: ConflictSolver, tip: SnapshotId | None
    ) -> list[SnapshotInfo]:
        """Rebase onto the last seen tip, or onto the present one if that leads nowhere."""
        try:
            return await rebase(self.workspace, self._history, branch, solver, tip=tip)
        except RebaseFailedError:
            raise
        # The tip that was seen may have been reset away since; only the present one can tell.
        except ConflictError:
            if tip is None:
                raise
            return await rebase(self.workspace, self._history, branch, solver)

    def _too_late(self, timeout_seconds: float | None, races: list[ConflictError]) -> IcechunkError:
        """Return the error for a commit whose time is used up."""
        late = f"The commit did not come to its end within {timeout_seconds or 0:g} s"
        if self._doubtful:
            return OutcomeUnknownError(
                f"{late}, and its last request may have landed or may land yet. No change is "
                "lost; commit again to find out."
            )
        if races:
            return ConflictError(
                f"{late}: other writers were first {len(races)} time(s), the last time like this: "
                f"{races[-1]} Nothing was published and no change was lost.",
                **{name: it for name, it in races[-1].context.items() if name != _KEPT},
            )
        return StorageUnavailableError(
            f"{late}: the storage is slow, there is much to store, or other writers took their "
            "time. Nothing was published and no change was lost; commit again, with more time."
        )

    async def amend(
        self,
        message: str,
        metadata: Mapping[str, JSON] | None = None,
        *,
        allow_empty: bool = False,
    ) -> SnapshotId:
        """Replace the tip by a snapshot with the changes on top; see `Session.amend`."""
        _check_description(message, metadata)
        # Otherwise a session without changes would be told to change something first.
        unsupported = not self._history.capabilities.amend  # which is said before all else
        with self._publishing("amend", allow_empty=allow_empty or unsupported) as branch:
            self._history.capabilities.require("amend")
            # An amendment that landed unseen must not be amended once more.
            if self._doubtful and (landed := await self._find_landed(branch)):
                return self._finish(landed)
            base = self.workspace.base
            info = await self._history.snapshot_info(base.id)
            if info.parent_id is None:
                raise SessionStateError(
                    f"Snapshot {base.id} is the first of its repository and cannot be amended. "
                    "Commit instead.",
                    code="no-amend-for-initial-commit",
                )
            replaced = await self.workspace.assets.transaction_log(base.id)
            if replaced.moves and self.mode is not SessionMode.REARRANGE:
                raise SessionStateError(
                    f"Snapshot {base.id} moved nodes, and changes cannot be folded into moves. "
                    "Commit instead."
                )
            try:
                return await self._draft_and_publish(
                    lambda: self.draft(
                        message,
                        metadata,
                        None,
                        lambda it: replaced.merge(self.workspace.changes.log(it)),
                    ),
                    lambda snapshot: Amend(branch, base.id, snapshot),
                )
            except (ConflictError, ChunksCollectedError) as error:
                await self._keep_readable(error, message, metadata)
                raise

    async def flush(self, message: str, metadata: Mapping[str, JSON] | None = None) -> SnapshotId:
        """Publish a snapshot that no branch holds; see `Session.flush`."""
        _check_description(message, metadata)
        with self._publishing("flush", allow_empty=True):
            base_id = self.workspace.base.id
            return await self._draft_and_publish(
                lambda: self.draft(message, metadata, None, self.workspace.changes.log),
                lambda snapshot: Detach(base_id, snapshot),
            )

    async def forget(self, app_ids: Collection[str]) -> SnapshotId:
        """Publish a snapshot that changes nothing, and no longer records some applications.

        See `Repository.forget_transactions`.
        """
        with self._publishing("commit", allow_empty=True) as branch:
            base = self.workspace.base
            async with self._turn(branch) as turn:
                turn.stands_on(base.id, base.metadata)
                while True:
                    turn.begin()
                    await self._catch_up(turn, None, ConflictDetector(), None)
                    try:
                        landed_id = await self._forget_on(branch, app_ids)
                    except ConflictError:
                        turn.lost()
                        continue
                    turn.landed(landed_id)
                    return landed_id

    async def _forget_on(self, branch: str, app_ids: Collection[str]) -> SnapshotId:
        base_id = self.workspace.base.id
        record = await record_of(self._history, base_id)
        if unknown := sorted(set(app_ids) - set(record.newest)):
            raise InvalidInputError(
                f"Branch {branch!r} records no transaction of {unknown[0]!r}. Nothing was "
                "published. Repository.recorded_transactions lists those that it records."
            )
        message = f"Forgot the transactions of {', '.join(sorted(app_ids))}"
        return await self._draft_and_publish(
            partial(self.draft, message, None, None, self._log, record.properties_without(app_ids)),
            partial(Commit, branch, base_id),
        )

    async def rebase(self, solver: ConflictSolver) -> None:
        """Replay the changes on top of newer commits; see `Session.rebase`."""
        check_solver(solver)
        with self.exclusively() as branch:
            await rebase(self.workspace, self._history, branch, solver)

    async def _publish_on(
        self,
        branch: str,
        message: str,
        metadata: Mapping[str, JSON] | None,
        extra: JSON,
        once: Transaction | None,
    ) -> SnapshotId:
        base_id = self.workspace.base.id
        recorded: dict[str, JSON] = {}
        if once is not None:
            assert self._record is not None  # it was looked for
            assert self._record.at == base_id  # the only snapshot that this commit can land on
            recorded = self._record.properties_with(once)

        async def draft() -> tuple[Snapshot, Flushed, bytes]:
            try:
                return await self.draft(message, metadata, extra, self._log, recorded)
            except (SnapshotNotFoundError, FormatError) as error:
                # The base was collected, or a manifest of it that is older than the cutoff, so the
                # branch has left it: a race that was lost, which a solver settles from the logs,
                # without the base's files.
                tip = await self._history.branch_tip(branch)
                if tip == base_id:
                    raise
                raise branch_moved(branch, base_id, tip) from error

        return await self._draft_and_publish(
            draft, lambda snapshot: Commit(branch, base_id, snapshot)
        )

    async def _draft_and_publish(
        self,
        draft: Callable[[], Awaitable[tuple[Snapshot, Flushed, bytes]]],
        publication: Callable[[Snapshot], Publication],
    ) -> SnapshotId:
        """Publish a draft; make it again, under new names, if its files may have been collected."""
        # Ends: each round needs another collection whose cutoff reaches back beyond the beginning
        # of this session, and what the last round stored is younger than the one before.
        while True:  # once more for each collection that ran meanwhile
            snapshot, flushed, log = await draft()
            try:
                return await self._publish(publication(snapshot), flushed, log)
            except DraftOutdatedError:
                self._kept = None
                _log.debug("garbage was collected; making snapshot %s again", snapshot.id)

    def _log(self, snapshot_id: SnapshotId) -> TransactionLog:
        """Return the log of a commit: the nodes and chunks that it touched."""
        return (self._given_log or self.workspace.changes.log)(snapshot_id)

    async def draft(
        self,
        message: str,
        metadata: Mapping[str, JSON] | None,
        extra: JSON,
        logged: Callable[[SnapshotId], TransactionLog],
        recorded: Mapping[str, JSON] | None = None,
    ) -> tuple[Snapshot, Flushed, bytes]:
        """Build a snapshot of the session's state, and its log; nothing but chunks is stored.

        Manifests and the log, which for many chunks take equally long, are encoded at once.
        """
        workspace = self.workspace
        base = workspace.base
        if self.mode is SessionMode.REARRANGE or workspace.changes.moves.requested:
            await check_moves_allowed(self._history)
        await workspace.store_packs()  # references to chunks in memory have no object yet
        workspace.number_nodes()
        log = logged(SnapshotId.random(workspace.assets.layout.id_bytes))
        flush, pack_log = self._flush, workspace.assets.pack_transaction_log
        if sum(map(len, log.updated_chunks.values())) < _MANY_CHUNKS:  # not worth any task
            flushed, packed_log = await flush(base), await pack_log(log)
        else:
            flushed, packed_log = await gather(flush(base), pack_log(log))
        properties: dict[str, JSON] = {
            # Each commit repeats the newest transactions, so that a writer finds them without a
            # walk along the history. Later entries win: a caller cannot hide what this commit
            # records.
            **repeated(base),
            **self._default_metadata,
            **(metadata or {}),
            **(recorded or {}),
            **root_of(flushed),
        }
        if self.lease is not None:
            extra = {**(extra if isinstance(extra, dict) else {}), **self.lease.marks()}
        if isinstance(extra, dict):
            reserved = properties.get(RESERVED)
            properties[RESERVED] = {**(reserved if isinstance(reserved, dict) else {}), **extra}
        snapshot = Snapshot(
            log.id,
            base.id,
            max(clock.now_us(), base.flushed_at + 1),  # a clock that lags must not stop anyone
            message,
            properties,
            flushed.nodes,
            flushed.files,
        )
        return snapshot, flushed, packed_log

    async def _flush(self, base: Snapshot) -> Flushed:
        """Build nodes and manifests, and the list of their digests if such are kept."""
        assets = self.workspace.assets
        if not assets.keeps_sums:
            return await self.flusher.flush(base, self.workspace.tree)
        flushed, digests = await gather(
            self.flusher.flush(base, self.workspace.tree), assets.digests.load(base.id)
        )
        return await with_digests(assets, flushed, digests)

    async def _keep_readable(
        self, error: IcechunkError, message: str, metadata: Mapping[str, JSON] | None
    ) -> None:
        """Name a snapshot with the session's state in the error of a failed commit; store it first.

        The snapshot is not part of the history, and garbage. If it cannot be stored, the error goes
        without it.
        """
        if not self._name_kept(error):
            try:
                snapshot, flushed, log = await self.draft(message, metadata, None, self._log)
                await self._store(snapshot, flushed, log)
            except IcechunkError as fault:
                _log.warning("the state of a failed commit is not stored: %s", fault)
            self._name_kept(error)

    def _name_kept(self, error: IcechunkError) -> bool:
        """Name the snapshot of the session's present state in an error, if it is stored."""
        kept = self._kept
        workspace = self.workspace
        if kept is None or kept[0] is not workspace.changes or kept[1] is not workspace.base:
            return False
        error.context[_KEPT] = str(kept[2])
        return True

    async def _store(self, snapshot: Snapshot, flushed: Flushed, log: bytes) -> None:
        """Store a snapshot with all it needs, which nothing refers to yet."""
        workspace, assets = self.workspace, self.workspace.assets
        state = (workspace.changes, workspace.base, snapshot.id)
        await gather(
            self.flusher.store(flushed),
            assets.put_snapshot(snapshot),
            assets.put_packed_log(snapshot.id, log),
            *([] if workspace.recorder is None else [workspace.store_statistics()]),
            *put_digests(assets, snapshot.id, flushed),
        )
        self._kept = state

    async def _publish(self, publication: Publication, flushed: Flushed, log: bytes) -> SnapshotId:
        """Store a snapshot with all it needs, and make it known."""
        snapshot = publication.snapshot
        publication = replace(publication, sources=self.workspace.changes.sources)
        if self.lease is not None:
            # Another process that resumed the session has changed the lease: then this fails, and
            # of two that hold the same changes only one publishes them.
            await self.lease.renew()

        async def store() -> None:  # before it is done nothing can be published
            try:
                await self._store(snapshot, flushed, log)
            except OutcomeUnknownError as error:  # about a file that nothing refers to yet
                raise StorageUnavailableError(
                    f"A file of the new snapshot may not be stored: {error} Nothing was "
                    "published and no change was lost; commit again."
                ) from error
            if self.lease is not None:  # storing may have taken long
                self.lease.check()
            # The next request is the one that may land unseen. It is noted before, since a
            # cancellation may come at any moment of it.
            self._doubtful[snapshot.id] = snapshot

        try:
            await self._history.publish(publication, store, self.guard)
        except OutcomeUnknownError:
            raise  # it may have landed, so it stays among the doubtful
        except (IcechunkError, DraftOutdatedError):
            # A refusal is certain: the reference was not moved, and cannot be later. All else says
            # nothing of that: a cancellation, an interrupt, an error that a driver let through.
            self._doubtful.pop(snapshot.id, None)
            raise
        return self._finish(snapshot)

    def _finish(self, snapshot: Snapshot) -> SnapshotId:
        """Stand on a snapshot that was published, for reading."""
        how = "holds the transaction already" if self._already_committed else "published"
        _log.info("snapshot %s %s: %r", snapshot.id, how, snapshot.message)
        self._doubtful.clear()
        self._kept = None
        self.mode = SessionMode.READONLY
        self.workspace.rebase_to(snapshot, ChangeSet())
        return snapshot.id

    def end_unchanged(self) -> bool:
        """End the session without publishing if it changed nothing; return whether it did so.

        It only reads afterwards.
        """
        if self._doubtful or self.has_uncommitted_changes:
            return False
        with self.exclusively():
            self.mode = SessionMode.READONLY
        return True

    async def _find_landed(self, branch: str, once: Transaction | None = None) -> Snapshot | None:
        """Return the snapshot on the branch that makes another try needless, if there is one.

        It is that of an earlier try of unknown outcome, or one that records ``once``.
        """
        if not self._doubtful and once is None and self.lease is None:
            return None
        tip = await self._history.branch_tip(branch)
        if self._doubtful or self.lease is not None:
            async for info in self._history.ancestry(tip):
                if info.id in self._doubtful:
                    return self._doubtful[info.id]
                # What lies before the first change cannot be a commit of this session. Its base is
                # no such end: a rebase may have moved it past the commit that is looked for.
                if info.id == self.workspace.began_at:
                    break
                if self.lease is not None:
                    self.lease.check_not_committed(info.id, info.metadata.get(RESERVED))
        if once is None:
            return None
        return await self._recorded(once, await record_of(self._history, tip, self._record))

    async def _find_in_base(self, once: Transaction) -> Snapshot | None:
        """Return the snapshot that records ``once`` among the session's base and its ancestors."""
        base = self.workspace.base
        newest = newest_transactions(base.metadata)
        if newest is not None:
            self._record = Record(base.id, base.id, newest)
        elif self._record is None or self._record.at != base.id:
            try:
                self._record = await record_of(self._history, base.id, self._record)
            except SnapshotNotFoundError:
                # It expired, so it is not the tip. The tip is looked at when this try has failed.
                self._record = Record(base.id, None, {})
        return await self._recorded(once, self._record)

    async def check_published(self, snapshot_id: SnapshotId) -> None:
        """Refuse to stand on a snapshot that is not part of the history.

        Raises:
            SessionStateError: it was never published, or it is not known whether it was.

        Cost: none in format 2; in format 1 a request for each commit since.
        """
        if self._history.capabilities.operations_log:
            with suppress(SnapshotNotFoundError):
                await self._history.snapshot_info(snapshot_id)
                return
        async for info in self._history.ancestry(self.workspace.base.id):
            if info.id == snapshot_id or snapshot_id in info.pruned_ancestor_logs:
                return
        raise SessionStateError(
            f"The root of the work to continue stands on snapshot {snapshot_id}, which is not part "
            f"of the history of branch {self.branch!r}, so that nothing on top of it can be "
            "committed: it was forked from a session that had changes already, or the branch was "
            "reset, or in format version 1 the snapshot expired. Fork the root of work that others "
            "may continue from a session without changes."
        )

    async def _recorded(self, once: Transaction, record: Record) -> Snapshot | None:
        if record.found_at is None or not record.holds(once):
            return None
        snapshot = await self.workspace.assets.snapshot(record.found_at)
        self._already_committed = True
        return snapshot

    @contextmanager
    def _publishing(self, how: str, *, allow_empty: bool) -> Generator[str]:
        """Keep changes out while the session is published; yield its branch."""
        with self.exclusively() as branch, telemetry.span(how, branch=branch):
            self._check_changed(allow_empty=allow_empty)
            # A flush moves no branch, so protection does not concern it.
            if how != "flush" and not self._doubtful:  # what is in doubt is found out
                check_unprotected(self._history, branch)
            try:
                yield branch
            except OutcomeUnknownError:
                raise
            except StorageError as error:
                if not self._doubtful:
                    raise
                raise OutcomeUnknownError(
                    f"Whether an earlier try of this commit landed could not be found out: {error} "
                    "No change is lost; commit again to find out."
                ) from error

    def _check_changed(self, *, allow_empty: bool) -> None:
        if not (allow_empty or self._doubtful or self.has_uncommitted_changes):
            raise NothingToCommitError(
                "The session changed nothing, so there is nothing to commit. Write something "
                "first, or pass allow_empty=True."
            )

    @contextmanager
    def exclusively(self) -> Generator[str]:
        """Refuse changes for the length of the block, and afterwards unless it failed."""
        workspace = self.workspace
        with workspace.lock:
            if not self._doubtful:
                workspace.check_open()
            elif self._busy:
                raise SessionStateError("The session is being committed or rebased already.")
            assert self.branch is not None  # read-only sessions were refused
            self._busy = True
            self._kept = None  # what was written since is not in it
            # From here on writers are refused, and what is published is what was looked at.
            workspace.closed = Closed.PUBLISHING
        try:
            yield self.branch
        finally:
            with workspace.lock:
                self._busy = False
                if self.mode is SessionMode.READONLY:
                    workspace.closed = Closed.PUBLISHED
                else:
                    workspace.closed = Closed.IN_DOUBT if self._doubtful else None


def _check_description(message: str, metadata: Mapping[str, JSON] | None) -> None:
    """Raise `InvalidInputError` if they cannot describe a snapshot, before any is stored."""
    check_text(message, "The message of a commit")
    if metadata is not None:
        check_metadata(metadata)
