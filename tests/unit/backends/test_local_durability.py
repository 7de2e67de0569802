"""Durability: which files are synced, in which order, and errors of syncs."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async.errors import StorageError, StorageUnavailableError
from icechunk_async.storage import ABSENT, open_storage
from icechunk_async_local import durability, filesystems
from icechunk_async_local.durability import FEW, Ledger
from icechunk_async_local.paths import place_of
from tests.unit.backends.local_tools import (
    failing,
    make_files,
    naming,
    open_descriptors,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def recorded(root: Path) -> Generator[list[tuple[str, str]]]:
    """Record what is synced and what gets its name, with paths relative to the root."""
    events: list[tuple[str, str]] = []
    lock = threading.Lock()
    fsync, rename, link = os.fsync, os.rename, os.link

    def path_of(fd: int) -> str:
        return os.path.relpath(Path(f"/proc/self/fd/{fd}").readlink(), root)

    def note(event: str, path: str) -> None:
        with lock:
            events.append((event, path))

    def noted_fsync(fd: int) -> None:
        fsync(fd)
        note("fsync", path_of(fd))

    def noted_rename(source: bytes, target: bytes, **keywords: int) -> None:
        rename(source, target, **keywords)
        note("rename", f"{path_of(keywords['dst_dir_fd'])}/{os.fsdecode(target)}")

    def noted_link(source: bytes, target: bytes, **keywords: Any) -> None:
        link(source, target, **keywords)
        if "dst_dir_fd" not in keywords:
            return  # a trial
        note("link", f"{path_of(keywords['dst_dir_fd'])}/{os.fsdecode(target)}")

    def noted_syncfs(directory: int) -> None:
        filesystems.sync_file_system(directory)
        note("syncfs", "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", noted_fsync)
        patch.setattr(os, "rename", noted_rename)
        patch.setattr(os, "link", noted_link)
        patch.setattr(durability, "sync_file_system", noted_syncfs)
        yield events


def synced(events: list[tuple[str, str]]) -> set[str]:
    """Return the paths that were synced."""
    return {path for event, path in events if event == "fsync"}


async def test_puts_are_synced_when_they_are_asked_for(tmp_path: Path) -> None:
    """A put does not sync; ``sync`` syncs every file and every folder on the way to it."""
    root = tmp_path / "new" / "root"
    async with open_storage(root) as storage:
        with recorded(root) as events:
            await storage.put("chunks/a", b"x")
            await storage.put("deep/er/b", b"x")
            await storage.put("c", b"x")
            await storage.copy("c", "deep/d")
            assert synced(events) == set()
            await storage.sync()
            assert synced(events) == {
                *("chunks/a", "deep/er/b", "c", "deep/d"),
                *("chunks", "deep/er", "deep", "."),
                *("..", "../.."),  # each got a directory
            }
            del events[:]
            await storage.sync()
            assert events == []


async def test_an_object_in_an_old_folder_is_synced_up_to_the_root(tmp_path: Path) -> None:
    """The folder may have been made by a process that died before it synced."""
    (tmp_path / "root" / "a" / "b").mkdir(parents=True)
    root = tmp_path / "root"
    async with open_storage(root) as storage:
        with recorded(root) as events:
            await storage.put("a/b/c", b"x")
            await storage.sync()
            assert synced(events) == {"a/b/c", "a/b", "a", ".", ".."}
            del events[:]
            await storage.put("a/b/d", b"x")
            await storage.sync()
            assert synced(events) == {"a/b/d", "a/b"}  # nothing is new on the way to it


@pytest.mark.parametrize("conditional", [False, True])
async def test_a_folder_that_was_made_again_is_synced_up_to_the_root(
    tmp_path: Path, *, conditional: bool
) -> None:
    """Another process removed the folder when it was empty, made it again, and died."""
    async with open_storage(tmp_path) as storage:

        async def put(key: str) -> None:
            await storage.put(key, b"x", if_version=ABSENT if conditional else None)
            await storage.sync()

        await put("a/b/c")
        for _ in range(3):  # the file system gives numbers of removed folders again
            (tmp_path / "a" / "b" / "c").unlink()
            (tmp_path / "a" / "b").rmdir()
            (tmp_path / "a" / "b").mkdir()
            with recorded(tmp_path) as events:
                await put("a/b/c")
                assert {"a/b", "a", "."} <= synced(events)
                del events[:]
                await put("a/b/d")
                assert not {"a", "."} & synced(events)
            (tmp_path / "a" / "b" / "d").unlink()


async def test_folders_above_are_synced_again_after_a_failure(tmp_path: Path) -> None:
    """They count as durable only when their sync has returned."""
    async with open_storage(tmp_path) as storage:
        await storage.put("a/b", b"x")
        with failing("open", errno.EMFILE, when=lambda path, *_: path == tmp_path) as failed:
            with pytest.raises(StorageUnavailableError):
                await storage.sync()
            assert failed["open"]
        with recorded(tmp_path) as events:
            await storage.put("a/c", b"x")
            await storage.sync()
            assert synced(events) == {"a/b", "a/c", "a", ".", ".."}


async def test_where_numbers_say_nothing_folders_above_are_always_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may give the number of a removed folder again although it is open here."""
    monkeypatch.setattr(durability, "can_sync_at_once", lambda _: False)
    async with open_storage(tmp_path) as storage:
        with recorded(tmp_path) as events:
            for key in ("a/b", "a/c"):
                await storage.put(key, b"x")
                await storage.sync()
                assert {key, "a", "."} <= synced(events)
                del events[:]


