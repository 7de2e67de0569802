"""The most common mistakes: each raises a separate error that says what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.errors import (
    BranchNotFoundError,
    ConflictError,
    FormatError,
    IcechunkError,
    InvalidURLError,
    MissingDriverError,
    NothingToCommitError,
    ReadOnlyError,
    RepositoryExistsError,
    RepositoryNotFoundError,
    TagDeletedError,
    UnknownSchemeError,
    UnsupportedSpecVersionError,
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
