"""Names with timestamps, which fragments, commits, schemas and metadata have.

Since version 5 of a fragment its name is ``__<t1>_<t2>_<32 hexadecimal digits>_<version>``, where
the times are milliseconds since 1970. Older fragments, schemas and metadata have no version.
"""

from __future__ import annotations

import re
from typing import Final

from icechunk_async._runtime.dataclasses import dataclass

__all__ = ["NAMELESS_VERSION", "TimedName", "parse_name"]

NAMELESS_VERSION: Final = 4
"""The version of a fragment whose name has none."""
_NAME: Final = re.compile(r"__(\d{1,20})_(\d{1,20})_([0-9a-f]{32})(?:_(\d{1,9}))?")
_OLD_NAME: Final = re.compile(r"__([0-9a-f]{32})_(\d{1,20})(?:_(\d{1,20}))?")
_OLD_VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class TimedName:
    """A name with the time, or the range of times, of what it names."""

    text: str
    start: int
    """Milliseconds since 1970."""
    end: int
    """The same, or later where several writes were consolidated."""
    version: int | None
    """Format version, where the name has one."""

    @property
    def key(self) -> tuple[int, str]:
        """A key that sorts names by the order of writing."""
        return self.start, self.text

    def is_within(self, start: int, end: int) -> bool:
        """Return whether all of it was written in a range of times, both ends included."""
        return start <= self.start and self.end <= end

    def overlaps(self, start: int, end: int) -> bool:
        """Return whether some of it was written in a range of times, both ends included."""
        return self.start <= end and start <= self.end


def parse_name(text: str) -> TimedName | None:
    """Return the parts of a name; None if it has another form."""
    match = _NAME.fullmatch(text)
    if match is not None:
        version = None if match[4] is None else int(match[4])
        return TimedName(text, int(match[1]), int(match[2]), version)
    match = _OLD_NAME.fullmatch(text)
    if match is not None:
        end = int(match[3] or match[2])
        return TimedName(text, end, end, _OLD_VERSION)
    return None