@pytest.mark.parametrize("links", [True, False])
async def test_a_reference_is_durable_before_it_is_visible_or_acknowledged(
    tmp_path: Path, *, links: bool
) -> None:
    """First the bytes, then the name, then the folder, then the answer."""
    async with open_storage(tmp_path) as storage:
        with (
            failing("link", errno.EPERM, times=0 if links else 1000),
            recorded(tmp_path) as events,
        ):
            version = await storage.put("refs/main", b"1", if_version=ABSENT)
            created = events.copy()
            del events[:]
            await storage.put("refs/main", b"2", if_version=version)
    for trace, how in ((created, "link" if links else "rename"), (events, "rename")):
        assert [event for event, _ in trace[:3]] == ["fsync", how, "fsync"]
        assert trace[0][1].startswith("refs/.icechunk-tmp-")
        assert [path for _, path in trace[1:3]] == ["refs/main", "refs"]
    assert [path for _, path in created[3:]] == [".", ".."]
    assert len(events) == 3  # one sync for the name: the way to it is durable


async def test_deletions_are_synced(tmp_path: Path) -> None:
    """The folder that lost an entry is synced; one that went away, in the folder above it."""
    async with open_storage(tmp_path) as storage:
        for key in ("a/b/c", "a/d", "e"):
            await storage.put(key, b"x")
        await storage.sync()
        with recorded(tmp_path) as events:
            await storage.delete(["a/d"])
            await storage.sync()
            assert synced(events) == {"a", "."}
            del events[:]
            await storage.delete(["a/b/c"])
            await storage.sync()
            assert synced(events) == {"."}


async def test_many_puts_are_synced_with_one_call(tmp_path: Path) -> None:
    """More than a few files are left to the file system as a whole."""
    async with open_storage(tmp_path) as storage:
        with recorded(tmp_path) as events:
            for number in range(FEW + 1):
                await storage.put(f"chunks/{number}", b"x")
            await storage.sync()
            assert next(event for event, _ in events if event != "rename") == "syncfs"
            assert not any(path.startswith("chunks/") for path in synced(events))


