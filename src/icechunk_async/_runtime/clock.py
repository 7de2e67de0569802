"""Time and randomness, so that a test can decide both."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from icechunk_async.errors import InvalidInputError, WrongTypeError

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = [
    "EPOCH",
    "Clock",
    "SystemClock",
    "Ticker",
    "elapsed_us",
    "from_us",
    "given_time",
    "now_us",
    "random_bytes",
    "to_us",
    "uniform",
    "use_clock",
]

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Clock(Protocol):
    """Time and randomness as the library needs them."""

    def now_us(self) -> int:
        """Return microseconds since the Unix epoch, UTC."""
        ...

    def random_bytes(self, size_bytes: int) -> bytes:
        """Return ``size_bytes`` random bytes; object ids are made of them."""
        ...


@runtime_checkable
class Ticker(Protocol):
    """A clock of a test that also measures the lapse of time; others leave that to the machine."""

    def elapsed_us(self) -> int:
        """Return microseconds since some fixed moment."""
        ...


class SystemClock:
    """The machine's clock and its source of randomness."""

    def now_us(self) -> int:
        """Read the wall clock."""
        return time.time_ns() // 1000

    def random_bytes(self, size_bytes: int) -> bytes:
        """Ask the operating system, so that forked processes never share ids."""
        return os.urandom(size_bytes)


_clock: Clock = SystemClock()
_ticker: Ticker | None = None
"""The clock, if it measures the lapse of time as well."""

_STEADY: Final = getattr(time, "CLOCK_BOOTTIME", None)
"""Goes on while the machine sleeps, where the system has such a clock."""


def now_us() -> int:
    """Return microseconds since the Unix epoch, UTC."""
    return _clock.now_us()


def elapsed_us() -> int:
    """Return microseconds since some moment, the same as long as the process lives.

    Nobody sets this clock: it measures how long something took, however wrong the date is.
    """
    if _ticker is not None:
        return _ticker.elapsed_us()
    return (time.monotonic_ns() if _STEADY is None else time.clock_gettime_ns(_STEADY)) // 1000


def random_bytes(size_bytes: int) -> bytes:
    """Return ``size_bytes`` random bytes."""
    return _clock.random_bytes(size_bytes)


def from_us(microseconds: int) -> datetime:
    """Return an aware UTC time for microseconds since the epoch; the last one if beyond."""
    try:
        return EPOCH + timedelta(microseconds=microseconds)
    except OverflowError:  # times come from files, and a hostile one may say anything
        return datetime.max.replace(tzinfo=UTC)


def to_us(moment: datetime) -> int:
    """Return microseconds since the epoch; a time without a zone is taken as UTC."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - EPOCH) // timedelta(microseconds=1)


def given_time(moment: object, name: str) -> datetime:
    """Return a time that a user gave: an ISO 8601 text, or how long ago it was, as well.

    A text without an offset is taken as UTC, a `datetime` without a zone is returned unchanged.

    Raises:
        InvalidInputError: the text is no time, or it is longer ago than the calendar reaches.
        WrongTypeError: it is of another type.
    """
    if isinstance(moment, datetime):
        return moment
    if isinstance(moment, timedelta):
        try:
            return from_us(now_us()) - moment
        except OverflowError:
            raise InvalidInputError(
                f"{name} is {moment.days} days ago, longer than the calendar reaches."
            ) from None
    forms = "a datetime with a zone, a timedelta before now, or a text such as '2026-01-31T12:00Z'"
    if not isinstance(moment, str):
        raise WrongTypeError(f"{name} must be {forms}, not {moment!r}.")
    try:
        found = datetime.fromisoformat(moment)
    except ValueError:
        raise InvalidInputError(f"{name} is {moment!r}, which is no time; give {forms}.") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def uniform() -> float:
    """Return a random number in [0, 1), for jitter."""
    # A double holds 48 bits exactly; of 64 the largest numbers would be rounded to 1.
    return int.from_bytes(_clock.random_bytes(6)) / (1 << 48)


@contextmanager
def use_clock(clock: Clock) -> Generator[None]:
    """Replace the clock of the whole process for the length of a test."""
    global _clock, _ticker
    previous = _clock, _ticker
    _clock, _ticker = clock, clock if isinstance(clock, Ticker) else None
    try:
        yield
    finally:
        _clock, _ticker = previous
