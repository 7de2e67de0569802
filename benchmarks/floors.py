"""The least work of any implementation, each part measured in a separate process."""

from __future__ import annotations

import marshal
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import zstandard

from benchmarks.machine import Meter

# Of a file of Icechunk, before its payload: magic, implementation, versions, type, compression.
_HEADER_BYTES = 39
# Of a .pyc file: magic, flags, and time and size of the source (PEP 552).
_CODE_HEADER_BYTES = 16
# zstd's default, which both engines use.
_LEVEL = 3


def read_manifest(directory: str) -> dict[str, float]:
    """Read the file of the largest manifest."""
    path = _largest(directory)
    with Meter(finds_memory=True) as meter:
        path.read_bytes()
    return meter.figures()


def decompress_manifest(directory: str) -> dict[str, float]:
    """Read the file of the largest manifest and decompress it."""
    path = _largest(directory)
    with Meter(finds_memory=True) as meter:
        _payload(path)
    return meter.figures()


def compress_manifest(directory: str) -> dict[str, float]:
    """Compress the largest manifest again, on one thread, and sync the file to the disk."""
    path = _largest(directory)
    payload = _payload(path)
    with tempfile.TemporaryDirectory(dir=directory) as folder, Meter(finds_memory=True) as meter:
        _write(Path(folder) / "manifest", zstandard.ZstdCompressor(level=_LEVEL).compress(payload))
    return meter.figures()


def write_manifest(directory: str) -> dict[str, float]:
    """Write the file of the largest manifest again, and sync it to the disk."""
    path = _largest(directory)
    data = path.read_bytes()
    with tempfile.TemporaryDirectory(dir=directory) as folder, Meter(finds_memory=True) as meter:
        _write(Path(folder) / "manifest", data)
    return meter.figures()


def compress_ids(count: int) -> dict[str, float]:
    """Make a random id for each chunk, and compress them."""
    with Meter(finds_memory=True) as meter:
        # Twelve bytes an id, which cannot be compressed: no engine gets by without them.
        zstandard.ZstdCompressor(level=_LEVEL).compress(os.urandom(12 * count))
    return meter.figures()


def load_code(module: str) -> dict[str, float]:
    """Load the compiled code of the modules that an import brings after zarr, and run none."""
    import_module("zarr")
    before = set(sys.modules)
    assert import_module(module).Repository
    came = [sys.modules[name] for name in set(sys.modules) - before]
    paths = [path for it in came if (path := getattr(it, "__cached__", None)) is not None]
    assert paths
    with Meter() as meter:
        for path in paths:
            marshal.loads(Path(path).read_bytes()[_CODE_HEADER_BYTES:])  # noqa: S302 -- our own
    return meter.figures()


def sync_a_file(directory: Path) -> None:
    """Write a small file and sync it to the disk, in this process."""
    _write(directory / "state", bytes(4096))


def _largest(directory: str) -> Path:
    files = (Path(directory) / "manifests").iterdir()
    return max(files, key=lambda it: it.stat().st_size)


def _payload(path: Path) -> bytes:
    frame = memoryview(path.read_bytes())[_HEADER_BYTES:]
    return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=True)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
