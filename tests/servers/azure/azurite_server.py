"""Azurite on a free loopback port: installed once from the lock file, started, stopped."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Final, override

from tests.servers.node import installed, node
from tests.servers.process import ServerProcess, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

ACCOUNT: Final = "devstoreaccount1"
# Every emulator has this key; it is no secret.
KEY: Final = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
_PACKAGES: Final = Path(__file__).parent / "azurite"


def install() -> Path:
    """Install it, unless that is done; return its program."""
    return installed(_PACKAGES) / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"


class Azurite(ServerProcess):
    """One server; with a folder it keeps its objects there, otherwise in memory.

    With a certificate it speaks TLS, and takes tokens as well as keys and signatures: it looks at
    their times, issuer and audience, and not at who signed them.
    """

    def __init__(
        self, log: Path, folder: Path | None = None, certificate: tuple[Path, Path] | None = None
    ) -> None:
        """Install it if that was not done, and start nothing yet.

        Args:
            log: where its output goes.
            folder: where it keeps its objects.
            certificate: files of a certificate and of its key.
        """
        port = free_port()
        place = ["--location", str(folder)] if folder else ["--inMemoryPersistence"]
        where = ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
        flags = ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        if certificate is not None:
            flags += ["--cert", str(certificate[0]), "--key", str(certificate[1])]
            flags += ["--oauth", "basic"]
        self._certificate = certificate
        keeping = ["--require", str(_PACKAGES / "keep_extents.js")]
        super().__init__([node(), *keeping, install(), *where, *place, *flags], port, log)

    @property
    @override
    def endpoint(self) -> str:
        """The address of the only account."""
        scheme = "http" if self._certificate is None else "https"
        return f"{scheme}://127.0.0.1:{self.port}/{ACCOUNT}"

    @override
    def _answers(self) -> bool:
        if self._certificate is None:
            return super()._answers()
        trusting = ssl.create_default_context(cafile=self._certificate[0])
        try:
            with (
                socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection,
                trusting.wrap_socket(connection, server_hostname="127.0.0.1"),
            ):
                return True
        except OSError:
            return False


@contextlib.contextmanager
def running(
    log: Path, folder: Path | None = None, certificate: tuple[Path, Path] | None = None
) -> Iterator[Azurite]:
    """Run a server for the length of the block."""
    server = Azurite(log, folder, certificate)
    server.start()
    try:
        yield server
    finally:
        server.stop()
