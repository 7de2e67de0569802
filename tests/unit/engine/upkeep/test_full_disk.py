"""Collection where no byte is free, and of what killed writers left."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.errors import StorageFullError
from icechunk_async.storage import open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import objects, read, write
from tests.unit.engine.upkeep.upkeep_tools import CHUNK, commit, folders, littered, now, read_all

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZE = 4 << 20
MOUNT, UNMOUNT = (shutil.which(name) or name for name in ("mount", "umount"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of four megabytes."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        [MOUNT, "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", place],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run([UNMOUNT, place], check=True)


def fill(place: Path) -> None:
    """Take the last byte that is free."""
    with (place / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 512):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    assert os.statvfs(place).f_bavail == 0


@pytest.mark.parametrize("spec", [1, 2])
async def test_garbage_is_collected_on_a_full_disk(small_disk: Path, spec: int) -> None:
    """Also by a handle that is opened there, and what it kept is whole afterwards."""
    root = small_disk / "repository"
    async with Repository.create(root, spec_version=spec) as repository:
        await commit(repository, 0, "kept")
        session = await repository.writable_session("main")
        for number in range(1, 200):
            await write(session, f"a/c/{number}", os.urandom(8000))
        before = await read_all(str(root))
        fill(small_disk)
        with pytest.raises(StorageFullError):
            await commit(repository, 1, "no room")
    async with Repository.open(root) as repository:
        report = await repository.garbage_collect(now())
        assert report.chunks_deleted > 0  # others were deleted before, to make room
        assert report.failures == ()
        again = await repository.garbage_collect(now())
        assert again.chunks_deleted == 0
        assert len([key for key in await objects(repository.storage) if "chunks/" in key]) == 1
        assert await read_all(str(root)) == before
        await commit(repository, 2, "there is room again")


async def test_without_garbage_a_full_disk_is_left_as_it_is(small_disk: Path) -> None:
    """The error says what is needed."""
    root = small_disk / "repository"
    async with Repository.create(root) as repository:
        await commit(repository, 0, "kept")
        before = await objects(repository.storage)
        fill(small_disk)
        with pytest.raises(StorageFullError) as caught:
            await repository.garbage_collect(now())
        assert "Make some room" in "".join(caught.value.__notes__)
        after = await objects(repository.storage)
        notes = {key for key in after if key.startswith("collections/")}  # to other sessions
        assert after.keys() - notes == before.keys()


class Full(WrappedStorage):
    """Nothing can be written."""

    is_full = False

    async def before(self, operation: str, key: str) -> None:
        """Refuse every write."""
        if self.is_full and operation in ("put", "copy"):
            raise StorageFullError(f"No room for {key!r}.", key=key)


@pytest.mark.parametrize("spec", [1, 2])
async def test_a_storage_that_stays_full_loses_garbage_only(spec: int) -> None:
    """Everything that refs lead to stays, and what the history still lists."""
    url, _ = await littered(spec)
    cutoff = now()
    async with open_storage(url) as plain:
        full = Full(plain)
        async with Repository.open(full) as repository:
            await commit(repository, 5, "the newest")
            before = await read_all(url)
            count = (await folders(plain))["chunks"]
            full.is_full = True
            with pytest.raises(StorageFullError, match="Name a cutoff before"):
                await repository.garbage_collect(now())  # nothing tells whether that is past
            assert (await folders(plain))["chunks"] == count
            with pytest.raises(StorageFullError) as caught:  # after all that may go before
                await repository.garbage_collect(cutoff)
            assert "Make some room" in "".join(caught.value.__notes__)
            assert (await folders(plain))["chunks"] < count
            assert await read_all(url) == before
            full.is_full = False
            await repository.garbage_collect(cutoff)
            assert await read_all(url) == before


async def test_collection_removes_what_killed_writers_left(tmp_path: Path) -> None:
    """If it is older than the cutoff. Statistics count it before."""
    async with Repository.create(tmp_path) as repository:
        await commit(repository, 0, "kept")
        for name in ("chunks/.icechunk-tmp-1-old", "chunks/.icechunk-tmp-1-young"):
            (tmp_path / name).write_bytes(CHUNK)
        old = now() - timedelta(days=3)
        os.utime(tmp_path / "chunks/.icechunk-tmp-1-old", (old.timestamp(), old.timestamp()))
        assert (await repository.chunk_storage_stats()).unfinished_bytes == 2 * len(CHUNK)
        for dry_run in (True, False):
            report = await repository.garbage_collect(now() - timedelta(days=1), dry_run=dry_run)
            assert (report.unfinished_deleted, report.bytes_deleted) == (1, len(CHUNK))
        left = [path.name for path in (tmp_path / "chunks").glob(".icechunk-tmp-*")]
        assert left == [".icechunk-tmp-1-young"]
        session = await repository.readonly_session("main")
        assert await read(session, "a/c/0") is not None
