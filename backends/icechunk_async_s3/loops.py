"""One connection for each event loop that uses a storage, made when the loop first asks."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from icechunk_async.errors import StorageClosedError
from icechunk_async_s3.wiring import Connection, connect, prepare, rewire

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from icechunk_async_s3.options import Options, Place
    from icechunk_async_s3.routes import Route
    from icechunk_async_s3.wiring import Wiring

__all__ = ["Connections"]


class _Entry:
    """What one loop has. Only its own loop touches it, but for closing."""

    def __init__(self, wiring: asyncio.Future[Wiring]) -> None:
        self.wiring = wiring
        self.keeper: AsyncGenerator[Connection] | None = None
        self.connection: Connection | None = None


class Connections:
    """The connections of one storage, by event loop."""

    def __init__(self, place: Place, options: Options) -> None:
        """Make none yet."""
        self._place = place
        self._options = options
        self._route: Route | None = None  # found out by the loop that comes first
        self._entries: dict[asyncio.AbstractEventLoop, _Entry] = {}
        self._lock = threading.Lock()  # held over no await
        self._closed = False

    def check_open(self) -> None:
        """Refuse use after the end.

        Raises:
            StorageClosedError: the storage's block has ended.
        """
        if self._closed:
            raise StorageClosedError(
                f"{self._place.url!r} was used after its 'async with' block ended. Open it again."
            )

    async def here(self) -> Connection:
        """Return the connection of the running loop.

        Raises:
            StorageClosedError: the storage's block has ended.
            InvalidInputError: no client can be made with these options.

        Cancellation: what was begun goes on on its thread, for the next who asks.
        """
        self.check_open()
        loop = asyncio.get_running_loop()
        entry = self._entries.get(loop)
        if entry is not None and entry.connection is not None:
            return entry.connection
        if entry is None:
            entry = self._begin(loop)
        try:
            wiring = await asyncio.shield(entry.wiring)
        except Exception:
            with self._lock:
                self._entries.pop(loop, None)
            raise
        self.check_open()
        self._route = wiring.route
        if entry.connection is None:  # making it does not wait, so nobody comes in between
            entry.keeper = connect(wiring, self._options)
            entry.connection = await anext(entry.keeper)
        return entry.connection

    def _begin(self, loop: asyncio.AbstractEventLoop) -> _Entry:
        with self._lock:
            for other in [it for it in self._entries if it.is_closed()]:
                del self._entries[other]
            entry = _Entry(self._wire(loop))
            self._entries[loop] = entry
            return entry

    def _wire(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Wiring]:
        options, bucket = self._options, self._place.bucket
        if self._route is not None and (wiring := rewire(self._route, options, bucket)):
            known: asyncio.Future[Wiring] = loop.create_future()
            known.set_result(wiring)
            return known
        return loop.run_in_executor(None, partial(prepare, options, bucket))

    async def close(self) -> None:
        """Close the connection of this loop, and have other loops close theirs.

        They are not waited for: a loop that is blocked would never answer.
        """
        self._closed = True
        here = asyncio.get_running_loop()
        with self._lock:
            entries, self._entries = self._entries, {}
        for loop, entry in entries.items():
            keeper = entry.keeper
            if keeper is None or loop.is_closed():
                continue
            if loop is here:
                await keeper.aclose()
                continue
            with suppress(RuntimeError):  # it has ended just now, and closed its generators
                loop.call_soon_threadsafe(_begin_closing, loop, keeper)


_closing: set[asyncio.Task[None]] = set()
"""Keeps the tasks alive: a loop does not."""


def _begin_closing(loop: asyncio.AbstractEventLoop, keeper: AsyncGenerator[Connection]) -> None:
    # Made only here: a loop that stopped without being closed never gets to it.
    task = loop.create_task(_close(keeper))
    _closing.add(task)
    task.add_done_callback(_closing.discard)


async def _close(keeper: AsyncGenerator[Connection]) -> None:
    with suppress(RuntimeError):  # the loop itself is closing it
        await keeper.aclose()
