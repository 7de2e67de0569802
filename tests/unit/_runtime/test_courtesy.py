"""Letting others go first: when, and for how long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from icechunk_async._runtime import clock
from icechunk_async._runtime.backoff import Courtesy

if TYPE_CHECKING:
    from collections.abc import Iterator


class Middling(clock.SystemClock):
    """Every random number is a half, and time stands still unless it is told to move."""

    def __init__(self) -> None:
        self.us = 0

    def random_bytes(self, size_bytes: int) -> bytes:
        """Return the half of all numbers."""
        return b"\x80" + bytes(size_bytes - 1)

    def elapsed_us(self) -> int:
        """Return the time."""
        return self.us


@pytest.fixture(autouse=True)
def middling() -> Iterator[Middling]:
    """Decide the time and random numbers."""
    found = Middling()
    with clock.use_clock(found):
        yield found


def met(*overtaken: int, try_seconds: float = 1.0) -> Courtesy:
    """Return one that saw others, whose changes were overtaken by so many."""
    courtesy = Courtesy()
    courtesy.lost(try_seconds)
    for count in overtaken:
        courtesy.saw(count)
    return courtesy


def test_who_met_nobody_never_pauses() -> None:
    """However often others of the same process were first, who are no others."""
    courtesy = Courtesy()
    for count in (0, 3, 7):
        courtesy.landed(count, 0, 1.0)
    assert courtesy.pause(0, first=True) == 0
    assert courtesy.pause(9, first=False) == 0


def test_others_that_overtake_nobody_cause_no_pause() -> None:
    """They take turns by themselves."""
    assert met(0, 0, 0).pause(0, first=True) == 0


def test_the_pause_grows_with_the_lead() -> None:
    """The others waited for eight each: who waited for six or more goes at once."""
    courtesy = met(8, 8, 8)
    pauses = [courtesy.pause(overtaken, first=True) for overtaken in range(10)]
    assert pauses == sorted(pauses, reverse=True)
    assert pauses[0] == 1.5  # then it looks again
    assert 0 < pauses[6] < pauses[5]
    assert pauses[7:] == [0, 0, 0]


def test_who_lost_often_tries_sooner() -> None:
    """The opposite of exponential back-off."""
    courtesy = met(8, 8, 8)
    behind = [courtesy.pause(overtaken, first=False) for overtaken in (10, 12, 14, 20)]
    assert behind == sorted(behind, reverse=True)
    assert behind[-1] == 0


def test_pauses_are_as_long_as_tries() -> None:
    """They suit a disk and a remote service."""
    assert met(8, try_seconds=0.01).pause(0, first=True) == pytest.approx(0.015)
    assert met(8, try_seconds=10.0).pause(0, first=True) == pytest.approx(15.0)


def test_a_pause_in_which_nobody_came_makes_the_next_shorter() -> None:
    """After a few, it pauses no more: the others are gone."""
    courtesy = met(8)
    pauses = []
    for _ in range(5):
        pauses.append(courtesy.pause(0, first=True))
        courtesy.nobody_came()
    assert pauses == sorted(pauses, reverse=True)
    assert pauses[-1] == 0


def test_what_was_seen_long_ago_does_not_count(middling: Middling) -> None:
    """A hundred tries later the others may be gone."""
    courtesy = met(8)
    middling.us = 101_000_000
    assert courtesy.pause(0, first=True) == 0


def test_a_writer_in_a_hurry_pauses_now_and_then_for_those_nobody_sees(middling: Middling) -> None:
    """Ever more rarely while nobody comes, and not at all if others had time anyway."""
    courtesy = Courtesy()

    def commits(count: int, seconds_between: float) -> list[int]:
        paused = []
        for number in range(count):
            middling.us += int(seconds_between * 1e6)
            if courtesy.pause(0, first=True):
                paused.append(number)
                courtesy.nobody_came()
            courtesy.landed(0, 0, 1.0)
        return paused

    assert commits(20, 5.0) == []
    assert commits(200, 0.1) == [3, 11, 27, 59, 123, 187]
