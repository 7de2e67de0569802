"""The trial of a directory when the local backend opens it."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import platform
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository
from icechunk_async.errors import (
    ObjectNotFoundError,
    PreconditionFailedError,
    UnsafeStorageError,
)
from icechunk_async.storage import ABSENT, BlockingStorage, Capabilities, open_storage
from icechunk_async_local import filesystems, open_local
from icechunk_async_local import storage as local_storage
from icechunk_async_local.at_once import ReadsAtOnce
from tests.helpers import make_array, read, write
from tests.unit.backends.local_tools import everything, failing
from tests.without_updates import NUMBERED

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from icechunk_async.storage import Storage

NFS = 0x6969
FUSE = 0x65735546


async def capabilities_of(root: Path, **options: object) -> Capabilities:
    """Open a directory and answer what was found out."""
    async with open_storage(root, **options) as storage:
        return storage.capabilities


async def test_a_local_disk_promises_everything(tmp_path: Path) -> None:
    """Nothing is left of the trial."""
    assert await capabilities_of(tmp_path) == Capabilities()
    assert await capabilities_of(tmp_path / "not" / "there") == Capabilities()
    assert everything(tmp_path) == []


async def test_a_directory_that_is_not_there_is_tried_above(tmp_path: Path) -> None:
    """The root will be on the file system of its parent."""
    with failing("link", errno.EPERM) as failed:
        assert not (await capabilities_of(tmp_path / "a" / "b")).reasons
    assert failed["link"] == 1
    assert everything(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.ENOTSUP])
async def test_without_links_creations_use_the_lock(tmp_path: Path, number: int) -> None:
    """Both conditions stay promised."""
    with failing("link", number):
        async with open_storage(tmp_path) as storage:
            assert storage.capabilities == Capabilities()
            await storage.put("a", b"1", if_version=ABSENT)
            with pytest.raises(PreconditionFailedError):
                await storage.put("a", b"2", if_version=ABSENT)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EBADF])
async def test_without_locks_there_are_no_updates(tmp_path: Path, number: int) -> None:
    """Creations still work by hard links; an update is refused with advice."""
    with failing("flock", number, module=fcntl):
        async with open_storage(tmp_path) as storage:
            assert storage.capabilities == Capabilities(
                conditional_update=False, reasons=storage.capabilities.reasons
            )
            reason = storage.capabilities.reasons["conditional_update"]
            assert "cannot be locked" in reason
            assert "Use another file system" in reason
            version = await storage.put("a", b"1", if_version=ABSENT)
            with pytest.raises(PreconditionFailedError):
                await storage.put("a", b"2", if_version=ABSENT)
            with pytest.raises(UnsafeStorageError, match="cannot be locked"):
                await storage.put("a", b"2", if_version=version)
            await storage.put("a", b"2")
            await storage.delete(["a"])
    assert everything(tmp_path) == []


async def test_without_links_and_locks_there_are_no_conditions(tmp_path: Path) -> None:
    """Plain objects can still be written and read."""
    with failing("flock", errno.ENOSYS, module=fcntl), failing("link", errno.EPERM):
        async with open_storage(tmp_path) as storage:
            found = storage.capabilities
            assert (found.conditional_create, found.conditional_update) == (False, False)
            assert found.reasons.keys() == {"conditional_create", "conditional_update"}
            version = await storage.put("a", b"1")
            for expected in (ABSENT, version):
                with pytest.raises(UnsafeStorageError):
                    await storage.put("a", b"2", if_version=expected)
            assert (await storage.get("a")).data == b"1"


async def test_locks_that_keep_nobody_out_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that says yes to every lock is found out."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    found = await capabilities_of(tmp_path)
    assert not found.conditional_update
    assert "keep nobody out" in found.reasons["conditional_update"]


async def test_links_that_replace_files_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that links over what is there is found out."""

    def replace(source: Any, target: Any, **_: Any) -> None:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))

    monkeypatch.setattr(os, "link", replace)
    with failing("flock", errno.ENOSYS, module=fcntl):
        found = await capabilities_of(tmp_path)
    assert "links over existing files" in found.reasons["conditional_create"]