async def test_many_puts_are_synced_one_by_one_where_that_is_the_only_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system cannot be trusted to sync at once, every file is synced."""
    monkeypatch.setattr(durability, "can_sync_at_once", lambda _: False)
    async with open_storage(tmp_path) as storage:
        with recorded(tmp_path) as events:
            keys = [f"chunks/{number}" for number in range(FEW * 3)]
            await bounded_map(lambda key: storage.put(key, b"x"), keys, limit=32)
            await storage.sync()
            assert synced(events) >= {*keys, "chunks", "."}


async def test_a_sandbox_without_the_call_syncs_file_by_file(tmp_path: Path) -> None:
    """Where the call is refused, and nothing was left to it yet, the files are synced."""
    async with open_storage(tmp_path) as storage:
        with (
            recorded(tmp_path) as events,
            failing("sync_file_system", errno.ENOSYS, module=durability) as failed,
        ):
            keys = [f"chunks/{number}" for number in range(FEW * 2)]
            for _ in range(2):
                for key in keys:
                    await storage.put(key, b"x")
                await storage.sync()
                assert synced(events) >= {*keys, "chunks", "."}
                del events[:]
            assert failed["sync_file_system"] == 1


@pytest.mark.parametrize("at_once", [True, False])
async def test_the_ledger_is_bounded_and_forgets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, at_once: bool
) -> None:
    """Past the bound everything is synced at the end, or each file when it is written."""
    monkeypatch.setattr(durability, "can_sync_at_once", lambda _: at_once)
    monkeypatch.setattr(durability, "MOST_REMEMBERED", 10)
    async with open_storage(tmp_path) as storage:
        ledger = storage._files.ledger  # type: ignore[attr-defined]
        with recorded(tmp_path) as events:
            keys = [f"{number}/key" for number in range(40)]
            for key in keys:
                await storage.put(key, b"x")
                pending = ledger._at_home
                assert len(pending.files) <= 10
                assert len(pending.folders) <= 10
            await storage.delete(keys[:5])
            if at_once:
                assert synced(events) == set()
                assert pending.uncounted
            await storage.sync()
            if at_once:
                assert ("syncfs", "") in events
            else:
                assert synced(events) >= {*keys[5:], *(key.partition("/")[0] for key in keys[5:])}
            del events[:]
            await storage.sync()
            assert events == []


async def test_files_on_another_device_are_synced_one_by_one(tmp_path: Path) -> None:
    """One call syncs one file system; what is mounted below the root is another."""
    original = os.fstat
    elsewhere = tmp_path / "mounted"
    elsewhere.mkdir()
    inode = elsewhere.stat().st_ino

    def other_device(fd: int) -> os.stat_result:
        found = original(fd)
        if found.st_ino != inode:
            return found
        values = list(found)
        values[2] += 1
        return os.stat_result(values)

    async with open_storage(tmp_path) as storage:
        await storage.put("home", b"x")
        with recorded(tmp_path) as events, pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fstat", other_device)
            keys = [f"mounted/{number}" for number in range(FEW * 2)]
            for key in keys:
                await storage.put(key, b"x")
            await storage.sync()
            assert synced(events) >= {*keys, "mounted", ".", "home"}
            assert ("syncfs", "") not in events


async def test_closing_makes_what_was_written_durable(tmp_path: Path) -> None:
    """Without a call of sync, closing makes acknowledged writes durable."""
    with recorded(tmp_path) as events:
        async with open_storage(tmp_path) as storage:
            await storage.put("a/b", b"x")
            assert synced(events) == set()
        assert synced(events) >= {"a/b", "a", "."}


async def test_durability_none_syncs_nothing(tmp_path: Path) -> None:
    """With ``durability="none"`` no call waits for the device."""
    with recorded(tmp_path) as events:
        async with open_storage(tmp_path / "root", durability="none") as storage:
            version = await storage.put("a", b"1", if_version=ABSENT)
            await storage.put("a", b"2", if_version=version)
            for number in range(100):
                await storage.put(f"b/{number}", b"x")
            await storage.delete(["b/1"])
            await storage.sync()
    assert {event for event, _ in events} == {"link", "rename"}


@pytest.mark.parametrize(("mode", "begun"), [("commit", [1 << 20]), ("none", [])])
async def test_large_files_are_written_out_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, begun: list[int]
) -> None:
    """Their write-out has started before the sync; small files are written out together."""
    sizes: list[int] = []
    begin = filesystems.begin_writing_out

    def noted(fd: int) -> None:
        begin(fd)
        sizes.append(os.fstat(fd).st_size)

    monkeypatch.setattr(durability, "begin_writing_out", noted)
    async with open_storage(tmp_path, durability=mode) as storage:
        await storage.put("a/small", bytes((1 << 19) - 1))
        await storage.put("a/large", bytes(1 << 20))
        assert sizes == begun


def test_early_writeout_promises_nothing(tmp_path: Path) -> None:
    """A failing early write-out is ignored, because the sync follows."""
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(1000))
        filesystems.begin_writing_out(file.fileno())
        descriptor = file.fileno()
    filesystems.begin_writing_out(descriptor)


@pytest.mark.parametrize("count", [3, FEW * 2])
async def test_a_lost_write_is_reported_by_every_later_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The system says it once and drops the bytes: another sync must not take it back."""

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def use() -> None:
        async with open_storage(tmp_path) as storage:
            for number in range(count):
                await storage.put(f"a/{number}", b"x")
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", fail)
                patch.setattr(durability, "sync_file_system", fail)
                with pytest.raises(StorageError, match="Input/output error"):
                    await storage.sync()
            for _ in range(2):
                with pytest.raises(StorageError, match="Input/output error"):
                    await storage.sync()
            async with open_storage(tmp_path) as other:
                await other.put("a/b", b"x")
                await other.sync()

    with pytest.raises(StorageError, match="durable"):
        await use()


