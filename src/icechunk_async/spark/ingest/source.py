"""Source files and folders, read through the containers of a repository, also by blocking code."""

from __future__ import annotations

import io
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import anyio.from_thread

from icechunk_async._runtime import clock
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError, VirtualSourceChangedError
from icechunk_async.spark.ingest.scan import SourceState
from icechunk_async.storage import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from icechunk_async.engine.virtual.chunks import VirtualChunks
    from icechunk_async.storage import ObjectInfo, RangeRequest, Retrieved

    class Buffer(Protocol):
        """A buffer that bytes are read into."""

        def __len__(self) -> int: ...


__all__ = ["FolderListing", "RemoteFile", "Source", "check_state", "list_folder", "state_of"]

# Libraries read the metadata of a file in small pieces, in many places: a request for each would
# take most of a scan.
_BLOCK_BYTES: Final = 1 << 20
# 32 MiB for each file that is scanned: the indexes of chunks of large files are spread over many
# blocks, and are read more than once.
_BLOCKS: Final = 32
_NO_ETAGS: Final = frozenset({"file", "memory", "http", "https"})
"""Schemes whose versions are not ETags, or not those that other readers see."""


def state_of(retrieved: Retrieved, url: str) -> SourceState:
    """Return the state of an object from the result of a read; the URL must be absolute."""
    scheme = url.partition(":")[0].lower()
    etag = retrieved.etag
    # Backends that say nothing of ETags have versions that are ETags, but for these schemes.
    if etag is None and scheme not in _NO_ETAGS:
        etag = retrieved.version.token
    modified = retrieved.last_modified
    return SourceState(
        retrieved.size_bytes,
        retrieved.version.token,
        etag,
        None if modified is None else clock.to_us(modified),
    )


def check_state(retrieved: Retrieved, url: str, known: SourceState) -> None:
    """Check that an object is still in a known state, from the result of a read.

    Raises:
        VirtualSourceChangedError: the object has changed.
    """
    if not known.holds_for(state_of(retrieved, url)):
        raise VirtualSourceChangedError(
            f"{url!r} changed while it was read. Ingest it again.", location=url
        )


class Source:
    """One object, pinned to the state in which it was opened."""

    def __init__(self, virtual: VirtualChunks, url: str, state: SourceState) -> None:
        """Keep the state; use `open`."""
        self.virtual = virtual
        self.url = url
        self.state = state

    @classmethod
    async def open(cls, virtual: VirtualChunks, url: str) -> Source:
        """Open an object. Cost: one request."""
        return cls(
            virtual,
            url,
            state_of(await virtual.fetch(url, ByteRange(0, 0)), virtual.locations.expand(url)),
        )

    async def read(self, wanted: RangeRequest = None) -> bytes:
        """Read the object, or a part of it.

        Raises:
            VirtualSourceChangedError: the object has changed.
        """
        retrieved = await self.virtual.fetch(self.url, wanted)
        check_state(retrieved, self.url, self.state)
        return bytes(retrieved.data)

    def read_blocking(self, start: int, stop: int) -> bytes:
        """Read a part of the object, from a worker thread of the event loop."""
        # The thread waits for the loop, and the loop must not wait for the thread: `_scan_file`
        # awaits it.
        return anyio.from_thread.run(self.read, ByteRange(start, stop))

    def file(self) -> RemoteFile:
        """Return a file for blocking code in a worker thread of the event loop."""
        if self.state.size_bytes == 0:
            raise InvalidInputError(f"{self.url!r} is empty.")
        return RemoteFile(self.read_blocking, self.state.size_bytes)


@dataclass(frozen=True, slots=True)
class FolderListing:
    """The objects below a URL, by key: a source that is not one file."""

    root: str
    """Its URL, ending in `/`."""
    urls: dict[str, str]
    infos: dict[str, ObjectInfo]

    @property
    def state(self) -> SourceState:
        """The state of the whole folder, which differs once any object changed."""
        digest = blake2b(digest_size=16)
        total = 0
        # A listing has no versions: a chunk that is replaced within one clock tick by one of equal
        # size is not seen.
        for key, info in sorted(self.infos.items()):
            total += info.size_bytes
            modified_us = clock.to_us(info.last_modified)
            digest.update(f"{key}\0{info.size_bytes}\0{modified_us}\n".encode())
        return SourceState(total, digest.hexdigest(), None, None)


async def list_folder(virtual: VirtualChunks, url: str) -> FolderListing:
    """List a folder.

    Raises:
        InvalidInputError: it has no objects.

    Cost: one request for about 1000 objects.
    """
    root = f"{url.rstrip('/')}/"
    start = virtual.locations.resolve(root)[1]
    urls: dict[str, str] = {}
    infos: dict[str, ObjectInfo] = {}
    async for location, info in virtual.entries(root):
        key = virtual.locations.resolve(location)[1].removeprefix(start)
        urls[key], infos[key] = location, info
    if not urls:
        raise InvalidInputError(f"There is nothing to ingest at {url!r}: it has no objects.")
    return FolderListing(root, urls, infos)


class RemoteFile(io.RawIOBase):
    """A file that is read in blocks, of which it keeps the last few."""

    def __init__(self, read: Callable[[int, int], bytes], size_bytes: int) -> None:
        """Keep a function that reads the half-open range of bytes that it is given."""
        self._read = read
        self._size = size_bytes
        self._at = 0
        self._blocks: dict[int, bytes] = {}

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill a buffer from the position on, and return how many bytes there were."""
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view) and self._at < self._size:
            number, start = divmod(self._at, _BLOCK_BYTES)
            piece = self._block(number)[start : start + len(view) - done]
            view[done : done + len(piece)] = piece
            done += len(piece)
            self._at += len(piece)
        return done

    def _block(self, number: int) -> bytes:
        block = self._blocks.pop(number, None)
        if block is None:
            start = number * _BLOCK_BYTES
            block = self._read(start, min(start + _BLOCK_BYTES, self._size))
            # A dictionary keeps the order of insertion: its first key is the block that was used
            # least recently.
            while len(self._blocks) >= _BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        self._blocks[number] = block  # at the end: the most recently used
        return block
