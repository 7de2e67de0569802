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
from icechunk_async_local import publishing
from icechunk_async_local.paths import place_of
from icechunk_async_local.versions import next_time_us
from tests.unit.backends.local_tools import make_files, write

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


def test_times_are_never_given_out_twice() -> None:
    """Neither to one thread nor to several, however fast they ask."""
    answers: list[list[int]] = [[] for _ in range(4)]

    def ask(times: list[int]) -> None:
        times.extend(next_time_us() for _ in range(5000))

    threads = [threading.Thread(target=ask, args=(times,)) for times in answers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(times == sorted(times) for times in answers)
    assert len({time_us for times in answers for time_us in times}) == 20_000


def test_times_follow_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are about now, and keep increasing when the clock is set back."""
    now_us = time.time_ns() // 1000
    assert abs(next_time_us() - now_us) < 10_000_000
    last = next_time_us()
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000_000)
    assert last < next_time_us() < last + 1000


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
    monkeypatch.setattr(publishing, "next_time_us", lambda: next(times))
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
