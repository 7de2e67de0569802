"""The Zarr store of the facade, with the official engine's names.

Zarr calls it from an event loop of its own; what it awaits runs there, on connections of that
loop, and nothing crosses threads for a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from zarr.abc.store import Store
from zarr.core.buffer import Buffer
from zarr.core.sync import SyncMixin

from icechunk_async.errors import IcechunkError, SessionStateError
from icechunk_async.sync import deadlines
from icechunk_async.sync._display import Displayed
from icechunk_async.sync.errors import ErrorKind, translate, translated
from icechunk_async.sync.iterators import AsyncCloseableIterator
from icechunk_async.sync.portal import run
from icechunk_async.sync.refusals import refusal
from icechunk_async.sync.session import ForkSession, Session
from icechunk_async.sync.store_virtual import VirtualWrites

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence

    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import BufferPrototype
    from zarr.core.common import BytesLike

    from icechunk_async.sync._display import Rows
    from icechunk_async.sync.session_handles import SessionHandle

__all__ = ["IcechunkStore"]

type _Page = list[str]


class IcechunkStore(VirtualWrites, Displayed, Store, SyncMixin):
    """The hierarchy of one session, for ``zarr`` and ``xarray``. See ``Session.store``.

    Stores of sessions that only read, and of forks, pickle; others refuse, with advice.
    """

    def __init__(
        self,
        store: SessionHandle,
        read_only: bool | None = None,  # noqa: FBT001
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Use ``Session.store``."""
        super().__init__(read_only=store.read_only if read_only is None else read_only)
        self._store = store
        self._is_open = True

    def _rows(self) -> Rows:
        rows: list[tuple[str, object]] = [
            ("read_only", self.read_only),
            ("snapshot_id", self._store.snapshot_id),
            ("branch", self._store.branch),
        ]
        return rows

    def __eq__(self, value: object) -> bool:
        """Return whether both look at the same session."""
        return isinstance(value, IcechunkStore) and self._store is value._store

    def __hash__(self) -> int:
        """Agree with equality."""
        return hash(id(self._store))

    def __getstate__(self) -> object:
        """Return plain data.

        Raises:
            ValueError: the session can write, and a copy of it could not commit.
        """
        return {"_store": self._store, "_read_only": self._read_only}

    def __setstate__(self, state: Any) -> None:
        """Look at the same snapshot, or at a copy of the fork; opened at the first use."""
        IcechunkStore.__init__(self, state["_store"], state["_read_only"])

    def with_read_only(self, read_only: bool = False) -> Store:  # noqa: FBT001, FBT002
        """Return another store on the same session."""
        store = IcechunkStore(self._store, read_only)
        store._is_open = False
        return store

    @property
    def read_only(self) -> bool:
        """Whether writes are refused; so they are once the session was committed."""
        return self._read_only or self._store.read_only

    @property
    def session(self) -> Session:
        """The session that the store looks at."""
        return ForkSession(self._store) if self._store.is_fork else Session(self._store)

    @property
    def supports_writes(self) -> bool:
        """Yes; a read-only store refuses each."""
        return True

    @property
    def supports_deletes(self) -> bool:
        """Yes."""
        return True

    @property
    def supports_listing(self) -> bool:
        """Yes."""
        return True

    @property
    def supports_partial_writes(self) -> Literal[False]:
        """No."""
        return False

    @property
    def supports_consolidated_metadata(self) -> bool:
        """No: a snapshot holds all metadata, so there is nothing to consolidate."""
        return False

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return a document or a chunk, or a part of it; None if there is none.

        Raises:
            InvalidInputError: the key cannot exist.
            StorageError: the chunk cannot be read.
        """
        store = self._ready or await self._native()
        if not self._reads_here:
            return await self._guarded(self._first(store, key, prototype, byte_range))
        if deadlines.is_set():
            return await self._guarded(store.get(key, prototype, byte_range))
        try:
            return await store.get(key, prototype, byte_range)
        except IcechunkError as error:
            raise translate(error) from error

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        """Return parts of values in order, several at a time."""
        store = self._ready or await self._native()
        return await self._guarded(store.get_partial_values(prototype, key_ranges))

    async def exists(self, key: str) -> bool:
        """Return whether there is a document or a chunk."""
        store = self._ready or await self._native()
        if deadlines.is_set():
            return await self._guarded(store.exists(key))
        try:
            return await store.exists(key)
        except IcechunkError as error:
            raise translate(error) from error

    async def is_empty(self, prefix: str) -> bool:
        """Return whether no key begins with a prefix."""
        store = self._ready or await self._native()
        return await self._guarded(store.is_empty(prefix))

    async def getsize(self, key: str) -> int:
        """Return the size of a value in bytes, without reading it.

        Raises:
            FileNotFoundError: there is none.
        """
        store = self._ready or await self._native()
        return await self._guarded(store.getsize(key))

    async def getsize_prefix(self, prefix: str) -> int:
        """Return the bytes of all values below a path, without reading them."""
        store = self._ready or await self._native()
        return await self._guarded(store.getsize_prefix(prefix))

    async def set(self, key: str, value: Buffer) -> None:
        """Write a document or a chunk; it becomes visible to others with the commit.

        Raises:
            ReadOnlyError: the store or the session only reads.
            InvalidInputError: the key cannot exist, the document cannot be stored, or the chunk
                lies outside of its array.
            NodeNotFoundError: a chunk of an array that does not exist.
        """
        if not isinstance(value, Buffer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                "IcechunkStore.set(): `value` must be a Buffer instance. "
                f"Got an instance of {type(value)} instead."
            )
        store = self._writable(self._ready or await self._native())
        await self._guarded(store.set(key, value))

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Write a value unless there is one; of racing writers of this session one wins."""
        store = self._writable(self._ready or await self._native())
        await self._guarded(store.set_if_not_exists(key, value))

    async def set_partial_values(
        self, key_start_values: Iterable[tuple[str, int, BytesLike]]
    ) -> None:
        """Refuse: a chunk is written as a whole.

        Raises:
            SessionStateError: always.
        """
        raise refusal(
            SessionStateError(
                f"set_partial_values was given {len(list(key_start_values))} parts, and chunks are "
                "only written as a whole: use set()."
            ),
            ErrorKind.UNIMPLEMENTED,
        )

    async def delete(self, key: str) -> None:
        """Delete a chunk, or with its document a node and all below it."""
        store = self._writable(self._ready or await self._native())
        await self._guarded(store.delete(key))

    async def delete_dir(self, prefix: str) -> None:
        """Delete all nodes at and below a path, or a part of an array's chunks."""
        store = self._writable(self._ready or await self._native())
        await self._guarded(store.delete_dir(prefix))

    async def clear(self) -> None:
        """Delete every node."""
        store = self._writable(self._ready or await self._native())
        await self._guarded(store.clear())

    def sync_clear(self) -> None:
        """Delete every node; blocks."""
        run(self.clear())

    def list(self) -> AsyncCloseableIterator[str]:
        """Iterate over all keys."""
        return self.list_prefix("")

    def list_prefix(self, prefix: str) -> AsyncCloseableIterator[str]:
        """Iterate over all keys that begin with a string."""
        return AsyncCloseableIterator[str].of_pages(self._pages(prefix))

    def list_dir(self, prefix: str) -> AsyncCloseableIterator[str]:
        """Iterate over the names directly below a path."""
        return AsyncCloseableIterator[str].of_pages(self._page_of_names(prefix))

    async def _pages(self, prefix: str) -> AsyncIterator[_Page]:
        with translated():
            async for page in (await self._native())._list_pages(prefix):  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
                yield page

    async def _page_of_names(self, prefix: str) -> AsyncIterator[_Page]:
        with translated():
            yield await (await self._native())._list_names(prefix)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    async def _get_many(
        self, requests: Iterable[tuple[str, BufferPrototype, ByteRequest | None]]
    ) -> AsyncGenerator[tuple[str, Buffer | None], None]:
        """Return many values, several at a time."""
        wanted = list(requests)
        store = self._ready or await self._native()
        with translated():
            async for found in store._get_many(wanted):  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
                yield found

    async def _set_many(self, values: Iterable[tuple[str, Buffer]]) -> None:
        """Write many values, several at a time."""
        store = self._writable(self._ready or await self._native())
        await self._guarded(store._set_many(values))  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    async def get_ranges(
        self,
        key: str,
        byte_ranges: Sequence[ByteRequest | None],
        *,
        prototype: BufferPrototype,
        max_concurrency: int = 10,
        max_gap_bytes: int = 1 << 20,
        max_coalesced_bytes: int = 16 << 20,
    ) -> AsyncIterator[Sequence[tuple[int, Buffer | None]]]:
        """Read many parts of one value; neighbouring parts share a request."""
        store = self._ready or await self._native()
        with translated():
            async for batch in store.get_ranges(
                key,
                byte_ranges,
                prototype=prototype,
                max_concurrency=max_concurrency,
                max_gap_bytes=max_gap_bytes,
                max_coalesced_bytes=max_coalesced_bytes,
            ):
                yield batch
