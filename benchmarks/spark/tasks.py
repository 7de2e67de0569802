"""The same work in one process, in a pool of processes and on Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import zarr
from pyarrow import parquet

from icechunk_async.spark.ingest.tasks import FileWork, ScanOptions, scan_files
from icechunk_async.spark.shared import SharedRepository
from icechunk_async.sync.xarray import open_dataset

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.arrow.datasets import ArrayFragment
    from icechunk_async.sync import ForkSession, Repository, Session

__all__ = [
    "compute",
    "compute_part",
    "leave",
    "rows_of_fragment",
    "rows_of_part",
    "scan_part",
    "values_of",
    "warm",
    "write_files",
]


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


def rows_of_part(session: Session, part: int, parts: int) -> tuple[float, float]:
    """Turn some days of `t` into rows; return the sum of its values, and that of its axes."""
    arrays = open_dataset(session, chunks=None)[["t"]]
    chunk = arrays["t"].encoding["preferred_chunks"]["day"]
    chunks = -(-arrays.sizes["day"] // chunk)
    start, stop = part * chunks // parts, (part + 1) * chunks // parts
    frame = arrays.isel(day=slice(start * chunk, stop * chunk)).to_dataframe().reset_index()
    return float(frame["t"].sum()), float((frame["day"] + frame["y"] + frame["x"]).sum())


def rows_of_fragment(fragment: ArrayFragment) -> Any:
    """Return the rows of a fragment of a dataset."""
    return fragment.to_table().to_pandas()


def values_of(file: str, shape: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return `t` of a file of rows, which are sorted for it, in days of some shape."""
    return _days(file, shape)[1]


def write_files(fork: ForkSession, path: str, files: Sequence[str]) -> ForkSession:
    """Write `t` of files, each of whole chunks, to an array."""
    array: Any = zarr.open_array(fork.store, path=path, mode="r+")
    for file in files:
        first, values = _days(file, array.shape[1:])
        array[first : first + len(values)] = values
    return fork


def _days(file: str, shape: Sequence[int]) -> tuple[int, npt.NDArray[np.float32]]:
    table: Any = cast("Any", parquet).read_table(file, columns=["day", "y", "x", "t"])
    ordered = table.sort_by([(it, "ascending") for it in ("day", "y", "x")])
    values = ordered.column("t").to_numpy().reshape(-1, *shape)
    return ordered.column("day")[0].as_py(), values


def scan_part(repository: Repository, files: Sequence[str]) -> int:
    """Scan files for references to their chunks; return the number of files."""
    work = FileWork(ScanOptions(), tuple((it, None) for it in files))
    found = SharedRepository.of(repository).ask(lambda native: scan_files(native, work))
    assert not any(found["reason"])
    return len(found["location"])


def warm(_: int) -> None:
    """Import what the work needs."""
    compute(np.zeros(1, "f4"))
