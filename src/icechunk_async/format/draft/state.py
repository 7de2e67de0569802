"""The state file of the first draft (its spec, "State File"): snapshots and references, in JSON.

What this library has to say besides is in ``icechunk-async``, a member that the specification does
not have: the configuration, that the repository is being migrated, and marks of the last writes, by
which a writer that got no reply recognises its own. Members that others added stay.
"""

from __future__ import annotations

import json
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from icechunk_async._runtime import clock
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError, UnsupportedBySpecError
from icechunk_async.format.draft.names import SUFFIX, check_name, snapshot_id
from icechunk_async.format.json.reading import parse_json
from icechunk_async.format.json.values import check_text, checked_json
from icechunk_async.format.repo_info import SnapshotInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.json.reading import Part
    from icechunk_async.format.json.values import JSON
    from icechunk_async.format.snapshot import Snapshot

__all__ = [
    "Entry",
    "Ref",
    "State",
    "check_expressible",
    "decode_state",
    "encode_state",
    "new_entry",
    "stored_time",
]

_MAX_GENERATION: Final = 1 << 63
# Python has no later times, and so cannot show them.
_MAX_MS: Final = 253_402_300_799_000
"""The end of the year 9999."""
_US: Final = 1000
_OURS: Final = "icechunk-async"
_MESSAGE: Final = "message"
"""The property of a snapshot that is its message; the specification has no other place for it."""
_KEPT_MARKS: Final = 64
_MARK_BYTES: Final = 8
_MAIN: Final = "main"


@dataclass(frozen=True, slots=True)
class Entry:
    """A snapshot in the state file."""

    info: SnapshotInfo
    metadata: Mapping[str, JSON]
    """Its properties, without the message."""
    structure_file: str
    document: Mapping[str, Any] = field(repr=False)
    """As it is stored."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A branch or a tag."""

    kind: Literal["branch", "tag"]
    target: SnapshotId


@dataclass(frozen=True, slots=True)
class State:
    """The contents of a state file."""

    id: str
    generation: int
    snapshots: Mapping[SnapshotId, Entry] = field(repr=False)
    refs: Mapping[str, Ref]
    store_root: str | None = None
    config: str | None = None
    """The configuration, as YAML."""
    is_migrated: bool = False
    """Nothing may be changed: the repository is being migrated, or was."""
    marks: tuple[str, ...] = ()
    """One for each of the last writes of this library, the newest last."""
    others: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    """Members that are not known here."""

    def stamped(self, generation: int) -> Self:
        """Return the state to write in place of that of a generation, with a new mark."""
        mark = clock.random_bytes(_MARK_BYTES).hex()
        # A writer without a reply reads its mark in a later state. That works unless this number of
        # other writers of this library were faster.
        marks = (*self.marks, mark)[-_KEPT_MARKS:]
        return replace(self, generation=generation + 1, marks=marks)

    def of_kind(self, kind: str) -> dict[str, SnapshotId]:
        """Return the branches, or the tags."""
        return {name: ref.target for name, ref in self.refs.items() if ref.kind == kind}

    def with_ref(self, name: str, ref: Ref) -> Self:
        """Return the state with a reference added or replaced."""
        return replace(self, refs={**self.refs, name: ref})

    def without_ref(self, name: str) -> Self:
        """Return the state with a reference left out."""
        return replace(self, refs={key: ref for key, ref in self.refs.items() if key != name})

    def with_config(self, text: str) -> Self:
        """Return the state with another configuration."""
        return replace(self, config=text)

    def frozen(self, is_migrated: bool) -> Self:  # noqa: FBT001 -- the field itself
        """Return the state in which nothing may be changed any more, or may be again."""
        return replace(self, is_migrated=is_migrated)

    def with_entry(self, entry: Entry) -> Self:
        """Return the state with one more snapshot."""
        return replace(self, snapshots={**self.snapshots, entry.info.id: entry})


def check_expressible(snapshot: Snapshot) -> None:
    """Refuse a snapshot whose message or properties the state file cannot have.

    Raises:
        InvalidInputError: its message has lone surrogates.
        UnsupportedBySpecError: it has a property that is called as the message.
    """
    check_text(snapshot.message, "The message")
    if _MESSAGE in snapshot.metadata:
        raise UnsupportedBySpecError(
            f"A commit to a repository of the first draft's layout cannot have a property "
            f"{_MESSAGE!r}: the layout stores the message there. Nothing was published. Give the "
            "property another name, or migrate the repository to format version 2 with "
            "icechunk_async.upkeep.upgrade."
        )


def stored_time(flushed_at: int, parent_at: int | None) -> int:
    """Return the time that a snapshot gets, in microseconds since the epoch.

    The file has milliseconds. Each snapshot is later than the one before it.

    Args:
        flushed_at: when it was made.
        parent_at: the time of the one before it; None for the first.
    """
    # Two commits within a millisecond would have no order, which history is told by.
    earliest = 0 if parent_at is None else parent_at + _US
    return max(flushed_at, earliest) // _US * _US


