"""The same work in one process, in a pool of processes and on Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from icechunk_async.spark.ingest.tasks import FileWork, ScanOptions, scan_files
from icechunk_async.spark.shared import SharedRepository

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.sync import ForkSession, Repository

__all__ = ["compute", "compute_part", "leave", "scan_part", "warm"]


def compute(block: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Compute something that takes a little longer than storing it."""
    return np.asarray(np.sin(block) * np.sqrt(np.abs(block)) + np.tanh(block), "f4")


def leave() -> None:
    """Leave a chunk unchanged."""


def compute_part(fork: ForkSession, source: str, target: str, part: int, parts: int) -> ForkSession:
    """Compute every so many-th chunk along the first axis."""
    read: Any = zarr.open_array(fork.store, path=source, mode="r")
    write: Any = zarr.open_array(fork.store, path=target, mode="r+")
    size = read.chunks[0]
    for start in range(part * size, read.shape[0], parts * size):
        write[start : start + size] = compute(read[start : start + size])
    return fork


def scan_part(repository: Repository, files: Sequence[str]) -> int:
    """Scan files for references to their chunks; return the number of files."""
    work = FileWork(ScanOptions(), tuple((it, None) for it in files))
    found = SharedRepository.of(repository).ask(lambda native: scan_files(native, work))
    assert not any(found["reason"])
    return len(found["location"])


def warm(_: int) -> None:
    """Import what the work needs."""
    compute(np.zeros(1, "f4"))
