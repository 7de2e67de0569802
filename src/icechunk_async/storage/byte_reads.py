"""Reading bytes alone: what a storage may answer faster than the state of their object."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["ByteReads"]


@runtime_checkable
class ByteReads(Protocol):
    """Also answers bytes of objects that never change, without the objects' versions.

    An addition to :class:`~icechunk_async.storage.BlockingStorage`. Both methods answer exactly
    the bytes ``[start, stop)`` or None; then the caller asks ``get_blocking`` or ``get``, which
    also tell what is wrong. Callable from any thread, also at the same time.
    """

    def read_bytes(self, key: str, start: int, stop: int) -> bytes | memoryview | None:
        """Answer bytes of an object, on this thread."""
        ...

    def read_bytes_at_once(self, key: str, start: int, stop: int) -> bytes | memoryview | None:
        """Answer bytes of an object that are in memory; None where that would mean waiting.

        An event loop may call it. None is also the answer after many reads in a row, so that
        others on the loop get their turn with what the caller awaits instead.
        """
        ...
