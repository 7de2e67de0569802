"""Zarr's own stateful test of hierarchies, unmodified, against Zarr's store in memory."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import rule, run_state_machine_as_test
from zarr.testing.stateful import ZarrHierarchyStateMachine

from icechunk_async import Repository
from tests.helpers import memory_url

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from zarr.abc.store import Store

STEPS = settings(
    max_examples=8,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)
# The machine draws types and codecs that Zarr has not settled yet, and says so each time.
pytestmark = [
    pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning"),
    pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning"),
]


@contextmanager
def _opened(url: str, spec_version: int) -> Generator[Repository]:
    """Open a repository for blocking code; its requests run on Zarr's own event loop."""
    with asyncio.Runner() as runner:
        manager = Repository.create(url, spec_version=spec_version)
        repository = runner.run(manager.__aenter__())
        try:
            yield repository
        finally:
            runner.run(manager.__aexit__(None, None, None))


class _Committing(ZarrHierarchyStateMachine):
    """The same machine, which also commits now and then and continues in a new session."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        super().__init__(self._begin())

    def _begin(self) -> Store:
        return asyncio.run(self.repository.writable_session("main")).store

    @rule()
    def commit(self) -> None:
        """Publish what was done so far; the next session must see the same hierarchy."""
        asyncio.run(self.store.session.commit("step", allow_empty=True))  # type: ignore[attr-defined]
        self.store = self._begin()


def _url(place: str, tmp_path: Path) -> str:
    return memory_url() if place == "memory" else (tmp_path / "repository").as_uri()


@pytest.mark.sampled
@pytest.mark.parametrize("spec", [1, 2])
@pytest.mark.parametrize("place", ["memory", "local"])
def test_hierarchies_in_one_session_agree_with_zarrs_memory_store(
    spec: int, place: str, tmp_path: Path
) -> None:
    """Groups, arrays, resizing, deleting and listing agree with Zarr's store in memory."""
    with _opened(_url(place, tmp_path), spec) as repository:

        def machine() -> ZarrHierarchyStateMachine:
            session = asyncio.run(repository.writable_session("main"))
            return ZarrHierarchyStateMachine(session.store)

        begin: Any = machine
        run_state_machine_as_test(begin, settings=STEPS)


@pytest.mark.sampled
@pytest.mark.parametrize("spec", [1, 2])
@pytest.mark.parametrize("place", ["memory", "local"])
def test_hierarchies_across_commits(spec: int, place: str, tmp_path: Path) -> None:
    """The same with a commit now and then."""
    with _opened(_url(place, tmp_path), spec) as repository:
        begin: Any = partial(_Committing, repository)
        run_state_machine_as_test(begin, settings=STEPS)
