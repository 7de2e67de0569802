"""Proposals: changes that are checked and reviewed before a branch takes them.

Write to a branch of your own, propose it, and let checks run on the very state that would be
merged; accepting the proposal publishes that state, or nothing (write, audit, publish)::

    async def no_gaps(session, proposal):
        t2m = await zarr.open_array(store=session.store, path="t2m", mode="r")
        if np.isnan(await t2m.getitem(...)).any():
            return "t2m has gaps"

    proposal = await repository.propose("night-run", checks=[no_gaps])
    await proposal.accept()

Values of this module are made by `Repository.propose`, `proposal` and `proposals`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, override

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.history import check_online, state_for
from icechunk_async.engine.history.graph import PROPERTY
from icechunk_async.engine.history.settings import protections_in
from icechunk_async.engine.proposals import files
from icechunk_async.engine.proposals.checks import Check, as_checks, run_check
from icechunk_async.engine.proposals.page import render
from icechunk_async.engine.proposals.record import (
    MOST_MESSAGE,
    MOST_TITLE,
    ArrayReview,
    Candidate,
    CellReview,
    ChangeMap,
    CheckResult,
    KeyReview,
    NodeReview,
    ProposalRecord,
    ProposalState,
    Review,
    check_names,
    encode_record,
)
from icechunk_async.engine.versions.feed import changes_between
from icechunk_async.engine.versions.naming import find_ref
from icechunk_async.engine.versions.plans import Merge
from icechunk_async.engine.versions.report import conflict_error
from icechunk_async.errors import (
    ChecksFailedError,
    ConflictError,
    IcechunkError,
    InvalidInputError,
    NothingToCommitError,
    OutcomeUnknownError,
    ProposalStateError,
    SnapshotNotFoundError,
    StorageError,
)
from icechunk_async.format.ids import ProposalId, SnapshotId
from icechunk_async.format.json.metadata import encode_items
from icechunk_async.zarr.review import review_changes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from icechunk_async.engine.commit.conflicts import ConflictSolver
    from icechunk_async.engine.open import Engine
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.session import Session

    type CheckFunction = Callable[[Session, Proposal], Awaitable[str | None]]
    type AnyCheck = Check | CheckFunction

__all__ = [
    "ArrayReview",
    "Candidate",
    "CellReview",
    "ChangeMap",
    "Check",
    "CheckResult",
    "KeyReview",
    "NodeReview",
    "Proposal",
    "ProposalId",
    "ProposalState",
    "Review",
]

_log = logging.getLogger(__name__)

# Each check may read whole arrays, or be a program that uses all processors.
_AT_ONCE: Final = 4
COMPARED_CHUNKS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Desk:
    """The parts of an open repository that its proposals use."""

    engine: Engine
    read: Callable[[SnapshotId], Awaitable[Session]]
    """Opens a session that reads a snapshot."""
    write: Callable[[Snapshot, str], Session]
    """Returns a session that stands on the tip of a branch."""
    published: Callable[[str, SnapshotId, SnapshotId], Awaitable[None]]
    """Is called with a branch, its new tip, and the tip before."""

    def check(self) -> None:
        """Refuse where proposals cannot be kept.

        Raises:
            UnsupportedBySpecError: the layout has none.
            UnsafeStorageError: they could be lost on this storage.
        """
        self.engine.history.capabilities.require("proposals")
        self.engine.check_safe()


@dataclass(frozen=True, slots=True)
class Wish:
    """The arguments of `Repository.propose`."""

    source: SnapshotId | str
    into: str
    title: str | None
    message: str | None
    metadata: Mapping[str, JSON] = field(default_factory=dict[str, "JSON"])
    base: SnapshotId | str | None = None


class Shown(ABC):
    """The properties of a proposal, for asyncio and for code that blocks."""

    @property
    @abstractmethod
    def record(self) -> ProposalRecord:
        """The state that was read or stored last."""

    @property
    def state(self) -> ProposalState:
        """Whether it is open, being accepted, accepted or closed."""
        return self.record.state

    @property
    def title(self) -> str:
        """Its subject, on one line."""
        return self.record.title

    @property
    def message(self) -> str:
        """The message of the merge."""
        return self.record.message

    @property
    def into(self) -> str:
        """The branch that it would change."""
        return self.record.into

    @property
    def source(self) -> str:
        """The branch or tag that is proposed, or the id of a snapshot."""
        return self.record.source_ref

    @property
    def metadata(self) -> dict[str, JSON]:
        """Properties of the merge."""
        return dict(self.record.metadata)

    @property
    def checks(self) -> tuple[str, ...]:
        """The names of the checks that must pass."""
        return self.record.checks

    @property
    def candidate(self) -> Candidate:
        """The state that would be published, and the results of checks on it."""
        return self.record.candidate

    @property
    def results(self) -> tuple[CheckResult, ...]:
        """The results of the checks on the candidate."""
        return self.record.candidate.results

    @property
    def review(self) -> Review:
        """The net changes that it makes on the branch."""
        return self.record.review

    @property
    def created_at(self) -> datetime:
        """When it was made (aware, UTC)."""
        return clock.from_us(self.record.created_us)

    @property
    def changed_at(self) -> datetime:
        """When its present state was stored (aware, UTC)."""
        return clock.from_us(self.record.at_us)

    @property
    def reason(self) -> str:
        """Why it was closed; empty without a reason."""
        return self.record.reason

    @property
    def passed(self) -> bool:
        """Whether all of its checks passed on the candidate."""
        return set(self.record.checks) <= self.record.candidate.passed

    def page(self) -> str:
        """Return a page about it: one HTML file without script, for light and dark screens.

        It is stored as ``proposals/<id>/review.html`` as well. All that others wrote is escaped.
        """
        return render(self.record)


class Proposal(Shown):
    """A change of a branch that is waiting to be accepted, or was.

    It shows the state that was read or written last; `reload` reads it again. Made by
    `Repository.propose`.
    """

    def __init__(
        self,
        desk: Desk,
        record: ProposalRecord,
        checks: Sequence[Check] = (),
        solver: ConflictSolver | None = None,
        compare_chunks: int = COMPARED_CHUNKS,
    ) -> None:
        """Use `Repository.propose`, `proposal` or `proposals`."""
        self._desk = desk
        self._record = record
        self._checks = {it.name: it for it in checks}
        self._solver = solver
        self._compare_chunks = compare_chunks

    def __repr__(self) -> str:
        record = self._record
        return f"<Proposal {record.id} {record.state.value}: {record.title!r}>"

    @property
    def id(self) -> ProposalId:
        """Names the proposal in its repository."""
        return self._record.id

    @property
    @override
    def record(self) -> ProposalRecord:
        """The state that was read or stored last."""
        return self._record

    @property
    def source_id(self) -> SnapshotId:
        """The snapshot that is proposed, as the source had it then."""
        return self._record.source_id

    async def session(self) -> Session:
        """Return a session that reads the candidate.

        Raises:
            SnapshotNotFoundError: another engine collected it; `refresh` makes it anew.
        """
        return await self._desk.read(self._record.candidate.snapshot_id)

    async def reload(self) -> None:
        """Read the proposal's present state.

        Raises:
            ProposalNotFoundError: it was collected.
            FormatError: it is damaged.

        Cost: one listing and one request.
        """
        self._record = await files.load(self._desk.engine.storage, self.id)

    async def run_checks(self, checks: Iterable[AnyCheck] = ()) -> tuple[CheckResult, ...]:
        """Run checks on the candidate, again if they ran before, and keep their results.

        Args:
            checks: which ones; none: those that the proposal was made with here. Results of others
                stay.

        Returns:
            The results of all checks on the candidate. That one did not pass raises nothing.

        Raises:
            ProposalStateError: it was accepted or closed.
            InvalidInputError: there is nothing to run here.
            SnapshotNotFoundError: the candidate was collected; `refresh` makes it anew.

        Cancellation: no result is kept.
        """
        self._desk.check()
        chosen = as_checks(checks) or list(self._checks.values())
        if not chosen:
            raise InvalidInputError(
                "The proposal was opened here without checks. Pass them as checks=: what to run is "
                "never read from the storage."
            )
        while True:
            await self.reload()
            self._check_open()
            record = self._record
            # Checks take minutes, and no lock is held meanwhile. If the proposal was refreshed or
            # closed under them, these results are of a state that nobody would publish, and they
            # run on the new one.
            results = await self._run(chosen, record.candidate)
            if await self._append(candidate=replace(record.candidate, results=results)):
                return results

    async def refresh(self, checks: Iterable[AnyCheck] = ()) -> None:
        """Make the candidate anew from what the source and the branch are now, and check it.

        Args:
            checks: see `run_checks`; those that cannot be run here have no result afterwards.

        Raises:
            MergeConflictError: they do not go together any more.
            NothingToCommitError: the branch has all of it already.
            ProposalStateError: it was accepted or closed.
            NotFoundError: the source or the branch is gone.

        Cancellation: the proposal may have a new candidate, without results.

        Cost: as `Repository.propose`.
        """
        self._desk.check()
        chosen = [*as_checks(checks)] or list(self._checks.values())
        while True:
            await self.reload()
            self._check_open()
            source_id = await self._source_now()
            # Of a try that is overtaken, a snapshot stays that no branch holds; collection takes
            # it.
            made = await self._make(source_id)
            if await self._append(
                state=ProposalState.OPEN, source_id=source_id, candidate=made[0], review=made[1]
            ):
                break
        if chosen:
            await self.run_checks(chosen)

    async def close(self, reason: str = "", *, force: bool = False) -> None:
        """Reject the proposal, or give it up. Nothing is published.

        Args:
            reason: for people.
            force: close it even if a process began to accept it and did not store the outcome. If
                that process is alive, it may still publish.

        Raises:
            ProposalStateError: it was accepted or closed already, or is being accepted.
            InvalidInputError: the reason is too long.
            OutcomeUnknownError: the storage never answered.

        Cancellation: it may be closed.
        """
        self._desk.check()
        _check_text("reason", reason, MOST_MESSAGE)
        while True:
            await self.reload()
            self._check_open()
            if self.state is ProposalState.ACCEPTING:
                if await self._landed():
                    # It landed: closing it would say that nothing was published. The next round
                    # tells the caller.
                    await self._append(state=ProposalState.ACCEPTED)
                    continue
                tip = await self._desk.engine.history.branch_tip(self.into)
                # At another tip the move that may be under way can only be refused, so closing is
                # safe. At this one it may still land after it was closed.
                if tip == self.candidate.target_id and not force:
                    raise self._refusal(
                        "is being accepted, or the process that accepted it was killed, so it may "
                        "be published at any moment. Accept it again to finish that; or close it "
                        "with force=True, if no process is at it"
                    )
            if await self._append(state=ProposalState.CLOSED, reason=reason):
                return

    async def accept(
        self,
        checks: Iterable[AnyCheck] = (),
        *,
        when_moved: Literal["retry", "refuse"] = "retry",
        tries: int = 8,
    ) -> SnapshotId:
        """Publish the candidate on the branch, if every check passed on it.

        The branch moves to the very snapshot that was checked, by compare-and-set. If the branch
        has moved since, the merge is made anew and the checks run again on the new state.

        Args:
            checks: run these now, besides those that the proposal was made with here and that have
                no result on the state yet. What to run is never read from the storage: in another
                process, pass them.
            when_moved: ``"refuse"``: do not merge anew where the branch has moved.
            tries: how often the merge is made anew, at most.

        Returns:
            The snapshot that is the tip of the branch.

        Raises:
            ChecksFailedError: a check did not pass on the state to be merged, or could not be run
                here.
            ProposalStateError: it was accepted or closed already, or its source was moved or
                deleted.
            ConflictError: the branch moved, and ``when_moved`` or ``tries`` forbid another merge.
            MergeConflictError: the branch changed the same meanwhile.
            NothingToCommitError: the branch has all of it already.
            BranchProtectedError: the branch asks for a check that did not pass.
            OutcomeUnknownError: the storage never answered; accepting again finds out. With any
                other error, nothing was published.

        Cancellation: it may have been published; accepting again finds out, and continues.

        Cost: without a race, and besides the checks, one listing, seven reads, of which five are
        answered in a few bytes, and six writes. Nothing of the data is written again.
        """
        self._desk.check()
        _check_accepting(when_moved, tries)
        given = as_checks(checks)
        first = True
        # Each round reads the proposal anew and does what is missing:
        # `_finished`: it, or an earlier try that was killed, is published already;
        # `_renewed`: the candidate stands on the tip, else another is made;
        # `_checked`: every check that is asked for passed on this very candidate;
        # `_publish`: one compare-and-set, from the tip that the candidate was made on.
        for _ in range(tries + 1):
            published = await self._finished(first=first)
            if published is not None:
                return published
            first = False
            await self._check_source()
            try:
                if not await self._renewed(when_moved):
                    continue
            # What was to be merged is on the branch: perhaps by another process that accepted this
            # proposal.
            except NothingToCommitError:
                published = await self._finished(first=False)
                if published is None:
                    raise
                return published
            if not await self._checked(given):
                continue
            if await self._publish():
                return self.candidate.snapshot_id
        raise ConflictError(
            f"Branch {self.into!r} or proposal {self.id} changed each of {tries + 1} times that it "
            "was tried; nothing was published. Accept it again when fewer writers are at work.",
            branch=self.into,
        )

    # The steps of accepting; those that return False were overtaken, so that all begins again

    async def _finished(self, *, first: bool) -> SnapshotId | None:
        """Return the snapshot that this call or an interrupted one published; None without one."""
        await self.reload()
        if first or self.state is ProposalState.CLOSED:
            self._check_open()
        if self.state is ProposalState.ACCEPTED:  # by another process, meanwhile
            return self.candidate.snapshot_id
        if self.state is ProposalState.ACCEPTING and await self._landed():
            await self._note_accepted()
            await self._tell()
            return self.candidate.snapshot_id
        return None

    async def _landed(self) -> bool:
        """Return whether the candidate is on the branch."""
        history, candidate = self._desk.engine.history, self.candidate
        async for info in history.ancestry(await history.branch_tip(self.into)):
            if info.id == candidate.snapshot_id:
                return True
            # It would be a child of this one, so nothing older can be it.
            if info.id == candidate.target_id:
                return False
        return False

    async def _check_source(self) -> None:
        """Refuse if the source is not what was proposed."""
        now = await self._source_now()
        if now != self.source_id:
            raise self._refusal(
                f"proposes {self.source!r} at snapshot {self.source_id}, which was reviewed, and "
                f"it is at {now} now. Review that with refresh, and accept it then"
            )

    async def _source_now(self) -> SnapshotId:
        """Return the snapshot that the source names now."""
        # A snapshot that was proposed by its id never moves. Names are looked up exactly, and not
        # as refs: a deleted branch must not be found again as the first letters of an id.
        if self.source == str(self.source_id):
            return self.source_id
        history = self._desk.engine.history
        branches, tags = await gather(history.branches(), history.tags())
        found = branches.get(self.source, tags.get(self.source))
        if found is None:
            raise self._refusal(
                f"proposes {self.source!r}, which was deleted. Create it again at snapshot "
                f"{self.source_id}, or propose that snapshot"
            )
        return found

    async def _renewed(self, when_moved: str) -> bool:
        """Make the candidate anew if the branch has moved, or if it was collected."""
        history, candidate = self._desk.engine.history, self.candidate
        tip = await history.branch_tip(self.into)
        if tip == candidate.target_id and await self._is_there(candidate):
            return True
        if tip != candidate.target_id and when_moved == "refuse":
            # From another tip the candidate cannot be published, so this is final.
            if self.state is ProposalState.ACCEPTING and (
                await self._landed() or not await self._append(state=ProposalState.OPEN)
            ):
                return False
            raise ConflictError(
                f"Branch {self.into!r} was at {candidate.target_id} when proposal {self.id} was "
                f"checked and is at {tip} now; nothing was published. Call refresh, look at it "
                "again, and accept it then; or accept it with when_moved='retry'.",
                branch=self.into,
            )
        made = await self._make(self.source_id)
        return await self._append(state=ProposalState.OPEN, candidate=made[0], review=made[1])

    async def _is_there(self, candidate: Candidate) -> bool:
        """Return whether the candidate follows the tip, and was not collected by another engine.

        A record that names another snapshot would drop the commits of the branch.
        """
        try:
            info, _ = await gather(
                self._desk.engine.history.snapshot_info(candidate.snapshot_id),
                # Past the cache, which would still have the snapshot after it was collected.
                self._desk.engine.assets.read_snapshot(candidate.snapshot_id),
            )
        except SnapshotNotFoundError:
            return False
        return info.parent_id == candidate.target_id

    async def _checked(self, given: Sequence[Check]) -> bool:
        """Run the checks that have to be run on the candidate.

        Raises:
            ChecksFailedError: one did not pass, or cannot be run here.
        """
        candidate, now = self.candidate, {it.name: it for it in given}
        required = dict.fromkeys([*self.checks, *(await self._asked_for()), *now])
        # Checks that are passed here run again; those of the proposal are asked once for each
        # candidate, by any process that has them.
        known = {it.name for it in candidate.results} - now.keys()
        chosen = {
            name: check
            for name, check in {**self._checks, **now}.items()
            if name in required and name not in known
        }
        if chosen:
            results = await self._run(list(chosen.values()), candidate)
            if not await self._append(candidate=replace(candidate, results=results)):
                return False
        missing = [it for it in required if it not in self.candidate.passed]
        if missing:
            raise self._failure(missing)
        return True

    async def _asked_for(self) -> frozenset[str]:
        """Return the checks that the protection of the branch asks for."""
        history = self._desk.engine.history
        if not history.capabilities.protection:
            return frozenset()
        info = await state_for(history, "protection").info()
        return protections_in(info).get(self.into, frozenset())

    def _failure(self, names: Sequence[str]) -> ChecksFailedError:
        results = {it.name: it for it in self.results}
        parts: list[str] = []
        for name in names[:5]:
            result = results.get(name)
            if result is None:
                parts.append(f"{name!r} was not run; pass it as checks=")
            else:
                # The end, where commands and tracebacks say what was wrong.
                detail = " ".join(result.detail.split())[-200:]
                parts.append(f"{name!r} {_SAID[result.outcome]}" + f" ({detail})" * bool(detail))
        more = f"; and {len(names) - 5} more" if len(names) > 5 else ""
        return ChecksFailedError(
            f"Proposal {self.id} was not accepted, and nothing was published: of its checks, "
            f"{'; '.join(parts)}{more}.",
            proposal_id=str(self.id),
            checks=list(names),
        )

    async def _publish(self) -> bool:
        """Move the branch to the candidate."""
        # Stored first: closing the proposal then waits for the outcome, and accepting it again
        # after a crash looks whether it landed.
        if not await self._append(state=ProposalState.ACCEPTING):
            return False
        candidate, history = self.candidate, self._desk.engine.history
        try:
            await history.reset_branch(
                self.into,
                candidate.snapshot_id,
                expected=candidate.target_id,
                approved=candidate.passed,
            )
        # It stays *accepting*: the next who accepts it looks at the branch.
        except OutcomeUnknownError:
            raise
        except (ConflictError, SnapshotNotFoundError):  # moved, or collected
            return False
        except IcechunkError:
            await self._append(state=ProposalState.OPEN)
            raise
        await self._note_accepted()
        await self._tell()
        return True

    async def _note_accepted(self) -> None:
        """Store that the candidate is published; a failure to store that undoes nothing.

        Another process that accepts the same may store states in between.
        """
        try:
            while not await self._append(state=ProposalState.ACCEPTED):
                now = await files.load(self._desk.engine.storage, self.id)
                if now.state.is_over:
                    break
                # The number of the newest state with what is known here: the candidate that landed,
                # and not one that the other process made since.
                self._record = replace(self._record, number=now.number)
        except IcechunkError as error:
            _log.warning(
                "proposal %s is published, and still listed as being accepted: %s", self.id, error
            )
        # Also if another process stored the end: this is what is published.
        self._record = replace(self._record, state=ProposalState.ACCEPTED)

    async def _tell(self) -> None:
        candidate = self.candidate
        await self._desk.published(self.into, candidate.snapshot_id, candidate.target_id)

    # What the steps are made of

    async def _make(self, source_id: SnapshotId) -> tuple[Candidate, Review]:
        record = replace(self._record, source_id=source_id)
        return await _make(self._desk, record, self._solver, self._compare_chunks)

    async def _run(self, checks: Sequence[Check], candidate: Candidate) -> tuple[CheckResult, ...]:
        """Run checks on a candidate; return their results, and those of others that it had."""
        session = await self._desk.read(candidate.snapshot_id)
        environment = {
            "ICECHUNK_ASYNC_URL": self._desk.engine.storage.description.url,
            "ICECHUNK_ASYNC_SNAPSHOT": str(candidate.snapshot_id),
            "ICECHUNK_ASYNC_PROPOSAL": str(self.id),
            "ICECHUNK_ASYNC_BRANCH": self.into,
            "ICECHUNK_ASYNC_SOURCE": self.source,
        }

        async def run(check: Check) -> CheckResult:
            return await run_check(check, session, self, environment)

        ran = await bounded_map(run, checks, limit=_AT_ONCE)
        found = {it.name: it for it in [*candidate.results, *ran]}
        # Names of results are stored, and records are bounded: all together must fit.
        check_names(list(found))
        return tuple(found.values())

    async def _append(self, **changes: Any) -> bool:
        """Store the next state; return whether no other writer was first."""
        stored = await files.append(self._desk.engine.storage, self._record, **changes)
        if stored is None:
            return False
        self._record = stored
        # After the state, of which it is a picture. A page that is behind misleads nobody who asks.
        await self.store_page()
        return True

    async def store_page(self) -> None:
        """Store the page; a failure is only logged."""
        try:
            await files.put_page(self._desk.engine.storage, self.id, self.page())
        except StorageError as error:
            _log.warning("the page of proposal %s is not stored: %s", self.id, error)

    def _check_open(self) -> None:
        if self.state is ProposalState.ACCEPTED:
            raise self._refusal(
                f"was accepted already, as snapshot {self.candidate.snapshot_id}", ""
            )
        if self.state is ProposalState.CLOSED:
            why = f" ({self.reason[:200]})" if self.reason else ""
            raise self._refusal(f"was closed{why}. Propose the change again")

    def _refusal(self, why: str, end: str = "; nothing was published") -> ProposalStateError:
        return ProposalStateError(
            f"Proposal {self.id} {why}{end}.",
            proposal_id=str(self.id),
            state=self.state.value,
        )


_SAID: Final = {
    "failed": "failed",
    "error": "could not be run",
    "timed out": "took too long",
    "passed": "passed",
}


def _check_accepting(when_moved: object, tries: object) -> None:
    if when_moved not in {"retry", "refuse"}:
        raise InvalidInputError(f"when_moved is 'retry' or 'refuse', and not {when_moved!r}.")
    if not isinstance(tries, int) or isinstance(tries, bool) or tries < 0:
        raise InvalidInputError(f"tries is a number from 0 on, and not {tries!r}.")


def _check_text(name: str, text: object, most: int) -> None:
    if not isinstance(text, str) or len(text) > most:
        raise InvalidInputError(
            f"The {name} of a proposal is text of at most {most} characters, not {text!r:.80}."
        )


async def propose(
    desk: Desk,
    wish: Wish,
    checks: Iterable[AnyCheck],
    solver: ConflictSolver | None,
    compare_chunks: int,
) -> Proposal:
    """Make a proposal; see `Repository.propose`."""
    desk.check()
    chosen = as_checks(checks)
    if compare_chunks < 0:
        raise InvalidInputError(f"compare_chunks counts chunks, from 0 on; it is {compare_chunks}.")
    encode_items(wish.metadata, desk.engine.history.spec_version or 2)  # refuses what is no JSON
    source_ref, source_id = await _source_of(desk.engine, wish)
    title = wish.title
    if title is None:
        lines = (wish.message or "").splitlines() or [f"Merge {source_ref!r} into {wish.into!r}"]
        # Cut, unlike a title that was given: a long first line of a message is no fault of the
        # caller.
        title = lines[0][:MOST_TITLE]
    message = title if wish.message is None else wish.message
    _check_text("title", title, MOST_TITLE)
    if len(title.splitlines()) > 1:
        raise InvalidInputError(
            f"The title of a proposal is one line, not {title!r:.80}; give the rest as the message."
        )
    _check_text("message", message, MOST_MESSAGE)
    base_id = None if wish.base is None else await find_ref(desk.engine, wish.base)
    now = clock.now_us()
    record = ProposalRecord(
        ProposalId.random(),
        0,
        "",
        now,
        now,
        ProposalState.OPEN,
        title,
        message,
        wish.into,
        source_ref,
        source_id,
        tuple(it.name for it in chosen),
        # A stand-in: the record is tried before the merge is made, which may take long.
        Candidate(source_id, source_id),
        Review(),
        wish.metadata,
        base_id,
    )
    encode_record(record)  # refuses what cannot be stored before anything is
    candidate, review = await _make(desk, record, solver, compare_chunks)
    record = await files.create(
        desk.engine.storage, replace(record, candidate=candidate, review=review)
    )
    proposal = Proposal(desk, record, chosen, solver, compare_chunks)
    if chosen:
        await proposal.run_checks()
    else:
        await proposal.store_page()
    return proposal


async def _source_of(engine: Engine, wish: Wish) -> tuple[str, SnapshotId]:
    """Return how a source is called in the record, and the snapshot that it names."""
    source_id = await find_ref(engine, wish.source)
    if isinstance(wish.source, SnapshotId):
        return str(source_id), source_id
    branches, tags = await gather(engine.history.branches(), engine.history.tags())
    if wish.source == wish.into and wish.source in branches:
        raise InvalidInputError(
            f"Branch {wish.into!r} cannot be proposed to itself. Commit to another branch, and "
            "propose that."
        )
    named = wish.source in branches or wish.source in tags
    return wish.source if named else str(source_id), source_id


async def _make(
    desk: Desk,
    record: ProposalRecord,
    solver: ConflictSolver | None,
    compare_chunks: int,
) -> tuple[Candidate, Review]:
    """Store the merged state as a snapshot that no branch holds, and tell what it changes.

    Raises:
        MergeConflictError: the source does not go together with the branch.
        NothingToCommitError: the branch has all of it already.
    """
    engine = desk.engine
    plan = Merge(record.source_id, record.into, record.base_id, solver)
    combined = await plan.combine(engine)
    if combined.conflicts:
        raise conflict_error(await combined.report(engine, record.into), combined.conflicts)
    if combined.changes.is_empty():
        raise NothingToCommitError(
            f"Branch {record.into!r} has all changes of {record.source_ref!r} already, so there is "
            "nothing to propose. Nothing was published."
        )
    check_online(engine.history)
    session = desk.write(combined.target, record.into)
    session.workspace.rebase_to(combined.target, combined.changes)
    # Marked as a merge of the source: accepted, it is one, and a later merge must not bring it
    # again.
    own: Any = plan.how.properties(record.source_id)[PROPERTY]
    properties = {PROPERTY: {**own, "proposal": str(record.id)}, **record.metadata}
    try:
        # In the history, though no branch has it: any engine can open it to check it, and once it
        # is collected it is gone from there, and the branch cannot move to it (decision 0027).
        made = await session.flush(record.message, properties)
    except BaseException:
        session.abandon()
        raise
    before, after = await gather(desk.read(combined.target.id), desk.read(made))
    feed = changes_between(engine, before.workspace.base, after.workspace.base)
    review = await review_changes(before.store, after.store, feed, compare_chunks)
    return Candidate(made, combined.target.id), review
