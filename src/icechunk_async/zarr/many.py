"""Read or write many chunks of one array with one call.

Where the storage answers on the calling thread, threads work on chunk after chunk. Elsewhere many
requests are under way at once, and chunks are handed over as they come.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread
import zarr

from icechunk_async._runtime.concurrency import bounded_map

# Other systems count waits for whole processes only.
if sys.platform == "linux":
    import resource

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.engine.tree.blocking import BlockingChunks
    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.manifest.chunk import Coordinates

    type Take = Callable[[int, bytes | memoryview | None], None]
    type Make = Callable[[int], bytes | memoryview | None]

__all__ = ["on_threads", "read_on_loop", "read_on_threads", "write_on_loop", "write_on_threads"]

_MEMORY_BYTES: Final = 64 << 20
"""Memory for chunks that are under way, unless Zarr's own limit allows more."""
_MOST_REQUESTS: Final = 64
_THREADS: Final = 8
_SMALL_BYTES: Final = 64 << 10
"""Threads that work on smaller chunks mostly wait for each other: for the interpreter."""
_SLICE: Final = 128
"""Small chunks that a thread works on before cancellation is looked at."""
_LOOP_BYTES: Final = 128 << 10
"""Up to this size chunks are decoded and encoded on the event loop; a thread takes more."""


def _waits_of_this_thread() -> int:
    """Return how often the calling thread has given up the processor to wait for something."""
    if sys.platform == "linux":
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    return 0


async def on_threads(work: Callable[[int], None], count: int, *, chunk_bytes: int) -> None:
    """Call ``work`` with each number below ``count``, on threads.

    One thread works on small chunks for as long as it does not wait for the disk.

    Raises:
        What ``work`` raises; other chunks may be done.

    Cancellation: after the chunks that are being worked on.
    """

    def run(start: int, stop: int) -> bool:
        """Return whether the disk had to be waited for often."""
        before = _waits_of_this_thread()
        for index in range(start, stop):
            work(index)
        return _waits_of_this_thread() - before > (stop - start) // 4

    # Whether a disk has to be waited for cannot be known beforehand, as the page cache may have all
    # of it. So one thread begins, and others join once it was made to wait often.
    start = 0
    waits = chunk_bytes >= _SMALL_BYTES or sys.platform != "linux"
    while start < count and not waits:
        stop = min(start + _SLICE, count)
        waits = await anyio.to_thread.run_sync(run, start, stop)
        start = stop
    # Several small chunks a hop, as the hop costs more than one of them; at most 16, so that a
    # short list still keeps all threads busy.
    step = max(1, min(_SLICE // _THREADS, _SMALL_BYTES // max(chunk_bytes, 1)))

    async def run_some(first: int) -> None:
        await anyio.to_thread.run_sync(run, first, min(first + step, count))

    # Two at least, however large chunks are: one waits for the disk while the other decodes.
    limit = max(2, min(_THREADS, _MEMORY_BYTES // max(chunk_bytes, 1)))
    await bounded_map(run_some, range(start, count, step), limit=limit)


async def read_on_threads(
    chunks: BlockingChunks, path: str, coords: list[Coordinates], take: Take, *, chunk_bytes: int
) -> None:
    """Read chunks on threads, and hand each over there; see `on_threads`."""

    def read(index: int) -> None:
        take(index, chunks.read(path, coords[index]))

    await on_threads(read, len(coords), chunk_bytes=chunk_bytes)


async def write_on_threads(
    chunks: BlockingChunks, path: str, coords: list[Coordinates], make: Make, *, chunk_bytes: int
) -> list[int]:
    """Write chunks on threads, see `on_threads`; return the numbers of those without bytes."""
    empty: list[int] = []

    def write(index: int) -> None:
        data = make(index)
        # `append` needs no lock: it is one step of the interpreter.
        if data is None:
            empty.append(index)
        else:
            chunks.write(path, coords[index], data)

    await on_threads(write, len(coords), chunk_bytes=chunk_bytes)
    return empty


def _requests_at_once(chunk_bytes: int) -> int:
    # A program that sets Zarr's own limit higher than ours wants that many, and has the memory.
    own: int = zarr.config.get("async.concurrency")
    return max(own, min(_MOST_REQUESTS, _MEMORY_BYTES // max(chunk_bytes, 1)))


async def read_on_loop(
    workspace: Workspace, path: str, coords: list[Coordinates], take: Take, *, chunk_bytes: int
) -> None:
    """Read chunks with many requests at once, and hand them over some at a time.

    Raises:
        What reading, or ``take``, raises; other chunks may have been taken.

    Cancellation: some chunks were taken.
    """
    come: list[tuple[int, bytes | memoryview | None]] = []

    def hand_over(some: list[tuple[int, bytes | memoryview | None]]) -> None:
        for index, data in some:
            take(index, data)

    async def read(index: int) -> None:
        nonlocal come
        come.append((index, await workspace.read_chunk(path, coords[index])))
        # Handed over in groups: a hop to a thread costs more than decoding a small chunk.
        if len(come) * chunk_bytes > _LOOP_BYTES:
            # No await since the chunk was added: each chunk is handed over by exactly one task.
            some, come = come, []
            await anyio.to_thread.run_sync(hand_over, some)

    await bounded_map(read, range(len(coords)), limit=_requests_at_once(chunk_bytes))
    # On the loop: what is left is smaller than a hop is worth.
    hand_over(come)


async def write_on_loop(
    workspace: Workspace, path: str, coords: list[Coordinates], make: Make, *, chunk_bytes: int
) -> list[int]:
    """Write chunks with many requests at once; return the numbers of those without bytes.

    Raises:
        What writing, or ``make``, raises; other chunks may be written.

    Cancellation: some chunks are written.
    """
    empty: list[int] = []

    async def write(index: int) -> None:
        small = chunk_bytes <= _LOOP_BYTES
        data = make(index) if small else await anyio.to_thread.run_sync(make, index)
        if data is None:
            empty.append(index)
        else:
            await workspace.write_chunk(path, coords[index], data)

    await bounded_map(write, range(len(coords)), limit=_requests_at_once(chunk_bytes))
    return empty
