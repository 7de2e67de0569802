"""Sessions with the official engine's names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self, overload, override

from icechunk_async._runtime.blocking.iterators import AsyncCloseableIterator
from icechunk_async._runtime.blocking.pairs import asked, awaited, blocking, twin_of
from icechunk_async._runtime.blocking.portal import run
from icechunk_async.format.paths import check_path
from icechunk_async.handles import not_a_fork
from icechunk_async.session import ForkSession as AsyncForkSession
from icechunk_async.session import Session as AsyncSession
from icechunk_async.sync.errors import coded, translated
from icechunk_async.sync.official.configuration import RepositoryConfig
from icechunk_async.sync.official.display import Displayed
from icechunk_async.sync.official.mirrors import to_native
from icechunk_async.sync.official.states import ChunkType, SessionMode
from icechunk_async.sync.snapshots import Diff

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence

    import numpy as np
    import numpy.typing as npt

    from icechunk_async._display.cards import Card
    from icechunk_async.engine.commit.once import Transaction
    from icechunk_async.engine.tree.reshape import MoveChunks
    from icechunk_async.handles import SessionHandle
    from icechunk_async.session import AnySession
    from icechunk_async.sync.conflicts import ConflictSolver
    from icechunk_async.sync.official.display import Rows
    from icechunk_async.sync.store import IcechunkStore
    from icechunk_async.zarr.queries.selection import SelectedCells

    type Reindexing = Callable[[Iterable[int]], Iterable[int] | None]

__all__ = ["ForkSession", "Session", "SessionMode"]

_CELLS: Final = 1 << 20
"""Of a chunk, roughly: masks are not fetched ahead."""


class Session(Displayed):
    """A snapshot to read, and for a writable session one transaction on a branch.

    Made by `Repository.readonly_session`, `writable_session` and `rearrange_session`. Methods
    block; the method of the same name with `_async` can be awaited on any event loop. Only
    read-only sessions pickle; see `fork` for writable ones.

    Attributes:
        handle: the native session behind this one, for packages that build on the facade.
    """

    def __init__(self, session: SessionHandle) -> None:
        """Use the methods of a repository."""
        self.handle: SessionHandle = session

    def _rows(self) -> Rows:
        rows: list[tuple[str, object]] = [
            ("read_only", self.read_only),
            ("snapshot_id", self.snapshot_id),
        ]
        if not self.read_only:
            rows.append(("branch", self.branch))
            rows.append(("has_uncommitted_changes", self.has_uncommitted_changes))
        return rows

    @override
    def as_card(self) -> Card:
        """Return the rows, and what was changed so far, by array and group."""
        from icechunk_async._display.versions import session_card  # noqa: PLC0415 -- rarely needed

        card, native = super().as_card(), self.handle.known
        if native is None:
            return card
        known = session_card(native)
        return replace(known, title=card.title, rows=[*card.rows, *known.rows])

    def __eq__(self, value: object) -> bool:
        """Return whether both are the same session; two of one snapshot are not."""
        return isinstance(value, Session) and self.handle is value.handle

    def __hash__(self) -> int:
        return hash(id(self.handle))

    def __getstate__(self) -> object:
        """Return plain data.

        Raises:
            ValueError: the session can write, and a copy of it could not commit.
        """
        return {"handle": self.handle}

    def __setstate__(self, state: object) -> None:
        """Become a session of the same snapshot, which opens at its first use."""
        if not isinstance(state, dict):
            raise ValueError("Invalid state")  # noqa: TRY004 -- the official engine's
        self.handle = state["handle"]

    @property
    def read_only(self) -> bool:
        """Whether the session only reads, as all do after their commit."""
        return self.handle.read_only

    @property
    def mode(self) -> SessionMode:
        """Whether the session reads, writes or moves nodes."""
        return SessionMode[self.handle.mode]

    @property
    def snapshot_id(self) -> str:
        """The snapshot that the session is based on."""
        return self.handle.snapshot_id

    @property
    def branch(self) -> str | None:
        """The branch that the session commits to; None for a read-only session."""
        return self.handle.branch

    @property
    def session_id(self) -> str:
        """Names the session in `Repository.sessions`, if it has a lease.

        An addition to the official properties.

        Raises:
            SessionStateError: the session only reads.
        """
        return self.handle.session_id

    @property
    def has_uncommitted_changes(self) -> bool:
        """Whether a commit would change anything."""
        return self.handle.has_uncommitted_changes

    @property
    def already_committed(self) -> bool:
        """Whether `commit(once=...)` found its transaction on the branch and published none."""
        native = self.handle.ready
        return isinstance(native, AsyncSession) and native.already_committed

    @property
    def outcome_unknown(self) -> bool:
        """Whether a commit may have landed without an answer; commit again to find out."""
        native = self.handle.ready
        return isinstance(native, AsyncSession) and native.outcome_unknown

    @property
    def has_lease(self) -> bool:
        """Whether garbage collection spares what the session writes, see `writable_session`."""
        native = self.handle.ready
        return isinstance(native, AsyncSession) and native.has_lease

    @property
    def config(self) -> RepositoryConfig:
        """The configuration of the repository."""
        return RepositoryConfig.from_native(self.handle.repository.now().config)

    @property
    def store(self) -> IcechunkStore[Self]:
        """A Zarr store of the session's hierarchy, for `zarr` and `xarray`."""
        from icechunk_async.sync.store import IcechunkStore  # noqa: PLC0415 -- zarr loads slowly

        return IcechunkStore(self)

    def status(self) -> Diff:
        """Return the changes of the session so far."""
        with translated():
            return Diff.from_native(self.handle.now().status())

    def discard_changes(self) -> None:
        """Drop all changes of the session.

        Raises:
            ReadOnlyError: the session cannot change anything, or is being committed.
        """
        with translated(), coded("read-only-session"):
            self.handle.now().discard_changes()

    # Publishing

    async def _publish[T](self, question: Callable[[AnySession], Awaitable[T]]) -> T:
        """Ask for something that only a session that may commit can do."""

        async def publish(session: AnySession) -> T:
            with coded("commit-not-allowed"):
                return await question(session)

        return await self.handle.ask(publish)

    @twin_of(AsyncSession.commit)
    async def commit_async(
        self,
        message: str,
        metadata: dict[str, Any] | None = None,
        *,
        rebase_with: ConflictSolver | None = None,
        rebase_tries: int = 1000,
        timeout_seconds: float | None = None,
        allow_empty: bool = False,
        once: Transaction | None = None,
        unchanged: Collection[str] = (),
        # The official engine waits for no forks, so code written for it must not have to give them
        # up.
        allow_missing_forks: bool = True,
    ) -> str:
        solver = to_native(rebase_with)
        return str(
            await self._publish(
                lambda session: session.commit(
                    message,
                    metadata,
                    rebase_with=solver,
                    rebase_tries=rebase_tries,
                    timeout_seconds=timeout_seconds,
                    allow_empty=allow_empty,
                    once=once,
                    unchanged=unchanged,
                    allow_missing_forks=allow_missing_forks,
                )
            )
        )

    @twin_of(AsyncSession.amend)
    async def amend_async(
        self,
        message: str,
        *,
        metadata: dict[str, Any] | None = None,
        allow_empty: bool = False,
        allow_missing_forks: bool = True,
    ) -> str:
        return str(
            await self._publish(
                lambda session: session.amend(
                    message,
                    metadata,
                    allow_empty=allow_empty,
                    allow_missing_forks=allow_missing_forks,
                )
            )
        )

    @twin_of(AsyncSession.flush)
    async def flush_async(
        self,
        message: str,
        *,
        metadata: dict[str, Any] | None = None,
        allow_missing_forks: bool = True,
    ) -> str:
        return str(
            await self.handle.ask(
                lambda session: session.flush(
                    message, metadata, allow_missing_forks=allow_missing_forks
                )
            )
        )

    @twin_of(AsyncSession.rebase)
    async def rebase_async(self, solver: ConflictSolver) -> None:
        given = to_native(solver)
        await self._publish(lambda session: session.rebase(given))

    @awaited
    async def merge_async(self, *others: ForkSession, allow_overlaps: bool = True) -> None:
        """Add the changes of forks of this session.

        Args:
            others: in order: of several that set one chunk the last one counts.
            allow_overlaps: if false, a chunk that several of them set is a conflict.

        Raises:
            SessionStateError: one was not forked from here.
            InvalidInputError: one is no session; a `TypeError`, too.
            ConflictError: two changed the same; nothing was merged.
        """
        with translated():
            for it in others:
                if not isinstance(it, Session):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise not_a_fork(it)
        forks = [other.handle.fork for other in others]
        await self.handle.ask(lambda it: it.merge(*forks, allow_overlaps=allow_overlaps))

    def fork(self) -> ForkSession:
        """Return a fork, which can be pickled and written to in other processes; see `merge`.

        Raises:
            SessionStateError: the session only reads: pickle the session itself.
        """
        return ForkSession(run(self.handle.forked()))

    @property
    def unmerged_forks(self) -> tuple[str, ...]:
        """The ``fork_id`` of each fork that was neither merged nor discarded.

        As with the official engine, `commit` does not wait for them unless ``allow_missing_forks``
        is false.
        """
        return self.handle.unmerged_forks

    def discard_fork(self, *forks: ForkSession | str) -> None:
        """No longer wait for forks, given themselves or by their ``fork_id``."""
        names = [it if isinstance(it, str) else it.fork_id for it in forks]
        self.handle.discard_forks(*names)

    spill, spill_async = asked(AsyncSession.spill)
    refresh, refresh_async = asked(AsyncSession.refresh)

    @property
    def collected_chunks(self) -> dict[str, npt.NDArray[np.uint32]]:
        """The chunks that must be written again after a commit found them collected as garbage.

        An addition to the official properties. By the path of their array, coordinates as rows
        ``(n, rank)``. Chunks that were written or deleted since are left out; empty if the last
        commit found everything.
        """
        native = self.handle.ready
        return native.collected_chunks if isinstance(native, AsyncSession) else {}

    commit = blocking(commit_async)
    amend = blocking(amend_async)
    flush = blocking(flush_async)
    rebase = blocking(rebase_async)
    merge = blocking(merge_async)

    # Nodes and chunks

    move, move_async = asked(AsyncSession.move)
    aggregate, aggregate_async = asked(AsyncSession.aggregate)

    all_virtual_chunk_locations, all_virtual_chunk_locations_async = asked(
        AsyncSession.all_virtual_chunk_locations
    )

    @overload
    def reindex_array(
        self,
        array_path: str,
        forward: Reindexing,
        backward: Reindexing | None = None,
        *,
        vectorized: Literal[False] = False,
    ) -> None: ...
    @overload
    def reindex_array(
        self,
        array_path: str,
        forward: MoveChunks,
        backward: MoveChunks | None = None,
        *,
        vectorized: Literal[True],
    ) -> None: ...
    def reindex_array(
        self, array_path: str, forward: Any, backward: Any = None, *, vectorized: Any = False
    ) -> None:
        """Give new coordinates to all chunks of an array, without copying any.

        Args:
            array_path: the array; its chunk grid must be regular.
            forward: returns the new coordinates of a chunk, or None to drop it.
            backward: the inverse: returns the old coordinates, or None for a new chunk.
            vectorized: call each function once, with all coordinates as the rows of an integer
                array ``(n, rank)``; it returns such an array, where a row with a negative number
                means None. Much faster.

        Both functions run on the portal's thread, and must make no blocking call of the facade.
        """

        async def reindex(it: AnySession) -> None:
            await it.reindex_array(array_path, forward, backward, vectorized=vectorized)

        run(self.handle.ask(reindex))

    def shift_array(self, array_path: str, chunk_offset: Iterable[int]) -> None:
        """Move all chunks of an array by a number of chunks along each axis.

        Chunks that leave the grid are dropped; the places that become free hold the fill value.
        """
        offset = tuple(chunk_offset)
        run(self.handle.ask(lambda session: session.shift_array(array_path, offset)))

    async def chunk_coordinates(
        self, array_path: str, batch_size: int = 1000
    ) -> AsyncIterator[tuple[int, ...]]:
        """Iterate over the coordinates of the chunks that exist."""
        batches = AsyncCloseableIterator(
            self.handle.each(lambda it: it.chunk_coordinates(array_path, batch_size=batch_size)),
            parts=batch_size,
        )
        async for batch in batches:
            for row in batch.tolist():
                yield tuple(row)

    def where(
        self, conditions: str, *, group: str = "/", region: Sequence[slice] | None = None
    ) -> AsyncCloseableIterator[SelectedCells]:
        """Iterate over the cells that fulfil conditions, chunk by chunk, as masks.

        An addition to the official names. Arguments, errors and costs are those of the native
        method, whose result also knows the candidate chunks before any is read.
        """

        async def cells(session: AnySession) -> AsyncIterator[SelectedCells]:
            async for it in await session.where(conditions, group=group, region=region):
                yield it

        return AsyncCloseableIterator(self.handle.each(cells), parts=_CELLS).begun()

    @twin_of(AsyncSession.chunk_type)
    async def chunk_type_async(
        self, array_path: str, chunk_coordinates: Sequence[int]
    ) -> ChunkType:
        coords = tuple(chunk_coordinates)
        kind = await self.handle.ask(lambda session: session.chunk_type(array_path, coords))
        return ChunkType(int(kind))

    # What is in memory is returned at once, without waiting for another thread.

    def _known_node_id(self, path: str) -> str | None:
        from icechunk_async.engine.tree.listing import node_id  # noqa: PLC0415 -- on use

        session = self.handle.ready
        if session is None:
            return None
        with translated():
            return str(node_id(session.workspace, check_path(path)))

    get_node_id, get_node_id_async = asked(AsyncSession.get_node_id, str, known=_known_node_id)

    def _known_chunk_type(
        self, array_path: str, chunk_coordinates: Sequence[int]
    ) -> ChunkType | None:
        from icechunk_async.engine.tree.listing import known_chunk_type  # noqa: PLC0415 -- on use

        session = self.handle.ready
        if session is None:
            return None
        with translated():
            coords = tuple(chunk_coordinates)
            kind = known_chunk_type(session.workspace, check_path(array_path), coords)
        return None if kind is None else ChunkType(int(kind))

    chunk_type = blocking(chunk_type_async, known=_known_chunk_type)


class ForkSession(Session):
    """A fork of a writable session: it pickles, and is merged back instead of committed."""

    @property
    def fork_id(self) -> str:
        """Names the fork, and every copy of it, among the forks of its session."""
        return self.handle.fork.fork_id

    publish, publish_async = asked(AsyncForkSession.publish)
    refresh, refresh_async = asked(AsyncForkSession.refresh)
