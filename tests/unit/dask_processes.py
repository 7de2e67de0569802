"""Processes for Dask, started once for many tests: importing takes them longer than their work."""

from __future__ import annotations

import atexit
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

import dask
import pytest

__all__ = ["local_cluster", "process_pool"]


@cache
def process_pool() -> ProcessPoolExecutor:
    """Return two processes as Dask starts them for its scheduler ``processes``."""
    pool = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))
    atexit.register(pool.shutdown)
    return pool


def local_cluster() -> Any:
    """Start a cluster of two workers, which are processes, on this machine."""
    distributed = pytest.importorskip("distributed", reason="it is in the test dependencies")
    with dask.config.set({"distributed.worker.daemon": False}):
        return distributed.LocalCluster(
            n_workers=2, threads_per_worker=2, dashboard_address=None, processes=True
        )
