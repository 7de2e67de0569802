"""A cache with a budget: it drops the least recently used entries when their weight exceeds it."""

from __future__ import annotations

import threading
from collections import OrderedDict

__all__ = ["WeightedCache"]


class WeightedCache[K, V]:
    """Keeps values up to a total weight. Usable from any thread."""

    def __init__(self, capacity: int) -> None:
        """Begin empty; ``capacity`` is in the unit of the weights given to `put`."""
        self._capacity = capacity
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._weight = 0
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """Return a value, and mark it as used.

        Takes no lock, for which the threads that read chunks would queue. Each of the two steps is
        whole by itself, and what another thread does in between does no harm.
        """
        entry = self._entries.get(key)
        if entry is None:
            return None
        try:  # noqa: SIM105 -- hot
            self._entries.move_to_end(key)
        except KeyError:  # another thread dropped it
            pass
        return entry[0]

    def put(self, key: K, value: V, weight: int) -> None:
        """Keep a value; one that alone exceeds the capacity is kept until the next comes."""
        with self._lock:
            old = self._entries.get(key)
            self._weight += weight - (old[1] if old else 0)
            self._entries[key] = (value, weight)  # in place: readers miss it at no moment
            self._entries.move_to_end(key)
            while self._weight > self._capacity and len(self._entries) > 1:
                _, (_, dropped) = self._entries.popitem(last=False)
                self._weight -= dropped

    def discard(self, key: K) -> None:
        """Forget a value, if it is here."""
        with self._lock:
            old = self._entries.pop(key, None)
            if old:
                self._weight -= old[1]
