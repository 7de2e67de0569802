"""Folders that stay open between reads on the calling thread."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icechunk_async.storage import open_storage
from icechunk_async_local import LocalStorage
from icechunk_async_local.paths import KeptFolders, Tree

if TYPE_CHECKING:
    import pytest

_READ = os.O_RDONLY


def _open_files(below: Path) -> list[str]:
    """Return the files that this process has open below a directory."""
    found: list[str] = []
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # of the listing itself
            target = str(descriptor.readlink())
            if target.startswith(str(below)):
                found.append(target)
    return found


async def test_a_read_opens_one_file_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second read from a folder is one call to open."""
    async with open_storage(tmp_path) as storage:
        assert isinstance(storage, LocalStorage)
        await storage.put("chunks/A", b"first")
        await storage.put("chunks/B", b"second")
        assert storage.read_bytes("chunks/A", 0, 5) == b"first"
        opened: list[Any] = []
        before = os.open

        def counted(path: Any, *args: Any, **more: Any) -> int:
            opened.append(path)
            return before(path, *args, **more)

        monkeypatch.setattr(os, "open", counted)
        assert storage.read_bytes("chunks/B", 1, 6) == b"econd"
        assert opened == [b"B"]


async def test_a_replaced_folder_is_noticed(tmp_path: Path) -> None:
    """A folder that was removed and made anew does not hide its files."""
    async with open_storage(tmp_path) as storage:
        assert isinstance(storage, LocalStorage)
        await storage.put("chunks/A", b"first")
        assert storage.read_bytes("chunks/A", 0, 5) == b"first"
        shutil.rmtree(tmp_path / "chunks")
        await storage.put("chunks/B", b"again")
        assert storage.read_bytes("chunks/B", 0, 5) is None  # the caller asks get_blocking
        assert storage.get_blocking("chunks/B").data == b"again"
        assert storage.read_bytes("chunks/B", 0, 5) == b"again"


async def test_closing_closes_the_folders(tmp_path: Path) -> None:
    """Nothing stays open below the root."""
    async with open_storage(tmp_path) as storage:
        assert isinstance(storage, LocalStorage)
        await storage.put("chunks/A", b"first")
        storage.read_bytes("chunks/A", 0, 5)
        assert str(tmp_path / "chunks") in _open_files(tmp_path)
    assert _open_files(tmp_path) == []


def test_a_folder_in_use_is_not_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its number could name what another thread opens, and the file be looked for there."""
    (tmp_path / "chunks").mkdir()
    (tmp_path / "chunks" / "A").write_bytes(b"first")
    kept = KeptFolders(Tree(tmp_path))
    os.close(kept.open_file((b"chunks",), b"A", _READ))
    before = os.open

    def closing(path: Any, *args: Any, **more: Any) -> int:
        kept.close()
        return before(path, *args, **more)

    monkeypatch.setattr(os, "open", closing)
    fd = kept.open_file((b"chunks",), b"A", _READ)
    assert os.read(fd, 9) == b"first"
    os.close(fd)


def test_few_folders_are_kept(tmp_path: Path) -> None:
    """However many are read from."""
    kept = KeptFolders(Tree(tmp_path))
    for number in range(50):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "a").touch()
        os.close(kept.open_file((str(number).encode(),), b"a", _READ))
    assert 0 < len(_open_files(tmp_path)) <= 16
    kept.close()
    assert _open_files(tmp_path) == []
