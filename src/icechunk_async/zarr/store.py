"""A Zarr store over a session: asynchronous, in batches, and on the calling thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, Self

from typing_extensions import TypeVar
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import default_buffer_prototype

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.engine.tree.blocking import BlockingChunks
from icechunk_async.errors import InvalidStoreKeyError
from icechunk_async.format.paths import check_path
from icechunk_async.storage import ByteRange, SuffixRange, slice_range
from icechunk_async.zarr import many
from icechunk_async.zarr.keys import ChunkKey, ForeignKey, MetadataKey, parse_chunk_keys, parse_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
    from datetime import datetime

    import numpy as np
    import numpy.typing as npt
    from zarr.core.buffer import Buffer, BufferPrototype

    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.manifest.chunk import Coordinates
    from icechunk_async.storage import RangeRequest
    from icechunk_async.zarr.virtual.references import VirtualChunkSpec

__all__ = ["Hierarchy", "IcechunkStore", "range_of"]


def range_of(request: ByteRequest | None) -> RangeRequest:
    """Return the range that a byte request means.

    Raises:
        ValueError: it is not one of Zarr's.
    """
    match request:
        case None:
            return None
        case RangeByteRequest(start, end):
            # As a slice does, and as other stores of Zarr do: an end before the start is no error.
            return ByteRange(start, max(start, end))
        case OffsetByteRequest(offset):
            return ByteRange(offset)
        case SuffixByteRequest(suffix):
            return SuffixRange(suffix)
        case _:
            raise ValueError(f"Unexpected byte_range, got {request!r}.")


def _bytes_of(value: Buffer) -> memoryview:
    return memoryview(value.as_numpy_array()).cast("B")


def _chunk_of(key: str) -> tuple[str, Coordinates] | None:
    """Return the array and the coordinates of a chunk's key; None for other keys."""
    try:
        parsed = parse_key(key)
    except InvalidStoreKeyError:
        return None
    return (parsed.path, parsed.coords) if isinstance(parsed, ChunkKey) else None


# Where Zarr passes many keys with one call. The budget of the repository limits requests besides,
# so these bound the tasks, and the values that are held until the last one is there.
_CONCURRENT_READS = 64
_CONCURRENT_WRITES = 64


class Hierarchy(Protocol):
    """The part of a session, or of a fork, that a store needs."""

    @property
    def workspace(self) -> Workspace:
        """The hierarchy, with the changes so far."""
        ...

    @property
    def read_only(self) -> bool:
        """Whether it only reads."""
        ...


# Sessions have stores. So that the store knows nothing of sessions, the caller says which class its
# session is of. Annotations that do not say it, `store: IcechunkStore`, stay valid.
S_co = TypeVar("S_co", bound=Hierarchy, covariant=True, default=Any)


