"""The report of a verification: findings, counts, and parts that were not looked at.

A verification that may be interrupted keeps its state in a small file: what it has found, and where
it was.
"""

from __future__ import annotations

import json
from dataclasses import asdict, field, fields
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, cast

import anyio.to_thread

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from icechunk_async.format.json.metadata import JSON

__all__ = [
    "Finding",
    "Level",
    "NotLookedAt",
    "StateFile",
    "VerifyReport",
    "VerifyState",
    "as_level",
    "beyond",
    "finding_of",
]

_SCHEMA: Final = "icechunk-async verify report 1"
_STATE_SCHEMA: Final = "icechunk-async verify state 1"


class Level(IntEnum):
    """How closely to look; each level includes those before it."""

    STRUCTURE = 1
    """References, operations log, snapshots, transaction logs and manifests agree."""
    EXISTENCE = 2
    """Every object that holds chunks is there; virtual sources are in the state referred to."""
    LENGTH = 3
    """Objects are as long as the references to them need."""
    SUMS = 4
    """Chunks have the checksums that were stored when they were written."""
    DECODE = 5
    """Chunks can be decoded with the codecs of their arrays."""


_NEXT: Final = {
    Level.STRUCTURE: "whether the objects exist that manifests refer to",
    Level.EXISTENCE: "whether these objects are long enough",
    Level.LENGTH: "what is in them: chunks were not compared with checksums",
    Level.SUMS: "whether chunks can be decoded",
}


def as_level(given: Level | str) -> Level:
    """Return a level by its name.

    Raises:
        InvalidInputError: there is no such level.
    """
    if isinstance(given, Level):
        return given
    try:
        return Level[given.upper()]
    except KeyError:
        names = ", ".join(it.name.lower() for it in Level)
        raise InvalidInputError(f"There is no level {given!r}. The levels are: {names}.") from None


@dataclass(frozen=True, slots=True)
class Finding:
    """An object, or a range of bytes in one, that is not as it must be."""

    kind: str
    """``repo``, ``ref``, ``config``, ``operations log``, ``proposal``, ``snapshot``, ``transaction
    log``, ``manifest``, ``sums``, ``chunk`` or ``virtual``."""
    location: str
    """Its key in the repository, or its URL if it is virtual."""
    problem: str
    """``missing``, ``unreadable``, ``disagrees``, ``too short``, ``changed``, ``wrong sum`` or
    ``undecodable``."""
    level: str
    """The level that found it."""
    detail: str
    references: int = 0
    """The number of chunk references to it in all manifests, each manifest once; 0 for an object
    without chunks."""
    offset: int | None = None
    """First byte of the chunk in the object; None if the whole object is meant."""
    length: int | None = None
    """Bytes of the chunk."""
    array: str | None = None
    """The path of one array that needs it."""
    coordinates: tuple[int, ...] | None = None
    """One chunk in that array."""


