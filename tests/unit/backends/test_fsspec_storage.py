"""The fsspec backend: trials of file systems, reads and errors."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import fsspec  # type: ignore[import-untyped, unused-ignore]
import pytest
from fsspec.implementations.asyn_wrapper import (  # type: ignore[import-untyped, unused-ignore]
    AsyncFileSystemWrapper,
)
from fsspec.implementations.memory import (  # type: ignore[import-untyped, unused-ignore]
    MemoryFileSystem,
)

from icechunk_async import Repository
from icechunk_async.errors import (
    IcechunkError,
    InvalidInputError,
    InvalidURLError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PermissionDeniedError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
    UnknownSchemeError,
    UnreachableError,
    UnsafeStorageError,
)
from icechunk_async.storage import ABSENT, ByteRange, SuffixRange, Version, open_storage, reopen
from icechunk_async_fsspec import open_filesystem
from icechunk_async_fsspec.storage import modified, translate, version
from tests.helpers import array_document, group_document, read, write
from tests.unit.backends.exclusive import ExclusiveLocal, ExclusiveMemory

if TYPE_CHECKING:
    from pathlib import Path


async def test_file_systems_without_exclusive_creation_are_read_only(tmp_path: Path) -> None:
    """Those of fsspec for memory and local disks are. The probe leaves nothing behind."""
    for url in (f"fsspec+memory://{uuid4()}", f"fsspec+file://{tmp_path}"):
        async with open_storage(url) as storage:
            promises = storage.capabilities
            assert not promises.writable
            assert not promises.conditional_create
            assert "two steps" in promises.reasons["writable"]
            assert [entry async for entry in storage.list_prefix()] == []
            for expected in (None, ABSENT):
                with pytest.raises(UnsafeStorageError, match="two steps"):
                    await storage.put("key", b"body", if_version=expected)
            with pytest.raises(UnsafeStorageError):
                await storage.delete(["key"])


async def test_file_systems_that_create_in_one_step_are_writable(tmp_path: Path) -> None:
    """The name of a file system does not matter; updates are never promised."""
    local, memory = ExclusiveLocal(skip_instance_cache=True), ExclusiveMemory()
    for filesystem, path in ((local, str(tmp_path)), (memory, f"/{uuid4()}")):
        async with open_filesystem(filesystem, path) as storage:
            promises = storage.capabilities
            assert promises.writable
            assert promises.conditional_create
            assert not promises.conditional_update
            assert [entry async for entry in storage.list_prefix()] == []
            first = await storage.put("key", b"body", if_version=ABSENT)
            with pytest.raises(UnsafeStorageError, match="known state"):
                await storage.put("key", b"body", if_version=first)


async def test_read_only_writes_nothing() -> None:
    """Not even to find out what could be promised."""

    class Watched(ExclusiveMemory):
        writes = 0

        def pipe_file(self, *arguments: Any, **more: Any) -> None:
            type(self).writes += 1
            super().pipe_file(*arguments, **more)

    async with open_filesystem(Watched(), f"/{uuid4()}", read_only=True) as storage:
        assert not storage.capabilities.writable
        assert Watched.writes == 0
        async with open_storage(storage.description.url, read_only=True) as other:
            assert "read_only" in other.capabilities.reasons["writable"]


async def test_a_file_system_that_refuses_writes_is_read_only() -> None:
    """Public data can be opened without saying so."""

    class Public(MemoryFileSystem):  # type: ignore[misc, unused-ignore]
        def pipe_file(self, *_: Any, **__: Any) -> None:
            raise PermissionError

    async with open_filesystem(Public(), f"/{uuid4()}") as storage:
        assert "nothing could be written" in storage.capabilities.reasons["writable"]


async def test_objects_of_others_are_read_and_listed(tmp_path: Path) -> None:
    """From local disks and from memory, with ranges, in order, and with versions that change."""
    for url in (f"fsspec+file://{tmp_path}", f"fsspec+memory:///{uuid4()}"):
        filesystem, folder = fsspec.core.url_to_fs(url.removeprefix("fsspec+"))
        for name in ("b/c", "b0", "a", "b/d/e"):
            filesystem.makedirs(f"{folder}/{name}".rpartition("/")[0], exist_ok=True)
            filesystem.pipe_file(f"{folder}/{name}", b"0123456789")
        async with open_storage(url) as storage, reopen(storage.description) as other:
            names = [getattr(entry, "key", "") async for entry in other.list_prefix()]
            assert names == ["a", "b/c", "b/d/e", "b0"]
            found = await storage.get("b/c", ByteRange(2, 5))
            assert (found.data, found.size_bytes) == (b"234", 10)
            assert (await other.get("b/c", SuffixRange(99))).data == b"0123456789"
            assert await storage.get_if_changed("b/c", found.version) is None
            filesystem.pipe_file(f"{folder}/b/c", b"changed")
            again = await storage.get_if_changed("b/c", found.version)
            assert again is not None
            assert again.data == b"changed"
            for missing in ("b", "a/below", "nothing"):
                with pytest.raises(ObjectNotFoundError):
                    await storage.get(missing)


async def test_a_repository_is_read_through_a_file_system(tmp_path: Path) -> None:
    """It was written by the backend for local disks; nothing can be committed here."""
    async with Repository.create(tmp_path / "repo") as repository:
        session = await repository.writable_session("main")
        await write(session, "zarr.json", group_document())
        await write(session, "a/zarr.json", array_document((4,), (2,)))
        await write(session, "a/c/1", b"xx")
        await session.commit("written")
    async with Repository.open(f"fsspec+file://{tmp_path}/repo") as repository:
        session = await repository.readonly_session(branch="main")
        assert await read(session, "a/c/1") == b"xx"
        with pytest.raises(IcechunkError, match="two steps"):
            await repository.writable_session("main")


@pytest.mark.parametrize(
    ("error", "reading", "writing"),
    [
        (FileNotFoundError("x"), ObjectNotFoundError, OutcomeUnknownError),
        (PermissionError("x"), PermissionDeniedError, PermissionDeniedError),
        (OSError(28, "full"), StorageError, StorageFullError),
        (ConnectionResetError("x"), UnreachableError, OutcomeUnknownError),
        (TimeoutError("x"), StorageUnavailableError, OutcomeUnknownError),
        (NotImplementedError("x"), StorageError, StorageError),
        (RuntimeError("password"), StorageError, OutcomeUnknownError),
    ],
)
def test_failures_have_names(
    error: Exception, reading: type[IcechunkError], writing: type[IcechunkError]
) -> None:
    """The text of the file system is not repeated; a write may have landed."""
    for kind, writes in ((reading, False), (writing, True)):
        translated = translate(error, "do", "a key", writes=writes)
        assert isinstance(translated, kind)
        assert "a key" in str(translated)
        assert "password" not in str(translated)


def test_versions_and_times_come_in_many_words() -> None:
    """Any property besides the size makes a version."""
    moment = datetime(2020, 1, 2, tzinfo=UTC)
    assert version({"size": 1, "ETag": "x"}, "key") == Version("ETag x")
    one, two = ({"size": 1, "mtime": stamp} for stamp in (1.0, 2.0))
    assert version(one, "key") != version(two, "key")
    assert version(one, "key") != version(one | {"size": 2}, "key")
    with pytest.raises(StorageError, match="only the size"):
        version({"name": "key", "size": 1, "type": "file"}, "key")
    for told in (moment, moment.replace(tzinfo=None), moment.timestamp(), "2020-01-02T00:00:00Z"):
        assert modified({"LastModified": told}) == moment
    assert modified({"LastModified": "yesterday"}) is None
    late = datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))
    for odd in (1e300, 1e15, float("inf"), 1 << 2000, late, late.isoformat()):
        assert modified({"mtime": odd, "created": 1}) == datetime.fromtimestamp(1, UTC)


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("fsspec+nonsense://x", InvalidURLError),
        ("fsspec+sftp://me:hidden@host/x", InvalidURLError),
        ("fsspec+://x", UnknownSchemeError),
        ("nofamily+x://x", UnknownSchemeError),
    ],
)
async def test_urls_of_no_file_system_are_refused(url: str, kind: type[IcechunkError]) -> None:
    """The message shows no password."""
    with pytest.raises((kind, InvalidURLError)) as caught:
        async with open_storage(url):
            pass
    assert "hidden" not in str(caught.value)


async def test_options_are_the_file_systems_own_and_stay_secret() -> None:
    """They travel with the description and are shown nowhere; wrong ones are refused."""
    options = {"filesystem_options": {"token": "a-secret"}, "read_only": True}
    async with open_storage(f"fsspec+memory://{uuid4()}", **options) as storage:
        description = pickle.loads(pickle.dumps(storage.description))
        assert description.options == options
        assert "a-secret" not in f"{storage!r} {description!r}"
    with pytest.raises(InvalidInputError, match="no option 'tokn'"):
        async with open_storage("fsspec+memory://x", tokn=1):
            pass
    with pytest.raises(InvalidInputError, match="filesystem_options"):
        async with open_storage("fsspec+zip://x"):  # which needs to be told of a file
            pass


async def test_a_file_system_of_one_loop_is_refused() -> None:
    """It is used on threads, where it would wait for a loop that is not there."""
    filesystem = AsyncFileSystemWrapper(MemoryFileSystem(), asynchronous=True)
    with pytest.raises(InvalidInputError, match="asynchronous"):
        async with open_filesystem(filesystem, "/x"):
            pass
