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
    "StatisticsId",
    "encode_base32",
]

ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""The digits of the text form, in ascending order."""
_PAIRS: Final = [first + second for first in ALPHABET for second in ALPHABET]
_VALUES: Final = {letter: value for value, letter in enumerate(ALPHABET)}
# The aliases of Crockford's alphabet and lower case are read, never written.
_VALUES.update({letter.lower(): value for letter, value in _VALUES.items()})
_VALUES.update({"O": 0, "o": 0, "I": 1, "i": 1, "L": 1, "l": 1})

_COMMON_BYTES: Final = 12


def encode_base32(raw: bytes) -> str:
    """Return bytes in Crockford base32, most significant bit first, zero bits at the end."""
    letters = -(-len(raw) * 8 // 5)
    # One number of all bits, filled up at its end to whole letters: twelve bytes are 96 bits, and
    # twenty letters 100.
    number = int.from_bytes(raw) << (letters * 5 - len(raw) * 8)
    return "".join([ALPHABET[number >> place & 31] for place in range(5 * letters - 5, -1, -5)])


class _ObjectId(bytes):
    """Bytes of one of few lengths; ``str()`` is the text form, order is byte order.

    Text order equals byte order, since the alphabet ascends. Ids of format versions 1 and 2 have
    ``size_bytes``; those of layouts before them may have another length of ``sizes_bytes``.
    """

    size_bytes: ClassVar[int] = 12
    sizes_bytes: ClassVar[tuple[int, ...]] = (12, 16)
    __slots__ = ()

    def __new__(cls, raw: bytes) -> Self:
        if len(raw) not in cls.sizes_bytes:
            sizes = " or ".join(map(str, cls.sizes_bytes))
            raise InvalidInputError(
                f"a {cls.__name__} has {sizes} bytes, not {len(raw)}: {raw[:32]!r}"
            )
        return super().__new__(cls, raw)

    @classmethod
    def random(cls, size_bytes: int | None = None) -> Self:
        """Return a fresh id; two never agree in practice."""
        return cls(clock.random_bytes(cls.size_bytes if size_bytes is None else size_bytes))

    @classmethod
    def many(cls, raw: bytes) -> list[Self]:
        """Return ids of `size_bytes`, one after the other in ``raw``; quicker than one by one."""
        new, size = bytes.__new__, cls.size_bytes
        return [new(cls, raw[at : at + size]) for at in range(0, len(raw), size)]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form, leniently (lower case, Crockford's aliases).

        As in the official engine, bits behind the last byte do not count: ids that differ in them
        are one. Who takes names of objects for ids compares them with the text of the id.

        Raises:
            InvalidInputError: wrong length, or a letter outside the alphabet.
        """
        sizes = {-(-size * 8 // 5): size for size in cls.sizes_bytes}
        if len(text) in sizes and all(letter in _VALUES for letter in text):
            number = 0
            for letter in text:
                number = number << 5 | _VALUES[letter]
            size = sizes[len(text)]
            return cls((number >> (len(text) * 5 - size * 8)).to_bytes(size))
        raise InvalidInputError(
            f"{text[:64]!r} is not a {cls.__name__}: it needs {min(sizes)} letters of "
            "Crockford base32, such as '1CECHNKREP0F1RSTCMT0' for a snapshot.",
            text=text[:64],
            code="invalid-snapshot-id",
        )

    def __str__(self) -> str:
        if len(self) != _COMMON_BYTES:
            return encode_base32(self)
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

    sizes_bytes = (12,)


class SessionId(_ObjectId):
    """Names one session and all of its forks; of leased sessions, also in the storage."""

    sizes_bytes = (12,)


class ProposalId(_ObjectId):
    """Names one proposal, see `Repository.propose`."""

    sizes_bytes = (12,)


class NodeId(_ObjectId):
    """Names one array or group for its whole life, also when it moves."""

    size_bytes = 8
    sizes_bytes = (8,)

    def __str__(self) -> str:
        return encode_base32(self)


class StatisticsId(_ObjectId):
    """Names one object with statistics of chunks: the id of their array, and four random bytes."""

    sizes_bytes = (12,)

    @classmethod
    def of_array(cls, node_id: NodeId) -> Self:
        """Return a fresh id for statistics of an array's chunks."""
        return cls(bytes(node_id) + clock.random_bytes(cls.size_bytes - NodeId.size_bytes))

    @property
    def node_id(self) -> NodeId:
        """The array whose chunks they are about."""
        return NodeId(bytes(self[: NodeId.size_bytes]))


# Never a test for "the root": repositories of 0.x have another first id, which migration keeps.
INITIAL_SNAPSHOT_ID: Final = SnapshotId(bytes.fromhex("0b1cc8d6787580f0e33a6534"))
"""The first snapshot of repositories made by 1.0 and later; older ones have a random first id."""
