"""Merges that are settled by hand, and proposals, for code that blocks.

The counterparts of `icechunk_async.versions.PendingMerge` and `icechunk_async.proposals`. Methods
block; the method of the same name with `_async` can be awaited on any event loop.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final, Literal

from anyio import CapacityLimiter, to_thread

from icechunk_async._runtime.blocking.iterators import AsyncCloseableIterator
from icechunk_async._runtime.blocking.pairs import blocking, twin_of
from icechunk_async.handles import SessionHandle
from icechunk_async.proposals import Check, CheckResult
from icechunk_async.proposals import Proposal as AsyncProposal
from icechunk_async.sync.errors import translated
from icechunk_async.sync.session import Session
from icechunk_async.versions import PendingMerge as AsyncPendingMerge

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
    from datetime import datetime

    from icechunk_async.engine.commit.hooks import CommitEvent
    from icechunk_async.proposals import (
        AnyCheck,
        Candidate,
        CheckFunction,
        ProposalState,
        Review,
    )
    from icechunk_async.session import Session as AsyncSession
    from icechunk_async.sync.opening import RepositoryHandle
    from icechunk_async.versions import MergeConflict, MergeReport
    from icechunk_async.zarr.values import CellChanges

    type BlockingCheck = Callable[[Session, Proposal], Any]

__all__ = ["Check", "CheckResult", "PendingMerge", "Proposal", "native_checks", "native_hook"]

_CELLS: Final = 100_000
"""For the size of what one chunk may bring."""


class PendingMerge:
    """A merge that is not committed yet; see `icechunk_async.versions.PendingMerge`."""

    def __init__(self, repository: RepositoryHandle, pending: AsyncPendingMerge) -> None:
        """Use `Repository.begin_merge`."""
        self._pending = pending
        self.session = Session(SessionHandle(repository, pending.session))
        """Reads the state to be committed, and takes changes."""

    @property
    def report(self) -> MergeReport:
        """The changes and the conflicts as they were at the beginning."""
        return self._pending.report

    @property
    def conflicts(self) -> tuple[MergeConflict, ...]:
        """The conflicts that are open."""
        return self._pending.conflicts

    def keep_branch(self, *conflicts: MergeConflict) -> None:
        """Settle conflicts by leaving things as the branch has them; all if none is named."""
        with translated():
            self._pending.keep_branch(*conflicts)

    def resolved(self, *conflicts: MergeConflict) -> None:
        """Settle conflicts by what was written into the session; all if none is named."""
        with translated():
            self._pending.resolved(*conflicts)

    @twin_of(AsyncPendingMerge.take_source)
    async def take_source_async(self, *conflicts: MergeConflict) -> None:
        with translated():
            await self._pending.take_source(*conflicts)

    def cells(self, conflict: MergeConflict) -> Iterator[CellChanges]:
        """Iterate over the cells in which both sides of a conflict about chunks differ.

        See `icechunk_async.versions.PendingMerge.cells`.
        """

        async def found() -> AsyncIterator[CellChanges]:
            with translated():
                async for cells in self._pending.cells(conflict):
                    yield cells

        return AsyncCloseableIterator(found(), parts=_CELLS).begun()

    @twin_of(AsyncPendingMerge.to_bytes)
    async def to_bytes_async(self) -> bytes:
        with translated():
            return await self._pending.to_bytes()

    @twin_of(AsyncPendingMerge.commit)
    async def commit_async(
        self, message: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> str:
        with translated():
            return str(await self._pending.commit(message, metadata))

    take_source = blocking(take_source_async)
    to_bytes = blocking(to_bytes_async)
    commit = blocking(commit_async)


class Proposal:
    """A change of a branch that is waiting to be accepted, or was.

    See `icechunk_async.proposals.Proposal`. Checks are plain functions of a `Session` that reads
    the merged state, and of the proposal; each runs in a separate thread, which goes to its
    end even if its time limit is over.
    """

    def __init__(self, repository: RepositoryHandle, proposal: AsyncProposal) -> None:
        """Use `Repository.propose`, `proposal` or `proposals`."""
        self._repository = repository
        self._proposal = proposal

    def __repr__(self) -> str:
        return repr(self._proposal)

    @property
    def id(self) -> str:
        """Names the proposal in its repository."""
        return str(self._proposal.id)

    @property
    def state(self) -> ProposalState:
        """Whether it is open, being accepted, accepted or closed."""
        return self._proposal.state

    @property
    def title(self) -> str:
        """Its subject, on one line."""
        return self._proposal.title

    @property
    def message(self) -> str:
        """The message of the merge."""
        return self._proposal.message

    @property
    def into(self) -> str:
        """The branch that it would change."""
        return self._proposal.into

    @property
    def source(self) -> str:
        """The branch or tag that is proposed, or the id of a snapshot."""
        return self._proposal.source

    @property
    def source_id(self) -> str:
        """The snapshot that is proposed, as the source had it then."""
        return str(self._proposal.source_id)

    @property
    def metadata(self) -> dict[str, Any]:
        """Properties of the merge."""
        return dict(self._proposal.metadata)

    @property
    def checks(self) -> tuple[str, ...]:
        """The names of the checks that must pass."""
        return self._proposal.checks

    @property
    def candidate(self) -> Candidate:
        """The state that would be published, and the results of checks on it."""
        return self._proposal.candidate

    @property
    def results(self) -> tuple[CheckResult, ...]:
        """The results of the checks on the candidate."""
        return self._proposal.results

    @property
    def review(self) -> Review:
        """The net changes that it makes on the branch."""
        return self._proposal.review

    @property
    def created_at(self) -> datetime:
        """When it was made (aware, UTC)."""
        return self._proposal.created_at

    @property
    def changed_at(self) -> datetime:
        """When its present state was stored (aware, UTC)."""
        return self._proposal.changed_at

    @property
    def reason(self) -> str:
        """Why it was closed; empty without a reason."""
        return self._proposal.reason

    @property
    def passed(self) -> bool:
        """Whether all of its checks passed on the candidate."""
        return self._proposal.passed

    def page(self) -> str:
        """Return a page about it, as HTML; see `icechunk_async.proposals.Proposal.page`."""
        return self._proposal.page()

    @twin_of(AsyncProposal.session)
    async def session_async(self) -> Session:
        with translated():
            return Session(SessionHandle(self._repository, await self._proposal.session()))

    @twin_of(AsyncProposal.reload)
    async def reload_async(self) -> None:
        with translated():
            await self._proposal.reload()

    @twin_of(AsyncProposal.run_checks)
    async def run_checks_async(
        self, checks: Iterable[Check | BlockingCheck] = ()
    ) -> tuple[CheckResult, ...]:
        with translated():
            return await self._proposal.run_checks(native_checks(self._repository, checks))

    @twin_of(AsyncProposal.refresh)
    async def refresh_async(self, checks: Iterable[Check | BlockingCheck] = ()) -> None:
        with translated():
            await self._proposal.refresh(native_checks(self._repository, checks))

    @twin_of(AsyncProposal.close)
    async def close_async(self, reason: str = "", *, force: bool = False) -> None:
        with translated():
            await self._proposal.close(reason, force=force)

    @twin_of(AsyncProposal.accept)
    async def accept_async(
        self,
        checks: Iterable[Check | BlockingCheck] = (),
        *,
        when_moved: Literal["retry", "refuse"] = "retry",
        tries: int = 8,
    ) -> str:
        native = native_checks(self._repository, checks)
        with translated():
            return str(await self._proposal.accept(native, when_moved=when_moved, tries=tries))

    session = blocking(session_async)
    reload = blocking(reload_async)
    run_checks = blocking(run_checks_async)
    refresh = blocking(refresh_async)
    close = blocking(close_async)
    accept = blocking(accept_async)


def native_checks(
    repository: RepositoryHandle, checks: Iterable[Check | BlockingCheck]
) -> list[AnyCheck]:
    """Return checks for the native library; functions get the facade's session and proposal."""
    given: Iterable[Any] = [checks] if callable(checks) or isinstance(checks, Check) else checks
    return [_native(repository, it) for it in given]