async def test_coarse_times_allow_no_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two states of an object could have one version, updates are refused."""
    original = os.utime

    def to_two_seconds(path: Any, times: Any = None, *, ns: Any = None, **keywords: Any) -> None:
        coarse = tuple(value // 2_000_000_000 * 2_000_000_000 for value in ns)
        original(path, ns=coarse, **keywords)

    monkeypatch.setattr(os, "utime", to_two_seconds)
    async with open_storage(tmp_path) as storage:
        assert storage.capabilities.conditional_create
        assert "microseconds" in storage.capabilities.reasons["conditional_update"]
        version = await storage.put("a", b"1", if_version=ABSENT)
        with pytest.raises(UnsafeStorageError):
            await storage.put("a", b"2", if_version=version)


@pytest.mark.parametrize("kind", [NFS, FUSE, None])
async def test_a_network_file_system_allows_no_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int | None
) -> None:
    """Linux keeps locks on their directories to the machine; the caller's word makes them do."""
    monkeypatch.setattr(filesystems, "_kind", lambda _: kind)
    found = await capabilities_of(tmp_path)
    assert (found.conditional_create, found.conditional_update) == (True, False)
    assert "single_machine=True" in found.reasons["conditional_update"]
    assert await capabilities_of(tmp_path, single_machine=True) == Capabilities()


def _mount_in_user_space(patch: pytest.MonkeyPatch) -> AbstractContextManager[Any]:
    patch.setattr(filesystems, "_kind", lambda _: FUSE)
    return nullcontext()


