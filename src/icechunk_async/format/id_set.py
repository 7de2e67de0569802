"""Sets of object ids as NumPy columns: tens of millions take 12 bytes each, and no objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.format.ids import ALPHABET, ChunkId

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    type Ids = npt.NDArray[np.uint8]
    """A row of twelve bytes an id."""

__all__ = ["IdSet", "format_ids", "parse_ids"]

_SIZE_BYTES: Final = ChunkId.size_bytes
_LETTERS: Final = -(-_SIZE_BYTES * 8 // 5)
_FEWEST_WAITING: Final = 1 << 16
_INVALID: Final = 255
_VALUES: Final = np.full(256, _INVALID, np.uint8)
_PAIRS: Final = np.array([a + b for a in ALPHABET for b in ALPHABET], "S2").view(np.uint16)
"""Two letters for each ten bits, as they lie in memory."""
_VALUES[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(len(ALPHABET))


class IdSet:
    """A growing set of 12-byte ids."""

    def __init__(self) -> None:
        """Begin empty."""
        self._high = np.empty(0, np.uint64)
        """The first eight bytes of each id, ascending."""
        self._low = np.empty(0, np.uint32)
        """The last four, ascending where the first are equal."""
        self._waiting: list[Ids] = []
        self._num_waiting = 0

    def add(self, ids: Ids) -> None:
        """Add ids, ``(n, 12)``; any number of them may be present already.

        Cost: that of sorting, in proportion to what is added in all.
        """
        if len(ids):
            self._waiting.append(ids)
            self._num_waiting += len(ids)
        # Only when as much waits as is sorted: each id is then sorted a logarithmic number of
        # times, and memory is at most double.
        if self._num_waiting > max(_FEWEST_WAITING, len(self._high)):
            self._settle()

    def contains(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return a mask of the ids, ``(n, 12)``, that are in the set."""
        return self.find(ids) >= 0

    def find(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Return the places of some ids, ``(n, 12)``, in `ids`; -1 for those not there."""
        self._settle()
        high, low = _columns(ids)
        found = np.full(len(ids), -1, np.int64)
        # By the first eight bytes. Ids are random, so the last four decide hardly ever, but hostile
        # ones may all begin alike.
        places = np.searchsorted(self._high, high)
        rows = np.arange(len(ids))
        while len(rows):  # once, but for ids that begin alike
            inside = places < len(self._high)
            rows, places = rows[inside], places[inside]
            alike = self._high[places] == high[rows]
            rows, places = rows[alike], places[alike]
            equal = self._low[places] == low[rows]
            found[rows[equal]] = places[equal]
            rows, places = rows[~equal], places[~equal] + 1
        return found

    def ids(self) -> Ids:
        """Return all ids, ``(n, 12)``, ascending."""
        self._settle()
        words = np.empty((len(self._high), 3), ">u4")
        words[:, 0] = self._high >> np.uint64(32)
        words[:, 1] = self._high & np.uint64(0xFFFFFFFF)
        words[:, 2] = self._low
        return words.view(np.uint8).reshape(-1, _SIZE_BYTES)

    @property
    def size_bytes(self) -> int:
        """Memory that the ids take, repeated ones that are not sorted in yet included."""
        return _SIZE_BYTES * (len(self._high) + self._num_waiting)

    def __len__(self) -> int:
        """Count the different ids."""
        self._settle()
        return len(self._high)

    def _settle(self) -> None:
        """Merge the ids added since the last sort."""
        if not self._waiting:
            return
        high, low = _columns(np.concatenate(self._waiting))
        self._waiting.clear()
        self._num_waiting = 0
        high = np.concatenate([self._high, high])
        low = np.concatenate([self._low, low])
        order = np.lexsort((low, high))
        high, low = high[order], low[order]
        first = np.ones(len(high), bool)
        first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        self._high, self._low = high[first], low[first]


def _columns(ids: Ids) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    """Split ids into numbers that are in the same order as the ids."""
    words = np.ascontiguousarray(ids).reshape(-1, _SIZE_BYTES).view(">u4").astype(np.uint32)
    high = words[:, 0].astype(np.uint64) << np.uint64(32) | words[:, 1]
    return high, words[:, 2]


def parse_ids(names: Sequence[str]) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Read the text forms of many 12-byte ids at once.

    Unlike `ChunkId.parse` this accepts only the form that writers use: no other name in a listing
    is that of an Icechunk object.

    Returns:
        The ids, ``(n, 12)``, and which of the names are ids; the others' rows mean nothing.
    """
    fitting = [
        name.encode() if len(name) == _LETTERS and name.isascii() else bytes(_LETTERS)
        for name in names
    ]
    letters = np.frombuffer(b"".join(fitting), np.uint8).reshape(len(names), _LETTERS)
    values = _VALUES[letters]
    valid: npt.NDArray[np.bool_] = np.all(values != _INVALID, axis=1)
    # Five bits a letter, of the eight of its number.
    bits: npt.NDArray[Any] = np.unpackbits(values[:, :, None], axis=2)[:, :, 3:]
    bits = bits.reshape(len(names), 5 * _LETTERS)
    valid &= ~bits[:, _SIZE_BYTES * 8 :].any(axis=1)  # the bytes beyond the id are zero
    return np.packbits(bits[:, : _SIZE_BYTES * 8], axis=1), valid


def format_ids(ids: Ids) -> list[str]:
    """Return the text forms of many 12-byte ids, ``(n, 12)``, at once."""
    wide = np.zeros((_SIZE_BYTES + 1, len(ids)), np.uint16)
    wide[:_SIZE_BYTES] = ids.T
    letters = np.empty((len(ids), _LETTERS // 2), np.uint16)
    for pair in range(_LETTERS // 2):  # of ten bits, which lie in two bytes
        at, bit = divmod(10 * pair, 8)
        letters[:, pair] = _PAIRS[(wide[at] << 8 | wide[at + 1]) >> (6 - bit) & 1023]
    texts: list[str] = letters.view(f"S{_LETTERS}")[:, 0].astype(f"U{_LETTERS}").tolist()
    return texts
