"""Files and folders as an ordered list of keys.

Folders are walked one at a time. Within each the entries are ordered as if the names of folders
ended in ``/``, which makes the order of the walk the order of the whole keys: ``a-b`` and ``a.b``
come before ``a/b``, and ``ab`` after it.
"""

from __future__ import annotations

import os
import stat
from errno import ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR
from itertools import islice
from typing import TYPE_CHECKING, Final

from icechunk_async.storage import MAX_KEY_BYTES, CommonPrefix, ListEntry, ObjectInfo
from icechunk_async.storage.extensions import ObjectStates
from icechunk_async_local.failures import refuse_link
from icechunk_async_local.paths import RESERVED_PREFIX, Place, Tree, is_reserved
from icechunk_async_local.versions import LAST_US, modified_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["PAGE_ENTRIES", "next_page", "states_in", "walk"]

PAGE_ENTRIES: Final = 1000
"""Entries fetched with one hop."""

_GONE: Final = frozenset({ENOENT, ENOTDIR, ELOOP})
_NO_SUCH_FOLDER: Final = frozenset({ENOENT, ENOTDIR, ENAMETOOLONG})

type _Path = tuple[bytes, ...]
"""Names of folders from the root down."""


def next_page(entries: Iterator[ListEntry]) -> list[ListEntry]:
    """Return the next entries of a walk; fewer than `PAGE_ENTRIES` at its end."""
    return list(islice(entries, PAGE_ENTRIES))


def walk(tree: Tree, prefix: str, start_after: str | None, *, grouped: bool) -> Iterator[ListEntry]:
    """List the objects whose keys begin with ``prefix``, in the order of their bytes.

    Nothing is held open between two entries, so a walk can be abandoned at any point. Files that
    disappear meanwhile are left out. So is everything that is no object: links, special files,
    unfinished files, and names that are not UTF-8.

    Args:
        tree: the directory of the storage.
        prefix: beginning of the keys.
        start_after: leave out entries that are not greater.
        grouped: return the folders below the prefix instead of their contents.

    Raises:
        PermissionDeniedError: the prefix leads through a symbolic link.
        OSError: a folder cannot be read.
    """
    after = (start_after or "").encode("utf-8", "surrogatepass")
    *names, beginning = prefix.encode("utf-8", "surrogatepass").split(b"/")
    top = tuple(names)
    if not all(_can_be_folder(name) for name in top):
        return
    try:
        found = _entries(tree, top, after, grouped=grouped)
    except OSError as error:
        if error.errno not in _NO_SUCH_FOLDER:
            raise
        link = tree.link_on_the_way(Place(prefix, top[:-1], top[-1])) if top else None
        if link is not None:
            raise refuse_link("list", prefix, link) from error
        return
    # A stack in place of recursion: others may make folders of any depth. Names of each folder on
    # the way are held, and taken from the end.
    stack = [(top, [name for name in found if name.startswith(beginning)])]
    while stack:  # of each folder on the way what is still to come, in reverse
        folders, entries = stack[-1]
        if not entries:
            stack.pop()
        elif not entries[-1].endswith(b"/"):
            yield from _describe(tree, folders, _next_files(entries))
        else:
            inner = (*folders, entries.pop()[:-1])
            if not grouped:
                stack.append((inner, _entries_if_there(tree, inner, after)))
            elif _holds_object(tree, inner):
                yield CommonPrefix(b"/".join(inner).decode() + "/")


def states_in(tree: Tree, folders: _Path, names: Sequence[str]) -> ObjectStates:
    """Return the states of files directly in a folder."""
    rows: list[int] = []
    sizes: list[int] = []
    times: list[int] = []
    try:
        with tree.folder(folders) as fd:
            for row, name in enumerate(names):
                try:
                    found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(found.st_mode):
                    rows.append(row)
                    sizes.append(found.st_size)
                    # Anyone may set a time beyond the year 9999, which some file systems store.
                    times.append(min(found.st_mtime_ns // 1000, LAST_US))
    except OSError as error:
        if error.errno not in _GONE:
            raise
    import numpy as np  # noqa: PLC0415 -- upkeep alone asks for columns

    present = np.zeros(len(names), bool)
    numbers = np.zeros((2, len(names)), np.int64)
    present[rows] = True
    numbers[:, rows] = sizes, times
    return ObjectStates(present, numbers[0], numbers[1])


def _can_be_folder(name: bytes) -> bool:
    return (
        name not in (b"", b".", b"..")
        and b"\0" not in name
        and not name.startswith(RESERVED_PREFIX)
    )


def _entries(tree: Tree, folders: _Path, after: bytes, *, grouped: bool = False) -> list[bytes]:
    """List one folder in reverse order: files, and folders with a ``/``, beyond ``after``."""
    base = b"".join(name + b"/" for name in folders)
    # Three places of the start relative to this folder. With the start ``a/m`` and the folder
    # ``a/``: below ``a/`` what is greater than ``m`` is left. The folder ``b/`` comes after it as a
    # whole, and the folder ``Z/`` before it, so that it need not be read.
    if after.startswith(base):
        bound = after[len(base) :]
    elif after < base:
        bound = b""
    else:
        return []
    # Other programs may make longer names, which no operation accepts as a key. Deep folders have
    # no room at all: so a tree of any depth ends.
    room = MAX_KEY_BYTES - len(base)
    entries = [
        name
        for name in _scan(tree, folders)
        if len(name) <= room
        and (name > bound or (not grouped and name.endswith(b"/") and bound.startswith(name)))
    ]
    entries.sort(reverse=True)
    return entries


def _entries_if_there(tree: Tree, folders: _Path, after: bytes) -> list[bytes]:
    try:
        return _entries(tree, folders, after)
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise


def _scan(tree: Tree, folders: _Path) -> list[bytes]:
    """Read one folder: names of files, and of folders with a ``/``, in no order."""
    found: list[bytes] = []
    with tree.folder(folders, to_list=True) as fd, os.scandir(fd) as entries:
        for entry in entries:
            name = os.fsencode(entry.name)
            # Keys are text; such a file is another program's.
            if not _is_utf8(name):
                continue
            # On most file systems the kind comes with the name, which saves asking for each state
            # here.
            if entry.is_dir(follow_symlinks=False):
                if not name.startswith(RESERVED_PREFIX):
                    found.append(name + b"/")
            elif entry.is_file(follow_symlinks=False) and not is_reserved(name):
                found.append(name)
    return found


def _is_utf8(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def _holds_object(tree: Tree, folders: _Path) -> bool:
    """Return whether there is a file in a folder or below it."""
    stack = [folders]
    while stack:
        inner = stack.pop()
        for name in _entries_if_there(tree, inner, b""):
            if not name.endswith(b"/"):
                return True
            stack.append((*inner, name[:-1]))
    return False


def _next_files(entries: list[bytes]) -> list[bytes]:
    files: list[bytes] = []
    while entries and len(files) < PAGE_ENTRIES and not entries[-1].endswith(b"/"):
        files.append(entries.pop())
    return files


def _describe(tree: Tree, folders: _Path, names: list[bytes]) -> list[ListEntry]:
    """Return size and time of some files of one folder."""
    # One open folder for up to a thousand states, not a path to look up for each.
    base = "".join(name.decode() + "/" for name in folders)
    described: list[ListEntry] = []
    try:
        with tree.folder(folders) as fd:
            for name in names:
                try:
                    found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(found.st_mode):
                    info = ObjectInfo(base + name.decode(), found.st_size, modified_at(found))
                    described.append(info)
    except OSError as error:
        if error.errno not in _GONE:
            raise
    return described
