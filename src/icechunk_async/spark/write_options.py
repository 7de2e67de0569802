"""What can be asked for when writing: Spark's options, checked, as plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.options import given_options, storage_options
from icechunk_async.spark.transactions import Transaction
from icechunk_async.storage.registry import normalize_url
from icechunk_async.sync import Repository
from icechunk_async.sync.conflicts import ConflictDetector
from icechunk_async.sync.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.sync.conflicts import ConflictSolver

__all__ = ["WriteOptions"]

_APP: Final = ("txnappid", "appid")
_VERSION: Final = "txnversion"
_KNOWN: Final = (
    "path",
    "branch",
    "group",
    "append-dim",
    "append-values",
    "if-written",
    "message",
    "rebase",
    "checkpointlocation",
    "executor-cores",
    *_APP,
    _VERSION,
)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """One request to write; it pickles with its secrets and shows none."""

    storage: Storage
    branch: str = "main"
    group: str = ""
    append_dim: str | None = None
    append_values: tuple[Any, ...] | None = None
    """The coordinates to append, where they do not go on in equal steps."""
    if_written: str = "replace"
    message: str = "Written by Spark"
    rebase: bool = True
    app_id: str | None = None
    version: int | None = None
    cores: int = 0
    """Tasks that run at a time in one executor, and share its budget of requests; 0 where each
    task is to ask Spark."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        """Read the options of ``df.write``; their names' case does not count.

        Raises:
            InvalidInputError: an option is unknown, or its value is none of its kind.
        """
        given = given_options(options, _KNOWN, "writing", "save")
        apps = [given[name] for name in _APP if name in given]
        values = given.get("append-values")
        return cls(
            storage=Storage.from_url(normalize_url(given["path"]), **storage_options(given)),
            branch=given.get("branch", "main"),
            group=given.get("group", "").strip("/"),
            append_dim=given.get("append-dim"),
            append_values=None if values is None else _values(values),
            if_written=_choice(given, "if-written", ("replace", "error", "ignore")),
            message=given.get("message", "Written by Spark"),
            rebase=_choice(given, "rebase", ("detect", "none")) == "detect",
            app_id=apps[0] if apps else None,
            version=_number("txnVersion", given[_VERSION]) if _VERSION in given else None,
            cores=_number("executor-cores", given.get("executor-cores", "0")),
        )

    @property
    def transaction(self) -> Transaction | None:
        """What names the write.

        Raises:
            InvalidInputError: only one of its two options is given.
        """
        if self.app_id is None and self.version is None:
            return None
        if self.app_id is None or self.version is None:
            raise InvalidInputError(
                "The options 'txnAppId' and 'txnVersion' go together: who writes, and a number "
                "that counts up. Give both or none."
            )
        return Transaction(self.app_id, self.version)

    @property
    def solver(self) -> ConflictSolver | None:
        """What decides conflicts with commits that came meanwhile."""
        return ConflictDetector() if self.rebase else None

    def path_of(self, name: str) -> str:
        """Answer the path of an array of the group."""
        return f"{self.group}/{name}" if self.group else name

    def open(self) -> Repository:
        """Open the repository."""
        return Repository.open(self.storage)


def _choice(given: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    text = given.get(name, known[0]).lower()
    if text not in known:
        raise InvalidInputError(
            f"The option {name!r} cannot be {text!r}. Give one of {', '.join(known)}."
        )
    return text


def _number(name: str, text: str) -> int:
    if not text.isdigit():
        raise InvalidInputError(f"The option {name!r} must be a number, not {text!r}.")
    return int(text)


def _values(text: str) -> tuple[Any, ...]:
    try:
        values: Any = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list):
        raise InvalidInputError(
            f"The option 'append-values' must be a JSON list of coordinates, not {text!r}."
        )
    return tuple(values)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
