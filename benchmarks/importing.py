"""The work of the contests about imports, which runs in separate processes.

Imports nothing before the timing starts.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING

from benchmarks.machine import Meter

if TYPE_CHECKING:
    from collections.abc import Sequence


def import_after_zarr(module: str, unasked: Sequence[str]) -> dict[str, float]:
    """Import a module and its ``Repository``; count those of ``unasked`` that came with it."""
    import_module("zarr")
    before = set(sys.modules)
    with Meter() as meter:
        # Ours imports most of itself when a name is first used.
        assert import_module(module).Repository
    came = set(unasked) & (set(sys.modules) - before)
    return {**meter.figures(), "imported unasked": float(len(came))}


def start_command(arguments: Sequence[str]) -> dict[str, float]:
    """Run the command in a process; its CPU, whatever else the machine does."""
    line = [sys.executable, "-m", "icechunk_async.cli", *arguments]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu seconds": cpu}


def first_open(module: str, directory: str) -> dict[str, float]:
    """Import a module, open a repository and read a chunk."""
    zarr = import_module("zarr")
    with Meter() as meter:
        package = import_module(module)
        repository = package.Repository.open(package.local_filesystem_storage(directory))
        array = zarr.open_array(repository.readonly_session("main").store, path="a", mode="r")
        assert array[0] == 1
    return meter.figures()


def first_dataset(module: str, directory: str) -> dict[str, float]:
    """Import a module, open a repository and all of its arrays with xarray."""
    xarray = import_module("xarray")
    import_module("zarr")
    with Meter() as meter:
        package = import_module(module)
        repository = package.Repository.open(package.local_filesystem_storage(directory))
        store = repository.readonly_session("main").store
        assert len(xarray.open_zarr(store, consolidated=False, chunks=None).data_vars) > 1
    return meter.figures()
