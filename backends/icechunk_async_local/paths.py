"""Paths: from keys to files below the root, and folders kept open between reads.

Every step opens a name in an open directory and follows no link, so that no key leads out of the
storage, also while others move directories about.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

from icechunk_async.errors import InvalidObjectKeyError, InvalidURLError
from icechunk_async.storage import check_key

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = [
    "RESERVED_PREFIX",
    "KeptFolders",
    "OpenFolder",
    "Place",
    "Tree",
    "is_plain",
    "is_reserved",
    "place_of",
    "root_of",
]

RESERVED_PREFIX: Final = b".icechunk-tmp-"
"""The prefix of unfinished files; no key may use it, and no listing shows it."""

_RESERVED: Final = RESERVED_PREFIX.decode()
_MAX_NAME_BYTES: Final = 255
_SHORT: Final = _MAX_NAME_BYTES // 4
"""No key of at most this many characters has a segment that is too long in UTF-8."""
_OFFICIAL_TEMPORARY = re.compile(rb"#[0-9]+\Z")

# O_PATH asks for no permission to list the folders on the way, only to pass through them.
_PASS: Final = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0)
_LIST: Final = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_NOFOLLOW: Final[int] = getattr(os, "O_NOFOLLOW", 0)


class Place(NamedTuple):
    """Where an object is kept: folders below the root, and the name of the file."""

    key: str
    folders: tuple[bytes, ...]
    name: bytes


def is_reserved(name: bytes) -> bool:
    """Return whether a name is that of an unfinished file, ours or the official engine's.

    That engine writes ``name#1`` and renames it; it can neither read nor list such names.
    """
    return name.startswith(RESERVED_PREFIX) or _OFFICIAL_TEMPORARY.search(name) is not None


def is_plain(key: str) -> bool:
    """Return whether ``key`` is a folder and a name that need no further checks."""
    folder, _, name = key.partition("/")
    return len(key) <= _SHORT and folder.isalnum() and name.isalnum()


def place_of(key: str) -> Place:
    """Return where ``key`` is kept.

    Raises:
        InvalidObjectKeyError: no key may look like this, or no file name can.
    """
    # Keys of the engine look like this, and are looked up for each chunk: letters and digits alone
    # can break none of the rules below.
    if key.isalnum() and len(key) <= _SHORT:
        return Place(key, (), key.encode())
    if is_plain(key):
        folder, _, name_below = key.partition("/")
        return Place(key, (folder.encode(),), name_below.encode())
    *folders, name = check_key(key).encode().split(b"/")
    if len(key) <= _SHORT and _RESERVED not in key and "#" not in key:
        return Place(key, tuple(folders), name)
    for segment in (*folders, name):
        if len(segment) > _MAX_NAME_BYTES:
            problem = f"a segment is longer than a file name can be ({_MAX_NAME_BYTES} bytes)"
        elif segment.startswith(RESERVED_PREFIX):
            problem = f"names that begin with {RESERVED_PREFIX.decode()!r} are unfinished files"
        else:
            continue
        break
    else:
        if not _OFFICIAL_TEMPORARY.search(name):
            return Place(key, tuple(folders), name)
        problem = "names that end in '#' and digits are the official engine's unfinished files"
    raise InvalidObjectKeyError(
        f"{key[:200]!r} cannot name a file: {problem}. Use another name.", key=key
    )


def root_of(url: str) -> Path:
    """Return the absolute path that a ``file:///path`` URL names, percent-decoded.

    Raises:
        InvalidURLError: it names another machine, no absolute path, or has a query or fragment.
    """
    parts = urlsplit(url)
    path = unquote_to_bytes(parts.path)
    if parts.scheme.lower() != "file" or parts.netloc not in ("", "localhost"):
        problem = "it does not name a directory of this machine"
    elif not path.startswith(b"/") or b"\0" in path:
        problem = "it has no absolute path"
    elif parts.query or parts.fragment or url.endswith(("?", "#")):
        problem = "'?' and '#' in a path are written %3F and %23"
    else:
        return Path(os.fsdecode(b"/" + path.strip(b"/")))
    raise InvalidURLError(
        f"{url!r} cannot be opened: {problem}. Use 'file:///absolute/path', or give a path.",
        url=url,
    )


class Tree:
    """The directory of a storage; opens the folders below it.

    The root itself may be a symbolic link. Below it none is followed, wherever it leads: what
    a link means can change between the check and the use, and a repository has no need of them.
    Archives of data have: where they are only read, links may be followed.
    """

    def __init__(self, root: Path, *, follow_links: bool = False) -> None:
        """Keep the absolute path of the root."""
        self.root = root
        self.nofollow = 0 if follow_links else _NOFOLLOW
        self._below = os.fsencode(root).rstrip(b"/") + b"/"

    def path(self, folders: tuple[bytes, ...], name: bytes = b"") -> str:
        """Return the path of something below the root, for a message."""
        return os.fsdecode(self._below + b"/".join((*folders, name))).rstrip("/")

    def open_file(self, folders: tuple[bytes, ...], name: bytes, flags: int) -> int:
        """Open a file below the root and return its descriptor."""
        flags |= self.nofollow
        if not folders:
            return os.open(self._below + name, flags)
        return _step(self.open_folder(folders), name, flags)

    def open_folder(self, folders: tuple[bytes, ...], *, to_list: bool = False) -> int:
        """Open a folder without following links, and return its descriptor.

        With ``to_list`` the descriptor can also be listed, locked and synced.
        """
        last = _LIST if to_list else _PASS
        if not folders:
            return os.open(self.root, last)
        mode = last if len(folders) == 1 else _PASS
        # The root need not be opened on its own: only what follows it must be no link.
        fd = os.open(self._below + folders[0], mode | self.nofollow)
        for depth, name in enumerate(folders[1:], 2):
            fd = _step(fd, name, (last if depth == len(folders) else _PASS) | self.nofollow)
        return fd

    def make_folder(self, folders: tuple[bytes, ...], made: Callable[[Path], None]) -> int:
        """Open a folder for listing; create it and its parents if missing.

        Args:
            folders: names from the root down.
            made: called with each directory outside the root that received a new entry.
        """
        _make_root(self.root, made)
        # Each step goes from an open folder to the next, so that nobody can exchange one for a link
        # in between.
        fd = os.open(self.root, _LIST)
        for name in folders:
            try:
                os.mkdir(name, dir_fd=fd)
            except FileExistsError:
                pass  # also a file or a link: opening it says so
            except BaseException:
                os.close(fd)
                raise
            fd = _step(fd, name, _LIST | _NOFOLLOW)
        return fd

    @contextmanager
    def folder(self, folders: tuple[bytes, ...], *, to_list: bool = False) -> Generator[int]:
        """Hold a folder open."""
        fd = self.open_folder(folders, to_list=to_list)
        try:
            yield fd
        finally:
            os.close(fd)

    def link_on_the_way(self, place: Place) -> str | None:
        """Return the path of the first symbolic link between the root and a file, or None."""
        path = self.root
        for name in (*place.folders, place.name):
            path /= os.fsdecode(name)
            if path.is_symlink():
                return str(path)
        return None


def _step(parent: int, name: bytes, flags: int) -> int:
    """Open a name in the folder ``parent``, and close the folder."""
    try:
        return os.open(name, flags, dir_fd=parent)
    finally:
        os.close(parent)


def _make_root(root: Path, made: Callable[[Path], None]) -> None:
    missing: list[Path] = []
    path = root
    while not os.path.lexists(path):
        missing.append(path)
        path = path.parent
    for path in reversed(missing):
        try:
            path.mkdir()
        except FileExistsError:
            continue  # another writer was faster
        made(path.parent)


_MOST: Final = 16


class OpenFolder:
    """An open folder, closed when the last user drops it."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.descriptor)


class KeptFolders:
    """Opens files in a few folders that stay open. Thread-safe.

    A folder put in place of an open one is noticed only once a file is missing: this is for files
    that never change and whose names are never reused.
    """

    def __init__(self, tree: Tree) -> None:
        """Keep nothing yet."""
        self._tree = tree
        self._open: dict[tuple[bytes, ...], OpenFolder] = {}

    def open_file(self, folders: tuple[bytes, ...], name: bytes, flags: int) -> int:
        """Open a file as ``Tree.open_file`` does and return its descriptor."""
        if not folders:
            return self._tree.open_file(folders, name, flags)
        # The local reference keeps the folder open while another thread drops it.
        folder = self._open.get(folders)
        if folder is None:
            folder = OpenFolder(self._tree.open_folder(folders))
            # All at once, since which of them are used is not known: reads in progress hold theirs.
            if len(self._open) >= _MOST:
                self._open.clear()
            self._open[folders] = folder
        try:
            return os.open(name, flags | self._tree.nofollow, dir_fd=folder.descriptor)
        except OSError:
            self._open.pop(folders, None)
            raise

    def close(self) -> None:
        """Close all folders that are not in use."""
        self._open.clear()
