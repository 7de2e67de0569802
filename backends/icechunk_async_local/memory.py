"""Memory to read files into."""

from __future__ import annotations

from typing import Final

__all__ = ["fresh_memory"]

_LARGE_BYTES: Final = 1 << 16
"""From this size on it is felt that a ``bytearray`` is filled with zeros first."""


def fresh_memory(length: int) -> memoryview:
    """Return writable memory of ``length`` bytes, whose contents do not matter.

    NumPy allocates large buffers in pages of megabytes if the system has them; touching the same
    memory in small pages for the first time would take half of the time of a read. Small files,
    such as those of refs, are read without it, because it takes long to import.
    """
    if length < _LARGE_BYTES:
        return memoryview(bytearray(length))
    import numpy as np  # noqa: PLC0415 -- see above

    return memoryview(np.empty(length, np.uint8))