def new_entry(snapshot: Snapshot, parent: Entry | None) -> Entry:
    """Return the entry of a new snapshot.

    Args:
        snapshot: the snapshot.
        parent: the entry of the one before it; None for the first.
    """
    name = f"{snapshot.id}{SUFFIX}"
    moment_us = stored_time(snapshot.flushed_at, None if parent is None else parent.info.flushed_at)
    document = {
        "snapshot-id": str(snapshot.id),
        "parent-snapshot-id": None if parent is None else parent.document["snapshot-id"],
        "timestamp-ms": moment_us // _US,
        "structure-file": name,
        "properties": {_MESSAGE: snapshot.message, **snapshot.metadata},
    }
    info = SnapshotInfo.of(
        snapshot.id,
        None if parent is None else parent.info.id,
        moment_us,
        snapshot.message,
        snapshot.metadata,
    )
    return Entry(info, snapshot.metadata, name, document)


def encode_state(state: State) -> bytes:
    """Return a state file."""
    ours: dict[str, JSON] = {"marks": state.marks}
    if state.config is not None:
        ours["config"] = state.config
    if state.is_migrated:
        ours["migrated"] = True
    document: dict[str, Any] = {
        **state.others,  # first, so that none of them replaces what is known
        "id": state.id,
        "generation": state.generation,
        **({} if state.store_root is None else {"store_root": state.store_root}),
        "snapshots": [it.document for it in state.snapshots.values()],
        "refs": {
            name: {
                "name": name,
                # As its own writer called it: ids of others need not be ours.
                "snapshot-id": state.snapshots[ref.target].document["snapshot-id"],
                "type": ref.kind,
            }
            for name, ref in state.refs.items()
        },
        _OURS: ours,
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def decode_state(data: bytes | memoryview) -> State:
    """Read a state file.

    A snapshot whose parent is not listed is a root. Where no reference is called ``main``, the
    newest snapshot is the tip of a branch of that name.

    Raises:
        FormatError: it is damaged.

    Cost: some microseconds for each snapshot.
    """
    document = parse_json(data, "state file")
    listed = document.parts("snapshots")
    ids: dict[str, SnapshotId] = {}
    for part in listed:
        name = part.text("snapshot-id")
        if name in ids:
            raise part.fault(f"has the snapshot {name!r:.60} twice")
        ids[name] = snapshot_id(name)
    # Parents may be listed after their children, so ids come first.
    entries = (_read_entry(part, ids) for part in listed)
    snapshots = {entry.info.id: entry for entry in entries}
    # Names of others become hashes, and two could have one.
    if len(snapshots) != len(listed):
        raise document.fault("has snapshots whose ids cannot be told apart")
    refs = _read_refs(document, ids)
    if _MAIN not in refs and snapshots:
        # Of equally old ones the last in the list: writers append, and `max` takes the first that
        # it meets.
        newest = max(reversed([*snapshots.values()]), key=lambda it: it.info.flushed_at)
        refs[_MAIN] = Ref("branch", newest.info.id)
    ours = document.part(_OURS) if document.has(_OURS) else None
    known = {"id", "generation", "store_root", "snapshots", "refs", _OURS}
    return State(
        document.text("id"),
        document.natural("generation", _MAX_GENERATION),
        snapshots,
        refs,
        document.text("store_root") or None if document.has("store_root") else None,
        ours.text("config") if ours is not None and ours.has("config") else None,
        ours is not None and ours.members.get("migrated") is True,
        _read_marks(ours),
        {name: value for name, value in document.members.items() if name not in known},
    )


def _read_entry(part: Part, ids: Mapping[str, SnapshotId]) -> Entry:
    parent = part.text("parent-snapshot-id") if part.has("parent-snapshot-id") else None
    properties: Any = part.json_object("properties") if part.has("properties") else {}
    try:
        checked_json(properties, "properties")
    except InvalidInputError as error:
        raise part.fault(f"has damaged properties: {error}") from error
    message: Any = properties.get(_MESSAGE, "")
    metadata = properties
    if isinstance(message, str):
        metadata = {name: value for name, value in properties.items() if name != _MESSAGE}
    name = check_name(part.text("structure-file"))
    info = SnapshotInfo.of(
        ids[part.text("snapshot-id")],
        None if parent is None else ids.get(parent),
        part.natural("timestamp-ms", _MAX_MS) * _US,
        message if isinstance(message, str) else "",
        metadata,
    )
    return Entry(info, metadata, name, part.members)


def _read_refs(document: Part, ids: Mapping[str, SnapshotId]) -> dict[str, Ref]:
    refs: dict[str, Ref] = {}
    if not document.has("refs"):
        return refs
    for name, value in document.json_object("refs").items():
        part = document.as_part(value, f"A state file, at reference {name!r:.60},")
        kind = part.text("type")
        target = part.text("snapshot-id")
        if kind not in {"branch", "tag"}:
            raise part.fault(f"is of the unknown type {kind!r:.60}")
        if part.has("name") and part.text("name") != name:
            raise part.fault(f"calls itself {part.text('name')!r:.60}")
        if target not in ids:
            raise part.fault(f"refers to snapshot {target!r:.60}, which is not listed")
        refs[name] = Ref("branch" if kind == "branch" else "tag", ids[target])
    if _MAIN in refs and refs[_MAIN].kind != "branch":
        raise document.fault(f"has a tag {_MAIN!r}, which every repository has as a branch")
    return refs


def _read_marks(ours: Part | None) -> tuple[str, ...]:
    if ours is None or not ours.has("marks"):
        return ()
    marks = ours.json_list("marks")
    if len(marks) > _KEPT_MARKS or not all(isinstance(it, str) for it in marks):
        raise ours.fault("has damaged marks")
    return tuple(marks)
