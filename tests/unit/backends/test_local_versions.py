"""Versions of local files: what they are made of, and that they are never used twice."""

from __future__ import annotations

import os
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from icechunk_async.errors import PreconditionFailedError
from icechunk_async.storage import ABSENT, ObjectInfo, open_storage
from icechunk_async.storage.extensions import TellsTime
from icechunk_async_local import publishing
from icechunk_async_local.paths import place_of
from icechunk_async_local.versions import next_time_us
from tests.unit.backends.local_tools import everything, make_files, write

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_version_is_the_tag_of_object_store(tmp_path: Path) -> None:
    """The official engine's library makes the same tag of the same file, but for the quotes."""
    obstore = pytest.importorskip("obstore")
    async with open_storage(tmp_path) as storage:
        version = await storage.put("a/b", b"body")
        store = obstore.store.LocalStore(str(tmp_path))
        assert obstore.head(store, "a/b")["e_tag"].strip('"') == version.token
        obstore.put(store, "a/c", b"theirs")
        theirs = obstore.head(store, "a/c")["e_tag"].strip('"')
        assert (await storage.get("a/c")).version.token == theirs


def test_times_are_never_given_out_twice(tmp_path: Path) -> None:
    """Neither to one thread nor to several, however fast they ask."""
    answers: list[list[int]] = [[] for _ in range(4)]
    written = tmp_path.stat()

    def ask(times: list[int]) -> None:
        times.extend(next_time_us(written) for _ in range(5000))

    threads = [threading.Thread(target=ask, args=(times,)) for times in answers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(times == sorted(times) for times in answers)
    assert len({time_us for times in answers for time_us in times}) == 20_000


def test_times_do_not_repeat_when_the_disks_clock_is_set_back(tmp_path: Path) -> None:
    """They keep increasing, since the inodes of deleted files are used again."""
    file = tmp_path / "file"
    file.touch()
    last = next_time_us(file.stat())
    hour_ago_ns = time.time_ns() - 3600 * 10**9
    os.utime(file, ns=(hour_ago_ns, hour_ago_ns))
    assert last < next_time_us(file.stat()) < last + 1000


@pytest.mark.parametrize("hours", [-2, 0, 2])
async def test_files_have_the_time_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """A process whose clock is wrong dates no file with it, written, created, updated or copied."""
    first = datetime.now(UTC) - timedelta(seconds=1)
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + hours * 3600 * 10**9)
    async with open_storage(tmp_path) as storage:
        await storage.put("a/plain", b"x")
        version = await storage.put("a/updated", b"x", if_version=ABSENT)
        await storage.put("a/updated", b"y", if_version=version)
        await storage.copy("a/plain", "a/copied")
        listed = [it async for it in storage.list_prefix() if isinstance(it, ObjectInfo)]
        assert isinstance(storage, TellsTime)
        now = await storage.current_time()
    monkeypatch.undo()
    assert len(listed) == 3
    assert all(first < time < first + timedelta(minutes=5) for time in (now, *times(listed)))


def times(listed: list[ObjectInfo]) -> list[datetime]:
    """Return when the listed objects were written."""
    return [it.last_modified for it in listed]


async def test_reading_the_clock_of_the_disk_leaves_nothing_there(tmp_path: Path) -> None:
    """It writes no file, so that it works on a full disk."""
    async with open_storage(tmp_path) as storage:
        assert isinstance(storage, TellsTime)
        first = await storage.current_time()
        assert everything(tmp_path) == []
        await storage.put("key", b"x")
        assert await storage.current_time() >= first


def test_a_time_from_the_future_stays_with_its_object(tmp_path: Path) -> None:
    """An update is later than what it replaces; other files are not dated into the future."""
    files = make_files(tmp_path)
    first = write(files, "ref", b"1")
    future_ns = time.time_ns() + 10**9 * 3600 * 24 * 365
    os.utime(tmp_path / "ref", ns=(future_ns, future_ns))
    with pytest.raises(PreconditionFailedError):
        write(files, "ref", b"2", first)
    inode = (tmp_path / "ref").stat().st_ino
    current = type(first)(f"{inode:x}-{future_ns // 1000:x}-{1:x}")
    second = write(files, "ref", b"2", current)
    assert (tmp_path / "ref").stat().st_mtime_ns // 1000 == future_ns // 1000 + 1
    third = write(files, "ref", b"3", second)
    assert len({current, second, third}) == 3
    write(files, "other", b"x")
    assert (tmp_path / "other").stat().st_mtime < time.time_ns() / 1e9 + 60


def test_a_file_has_its_time_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is the one that was given out, not that of the kernel, which may be coarse."""
    times = iter(range(1_600_000_000_000_000, 1_600_000_000_000_003))
    monkeypatch.setattr(publishing, "next_time_us", lambda written: next(times))
    files = make_files(tmp_path)
    for number, expected in enumerate((None, ABSENT)):
        write(files, str(number), b"x", expected)
    files.copy(place_of("0"), place_of("2"), None)
    found = [(tmp_path / str(number)).stat().st_mtime_ns for number in range(3)]
    assert found == [(1_600_000_000_000_000 + number) * 1000 for number in range(3)]


def test_versions_differ_where_inodes_are_used_again(tmp_path: Path) -> None:
    """File systems give the inode of a deleted file to the next one."""
    files = make_files(tmp_path, durable=False)
    versions = set()
    for number in range(300):
        versions.add(write(files, "key", b"x", ABSENT if number == 0 else None))
        versions.add(write(files, "other", b"x"))
        (tmp_path / "other").unlink()
    assert len(versions) == 600


def test_updates_are_later_than_what_they_replace(tmp_path: Path) -> None:
    """Along a chain of updates the times grow, also when the clock does not."""
    files = make_files(tmp_path, durable=False)
    version = write(files, "ref", b"0", ABSENT)
    times = []
    for number in range(50):
        version = write(files, "ref", b"%d" % number, version)
        times.append((tmp_path / "ref").stat().st_mtime_ns)
    assert times == sorted(set(times))


async def test_extreme_file_times_are_reported(tmp_path: Path) -> None:
    """Files from before 1970, or from after the year 9999, are read and listed."""
    for name, seconds in (("old", -5_000_000_000), ("new", 300_000_000_000), ("now", 0)):
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (seconds, seconds))
    async with open_storage(tmp_path) as storage:
        epoch = datetime(1970, 1, 1, tzinfo=UTC)
        found = {
            entry.key: entry.last_modified
            async for entry in storage.list_prefix()
            if isinstance(entry, ObjectInfo)
        }
        assert found["old"] == found["now"] == epoch
        assert found["new"] >= datetime(2100, 1, 1, tzinfo=UTC)
        assert (await storage.get("new")).last_modified == found["new"]


async def test_times_are_told_to_the_microsecond(tmp_path: Path) -> None:
    """A listing has the times of the file system."""
    (tmp_path / "key").write_bytes(b"x")
    os.utime(tmp_path / "key", ns=(0, 1_700_000_000_123_456_789))
    async with open_storage(tmp_path) as storage:
        expected = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC) + timedelta(microseconds=123456)
        assert (await storage.get("key")).last_modified == expected
