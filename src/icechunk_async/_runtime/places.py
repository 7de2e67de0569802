"""Objects that belong to a place, such as a URL: all users of the place in a process share one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from icechunk_async._runtime.processes import generation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Places"]


class Places[T: object]:
    """One object for each place, as long as somebody uses it. Usable from any thread."""

    def __init__(self, make: Callable[[], T]) -> None:
        """Make objects by ``make()``."""
        self._make = make
        self._lock = threading.Lock()
        self._generation = generation()
        self._objects: WeakValueDictionary[tuple[str, int], T] = WeakValueDictionary()
        self._options: dict[tuple[str, int], Mapping[str, object]] = {}

    def at(self, url: str, options: Mapping[str, object]) -> T:
        """Return the object of a place.

        Places with the same URL and other options are others: who has other credentials may see
        other contents.
        """
        if self._generation != generation():  # what the parent process shares is not ours
            self._lock, self._generation = threading.Lock(), generation()
            self._objects, self._options = WeakValueDictionary(), {}
        with self._lock:
            self._options = {it: of for it, of in self._options.items() if it in self._objects}
            numbers = {number for (known, number) in self._options if known == url}
            for number in numbers:
                found = self._objects.get((url, number))
                if found is not None and _equal(self._options[url, number], options):
                    return found
            place = url, min(set(range(len(numbers) + 1)) - numbers)
            made = self._make()
            self._objects[place], self._options[place] = made, options
            return made


def _equal(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Return whether options are equal; those that cannot be compared are not."""
    try:
        return bool(dict(one) == dict(other))
    except Exception:  # noqa: BLE001 -- the options of a backend can be of any class
        return False
