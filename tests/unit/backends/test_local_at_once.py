"""Reads that the event loop does itself, since the kernel has what they need in memory."""

from __future__ import annotations

import asyncio
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

import numpy as np
import pytest

from icechunk_async.errors import ObjectNotFoundError, StorageClosedError
from icechunk_async.storage import ByteRange, SuffixRange, open_storage
from icechunk_async.storage.extensions import TellsUnchanged
from icechunk_async_local import batching
from icechunk_async_local.at_once import MOST_BYTES, ReadsAtOnce
from icechunk_async_local.paths import place_of
from icechunk_async_local.storage import open_local
from tests.unit.backends.local_tools import make_files, open_descriptors, write

if TYPE_CHECKING:
    from typing import Any


@pytest.fixture
def reads(tmp_path: Path) -> ReadsAtOnce:
    """Read below the test's directory, if this system can do so at once."""
    reads = ReadsAtOnce(tmp_path)
    if not reads.active:
        pytest.skip("only Linux on a local file system reads without waiting")
    return reads


@pytest.fixture
def hops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note each read that goes to a thread."""
    found: list[str] = []
    run = batching.Lane.run

    async def counted(lane: Any, work: Any) -> Any:
        found.append(lane.executor._thread_name_prefix)
        return await run(lane, work)

    monkeypatch.setattr(batching.Lane, "run", counted)
    return found


@pytest.mark.usefixtures("reads")
async def test_cached_reads_take_no_thread(tmp_path: Path, hops: list[str]) -> None:
    """For every range, with the same result as from a thread."""
    body = os.urandom(20_000)
    files = await asyncio.to_thread(make_files, tmp_path)
    async with open_storage(tmp_path) as storage:
        await storage.put("chunks/a", body)
        hops.clear()
        for asked in (None, ByteRange(5, 5000), ByteRange(19_000), SuffixRange(7), ByteRange(5, 5)):
            found = await storage.get("chunks/a", asked)
            assert found == await asyncio.to_thread(files.read, place_of("chunks/a"), asked)
        assert hops == []


async def test_a_replaced_file_is_seen(tmp_path: Path) -> None:
    """Nothing of the old one is kept."""
    async with open_storage(tmp_path) as storage:
        versions = set[object]()
        for body in (b"one", b"two", b"longer than before"):
            await storage.put("ref", body)
            found = await storage.get("ref")
            versions.add(found.version)
            assert bytes(found.data) == body
        assert len(versions) == 3


@pytest.mark.usefixtures("reads")
async def test_that_a_file_did_not_change_is_told_without_waiting(
    tmp_path: Path, hops: list[str]
) -> None:
    """On any thread; else it has to be asked for, also where the storage is closed."""
    async with open_storage(tmp_path) as storage:
        assert isinstance(storage, TellsUnchanged)
        first = await storage.put("repo", b"one")
        hops.clear()
        assert storage.is_at("repo", first)
        assert await asyncio.to_thread(storage.is_at, "repo", first)
        assert hops == []
        second = await storage.put("repo", b"two", if_version=first)
        assert (storage.is_at("repo", first), storage.is_at("repo", second)) == (False, True)
        await storage.delete(["repo"])
        assert not storage.is_at("repo", second)
        second = await storage.put("repo", b"two")
    assert not storage.is_at("repo", second)


def _forget(path: Path) -> None:
    """Ask the system to drop a file from its cache."""
    with path.open("rb") as file:
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_uncached_reads_are_left_to_a_thread(tmp_path: Path, reads: ReadsAtOnce) -> None:
    """Until somebody has read it."""
    place = place_of("chunks/a")
    files = make_files(tmp_path)
    write(files, "chunks/a", bytes(1 << 20))
    write(files, "chunks/b", bytes(1 << 20))
    _forget(tmp_path / "chunks" / "b")
    with (tmp_path / "chunks" / "b").open("rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            pass
        else:
            pytest.skip("this file system keeps all files in memory")
    for _ in range(100):  # the system may have read the file ahead by the time that we ask
        _forget(tmp_path / "chunks" / "a")
        found = reads.read(place, None)
        if found is None:
            break
    assert found is None
    assert reads.active
    files.read(place)
    assert reads.read(place, None) is not None


@pytest.mark.parametrize("odd", ["folder", "link", "pipe", "object/below", "link/below"])
def test_special_files_are_left_to_a_thread(tmp_path: Path, reads: ReadsAtOnce, odd: str) -> None:
    """It says what is wrong; no link is followed and nothing is waited for."""
    (tmp_path / "object").write_bytes(b"1")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("object")
    os.mkfifo(tmp_path / "pipe")
    assert reads.read(place_of("object"), None) is not None
    assert reads.read(place_of(odd), None) is None


async def test_cached_misses_take_no_thread(
    tmp_path: Path, reads: ReadsAtOnce, hops: list[str]
) -> None:
    """An object that the kernel has not looked for may be on the disk."""
    assert reads.active
    async with open_storage(tmp_path) as storage:
        for key in ("missing", "folder/missing"):
            messages: list[str] = []
            for _ in range(2):
                with pytest.raises(ObjectNotFoundError) as caught:
                    await storage.get(key)
                messages.append(caught.value.message)
            assert messages[0] == messages[1]
        assert len(hops) == 2
        await storage.put("folder/missing", b"1")
        assert bytes((await storage.get("folder/missing")).data) == b"1"


async def test_an_unchanged_file_takes_no_thread(
    tmp_path: Path, reads: ReadsAtOnce, hops: list[str]
) -> None:
    """One that was replaced is read."""
    assert reads.active
    async with open_storage(tmp_path) as storage:
        first = await storage.put("a", b"1")
        hops.clear()
        assert await storage.get_if_changed("a", first) is None
        assert hops == []
        second = await storage.put("a", b"1")
        found = await storage.get_if_changed("a", first)
        assert found is not None
        assert found.version == second
        await storage.delete(["a"])
        with pytest.raises(ObjectNotFoundError):
            await storage.get_if_changed("a", second)


async def test_cached_reads_start_no_threads(
    tmp_path: Path, reads: ReadsAtOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hop finds out what the path names, one opens the directory, and none closes it."""
    assert reads.active
    (tmp_path / "a").write_bytes(b"1")
    hops: list[str] = []
    submit = ThreadPoolExecutor.submit

    def counted(executor: Any, *work: Any, **options: Any) -> Any:
        hops.append(executor._thread_name_prefix)
        return submit(executor, *work, **options)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", counted)
    async with open_storage(tmp_path) as storage:
        found = await storage.get("a")
        assert await storage.get_if_changed("a", found.version) is None
    assert hops == ["asyncio", "asyncio"]
    with pytest.raises(StorageClosedError):
        await storage.get("a")


