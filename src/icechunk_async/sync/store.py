"""The Zarr store of the facade, with the official engine's names.

Zarr calls the store from its own event loop. What the store awaits runs on that loop, over
connections of that loop, so that no chunk crosses threads.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, Protocol

import numpy as np
from typing_extensions import TypeVar
from zarr.abc.store import Store
from zarr.core.buffer import Buffer
from zarr.core.sync import SyncMixin

from icechunk_async._runtime.blocking.iterators import AsyncCloseableIterator
from icechunk_async._runtime.blocking.portal import bounded, has_deadline, run, run_async
from icechunk_async.errors import (
    IcechunkError,
    ReadOnlyError,
    SessionStateError,
    VirtualContainerError,
)
from icechunk_async.sync.errors import ErrorKind, caught, refusal, translated
from icechunk_async.sync.official.display import Displayed
from icechunk_async.zarr.keys import ChunkKey, parse_key
from icechunk_async.zarr.store import IcechunkStore as AsyncStore

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Coroutine,
        Iterable,
        Sequence,
    )
    from datetime import datetime

    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import BufferPrototype
    from zarr.core.common import BytesLike

    from icechunk_async.handles import SessionHandle
    from icechunk_async.session import AnySession as AsyncSession
    from icechunk_async.sync.official.containers import VirtualChunkSpec
    from icechunk_async.sync.official.display import Rows

    # Within the class, `list` is a method.
    type Strings = list[str]
    type Specs = list[VirtualChunkSpec]
    type Indices = list[tuple[int, ...]]
    type Integers = np.ndarray[Any, np.dtype[np.uint64]]
    type Batch = tuple[
        np.ndarray[tuple[int, int], np.dtype[np.uint32]],
        np.ndarray[tuple[int], np.dtype[np.uint8]],
        list[str],
        np.ndarray[tuple[int], np.dtype[np.uint64]],
        np.ndarray[tuple[int], np.dtype[np.uint64]],
        dict[int, bytes],
    ]

__all__ = ["IcechunkStore"]


def _when_open[**P, T](
    method: Callable[Concatenate[IcechunkStore, P], T],
) -> Callable[Concatenate[IcechunkStore, P], Coroutine[Any, Any, T]]:
    """Return the `_async` twin of a method that waits only if the session is not open yet."""

    @functools.wraps(method)
    async def twin(self: IcechunkStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        await self._native()  # pyright: ignore[reportPrivateUsage]
        return method(self, *args, **kwargs)

    twin.__name__, twin.__qualname__ = f"{method.__name__}_async", f"{method.__qualname__}_async"
    return twin


def _same(native: Callable[..., Coroutine[Any, Any, object]], *, writes: bool = False) -> Any:
    """Return a method of the native store that is the same here but for deadlines and errors.

    Type checkers take its types from Zarr's `Store`, which declares it.
    """

    @functools.wraps(native)
    async def method(self: IcechunkStore, /, *args: Any, **kwargs: Any) -> Any:
        store = self._ready or await self._native()  # pyright: ignore[reportPrivateUsage]
        if writes:
            self._writable(store)  # pyright: ignore[reportPrivateUsage]
        return await self._guarded(native(store, *args, **kwargs))  # pyright: ignore[reportPrivateUsage]

    return method


class _Held(Protocol):
    """The part of a session that a store needs."""

    handle: SessionHandle


# As the native store's.
S_co = TypeVar("S_co", bound=_Held, covariant=True, default=Any)


class IcechunkStore(Displayed, Store, SyncMixin, Generic[S_co]):
    """The hierarchy of one session, for `zarr` and `xarray`; see `Session.store`.

    Stores of read-only sessions and of forks pickle; others raise, with advice.

    Attributes:
        handle: the native session behind the store, for packages that build on the facade.
    """

    _known: tuple[AsyncSession, AsyncStore] | None = None
    _reads_here = False
    """Whether chunks are read on the caller's loop; the first ones are not."""

    def __init__(
        self,
        store: S_co,
        read_only: bool | None = None,  # noqa: FBT001
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Use `Session.store`."""
        super().__init__(read_only=store.handle.read_only if read_only is None else read_only)
        self.handle = store.handle
        self._session = store
        self._is_open = True

    def _rows(self) -> Rows:
        rows: list[tuple[str, object]] = [
            ("read_only", self.read_only),
            ("snapshot_id", self.handle.snapshot_id),
            ("branch", self.handle.branch),
        ]
        return rows

    def __eq__(self, value: object) -> bool:
        """Return whether both are stores of the same session."""
        return isinstance(value, IcechunkStore) and self.handle is value.handle

    def __hash__(self) -> int:
        return hash(id(self.handle))

    def __getstate__(self) -> object:
        """Return plain data.

        Raises:
            ValueError: the session can write, and a copy of it could not commit.
        """
        return {"session": self._session, "_read_only": self._read_only}

    def __setstate__(self, state: Any) -> None:
        """Become a store of the same snapshot or fork, which opens at its first use."""
        IcechunkStore.__init__(self, state["session"], state["_read_only"])

    def with_read_only(self, read_only: bool = False) -> Store:  # noqa: FBT001, FBT002
        """Return another store on the same session."""
        store = IcechunkStore(self._session, read_only)
        # As the official store does: Zarr opens the copy at its first use.
        store._is_open = False
        return store

    @property
    def read_only(self) -> bool:
        """Whether writes are refused, for example after the session was committed."""
        return self._read_only or self.handle.read_only

    @property
    def session(self) -> S_co:
        """The session of the store."""
        return self._session

    @property
    def supports_writes(self) -> bool:
        """Always true; a read-only store refuses each write."""
        return True

    @property
    def supports_deletes(self) -> bool:
        """Always true."""
        return True

    @property
    def supports_listing(self) -> bool:
        """Always true."""
        return True

    @property
    def supports_partial_writes(self) -> Literal[False]:
        """Always false."""
        return False

    @property
    def supports_consolidated_metadata(self) -> bool:
        """Always false: a snapshot holds all metadata, so there is nothing to consolidate."""
        return False

    # The native store

    @property
    def _ready(self) -> AsyncStore | None:
        """The native store, if the session is open."""
        session = self.handle.ready
        if session is None:
            return None
        known = self._known
        if known is None or known[0] is not session:
            known = self._known = (session, AsyncStore(session, read_only=self._read_only))
        return known[1]

    async def _native(self) -> AsyncStore:
        """Return the native store; can be awaited on any loop."""
        if self._ready is None:
            await run_async(self.handle.session())
        ready = self._ready
        assert ready is not None
        return ready

    def _now(self) -> AsyncStore:
        """Return the native store; blocks if the session must be opened first."""
        return self._ready or run(self._native())

    def _writable(self, store: AsyncStore) -> AsyncStore:
        """Return the native store if it can be written through.

        Raises:
            ReadOnlyError: nothing was written.
        """
        if store.read_only:
            raise refusal(
                ReadOnlyError(
                    "This store is read-only, or its session is. Write through a "
                    "store of Repository.writable_session()."
                ),
                ErrorKind.READ_ONLY_STORE,
            )
        return store

    async def _guarded[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` under the deadline in force, with the facade's errors."""
        try:
            return await (bounded(work) if has_deadline() else work)
        except IcechunkError as error:
            raise caught(error)  # noqa: B904 -- it has its cause

    async def _first(
        self, store: AsyncStore, key: str, prototype: BufferPrototype, part: ByteRequest | None
    ) -> Buffer | None:
        """Read over the connection that opened the repository: the caller's loop has none yet.

        A new connection takes a round trip, with TLS two or more; a hop between threads takes a
        fraction of a millisecond. Reads that begin before the first one has ended go the same way,
        so that all share one request for the manifest.
        """
        if not isinstance(parse_key(key), ChunkKey):  # documents need no request
            return await store.get(key, prototype, part)
        if store._supports_sync_io:  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
            found = await store.get(key, prototype, part)
        else:
            found = await run_async(store.get(key, prototype, part))
        self._reads_here = True
        return found

    # Zarr's asynchronous interface

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return a metadata document or a chunk, or a part of it; None if it does not exist.

        Raises:
            InvalidInputError: the key cannot exist.
            StorageError: the chunk cannot be read.
        """
        store = self._ready or await self._native()
        if not self._reads_here:
            return await self._guarded(self._first(store, key, prototype, byte_range))
        # Written out below for reads without a deadline: chunks are read by the thousand, and a
        # wrapped coroutine costs more than finding one in memory.
        if has_deadline():
            return await self._guarded(store.get(key, prototype, byte_range))
        try:
            return await store.get(key, prototype, byte_range)
        except IcechunkError as error:
            raise caught(error)  # noqa: B904 -- it has its cause

    read_chunks = _same(AsyncStore.read_chunks)
    get_partial_values = _same(AsyncStore.get_partial_values)

    async def exists(self, key: str) -> bool:
        """Return whether a metadata document or a chunk exists."""
        store = self._ready or await self._native()
        if has_deadline():
            return await self._guarded(store.exists(key))
        try:
            return await store.exists(key)
        except IcechunkError as error:
            raise caught(error)  # noqa: B904 -- it has its cause

    is_empty = _same(AsyncStore.is_empty)
    getsize = _same(AsyncStore.getsize)
    getsize_prefix = _same(AsyncStore.getsize_prefix)

    async def set(self, key: str, value: Buffer) -> None:
        """Write a metadata document or a chunk; others see it after the commit.

        Raises:
            ReadOnlyError: the store or the session only reads.
            InvalidInputError: the key cannot exist, the document cannot be stored, or the chunk
                lies outside of its array.
            NodeNotFoundError: a chunk of an array that does not exist.
        """
        # In the words of Zarr's own stores.
        if not isinstance(value, Buffer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                "IcechunkStore.set(): `value` must be a Buffer instance. "
                f"Got an instance of {type(value)} instead."
            )
        store = self._writable(self._ready or await self._native())
        await self._guarded(store.set(key, value))

    write_chunks = _same(AsyncStore.write_chunks, writes=True)
    set_if_not_exists = _same(AsyncStore.set_if_not_exists, writes=True)

    async def set_partial_values(
        self, key_start_values: Iterable[tuple[str, int, BytesLike]]
    ) -> None:
        """Raise an error: chunks are only written whole.

        Raises:
            SessionStateError: always.
        """
        raise refusal(
            SessionStateError(
                f"set_partial_values was given {len(list(key_start_values))} parts, and chunks are "
                "only written whole: use set()."
            ),
            ErrorKind.UNIMPLEMENTED,
        )

    delete = _same(AsyncStore.delete, writes=True)
    delete_dir = _same(AsyncStore.delete_dir, writes=True)
    clear = _same(AsyncStore.clear, writes=True)

    def sync_clear(self) -> None:
        """Delete every node; blocks."""
        run(self.clear())

    def list(self) -> AsyncCloseableIterator[str]:
        """Iterate over all keys."""
        return self.list_prefix("")

    def list_prefix(self, prefix: str) -> AsyncCloseableIterator[str]:
        """Iterate over all keys that begin with a string; `/` is the root, as officially."""
        return AsyncCloseableIterator[str].of_pages(self._pages("" if prefix == "/" else prefix))

    def list_dir(self, prefix: str) -> AsyncCloseableIterator[str]:
        """Iterate over the names directly below a path."""
        return AsyncCloseableIterator[str].of_pages(self._page_of_names(prefix))

    async def _pages(self, prefix: str) -> AsyncIterator[Strings]:
        from icechunk_async.zarr import listing  # noqa: PLC0415 -- on use

        with translated():
            async for page in listing.key_pages((await self._native()).workspace, prefix):
                yield page

    async def _page_of_names(self, prefix: str) -> AsyncIterator[Strings]:
        from icechunk_async.zarr import listing  # noqa: PLC0415 -- on use

        with translated():
            yield await listing.names((await self._native()).workspace, prefix)

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

    # Zarr's synchronous interface, on the calling thread

    @property
    def _supports_sync_io(self) -> bool:
        """Whether Zarr may use the synchronous methods."""
        store = self._now()
        return store._supports_sync_io  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Return a value as `get` does."""
        store = self._ready or self._now()
        try:  # as translated() does, but faster
            return store.get_sync(key, prototype=prototype, byte_range=byte_range)
        except IcechunkError as error:
            raise caught(error)  # noqa: B904 -- it has its cause

    def set_sync(self, key: str, value: Buffer) -> None:
        """Write a value as `set` does."""
        with translated():
            self._writable(self._now()).set_sync(key, value)

    def delete_sync(self, key: str) -> None:
        """Delete as `delete` does."""
        with translated():
            self._writable(self._now()).delete_sync(key)

    # Virtual references; these methods wait for no storage

    def set_virtual_ref(
        self,
        key: str,
        location: str,
        *,
        offset: int,
        length: int,
        checksum: str | datetime | None = None,
        validate_container: bool = True,
    ) -> None:
        """Make a chunk refer to bytes `[offset, offset + length)` of another object.

        Arguments are those of `icechunk_async.IcechunkStore.set_virtual_ref`.

        Raises:
            InvalidInputError: no container covers the location, or an argument is invalid;
                nothing was stored.
            NodeNotFoundError: there is no such array.
        """
        with translated():
            self._writable(self._now()).set_virtual_ref(
                key,
                location,
                offset=offset,
                length=length,
                checksum=checksum,
                validate_container=validate_container,
            )

    set_virtual_ref_async = _when_open(set_virtual_ref)

    def set_virtual_refs(
        self, array_path: str, chunks: Specs, *, validate_containers: bool = True
    ) -> Indices | None:
        """Set many virtual chunks of one array.

        Returns: the indices of the chunks that were left out because no container covers their
            location; None if all were set.

        Raises:
            InvalidInputError: a chunk is invalid; nothing was stored.
        """
        with translated():
            store = self._writable(self._now())
            refused = _uncovered(store, [it.location for it in chunks], validate_containers)
            kept: Any = [it for it in chunks if it.location not in refused]
            store.set_virtual_refs(array_path, kept, validate_containers=False)
        return [tuple(it.index) for it in chunks if it.location in refused] or None

    set_virtual_refs_async = _when_open(set_virtual_refs)

    def set_virtual_refs_arr(
        self,
        array_path: str,
        chunk_grid_shape: tuple[int, ...],
        locations: Strings,
        offsets: Integers,
        lengths: Integers,
        *,
        validate_containers: bool = True,
        arr_offset: tuple[int, ...] | None = None,
        checksum: datetime | str | None = None,
    ) -> Indices | None:
        """Set a box of virtual chunks of one array from columns.

        Arguments are those of `icechunk_async.IcechunkStore.set_virtual_refs_arr`, but with
        `validate_containers` locations that no container covers are left out.

        Returns: as `set_virtual_refs`.
        """

        def put(store: AsyncStore, kept: Strings, *, validate: bool) -> None:
            store.set_virtual_refs_arr(
                array_path,
                tuple(chunk_grid_shape),
                kept,
                offsets,
                lengths,
                validate_containers=validate,
                arr_offset=arr_offset,
                checksum=checksum,
            )

        with translated():
            store = self._writable(self._now())
            try:
                put(store, locations, validate=validate_containers)
            except VirtualContainerError:  # nothing was stored
                refused = _uncovered(store, locations, validate_containers)
                # An empty location leaves its chunk out.
                kept = ["" if it in refused else it for it in locations]
                put(store, kept, validate=False)
            else:
                return None
        where = np.flatnonzero([it in refused for it in locations])
        first = np.array(arr_offset or (0,) * len(chunk_grid_shape), np.int64)
        rows = np.stack(np.unravel_index(where, chunk_grid_shape), axis=1) + first
        return [tuple(row) for row in rows.tolist()]

    set_virtual_refs_arr_async = _when_open(set_virtual_refs_arr)

    def array_chunk_iterator(
        self, array_path: str, batch_size: int = 100_000
    ) -> AsyncCloseableIterator[Batch]:
        """Iterate over the chunks of an array that exist, in columns.

        Each batch is a tuple of coordinates `(n, rank)`, kinds (see `ChunkType`), ids or URLs,
        first bytes, lengths, and the bytes of inline chunks by row.
        """
        return AsyncCloseableIterator(self._batches(array_path, batch_size), parts=batch_size)

    async def _batches(self, array_path: str, batch_size: int) -> AsyncIterator[Batch]:
        with translated():
            session = await self.handle.session()
            async for it in session.array_chunk_iterator(array_path, batch_size):
                inlined = {row: bytes(data) for row, data in it.inlined.items()}
                yield it.coords, it.kinds, it.path_list(), it.offsets, it.lengths, inlined


def _uncovered(store: AsyncStore, locations: Sequence[str], validate: bool) -> set[str]:  # noqa: FBT001
    """Return the distinct locations that no container covers.

    Raises:
        InvalidInputError: one is not a valid location.
    """
    refused: set[str] = set()
    known = store.workspace.virtual.locations
    for location in set(locations) - {""}:
        try:
            known.normalize(location, validate_container=validate)
        except VirtualContainerError:
            refused.add(location)
    return refused
