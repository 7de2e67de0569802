"""The names of files in the first draft, and the ids that stand for them.

The specification leaves names to the writer. Here they are the text of an id, with ``.parquet``
after it where the file is one. Other writers' names get an id that is a hash of the name. The names
behind such ids are remembered for as long as the process lives: they are the same everywhere.
"""

from __future__ import annotations

import threading
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.format.id_set import format_ids, parse_ids
from icechunk_async.format.ids import ChunkId, ManifestId, SnapshotId

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = [
    "ATTRIBUTES",
    "CHUNKS",
    "ID_BYTES",
    "MANIFESTS",
    "STATE",
    "STRUCTURES",
    "SUFFIX",
    "check_name",
    "chunk_ids",
    "chunk_names",
    "is_url",
    "manifest_id",
    "name_of",
    "snapshot_id",
]

STATE: Final = "state.json"
STRUCTURES: Final = "s/"
ATTRIBUTES: Final = "a/"
MANIFESTS: Final = "i/"
CHUNKS: Final = "c/"
SUFFIX: Final = ".parquet"
ID_BYTES: Final = 12
_MAX_NAME: Final = 1024


class _Others:
    """The names behind ids that are hashes of them. Usable from any thread."""

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}
        self._lock = threading.Lock()

    def id_of(self, name: str) -> bytes:
        raw = blake2b(name.encode(), digest_size=ID_BYTES).digest()
        with self._lock:
            # Twelve bytes of a hash can be made to collide; then neither file is read for the
            # other.
            if self._names.setdefault(raw, name) != name:
                raise FormatError(f"The names {name!r:.100} and {self._names[raw]!r:.100} collide.")
        return raw

    def name_of(self, raw: bytes) -> str | None:
        # Without the lock: an entry never changes, and one that another thread adds is not asked
        # for yet.
        return self._names.get(raw)

    def __bool__(self) -> bool:
        return bool(self._names)


_others: Final = _Others()


def check_name(name: str) -> str:
    """Return the name of a file if it can be part of a key.

    Raises:
        FormatError: it cannot.
    """
    parts = name.split("/")
    if (
        not 0 < len(name) <= _MAX_NAME
        or not name.isprintable()
        or "\\" in name
        or any(part in {"", ".", ".."} for part in parts)
    ):
        raise FormatError(f"{name!r:.100} cannot be the name of a file.")
    return name


def is_url(name: str) -> bool:
    """Return whether a chunk file is outside of the repository."""
    return "://" in name


def snapshot_id(text: str) -> SnapshotId:
    """Return the id that stands for the id of a snapshot in the state file."""
    return SnapshotId(_id_of(text))


def manifest_id(name: str) -> ManifestId:
    """Return the id that stands for the name of a manifest.

    Raises:
        FormatError: it names no file.
    """
    if name.endswith(SUFFIX) and len(name) == 20 + len(SUFFIX):
        raw = _parsed(name.removesuffix(SUFFIX))
        if raw is not None:
            return ManifestId(raw)
    return ManifestId(_others.id_of(check_name(name)))


def _id_of(text: str) -> bytes:
    return _parsed(text) or _others.id_of(text)


def _parsed(text: str) -> bytes | None:
    try:
        raw = SnapshotId.parse(text)
    except InvalidInputError:
        return None
    # Parsing is lenient. Only the canonical text may stand for an id, or two names would become one
    # file.
    return bytes(raw) if len(raw) == ID_BYTES and str(raw) == text else None


def name_of(identifier: ChunkId | ManifestId) -> str:
    """Return the name of a chunk file or a manifest, without its folder."""
    name = _others.name_of(bytes(identifier))
    if name is not None:
        return name
    return str(identifier) + (SUFFIX if isinstance(identifier, ManifestId) else "")


def chunk_ids(names: Sequence[str]) -> npt.NDArray[np.uint8]:
    """Return the ids, ``(n, 12)``, that stand for the names of chunk files.

    Raises:
        FormatError: one names no file.
    """
    ids, valid = parse_ids(names)
    ids = ids.copy()
    for row in np.flatnonzero(~valid).tolist():
        ids[row] = np.frombuffer(_others.id_of(check_name(names[row])), np.uint8)
    return ids


def chunk_names(ids: npt.NDArray[np.uint8]) -> list[str]:
    """Return the names of chunk files by their ids, ``(n, 12)``."""
    # All as texts of ids first; hardly ever is one the hash of another writer's name.
    names = format_ids(ids)
    if _others:
        for row in range(len(ids)):
            names[row] = _others.name_of(ids[row].tobytes()) or names[row]
    return names
