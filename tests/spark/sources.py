"""Files to ingest, and repositories that may read them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from icechunk_async.sync import (
    Repository,
    RepositoryConfig,
    VirtualChunkContainer,
    credentials,
    local_filesystem_store,
)

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["field", "make_newer", "open_for", "write_netcdf"]


def field(first: int, steps: int) -> Any:
    """Return values that tell their places."""
    return (np.arange(first, first + steps)[:, None] * 10.0 + np.arange(3)).astype("f4")


def write_netcdf(path: Path, first: int, steps: int = 4, **options: Any) -> None:
    """Write a file of some days from a first one on, which its time is counted from."""
    with h5py.File(path, "w") as file:
        time = file.create_dataset("time", data=np.arange(steps, dtype="i4"))
        day = np.datetime64("2000-01-01") + np.timedelta64(first, "D")
        time.attrs["units"] = f"days since {day}"
        time.make_scale("time")
        lat = file.create_dataset("lat", data=np.array([10.0, 20.0, 30.0]))
        lat.make_scale("lat")
        stored: dict[str, Any] = {"chunks": (2, 3), "compression": "gzip", "shuffle": True}
        data = file.create_dataset("t", data=field(first, steps), **{**stored, **options})
        data.dims[0].attach_scale(time)
        data.dims[1].attach_scale(lat)
        data.attrs["units"] = "K"


def make_newer(path: Path) -> None:
    """Let a file have been written ten seconds later: guards are whole seconds."""
    at = path.stat().st_mtime + 10
    os.utime(path, (at, at))


def open_for(url: str, sources: Path) -> Repository:
    """Create a repository that may read a directory."""
    sources.mkdir(exist_ok=True)
    prefix = f"{sources.as_uri()}/"
    config = RepositoryConfig.default()
    store = local_filesystem_store(str(sources))
    config.set_virtual_chunk_container(VirtualChunkContainer(prefix, store))
    access: Any = {prefix: credentials.LocalFileSystemAccess}
    repository = Repository.create(url, config, access)
    repository.save_config()
    return repository