async def test_a_transient_failure_is_no_lost_write(tmp_path: Path) -> None:
    """Where a file could not even be opened, the next sync tries again."""
    async with open_storage(tmp_path) as storage:
        await storage.put("a/b", b"x")
        await storage.put("c", b"x")
        with (
            failing("open", errno.EMFILE, when=naming("b")),
            pytest.raises(StorageUnavailableError),
        ):
            await storage.sync()
        with recorded(tmp_path) as events:
            await storage.sync()
            assert synced(events) >= {"a/b", "c", "a", "."}


@pytest.mark.parametrize("passing", ["a", "b"])
async def test_a_transient_failure_does_not_hide_a_lost_write(tmp_path: Path, passing: str) -> None:
    """The system tells of the lost one once: who tried again would take it for durable."""
    failed = False
    original = os.fsync

    def fail_once(fd: int) -> None:
        nonlocal failed
        if not failed and Path(f"/proc/self/fd/{fd}").readlink().name != passing:
            failed = True
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        original(fd)

    async def use() -> None:
        async with open_storage(tmp_path) as storage:
            await storage.put("a", b"x")
            await storage.put("b", b"x")
            with (
                failing("open", errno.EMFILE, when=naming(passing)),
                pytest.MonkeyPatch.context() as patch,
            ):
                patch.setattr(os, "fsync", fail_once)
                with pytest.raises(StorageError, match="Input/output error"):
                    await storage.sync()
            with pytest.raises(StorageError, match="Input/output error"):
                await storage.sync()

    with pytest.raises(StorageError, match="durable"):
        await use()


async def test_an_interrupted_sync_does_not_hide_a_lost_write(tmp_path: Path) -> None:
    """The next one would take it for durable."""
    failures: list[BaseException] = [OSError(errno.EIO, os.strerror(errno.EIO)), MemoryError()]

    def fail(_: int) -> None:
        raise failures.pop(0)

    async def use() -> None:
        async with open_storage(tmp_path) as storage:
            await storage.put("a", b"x")
            await storage.put("b", b"x")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "fsync", fail)
                with pytest.raises(StorageError, match="Input/output error"):
                    await storage.sync()
            assert not failures

    with pytest.raises(StorageError, match="durable"):
        await use()


async def test_deleted_files_need_no_sync(tmp_path: Path) -> None:
    """Files that were deleted or replaced by folders meanwhile are no failure."""
    async with open_storage(tmp_path) as storage, open_storage(tmp_path) as other:
        for key in ("a/b", "c", "d", "e/f"):
            await storage.put(key, b"x")
        await other.delete(["a/b", "c", "e/f"])
        await other.put("c/now a folder", b"x")
        (tmp_path / "d").unlink()
        (tmp_path / "d").symlink_to("c")
        await storage.sync()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EROFS])
