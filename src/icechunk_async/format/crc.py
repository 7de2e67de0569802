"""The checksum of one chunk; `sums` keeps those of a manifest.

In memory a sum is a code of 64 bits: `KNOWN` plus the CRC-32C of the bytes, and 0 if it is unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import google_crc32c
import numpy as np

if TYPE_CHECKING:
    type Data = bytes | bytearray | memoryview

__all__ = ["KNOWN", "crc_of", "sum_of"]

KNOWN: Final = 1 << 32
"""In the code of a sum: it is known."""


def sum_of(data: Data) -> int:
    """Return the code of the checksum of some bytes.

    Cost: about 2 microseconds for 10 KB, 0.12 milliseconds for 1 MB. It holds the interpreter's
    lock, so a thread would gain nothing.
    """
    # The library refuses memoryviews, and takes arrays without copying them.
    plain: Any = data if isinstance(data, bytes) else np.frombuffer(data, np.uint8)
    return KNOWN | google_crc32c.value(plain)


def crc_of(code: int) -> int:
    """Return the CRC-32C of a sum that is known."""
    return code & (KNOWN - 1)
