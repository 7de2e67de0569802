"""A server as a process on loopback: started, waited for, stopped, its output kept."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["ServerProcess", "free_port"]

_START_SECONDS: Final = 90.0
_STOP_SECONDS: Final = 10.0


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class ServerProcess:
    """A process that answers HTTP on a port of loopback; it can be stopped and started again.

    All its methods block.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        port: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start nothing yet; what the process prints goes to ``log``."""
        self.port = port
        self._command = command
        self._log = log
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and return when it answers."""
        with self._log.open("ab") as log:
            process = self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONWARNINGS": "", **self._environment},
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"{self._command[0]} did not start:\n{self.tail()}")
            time.sleep(0.05)  # between looks whether it is there

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.settimeout(5)
                connection.sendall(b"GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                return connection.recv(5) == b"HTTP/"
        except OSError:
            return False

    def stop(self, *, kill: bool = False) -> None:
        """End it, kindly or at once, and wait for its end."""
        process, self._process = self._process, None
        if process is None:
            return
        if kill:
            process.kill()
        else:
            process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def tail(self) -> str:
        """Return the end of what it printed."""
        if not self._log.exists():
            return ""
        return self._log.read_text(encoding="utf-8", errors="replace")[-4000:]
