"""Repositories of many commits, to which both engines add in turn."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import icechunk
import pytest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

import icechunk_async.sync
from tests.helpers import array_document
from tests.interop.comparing import check_garbage, views_agree

if TYPE_CHECKING:
    from pathlib import Path

ENGINES: dict[str, Any] = {"ours": icechunk_async.sync, "theirs": icechunk}
PROTOTYPE = default_buffer_prototype()
COMMITS = 50
"""Enough that entries are copied."""


def opened(name: str, root: Path) -> Any:
    """Open the repository with an engine."""
    engine = ENGINES[name]
    return engine.Repository.open(engine.local_filesystem_storage(str(root)))


def commit(repo: Any, text: str, branch: str = "main") -> str:
    """Commit a chunk, with properties of some kinds."""
    session = repo.writable_session(branch)
    sync(session.store.set("a/c/0", PROTOTYPE.buffer.from_bytes(text.encode()[-2:])))
    properties = {"by": text, "n": len(text)} if text[-1] > "3" else None
    found: str = session.commit(text, metadata=properties)
    return found


def history(repo: Any, ref: str = "main") -> list[tuple[object, ...]]:
    """Return all that is known of the ancestors of a branch."""
    return [
        (it.id, it.parent_id, it.written_at, it.message, dict(it.metadata))
        for it in repo.ancestry(branch=ref)
    ]


def operations(repo: Any) -> list[tuple[object, ...]]:
    """Return the operations log."""
    return [(type(it.kind).__name__, it.updated_at, it.backup_path) for it in repo.ops_log()]


@pytest.mark.parametrize("first", ["ours", "theirs"])
async def test_engines_continue_histories_of_each_other(tmp_path: Path, first: str) -> None:
    """Commits, branches, tags, amended commits, resets and expiry, after many commits."""
    second = next(it for it in ENGINES if it != first)
    engine = ENGINES[first]
    repo = engine.Repository.create(engine.local_filesystem_storage(str(tmp_path)))
    session = repo.writable_session("main")
    document = PROTOTYPE.buffer.from_bytes(array_document((2,), (2,), data_type="uint8"))
    sync(session.store.set("a/zarr.json", document))
    session.commit("array")
    ids = [commit(repo, f"commit {number:02}") for number in range(COMMITS)]
    for turn, name in enumerate([second, first, second, first]):
        repo = opened(name, tmp_path)
        at = ids[7 * turn]
        repo.create_branch(f"side{turn}", at)
        commit(repo, f"side {turn}{name[:1]}", f"side{turn}")
        repo.create_tag(f"tag{turn}", ids[9 * turn])
        commit(repo, f"turn {turn}-{name}9")
        amended = repo.writable_session("main")
        sync(amended.store.set("a/c/0", PROTOTYPE.buffer.from_bytes(b"am")))
        amended.amend(f"amended {turn}")
        newest = commit(repo, f"more {turn}")
        commit(repo, "taken back")
        repo.reset_branch("main", newest)
        if turn == 2:
            repo.delete_tag("tag0")
            repo.expire_snapshots(datetime.now(UTC) - timedelta(days=1))
        readers = {it: opened(it, tmp_path) for it in ENGINES}
        for ref in ("main", f"side{turn}"):
            assert history(readers["ours"], ref) == history(readers["theirs"], ref)
        assert operations(readers["ours"]) == operations(readers["theirs"])
        assert len(history(readers["ours"])) == COMMITS + 2 + 2 * (turn + 1)
    await views_agree(tmp_path, 2)
    opened(second, tmp_path).expire_snapshots(datetime.now(UTC), delete_expired_tags=True)
    readers = {it: opened(it, tmp_path) for it in ENGINES}
    assert history(readers["ours"]) == history(readers["theirs"])
    assert len(history(readers["ours"])) == 2
    for name in ENGINES:
        commit(opened(name, tmp_path), f"after {name}")
    await views_agree(tmp_path, 2, everything=True)
    check_garbage(tmp_path)


def test_ancestors_of_the_facade_are_values_like_the_official_ones(tmp_path: Path) -> None:
    """Their fields are made when they are asked for; equal, pickled and shown as ever."""
    engine = ENGINES["ours"]
    repo = engine.Repository.create(engine.local_filesystem_storage(str(tmp_path)))
    session = repo.writable_session("main")
    document = PROTOTYPE.buffer.from_bytes(array_document((2,), (2,), data_type="uint8"))
    sync(session.store.set("a/zarr.json", document))
    session.commit("array")
    for number in range(40):
        commit(repo, f"commit {number:02}")
    repo = opened("ours", tmp_path)
    official = list(opened("theirs", tmp_path).ancestry(branch="main"))
    untouched, pickled, shown = (list(repo.ancestry(branch="main")) for _ in range(3))
    pickled = pickle.loads(pickle.dumps(pickled))
    assert [repr(it) for it in shown] == [repr(it) for it in pickled]
    assert f"message: {official[0].message}" in repr(shown[0])
    assert history(repo) == history(opened("theirs", tmp_path))
    assert untouched == pickled == shown
    assert untouched[3] != untouched[4]
    with pytest.raises(AttributeError, match="nothing"):
        _ = untouched[0].nothing
