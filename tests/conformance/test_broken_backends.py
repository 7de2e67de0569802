"""Each test of the conformance suite finds out a storage that breaks its promise."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from icechunk_async.errors import IcechunkError
from icechunk_async.testing.conformance import StorageConformance
from tests.conformance import flawed_changes, flawed_handles, flawed_listings, flawed_objects
from tests.conformance.flawed import FLAWS, Flawed, opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from icechunk_async.storage import Storage, StorageDescription

MODULES = (flawed_objects, flawed_changes, flawed_listings, flawed_handles)
"""They register what they define."""

CASES = [(flaw, test) for flaw in FLAWS for test in flaw.breaks]
TESTS = sorted(name for name in dir(StorageConformance) if name.startswith("test_"))


def reopen_flawed(description: StorageDescription) -> AbstractAsyncContextManager[Storage]:
    """Open a handle without a flaw; found by this name in other processes."""
    return opened(Flawed, description.url)


def suite_for(flaw: type[Flawed]) -> StorageConformance:
    """Make a subclass of the suite as a backend's author would, for one storage."""

    class Suite(StorageConformance):
        many_keys = 2500

        @staticmethod
        def reopen(description: StorageDescription) -> AbstractAsyncContextManager[Storage]:
            return opened(flaw, description.url)

        def undeletable(
            self, storage: Storage, key: str
        ) -> AbstractAsyncContextManager[None] | None:
            assert isinstance(storage, Flawed)
            return stuck(storage, key)

    if flaw is flawed_changes.IsNotShared:
        Suite.reopen = staticmethod(reopen_flawed)  # type: ignore[method-assign]
    return Suite()


@asynccontextmanager
async def stuck(storage: Flawed, key: str) -> AsyncIterator[None]:
    """Keep a key from being deleted."""
    storage.stuck.add(key)
    yield
    storage.stuck.clear()


async def run(flaw: type[Flawed], test: str) -> None:
    """Run one test of the suite against one storage."""
    async with opened(flaw, f"memory://{uuid4()}") as storage:
        method: Any = getattr(suite_for(flaw), test)
        await method(storage)


@pytest.mark.parametrize(
    ("flaw", "test"), CASES, ids=[f"{flaw.__name__}-{test}" for flaw, test in CASES]
)
async def test_the_flaw_is_found(flaw: type[Flawed], test: str) -> None:
    """The test whose promise is broken fails."""
    try:
        await run(flaw, test)
    except pytest.skip.Exception as skipped:
        pytest.fail(f"{test} was skipped: {skipped}")
    except (AssertionError, IcechunkError, pytest.fail.Exception):
        return
    pytest.fail(f"{test} did not notice that {flaw.__name__} breaks its promise")


@pytest.mark.parametrize("test", TESTS)
async def test_the_base_of_all_flaws_has_none(test: str) -> None:
    """It is the flaw that is found, not the wrapper around it."""
    await run(Flawed, test)


def test_every_test_finds_a_flaw() -> None:
    """No test of the suite is without a storage that it finds out."""
    found = {test for flaw in FLAWS for test in flaw.breaks}
    assert sorted(found) == TESTS