@dataclass(frozen=True, slots=True)
class NotLookedAt:
    """Something that was in question and was not looked at."""

    what: str
    count: int | None = None
    """The number of them; None if unknown or meaningless."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The outcome of a verification.

    A repository is healthy only in those parts that were looked at, see `not_looked_at`.
    """

    url: str
    spec_version: int
    level: str
    sample: float | None
    """A share or a number of chunks that were drawn; None: all."""
    seed: int
    refs: tuple[str, ...]
    """The branches and tags that were looked at, as ``branch.main``."""
    snapshots: int = 0
    transaction_logs: int = 0
    manifests: int = 0
    chunks: int = 0
    """Different ranges of bytes in chunk objects; at a level below *sums*, 0."""
    chunk_objects: int = 0
    """Of the repository."""
    virtual_objects: int = 0
    """Outside of the repository. An object with references to several states counts for each."""
    virtual_not_authorized: int = 0
    """Virtual objects in containers that were not authorised."""
    chunks_read: int = 0
    bytes_read: int = 0
    findings: tuple[Finding, ...] = ()
    """References first, then snapshots, what they refer to, and so on."""
    not_looked_at: tuple[NotLookedAt, ...] = ()
    schema: str = _SCHEMA

    @property
    def is_healthy(self) -> bool:
        """Return whether nothing that was looked at is damaged."""
        return not self.findings

    def to_json(self) -> dict[str, JSON]:
        """Return plain data; `from_json` reads it back."""
        return cast("dict[str, JSON]", asdict(self))

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read what `to_json` returned, or what ``icechunk-async verify --json`` printed.

        Raises:
            InvalidInputError: it is no report, or of another version.
        """
        if document.get("schema") != _SCHEMA:
            raise InvalidInputError(
                f"This is no report of a verification: its schema is {document.get('schema')!r}, "
                f"not {_SCHEMA!r}."
            )
        try:
            known = {it.name for it in fields(cls)}
            # Members that a newer release added are left out, as long as the schema is this one.
            plain = {key: value for key, value in document.items() if key in known}
            plain["refs"] = tuple(plain["refs"])
            plain["findings"] = tuple(finding_of(it) for it in plain["findings"])
            plain["not_looked_at"] = tuple(NotLookedAt(**it) for it in plain["not_looked_at"])
            return cls(**plain)
        except (KeyError, TypeError) as error:
            raise InvalidInputError(f"The report of a verification is damaged: {error}.") from error


def finding_of(document: Mapping[str, Any]) -> Finding:
    """Return a finding from plain data."""
    plain: dict[str, Any] = dict(document)
    at = plain.get("coordinates")
    plain["coordinates"] = None if at is None else tuple(at)
    return Finding(**plain)


def beyond(level: Level) -> list[NotLookedAt]:
    """Return the parts that only higher levels look at."""
    return [NotLookedAt(_NEXT[it]) for it in Level if it >= level and it in _NEXT]


@dataclass(slots=True)
class VerifyState:
    """How far the contents of chunks were read."""

    options: dict[str, JSON]
    """As given; a run with others is another one."""
    refs: dict[str, str]
    """The snapshots that the refs led to at the beginning."""
    chunk: str | None = None
    """See `Pieces.cursor`; None: no chunk was read yet."""
    virtual: str | None = None
    """The location up to which virtual chunks were read."""
    chunks_read: int = 0
    bytes_read: int = 0
    without_sum: int = 0
    undecided: dict[str, int] = field(default_factory=dict[str, int])
    unread: dict[str, int] = field(default_factory=dict[str, int])
    findings: list[Finding] = field(default_factory=list[Finding])
    """Of contents."""

    @classmethod
    def parse(cls, text: str, source: str) -> Self:
        """Read what was saved.

        Raises:
            InvalidInputError: it is no state of a verification.
        """
        try:
            document: Any = json.loads(text)
            schema = document.pop("schema")
            found = [finding_of(it) for it in document.pop("findings")]
            parsed = cls(**document, findings=found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _foreign(source) from error
        if schema != _STATE_SCHEMA:
            raise _foreign(source)
        return parsed

    def text(self) -> str:
        """Return the text that `parse` reads."""
        return json.dumps({"schema": _STATE_SCHEMA, **asdict(self)})


def _foreign(source: str) -> InvalidInputError:
    return InvalidInputError(
        f"{source!r} is not the state of a verification. Give the file that an interrupted run "
        "left, or a name that is free."
    )


class StateFile:
    """Keeps a state under a path. It is replaced as a whole, and removed at the end."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Use ``path``; nothing is read or written yet."""
        self._path = Path(path)

    async def load(self) -> VerifyState | None:
        """Return the state that was saved; None without a file.

        Raises:
            InvalidInputError: the file holds something else, or there can be no file here.
        """

        def read() -> str | None:
            if self._path.exists():
                return self._path.read_text(encoding="utf-8")
            # Told at the beginning, and not after the first hour of reading.
            if not self._path.parent.is_dir():
                raise FileNotFoundError(f"there is no directory {str(self._path.parent)!r}")
            return None

        try:
            text = await anyio.to_thread.run_sync(read)
        except UnicodeDecodeError:
            raise _foreign(str(self._path)) from None
        except OSError as error:
            raise self._unusable(error) from error
        return None if text is None else VerifyState.parse(text, str(self._path))

    async def save(self, state: VerifyState) -> None:
        """Replace the file.

        Raises:
            InvalidInputError: it cannot be written.
        """
        text = state.text()

        def write() -> None:
            # Beside it and then in its place: an end between the two leaves the earlier state.
            beside = self._path.with_name(f"{self._path.name}.new")
            beside.write_text(text, encoding="utf-8")
            beside.replace(self._path)

        try:
            await anyio.to_thread.run_sync(write)
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> InvalidInputError:
        return InvalidInputError(
            f"The state of the verification cannot be kept at {str(self._path)!r}: {error}. Name "
            "a file in a directory that can be written to."
        )

    async def remove(self) -> None:
        """Remove the file: the run has ended."""
        await anyio.to_thread.run_sync(lambda: self._path.unlink(missing_ok=True))
