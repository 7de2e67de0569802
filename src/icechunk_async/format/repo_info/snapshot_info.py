"""One snapshot that a repo info lists: an entry of its list."""

from __future__ import annotations

from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self

from icechunk_async._runtime.clock import from_us
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.blocks import string, structs
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.json.metadata import decode_items, encode_items, items_block

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from icechunk_async.format.flatbuffers.blocks import Block
    from icechunk_async.format.json.metadata import JSON, RawMetadata

__all__ = ["NO_PARENT", "SnapshotInfo", "no_such_parent"]

_SPEC: Final = 2
NO_PARENT: Final = -1
"""The row of the parent of a root."""
_NAMES: Final = ("id", "parent_id", "flushed_at", "message")
_MORE_NAMES: Final = ("raw_metadata", "pruned_ancestor_logs")
_ALL_NAMES: Final = frozenset({*_NAMES, *_MORE_NAMES})


@dataclass(frozen=True, eq=False, repr=False)
class SnapshotInfo:
    """A snapshot's place in history."""

    id: SnapshotId
    parent_id: SnapshotId | None
    """None for a root."""
    flushed_at: int
    """Microseconds since the epoch."""
    message: str
    raw_metadata: RawMetadata = field(default_factory=tuple[tuple[str, bytes], ...], repr=False)
    """The commit's properties as stored, so that rewriting the file carries them verbatim."""
    pruned_ancestor_logs: tuple[SnapshotId, ...] = field(default_factory=tuple[SnapshotId, ...])
    """Snapshots that expired between this one and its parent; their logs are kept."""

    @classmethod
    def on_page(cls, page: object, index: int) -> Self:
        """Return an entry that is decoded, with all of its page, when it is looked at.

        A page has a list for each field, under its name.
        """
        # Past `__init__`, so that fields are missing and `__getattr__` is asked for them.
        info = object.__new__(cls)
        info.__dict__["_place"] = page, index
        return info

    if not TYPE_CHECKING:  # checkers are to see the fields alone

        def __getattr__(self, name: str) -> Any:
            """Return a field that is not decoded yet."""
            values = self.__dict__
            place = values.get("_place")
            if place is None or name not in _ALL_NAMES:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            page, index = place
            # In two groups: listings of history want the first, and properties are what costs.
            for it in _NAMES if name in _NAMES else _MORE_NAMES:
                values[it] = getattr(page, it)[index]
            return values[name]

    def __eq__(self, other: object) -> bool:
        """Compare all fields."""
        return isinstance(other, SnapshotInfo) and self._values() == other._values()

    def __hash__(self) -> int:
        """Hash all fields."""
        return hash(self._values())

    def __repr__(self) -> str:
        """Show the fields, with a date in place of microseconds."""
        from icechunk_async._display.cards import date  # noqa: PLC0415 -- rarely needed

        parent = None if self.parent_id is None else str(self.parent_id)
        return (
            f"SnapshotInfo(id={str(self.id)!r}, parent_id={parent!r}, "
            f"written_at={date(self.flushed_at)!r}, message={self.message!r})"
        )

    def _repr_html_(self) -> str:
        """Show the snapshot in a notebook."""
        from icechunk_async._display.cards import Card, date  # noqa: PLC0415 -- rarely needed

        rows: list[tuple[str, object]] = [("Written", date(self.flushed_at))]
        if self.parent_id is not None:
            rows.append(("Parent", self.parent_id))
        rows.append(("Message", self.message))
        if self.metadata:
            rows.append(("Properties", Card("", list(self.metadata.items()))))
        return Card(f"Snapshot {self.id}", rows).html()

    def __reduce__(self) -> tuple[type[SnapshotInfo], tuple[object, ...]]:
        """Pickle the fields alone."""
        return SnapshotInfo, self._values()

    def _values(self) -> tuple[object, ...]:
        return (
            self.id, self.parent_id, self.flushed_at, self.message, self.raw_metadata,
            self.pruned_ancestor_logs,
        )  # fmt: skip

    @cached_property
    def id_text(self) -> str:
        """The id as text."""
        return str(self.id)

    @cached_property
    def written_at(self) -> datetime:
        """When the snapshot was made, by its writer's clock; aware, UTC."""
        return from_us(self.flushed_at)

    @cached_property
    def metadata(self) -> dict[str, JSON]:
        """The commit's properties."""
        return decode_items(list(self.raw_metadata), _SPEC)

    @cached_property
    def blocks(self) -> tuple[Block, Block, Block | None]:
        """Message, properties and logs as written; kept, since commits may write them again."""
        pruned = None
        if self.pruned_ancestor_logs:  # an empty list is never written
            pruned = structs(b"".join(self.pruned_ancestor_logs), SnapshotId.size_bytes)
        return string(self.message), items_block(self.raw_metadata), pruned

    def written(self, write: Callable[[Self], Block]) -> Block:
        """Return the whole entry as written; kept like `blocks`."""
        found: Block | None = self.__dict__.get("_written")
        if found is None:
            found = self.__dict__["_written"] = write(self)
        return found

    @classmethod
    def of(
        cls,
        snapshot_id: SnapshotId,
        parent_id: SnapshotId | None,
        flushed_at: int,
        message: str,
        metadata: Mapping[str, JSON],
    ) -> SnapshotInfo:
        """Encode ``metadata`` and make an entry."""
        raw = tuple(encode_items(metadata, _SPEC))
        return cls(snapshot_id, parent_id, flushed_at, message, raw)


def no_such_parent() -> FormatError:
    """Return the error for a parent that is no entry of the file."""
    return FormatError("A snapshot has a parent outside of the repo info file.")