def test_long_reads_are_left_to_a_thread(tmp_path: Path, reads: ReadsAtOnce) -> None:
    """Their copying would keep the loop from others."""
    (tmp_path / "a").write_bytes(bytes(MOST_BYTES + 1))
    assert reads.read(place_of("a"), None) is None
    assert reads.read(place_of("a"), ByteRange(0, MOST_BYTES)) is not None


def test_short_answers_are_put_together(
    tmp_path: Path, reads: ReadsAtOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is busy ends a read early."""
    body = os.urandom(100)
    (tmp_path / "a").write_bytes(body)
    preadv = os.preadv

    def short(fd: int, buffers: Any, offset: int, flags: int) -> int:
        return preadv(fd, [buffers[0][:30]], offset, flags)

    monkeypatch.setattr(os, "preadv", short)
    found = reads.read(place_of("a"), ByteRange(10, 95))
    assert found is not None
    assert bytes(found.data) == body[10:95]


async def test_unsupported_systems_read_on_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hops: list[str]
) -> None:
    """An answer that it never will is asked for once."""
    calls: list[int] = []

    preadv = os.preadv

    def refuse(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if not flags:  # a thread reads
            return preadv(fd, buffers, offset)
        calls.append(fd)
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "preadv", refuse)
    async with open_storage(tmp_path) as storage:
        await storage.put("a", b"1")
        hops.clear()
        for _ in range(3):
            assert bytes((await storage.get("a")).data) == b"1"
    assert len(calls) <= 1
    assert len(hops) == 3


def test_no_descriptor_is_left_open(tmp_path: Path, reads: ReadsAtOnce) -> None:
    """This holds for every outcome."""
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "folder").mkdir()
    before = open_descriptors()
    for key in ("a", "folder", "missing"):
        reads.read(place_of(key), None)
    assert open_descriptors() == before


@pytest.mark.usefixtures("reads")
async def test_many_cached_reads_yield_to_other_tasks(tmp_path: Path) -> None:
    """However many reads one task makes in a row."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with open_storage(tmp_path) as storage:
        await storage.put("a", bytes(10_000))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(other())
            for _ in range(400):
                await storage.get("a")
            task.cancel()
    assert turns >= 10


def test_no_memory_is_set_aside_on_a_claim(tmp_path: Path) -> None:
    """Of a length that a damaged manifest names; the caller then reads what there is."""

    async def scenario() -> None:
        async with open_local(tmp_path.as_uri()) as storage:
            await storage.put("a", b"abc")
            assert storage.read_bytes("a", 0, 3) == b"abc"
            for length in (1 << 40, 1 << 62):
                assert storage.read_bytes("a", 0, length) is None

    asyncio.run(scenario())


@pytest.mark.usefixtures("reads")
async def test_large_reads_go_where_copying_is_quick(tmp_path: Path) -> None:
    """Beside where a page begins, some processors take twice as long."""
    body = os.urandom(1 << 20)
    async with open_storage(tmp_path) as storage:
        await storage.put("chunks/a", body)
        kept = [(await storage.get("chunks/a")).data for _ in range(3)]
        assert {np.frombuffer(it, np.uint8).ctypes.data % 4096 for it in kept} == {0}
        assert all(bytes(it) == body for it in kept)


@pytest.mark.usefixtures("reads")
async def test_only_files_behind_links_take_a_thread(tmp_path: Path, hops: list[str]) -> None:
    """The directory itself may be behind one."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for folder in (root, elsewhere):
        folder.mkdir()
        (folder / "plain").write_bytes(folder.name.encode())
    (root / "folder").symlink_to(elsewhere)
    (root / "file").symlink_to(elsewhere / "plain")
    (tmp_path / "way").symlink_to(root)
    async with open_local((tmp_path / "way").as_uri(), read_only=True, follow_links=True) as files:
        for key in ("folder/plain", "file", "plain"):
            hops.clear()
            found = await files.get(key)
            assert bytes(found.data) == (b"root" if key == "plain" else b"elsewhere")
            assert len(hops) == (key != "plain")


@pytest.mark.usefixtures("reads")
def test_files_of_other_file_systems_are_left_to_a_thread() -> None:
    """Opening them may take a request to a server."""
    memory = Path("/dev/shm")  # noqa: S108 -- the one mount that Linux has nearly everywhere
    reads = ReadsAtOnce(Path("/"), follow_links=True)
    if not reads.active or not memory.is_mount():
        pytest.skip("no other file system is known to be below the root")
    with NamedTemporaryFile(dir=memory) as file:
        calls, path = reads._calls, os.fsencode(file.name)
        assert calls is not None
        os.close(calls.open(path))  # nothing else is in the way
        with pytest.raises(OSError, match="openat2"):
            calls.open_below(b"/", path[1:])
        assert reads.read(place_of(file.name[1:]), None) is None
    assert reads.active
