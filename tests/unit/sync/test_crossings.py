"""Calls that only read memory do not wait for another thread."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

import icechunk_async.sync as icechunk
from icechunk_async._runtime.blocking import portal
from icechunk_async._runtime.blocking.portal import blocking, run
from icechunk_async.errors import FormatError
from icechunk_async.format.repo_info import RepoInfo
from icechunk_async.storage import open_storage
from icechunk_async.storage.policies.wrapping import PassingStorage
from icechunk_async_local.at_once import ReadsAtOnce
from tests.helpers import array_document

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from icechunk_async.storage import Version
    from icechunk_async.storage.extensions import TellsUnchanged

PROTOTYPE = default_buffer_prototype()
GROUP = b'{"zarr_format": 3, "node_type": "group"}'


@pytest.fixture
def repository(tmp_path: Path) -> icechunk.Repository:
    """Return a repository with an array of three chunks, of which one is inline."""
    repo = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path)))
    session = repo.writable_session("main")
    for key, data in {
        "a/zarr.json": array_document((4,), (1,), data_type="uint8"),
        "a/c/0": b"0",
        "a/c/1": bytes(1000),
    }.items():
        sync(session.store.set(key, PROTOTYPE.buffer.from_bytes(data)))
    session.commit("made")
    return repo


def crossings(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> tuple[object, int]:
    """Make a call; return its result, and how many times it waited for the loop's thread."""
    count = 0
    run = portal._Portal.run

    def counted(self: portal._Portal, work: Any) -> object:
        nonlocal count
        count += 1
        return run(self, work)

    with monkeypatch.context() as patch:
        patch.setattr(portal._Portal, "run", counted)
        return call(), count


async def collected(items: AsyncIterator[Any]) -> list[Any]:
    """Return all items."""
    return [it async for it in items]


