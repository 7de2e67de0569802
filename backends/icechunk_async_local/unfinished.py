"""Files that killed writers left: under reserved names, which no listing shows."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from icechunk_async.storage.extensions import Unfinished
from icechunk_async_local.failures import MISSING
from icechunk_async_local.paths import RESERVED_PREFIX, is_reserved
from icechunk_async_local.versions import modified_at

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from icechunk_async_local.paths import Tree

    type _Path = tuple[bytes, ...]

__all__ = ["unfinished_files"]


def unfinished_files(
    tree: Tree, older_than: datetime | None = None, *, remove: bool = False
) -> Unfinished:
    """Count unfinished files below the root, ours and the official engine's, or remove them.

    Raises:
        OSError: a folder cannot be read.
    """
    count = size_bytes = 0
    for folders, name, found in _walk(tree):
        # A writer whose file is removed all the same writes it again (`Files._write`).
        if older_than is not None and modified_at(found) >= older_than:
            continue
        if remove and not _remove(tree, folders, name):
            continue
        count += 1
        size_bytes += found.st_size
    if remove and count:
        _remove_empty_folders(tree)
    return Unfinished(count, size_bytes)


def _walk(tree: Tree) -> Iterator[tuple[_Path, bytes, os.stat_result]]:
    """Find all unfinished files; only their states are read."""
    stack: list[_Path] = [()]
    while stack:
        folders = stack.pop()
        # A trial of a directory keeps its files in a reserved folder, under plain names: all of
        # them are left over.
        is_trial = bool(folders) and folders[-1].startswith(RESERVED_PREFIX)
        try:
            with tree.folder(folders, to_list=True) as fd:
                with os.scandir(fd) as entries:
                    inner, names = _divide(entries, everything=is_trial)
                states = [(name, _state(fd, name)) for name in names]
        except OSError as error:
            if error.errno in MISSING:  # removed meanwhile
                continue
            raise
        stack += [(*folders, name) for name in inner]
        for name, found in states:
            if found is not None and stat.S_ISREG(found.st_mode):
                yield folders, name, found


def _divide(
    entries: Iterator[os.DirEntry[str]], *, everything: bool
) -> tuple[list[bytes], list[bytes]]:
    """Return the folders in a folder, and its unfinished files."""
    inner: list[bytes] = []
    names: list[bytes] = []
    for entry in entries:
        name = os.fsencode(entry.name)
        if entry.is_dir(follow_symlinks=False):
            inner.append(name)
        elif everything or is_reserved(name):
            names.append(name)
    return inner, names


def _state(folder: int, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _remove(tree: Tree, folders: _Path, name: bytes) -> bool:
    """Remove a file; return False if it is gone already, or cannot be removed."""
    try:
        with tree.folder(folders) as fd:
            os.unlink(name, dir_fd=fd)
    except OSError:
        return False
    return True


def _remove_empty_folders(tree: Tree) -> None:
    """Remove the folders of trials that were not finished, if nothing is in them any more."""
    with suppress(OSError), tree.folder((), to_list=True) as root:
        # Trials are made in the root alone, so no other folder is looked at.
        for name in os.listdir(root):  # noqa: PTH208 -- below a folder that is held open
            if os.fsencode(name).startswith(RESERVED_PREFIX):
                with suppress(OSError):
                    os.rmdir(name, dir_fd=root)
