"""Read and write beside computing: the blocks of a task, a few of them at a time.

A task that reads a block, computes and writes it, one after the other, waits twice for the storage
for each block. Here a few threads read the next blocks and write the last ones meanwhile. The
computation itself stays on the thread of the caller, one block at a time and in order.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    import numpy.typing as npt

    type Block = npt.NDArray[Any]

__all__ = ["AHEAD_BYTES", "compute_blocks"]

AHEAD_BYTES: Final = 64 << 20
"""Decoded bytes of a task that are read ahead or wait to be written."""
_MOST_BLOCKS: Final = 4
_THREADS: Final = 8


def compute_blocks[T](
    places: Sequence[T],
    reads: Callable[[T], Sequence[Callable[[], Block]]],
    fn: Callable[..., Block | None],
    write: Callable[[T, Block], object],
) -> None:
    """Read, compute and write blocks.

    Args:
        places: of the blocks, in the order of computing.
        reads: returns a function for each input of a place, which reads it; called on threads.
        fn: called with the inputs of a place, on this thread; returns the block to write, whose
            memory it may use again, or None to write nothing.
        write: called on a thread with a place and its block.

    Raises:
        Exception: the first error of any of them. Blocks before it may have been written.

    Memory: the block that is computed, or the last one while the next is awaited, and up to
    `AHEAD_BYTES` of others. Where two blocks with their inputs are more than that, nothing
    overlaps.
    """
    if not places:
        return
    inputs = [read() for read in reads(places[0])]
    found = fn(*inputs)
    size = sum(it.nbytes for it in inputs) + (0 if found is None else np.asarray(found).nbytes)
    if found is not None:
        write(places[0], found)
    room = min(_MOST_BLOCKS, len(places) - 1, AHEAD_BYTES // max(1, size))
    del inputs, found
    if room < 1:
        for place in places[1:]:
            found = fn(*(read() for read in reads(place)))
            if found is not None:
                write(place, found)
        return
    pool = ThreadPoolExecutor(_THREADS, "icechunk-blocks")
    try:
        _overlapped(pool, places[1:], reads, fn, write, room=room)
    finally:
        # After an error nobody waits for reads that have not started; the others end first.
        pool.shutdown(cancel_futures=True)


def _overlapped[T](
    pool: ThreadPoolExecutor,
    places: Sequence[T],
    reads: Callable[[T], Sequence[Callable[[], Block]]],
    fn: Callable[..., Block | None],
    write: Callable[[T, Block], object],
    *,
    room: int,
) -> None:
    written: deque[tuple[Future[object], int]] = deque()
    for place, inputs in _ahead(pool, places, reads, room):
        found = fn(*inputs)
        if found is None:
            continue
        size = np.asarray(found).nbytes
        # Blocks may be larger than the first, which may have been none.
        while written and (len(written) >= room or _bytes(written) + size > AHEAD_BYTES):
            written.popleft()[0].result()
        # A copy: the function may return the same memory for the next block.
        written.append((pool.submit(write, place, np.array(found)), size))
    for future, _ in written:
        future.result()


def _bytes(written: Iterable[tuple[object, int]]) -> int:
    return sum(size for _, size in written)


def _ahead[T](
    pool: ThreadPoolExecutor,
    places: Sequence[T],
    reads: Callable[[T], Sequence[Callable[[], Block]]],
    room: int,
) -> Iterator[tuple[T, list[Block]]]:
    """Return the inputs of each place in order, while those of the next `room` places are read."""
    begun: deque[tuple[T, list[Future[Block]]]] = deque()
    rest = iter(places)
    while True:
        while len(begun) <= room and (place := next(rest, None)) is not None:
            begun.append((place, [pool.submit(read) for read in reads(place)]))
        if not begun:
            return
        place, futures = begun.popleft()
        yield place, [it.result() for it in futures]
