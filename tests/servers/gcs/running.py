"""Start the server as a process, wait until it is ready, and end it in any case."""

from __future__ import annotations

import json
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from tests.servers.process import ServerProcess, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ANONYMOUS", "RunningServer", "serving"]

ANONYMOUS: Final = "anonymous"
"""As a token: none."""

_ROOT: Final = Path(__file__).parents[3]


class RunningServer(ServerProcess):
    """A process of the server; it can be stopped and started again at the same address."""

    def __init__(self, log: Path, *, journal: Path | None = None, **options: int) -> None:
        """Start nothing yet; what the process prints goes to ``log``."""
        port = free_port()
        command = [sys.executable, "-m", "tests.servers.gcs.json_api", "--port", str(port)]
        if journal is not None:
            command += ["--journal", str(journal)]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        super().__init__(command, port, log, {"PYTHONPATH": str(_ROOT)})

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.endpoint

    def restart(self) -> None:
        """Kill the process, and start it again at the same address."""
        self.stop(kill=True)
        self.start()

    def call(self, method: str, path: str, document: object = None) -> Any:
        """Send a request and answer its document."""
        body = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(self.url + path, data=body, method=method)  # noqa: S310
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - loopback
            text = answer.read()
        return json.loads(text) if text else None

    def make_bucket(self, name: str) -> str:
        """Create a bucket and answer its name."""
        self.call("POST", "/storage/v1/b?project=tests", {"name": name})
        return name

    def set_tokens(self, **tokens: str) -> None:
        """Say which bearer tokens are ``valid``, ``expired`` or ``denied``."""
        self.call("POST", "/_test/tokens", tokens)

    def requests(self) -> list[str]:
        """Return method and target of all requests since the last time."""
        found: list[str] = self.call("GET", "/_test/requests")
        self.call("DELETE", "/_test/requests")
        return found

    def hold(self, bucket: str, name: str, *, held: bool) -> None:
        """Keep an object from being deleted or replaced, or let it go."""
        path = f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}"
        self.call("PATCH", path, {"temporaryHold": held})


@contextmanager
def serving(folder: Path, *, durable: bool = False, **options: int) -> Iterator[RunningServer]:
    """Run a server for the length of the block."""
    journal = folder / "journal" if durable else None
    server = RunningServer(folder / "server.log", journal=journal, **options)
    server.start()
    try:
        yield server
    finally:
        server.stop()
