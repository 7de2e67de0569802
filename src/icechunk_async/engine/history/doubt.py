"""A conditional write whose answer was lost, for as long as it may still land."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from icechunk_async.errors import IcechunkError

if TYPE_CHECKING:
    from types import TracebackType

    from icechunk_async.errors import OutcomeUnknownError
    from icechunk_async.storage import Version

__all__ = ["Doubt"]


class Doubt:
    """Around the tries of one change: while an earlier try is in doubt, so is the whole change.

    As a ``with`` block it turns every error of the library into that of the try in doubt. Else a
    later try that is turned away would tell that nothing happened, and the earlier one lands yet.
    """

    def __init__(self, error: OutcomeUnknownError | None = None) -> None:
        """Begin without doubt, or with that of a write just made."""
        self.error = error
        self._expected: Version | None = None

    def begin(self, error: OutcomeUnknownError, expected: Version) -> None:
        """Remember a write of unknown outcome, and the version that it expects to replace."""
        self.error, self._expected = error, expected

    def settle(self, version: Version | None) -> None:
        """End the doubt if the object is at another version (None: gone) than the write expects.

        To be called once it is known that the write is no part of that state: then it can land
        no more.
        """
        if version != self._expected:
            self.error = self._expected = None

    def __enter__(self) -> Self:
        """Begin the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let nothing else be told while a try is in doubt."""
        doubted = self.error
        if doubted is not None and isinstance(error, IcechunkError) and error is not doubted:
            raise doubted from error
