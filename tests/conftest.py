"""What every test gets: calls that block the event loop fail it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from blockbuster import blockbuster_ctx

if TYPE_CHECKING:
    from collections.abc import Iterator

_OURS = [
    "icechunk_async",
    "icechunk_async_memory",
    "icechunk_async_local",
]


@pytest.fixture(autouse=True)
def _no_blocking_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which our code blocks an event loop, unless it says that it means to."""
    if request.node.get_closest_marker("blocks_the_loop") is not None:
        yield
        return
    with blockbuster_ctx(_OURS):
        yield
