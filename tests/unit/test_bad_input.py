"""The most common mistakes: each raises a separate error that says what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from icechunk_async import Repository
from icechunk_async.conflicts import ConflictDetector
from icechunk_async.errors import (
    BranchNotFoundError,
    ConflictError,
    FormatError,
    IcechunkError,
    InvalidInputError,
    InvalidURLError,
    MissingDriverError,
    NothingToCommitError,
    ReadOnlyError,
    RepositoryExistsError,
    RepositoryNotFoundError,
    TagDeletedError,
    UnknownSchemeError,
    UnsupportedSpecVersionError,
    WrongTypeError,
)
from icechunk_async.storage import open_storage, registry
from tests.helpers import make_array, memory_url, write

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from importlib.metadata import EntryPoint


async def _filled() -> str:
    url = memory_url()
    async with Repository.create(url) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (4,), (1,))
        await session.commit("array")
    return url


async def _missing_repository() -> None:
    async with Repository.open(memory_url()):
        pass


async def _wrong_url() -> None:
    async with Repository.open("memory://"):
        pass


async def _unknown_scheme() -> None:
    async with Repository.open("gopher://host/path"):
        pass


async def _non_empty_target() -> None:
    url = memory_url()
    async with open_storage(url) as storage:
        await storage.put("somebody/elses", b"file")
    async with Repository.create(url):
        pass


async def _repository_in_the_way() -> None:
    async with Repository.create(await _filled()):
        pass


async def _unknown_branch() -> None:
    async with Repository.open(await _filled()) as repository:
        await repository.writable_session("develop")


async def _deleted_tag_reused() -> None:
    async with Repository.open(await _filled()) as repository:
        tip = await repository.lookup_branch("main")
        await repository.create_tag("v1", tip)
        await repository.delete_tag("v1")
        await repository.create_tag("v1", tip)


async def _commit_on_read_only() -> None:
    async with Repository.open(await _filled()) as repository:
        await (await repository.readonly_session("main")).commit("no")


async def _empty_commit() -> None:
    async with Repository.open(await _filled()) as repository:
        await (await repository.writable_session("main")).commit("nothing")


async def _conflicting_commit() -> None:
    async with Repository.open(await _filled()) as repository:
        sessions = [await repository.writable_session("main") for _ in range(2)]
        for number, session in enumerate(sessions):
            await write(session, f"a/c/{number}", b"x")
            await session.commit(f"number {number}")


async def _changed_object(change: Callable[[bytes], bytes]) -> None:
    url = await _filled()
    async with open_storage(url) as storage:
        data = (await storage.get("repo")).data
        await storage.put("repo", change(bytes(data)))
    async with Repository.open(url):
        pass


async def _future_spec() -> None:
    await _changed_object(lambda data: data[:36] + b"\x03" + data[37:])


async def _truncated_file() -> None:
    await _changed_object(lambda data: data[:30])


async def _damaged_file() -> None:
    await _changed_object(lambda data: data[:-20])


CASES: list[tuple[Callable[[], Awaitable[None]], type[IcechunkError], list[str]]] = [
    (_missing_repository, RepositoryNotFoundError, ["memory://", "Repository.create"]),
    (_wrong_url, InvalidURLError, ["'memory://'", "memory://some-name"]),
    (_unknown_scheme, UnknownSchemeError, ["gopher://", "file, ", "memory, ", "Install a backend"]),
    (_non_empty_target, RepositoryExistsError, ["'somebody/elses'", "choose an empty location"]),
    (_repository_in_the_way, RepositoryExistsError, ["a repository", "Open it"]),
    (_unknown_branch, BranchNotFoundError, ["'develop'", "The repository has: main"]),
    (_deleted_tag_reused, TagDeletedError, ["'v1'", "Choose another name"]),
    (_commit_on_read_only, ReadOnlyError, ["only reads", "writable_session"]),
    (_empty_commit, NothingToCommitError, ["changed nothing", "allow_empty=True"]),
    (_conflicting_commit, ConflictError, ["'main'", "another writer was first", "rebase_with"]),
    (_future_spec, UnsupportedSpecVersionError, ["version 3", "up to 2", "Upgrade"]),
    (_truncated_file, FormatError, ["repo info", "truncated", "30 bytes"]),
    (_damaged_file, FormatError, ["repo info"]),
]


@pytest.mark.parametrize(
    ("scenario", "expected", "words"), CASES, ids=[case[0].__name__[1:] for case in CASES]
)
async def test_each_mistake_has_its_own_error(
    scenario: Callable[[], Awaitable[None]], expected: type[IcechunkError], words: list[str]
) -> None:
    """Its class, its kind, and a message with what was found and what to do."""
    with pytest.raises(IcechunkError) as caught:
        await scenario()
    assert type(caught.value) is expected
    assert caught.value.kind == expected.kind
    for word in words:
        assert word in str(caught.value)


async def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library may be installed without the extra."""

    def fail(point: EntryPoint) -> None:
        raise ModuleNotFoundError("No module named 'aiobotocore'", name="aiobotocore")

    monkeypatch.setattr(registry, "_loaded", {})
    monkeypatch.setattr("importlib.metadata.EntryPoint.load", fail)
    with pytest.raises(MissingDriverError, match=r"'aiobotocore'.*pip install .*\[s3\]"):
        async with Repository.open("s3://bucket/data"):
            pass


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (None, "Nothing is there."),
        ("zarr.json", "A plain Zarr hierarchy is there"),
        ("chunks/0A", "What is there: 'chunks/'."),
    ],
)
async def test_a_location_without_a_repository_says_what_is_there(
    key: str | None, said: str
) -> None:
    """A misspelt path, a plain Zarr hierarchy and a wrong folder look alike otherwise."""
    url = memory_url()
    async with open_storage(url) as storage:
        if key is not None:
            await storage.put(key, b"{}")
    with pytest.raises(RepositoryNotFoundError) as caught:
        await Repository.open(url)
    assert said in str(caught.value)
    with pytest.raises(WrongTypeError, match="not by a NoneType"):
        await Repository.open(cast("str", None))


