"""The state of an interrupted verification, in a small file."""

from __future__ import annotations

import json
from dataclasses import asdict, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import anyio.to_thread

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.upkeep.integrity.report import Finding, finding_of
from icechunk_async.errors import InvalidInputError

__all__ = ["StateFile", "VerifyState"]

if TYPE_CHECKING:
    import os

    from icechunk_async.format.json.metadata import JSON

_SCHEMA: Final = "icechunk-async verify state 1"


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
        if schema != _SCHEMA:
            raise _foreign(source)
        return parsed

    def text(self) -> str:
        """Return the text that `parse` reads."""
        return json.dumps({"schema": _SCHEMA, **asdict(self)})


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
