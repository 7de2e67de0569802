"""`icechunk-async serve` as a process, and what it logged."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Server", "serving"]

_LINE = re.compile(r"^\S+ \S+ (\S+) (GET|HEAD|OPTIONS) (\S+) (\d+) ", re.MULTILINE)


@dataclass
class Server:
    """A server that runs."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def requests(self, least: int = 0) -> list[tuple[str, str, str, int]]:
        """Return principal, method, target and status of all requests since the last call.

        Wait for ``least`` of them: the server writes a line when the client has its bytes already.
        """
        deadline = time.monotonic() + 240
        text = self.log.read_text(encoding="utf-8")
        while len(_LINE.findall(text)) < least and time.monotonic() < deadline:
            time.sleep(0.01)
            text = self.log.read_text(encoding="utf-8")
        self.log.write_text("", encoding="utf-8")  # the server appends
        return [(it[1], it[2], it[3], int(it[4])) for it in _LINE.finditer(text)]


@contextmanager
def serving(repository: Path, directory: Path, *arguments: str) -> Iterator[Server]:
    """Serve a repository on loopback for the length of the block."""
    log = directory / "access.log"
    program = Path(sys.executable).with_name("icechunk-async")
    command = [str(program), "serve", str(repository), "--port", "0", "--json", *arguments]
    with (
        log.open("ab") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text(encoding="utf-8")
            yield Server(json.loads(line)["url"], process, log)
        finally:
            process.terminate()
            process.wait(60)
