"""Find TileDB's library of a release: in the wheel that is installed, or in one that pip downloads.

Only the library is taken out of wheels of other releases, so they need not fit this Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

__all__ = ["RELEASES", "NoWheelError", "downloaded_library", "installed_library"]

RELEASES: Final = {
    "0.5.9": ("37", (1, 7, 7), 4),
    "0.6.6": ("37", (2, 0, 8), 5),
    "0.7.7": ("37", (2, 1, 6), 6),
    "0.8.0": ("37", (2, 2, 2), 7),
    "0.8.11": ("37", (2, 2, 9), 8),
    "0.9.5": ("37", (2, 3, 3), 9),
    "0.10.5": ("37", (2, 4, 3), 10),
    "0.13.3": ("38", (2, 7, 2), 11),
    "0.14.5": ("39", (2, 8, 3), 12),
    "0.15.6": ("39", (2, 9, 5), 13),
    "0.16.5": ("39", (2, 10, 4), 14),
    "0.17.6": ("39", (2, 11, 3), 15),
    "0.18.3": ("39", (2, 12, 3), 16),
    "0.20.0": ("39", (2, 14, 0), 17),
    "0.21.6": ("39", (2, 15, 4), 18),
    "0.22.3": ("39", (2, 16, 3), 19),
    "0.23.5": ("311", (2, 17, 5), 20),
    "0.25.0": ("311", (2, 19, 0), 21),
    "0.36.1": ("312", (2, 30, 0), 22),
}
"""Releases of TileDB-Py: a Python that a wheel is for, TileDB's version, its format version."""
_PLATFORMS: Final = (
    "manylinux1", "manylinux2010", "manylinux2014", "manylinux_2_17", "manylinux_2_28",
)  # fmt: skip
_CACHE: Final = Path(os.environ.get("TILEDB_WHEELS", Path(tempfile.gettempdir()) / "tiledb-wheels"))


class NoWheelError(Exception):
    """There is no wheel of a release here, and none can be downloaded."""


def installed_library() -> str | None:
    """Return the library of the installed TileDB-Py; None if it is not installed."""
    try:
        files = distribution("tiledb").files or []
    except PackageNotFoundError:
        return None
    for it in files:
        if it.name.startswith("libtiledb-"):
            return str(it.locate())
    return None


def downloaded_library(release: str) -> str:
    """Return the library of a release, which is downloaded once.

    Raises:
        NoWheelError: it cannot be downloaded.
    """
    folder = _CACHE / release
    if not folder.exists():
        _download(release, folder)
    return str(next(folder.rglob("libtiledb-*.so*")))


def _download(release: str, folder: Path) -> None:
    python, _, _ = RELEASES[release]
    abi = f"cp{python}m" if python == "37" else f"cp{python}"
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary", ":all:", "--python-version", python, "--abi", abi),
            *(f"--platform={it}_x86_64" for it in _PLATFORMS),
            *("--dest", scratch, f"tiledb=={release}"),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", check=False
        )
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            raise NoWheelError(f"tiledb {release}: {done.stderr[-300:]}")
        with zipfile.ZipFile(wheels[0]) as archive:
            names = [it for it in archive.namelist() if "libs/" in it]
            partial = folder.with_suffix(".partial")
            archive.extractall(partial, names)
        partial.replace(folder)
