"""Folders that stay open between reads: finding a file in one takes half the system's calls."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async_local.paths import Tree

__all__ = ["KeptFolders"]

_MOST: Final = 16


class _Folder:
    """An open folder, which is closed when nobody uses it any more."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.descriptor)


class KeptFolders:
    """Opens files of a few folders that are kept open. Any thread may call, also at the same time.

    What is put in place of such a folder is only seen once a file is missing in it: this is for
    files that never change and whose names are never given again.
    """

    def __init__(self, tree: Tree) -> None:
        """Keep nothing yet."""
        self._tree = tree
        self._open: dict[tuple[bytes, ...], _Folder] = {}

    def open_file(self, folders: tuple[bytes, ...], name: bytes, flags: int) -> int:
        """Open a file as ``Tree.open_file`` does and answer its descriptor."""
        if not folders:
            return self._tree.open_file(folders, name, flags)
        # Whoever uses a folder holds it, so that another thread cannot close it meanwhile.
        folder = self._open.get(folders)
        if folder is None:
            folder = _Folder(self._tree.open_folder(folders))
            if len(self._open) >= _MOST:
                self._open.clear()
            self._open[folders] = folder
        try:
            return os.open(name, flags | self._tree.nofollow, dir_fd=folder.descriptor)
        except OSError:
            self._open.pop(folders, None)
            raise

    def close(self) -> None:
        """Let go of all folders."""
        self._open.clear()
