"""The local backend's translation of errors of the operating system."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async.errors import (
    IcechunkError,
    InvalidObjectKeyError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PermissionDeniedError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)
from icechunk_async.storage import ABSENT, open_storage
from icechunk_async_local.failures import explain
from icechunk_async_local.paths import place_of
from tests.unit.backends.local_tools import (
    everything,
    failing,
    make_files,
    names,
    naming,
    read,
    write,
)

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.storage import Expected

KINDS: list[tuple[int, type[IcechunkError]]] = [
    (errno.EACCES, PermissionDeniedError),
    (errno.EPERM, PermissionDeniedError),
    (errno.EROFS, PermissionDeniedError),
    (errno.ENOSPC, StorageFullError),
    (errno.EDQUOT, StorageFullError),
    (errno.ENAMETOOLONG, InvalidObjectKeyError),
    (errno.EMFILE, StorageUnavailableError),
    (errno.ENFILE, StorageUnavailableError),
    (errno.ESTALE, StorageUnavailableError),
    (errno.EIO, StorageError),
    (errno.EFBIG, StorageError),
]
"""The class raised for each error; the last one is the generic class."""


@pytest.mark.parametrize(("number", "kind"), KINDS, ids=str)
def test_errors_of_reading_are_translated(
    tmp_path: Path, number: int, kind: type[IcechunkError]
) -> None:
    """The class fits a handler, the message names operation and cause."""
    files = make_files(tmp_path)
    write(files, "a/b", b"x")
    for call in ("open", "preadv"):
        chosen = naming("b") if call == "open" else None
        with (
            failing(call, number, when=chosen or (lambda *_: True)),
            pytest.raises(kind) as caught,
        ):
            read(files, "a/b")
        error = caught.value
        assert type(error) is kind
        assert str(tmp_path / "a" / "b") in str(error)
        assert os.strerror(number) in str(error)
        assert error.context["key"] == "a/b"
        assert error.context["errno"] == errno.errorcode[number]
        assert isinstance(error.__cause__, OSError)


@pytest.mark.parametrize(("number", "kind"), KINDS, ids=str)
@pytest.mark.parametrize("call", ["open", "write", "utime", "fsync"])
@pytest.mark.parametrize("expected", [None, ABSENT], ids=["put", "create"])
def test_errors_of_writing_are_translated_and_leave_nothing(
    tmp_path: Path, number: int, kind: type[IcechunkError], call: str, expected: Expected
) -> None:
    """The object is what it was, and no unfinished file is left."""
    files = make_files(tmp_path)
    write(files, "a/b", b"old")
    files.ledger.sync()
    key = "a/b" if expected is None else "a/new"
    before = everything(tmp_path)

    def unfinished(*arguments: Any) -> bool:
        return call != "open" or b".icechunk-tmp-" in os.fsencode(arguments[0])

    with failing(call, number, when=unfinished) as failed:
        if call == "fsync" and expected is None:
            write(files, key, b"new")  # chunks are not synced one by one
            assert failed["fsync"] == 0
            return
        with pytest.raises(kind) as caught:
            write(files, key, b"new", expected)
    assert type(caught.value) is kind
    assert failed[call] == 1
    assert read(files, "a/b") == b"old"
    assert everything(tmp_path) == before


def test_a_disk_that_fills_up_half_way_leaves_nothing(tmp_path: Path) -> None:
    """Some bytes were written before there was no room: they are removed."""
    files = make_files(tmp_path)
    original = os.write
    calls = 0

    def write_some(fd: int, data: memoryview) -> int:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(fd, data[:1000])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", write_some)
        with pytest.raises(StorageFullError, match="Make room"):
            write(files, "a/b", b"x" * 10_000)
    assert everything(tmp_path) == ["a/"]


def test_writes_that_the_system_cuts_short_are_continued(tmp_path: Path) -> None:
    """A system call may take less than it was given."""
    files = make_files(tmp_path)
    original = os.write
    body = bytes(range(256)) * 10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: original(fd, data[:100]))
        write(files, "a", body)
    assert (tmp_path / "a").read_bytes() == body


def test_reads_that_the_system_cuts_short_are_continued(tmp_path: Path) -> None:
    """A system call may answer less than it was asked for; two gigabytes at most."""
    files = make_files(tmp_path)
    body = bytes(range(256)) * 10
    write(files, "a", body)
    original = os.preadv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", lambda fd, views, at: original(fd, [views[0][:100]], at))
        assert read(files, "a") == body


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """Another program that truncates objects is found out, not answered with less."""
    files = make_files(tmp_path)
    write(files, "a", b"0123456789")
    original = os.preadv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            os, "preadv", lambda fd, views, at: original(fd, [views[0][:4]], at) if at == 0 else 0
        )
        with pytest.raises(StorageError, match="cut the file short"):
            read(files, "a")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT, errno.ETIMEDOUT])
def test_a_failed_rename_is_unknown(tmp_path: Path, number: int) -> None:
    """Network file systems fail after they have done it; nobody may take that for a refusal."""
    files = make_files(tmp_path)
    version = write(files, "a", b"1")
    for expected in (None, version):
        with (
            failing("rename", number),
            pytest.raises(OutcomeUnknownError, match="Read it to know"),
        ):
            write(files, "a", b"2", expected)
    with failing("link", number), pytest.raises(OutcomeUnknownError):
        write(files, "b", b"2", ABSENT)
    assert everything(tmp_path) == ["a"]


def test_a_link_reported_as_refused_may_have_landed(tmp_path: Path) -> None:
    """NFS repeats a request whose answer was lost, and then finds the name taken by itself."""
    files = make_files(tmp_path)
    original = os.link

    def link_twice(*arguments: Any, **keywords: Any) -> None:
        original(*arguments, **keywords)
        original(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", link_twice)
        version = write(files, "a", b"1", ABSENT)
    assert files.read(place_of("a")).version == version
    assert everything(tmp_path) == ["a"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EMLINK])
def test_a_folder_without_links_creates_under_the_lock(tmp_path: Path, number: int) -> None:
    """A folder below the root may be on another file system than the one that was tried."""
    files = make_files(tmp_path)
    with failing("link", number) as failed:
        version = write(files, "a/b", b"1", ABSENT)
        with pytest.raises(IcechunkError, match="is at"):
            write(files, "a/b", b"2", ABSENT)
    assert failed["link"] == 2
    found = files.read(place_of("a/b"))
    assert (bytes(found.data), found.version) == (b"1", version)


def test_a_landed_write_that_cannot_be_synced_is_unknown(tmp_path: Path) -> None:
    """A reference that is visible and may be lost is neither landed nor refused."""
    files = make_files(tmp_path)
    version = write(files, "refs/a", b"1", ABSENT)
    original = os.fsync

    def fail_for_folders(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        original(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fail_for_folders)
        with pytest.raises(OutcomeUnknownError, match="power cut"):
            write(files, "refs/a", b"2", version)
    assert read(files, "refs/a") == b"2"


def test_copies_do_without_help_of_the_kernel(tmp_path: Path) -> None:
    """Where it does not copy between files, or stops half-way, the bytes go through memory."""
    files = make_files(tmp_path)
    body = os.urandom(3 << 20)
    write(files, "a", body)
    original = os.copy_file_range
    with failing("copy_file_range", errno.EXDEV) as failed:
        files.copy(place_of("a"), place_of("b"), None)
        assert failed["copy_file_range"] == 1

    def stop_half_way(source: int, target: int, count: int, **keywords: int) -> int:
        return 0 if keywords["offset_src"] else original(source, target, 1000, offset_src=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "copy_file_range", stop_half_way)
        files.copy(place_of("a"), place_of("c"), None)
    assert (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes() == body
    with failing("copy_file_range", errno.ENOSPC), pytest.raises(StorageFullError):
        files.copy(place_of("a"), place_of("d"), None)
    assert everything(tmp_path) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EACCES, PermissionDeniedError), (errno.EIO, StorageError)],
)
async def test_errors_of_deleting_are_reported_for_each_key(
    tmp_path: Path, number: int, kind: type[IcechunkError]
) -> None:
    """Whether a file or its folder is to blame."""
    async with open_storage(tmp_path) as storage:
        for key in ("a/b", "a/c", "d/e"):
            await storage.put(key, b"x")
        with failing("unlink", number, when=naming("b")):
            failures = await storage.delete(["a/b", "a/c", "d/e"])
        assert [(failure.key, type(failure.error)) for failure in failures] == [("a/b", kind)]
        await storage.put("d/e", b"x")
        with failing("open", number, when=naming("a")):
            failures = await storage.delete(["a/b", "a/c", "d/e"])
        assert [failure.key for failure in failures] == ["a/b", "a/c"]
        assert everything(tmp_path) == ["a/", "a/b"]


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EACCES, PermissionDeniedError), (errno.EIO, StorageError)],
)
async def test_a_folder_that_cannot_be_listed_is_an_error(
    tmp_path: Path, number: int, kind: type[IcechunkError]
) -> None:
    """A listing that leaves out what it may not see would lose objects to the collector."""
    async with open_storage(tmp_path) as storage:
        for key in ("a/b", "c/d", "e/f"):
            await storage.put(key, b"x")
        for prefix in ("", "c/", "c/d"):
            with failing("open", number, when=naming("c")), pytest.raises(kind, match="list"):
                assert [entry async for entry in storage.list_prefix(prefix)]


async def test_a_folder_that_disappears_is_left_out(tmp_path: Path) -> None:
    """It is as if it had been deleted before."""
    async with open_storage(tmp_path) as storage:
        for key in ("a/b", "c/d", "e/f", "e/g"):
            await storage.put(key, b"x")
        with failing("open", errno.ENOENT, when=naming("c")):
            assert names([e async for e in storage.list_prefix()]) == ["a/b", "e/f", "e/g"]
            assert names([e async for e in storage.list_prefix(delimiter="/")]) == ["a/", "e/"]
        with failing("stat", errno.ENOENT, when=naming("f")):
            assert names([e async for e in storage.list_prefix()]) == ["a/b", "c/d", "e/g"]


def test_messages_say_what_was_asked_found_and_what_to_do() -> None:
    """Every error that the table knows is a sentence of three parts."""
    for number in errno.errorcode:
        error = explain(OSError(number, os.strerror(number)), "read", "/data/a", key="a")
        assert str(error).startswith("Could not read '/data/a': ")
        assert os.strerror(number) in str(error)
        assert str(error).endswith(".")
        assert error.context["key"] == "a"
    assert isinstance(explain(OSError("no number"), "read", "/data"), StorageError)


async def test_a_missing_object_is_not_an_error_of_the_system(tmp_path: Path) -> None:
    """The cause is attached, and the message is for the caller."""
    async with open_storage(tmp_path) as storage:
        with pytest.raises(ObjectNotFoundError, match="There is no object 'a/b'"):
            await storage.get("a/b")
