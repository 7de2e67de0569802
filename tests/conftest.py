"""Settings of every test: blocking the event loop fails it, and a slow example does not."""

from __future__ import annotations

import gc
import importlib
import os
import signal
from functools import cache
from typing import TYPE_CHECKING

import pytest
from blockbuster import BlockBuster
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator


# A busy machine makes single examples slow, which says nothing about the code. Each run tries other
# examples: a quarter of Hypothesis' hundred, and all in tox's thorough and spark-failures.
settings.register_profile(
    "any-load",
    deadline=None,
    max_examples=100 if os.environ.get("EXAMPLES") == "all" else 25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any-load")


def _importable(name: str) -> bool:
    """Return whether a backend's driver is installed; where the bare wheel is tested, none is."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def pytest_configure() -> None:
    """Let interrupts reach tests and what they start, also where a shell ignores them."""
    gc.disable()  # until all tests are collected, which makes many objects and no garbage
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave every other combination of parameters to those who ask for all.

    Each value of each parameter stays in the run. Tests with one parameter of several values are
    left whole: of those, every other value would be gone.
    """
    tests: dict[str, list[tuple[pytest.Item, dict[str, str]]]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("thorough"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append((item, _values(item)))
    for cases in tests.values():
        seen: dict[str, list[str]] = {}
        for _, values in cases:
            for name, value in values.items():
                if value not in seen.setdefault(name, []):
                    seen[name].append(value)
        axes = {name: known for name, known in seen.items() if len(known) > 1}
        if len(axes) < 2:
            continue
        for item, values in cases:
            # a chessboard: of (a, b) x (1, 2) the run keeps (a, 1) and (b, 2)
            if sum(known.index(values[name]) for name, known in axes.items()) % 2:
                item.add_marker(pytest.mark.thorough)


def _values(item: pytest.Item) -> dict[str, str]:
    """Return the value of each parameter; names that are given together are one parameter."""
    if not hasattr(item, "callspec"):
        return {}
    left = {name: repr(value) for name, value in item.callspec.params.items()}
    together: dict[str, str] = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        if isinstance(names, str):
            names = [it.strip() for it in names.split(",")]
        here = [it for it in names if it in left]
        if here:
            together[",".join(here)] = ", ".join(left.pop(it) for it in here)
    return together | left


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over thousands of tests, which stay until the end."""
    gc.collect()
    gc.freeze()
    gc.enable()


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


# Up to 1.42 at least, OpenTelemetry lists directories for an entry point when it is imported. On a
# loop that is a blocking call; importlib suppresses its error and finds nothing, and the import
# ends in StopIteration.
_importable("opentelemetry.context")


@cache
def _watch() -> BlockBuster:
    """Return the watch over blocking calls; making it takes as long as switching it on.

    A loop may wait while another thread imports what it imports: only the first test that needs
    the module would fail, and only if the two came at the same moment.
    """
    watch = BlockBuster(_OURS)
    for name in ("threading.Lock.acquire", "threading.Lock.acquire_lock"):
        watch.functions[name].can_block_in("<frozen importlib._bootstrap>", {"acquire"})
    return watch


@pytest.fixture(autouse=True)
def _no_blocking_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which our code blocks an event loop, unless it says that it means to."""
    if request.node.get_closest_marker("blocks_the_loop") is not None:
        yield
        return
    watch = _watch()
    watch.activate()
    yield
    watch.deactivate()
