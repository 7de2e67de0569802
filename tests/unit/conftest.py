"""Repositories in memory, one for each format version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from tests.helpers import make_array, memory_url, write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture(params=[1, 2], ids=["spec1", "spec2"])
def spec(request: pytest.FixtureRequest) -> int:
    """Return a format version."""
    version: int = request.param
    return version


@pytest.fixture
async def repository(spec: int) -> AsyncIterator[Repository]:
    """Open an empty repository."""
    async with Repository.create(memory_url(), spec_version=spec) as repository:
        yield repository


@pytest.fixture
async def filled(repository: Repository) -> Repository:
    """Put an array ``a`` of 10 chunks into a repository, of which 0 and 1 are written."""
    session = await repository.writable_session("main")
    await write(session, "zarr.json", b'{"zarr_format": 3, "node_type": "group"}')
    await make_array(session, "a", (10,), (1,))
    await write(session, "a/c/0", b"\x00")
    await write(session, "a/c/1", b"\x01")
    await session.commit("filled")
    return repository
