"""Fixtures of every test: a call that blocks the event loop fails the test."""

from __future__ import annotations

import gc
import importlib
import signal
from typing import TYPE_CHECKING

import pytest
from blockbuster import blockbuster_ctx

if TYPE_CHECKING:
    from collections.abc import Iterator


def _importable(name: str) -> bool:
    """Return whether a backend's driver is installed; where the bare wheel is tested, none is."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def pytest_configure() -> None:
    """Let interrupts reach tests and what they start, also where a shell ignores them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave every other combination of parameters to those who ask for all.

    Each value of each parameter stays in the run. Tests of one parameter are left whole: of those,
    every other value would be gone.
    """
    seen: dict[tuple[str, str], list[object]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is None or not hasattr(item, "callspec"):
            continue
        if len(item.callspec.params) < 2:
            continue
        place = 0
        for name, value in item.callspec.params.items():
            values = seen.setdefault((item.nodeid.partition("[")[0], name), [])
            if value not in values:
                values.append(value)
            place += values.index(value)
        if place % 2:
            item.add_marker(pytest.mark.thorough)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over thousands of tests, which stay until the end."""
    gc.collect()
    gc.freeze()


_OURS = [
    "icechunk_async",
    *filter(
        _importable,
        [
            "icechunk_async_memory",
            "icechunk_async_local",
            "icechunk_async_s3",
            "icechunk_async_gcs",
            "icechunk_async_azure",
            "icechunk_async_http",
            "icechunk_async_obstore",
            "icechunk_async_fsspec",
        ],
    ),
]


@pytest.fixture(autouse=True)
def _no_blocking_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which our code blocks an event loop, unless it says that it means to."""
    if request.node.get_closest_marker("blocks_the_loop") is not None:
        yield
        return
    with blockbuster_ctx(_OURS):
        yield
