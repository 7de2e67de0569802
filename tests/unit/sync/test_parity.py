"""The facade takes what the asyncio classes take: options cannot be forgotten in one of them."""

from __future__ import annotations

import inspect
from typing import Final

import pytest

from icechunk_async import Repository, Session
from icechunk_async.session import ForkSession
from icechunk_async.sync import ForkSession as BlockingForkSession
from icechunk_async.sync import Repository as BlockingRepository
from icechunk_async.sync import Session as BlockingSession

_CLASSES: Final = {
    Repository: BlockingRepository,
    Session: BlockingSession,
    ForkSession: BlockingForkSession,
}
_OFFICIAL: Final = {
    "location": "storage",
    "name": "branch or tag",
    "path": "array_path",
    "coords": "chunk_coordinates",
    "forks": "others",
}
"""Parameters that the official package calls otherwise."""
_ENGINE: Final = "a part of the engine, for what is built on it; the facade has `handle`"
_STORE: Final = "the official package has it at the store"
_SPLIT: Final = "the official package lists names, and looks up one by one; `summary` has all"
_FORKS: Final = "forks open by themselves, and pickle"
LEFT_OUT: Final = {
    "Repository.aclose": "`close`",
    "Repository.authorized_virtual_prefixes": "`authorized_virtual_container_prefixes`",
    "Repository.branches": _SPLIT,
    "Repository.engine": _ENGINE,
    "Repository.plan_repair": "`repair` plans, and carries the plan out if `dry_run=False`",
    "Repository.tags": _SPLIT,
    "Repository.open_or_create.spec_version": "`create_version`",
    "Session.array_chunk_iterator": _STORE,
    "Session.continue_from": _ENGINE,
    "Session.has_pending_chunks": _FORKS,
    "Session.abandon": "for sessions that the library itself makes; see `discard_changes`",
    "Session.origin": _ENGINE,
    "Session.publisher": _ENGINE,
    "Session.resume": "`Repository.resume_session` continues sessions with leases",
    "Session.spec_version": "`Repository.spec_version`",
    "Session.spiller": _ENGINE,
    "Session.store_pending_chunks": _FORKS,
    "Session.workspace": _ENGINE,
    "ForkSession.array_chunk_iterator": _STORE,
    "ForkSession.attach": _FORKS,
    "ForkSession.attached": _FORKS,
    "ForkSession.beside": _ENGINE,
    "ForkSession.changes_so_far": _ENGINE,
    "ForkSession.from_bytes": _FORKS,
    "ForkSession.has_pending_chunks": _FORKS,
    "ForkSession.is_attached": _FORKS,
    "ForkSession.lineage": _ENGINE,
    "ForkSession.membership": _ENGINE,
    "ForkSession.origin": _ENGINE,
    "ForkSession.resume": "`Repository.resume_session` continues sessions with leases",
    "ForkSession.spec_version": "`Repository.spec_version`",
    "ForkSession.store_pending_chunks": _FORKS,
    "ForkSession.stored_changes": _ENGINE,
    "ForkSession.to_bytes": _FORKS,
    "ForkSession.workspace": _ENGINE,
}
"""Names and parameters of the asyncio classes that the facade lacks, and why."""


def _missing(native: type, facade: type) -> list[str]:
    found: list[str] = []
    for name in sorted(it for it in dir(native) if not it.startswith("_")):
        label = f"{native.__name__}.{name}"
        if not hasattr(facade, name):
            found.append(label)
        elif callable(getattr(native, name)) and not isinstance(getattr(native, name), type):
            taken = inspect.signature(getattr(facade, name)).parameters
            named = inspect.signature(getattr(native, name)).parameters.values()
            for it in named:
                is_any = it.kind is it.VAR_KEYWORD or it.name.strip("_") == ""
                if not is_any and not {it.name, *_OFFICIAL.get(it.name, "").split(" or ")} & {
                    *taken
                }:
                    found.append(f"{label}.{it.name}")
    return found


@pytest.mark.parametrize("native", _CLASSES)
def test_the_facade_has_every_name_and_option(native: type) -> None:
    """But for those that are listed with a reason, all of which are missing."""
    listed = sorted(it for it in LEFT_OUT if it.startswith(f"{native.__name__}."))
    assert _missing(native, _CLASSES[native]) == listed


def test_options_of_opening_have_the_same_defaults() -> None:
    """Where the official package has no say."""
    for name in ("open", "create", "open_or_create"):
        native = inspect.signature(getattr(Repository, name)).parameters
        facade = inspect.signature(getattr(BlockingRepository, name)).parameters
        both = [it for it in native if it in facade and it != "spec_version"]
        assert len(both) > 8
        assert {it: native[it].default for it in both} == {it: facade[it].default for it in both}


def test_an_option_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is a method."""

    def verify(self: Repository, level: str, *, speed: int = 1) -> None:
        raise NotImplementedError

    monkeypatch.setattr(Repository, "verify", verify)
    monkeypatch.setattr(Repository, "polish", verify, raising=False)
    found = {*_missing(Repository, BlockingRepository)} - LEFT_OUT.keys()
    assert found == {"Repository.verify.speed", "Repository.polish"}