async def test_folders_that_cannot_be_synced_are_durable_anyway(
    tmp_path: Path, number: int
) -> None:
    """Some file systems have nothing to sync in a directory."""
    original = os.fsync

    def refuse_directories(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        original(fd)

    async with open_storage(tmp_path) as storage:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", refuse_directories)
            await storage.put("a/b", b"x")
            await storage.put("refs/main", b"x", if_version=ABSENT)
            await storage.sync()


async def test_a_sync_waits_for_a_concurrent_sync(tmp_path: Path) -> None:
    """Two syncs at once: the second must not return before the first is done."""
    started, go_on = threading.Event(), threading.Event()
    order: list[str] = []
    original = os.fsync

    def slow(fd: int) -> None:
        started.set()
        go_on.wait(60)
        original(fd)
        order.append("synced")

    async with open_storage(tmp_path) as storage:
        await storage.put("a", b"x")

        async def second() -> None:
            while not started.is_set():
                await storage.get("a")
            waiting = gather(storage.sync(), release())
            await waiting
            order.append("second returned")

        async def release() -> None:
            for _ in range(20):
                await storage.get("a")
            go_on.set()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", slow)
            await gather(storage.sync(), second())
    assert order.index("second returned") > order.index("synced")


async def test_referenced_objects_are_durable_before_the_reference_is_visible(
    tmp_path: Path,
) -> None:
    """A conditional put syncs what was written before together with its own bytes."""
    async with open_storage(tmp_path) as storage:
        await storage.put("refs/main", b"0")
        await storage.put("chunks/a", b"x")
        await storage.put("manifests/b", b"x")
        version = (await storage.get("refs/main")).version
        with recorded(tmp_path) as events:
            await storage.put("refs/main", b"1", if_version=version)
        names = [path for event, path in events if event == "rename"]
        assert names == ["refs/main"]
        seen = events.index(("rename", "refs/main"))
        before = synced(events[:seen])
        assert before >= {"chunks/a", "manifests/b", "chunks", "manifests", "."}
        assert any(path.startswith("refs/.icechunk-tmp-") for path in before)


async def test_no_reference_is_written_after_a_lost_write(tmp_path: Path) -> None:
    """A conditional put raises the error of ``sync``; its object is unchanged."""

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def use() -> None:
        async with open_storage(tmp_path) as storage:
            version = await storage.put("refs/main", b"0", if_version=ABSENT)
            await storage.put("chunks/a", b"x")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "fsync", fail)
                with pytest.raises(StorageError, match="may be lost"):
                    await storage.put("refs/main", b"1", if_version=version)
            with pytest.raises(StorageError, match="may be lost"):
                await storage.put("refs/main", b"1", if_version=version)
            assert (await storage.get("refs/main")).version == version

    with pytest.raises(StorageError, match="durable"):
        await use()
    assert os.listdir(tmp_path / "refs") == ["main"]  # noqa: PTH208 -- nothing unfinished is left


def test_all_files_are_written_out_before_one_is_awaited(tmp_path: Path) -> None:
    """They usually wait for the same entry of the journal."""
    files = make_files(tmp_path)
    keys = ["chunks/a", "manifests/b", "snapshots/c"]
    for key in keys:
        write(files, key, b"x")
    events: list[str] = []
    begin, sync = filesystems.begin_writing_out, os.fsync

    def noted_begin(fd: int) -> None:
        events.append("begin")
        begin(fd)

    def noted_sync(fd: int) -> None:
        events.append("sync")
        sync(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durability, "begin_writing_out", noted_begin)
        patch.setattr(os, "fsync", noted_sync)
        files.ledger.sync()
    assert events[:6] == ["begin"] * 3 + ["sync"] * 3


