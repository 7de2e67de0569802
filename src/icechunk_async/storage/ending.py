"""The end of a storage's use, for the error about a use after it."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

from icechunk_async.errors import StorageClosedError

__all__ = ["Ending"]


class Ending:
    """Whether the block of a storage ended by itself, or with its event loop.

    A storage makes one when it is closed. A repository that was opened with ``await`` has no block,
    so advice about one would not help.
    """

    def __init__(self) -> None:
        """Look at what ends; call it on the event loop that closes the storage."""
        # A loop that ends cancels its tasks and closes generators; a block that ends raises nothing
        # of that kind.
        self._left = isinstance(sys.exception(), asyncio.CancelledError | GeneratorExit)
        self._loop: asyncio.AbstractEventLoop | None = None
        with suppress(RuntimeError):  # a generator that is collected when no loop runs any more
            self._loop = asyncio.get_running_loop()

    def error(self, shown: str) -> StorageClosedError:
        """Return the error for a use after the end.

        Args:
            shown: the storage as messages show it.
        """
        # A block that was cancelled ended as well, and its loop runs on.
        if self._left and (self._loop is None or self._loop.is_closed()):
            return StorageClosedError(
                f"{shown} was used after its event loop ended, which closed it. Open it again on "
                "the event loop that uses it, or use one loop for both."
            )
        return StorageClosedError(
            f"{shown} was used after its 'async with' block ended. Open it again."
        )
