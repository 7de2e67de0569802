"""Files that killed writers left, counted and removed by the disk's clock."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async.storage import open_storage
from icechunk_async.storage.extensions import Unfinished, UnfinishedWrites
from icechunk_async_local import publishing
from tests.unit.backends.local_tools import everything, make_files, read, write

if TYPE_CHECKING:
    from pathlib import Path

OLD = datetime(2020, 1, 1, tzinfo=UTC)


def leave(root: Path, name: str, size: int, at: datetime | None) -> None:
    """Leave a file behind, last changed at a time."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    if at is not None:
        os.utime(path, (at.timestamp(), at.timestamp()))


async def test_unfinished_files_of_all_folders_are_counted_and_the_old_ones_removed(
    tmp_path: Path,
) -> None:
    """Ours, the official engine's, and those of a trial; objects stay, and so do young files."""
    left = (".icechunk-tmp-1", "chunks/.icechunk-tmp-2", "refs/branch.a/ref.json#3")
    for number, name in enumerate((*left, ".icechunk-tmp-probe-x/first")):
        leave(tmp_path, name, 10**number, OLD)
    async with open_storage(tmp_path) as storage:  # removes what is a day old, in the root only
        assert isinstance(storage, UnfinishedWrites)
        leave(tmp_path, left[0], 1, OLD)
        leave(tmp_path, ".icechunk-tmp-probe-x/first", 1000, OLD)
        leave(tmp_path, "chunks/.icechunk-tmp-young", 5, None)
        leave(tmp_path, "chunks/A", 7, OLD)
        leave(tmp_path, "other/#no number", 7, OLD)
        assert await storage.unfinished() == Unfinished(5, 1116)
        soon = OLD + timedelta(seconds=1)
        assert await storage.unfinished(soon) == Unfinished(4, 1111)
        assert await storage.unfinished(OLD, remove=True) == Unfinished()
        assert await storage.unfinished(soon, remove=True) == Unfinished(4, 1111)
        assert await storage.unfinished() == Unfinished(1, 5)
    files = [name for name in everything(tmp_path) if not name.endswith("/")]
    assert files == ["chunks/.icechunk-tmp-young", "chunks/A", "other/#no number"]
    assert not (tmp_path / ".icechunk-tmp-probe-x").exists()


def test_a_writer_whose_file_was_removed_writes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped for longer than the collector's cutoff, and continues."""
    files = make_files(tmp_path)
    original: Any = getattr(publishing.Publisher, "_rename")  # noqa: B009 -- it is private
    removed: list[bytes] = []

    def rename(self: Any, draft: publishing.Draft, place: Any, **more: Any) -> None:
        if not removed:
            removed.append(draft.name)
            os.unlink(draft.name, dir_fd=draft.folder)
        original(self, draft, place, **more)

    monkeypatch.setattr(publishing.Publisher, "_rename", rename)
    write(files, "chunks/A", b"x")
    assert len(removed) == 1
    assert read(files, "chunks/A") == b"x"


@pytest.mark.parametrize("hours", [30, -30])
async def test_opening_judges_unfinished_files_by_the_disks_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """Those of other writers are not a day old because this process thinks so."""
    leave(tmp_path, ".icechunk-tmp-young", 1, None)
    leave(tmp_path, ".icechunk-tmp-old", 1, OLD)
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + hours * 3600 * 10**9)
    async with open_storage(tmp_path):
        assert everything(tmp_path) == [".icechunk-tmp-young"]
