"""Read many chunks of one array with one call.

Where the storage answers on the calling thread, threads read chunk after chunk. Elsewhere many
requests are under way at once. Chunks are handed over as they come.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread
import zarr

from icechunk_async._runtime.concurrency import bounded_map

if sys.platform == "linux":
    import resource

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.engine.tree.blocking import BlockingChunks
    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.manifest.refs import Coordinates

    type Take = Callable[[int, bytes | memoryview | None], None]

__all__ = ["read_here", "read_there"]

_MEMORY_BYTES: Final = 64 << 20
"""Memory for chunks that are being read or decoded, unless Zarr's own limit allows more."""
_MOST_REQUESTS: Final = 64
_THREADS: Final = 8
_SMALL_BYTES: Final = 64 << 10
"""Threads that read smaller chunks mostly wait for each other: for the interpreter."""
_SLICE: Final = 128
"""Small chunks that a thread reads before cancellation is looked at."""
_LOOP_BYTES: Final = 128 << 10
"""Up to this size chunks are decoded on the event loop; a thread takes more."""


def _waits_of_this_thread() -> int:
    """Return how often the calling thread has given up the processor to wait for something."""
    if sys.platform == "linux":
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    return 0


async def read_here(
    chunks: BlockingChunks, path: str, coords: list[Coordinates], take: Take, *, chunk_bytes: int
) -> None:
    """Read chunks by threads, for a storage that answers on the calling thread.

    Small chunks are read by one thread for as long as it does not wait for the disk.

    Raises:
        What reading, or ``take``, raises; other chunks may have been taken.

    Cancellation: after the chunks that are being read.
    """
    count, start = len(coords), 0
    small = chunk_bytes < _SMALL_BYTES

    def read(start: int, stop: int) -> bool:
        """Take chunks; return whether the disk had to be waited for often."""
        before = _waits_of_this_thread()
        for index in range(start, stop):
            take(index, chunks.read(path, coords[index]))
        return _waits_of_this_thread() - before > (stop - start) // 4

    waits = not small or sys.platform != "linux"
    while start < count and not waits:
        stop = min(start + _SLICE, count)
        waits = await anyio.to_thread.run_sync(read, start, stop)
        start = stop
    step = max(1, min(_SLICE // _THREADS, _SMALL_BYTES // max(chunk_bytes, 1)))

    async def read_part(first: int) -> None:
        await anyio.to_thread.run_sync(read, first, min(first + step, count))

    limit = max(2, min(_THREADS, _MEMORY_BYTES // max(chunk_bytes, 1)))
    await bounded_map(read_part, range(start, count, step), limit=limit)


async def read_there(
    workspace: Workspace, path: str, coords: list[Coordinates], take: Take, *, chunk_bytes: int
) -> None:
    """Read chunks with many requests at once, and hand them over some at a time.

    Errors and cancellation as `read_here`.
    """
    come: list[tuple[int, bytes | memoryview | None]] = []

    def hand_over(some: list[tuple[int, bytes | memoryview | None]]) -> None:
        for index, data in some:
            take(index, data)

    async def read(index: int) -> None:
        nonlocal come
        come.append((index, await workspace.read_chunk(path, coords[index])))
        if len(come) * chunk_bytes > _LOOP_BYTES:
            some, come = come, []
            await anyio.to_thread.run_sync(hand_over, some)

    own: int = zarr.config.get("async.concurrency")
    limit = max(own, min(_MOST_REQUESTS, _MEMORY_BYTES // max(chunk_bytes, 1)))
    await bounded_map(read, range(len(coords)), limit=limit)
    hand_over(come)
