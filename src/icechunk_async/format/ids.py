"""Object identifiers: random bytes that read as Crockford base32 (spec, "Object identifiers")."""

from __future__ import annotations

from typing import ClassVar, Final, Self

from icechunk_async._runtime import clock
from icechunk_async.errors import InvalidInputError

__all__ = [
    "ALPHABET",
    "INITIAL_SNAPSHOT_ID",
    "BackupId",
    "ChunkId",
    "ManifestId",
    "NodeId",
    "SessionId",
    "SnapshotId",
]

ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""The digits of the text form, in ascending order."""
_PAIRS: Final = [first + second for first in ALPHABET for second in ALPHABET]
_VALUES: Final = {letter: value for value, letter in enumerate(ALPHABET)}
# The aliases of Crockford's alphabet and lower case are read, never written.
_VALUES.update({letter.lower(): value for letter, value in _VALUES.items()})
_VALUES.update({"O": 0, "o": 0, "I": 1, "i": 1, "L": 1, "l": 1})


class _ObjectId(bytes):
    """Bytes of a fixed length; ``str()`` is the text form, order is byte order.

    Text order equals byte order, since the alphabet ascends.
    """

    size_bytes: ClassVar[int] = 12
    __slots__ = ()

    def __new__(cls, raw: bytes) -> Self:
        if len(raw) != cls.size_bytes:
            raise InvalidInputError(
                f"a {cls.__name__} has {cls.size_bytes} bytes, not {len(raw)}: {raw[:32]!r}"
            )
        return super().__new__(cls, raw)

    @classmethod
    def random(cls) -> Self:
        """Return a fresh id; two never agree in practice."""
        return cls(clock.random_bytes(cls.size_bytes))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form, leniently (lower case, Crockford's aliases).

        Raises:
            InvalidInputError: wrong length, or a letter outside the alphabet.
        """
        letters = -(-cls.size_bytes * 8 // 5)
        number = 0
        if len(text) == letters and all(letter in _VALUES for letter in text):
            for letter in text:
                number = number << 5 | _VALUES[letter]
            padding = letters * 5 - cls.size_bytes * 8
            return cls((number >> padding).to_bytes(cls.size_bytes))
        raise InvalidInputError(
            f"{text[:64]!r} is not a {cls.__name__}: it needs {letters} letters of "
            "Crockford base32, such as '1CECHNKREP0F1RSTCMT0' for a snapshot.",
            text=text[:64],
            code="invalid-snapshot-id",
        )

    def __str__(self) -> str:
        n, pairs = int.from_bytes(self) << 4, _PAIRS
        return (  # written out: every chunk that is read has its name made
            f"{pairs[n >> 90]}{pairs[n >> 80 & 1023]}{pairs[n >> 70 & 1023]}"
            f"{pairs[n >> 60 & 1023]}{pairs[n >> 50 & 1023]}{pairs[n >> 40 & 1023]}"
            f"{pairs[n >> 30 & 1023]}{pairs[n >> 20 & 1023]}{pairs[n >> 10 & 1023]}"
            f"{pairs[n & 1023]}"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class SnapshotId(_ObjectId):
    """Names one snapshot, and its transaction log."""


class ManifestId(_ObjectId):
    """Names one manifest."""


class ChunkId(_ObjectId):
    """Names one chunk object."""


class BackupId(_ObjectId):
    """The random part of a backup's name."""


class SessionId(_ObjectId):
    """Names one session and all of its forks; of leased sessions, also in the storage."""


class NodeId(_ObjectId):
    """Names one array or group for its whole life, also when it moves."""

    size_bytes = 8

    def __str__(self) -> str:
        number = int.from_bytes(self) << 1
        return "".join([ALPHABET[number >> place & 31] for place in range(60, -1, -5)])


INITIAL_SNAPSHOT_ID: Final = SnapshotId(bytes.fromhex("0b1cc8d6787580f0e33a6534"))
"""The first snapshot of repositories made by 1.0 and later; older ones have a random first id."""
