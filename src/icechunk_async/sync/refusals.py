"""Refusals of the facade itself, in both families of errors and with the official code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.sync.errors import translate

if TYPE_CHECKING:
    from icechunk_async.errors import IcechunkError as AsyncError
    from icechunk_async.sync.errors import ErrorKind, IcechunkError

__all__ = ["refusal"]


def refusal(error: AsyncError, kind: ErrorKind) -> IcechunkError:
    """Return the facade's error for one of the library, with a code that says more."""
    translated = translate(error)
    translated.kind = kind.value
    return translated