def test_slow_syncs_run_in_parallel(tmp_path: Path) -> None:
    """A slow device makes those last together that ask together; a fast one needs no threads."""
    files = make_files(tmp_path)
    for number in range(7):
        write(files, f"chunks/{number}", b"x")
    together = threading.Barrier(6)  # all but the first
    original = os.fsync
    count = 0

    def sync(fd: int) -> None:
        nonlocal count
        if stat.S_ISREG(os.fstat(fd).st_mode):
            count += 1
            if count == 1:
                time.sleep(2 * Ledger.slow_seconds)
            else:
                together.wait(60)
        original(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        files.ledger.sync()
    assert count == 7
    assert not together.broken


def test_a_put_that_is_written_during_a_sync_belongs_to_the_next(tmp_path: Path) -> None:
    """Writes acknowledged while a sync runs stay in the ledger."""
    files = make_files(tmp_path)
    write(files, "a", b"x")
    original = os.fsync
    with recorded(tmp_path) as events:
        first = True

        def write_more(fd: int) -> None:
            nonlocal first
            if first:
                first = False
                write(files, "b", b"x")
            original(fd)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", write_more)
            files.ledger.sync()
        del events[:]
        files.ledger.sync()
        assert "b" in synced(events)


async def test_an_unreadable_parent_is_skipped(tmp_path: Path) -> None:
    """The directory above the root belongs to someone else, as a rule."""
    root = tmp_path / "root"
    root.mkdir()
    async with open_storage(root) as storage:
        await storage.put("a", b"x")
        with failing("open", errno.EACCES, when=lambda path, *_: path == "..") as failed:
            await storage.sync()
        assert failed["open"] == 1


def test_descriptors_are_closed_with_the_handle(tmp_path: Path) -> None:
    """The ledger holds the root and a few folders open, and lets go of them."""
    files = make_files(tmp_path)
    before = open_descriptors()
    for number in range(100):
        write(files, f"a/{number}", b"x")
        write(files, f"b/{number}", b"x", ABSENT)
        files.copy(place_of(f"a/{number}"), place_of("copy"), None)
    files.ledger.sync()
    assert open_descriptors() == before + 3
    for number in range(100):
        write(files, f"{number}/a", b"x")
        files.ledger.sync()
        assert open_descriptors() <= before + 1 + 16
    files.ledger.close()
    assert open_descriptors() == before


def test_few_files_stay_open_until_their_sync(tmp_path: Path) -> None:
    """Those of a small commit, of each handle; and a bounded number of all handles."""
    handles = [make_files(tmp_path / str(number)) for number in range(20)]
    for files in handles:
        write(files, "a/before", b"x")
        files.ledger.sync()
    before = open_descriptors()
    for number in range(100):
        write(handles[0], f"a/{number}", b"x")
    assert open_descriptors() == before + 8
    for files in handles[1:]:
        for number in range(10):
            write(files, f"a/{number}", b"x")
    assert open_descriptors() == before + 64
    for files in handles[1:]:
        files.ledger.sync()
    assert open_descriptors() == before + 8
    handles[0].ledger.close()  # without a sync
    assert open_descriptors() == before - 2  # nor are the folder and the root
    for files in handles[1:]:
        files.ledger.close()


def test_what_is_open_is_not_opened_again_to_sync_it(tmp_path: Path) -> None:
    """Neither files nor folders are looked up."""
    files = make_files(tmp_path)
    for number in range(2):
        write(files, f"a/{number}", b"x")
        write(files, f"b/{number}", b"x")
        with pytest.MonkeyPatch.context() as patch, recorded(tmp_path) as events:
            if number:
                patch.delattr(os, "open")
            files.ledger.sync()
    assert synced(events) == {"a/1", "b/1", "a", "b"}
    files.ledger.close()


def test_a_file_is_closed_before_it_has_its_name_where_that_writes_it_out(tmp_path: Path) -> None:
    """On network file systems, and on other file systems than the first."""
    rename = os.rename

    def checked(*names: bytes, **folders: Any) -> None:
        links = [it.readlink().name for it in Path("/proc/self/fd").iterdir() if it.is_symlink()]
        assert os.fsdecode(names[0]) not in links
        rename(*names, **folders)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durability, "can_sync_at_once", lambda _: False)
        patch.setattr(os, "rename", checked)
        files = make_files(tmp_path)
        for number in range(3):
            write(files, f"a/{number}", b"x")
        files.ledger.close()
        patch.undo()
        files = make_files(tmp_path)
        write(files, "a/a", b"x")
        patch.setattr(os, "rename", checked)
        assert files.ledger._home is not None
        files.ledger._home.device += 1
        write(files, "a/b", b"x")
        files.ledger.close()


