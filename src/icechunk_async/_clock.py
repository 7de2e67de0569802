"""Time and randomness, so that a test can decide both."""

from __future__ import annotations

import secrets
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Clock", "SystemClock", "now_us", "random_bytes", "uniform", "use_clock"]


class Clock(Protocol):
    """What the library asks of its surroundings."""

    def now_us(self) -> int:
        """Answer microseconds since the Unix epoch, UTC."""
        ...

    def random_bytes(self, size_bytes: int) -> bytes:
        """Answer ``size_bytes`` random bytes; object ids are made of them."""
        ...


class SystemClock:
    """The machine's clock and its source of randomness."""

    def now_us(self) -> int:
        """Read the wall clock."""
        return time.time_ns() // 1000

    def random_bytes(self, size_bytes: int) -> bytes:
        """Ask the operating system, so that forked processes never share ids."""
        return secrets.token_bytes(size_bytes)


_clock: Clock = SystemClock()


def now_us() -> int:
    """Answer microseconds since the Unix epoch, UTC."""
    return _clock.now_us()


def random_bytes(size_bytes: int) -> bytes:
    """Answer ``size_bytes`` random bytes."""
    return _clock.random_bytes(size_bytes)


def uniform() -> float:
    """Answer a random number in [0, 1), for jitter."""
    return int.from_bytes(_clock.random_bytes(6)) / (1 << 48)


@contextmanager
def use_clock(clock: Clock) -> Iterator[None]:
    """Replace the clock of the whole process for the length of a test."""
    global _clock
    previous, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = previous
