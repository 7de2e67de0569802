"""The memory tier of the cache; and how both tiers name a reply, and check that it is whole."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from icechunk_async.storage.protocol import ByteRange, SuffixRange, slice_range

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async.storage.protocol import RangeRequest, Retrieved

__all__ = ["MemoryTier", "fits", "part_name"]

_ENTRY_BYTES: Final = 1024
"""The rough overhead of an entry beside its bytes: keys, versions, dictionary slots."""


def part_name(request: RangeRequest) -> str:
    """Return a short file name part for a range."""
    match request:
        case None | ByteRange(0, None):
            return "all"
        case ByteRange(start, stop):
            return f"{start}-{'' if stop is None else stop}"
        case SuffixRange(length):
            return f"-{length}"


def fits(request: RangeRequest, retrieved: Retrieved) -> bool:
    """Return whether the length of a reply fits the request and the size of the object."""
    start, stop = slice_range(request, retrieved.size_bytes)
    return len(retrieved.data) == stop - start


class MemoryTier:
    """The memory tier: replies by key and range, least recently used out first. Thread-safe."""

    def __init__(self, capacity_bytes: int) -> None:
        """Begin empty."""
        self._capacity = capacity_bytes
        self._entries: OrderedDict[tuple[str, str], Retrieved] = OrderedDict()
        self._parts: dict[str, set[str]] = {}
        self._lock = threading.Lock()  # held over no await
        self.held_bytes = 0

    def get(self, key: str, request: RangeRequest) -> Retrieved | None:
        """Return the entry of exactly this request, and mark it as used."""
        place = (key, part_name(request))
        with self._lock:
            found = self._entries.get(place)
            if found is not None:
                self._entries.move_to_end(place)
            return found

    def put(self, key: str, request: RangeRequest, retrieved: Retrieved) -> None:
        """Keep a reply, unless it alone exceeds the capacity."""
        cost = _cost(retrieved)
        if cost > self._capacity:
            return
        part = part_name(request)
        with self._lock:
            self._remove(key, part)
            self._entries[key, part] = retrieved
            self._parts.setdefault(key, set()).add(part)
            self.held_bytes += cost
            # The new entry is the last and fits alone, so it stays.
            while self.held_bytes > self._capacity:
                self._remove(*next(iter(self._entries)))

    def drop(self, keys: Iterable[str]) -> None:
        """Drop all entries of the given objects."""
        with self._lock:
            for key in keys:
                for part in list(self._parts.get(key, ())):
                    self._remove(key, part)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._entries.clear()
            self._parts.clear()
            self.held_bytes = 0

    def _remove(self, key: str, part: str) -> None:
        old = self._entries.pop((key, part), None)
        if old is not None:
            self.held_bytes -= _cost(old)
            self._parts[key].discard(part)
            if not self._parts[key]:
                del self._parts[key]


def _cost(retrieved: Retrieved) -> int:
    return len(retrieved.data) + _ENTRY_BYTES
