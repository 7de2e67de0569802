"""File systems of fsspec whose writes are what a service's are: whole, and exclusive on request.

fsspec's own for memory and local disks look first and write then, so nothing is written there.
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped, unused-ignore]
from fsspec.implementations.memory import (  # type: ignore[import-untyped, unused-ignore]
    MemoryFile,
    MemoryFileSystem,
)

__all__ = ["ExclusiveLocal", "ExclusiveMemory"]


class ExclusiveMemory(MemoryFileSystem):  # type: ignore[misc, unused-ignore]
    """The objects of fsspec's memory, created and replaced under a lock."""

    lock = threading.Lock()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write one object in one step."""
        path = self._strip_protocol(path)
        made = MemoryFile(self, path, value)
        with self.lock:
            if mode == "create" and path in self.store:
                raise FileExistsError(path)
            self.store[path] = made


class ExclusiveLocal(LocalFileSystem):  # type: ignore[misc, unused-ignore]
    """The files of fsspec's local disks, written aside and linked into place."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write one file in one step."""
        aside = Path(tempfile.gettempdir()) / f"{os.getpid()}-{threading.get_ident()}"
        aside.write_bytes(value)
        try:
            if mode == "create":
                Path(path).hardlink_to(aside)
            else:
                aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
