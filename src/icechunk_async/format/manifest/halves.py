"""Doing two halves of a long computation at once, on two threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["both"]


def both[T](first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
    """Do two things at once, both without the interpreter for most of their time.

    The thread ends with the call, so that none is left where a process is forked. If both fail,
    the error is that of ``first``.
    """
    with ThreadPoolExecutor(1) as helper:
        try:
            other = helper.submit(second)
        except RuntimeError:  # the interpreter exits and begins nothing more on threads
            return first(), second()
        return first(), other.result()
