"""The disk tier: its files, its capacity, and damage to either."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import struct
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async._runtime import clock as _clock
from icechunk_async.storage import ByteRange, Retrieved, Version
from icechunk_async.storage.policies.disk_cache import Space
from tests.unit.storage.cache_tools import (
    TickingClock,
    cache_of,
    files_of,
    get,
    opened,
    tier,
    used,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from icechunk_async.storage.policies.disk_cache import DiskTier

BODY = b"some bytes of a chunk"
ANSWER = Retrieved(BODY, Version('"etag"'), len(BODY), datetime(2024, 5, 6, tzinfo=UTC))
BLOCK = 4096


@pytest.fixture
def clock() -> Iterator[TickingClock]:
    """Give each use a distinct time."""
    clock = TickingClock()
    with _clock.use_clock(clock):
        yield clock


def always() -> bool:
    """Tell that an answer is right."""
    return True


def keep(disk: DiskTier, key: str = "chunks/a", answer: Retrieved = ANSWER) -> None:
    """Put an answer into a directory."""
    disk.write(key, None, answer, still_right=always)


def body_of(size_bytes: int) -> Retrieved:
    """Make an answer."""
    return Retrieved(bytes(size_bytes), Version("v"), size_bytes)


def test_a_second_process_reads_the_entries_of_the_first(tmp_path: Path) -> None:
    """With version, size and time; for this storage, key and range only."""
    keep(tier(tmp_path))
    disk = tier(tmp_path)
    assert disk.read("chunks/a", None) == ANSWER
    assert disk.read("chunks/b", None) is None
    assert disk.read("chunks/a", ByteRange(0, 3)) is None
    assert tier(tmp_path, place="s3://other").read("chunks/a", None) is None


async def test_repositories_share_a_directory_without_meeting(tmp_path: Path) -> None:
    """URL and server tell them apart; no secret and no name is in a path or file."""
    places: list[tuple[str, dict[str, object]]] = [
        ("s3://bucket/a", {"secret_access_key": "hunter2"}),
        ("s3://bucket/b", {}),
        ("s3://bucket/a", {"endpoint_url": "http://user:hunter2@localhost:9000"}),
        ("s3://bucket/a", {"endpoint_url": "http://localhost:9001"}),
    ]
    async with opened() as storage:
        for number, (url, options) in enumerate(places):
            storage.url, storage.options = url, options
            await storage.put("chunks/a", b"%d" % number)
            cached = cache_of(storage, memory_bytes=0, directory=tmp_path)
            assert await get(cached, "chunks/a") == b"%d" % number
        for number, (url, options) in enumerate(places):
            storage.url = url
            storage.options = {**options, "secret_access_key": "another", "token": "new"}
            cached = cache_of(storage, memory_bytes=0, directory=tmp_path)
            assert await get(cached, "chunks/a") == b"%d" % number
        assert storage.reads == len(places)
    files = files_of(tmp_path)
    assert len(files) == len(places)
    for file in files:
        assert b"hunter2" not in bytes(file) + file.read_bytes()


def test_every_damaged_byte_is_found(tmp_path: Path) -> None:
    """For every damaged byte the entry is dropped and the file removed."""
    disk = tier(tmp_path)
    keep(disk)
    (file,) = files_of(tmp_path)
    good = file.read_bytes()
    for position in range(len(good)):
        for change in (0x01, 0x80, 0xFF):
            damaged = bytearray(good)
            damaged[position] ^= change
            file.write_bytes(damaged)
            assert disk.read("chunks/a", None) is None
            assert not file.exists()
    file.write_bytes(good)
    assert disk.read("chunks/a", None) == ANSWER


def test_every_truncated_or_extended_file_is_found(tmp_path: Path) -> None:
    """A power cut may leave any length, and zeros."""
    disk = tier(tmp_path)
    keep(disk)
    (file,) = files_of(tmp_path)
    good = file.read_bytes()
    bodies = [good[:size] for size in range(len(good))]
    bodies += [bytes(len(good)), good + b"\0", good + good, secrets.token_bytes(5000)]
    for body in bodies:
        file.write_bytes(body)
        assert disk.read("chunks/a", None) is None
        assert not file.exists()


def test_a_swapped_cache_file_is_not_trusted(tmp_path: Path) -> None:
    """Its checksum is right, but it answers something else."""
    disk, other = tier(tmp_path), tier(tmp_path, place="s3://other")
    for source, key, request in (
        (disk, "chunks/b", None),
        (disk, "chunks/a", ByteRange(0, len(BODY))),
        (other, "chunks/a", None),
    ):
        keep(disk)
        (target,) = files_of(tmp_path)
        source.write(key, request, ANSWER, still_right=always)
        (found,) = set(files_of(tmp_path)) - {target}
        found.rename(target)
        assert disk.read("chunks/a", None) is None
        assert not files_of(tmp_path)


def test_links_pipes_and_folders_are_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Links lead nowhere, pipes do not make anyone wait, folders are no answer."""
    disk = tier(tmp_path)
    keep(disk)
    (file,) = files_of(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert disk.read("chunks/a", None) is None
    assert elsewhere.exists()
    assert not file.is_symlink()
    os.mkfifo(file)
    assert disk.read("chunks/a", None) is None
    file.mkdir()
    assert disk.read("chunks/a", None) is None
    assert len(caplog.records) == 1


def test_a_file_that_is_larger_than_the_cache_is_not_read(tmp_path: Path) -> None:
    """It would take as much memory."""
    keep(tier(tmp_path))
    (file,) = files_of(tmp_path)
    assert tier(tmp_path, file.stat().st_size).read("chunks/a", None) == ANSWER
    assert tier(tmp_path, file.stat().st_size - 1).read("chunks/a", None) is None


def test_a_directory_that_others_can_write_to_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checksum finds damage, not malice. What we make is ours alone."""
    keep(tier(tmp_path / "made" / "deep"))
    made = [tmp_path / "made/deep", *(tmp_path / "made/deep").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700, 0o600}
    keep(tier(tmp_path))
    (root,) = tmp_path.glob("icechunk-async-*")
    for mode in (0o770, 0o707, 0o750):
        root.chmod(mode)
        caplog.clear()
        disk = tier(tmp_path)
        assert disk.read("chunks/a", None) is None
        keep(disk, "chunks/b")
        disk.drop(["chunks/a"])
        (record,) = caplog.records
        assert str(root) in record.getMessage()
        assert len(files_of(root)) == 1
    root.chmod(0o700)
    assert tier(tmp_path).read("chunks/a", None) == ANSWER


@pytest.mark.parametrize("call", ["write", "open", "rename", "mkdir", "ftruncate"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
async def test_a_failing_disk_fails_no_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    code: int,
) -> None:
    """It is no cache, says so once, leaves nothing, and works again when the disk does."""
    original = getattr(os, call)

    def fail(*arguments: Any, **keywords: Any) -> Any:
        if call == "open" and not arguments[1] & os.O_CREAT:
            return original(*arguments, **keywords)
        raise OSError(code, os.strerror(code))

    async with opened() as storage:
        await storage.put("chunks/a", BODY)
        cached = cache_of(storage, memory_bytes=0, directory=tmp_path / "new")
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            for _ in range(3):
                assert await get(cached, "chunks/a") == BODY
            await cached.delete(["chunks/b"])
        assert storage.reads == 3
        ours = [record for record in caplog.records if record.name.startswith("icechunk_async")]
        (record,) = ours  # a busy machine lets asyncio complain about slow steps
        assert record.levelno == logging.WARNING
        assert os.strerror(code) in record.getMessage()
        assert not files_of(tmp_path)
        await cached.get("chunks/a")
        assert await get(cached, "chunks/a") == BODY
        assert storage.reads == 4


def test_an_unusable_cache_directory_disables_the_disk_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file is in the way; that is no error of a read either."""
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        caplog.clear()
        disk = tier(place)
        keep(disk)
        assert disk.read("chunks/a", None) is None
        disk.drop(["chunks/a"])
        assert len(caplog.records) == 1


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    """Clearing the cache by hand is allowed at any time."""
    disk = tier(tmp_path / "cache")
    keep(disk)
    (root,) = (tmp_path / "cache").iterdir()
    root.rename(tmp_path / "gone")
    assert disk.read("chunks/a", None) is None
    keep(disk)
    keep(disk)
    assert disk.read("chunks/a", None) == ANSWER


@pytest.mark.usefixtures("clock")
def test_the_least_recently_used_file_is_evicted_first(tmp_path: Path) -> None:
    """A read by any process counts as use."""
    disk = tier(tmp_path, 20 * BLOCK)
    for number in range(20):
        keep(disk, f"chunks/{number}")
    assert len(files_of(tmp_path)) == 20
    for number in (0, 1, 2):
        assert tier(tmp_path).read(f"chunks/{number}", None) == ANSWER
    keep(disk, "chunks/new")
    left = {number for number in range(20) if disk.read(f"chunks/{number}", None) is not None}
    assert left == set(range(20)) - {3, 4}
    assert disk.read("chunks/new", None) == ANSWER


def test_the_capacity_is_never_exceeded(tmp_path: Path) -> None:
    """For any sizes, and with concurrent users of the directory."""
    one, other = tier(tmp_path, 30 * BLOCK), tier(tmp_path, 30 * BLOCK, "s3://other")
    for number in range(300):
        size = number * 7919 % (8 * BLOCK)
        keep((one, other)[number % 2], f"chunks/{number}", body_of(size))
        assert used(tmp_path) <= 30 * BLOCK
    assert used(tmp_path) > 15 * BLOCK
    last = body_of(299 * 7919 % (8 * BLOCK))
    assert other.read("chunks/299", None) == last
    before = files_of(tmp_path)
    keep(one, "chunks/large", body_of(30 * BLOCK))
    assert files_of(tmp_path) == before


def test_empty_folders_are_removed(tmp_path: Path) -> None:
    """A repository that is read no more leaves nothing behind."""
    old = tier(tmp_path, 30 * BLOCK, "s3://old")
    for number in range(30):
        keep(old, f"chunks/{number}")
    new = tier(tmp_path, 30 * BLOCK, "s3://new")
    for number in range(100):
        keep(new, f"chunks/{number}")
    (objects,) = tmp_path.rglob("objects")
    assert len(list(objects.iterdir())) == 1
    keep(old, "chunks/0")
    assert old.read("chunks/0", None) == ANSWER


def ledger_of(directory: Path) -> Path:
    """Return the ledger of a cache directory."""
    (ledger,) = directory.rglob("ledger")
    return ledger


@pytest.mark.parametrize("body", [b"", b"x", b"\xff" * 20, b"\0" * 20, b"\0" * 4000])
def test_a_damaged_ledger_is_rebuilt(tmp_path: Path, body: bytes) -> None:
    """The cache rebuilds it from the files."""
    disk = tier(tmp_path, 10 * BLOCK)
    for number in range(50):
        ledger = next(tmp_path.rglob("ledger"), None)
        if ledger is not None and number % 3 == 0:
            ledger.write_bytes(body)
        keep(disk, f"chunks/{number}")
        assert used(tmp_path) <= 10 * BLOCK
    assert disk.read("chunks/49", None) == ANSWER


def test_a_ledger_that_counts_removed_files_is_corrected(tmp_path: Path) -> None:
    """Files that were removed by hand cost the cache nothing."""
    disk = tier(tmp_path, 10 * BLOCK)
    for _ in range(3):
        for number in range(10):
            keep(disk, f"chunks/{number}")
        for file in files_of(tmp_path):
            file.unlink()
    for number in range(10):
        keep(disk, f"chunks/{number}")
    assert len(files_of(tmp_path)) == 10


def test_a_ledger_with_a_wrong_checksum_is_not_trusted(tmp_path: Path) -> None:
    """Though it may look as if there were room."""
    disk = tier(tmp_path, 10 * BLOCK)
    for number in range(30):
        keep(disk, f"chunks/{number}")
        ledger_of(tmp_path).write_bytes(struct.pack(">qqI", 0, _clock.now_us(), 0))
        assert used(tmp_path) <= 10 * BLOCK


def test_the_ledger_is_made_exact_once_an_hour(tmp_path: Path, clock: TickingClock) -> None:
    """Updates lost in a power cut are recovered, also if the clock was set back."""
    disk = tier(tmp_path, 10 * BLOCK)
    for step in (3600, -3600):
        keep(disk, "chunks/first")
        stale = ledger_of(tmp_path).read_bytes()
        for number in range(8):
            keep(disk, f"chunks/{number}")
        ledger_of(tmp_path).write_bytes(stale)
        clock.us += step * 1_000_000
        for number in range(20, 30):
            keep(disk, f"chunks/{number}")
            assert used(tmp_path) <= 10 * BLOCK


@pytest.mark.parametrize("kind", ["fifo", "folder", "link"])
def test_a_ledger_that_is_no_file_disables_the_disk_tier(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is kept, nobody waits, and it is said once."""
    disk = tier(tmp_path)
    keep(disk)
    ledger = ledger_of(tmp_path)
    ledger.unlink()
    match kind:
        case "fifo":
            os.mkfifo(ledger)
        case "folder":
            ledger.mkdir()
        case _:
            ledger.symlink_to(tmp_path / "target")
    for _ in range(2):
        keep(disk, "chunks/b")
    assert disk.read("chunks/b", None) is None
    assert disk.read("chunks/a", None) == ANSWER
    assert len(caplog.records) == 1
    assert not (tmp_path / "target").exists()


def test_a_stopped_process_does_not_stop_the_others(tmp_path: Path) -> None:
    """A writer that cannot lock the ledger soon skips caching; readers do not need it."""
    disk = tier(tmp_path)
    keep(disk)
    with ledger_of(tmp_path).open("r+b") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        assert disk.read("chunks/a", None) == ANSWER
        keep(disk, "chunks/b")
        assert disk.read("chunks/b", None) is None
    keep(disk, "chunks/b")
    assert disk.read("chunks/b", None) == ANSWER


def test_unfinished_files_count_and_are_not_removed(tmp_path: Path) -> None:
    """Room that a writer was given is not given to another, nor is its file swept away."""
    space = Space(tmp_path, 10 * BLOCK)
    with space.room(6 * BLOCK) as first:
        assert first is not None
        with space.room(6 * BLOCK) as second:
            assert second is None
        with space.room(4 * BLOCK) as second:
            assert second is not None
        assert first[1].exists()
    assert not files_of(tmp_path)
    with space.room(10 * BLOCK) as whole:
        assert whole is not None


def test_files_of_dead_writers_are_removed(tmp_path: Path) -> None:
    """As soon as somebody looks at all files."""
    disk = tier(tmp_path, 10 * BLOCK)
    keep(disk)
    (unfinished,) = tmp_path.rglob("unfinished")
    (unfinished / "left").write_bytes(bytes(5 * BLOCK))
    ledger_of(tmp_path).unlink()
    keep(disk, "chunks/b")
    assert not list(unfinished.iterdir())
    assert len(files_of(tmp_path)) == 2