async def test_arguments_of_wrong_types_are_named_and_nothing_is_lost() -> None:
    """A message, its metadata, a solver and an id, in each call that takes them."""
    async with Repository.open(await _filled()) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/0", b"x")
        publishing = (session.commit, session.amend, session.flush)
        for message in (None, 5, b"text"):
            for publish in publishing:
                with pytest.raises(WrongTypeError, match="message of a commit is text, not a"):
                    await publish(cast("str", message))
        for metadata in ("by me", ["by"], 5):
            for publish in publishing:
                with pytest.raises(WrongTypeError, match="Metadata map names to JSON values"):
                    await publish("text", cast("dict[str, str]", metadata))
        for solver in ("ours", ConflictDetector):
            with pytest.raises(WrongTypeError, match="BasicConflictSolver"):
                await session.commit("text", rebase_with=cast("ConflictDetector", solver))
            with pytest.raises(WrongTypeError, match="BasicConflictSolver"):
                await session.rebase(cast("ConflictDetector", solver))
        for snapshot_id in (None, 5):
            with pytest.raises(WrongTypeError, match=r"not a .*lookup_branch"):
                await repository.create_tag("v1", cast("str", snapshot_id))
        with pytest.raises(InvalidInputError, match=r"'main' is not .*lookup_branch"):
            await repository.create_tag("v1", "main")
        await session.commit("all of it is still there")
        assert session.snapshot_id == await repository.lookup_branch("main")


async def test_a_merge_refuses_what_is_no_solver() -> None:
    """The class in place of one of its objects is the most common mistake."""
    async with Repository.open(await _filled()) as repository:
        await repository.create_branch("dev", await repository.lookup_branch("main"))
        for branch in ("main", "dev"):
            session = await repository.writable_session(branch)
            await write(session, "a/c/0", branch.encode())
            await session.commit(f"on {branch}")
        with pytest.raises(WrongTypeError, match="not ConflictDetector"):
            await repository.merge("dev", solver=cast("ConflictDetector", ConflictDetector))
        with pytest.raises(WrongTypeError, match="message of a commit is text, not a int"):
            await repository.revert("main", message=cast("str", 5))