def _native(repository: RepositoryHandle, check: Any) -> AnyCheck:
    if isinstance(check, Check):
        if not callable(check.run):
            return check
        return Check(check.name, _adapted(repository, check.run), check.timeout_seconds)
    return _adapted(repository, check) if callable(check) else check


def _adapted(repository: RepositoryHandle, function: Callable[..., Any]) -> CheckFunction:
    """Return the async function that runs a blocking one in a thread."""

    async def run(session: AsyncSession, proposal: AsyncProposal) -> str | None:
        mine = Session(SessionHandle(repository, session))
        other = Proposal(repository, proposal)
        found: Any = await _in_thread(function, mine, other)
        if inspect.isawaitable(found):  # an async function; it runs on the portal's loop
            found = await found
        said: str | None = found  # whatever it is: the native library looks
        return said

    run.__name__ = getattr(function, "__name__", "<nameless>")
    return run


async def _in_thread(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function of others in a thread that does not count among those of the event loop.

    If it uses a repository, it waits for work that threads do, and could hold all that there are.
    """
    own = CapacityLimiter(1)
    return await to_thread.run_sync(function, *arguments, abandon_on_cancel=True, limiter=own)


def native_hook(function: Callable[[CommitEvent], object]) -> Callable[[CommitEvent], Any]:
    """Return the async function that runs a blocking hook in a thread."""
    if not callable(function):
        return function  # the native library refuses it

    async def run(event: CommitEvent) -> None:
        found: Any = await _in_thread(function, event)
        if inspect.isawaitable(found):
            await found

    run.__name__ = getattr(function, "__name__", type(function).__name__)
    return run