def _exfat(patch: pytest.MonkeyPatch) -> AbstractContextManager[Any]:
    """Make no links, and keep times to ten milliseconds."""
    original = os.utime

    def utime(path: Any, times: Any = None, *, ns: Any = None, **keywords: Any) -> None:
        del times
        original(path, ns=tuple(it // 10**7 * 10**7 for it in ns), **keywords)

    patch.setattr(os, "utime", utime)
    return failing("link", errno.EPERM)


@pytest.mark.parametrize("kind", [_mount_in_user_space, _exfat])
async def test_numbered_states_suit_folders_where_files_are_safely_created_only(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[[pytest.MonkeyPatch], AbstractContextManager[Any]],
) -> None:
    """The ordinary layout is refused there, and the refusal names this one."""
    with kind(monkeypatch):
        with pytest.raises(UnsafeStorageError, match="layout='format-2-numbered'"):
            async with Repository.create(tmp_path):
                pass
        async with Repository.create(tmp_path, layout=NUMBERED) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "a", (2,), (1,))
            await write(session, "a/c/0", b"1")
            await session.commit("on such a folder")
        async with Repository.open(tmp_path) as again:
            assert again.layout == NUMBERED
            assert await read(await again.readonly_session("main"), "a/c/0") == b"1"


def test_the_kind_of_a_file_system_is_read_from_the_kernel() -> None:
    """Of /proc the number is known; nothing is said of a descriptor that is closed."""
    fd = os.open("/proc", os.O_RDONLY)
    assert filesystems._kind(fd) == 0x9FA0
    assert not filesystems.has_common_locks(fd)
    os.close(fd)
    assert filesystems._kind(fd) is None
    assert not filesystems.has_common_locks(fd)
    assert not filesystems.can_sync_at_once(fd)


@pytest.mark.parametrize("release", ["5.7.19", "4.18.0-553.el8", "odd", "5"])
def test_an_old_kernel_syncs_file_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    """Before Linux 5.8 ``syncfs`` did not say that a write failed."""
    fd = os.open(tmp_path, os.O_RDONLY)
    monkeypatch.setattr(filesystems, "_kind", lambda _: 0xEF53)
    monkeypatch.setattr(platform, "release", lambda: "6.1.0")
    assert filesystems.can_sync_at_once(fd)
    monkeypatch.setattr(platform, "release", lambda: release)
    assert not filesystems.can_sync_at_once(fd)
    os.close(fd)


async def test_a_directory_that_may_not_be_written_opens_for_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is tried there; reads work, and writes are refused with the reason."""
    async with open_storage(tmp_path) as storage:
        await storage.put("a/b", b"body")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr(local_storage, "may_write", lambda _: False)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a read-only directory was written to")

    for name in ("mkdir", "link", "utime", "unlink", "rename"):
        monkeypatch.setattr(os, name, refuse)
    async with open_storage(tmp_path) as storage:
        found = storage.capabilities
        assert (found.writable, found.conditional_create) == (False, False)
        assert not found.conditional_update
        assert found.reasons.keys() == {"writable", "conditional_create", "conditional_update"}
        assert (await storage.get("a/b")).data == b"body"
        assert len([entry async for entry in storage.list_prefix()]) == 1
        await storage.sync()
        for operation in (
            storage.put("a/b", b"x"),
            storage.put("a/c", b"x", if_version=ABSENT),
            storage.delete(["a/b"]),
            storage.copy("a/b", "c"),
        ):
            with pytest.raises(UnsafeStorageError, match="cannot be written"):
                await operation


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO])
async def test_a_directory_where_the_trial_fails_opens_for_reading(
    tmp_path: Path, number: int
) -> None:
    """An operation that ``access`` allowed may still be refused."""
    with failing("mkdir", number):
        found = await capabilities_of(tmp_path)
    assert not found.writable
    assert os.strerror(number) in found.reasons["writable"]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("call", ["mkdir", "open"])
async def test_a_full_disk_can_be_read_and_tidied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, *, known: bool
) -> None:
    """Deleting must work where there is no room for a trial; known file systems need none."""
    monkeypatch.setattr(filesystems, "opens_without_requests", lambda _: known)
    monkeypatch.setattr(filesystems, "identity_of", lambda _: None)
    (tmp_path / "a").write_bytes(b"x")

    def for_trial(*arguments: Any) -> bool:
        return b"probe-" in os.fsencode(arguments[0]) and (
            call == "mkdir" or os.fsencode(arguments[0]).endswith(b"first")
        )

    with failing(call, errno.ENOSPC, when=for_trial) as failed:
        async with open_storage(tmp_path) as storage:
            assert failed[call] == 1
            found = storage.capabilities
            assert (found.writable, found.conditional_update) == (True, known)
            assert known or "Make room" in found.reasons["conditional_update"]
            assert (await storage.get("a")).data == b"x"
            assert await storage.delete(["a"]) == []
    assert everything(tmp_path) == []


async def test_a_system_that_opens_nothing_below_a_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that, keys could not be kept below the root."""
    monkeypatch.setattr(local_storage, "_OPENS_BELOW", False)
    with pytest.raises(UnsafeStorageError, match="POSIX"):
        async with open_storage(tmp_path):
            pass


def test_windows_can_import_it_and_promises_no_updates(tmp_path: Path) -> None:
    """Without the modules of POSIX it imports, and says what it cannot promise."""
    program = textwrap.dedent("""
        import asyncio, concurrent.futures, ctypes, pathlib, subprocess, sys, tempfile
        import aiofiles.os, icechunk_async.storage
        sys.platform = "win32"
        sys.modules["fcntl"] = None
        import icechunk_async_local

        async def main():
            async with icechunk_async_local.open_local(sys.argv[1]) as storage:
                found = storage.capabilities
                print(found.conditional_create, found.conditional_update)
                await storage.put("a", b"x", if_version=icechunk_async.storage.ABSENT)

        asyncio.run(main())
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path.as_uri()],
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True False\n"


async def test_a_handle_is_a_storage(tmp_path: Path) -> None:
    """The type checker compares the class with the contract, method by method."""
    async with open_local(tmp_path.as_uri()) as handle:
        storage: Storage = handle
        blocking: BlockingStorage = handle
        assert isinstance(storage, BlockingStorage)
        assert blocking is storage


def outcomes() -> list[tuple[str, Callable[[], Any]]]:
    """Return ways in which a trial can end."""
    return [
        ("links", lambda: failing("link", errno.EPERM)),
        ("locks", lambda: failing("flock", errno.ENOSYS, module=fcntl)),
        ("times", lambda: failing("utime", errno.EPERM)),
    ]


@pytest.mark.parametrize(("name", "fail"), outcomes())
async def test_a_trial_leaves_nothing_however_it_ends(
    tmp_path: Path, name: str, fail: Callable[[], Any]
) -> None:
    """Also where something fails that was not expected to."""
    del name
    with fail():
        await capabilities_of(tmp_path)
    assert everything(tmp_path) == []


async def test_a_file_system_that_works_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One where something failed is tried again, and so is one of a kind that is not known."""
    if await asyncio.to_thread(filesystems.identity_of, tmp_path) is None:
        pytest.skip("the tests' directory is not on a disk of this machine")
    with failing("link", errno.EPERM) as failed:
        for _ in range(2):
            await capabilities_of(tmp_path)
        assert failed["link"] == 2
        del failed["link"]
    assert await capabilities_of(tmp_path) == Capabilities()
    with failing("link", errno.EPERM) as failed:
        assert await capabilities_of(tmp_path / "other") == Capabilities()
        assert failed["link"] == 0
        monkeypatch.setattr(filesystems, "_kind", lambda _: FUSE)
        assert not (await capabilities_of(tmp_path)).conditional_update
        assert failed["link"] == 1


async def test_write_permission_is_checked_at_each_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if its file system is known."""
    assert await capabilities_of(tmp_path) == Capabilities()
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(local_storage, "may_write", lambda _: False)
    assert not (await capabilities_of(tmp_path)).writable


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the directories that are looked at on a thread from now on."""
    found: list[object] = []
    look = local_storage._look

    def noted(*args: Any) -> Any:
        found.append(args[1])
        return look(*args)

    monkeypatch.setattr(local_storage, "_look", noted)
    return found


async def _is_at_once(path: Path) -> bool:
    """Return whether nothing has to wait for the directory."""
    return (await asyncio.to_thread(ReadsAtOnce, path)).active


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_directory_that_was_opened_before_takes_no_thread(
    tmp_path: Path,
    looks: list[object],
    read_only: bool,  # noqa: FBT001
) -> None:
    """A hop takes longer than the rest of opening the storage. Other options need a look."""
    if not await _is_at_once(tmp_path):
        pytest.skip("only Linux on a local file system looks without waiting")
    for _ in range(3):
        async with open_storage(tmp_path.as_uri(), read_only=read_only) as storage:
            assert storage.capabilities.writable is not read_only
            with pytest.raises(ObjectNotFoundError):
                await storage.get("absent")
    assert len(looks) == 1
    async with open_storage(tmp_path.as_uri(), read_only=not read_only) as storage:
        assert storage.capabilities.writable is read_only
    assert len(looks) == 2


async def test_another_directory_of_the_same_name_is_looked_at(
    tmp_path: Path, looks: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is one after an hour, in which others may have left unfinished files."""
    if not await _is_at_once(tmp_path):
        pytest.skip("only Linux on a local file system looks without waiting")
    root = tmp_path / "root"
    for turn in range(2):
        root.mkdir()
        for _ in range(2):
            await capabilities_of(root)
        assert len(looks) == turn + 1
        root.rename(tmp_path / f"moved-{turn}")
    assert await capabilities_of(root) == Capabilities()  # it does not exist
    root.mkdir()
    looks.clear()
    monkeypatch.setattr(local_storage, "_SEEN_SECONDS", -1.0)
    for _ in range(2):
        await capabilities_of(root)
    assert len(looks) == 2