def test_chunk_types_are_told_from_memory(
    repository: icechunk.Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the manifest was read; changes of the session are in memory always."""
    kinds = icechunk.ChunkType
    expected = [kinds.inline, kinds.native, kinds.uninitialized, kinds.uninitialized]
    again = icechunk.Repository.open(icechunk.local_filesystem_storage(str(tmp_path)))
    for session in (repository.readonly_session("main"), again.writable_session("main")):
        session.chunk_type("/a", [0])
        for row in range(5):
            found = crossings(monkeypatch, partial(session.chunk_type, "a", [row]))
            assert found == ([*expected, kinds.uninitialized][row], 0)
    sync(session.store.set("a/c/2", PROTOTYPE.buffer.from_bytes(b"2")))
    assert crossings(monkeypatch, lambda: session.chunk_type("/a", (2,))) == (kinds.inline, 0)
    for path in ("/b", "/a/"):
        if path == "/b":
            with pytest.raises(icechunk.IcechunkError, match="/b"):
                session.chunk_type(path, [0])
        else:
            assert session.chunk_type(path, [0]) == kinds.inline


def test_a_chunk_type_that_is_not_in_memory_is_read(
    repository: icechunk.Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one crossing."""
    del repository
    config = icechunk.RepositoryConfig.default()
    config.manifest = icechunk.ManifestConfig(
        preload=icechunk.ManifestPreloadConfig(max_total_refs=0)
    )
    storage = icechunk.local_filesystem_storage(str(tmp_path))
    session = icechunk.Repository.open(storage, config=config).readonly_session("main")
    found = crossings(monkeypatch, lambda: session.chunk_type("/a", [1]))
    assert found == (icechunk.ChunkType.native, 1)


def test_ids_of_nodes_and_known_snapshots_are_told_from_memory(
    repository: icechunk.Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots never change."""
    session = repository.readonly_session("main")
    node_id, count = crossings(monkeypatch, lambda: session.get_node_id("/a"))
    assert count == 0
    assert node_id == sync(session.get_node_id_async("/a"))
    tip = session.snapshot_id
    info, count = crossings(monkeypatch, lambda: repository.lookup_snapshot(tip))
    assert count == 0
    assert info == sync(repository.lookup_snapshot_async(tip))
    for wrong in ("nonsense", "0" * 20):
        with pytest.raises(icechunk.IcechunkError):
            repository.lookup_snapshot(wrong)
    with pytest.raises(icechunk.IcechunkError, match="/nothing"):
        session.get_node_id("/nothing")


def test_the_ancestry_of_a_branch_that_did_not_move_is_told_from_memory(
    repository: icechunk.Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it moved is seen without waiting. Others may have moved it, or removed all."""
    if not ReadsAtOnce(tmp_path).active:
        pytest.skip("only Linux on a local file system looks without waiting")
    tip = repository.lookup_branch("main")
    repository.create_tag("v1", tip)
    expected = [it.id for it in run(collected(repository.async_ancestry(branch="main")))]
    assert (expected[0], len(expected)) == (tip, 2)

    def line(**named: str) -> list[str]:
        return [it.id for it in repository.ancestry(**named)]

    found = ("branch", "main"), ("tag", "v1"), ("snapshot_id", tip), ("ref", "main"), ("ref", "v1")
    for kind, name in found:
        assert crossings(monkeypatch, partial(line, **{kind: name})) == (expected, 0)
    assert line(ref="main~1") == expected[1:]
    missing = ("branch", "v1"), ("tag", "main"), ("ref", "x"), ("snapshot_id", "0" * 20)
    for kind, name in (*missing, ("snapshot_id", "x")):
        with pytest.raises(icechunk.IcechunkError, match=name):
            repository.ancestry(**{kind: name})
    with pytest.raises(icechunk.IcechunkError, match="one of"):
        repository.ancestry()

    elsewhere = tmp_path.parent / f"{tmp_path.name}-copy"
    shutil.copytree(tmp_path, elsewhere)
    other = icechunk.Repository.open(icechunk.local_filesystem_storage(str(elsewhere)))
    changed = other.writable_session("main").commit("elsewhere", allow_empty=True)
    (elsewhere / "repo").rename(tmp_path / "repo")
    (elsewhere / "snapshots" / changed).rename(tmp_path / "snapshots" / changed)
    assert line(branch="main") == [changed, *expected]
    assert crossings(monkeypatch, partial(line, branch="main")) == ([changed, *expected], 0)
    (tmp_path / "repo").unlink()
    with pytest.raises(icechunk.IcechunkError, match="removed"):
        repository.ancestry(branch="main")


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_sessions_on_a_branch_that_did_not_move_begin_without_waiting(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit waits once. Where the branch moved, or settings ask for work, the loop begins it."""
    if kind == "local" and not ReadsAtOnce(tmp_path).active:
        pytest.skip("only Linux on a local file system looks without waiting")
    url = "memory://sessions" if kind == "memory" else str(tmp_path)
    repo = icechunk.Repository.create(url)
    other = icechunk.Repository.open(url)

    def waits(call: Callable[[], object]) -> int:
        return crossings(monkeypatch, call)[1]

    def write() -> None:
        with repo.transaction("main", message="written") as store:
            sync(store.set("zarr.json", PROTOTYPE.buffer.from_bytes(GROUP)))

    assert waits(write) == 1
    for begin in (repo.writable_session, repo.readonly_session):
        assert waits(partial(begin, "main")) == 0
        assert begin("main").snapshot_id == repo.lookup_branch("main")
    moved = other.writable_session("main").commit("moved", allow_empty=True)
    assert {repo.readonly_session("main").snapshot_id for _ in range(2)} == {moved}
    assert waits(lambda: repo.writable_session("main").discard_changes()) == 0
    assert waits(lambda: repo.readonly_session(snapshot_id=moved)) == 1
    leased, count = crossings(monkeypatch, lambda: repo.writable_session("main", lease=True))
    assert isinstance(leased, icechunk.Session)
    assert (leased.has_lease, count) == (True, 1)
    repo.end_session(leased.session_id)
    with icechunk.deadline(0), pytest.raises(TimeoutError):
        repo.writable_session("main")
    with pytest.raises(icechunk.IcechunkError, match="branch 'x'"):
        repo.writable_session("x")
    repo.set_status(icechunk.RepoStatus(icechunk.RepoAvailability.read_only))
    with pytest.raises(icechunk.IcechunkError, match="read_only"):
        repo.writable_session("main")
    assert repo.readonly_session("main").snapshot_id == moved
    repo.close()
    with pytest.raises(icechunk.IcechunkError, match="closed"):
        repo.readonly_session("main")


class _Telling(PassingStorage):
    """Tells at once what did not change, as a storage may whose reads wait."""

    def is_at(self, key: str, version: Version) -> bool:
        """Return whether an object is at a version."""
        return cast("TellsUnchanged", self.wrapped).is_at(key, version)


def test_sessions_that_preload_begin_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preloading starts tasks, and the thread of a caller has no loop for them."""
    url = "memory://sessions-that-preload"
    icechunk.Repository.create(url).close()
    with blocking(open_storage(url)) as inner:
        repo = icechunk.Repository.open(_Telling(inner))
        for begin in (repo.writable_session, repo.readonly_session):
            begin("main")  # the snapshot of the tip is in memory from here on
            assert crossings(monkeypatch, partial(begin, "main"))[1] == 1


def test_a_name_that_no_session_takes_is_refused_at_every_call(
    repository: icechunk.Repository,
) -> None:
    """Also where the session would begin from memory, and with nothing given for it."""
    begin: Any = repository.readonly_session
    begin("main")
    with pytest.raises(TypeError, match=r"readonly_session\(\) got an unexpected .*'branches'"):
        begin("main", branches=None)


def test_errors_in_what_is_told_from_memory_are_those_of_the_facade(
    repository: icechunk.Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They show the caller's line."""
    if not ReadsAtOnce(tmp_path).active:
        pytest.skip("only Linux on a local file system looks without waiting")

    def damaged(*_: object) -> Iterator[Any]:
        yield []
        raise FormatError("a circle")

    monkeypatch.setattr(RepoInfo, "ancestry_pages", damaged)
    with pytest.raises(icechunk.IcechunkError, match="a circle") as caught:
        list(repository.ancestry(branch="main"))
    assert [Path(it.path).name for it in caught.traceback] == [Path(__file__).name]


def test_the_state_of_a_session_is_told_from_memory(
    repository: icechunk.Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changes, and whether there are any."""
    session = repository.writable_session("main")
    sync(session.store.set("a/c/2", PROTOTYPE.buffer.from_bytes(b"2")))
    status, count = crossings(monkeypatch, session.status)
    assert count == 0
    assert isinstance(status, icechunk.Diff)
    assert status.updated_chunks == {"/a": [[2]]}
    changed, count = crossings(monkeypatch, lambda: session.has_uncommitted_changes)
    assert (changed, count) == (True, 0)


def test_what_is_known_of_commits_is_told_from_memory(
    repository: icechunk.Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status of a session, and the difference of commits that were made or compared here."""
    made = repository.lookup_branch("main")
    session = repository.writable_session("main")
    sync(session.store.set("a/c/2", PROTOTYPE.buffer.from_bytes(b"2")))
    status, waits = crossings(monkeypatch, session.status)
    assert waits == 0
    changed = session.commit("changed")
    root = list(repository.ancestry(branch="main"))[-1].id

    def diff(repo: icechunk.Repository, start: str) -> object:
        return repo.diff(from_snapshot_id=start, to_snapshot_id=changed)

    assert crossings(monkeypatch, lambda: diff(repository, made)) == (status, 0)
    found = diff(repository, root)
    assert crossings(monkeypatch, lambda: diff(repository, root)) == (found, 0)
    assert crossings(monkeypatch, lambda: diff(repository, changed)) == (icechunk.Diff(), 0)
    # Memory takes no argument that the method does not have, also where it says nothing.
    wrong: Any = {"from_brnach": None}
    with pytest.raises(TypeError, match=r"Repository\.diff\(\) got an unexpected .*'from_brnach'"):
        repository.diff(from_snapshot_id=made, to_snapshot_id=changed, **wrong)
    # A branch and a tag may have moved since they were read.
    assert crossings(
        monkeypatch, lambda: repository.diff(from_snapshot_id=made, to_branch="main")
    ) == (status, 1)
    assert crossings(monkeypatch, lambda: repository.lookup_snapshot(made).id) == (made, 0)

    elsewhere = tmp_path.parent / f"{tmp_path.name}-copy"
    shutil.copytree(tmp_path, elsewhere)
    again = icechunk.Repository.open(icechunk.local_filesystem_storage(str(elsewhere)))
    assert crossings(monkeypatch, lambda: diff(again, made)) == (status, 1)
    assert crossings(monkeypatch, lambda: diff(again, made)) == (status, 0)
    with pytest.raises(icechunk.IcechunkError, match="not an ancestor"):
        repository.diff(from_snapshot_id=changed, to_snapshot_id=made)
