"""How the store reaches the native one, on the caller's loop or on no loop at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from icechunk_async.errors import IcechunkError, ReadOnlyError
from icechunk_async.sync import deadlines
from icechunk_async.sync.errors import ErrorKind, translate, translated
from icechunk_async.sync.portal import run, run_async
from icechunk_async.sync.refusals import refusal
from icechunk_async.zarr.keys import ChunkKey, parse_key
from icechunk_async.zarr.store import IcechunkStore as AsyncStore

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

    from icechunk_async.session import AnySession as AsyncSession
    from icechunk_async.sync.session_handles import SessionHandle

__all__ = ["DirectAccess"]


class DirectAccess:
    """A base of the store."""

    _store: SessionHandle
    _read_only: bool
    _known: tuple[AsyncSession, AsyncStore] | None = None
    _reads_here = False
    """Whether chunks are read on the caller's loop; the first are not."""

    @property
    def _ready(self) -> AsyncStore | None:
        """The native store, if the session is open."""
        session = self._store.ready
        if session is None:
            return None
        known = self._known
        if known is None or known[0] is not session:
            known = self._known = (session, AsyncStore(session, read_only=self._read_only))
        return known[1]

    async def _native(self) -> AsyncStore:
        """Return the native store; on any loop."""
        if self._ready is None:
            await run_async(self._store.session())
        ready = self._ready
        assert ready is not None
        return ready

    def _now(self) -> AsyncStore:
        """Return the native store; blocks where the session must be opened first."""
        return self._ready or run(self._native())

    def _writable(self, store: AsyncStore) -> AsyncStore:
        """Return the native store, unless nothing can be written through it.

        Raises:
            ReadOnlyError: nothing was written.
        """
        if store.read_only:
            raise refusal(
                ReadOnlyError(
                    "This store only reads: it was made so, or its session does. Write through a "
                    "store of Repository.writable_session()."
                ),
                ErrorKind.READ_ONLY_STORE,
            )
        return store

    async def _guarded[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` under the deadline in force, with the facade's errors."""
        try:
            return await (deadlines.bounded(work) if deadlines.is_set() else work)
        except IcechunkError as error:
            raise translate(error) from error

    async def _first(
        self, store: AsyncStore, key: str, prototype: BufferPrototype, part: ByteRequest | None
    ) -> Buffer | None:
        """Read over the connection that opened the repository, since the caller's loop has none.

        Making one takes a round trip, with TLS two or more, and a hop between threads a fraction
        of a millisecond. What else is asked for until the first answer goes the same way, so that
        it shares one request for the manifest.
        """
        if not isinstance(parse_key(key), ChunkKey):  # documents take no request
            return await store.get(key, prototype, part)
        if store._supports_sync_io:  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
            found = await store.get(key, prototype, part)
        else:
            found = await run_async(store.get(key, prototype, part))
        self._reads_here = True
        return found

    @property
    def _supports_sync_io(self) -> bool:
        """What Zarr asks before it uses the synchronous methods."""
        store = self._now()
        return store._supports_sync_io  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Return a value on the calling thread; as :meth:`get`."""
        store = self._ready or self._now()
        try:  # what translated() does, at a part of its cost
            return store.get_sync(key, prototype=prototype, byte_range=byte_range)
        except IcechunkError as error:
            raise translate(error) from error

    def set_sync(self, key: str, value: Buffer) -> None:
        """Write a value on the calling thread; as :meth:`set`."""
        with translated():
            self._writable(self._now()).set_sync(key, value)

    def delete_sync(self, key: str) -> None:
        """Delete on the calling thread; as :meth:`delete`."""
        with translated():
            self._writable(self._now()).delete_sync(key)
