"""Numbered objects: a register for storage that creates objects if absent and updates none safely.

State n is the object of number n, which is created once and never changes. Of writers that want to
follow state n exactly one creates n + 1. Whether a write landed is never in doubt for long: the
object of its number tells, once there is one.

Number n is written as 1099511627775 - n in Crockford base32, eight letters, as in the names of the
alpha's branch files ("Creating and Updating Branches"). So the newest comes first in a listing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import closing
from icechunk_async.engine.history.outcomes import Doubt, read_if_there
from icechunk_async.errors import (
    ConflictError,
    FormatError,
    OutcomeUnknownError,
    PreconditionFailedError,
    UnsupportedBySpecError,
)
from icechunk_async.format.ids import ALPHABET
from icechunk_async.storage import ABSENT, ObjectInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async._runtime.backoff import Backoff
    from icechunk_async.storage import Retrieved, Storage

__all__ = ["LAST_NUMBER", "Numbered", "decode_number", "encode_number"]

LAST_NUMBER: Final = (1 << 40) - 1
"""The most that a sequence can count to: 1099511627775."""
_LETTERS: Final = 8
_VALUES: Final = {letter: value for value, letter in enumerate(ALPHABET)}


class Numbered:
    """The numbered objects with one beginning of their keys."""

    def __init__(self, storage: Storage, prefix: str, suffix: str) -> None:
        """Name them ``prefix``, the encoded number, and ``suffix``."""
        self._storage = storage
        self.prefix = prefix
        self._suffix = suffix

    def key(self, number: int) -> str:
        """Return the key of a number."""
        return f"{self.prefix}{encode_number(number)}{self._suffix}"

    async def numbers(self) -> AsyncIterator[int]:
        """Iterate over all numbers, newest first. Cost: a listing."""
        entries = self._storage.list_prefix(self.prefix)
        async with closing(entries):
            async for entry in entries:
                name = entry.key.removeprefix(self.prefix) if isinstance(entry, ObjectInfo) else ""
                # Other names below the prefix are skipped: anybody may put objects there.
                number = decode_number(name.removesuffix(self._suffix))
                if number is not None and name.endswith(self._suffix):
                    yield number

    async def newest(self) -> int | None:
        """Return the newest number; None if no object exists.

        Raises:
            FormatError: the one before it is missing.

        Cost: one request.
        """
        newest: int | None = None
        numbers = self.numbers()
        async with closing(numbers):
            async for number in numbers:
                # The second name is enough: writers create a number only on top of the one before
                # it. Gaps further down are found by the audit.
                if newest is not None:
                    self.check_follows(newest, number)
                    return newest
                newest = number
        if newest:
            self.check_follows(newest, None)
        return newest

    def check_follows(self, number: int, before: int | None) -> None:
        """Raise FormatError unless ``before`` is the number before ``number``."""
        if before != number - 1:
            raise FormatError(
                f"{self.key(number)!r} has number {number}, and {self.key(number - 1)!r}, number "
                f"{number - 1}, is missing: the sequence has a gap. Restore the objects that were "
                "lost, or remove those after the gap, which loses what they say.",
                key=self.key(number - 1),
            )

    async def read(self, number: int) -> Retrieved | None:
        """Read the object of a number; None if it does not exist."""
        return await read_if_there(self._storage, self.key(number))

    async def append(self, number: int, data: bytes, backoff: Backoff) -> bool:
        """Create the object of a number; return whether it holds ``data`` now.

        Args:
            number: one more than the newest.
            data: the contents, which no other writer has.
            backoff: how often to try, and how long to wait in between, without a reply.

        Raises:
            OutcomeUnknownError: no reply came, and reading back did not settle it.

        Cancellation: it may have been created.
        """
        # Its name would be that of number 0.
        if number > LAST_NUMBER:
            raise UnsupportedBySpecError(f"{self.prefix!r} has no numbers left.")
        key = self.key(number)
        with Doubt() as doubt:
            for attempt in range(1, backoff.max_tries + 1):
                try:
                    await self._storage.put(key, data, if_version=ABSENT)
                except PreconditionFailedError:
                    if doubt.error is None:
                        return False
                    # An earlier try of ours may have landed.
                except OutcomeUnknownError as error:
                    doubt.error = error
                else:
                    return True
                found = await self.read(number)
                if found is not None:  # it never changes, so a try in doubt cannot land any more
                    doubt.error = None
                    return bytes(found.data) == data
                await backoff.wait(attempt)
            raise doubt.error or ConflictError(
                f"{key!r} could be neither created nor read {backoff.max_tries} times; nothing was "
                "published. Try again."
            )


def encode_number(number: int) -> str:
    """Return the eight letters of a sequence number; greater numbers sort first."""
    rest = LAST_NUMBER - number
    return "".join(ALPHABET[rest >> place & 31] for place in range(5 * _LETTERS - 5, -1, -5))


def decode_number(text: str) -> int | None:
    """Return the sequence number that eight letters stand for; None if they stand for none."""
    # Strictly: lower case and O for 0, which Crockford allows, would give one number two names.
    if len(text) != _LETTERS or any(letter not in _VALUES for letter in text):
        return None
    rest = 0
    for letter in text:
        rest = rest << 5 | _VALUES[letter]
    return LAST_NUMBER - rest
