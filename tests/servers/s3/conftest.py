"""The servers of a test session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.servers.s3.running import Server, ministack, moto

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def ministack_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run ministack for the session."""
    with ministack(tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run moto, behind its lock, for the session."""
    with moto(tmp_path_factory.mktemp("moto")) as server:
        yield server
