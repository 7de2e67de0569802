"""Listings by plain strings, over a client that lists folders and starts after paths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.errors import InvalidObjectKeyError, StorageError
from icechunk_async.storage import MAX_KEY_BYTES, CommonPrefix, ObjectInfo, check_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from obstore import ListResult, ObjectMeta

    from icechunk_async.storage import ListEntry

__all__ = [
    "Ordered",
    "first_offset",
    "folder_of",
    "groups_and_objects",
    "is_sendable",
    "offset_before",
]


def is_sendable(key: str) -> bool:
    """Return whether the client takes this as a path: a key without control characters."""
    try:
        check_key(key)
    except InvalidObjectKeyError:
        return False
    return not any(character < " " or character == "\x7f" for character in key)


def folder_of(prefix: str) -> str | None:
    """Return the folder, without its last slash, that holds all keys with this prefix.

    None where no key can begin like this.
    """
    folder = prefix.rpartition("/")[0]
    if not folder:
        return None if prefix.startswith("/") else ""
    return folder if is_sendable(folder) else None


def offset_before(start_after: str) -> str | None:
    """Return the longest beginning of a string that the client takes as an offset, if any.

    A beginning of a string is not greater than it, so that listing after it loses nothing.
    """
    for length in range(min(len(start_after), MAX_KEY_BYTES), 0, -1):
        if is_sendable(start_after[:length]):
            return start_after[:length]
    return None


def first_offset(prefix: str, start_after: str | None) -> str | None:
    """Return an offset that skips much of what is not wanted, and nothing that is."""
    offset = offset_before(start_after) if start_after is not None else None
    if prefix and not prefix.endswith("/"):
        below = prefix[:-1] + chr(ord(prefix[-1]) - 1) if prefix[-1] != "\0" else prefix[:-1]
        if is_sendable(below) and (offset is None or below > offset):
            return below
    return offset


class Ordered:
    """Makes entries of a stream of pages, and watches that the service keeps its order."""

    def __init__(self, root: str, prefix: str, start_after: str | None) -> None:
        """Take keys below ``root`` that begin with ``prefix`` and follow ``start_after``."""
        self._root = root
        self._prefix = prefix
        self._start_after = start_after
        self._last: str | None = None
        self.ended = False
        """No later page can hold anything wanted."""

    def entries(self, page: Iterable[ObjectMeta]) -> Iterator[ObjectInfo]:
        """Return what a page holds of the objects wanted.

        Raises:
            StorageError: the service does not list in order.
        """
        for meta in page:
            key = meta["path"][len(self._root) :]
            if self._last is not None and key <= self._last:
                if meta["size"] == 0:  # a console's placeholder "folder/", told as "folder"
                    continue
                raise StorageError(
                    f"The service lists {key!r} after {self._last!r}, out of order, so that the "
                    "listing cannot be trusted. Use a general purpose bucket.",
                    key=key,
                )
            self._last = key
            if key.startswith(self._prefix):
                if self._start_after is None or key > self._start_after:
                    yield ObjectInfo(key, meta["size"], meta["last_modified"])
            elif key > self._prefix:
                self.ended = True
                return


def groups_and_objects(
    found: ListResult[Iterable[ObjectMeta]], root: str, prefix: str, start_after: str | None
) -> list[ListEntry]:
    """Return the entries of a folder that are wanted, in order."""
    entries: dict[str, ListEntry] = {}
    for meta in found["objects"]:
        key = meta["path"][len(root) :]
        entries[key] = ObjectInfo(key, meta["size"], meta["last_modified"])
    for path in found["common_prefixes"]:
        group = path[len(root) :].rstrip("/") + "/"
        entries[group] = CommonPrefix(group)
    return [
        entries[name]
        for name in sorted(entries)
        if name.startswith(prefix) and (start_after is None or name > start_after)
    ]
