"""A session of somebody else's, to be worked in anywhere and merged back."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, NoReturn, Self, cast

from icechunk_async.errors import SessionStateError
from icechunk_async.repository.change_bytes import ForkState, decode_fork, encode_fork
from icechunk_async.repository.changes import ChangeSet
from icechunk_async.repository.forking import check_is_fork, stored_changes, wrong_base
from icechunk_async.repository.merge import ForkPoint, Merger
from icechunk_async.repository.opened import Request, open_parts
from icechunk_async.repository.publishing import SessionMode
from icechunk_async.repository.session import Session
from icechunk_async.repository.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Mapping

    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.repository.forking import Forking
    from icechunk_async.repository.history import History
    from icechunk_async.repository.opened import Opened
    from icechunk_async.repository.origin import Origin
    from icechunk_async.repository.packs import Packs
    from icechunk_async.repository.virtual import VirtualAccess
    from icechunk_async.storage import Storage
    from icechunk_async.zarr.store import IcechunkStore

__all__ = ["ForkSession"]


class ForkSession(Session):
    """A session that travels: it reads, writes and pickles, and is merged instead of committed.

    Made by ``Session.fork``. Pickled, it carries where the repository is and what was written to
    it so far, which is columns and a few bytes a chunk; chunks themselves are stored when they
    are written. Where it arrives it opens nothing by itself: use :meth:`attached` to work in it,
    and merge it as it is.
    """

    _base_id: SnapshotId
    _carried: ChangeSet | None
    """What was changed, while the fork is not attached."""
    _unstored: Packs | None
    """Chunks of those changes that are not in the storage; None if all are."""

    @classmethod
    def beside(cls, session: Forking, base: Snapshot) -> Self:
        """Answer a fork of ``session`` that stands on ``base`` and shares its connections."""
        home = session.workspace
        workspace = Workspace(
            base,
            home.assets,
            home.virtual,
            inline_threshold_bytes=home.inline_threshold_bytes,
            read_only=False,
            packs=None if home.packs is None else home.packs.another(),
        )
        fork = cls(
            workspace,
            session._history,  # noqa: SLF001 - a fork is a part of its session
            session._flusher.options,  # noqa: SLF001
            branch=None,
            mode=SessionMode.WRITABLE,
            default_metadata={},
            origin=session._origin,  # noqa: SLF001
            session_id=session._session_id,  # noqa: SLF001
        )
        fork._base_id, fork._carried, fork._unstored = base.id, None, None
        return fork

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, origin: Origin | None = None) -> Self:
        """Read what :meth:`to_bytes` wrote. Such a fork can be merged, and attached to a storage.

        Raises:
            FormatError: the bytes are damaged, or another version of the library wrote them.
        """
        state = decode_fork(data)
        fork = cls.__new__(cls)
        fork._arrive(state, origin)  # noqa: SLF001 - made here
        return fork

    def _arrive(self, state: ForkState, origin: Origin | None) -> None:
        """Begin detached, in place of ``__init__``."""
        self._session_id, self._base_id, self._origin = state.session_id, state.base_id, origin
        self._mode, self._branch = SessionMode.WRITABLE, None
        self._let_go(state.changes, None)

    def to_bytes(self) -> bytes:
        """Answer what was done in the fork, without where the repository is and any secret.

        Equal states give equal bytes. Cost: some 12 to 25 bytes a chunk. On local disks, what the
        bytes refer to is durable after the end of ``attached()``, or ``store_pending_chunks``.

        Raises:
            SessionStateError: chunks wait to be packed; see ``store_pending_chunks``.
        """
        changes = self.changes_so_far()  # first: a thread may write while this looks
        if self.has_pending_chunks:
            raise _pending()
        return encode_fork(ForkState(self._session_id, self._base_id, changes))

    def __reduce__(self) -> tuple[object, ...]:  # type: ignore[override] # a session refuses
        """Pickle as plain data."""
        return type(self).from_bytes, (self.to_bytes(), self._origin)

    def __repr__(self) -> str:
        """Show the snapshot, and whether it can be read and written here."""
        state = "" if self._carried is None else ", not attached"
        return f"<fork at {self.snapshot_id}{state}>"

    @property
    def session_id(self) -> bytes:
        """Names the session that the fork, and every fork of a fork, belongs to."""
        return self._session_id

    @property
    def origin(self) -> Origin | None:
        """Where its repository is and how it was opened; its secrets are not shown."""
        return self._origin

    @property
    def snapshot_id(self) -> SnapshotId:
        """The snapshot that the fork stands on; perhaps one that was never published."""
        return self._base_id

    @property
    def is_attached(self) -> bool:
        """Whether the fork can read and write here."""
        return self._carried is None

    @property
    def has_uncommitted_changes(self) -> bool:
        """Whether anything was changed in the fork."""
        if self._carried is not None:
            return not self._carried.is_empty()
        return super().has_uncommitted_changes

    @property
    def store(self) -> IcechunkStore:
        """A Zarr store of the fork's hierarchy, while it is attached."""
        if not self.is_attached:
            _refuse_detached()
        return super().store

    @property
    def has_pending_chunks(self) -> bool:
        """Whether chunks wait in memory to be packed; such a fork does not travel."""
        return super().has_pending_chunks if self.is_attached else self._unstored is not None

    async def store_pending_chunks(self) -> None:
        """Return when every chunk written so far is in the storage; see ``Session``.

        Raises:
            StorageError: some are not; they stay in the fork. Call again.
            SessionStateError: some are not, and the fork is not attached.
        """
        if self._carried is None:
            await super().store_pending_chunks()
        elif self.has_pending_chunks:
            raise _pending()

    def changes_so_far(self) -> ChangeSet:
        """Answer a copy of what was changed in the fork."""
        if self._carried is not None:
            return self._carried.copy()
        with self.workspace.lock:
            return self.workspace.changes.copy()

    @asynccontextmanager
    async def attached(
        self,
        storage: Storage | None = None,
        *,
        authorize_virtual_chunk_access: Mapping[str, VirtualAccess] | None = None,
    ) -> AsyncGenerator[Self]:
        """Open the fork's repository for the length of the block, to read and write.

        A fork that is attached already, as it is where it was made, is simply answered.

        Args:
            storage: use this one, which is left open, in place of what travelled with the fork.
            authorize_virtual_chunk_access: likewise; see ``Repository.open``.

        Raises:
            SnapshotNotFoundError: what the fork stands on was collected as garbage.
            SessionStateError: it was read from bytes alone, and no storage is given.
            StorageError: at the end of the block: chunks that waited to be packed are not stored.
                They stay in the fork, which can be attached again but not sent until they are.

        Cancellation, and other errors in the block: what was written stays in the fork, likewise.

        Cost: four requests; the block's end waits for none.
        """
        if self._carried is None:
            yield self
            await self.store_pending_chunks()
            return
        if self._origin is not None:
            request = self._origin.request(storage, authorize_virtual_chunk_access)
        elif storage is not None:
            request = Request(storage, {}, None, authorize_virtual_chunk_access or {})
        else:
            raise SessionStateError(
                "This fork was read from bytes that do not say where its repository is: give an "
                "open storage, 'fork.attached(storage)'."
            )
        async with open_parts(request, None, or_open=False) as opened:
            self._take_hold(opened, await opened.assets.snapshot(self._base_id))
            try:
                yield self
                await self.store_pending_chunks()
            finally:
                with self.workspace.lock:
                    self.workspace.why_read_only = "The fork was detached."
                    changes = self.workspace.changes
                self._let_go(changes, self.workspace.packs)

    def _take_hold(self, opened: Opened, base: Snapshot) -> None:
        """Begin to read and write."""
        assert self._carried is not None  # it was detached
        workspace = Workspace(
            base,
            opened.assets,
            opened.virtual,
            inline_threshold_bytes=opened.config.effective_inline_chunk_threshold_bytes,
            read_only=False,
            packs=self._unstored or opened.new_packs(),
        )
        workspace.rebase_to(base, self._carried)
        Session.__init__(
            self,
            workspace,
            opened.history,
            opened.manifest_options,
            branch=None,
            mode=SessionMode.WRITABLE,
            default_metadata={},
            origin=self._origin,
            session_id=self._session_id,
        )
        self._carried = self._unstored = None

    def _let_go(self, changes: ChangeSet, packs: Packs | None) -> None:
        """Keep the changes with chunks that are not stored, and nothing that is open."""
        self._carried = changes
        self._unstored = None if packs is None or packs.are_stored else packs
        self.workspace = cast("Workspace", _NotAttached())
        self._history = cast("History", _NotAttached())

    async def merge(self, *forks: ForkSession, allow_overlaps: bool = True) -> None:
        """Take over what was done in other forks; see ``Session.merge``.

        Needs no storage: forks that travelled can be merged wherever they are.
        """
        if self._carried is None:
            await super().merge(*forks, allow_overlaps=allow_overlaps)
            return
        for fork in forks:
            check_is_fork(fork)
            if (fork.session_id, fork.snapshot_id) != (self._session_id, self._base_id):
                raise wrong_base(fork, self._session_id, self._base_id)
        parts = [await stored_changes(fork) for fork in forks]
        if not self.is_attached:  # still: no await from here on
            merger = Merger(self._carried, self._base_id, allow_overlaps=allow_overlaps)
            for changes in parts:
                merger.add(changes, ForkPoint(ChangeSet()))
            self._carried = merger.finish()
        else:
            await super().merge(*forks, allow_overlaps=allow_overlaps)

    @contextmanager
    def _exclusively(self) -> Generator[str]:
        _never_published()
        yield ""


def _pending() -> SessionStateError:
    return SessionStateError(
        "Chunks that were written to this fork wait in memory to be packed, and would be missing "
        "elsewhere. Store them first: 'await fork.store_pending_chunks()' while it is attached; "
        "the end of 'async with fork.attached()' does so by itself, unless it fails."
    )


def _never_published() -> NoReturn:
    raise SessionStateError(
        "A fork cannot be committed, amended, flushed or rebased. Merge it into the session that "
        "it came from, 'await session.merge(fork)', and do that there.",
        code="commit-not-allowed",
    )


class _NotAttached:
    """In the place of what only an attached fork has."""

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_detached()


def _refuse_detached() -> NoReturn:
    raise SessionStateError(
        "This fork arrived from elsewhere and has nothing open here. Read and write within "
        "'async with fork.attached()'; to merge it, nothing needs to be open."
    )
