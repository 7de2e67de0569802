"""moto with one lock around every change, run as a program: ``locked_moto.py PORT``.

moto checks a condition and then writes, with other threads in between. One lock makes both one
step, and reads wait for it too, so that they see whole objects.
"""

from __future__ import annotations

import io
import sys
from threading import Lock
from typing import TYPE_CHECKING, Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Locked:
    """Passes one request at a time on, and only after its body has come whole."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self._lock = Lock()

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Return one request."""
        length = int(environ.get("CONTENT_LENGTH") or 0)
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
        with self._lock:
            return [b"".join(self._application(environ, start_response))]


class Handler(WSGIRequestHandler):
    """Keeps connections open, and says nothing."""

    protocol_version = "HTTP/1.1"

    def log_request(self, *_: Any) -> None:
        """Print no line for each request."""


if __name__ == "__main__":
    run_simple(
        "127.0.0.1",
        int(sys.argv[1]),
        Locked(DomainDispatcherApplication(create_backend_app)),
        threaded=True,
        request_handler=Handler,
    )
