"""Run a gateway with uvicorn until a signal ends it."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from icechunk_async.errors import InvalidInputError, MissingDriverError

if TYPE_CHECKING:
    from collections.abc import Generator

    from icechunk_async.gateway.app import Gateway

__all__ = ["listening", "run", "url_of"]

# As uvicorn's own default.
_BACKLOG: Final = 2048
_LONGEST_HEAD: Final = 64 << 10
"""Bytes of a request's line and headers; the gateway refuses less in a sentence."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def listening(host: str, port: int) -> Generator[socket.socket]:
    """Listen for the length of the block; clients wait until `run` serves them.

    Args:
        host: a name or an address.
        port: 0 for a free one.

    Raises:
        InvalidInputError: the address is taken, not of this machine, or no address.
        MissingDriverError: uvicorn is not installed.
    """
    _uvicorn()
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise _cannot_listen(host, port, error) from error
    with listener:
        try:
            # A restarted server would else wait minutes for connections of the last one to time
            # out.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        yield listener


def _cannot_listen(host: str, port: int, error: Exception) -> InvalidInputError:
    why = getattr(error, "strerror", None) or str(error)
    return InvalidInputError(
        f"Port {port} of {host!r} cannot be listened at: {why}. Choose another with --port (0 for "
        "any that is free) and --host."
    )


def url_of(listener: socket.socket) -> str:
    """Return the URL of a server that listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def run(gateway: Gateway, listener: socket.socket, *, deadline_seconds: float) -> None:
    """Serve until SIGINT or SIGTERM comes, or the task is cancelled; then finish what runs.

    A second signal ends it at once. ``deadline_seconds`` is how long requests that run may take
    after the first.

    Raises:
        KeyboardInterrupt: it was SIGINT.
    """
    uvicorn = _uvicorn()

    class Server(uvicorn.Server):  # type: ignore[misc, name-defined]
        """One whose signals end it and then leave the process to its program."""

        should_exit: bool
        force_exit: bool
        interrupted = False

        @contextmanager
        def capture_signals(self) -> Generator[None]:
            """Stop at a signal, and at the second one at once."""
            loop = asyncio.get_running_loop()

            def stop(number: signal.Signals) -> None:
                # The second signal finds `should_exit` set by the first.
                self.force_exit = self.should_exit
                self.should_exit = True
                self.interrupted = number == signal.SIGINT

            before = {number: signal.getsignal(number) for number in _SIGNALS}
            for number in _SIGNALS:
                loop.add_signal_handler(number, stop, number)
            try:
                yield
            finally:
                for number in _SIGNALS:
                    loop.remove_signal_handler(number)
                    signal.signal(number, before[number])

    config = uvicorn.Config(
        gateway,
        http=_bounded_protocol(),
        access_log=False,  # the gateway's own knows principals
        log_level="warning",
        lifespan="off",  # the program opened it
        server_header=False,
        proxy_headers=False,  # nothing here asks where a client is
        timeout_graceful_shutdown=max(1, int(deadline_seconds)),
    )
    server = Server(config)
    # What was loaded to serve lives as long as the server: looking through it again and again for
    # garbage takes a tenth of the time of a request.
    gc.collect()
    gc.freeze()
    try:
        await server.serve(sockets=[listener])
    finally:
        gc.unfreeze()
    if server.interrupted:
        raise KeyboardInterrupt


def _bounded_protocol() -> Any:
    """Return uvicorn's faster protocol, with a limit to the bytes of a request's head.

    It takes half of the processor time of the other one, which has a limit, and collects a head
    of any length.
    """
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol  # noqa: PLC0415 -- optional

    class Protocol(HttpToolsProtocol):
        """One that answers 400 to a head that does not end."""

        in_head = True
        head_bytes = 0

        def on_message_begin(self) -> None:
            """Begin a head."""
            self.in_head, self.head_bytes = True, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            """End it."""
            self.in_head = False
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            """Count what came of a head that is not complete."""
            # The parser first: what completes the head in this piece must not count.
            super().data_received(data)
            if self.in_head and not self.transport.is_closing():
                self.head_bytes += len(data)
                if self.head_bytes > _LONGEST_HEAD:
                    self.send_400_response("The head of the request is too long.")

    return Protocol


def _uvicorn() -> Any:
    try:
        import httptools  # noqa: F401, PLC0415 # pyright: ignore[reportUnusedImport]
        import uvicorn  # noqa: PLC0415 -- of the extra "serve"
    except ModuleNotFoundError as error:
        raise MissingDriverError(
            f"Serving needs {error.name}, which is not installed. Install it with: pip install "
            "'icechunk-async[serve]'",
            module=error.name,
        ) from error
    return uvicorn
