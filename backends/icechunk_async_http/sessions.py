"""One HTTP session for each event loop that uses a storage, made when the loop first asks."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import aiohttp

from icechunk_async.errors import StorageClosedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

__all__ = ["Sessions"]


class Sessions:
    """The sessions of one storage, by event loop.

    Each is held by an asynchronous generator: a loop that ends first closes its generators, and
    with them its connections.
    """

    def __init__(self, name: str, timeout: aiohttp.ClientTimeout) -> None:
        """Make none yet."""
        self._name = name
        self._timeout = timeout
        self._lock = threading.Lock()  # held over no await
        self._held: dict[
            asyncio.AbstractEventLoop,
            tuple[AsyncGenerator[aiohttp.ClientSession], aiohttp.ClientSession],
        ] = {}
        self.closed = False

    def check_open(self) -> None:
        """Refuse use after the end.

        Raises:
            StorageClosedError: the storage's block has ended.
        """
        if self.closed:
            raise StorageClosedError(
                f"{self._name} was used after its 'async with' block ended. Open it again."
            )

    async def here(self) -> aiohttp.ClientSession:
        """Return the session of the running loop."""
        self.check_open()
        loop = asyncio.get_running_loop()
        held = self._held.get(loop)
        if held is None:
            keeper = self._keep()
            held = (keeper, await anext(keeper))  # making it does not wait
            with self._lock:
                for other in [it for it in self._held if it.is_closed()]:
                    del self._held[other]
                self._held[loop] = held
        return held[1]

    async def close(self) -> None:
        """Close this loop's session, and have the other loops close theirs without waiting."""
        self.closed = True
        here = asyncio.get_running_loop()
        with self._lock:
            all_held, self._held = self._held, {}
        for loop, (keeper, _) in all_held.items():
            if loop is here:
                await keeper.aclose()
            elif not loop.is_closed():
                closing = _close(keeper)
                try:
                    asyncio.run_coroutine_threadsafe(closing, loop)
                except RuntimeError:  # it has ended just now, and closed its generators
                    closing.close()

    async def _keep(self) -> AsyncGenerator[aiohttp.ClientSession]:
        async with aiohttp.ClientSession(
            # What bounds requests is the caller's budget; a queue here would only hide it.
            connector=aiohttp.TCPConnector(limit=0),
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
        ) as session:
            yield session


async def _close(keeper: AsyncGenerator[aiohttp.ClientSession]) -> None:
    with suppress(RuntimeError):  # the loop itself is closing it
        await keeper.aclose()
