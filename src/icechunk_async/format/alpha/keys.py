"""Keys of the alpha: numbered branch files, tags, and immutable files by their ids.

Sequence n of a branch is the file named after 1099511627775 - n in Crockford base32, eight letters
("Creating and Updating Branches"), so that the newest comes first in a listing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async.format.ids import ALPHABET

if TYPE_CHECKING:
    from icechunk_async.format.ids import ChunkId, ManifestId, SnapshotId

__all__ = [
    "ATTRIBUTES",
    "CHUNKS",
    "CONFIGS",
    "LAST_NUMBER",
    "MANIFESTS",
    "REFS",
    "SNAPSHOTS",
    "SUFFIX",
    "branch_prefix",
    "chunk_key",
    "decode_number",
    "encode_number",
    "manifest_key",
    "snapshot_key",
    "tag_key",
]

REFS: Final = "r/"
SNAPSHOTS: Final = "s/"
MANIFESTS: Final = "m/"
ATTRIBUTES: Final = "a/"
CHUNKS: Final = "c"
CONFIGS: Final = "config/"
"""Numbered objects of this library: the configuration, which the alpha has no place for."""
SUFFIX: Final = ".json"
LAST_NUMBER: Final = (1 << 40) - 1
"""The most that a sequence can count to: 1099511627775."""
_LETTERS: Final = 8
_VALUES: Final = {letter: value for value, letter in enumerate(ALPHABET)}


def encode_number(number: int) -> str:
    """Return the eight letters of a sequence number; greater numbers sort first."""
    rest = LAST_NUMBER - number
    return "".join(ALPHABET[rest >> place & 31] for place in range(5 * _LETTERS - 5, -1, -5))


def decode_number(text: str) -> int | None:
    """Return the sequence number that eight letters stand for; None if they stand for none."""
    if len(text) != _LETTERS or any(letter not in _VALUES for letter in text):
        return None
    rest = 0
    for letter in text:
        rest = rest << 5 | _VALUES[letter]
    return LAST_NUMBER - rest


def branch_prefix(name: str) -> str:
    """Return the beginning of the keys of a branch's files."""
    return f"{REFS}{name}/"


def tag_key(name: str) -> str:
    """Return the key of a tag."""
    return f"{REFS}{name}{SUFFIX}"


def snapshot_key(snapshot_id: SnapshotId) -> str:
    """Return the key of a snapshot."""
    return f"{SNAPSHOTS}{snapshot_id}"


def manifest_key(manifest_id: ManifestId) -> str:
    """Return the key of a manifest."""
    return f"{MANIFESTS}{manifest_id}"


def chunk_key(chunk_id: ChunkId) -> str:
    """Return the key of a chunk object."""
    return f"{CHUNKS}/{chunk_id}"
