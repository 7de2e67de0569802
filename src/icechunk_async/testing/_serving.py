"""A stream server on a separate thread and event loop, which stops when told to."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    type Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

__all__ = ["HOST", "ServerThread"]

HOST: Final = "127.0.0.1"
_START_SECONDS: Final = 30.0
_LOOKS: Final = 100
_LOOK_SECONDS: Final = 0.02


class ServerThread:
    """Serves each connection with a coroutine function, within ``with`` or ``async with``.

    At the end of the block running handlers are cancelled, every connection is closed and the
    thread has ended, also when the block is cancelled. It can be entered again, and then listens on
    the same port.
    """

    def __init__(self, serve: Serve, *, limit_bytes: int) -> None:
        """Nothing is opened yet. ``limit_bytes`` is that of each stream's buffer."""
        self.port: int | None = None
        self._serve_connection = serve
        self._limit = limit_bytes
        self._connections: set[asyncio.Task[None]] = set()
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], object] = lambda: None

    def __enter__(self) -> Self:
        """Start; returns when the port is open. Blocks."""
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(ready,), name="server-thread", daemon=True
        )
        self._thread.start()
        ready.result(_START_SECONDS)
        return self

    def __exit__(self, *error: object) -> None:
        """End every connection, and the thread. Blocks."""
        if self._thread is not None:
            self._stop()
            self._thread.join()
            self._thread = None

    async def __aenter__(self) -> Self:
        """Start, without blocking the loop.

        Cancellation: nothing is left running.
        """
        try:
            await _in_thread(self.__enter__)
        except BaseException:
            await _in_thread(self.__exit__)
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        """End every connection, and the thread, also while being cancelled."""
        await _in_thread(self.__exit__)

    def _run(self, ready: Future[None]) -> None:
        try:
            asyncio.run(self._serve(ready))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def _serve(self, ready: Future[None]) -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        # Races connect hundreds of times at once; a full queue of connections would be a fault that
        # no plan asked for.
        server = await asyncio.start_server(
            self._connection, HOST, self.port or 0, limit=self._limit, backlog=1024
        )
        # Kept for the next time: a server that comes back is found where it was.
        self.port = server.sockets[0].getsockname()[1]
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        ready.set_result(None)
        try:
            await stop.wait()
        finally:
            await _accepted()
            server.close()
            await self._end_connections()

    async def _end_connections(self) -> None:
        """Cancel the handlers; one accepted last may still start, and is then cancelled."""
        cancelled = set[asyncio.Task[None]]()
        for _ in range(_LOOKS):  # what is left then ends with the loop
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if not others:
                break
            for task in self._connections - cancelled:
                task.cancel()
                cancelled.add(task)
            await asyncio.wait(others, timeout=_LOOK_SECONDS)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # the stream server starts one for each connection
        self._connections.add(task)
        try:
            await self._serve_connection(reader, writer)
        except asyncio.CancelledError:
            # Only the end of serving cancels it. Python 3.12 complains of connections that end
            # as cancelled, and waits for what nobody will read any more.
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            writer.close()


async def _accepted() -> None:
    """Let accepted connections start; Python 3.12 loses them if a server closes."""
    for _ in range(_LOOKS):
        coroutines = (task.get_coro() for task in asyncio.all_tasks())
        if not any(getattr(it, "__name__", "") == "_accept_connection2" for it in coroutines):
            break
        await asyncio.sleep(0)


async def _in_thread(work: Callable[[], object]) -> None:
    """Do blocking work on a thread and wait for its end, also while being cancelled."""
    done = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled: asyncio.CancelledError | None = None
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        done.exception()  # seen: being cancelled goes first
        raise cancelled
    done.result()