@pytest.mark.parametrize("again", ["file", "folder"])
def test_of_two_writes_of_a_name_that_which_has_it_is_synced(tmp_path: Path, again: str) -> None:
    """Threads may record what they wrote in another order than they gave it its name."""
    files = make_files(tmp_path)
    write(files, "a/b/before", b"x")
    files.ledger.sync()
    wrote, late = files.ledger.wrote, list[tuple[Any, ...]]()

    def swapped(folder: int, *more: Any) -> None:
        if late:
            wrote(folder, *more)
            wrote(*late[0])
            os.close(late[0][0])
        else:
            late.append((os.dup(folder), *more))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.ledger, "wrote", swapped)
        write(files, "a/b/c", b"x")
        if again == "folder":
            shutil.rmtree(tmp_path / "a" / "b")
        write(files, "a/b/c", b"y")
    with recorded(tmp_path) as events:
        files.ledger.sync()
    assert {"a/b/c", "a/b"} <= synced(events)  # and not what was deleted
    files.ledger.close()


async def test_an_error_in_the_block_is_not_hidden_by_one_of_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the block is raised; that of closing is a note to it."""

    class MistakeError(Exception):
        pass

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def use() -> None:
        async with open_storage(tmp_path) as storage:
            await storage.put("a", b"x")
            monkeypatch.setattr(os, "fsync", fail)
            raise MistakeError

    with pytest.raises(MistakeError) as caught:
        await use()
    assert "Closing the storage failed as well" in caught.value.__notes__[0]


def test_a_commit_on_a_slow_device_waits_for_it_twice(tmp_path: Path) -> None:
    """Once for the new files, their folders and the bytes of the reference, once for its name."""
    files = make_files(tmp_path)
    folders = ("manifests", "snapshots", "transactions", "overwritten")
    version = write(files, "repo", b"0", ABSENT)
    for folder in folders:
        write(files, f"{folder}/1", b"x")
    original = os.fsync

    def slow(fd: int) -> None:
        time.sleep(2 * Ledger.slow_seconds)
        original(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", slow)
        files.ledger.sync()  # which shows that it is slow
    for folder in folders:
        write(files, f"{folder}/2", b"x")
    # Four files, four folders, and the reference: none returns before all have started. The root
    # holds nothing new.
    together = threading.Barrier(9)
    named = False
    after = 0

    def rename(source: bytes, target: bytes, **keywords: int) -> None:
        nonlocal named
        named = True
        plain_rename(source, target, **keywords)

    def sync(fd: int) -> None:
        nonlocal after
        if named:
            after += 1
        else:
            together.wait(60)
        original(fd)

    plain_rename = os.rename
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        patch.setattr(os, "rename", rename)
        write(files, "repo", b"1", version)
    assert not together.broken
    assert after == 1


async def test_a_reference_whose_bytes_are_lost_gets_no_name(tmp_path: Path) -> None:
    """Though its sync goes beside those of what it refers to, which are no loss."""

    def fail(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().name.startswith(".icechunk-tmp-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        original(fd)

    original = os.fsync
    async with open_storage(tmp_path) as storage:
        version = await storage.put("refs/main", b"0", if_version=ABSENT)
        await storage.put("chunks/a", b"x")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(StorageError, match="Input/output error"):
                await storage.put("refs/main", b"1", if_version=version)
        assert (await storage.get("refs/main")).version == version
        await storage.put("refs/main", b"1", if_version=version)
