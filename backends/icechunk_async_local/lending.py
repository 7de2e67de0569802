"""Bytes that a thread writes while their owner waits, and may stop waiting.

Copying a megabyte into fresh memory costs as much as writing it to the system's cache. So a large
array is written from where it is. Its owner may take it back at any moment, by a cancellation, and
use it for something else; then what was written of it never gets a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from icechunk_async.storage import Data

__all__ = ["Loan", "TakenBackError"]

_LARGE_BYTES: Final = 1 << 16


class TakenBackError(Exception):
    """The owner has its bytes back, and nobody hears of the write any more."""


class Loan:
    """What is to be written for an owner that waits."""

    __slots__ = ("_is_lent", "_taken_back", "data")

    def __init__(self, data: Data) -> None:
        """Lend ``data`` where that is sound and worth it, else a copy.

        Only arrays are lent as they are: as long as someone looks at a ``bytearray``, its owner
        cannot resize it.
        """
        view = memoryview(data)
        is_fixed = type(view.obj) is bytes
        self._is_lent = view.nbytes >= _LARGE_BYTES and isinstance(view.obj, np.ndarray)
        self._taken_back = False
        self.data = data if self._is_lent or is_fixed else bytes(data)

    def end(self) -> None:
        """Take back what was lent; copies, and what nobody can change, may be written on."""
        self._taken_back = self._is_lent

    def check(self) -> None:
        """Go on only with bytes that were all read while they were lent.

        Raises:
            TakenBackError: some may be something else by now.
        """
        if self._taken_back:
            raise TakenBackError
