"""The state of one process: how to tell it from its parent, and objects that its users share.

A child of `os.fork` inherits objects, but neither threads nor event loops, and its sockets are
those of its parent: bytes of two processes would mix on them. So an object that keeps something
open, or that holds a lock, remembers the generation in which it was made.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Places", "generation"]

_generation = 0


def generation() -> int:
    """Return the number of forks between the first process and this one.

    An object opened in another generation may hold locks of threads that do not exist here.
    """
    return _generation


def _in_child() -> None:
    global _generation  # noqa: PLW0603 -- one per process, by design
    _generation += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


class Places[T: object]:
    """One object for each place, such as a URL, shared by all its users in the process.

    It is kept as long as somebody uses it. Usable from any thread.
    """

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
            # Options need not be hashable, so a number stands for them in the key: the first that
            # is free, for a number becomes free when nobody uses its object any more.
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
