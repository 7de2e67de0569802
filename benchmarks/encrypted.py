"""The work of the contest about TLS, which runs in separate processes."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import zarr

from benchmarks.machine import Meter
from benchmarks.peers import chunked, create, numbers, tip_store
from benchmarks.s3_peers import PLAIN, blocking_storage, plain_store, session_on_zarrs_loop

_MEGABYTE = 2**20


def read(contender: str, endpoint: str, near: str, count: int, rounds: int) -> dict[str, float]:
    """Read an array over an encrypted connection; write it over a plain one before."""
    prefix = uuid4().hex
    data = numbers(count, _MEGABYTE)
    zarr.config.set({"async.concurrency": 16})
    with ExitStack() as stack:
        if contender == PLAIN:
            chunked(plain_store(near, prefix), count, _MEGABYTE)[:] = data
            store = plain_store(endpoint, prefix)
        else:
            session = create("ours", blocking_storage("ours", near, prefix)).writable_session(
                "main"
            )
            chunked(session.store, count, _MEGABYTE)[:] = data
            session.commit("filled")
            if contender == "official":
                store = tip_store("official", blocking_storage("official", endpoint, prefix))
            else:
                session = stack.enter_context(
                    session_on_zarrs_loop(contender, endpoint, prefix, writable=False)
                )
                store = session.store
        array: Any = zarr.open_array(store, path="a", mode="r")
        assert array[:][-1] == data[-1]
        meters = []
        for _ in range(rounds):
            with Meter() as meter:
                assert array[:][-1] == data[-1]
            meters.append(meter)
    return {
        "seconds": statistics.median(it.seconds for it in meters) / count,
        "cpu seconds": statistics.median(it.cpu_seconds for it in meters) / count,
    }