class IcechunkStore(Store, Generic[S_co]):
    """The hierarchy of one session, for ``zarr`` and ``xarray``. See ``Session.store``.

    Keys are parsed strictly: what is neither a metadata document nor a chunk of the default
    encoding raises ``InvalidStoreKeyError``. Byte ranges behave like slices.

    Where the storage can answer on the calling thread (memory, local disks), the synchronous
    methods do so; Zarr's fused codec pipeline uses them.
    """

    def __init__(self, session: S_co, *, read_only: bool = False) -> None:
        """Look at ``session``.

        Args:
            session: the hierarchy.
            read_only: refuse writes that the session would allow.
        """
        super().__init__(read_only=read_only)
        self._session = session
        self.workspace = session.workspace
        """The hierarchy, with the changes so far."""
        # None if some storage needs an event loop; then Zarr uses the asynchronous methods.
        self._blocking = BlockingChunks.of(session.workspace)

    def __repr__(self) -> str:
        """Show the session."""
        from icechunk_async._display.versions import session_title  # noqa: PLC0415 -- rarely needed

        return f"IcechunkStore(<{session_title(self._session)}>, read_only={self.read_only})"

    def __eq__(self, other: object) -> bool:
        """Return whether two stores look at the same session in the same way."""
        return (
            # By what they look at. Two sessions on one snapshot may hold different changes; a fork
            # has another hierarchy each time that it is attached.
            isinstance(other, IcechunkStore)
            and self.workspace is other.workspace
            and self.read_only == other.read_only
        )

    def __hash__(self) -> int:
        """Agree with equality."""
        return hash((id(self.workspace), self.read_only))

    @property
    def session(self) -> S_co:
        """The session that the store looks at."""
        return self._session

    @property
    def read_only(self) -> bool:
        """Whether writes are refused; so they are once the session was committed."""
        return self._read_only or self._session.read_only

    def with_read_only(self, read_only: bool = False) -> Self:  # noqa: FBT001, FBT002
        """Return another store on the same session; Zarr's signature."""
        return type(self)(self._session, read_only=read_only)

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
    def supports_consolidated_metadata(self) -> bool:
        """No: a snapshot holds all metadata, so there is nothing to consolidate."""
        return False

    @property
    def _supports_sync_io(self) -> bool:
        """Whether Zarr may use the synchronous methods."""
        return self._blocking is not None

    async def get(
        self,
        key: str,
        prototype: BufferPrototype,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Return a document or a chunk, or a part of it; None if it does not exist.

        Raises:
            InvalidStoreKeyError: the key cannot exist.
            FormatError: what a manifest refers to is missing or damaged.
            VirtualChunkError: a virtual chunk's source changed, or may not be read.

        Cancellation: no effect. Cost: see ``Workspace.read_chunk``; documents cost nothing.
        """
        request = None if byte_range is None else range_of(byte_range)
        parsed = parse_key(key)
        if isinstance(parsed, ChunkKey):
            data = await self.workspace.read_chunk(parsed.path, parsed.coords, request)
        else:
            data = self._document(parsed, request)
        # Zarr chooses the buffer: memory of the processor, or of a device.
        return None if data is None else prototype.buffer.from_bytes(data)

    def _document(self, key: MetadataKey | ForeignKey, request: RangeRequest) -> bytes | None:
        """Return a metadata document, or a part of it; None if it does not exist."""
        node = self.workspace.node(key.path) if isinstance(key, MetadataKey) else None
        if node is None:
            return None
        start, stop = slice_range(request, len(node.user_data))
        return node.user_data[start:stop]

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        """Return parts of values in order, several at a time."""
        return await bounded_map(
            lambda item: self.get(item[0], prototype, item[1]),
            list(key_ranges),
            limit=_CONCURRENT_READS,
        )

    async def _get_many(
        self, requests: Iterable[tuple[str, BufferPrototype, ByteRequest | None]]
    ) -> AsyncGenerator[tuple[str, Buffer | None], None]:
        """Return many values, several at a time."""
        wanted = list(requests)
        for request, value in zip(
            wanted,
            await bounded_map(lambda it: self.get(*it), wanted, limit=_CONCURRENT_READS),
            strict=True,
        ):
            yield request[0], value

    async def read_chunks(
        self,
        keys: Sequence[str],
        take: Callable[[int, bytes | memoryview | None], None],
        *,
        chunk_bytes: int,
    ) -> None:
        """Read chunks of one array and hand each over as it comes; see `IcechunkCodecPipeline`.

        Args:
            keys: of the chunks, all of one array.
            take: called with the index of each key and the bytes, None if there is no such chunk;
                in any order, on any thread, also at the same time.
            chunk_bytes: what a decoded chunk takes. It bounds how many are under way.

        Raises:
            InvalidStoreKeyError: a key is not that of a chunk, or of another array.
            FormatError, VirtualChunkError: as `get`.
            What ``take`` raises. After an error some chunks were handed over.

        Cancellation: some chunks were handed over. Cost: a request for each chunk that is not
        inline, up to 64 at a time; where the storage answers on the calling thread (memory, local
        disks), one thread for small chunks and eight where it has to wait.
        """
        if not keys:
            return
        path, coords = parse_chunk_keys(keys)
        here = self._blocking
        if here is None:
            await many.read_on_loop(self.workspace, path, coords, take, chunk_bytes=chunk_bytes)
        else:
            await many.read_on_threads(here, path, coords, take, chunk_bytes=chunk_bytes)

    async def write_chunks(
        self,
        keys: Sequence[str],
        make: Callable[[int], bytes | memoryview | None],
        *,
        chunk_bytes: int,
    ) -> None:
        """Write chunks of one array, several at a time; see `IcechunkCodecPipeline`.

        Args:
            keys: of the chunks, all of one array.
            make: called once with the index of each key, on any thread, also at the same time;
                returns the bytes of the chunk, or None to delete it.
            chunk_bytes: as for `read_chunks`.

        Raises:
            InvalidStoreKeyError: a key is not that of a chunk, or of another array; nothing was
                written.
            ReadOnlyError, NodeNotFoundError, InvalidCoordinatesError: as `set`.
            What ``make`` raises. After an error some chunks are written.

        Cancellation: some chunks are written. Cost: see `read_chunks`.
        """
        await self._ensure_open()
        self._check_writable()
        if not keys:
            return
        path, coords = parse_chunk_keys(keys)
        here = self._blocking
        if here is None:
            empty = await many.write_on_loop(
                self.workspace, path, coords, make, chunk_bytes=chunk_bytes
            )
        else:
            empty = await many.write_on_threads(here, path, coords, make, chunk_bytes=chunk_bytes)
        # At the end and in turn: a delete may look into a manifest, and all of them into the same
        # ones.
        for index in empty:
            await self.delete(keys[index])

    async def exists(self, key: str) -> bool:
        """Return whether there is a document or a chunk; a key that cannot exist does not."""
        try:
            return await self._size(key) is not None
        # Zarr asks for keys of both formats and of any encoding to find out what a path holds.
        except InvalidStoreKeyError:
            return False

    async def getsize(self, key: str) -> int:
        """Return the size of a value in bytes, without reading it.

        Raises:
            FileNotFoundError: it does not exist.
        """
        size = await self._size(key)
        if size is None:
            raise FileNotFoundError(key)
        return size

    async def _size(self, key: str) -> int | None:
        match parse_key(key):
            case MetadataKey(path):
                node = self.workspace.node(path)
                return None if node is None else len(node.user_data)
            case ChunkKey(path, coords):
                handle = await self.workspace.find_chunk(path, coords)
                return None if handle is None else handle.size_bytes
            case ForeignKey():
                return None

    async def set(self, key: str, value: Buffer) -> None:
        """Write a document or a chunk; it becomes visible to others with the commit.

        Nothing is stored where it raises an error.

        Raises:
            ValueError, ReadOnlyError: the store or the session only reads.
            InvalidStoreKeyError: the key cannot exist.
            InvalidMetadataError: the document cannot be stored.
            NodeNotFoundError: a chunk of an array that does not exist.
            InvalidCoordinatesError: a chunk outside of the array's grid.

        Cancellation: the value is unchanged.
        """
        await self._ensure_open()
        await self._set(key, value)

    async def _set(self, key: str, value: Buffer, *, if_absent: bool = False) -> None:
        chunk = self._set_document(key, value, if_absent=if_absent)
        if chunk is not None:
            await self.workspace.write_chunk(
                chunk.path, chunk.coords, _bytes_of(value), if_absent=if_absent
            )

    def _set_document(self, key: str, value: Buffer, *, if_absent: bool = False) -> ChunkKey | None:
        """Write a document; return the parsed key if it is a chunk's, which is left to do."""
        self._check_writable()
        if not hasattr(value, "as_numpy_array"):
            raise TypeError(f"a value must be a zarr Buffer, not {type(value).__name__}")
        match parse_key(key):
            case MetadataKey(path):
                from icechunk_async.format.zarr_document import parse_document  # noqa: PLC0415 -- on use

                document = value.to_bytes()
                # Before anything is kept: a document that no snapshot can express would fail the
                # commit later, and all other changes with it.
                parsed = parse_document(document, path)
                self.workspace.set_node(path, document, parsed.array, if_absent=if_absent)
                return None
            case ChunkKey() as chunk:
                return chunk
            case ForeignKey():
                raise InvalidStoreKeyError(
                    f"{key!r} belongs to Zarr format 2, which Icechunk does not store. Write with "
                    "zarr_format=3.",
                    key=key,
                )

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Write a value unless there is one; of racing writers of this session one wins."""
        # The look spares an upload. Another task may write the key after it, so `if_absent` decides
        # once more, under the workspace's lock.
        if not await self.exists(key):
            await self._set(key, value, if_absent=True)

    async def _set_many(self, values: Iterable[tuple[str, Buffer]]) -> None:
        """Write many values, several at a time; documents first, since chunks need them."""
        await self._ensure_open()
        chunks: list[tuple[str, Buffer]] = []
        for key, value in values:
            if isinstance(parse_key(key), ChunkKey):
                chunks.append((key, value))
            else:
                await self._set(key, value)
        await bounded_map(lambda item: self._set(*item), chunks, limit=_CONCURRENT_WRITES)

    async def delete(self, key: str) -> None:
        """Delete a chunk, or with its document a node and all below it.

        What does not exist, or cannot, counts as deleted.
        """
        await self._ensure_open()
        # Only there: a look at the manifest may cost a request, which other sessions need not make.
        if self.workspace.deduplication is not None and await self._has_no_chunk(key):
            return
        self._delete(key)

    async def _has_no_chunk(self, key: str) -> bool:
        """Return whether a key is that of a chunk that is not there, so that deleting is no change.

        Zarr deletes chunks of fill values also where none is.
        """
        self._check_writable()
        chunk = _chunk_of(key)
        return chunk is not None and await self.workspace.find_chunk(*chunk) is None

    def _delete(self, key: str) -> None:
        self._check_writable()
        try:
            parsed = parse_key(key)
        except InvalidStoreKeyError:
            return
        match parsed:
            case MetadataKey(path):
                self.workspace.delete_node(path)
            case ChunkKey(path, coords):
                self.workspace.delete_chunk(path, coords)
            case ForeignKey():
                pass

    async def delete_dir(self, prefix: str) -> None:
        """Delete all nodes at and below a path, or a part of an array's chunks."""
        from icechunk_async.zarr import listing  # noqa: PLC0415 -- on use

        await self._ensure_open()
        self._check_writable()
        await listing.delete_below(self.workspace, prefix)

    async def clear(self) -> None:
        """Delete every node."""
        await self.delete_dir("")

    def list(self) -> AsyncIterator[str]:
        """Iterate over all keys."""
        return self.list_prefix("")

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over all keys that begin with a string; none if nothing does.

        Cost: one request for each manifest that is not cached, of arrays below the prefix.
        """
        from icechunk_async.zarr import listing  # noqa: PLC0415 -- on use

        await self._ensure_open()
        async for page in listing.key_pages(self.workspace, prefix):
            for key in page:
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over the names directly below a path."""
        from icechunk_async.zarr import listing  # noqa: PLC0415 -- on use

        await self._ensure_open()
        for name in await listing.names(self.workspace, prefix):
            yield name

    async def getsize_prefix(self, prefix: str) -> int:
        """Return the bytes of all values below a path, from references, without reading them."""
        from icechunk_async.zarr import listing  # noqa: PLC0415 -- on use

        await self._ensure_open()
        return await listing.total_size(self.workspace, prefix)

    async def get_ranges(
        self,
        key: str,
        byte_ranges: Sequence[ByteRequest | None],
        *,
        prototype: BufferPrototype,
        **limits: int,
    ) -> AsyncIterator[Sequence[tuple[int, Buffer | None]]]:
        """Read many parts of one value; neighbouring parts share a request.

        What is in memory (documents, inline chunks) is answered in one batch.

        Raises:
            BaseExceptionGroup: as Zarr asks for, with FileNotFoundError if there is no value.
        """
        await self._ensure_open()
        # All at once: there are no requests to join, and none to wait for.
        if await self._is_in_memory(key):
            yield [
                (index, await self.get(key, prototype, request))
                for index, request in enumerate(byte_ranges)
            ]
            return
        async for batch in super().get_ranges(key, byte_ranges, prototype=prototype, **limits):
            yield batch

    async def _is_in_memory(self, key: str) -> bool:
        match parse_key(key):
            case MetadataKey(path):
                return self.workspace.node(path) is not None
            case ChunkKey(path, coords):
                handle = await self.workspace.find_chunk(path, coords)
                return handle is not None and handle.is_inline
            case ForeignKey():
                return False

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Return a value on the calling thread; as `get`."""
        request = None if byte_range is None else range_of(byte_range)
        parsed = parse_key(key)
        if isinstance(parsed, ChunkKey):
            data = self._chunks_here().read(parsed.path, parsed.coords, request)
        else:
            data = self._document(parsed, request)
        if data is None:
            return None
        return (prototype or default_buffer_prototype()).buffer.from_bytes(data)

    def set_sync(self, key: str, value: Buffer) -> None:
        """Write a value on the calling thread; as `set`."""
        chunk = self._set_document(key, value)
        if chunk is not None:
            self._chunks_here().write(chunk.path, chunk.coords, _bytes_of(value))

    def _chunks_here(self) -> BlockingChunks:
        assert self._blocking is not None  # callers ask _supports_sync_io
        return self._blocking

    def delete_sync(self, key: str) -> None:
        """Delete on the calling thread; as `delete`."""
        if self.workspace.deduplication is not None:
            self._check_writable()
            chunk = _chunk_of(key)
            if chunk is not None and self._chunks_here().find(*chunk) is None:
                return
        self._delete(key)

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
        """Make a chunk refer to bytes ``[offset, offset + length)`` of another object.

        Args:
            key: the chunk, such as ``temperature/c/0/0``.
            location: absolute URL of the object, or ``vcc://container-name/path``.
            offset: first byte.
            length: bytes.
            checksum: ETag of the object, or a time after which it was not modified; reading
                is refused once it changed.
            validate_container: refuse a location that no container covers.

        Raises:
            VirtualContainerError: no container covers it; nothing was stored.
            InvalidStoreKeyError, InvalidCoordinatesError, NodeNotFoundError: nothing was stored.
        """
        from icechunk_async.zarr.virtual.references import one_ref  # noqa: PLC0415 -- on use

        self._check_writable()
        parsed = parse_key(key)
        if not isinstance(parsed, ChunkKey):
            raise InvalidStoreKeyError(f"{key!r} is no chunk key, such as 'array/c/0/0'.", key=key)
        ref = one_ref(
            self.workspace.virtual.locations,
            location,
            offset,
            length,
            checksum,
            validate_container=validate_container,
        )
        self.workspace.set_ref(parsed.path, parsed.coords, ref)

    def set_virtual_refs(
        self,
        array_path: str,
        chunks: Sequence[VirtualChunkSpec],
        *,
        validate_containers: bool = True,
    ) -> None:
        """Set many virtual chunks of one array, all or none.

        Raises:
            VirtualContainerError: no container covers a location; nothing was stored.
            InvalidCoordinatesError: a chunk lies outside of the grid; nothing was stored.
        """
        from icechunk_async.zarr.virtual.references import spec_refs  # noqa: PLC0415 -- on use

        self._check_writable()
        path, rank = self._array_of(array_path)
        locations = self.workspace.virtual.locations
        refs = spec_refs(locations, chunks, rank, validate_containers=validate_containers)
        self.workspace.set_refs(path, refs)

    def set_virtual_refs_arr(
        self,
        array_path: str,
        chunk_grid_shape: tuple[int, ...],
        locations: Sequence[str],
        offsets: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64],
        *,
        validate_containers: bool = True,
        arr_offset: tuple[int, ...] | None = None,
        checksum: str | datetime | None = None,
    ) -> None:
        """Set a box of virtual chunks of one array from columns, all or none.

        Args:
            array_path: the array.
            chunk_grid_shape: chunks of the box along each axis.
            locations: URL of each chunk, row-major; empty ones are left out.
            offsets: first byte of each chunk.
            lengths: bytes of each chunk.
            validate_containers: refuse locations that no container covers.
            arr_offset: chunk coordinates at which the box begins; the origin if None.
            checksum: one for all, as for `set_virtual_ref`.

        Raises: as `set_virtual_refs`.

        Cost: no object is made per chunk; each distinct location is checked once.
        """
        from icechunk_async.zarr.virtual.references import grid_refs  # noqa: PLC0415 -- on use

        self._check_writable()
        path, _ = self._array_of(array_path)
        refs = grid_refs(
            self.workspace.virtual.locations,
            chunk_grid_shape,
            locations,
            offsets,
            lengths,
            first=arr_offset,
            checksum=checksum,
            validate_containers=validate_containers,
        )
        self.workspace.set_refs(path, refs)

    def _array_of(self, given: str) -> tuple[str, int]:
        path = check_path(given)
        array = self.workspace.array(path).array
        assert array is not None
        return path, len(array.dimensions)
