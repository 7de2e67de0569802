"""Fixtures for the conformance tests of several backends."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from blockbuster import BlockBusterFunction

if TYPE_CHECKING:
    from collections.abc import Iterator

_ALSO_BLOCKING = (
    *("open", "fstat", "pread", "utime", "fsync", "copy_file_range", "lstat"),
    *("listdir", "dup"),
)


@pytest.fixture
def no_system_calls() -> Iterator[None]:
    """Watch more of the system calls that the local backend must not make on an event loop."""
    with ExitStack() as stack:
        for name in _ALSO_BLOCKING:
            watched = BlockBusterFunction(os, name, scanned_modules="icechunk_async_local")
            watched.activate()
            stack.callback(watched.deactivate)
        yield
