"""Load, search and store manifests; what was loaded is cached.

As much of a manifest is read and decoded as a lookup needs: a few pieces of a seekable one, the
decompressed bytes for a few chunks, columns for many. The cache holds the fullest form so far
(`format.manifest.held`).

A damaged index only costs a request: the whole file is read instead. Under a sound index, a piece
with another checksum is an error: the whole file has no checksum, and would give a wrong
reference.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread

from icechunk_async._runtime.concurrency import SingleFlight, bounded_map, gather
from icechunk_async.errors import FormatError, ObjectNotFoundError
from icechunk_async.format.manifest.held import BYTES_PER_REF, EXPAND, HeldManifest, Undecided
from icechunk_async.storage import ByteRange, SuffixRange

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from icechunk_async._runtime.weighted_cache import WeightedCache
    from icechunk_async.engine.files.layout import Layout, ManifestPieces
    from icechunk_async.engine.sidecars.sums import SumFiles
    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates
    from icechunk_async.format.manifest.held import Extent
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.manifest.writing import LocationDictionary
    from icechunk_async.storage import BlockingStorage, RangeRequest, Retrieved, Storage

    type ManifestCache = WeightedCache[ManifestId, HeldManifest]

__all__ = [
    "MIN_SEEKABLE_FILE_BYTES",
    "BlockingManifestFiles",
    "ManifestFiles",
    "check_id",
    "offload",
]

MIN_SEEKABLE_FILE_BYTES: Final = 1 << 20
"""Stored manifests from this size are searched by their index; smaller ones are read whole."""
_MIN_PATCHED_FILE_BYTES: Final = 1 << 17
"""Stored manifests from this size are changed in place, if they were written in pieces."""
_OFFLOAD_BYTES: Final = 1 << 18
"""Work on files from this size runs on a thread, so that the event loop is not held up."""
_MAX_ROUNDS: Final = 8
"""Rounds of reading pieces for one lookup; two or three are usual."""
_CONCURRENT_PIECES: Final = 8


async def offload[T](work: Callable[[], T], *, size_bytes: int) -> T:
    """Run ``work``, on a thread if it handles enough bytes to hold up the event loop."""
    if size_bytes < _OFFLOAD_BYTES:
        return work()
    return await anyio.to_thread.run_sync(work)


class ManifestFiles:
    """The manifests of one repository, cached by weight, each loaded once at a time."""

    def __init__(
        self,
        storage: Storage,
        cache: ManifestCache,
        layout: Layout,
        *,
        compression_level: int,
        sums: SumFiles,
        attach_sums: bool,
    ) -> None:
        """Use ``storage``, and keep in ``cache`` what was loaded.

        Args:
            storage: where the files are.
            cache: manifests in memory; may be shared with `BlockingManifestFiles`.
            layout: names and encodes them.
            compression_level: zstd level of new files.
            sums: checksums of the chunks.
            attach_sums: return every reference with its sum. Then each manifest
                is decoded whole, with its sidecar.
        """
        self._storage = storage
        self._sums = sums
        self._attach_sums = attach_sums
        self._names = layout.names
        self._codec = layout.manifests
        self._compression_level = compression_level
        self._cache = cache
        self._flights: SingleFlight[object, Any] = SingleFlight(eager=True)

    async def get(self, manifest_id: ManifestId, size_bytes: int = 0) -> Manifest:
        """Return a manifest, decoded.

        Args:
            manifest_id: which one.
            size_bytes: the size of its file if known, so that exactly that is requested.

        Raises:
            FormatError: it is missing, though a snapshot refers to it, or is damaged.

        Cost: one request unless cached; memory in proportion to its references.
        """
        held = self._cache.get(manifest_id)
        # Each turn makes it fuller: the file, the decompressed bytes, the columns. Others may do so
        # at the same time, and their result is as good.
        while held is None or (columns := held.columns) is None:
            held = await self._expand(manifest_id, size_bytes, held)
        return columns

    async def get_with_sums(self, manifest_id: ManifestId, size_bytes: int = 0) -> Manifest:
        """Return a manifest, decoded, with the checksums of its chunks that are known.

        Args and errors as `get`. Cost: one request more, at the same time, unless cached.
        """
        from icechunk_async.engine.sidecars.sums import with_sums  # noqa: PLC0415 -- on use

        if self._attach_sums:
            return await self.get(manifest_id, size_bytes)
        manifest, sums = await gather(
            self.get(manifest_id, size_bytes), self._sums.load(manifest_id)
        )
        return with_sums(manifest, sums)

    async def find_with_sum(
        self, manifest_id: ManifestId, size_bytes: int, node_id: NodeId, coords: Coordinates
    ) -> ChunkRef | None:
        """Return the reference of a chunk with its sum, if that is known.

        Args and errors as `find_ref`. Cost: as `get_with_sums`; the manifest is then kept with
        its sums, so that the next lookup costs nothing.
        """
        held = self._cache.get(manifest_id)
        if held is None or (columns := _with_known_sums(held, node_id, coords)) is None:
            columns = await self.get_with_sums(manifest_id, size_bytes)
            self._cache.put(manifest_id, columns, columns.weight)
        return columns.lookup(node_id, coords)

    def find_in_memory(
        self, manifest_id: ManifestId, node_id: NodeId, coords: Coordinates
    ) -> ChunkRef | Undecided | None:
        """Return the reference of a chunk if the cache decides it; see `HeldManifest.lookup`."""
        held = self._cache.get(manifest_id)
        if held is None or (self._attach_sums and held.columns is None):
            return EXPAND
        return held.lookup(node_id, coords)

    async def find_ref(
        self, manifest_id: ManifestId, size_bytes: int, node_id: NodeId, coords: Coordinates
    ) -> ChunkRef | None:
        """Return the reference of a chunk; None if the manifest has none.

        Args:
            manifest_id: which manifest.
            size_bytes: the size of its file if known, so that exactly that is requested.
            node_id: the array.
            coords: the chunk.

        Raises:
            FormatError: the manifest is missing, though a snapshot refers to it, or is damaged.

        Cancellation: what was read stays in the cache.

        Cost: one request unless cached. A large manifest is decoded only after a few lookups. Of a
        seekable one only a few pieces are read, in two rounds of requests for the first chunk.
        """
        if self._attach_sums:
            # Sums are kept by place in the decoded references, which pieces of a file do not have.
            return (await self.get(manifest_id, size_bytes)).lookup(node_id, coords)
        held = await self._open(manifest_id, size_bytes)
        rounds = 0
        while True:
            found = held.lookup(node_id, coords)
            if not isinstance(found, Undecided):
                return found
            # A hostile index could ask for one piece after the other without end; the whole file
            # decides then.
            if found.extents and rounds < _MAX_ROUNDS:
                rounds += 1
                await self._fill(manifest_id, held, found)
            else:
                held = await self._expand(manifest_id, size_bytes, held, node_id)

    async def load(self, manifest_id: ManifestId, size_bytes: int = 0) -> None:
        """Have a manifest in memory, in any form. Args, errors and cost as `get`."""
        if self._cache.get(manifest_id) is None:
            await self._expand(manifest_id, size_bytes, None)

    async def _open(self, manifest_id: ManifestId, size_bytes: int) -> HeldManifest:
        """Have a manifest in memory; of a large one not more than its index, if it has one."""

        async def load(pieces: ManifestPieces) -> HeldManifest | None:
            found = await self._get(manifest_id, _tail_range(pieces, size_bytes))
            tail = found.data
            # The end was the whole file, so there is nothing else to fetch.
            if not size_bytes and len(tail) == found.size_bytes:
                return await self.keep(manifest_id, tail)
            size = size_bytes or found.size_bytes
            # The end says how long the index is. Of a large manifest that may be more than what was
            # guessed.
            longer = pieces.longer_tail(size, tail)
            if longer is not None:
                tail = await self._fetch(manifest_id, *longer)
            opened = pieces.open(manifest_id, size, tail)
            if opened is not None:
                self._cache.put(manifest_id, opened, opened.weight)
            return opened

        held = self._cache.get(manifest_id)
        pieces = self._codec.pieces
        if held is None and pieces is not None and _in_pieces(pieces, size_bytes):
            held = await self._flights.run((manifest_id, "index"), lambda: load(pieces))
        return await self._expand(manifest_id, size_bytes, None) if held is None else held

    async def _fill(
        self, manifest_id: ManifestId, held: HeldManifest, undecided: Undecided
    ) -> None:
        """Read parts of a file that a lookup needs, each once at a time."""

        async def load(extent: Extent) -> None:
            data = await self._fetch(manifest_id, *extent)
            # Pieces decompress to about four times as much, and that is what takes the time.
            await offload(lambda: undecided.fill(extent, data), size_bytes=4 * len(data))
            # It weighs more now. One that left the cache meanwhile is not put back.
            if self._cache.get(manifest_id) is held:
                self._cache.put(manifest_id, held, held.weight)

        # Readers of neighbouring chunks ask for the same pieces at the same moment.
        def fill(extent: Extent) -> Coroutine[Any, Any, None]:
            return self._flights.run((manifest_id, extent), lambda: load(extent))

        await bounded_map(fill, undecided.extents, limit=_CONCURRENT_PIECES)

    async def _expand(
        self,
        manifest_id: ManifestId,
        size_bytes: int,
        held: HeldManifest | None,
        node_id: NodeId | None = None,
    ) -> HeldManifest:
        """Return a manifest in a fuller form than ``held``, reading its whole file if needed.

        With ``node_id`` it is `HeldManifest.expand` for that array, if the file is in memory.
        """

        async def load() -> HeldManifest:
            if held is None or not held.is_whole:
                data = await self._fetch(manifest_id, 0, size_bytes or None)
                return await self.keep(manifest_id, data)
            size = BYTES_PER_REF * held.weight
            fuller = await offload(partial(held.expand, node_id), size_bytes=size)
            return self._keep(manifest_id, await self._with_sums(manifest_id, fuller))

        array = None if held is None or not held.is_whole else node_id
        # By the form that is held as well: another caller may already have a fuller one. `load`
        # refers to it, so that no other object has its id as long as the flight is known.
        fuller: HeldManifest = await self._flights.run((manifest_id, id(held), array), load)
        return fuller

    def _keep(self, manifest_id: ManifestId, held: HeldManifest) -> HeldManifest:
        # A file under another's name would be decoded without an error, and give another array's
        # chunks.
        check_id(self._names.manifest(manifest_id), held.id, manifest_id)
        self._cache.put(manifest_id, held, held.weight)
        return held

    async def keep(self, manifest_id: ManifestId, data: bytes | memoryview) -> HeldManifest:
        """Keep a manifest whose file was read. Errors as `get`."""
        held: HeldManifest = await offload(
            lambda: self._codec.open(manifest_id, data), size_bytes=len(data)
        )
        return self._keep(manifest_id, await self._with_sums(manifest_id, held))

    async def _with_sums(self, manifest_id: ManifestId, held: HeldManifest) -> HeldManifest:
        """Attach checksums to a manifest that is decoded, if references are returned with them."""
        if not self._attach_sums or held.columns is None:
            return held
        from icechunk_async.engine.sidecars.sums import with_sums  # noqa: PLC0415 -- on use

        return with_sums(held.columns, await self._sums.load(manifest_id))

    async def read(self, manifest_id: ManifestId, size_bytes: int = 0) -> Manifest:
        """Read a manifest from the storage, and do not cache it.

        For readers that look at each manifest once, or check that its file is there.

        Args and errors as `get`. Cost: one request, even if it is cached.
        """
        data = await self._fetch(manifest_id, 0, size_bytes or None)
        manifest = await offload(
            lambda: self._codec.decode(manifest_id, data), size_bytes=len(data)
        )
        check_id(self._names.manifest(manifest_id), manifest.id, manifest_id)
        return manifest

    async def read_file(self, manifest_id: ManifestId) -> Retrieved:
        """Read the file of a manifest from the storage, and do not cache it. Errors as `get`."""
        key = self._names.manifest(manifest_id)
        try:
            return await self._storage.get(key)
        except ObjectNotFoundError as error:
            raise _missing(key) from error

    def may_be_patched(self, size_bytes: int) -> bool:
        """Return whether a manifest of this size may be changed in place."""
        return self._codec.patches and size_bytes >= _MIN_PATCHED_FILE_BYTES

    async def seekable_file(
        self, manifest_id: ManifestId, size_bytes: int
    ) -> bytes | memoryview | None:
        """Return the file of a manifest that may be seekable; None if it is in memory whole.

        None as well if the layout changes no manifest in place.

        Args and errors as `get`. Cost: a request, or two for large files; a large file
        without an index is kept.
        """
        if not self.may_be_patched(size_bytes):
            return None
        # The end is a small read. A file without an index is read whole by it, and is in memory.
        if size_bytes >= MIN_SEEKABLE_FILE_BYTES:
            held: HeldManifest | None = await self._open(manifest_id, size_bytes)
        else:
            held = self._cache.get(manifest_id)
        if held is not None and held.is_whole:
            return None
        return await self._fetch(manifest_id, 0, size_bytes)

    async def _fetch(
        self, manifest_id: ManifestId, start: int, stop: int | None
    ) -> bytes | memoryview:
        return (await self._get(manifest_id, ByteRange(start, stop))).data

    async def _get(self, manifest_id: ManifestId, part: RangeRequest) -> Retrieved:
        key = self._names.manifest(manifest_id)
        try:
            return await self._storage.get(key, part)
        except ObjectNotFoundError as error:
            raise _missing(key) from error

    def encode(
        self,
        manifest_id: ManifestId,
        arrays: Mapping[NodeId, ChunkRefs],
        dictionary: LocationDictionary | None = None,
    ) -> bytes:
        """Return the file of a manifest as this repository writes files.

        Args and errors as `ManifestCodec.encode`.
        """
        return self._codec.encode(manifest_id, arrays, self._compression_level, dictionary)

    async def put(
        self,
        manifest_id: ManifestId,
        packed: bytes,
        *,
        keep: bool = False,
        decoded: Manifest | None = None,
    ) -> None:
        """Store a manifest that is already encoded.

        Args:
            manifest_id: which one.
            packed: its file.
            keep: it may be read soon, so keep its file in memory, unless it is so large that
                readers take only pieces of it.
            decoded: the same decoded, if that is at hand and small; kept instead.

        Cancellation: the object may exist; nothing refers to it.
        """
        # The name is random and nothing refers to it before the snapshot, so no condition is
        # needed.
        await self._storage.put(self._names.manifest(manifest_id), packed)
        if keep and len(packed) < MIN_SEEKABLE_FILE_BYTES:
            # `decoded` has no sums: where each reference is returned with one, the file is kept,
            # and decoded together with its sidecar.
            file = self._codec.hold(manifest_id, packed)
            held: HeldManifest = file if decoded is None or self._attach_sums else decoded
            self._cache.put(manifest_id, held, held.weight)


class BlockingManifestFiles:
    """Looks chunks up on the calling thread, without an event loop. Usable from any thread.

    Two threads may load one manifest at the same time; both are right, and the later one is kept.
    """

    def __init__(
        self,
        storage: BlockingStorage,
        cache: ManifestCache,
        layout: Layout,
        sums: SumFiles | None = None,
    ) -> None:
        """Use ``storage``, and share ``cache`` with the asynchronous reader.

        Args:
            storage: where the objects are.
            cache: manifests in memory.
            layout: names and encodes them.
            sums: given if every reference is to be returned with its checksum.
        """
        self._storage = storage
        self._cache = cache
        self._names = layout.names
        self._codec = layout.manifests
        self._sums = sums

    def find_ref(
        self, manifest_id: ManifestId, size_bytes: int, node_id: NodeId, coords: Coordinates
    ) -> ChunkRef | None:
        """Return the reference of a chunk; as `ManifestFiles.find_ref`."""
        if self._sums is not None:
            return self._get_with_sums(manifest_id, size_bytes, self._sums).lookup(node_id, coords)
        held = self._open(manifest_id, size_bytes)
        rounds = 0
        while True:
            found = held.lookup(node_id, coords)
            if not isinstance(found, Undecided):
                return found
            if found.extents and rounds < _MAX_ROUNDS:
                rounds += 1
                for extent in found.extents:
                    found.fill(extent, self._fetch(manifest_id, *extent))
            elif held.is_whole:
                held = held.expand(node_id)
            else:
                held = self._read_whole(manifest_id, size_bytes)
            self._cache.put(manifest_id, held, held.weight)

    def find_with_sum(
        self,
        manifest_id: ManifestId,
        size_bytes: int,
        node_id: NodeId,
        coords: Coordinates,
        sums: SumFiles,
    ) -> ChunkRef | None:
        """Return the reference of a chunk with its sum; as `ManifestFiles.find_with_sum`."""
        held = self._cache.get(manifest_id)
        if held is None or (columns := _with_known_sums(held, node_id, coords)) is None:
            columns = self._attach(manifest_id, size_bytes, held, sums)
        return columns.lookup(node_id, coords)

    def _get_with_sums(self, manifest_id: ManifestId, size_bytes: int, sums: SumFiles) -> Manifest:
        held = self._cache.get(manifest_id)
        if held is not None and held.columns is not None:
            return held.columns
        return self._attach(manifest_id, size_bytes, held, sums)

    def _attach(
        self, manifest_id: ManifestId, size_bytes: int, held: HeldManifest | None, sums: SumFiles
    ) -> Manifest:
        """Decode a manifest whole, and keep it with its sums."""
        from icechunk_async.engine.sidecars.sums import with_sums  # noqa: PLC0415 -- on use

        if held is None or not held.is_whole:
            held = self._read_whole(manifest_id, size_bytes)
        while (columns := held.columns) is None:
            held = held.expand()
        found = with_sums(columns, sums.load_blocking(manifest_id, self._storage))
        # In place of the form without sums, which a reader without `attach_sums` can use as well.
        self._cache.put(manifest_id, found, found.weight)
        return found

    def _open(self, manifest_id: ManifestId, size_bytes: int) -> HeldManifest:
        held = self._cache.get(manifest_id)
        pieces = self._codec.pieces
        if held is not None:
            return held
        if pieces is not None and _in_pieces(pieces, size_bytes):
            held = self._open_pieces(manifest_id, size_bytes, pieces)
        if held is None:
            held = self._read_whole(manifest_id, size_bytes)
        self._cache.put(manifest_id, held, held.weight)
        return held

    def _open_pieces(
        self, manifest_id: ManifestId, size_bytes: int, pieces: ManifestPieces
    ) -> HeldManifest | None:
        found = self._get(manifest_id, _tail_range(pieces, size_bytes))
        tail = found.data
        if not size_bytes and len(tail) == found.size_bytes:
            return self._codec.open(manifest_id, tail)
        size = size_bytes or found.size_bytes
        longer = pieces.longer_tail(size, tail)
        if longer is not None:
            tail = self._fetch(manifest_id, *longer)
        return pieces.open(manifest_id, size, tail)

    def _read_whole(self, manifest_id: ManifestId, size_bytes: int) -> HeldManifest:
        held = self._codec.open(manifest_id, self._fetch(manifest_id, 0, size_bytes or None))
        check_id(self._names.manifest(manifest_id), held.id, manifest_id)
        return held

    def _fetch(self, manifest_id: ManifestId, start: int, stop: int | None) -> bytes | memoryview:
        return self._get(manifest_id, ByteRange(start, stop)).data

    def _get(self, manifest_id: ManifestId, part: RangeRequest) -> Retrieved:
        key = self._names.manifest(manifest_id)
        try:
            return self._storage.get_blocking(key, part)
        except ObjectNotFoundError as error:
            raise _missing(key) from error


def _in_pieces(pieces: ManifestPieces, size_bytes: int) -> bool:
    """Return whether the end of a file is read first; ``size_bytes`` is 0 if it is unknown."""
    return size_bytes >= MIN_SEEKABLE_FILE_BYTES or (not size_bytes and pieces.unsized_tail > 0)


def _tail_range(pieces: ManifestPieces, size_bytes: int) -> RangeRequest:
    """Return the range of a file to read first; as `_in_pieces`."""
    if not size_bytes:
        return SuffixRange(pieces.unsized_tail)
    return ByteRange(*pieces.tail_extent(size_bytes))


def _with_known_sums(held: HeldManifest, node_id: NodeId, coords: Coordinates) -> Manifest | None:
    """Return a manifest that has the sums of an array; None if they are not attached."""
    columns = held.columns
    known = columns is not None and columns.refs(node_id, len(coords)).sums is not None
    return columns if known else None


def _missing(key: str) -> FormatError:
    return FormatError(
        f"A snapshot refers to {key!r}, which is missing. The repository is damaged: "
        "restore the object, or go back to a snapshot that does not need it."
    )


def check_id(key: str, found: bytes, expected: bytes) -> None:
    """Raise FormatError if a file is another one than the one that was asked for."""
    if found != expected:
        raise FormatError(f"{key!r} holds another file: it calls itself {found!s}.")
