"""Merges that are settled by hand, and proposals, for code that blocks.

The counterparts of `icechunk_async.versions.PendingMerge` and `icechunk_async.proposals`. Methods
block; the method of the same name with `_async` can be awaited on any event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, override

from icechunk_async._runtime.blocking.functions import call_in_thread
from icechunk_async._runtime.blocking.iterators import AsyncCloseableIterator
from icechunk_async._runtime.blocking.pairs import asked, blocking, twin_of
from icechunk_async.handles import SessionHandle
from icechunk_async.proposals import Check, CheckResult, Shown
from icechunk_async.proposals import Proposal as AsyncProposal
from icechunk_async.sync.errors import translated
from icechunk_async.sync.opening import Held
from icechunk_async.sync.session import Session
from icechunk_async.versions import PendingMerge as AsyncPendingMerge

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

    from icechunk_async.engine.proposals.record import ProposalRecord
    from icechunk_async.proposals import AnyCheck, CheckFunction
    from icechunk_async.session import Session as AsyncSession
    from icechunk_async.sync.opening import RepositoryHandle
    from icechunk_async.versions import MergeConflict, MergeReport
    from icechunk_async.zarr.values import CellChanges

    type BlockingCheck = Callable[[Session, Proposal], Any]

__all__ = ["Check", "CheckResult", "PendingMerge", "Proposal", "native_checks"]

_CELLS: Final = 100_000
"""For the size of what one chunk may bring."""


class PendingMerge:
    """A merge that is not committed yet; see `icechunk_async.versions.PendingMerge`."""

    def __init__(self, repository: RepositoryHandle, pending: AsyncPendingMerge) -> None:
        """Use `Repository.begin_merge`."""
        self.handle = Held(pending)
        self.session = Session(SessionHandle(repository, pending.session))
        """Reads the state to be committed, and takes changes."""

    @property
    def report(self) -> MergeReport:
        """The changes and the conflicts as they were at the beginning."""
        return self.handle.native.report

    @property
    def conflicts(self) -> tuple[MergeConflict, ...]:
        """The conflicts that are open."""
        return self.handle.native.conflicts

    def keep_branch(self, *conflicts: MergeConflict) -> None:
        """Settle conflicts by leaving things as the branch has them; all if none is named."""
        with translated():
            self.handle.native.keep_branch(*conflicts)

    def resolved(self, *conflicts: MergeConflict) -> None:
        """Settle conflicts by what was written into the session; all if none is named."""
        with translated():
            self.handle.native.resolved(*conflicts)

    take_source, take_source_async = asked(AsyncPendingMerge.take_source)

    def cells(self, conflict: MergeConflict) -> Iterator[CellChanges]:
        """Iterate over the cells in which both sides of a conflict about chunks differ.

        See `icechunk_async.versions.PendingMerge.cells`.
        """

        async def found() -> AsyncIterator[CellChanges]:
            with translated():
                async for cells in self.handle.native.cells(conflict):
                    yield cells

        return AsyncCloseableIterator(found(), parts=_CELLS).begun()

    to_bytes, to_bytes_async = asked(AsyncPendingMerge.to_bytes)
    commit, commit_async = asked(AsyncPendingMerge.commit, str)


class Proposal(Shown):
    """A change of a branch that is waiting to be accepted, or was.

    See `icechunk_async.proposals.Proposal`. Checks are plain functions of a `Session` that reads
    the merged state, and of the proposal; each runs in a separate thread, which goes to its
    end even if its time limit is over.
    """

    def __init__(self, repository: RepositoryHandle, proposal: AsyncProposal) -> None:
        """Use `Repository.propose`, `proposal` or `proposals`."""
        self.handle = Held(proposal)
        self._repository = repository

    def __repr__(self) -> str:
        return repr(self.handle.native)

    @property
    @override
    def record(self) -> ProposalRecord:
        """The state that was read or stored last."""
        return self.handle.native.record

    @property
    def id(self) -> str:
        """Names the proposal in its repository."""
        return str(self.handle.native.id)

    @property
    def source_id(self) -> str:
        """The snapshot that is proposed, as the source had it then."""
        return str(self.handle.native.source_id)

    @twin_of(AsyncProposal.session)
    async def session_async(self) -> Session:
        native = await self.handle.ask(lambda it: it.session())
        return Session(SessionHandle(self._repository, native))

    session = blocking(session_async)
    reload, reload_async = asked(AsyncProposal.reload)
    close, close_async = asked(AsyncProposal.close)

    @twin_of(AsyncProposal.run_checks)
    async def run_checks_async(
        self, checks: Iterable[Check | BlockingCheck] = ()
    ) -> tuple[CheckResult, ...]:
        native = native_checks(self._repository, checks)
        return await self.handle.ask(lambda it: it.run_checks(native))

    @twin_of(AsyncProposal.refresh)
    async def refresh_async(self, checks: Iterable[Check | BlockingCheck] = ()) -> None:
        native = native_checks(self._repository, checks)
        await self.handle.ask(lambda it: it.refresh(native))

    @twin_of(AsyncProposal.accept)
    async def accept_async(
        self,
        checks: Iterable[Check | BlockingCheck] = (),
        *,
        when_moved: Literal["retry", "refuse"] = "retry",
        tries: int = 8,
    ) -> str:
        native = native_checks(self._repository, checks)
        return str(
            await self.handle.ask(lambda it: it.accept(native, when_moved=when_moved, tries=tries))
        )

    run_checks = blocking(run_checks_async)
    refresh = blocking(refresh_async)
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
    """Return the async function that gives a blocking one the facade's session and proposal."""

    async def run(session: AsyncSession, proposal: AsyncProposal) -> str | None:
        mine = Session(SessionHandle(repository, session))
        found: Any = await call_in_thread(function, mine, Proposal(repository, proposal))
        said: str | None = found  # whatever it is: the native library looks
        return said

    run.__name__ = getattr(function, "__name__", "<nameless>")
    return run
