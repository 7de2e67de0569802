"""Tell a process from the one that it was forked from by `os.fork`.

A forked child inherits objects, but neither threads nor event loops, and its sockets are those of
its parent: bytes of two processes would mix on them. So an object that keeps something open
remembers the generation in which it was opened.
"""

from __future__ import annotations

import os

__all__ = ["generation"]

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
