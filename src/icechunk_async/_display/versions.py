"""Cards of what both styles of the library have: snapshots, refs, differences, operations."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from icechunk_async._display.cards import Card, Table, count, date, first_line
from icechunk_async._runtime.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized

__all__ = [
    "commits_table",
    "diff_card",
    "diff_summary",
    "operation_card",
    "operations_card",
    "operations_table",
    "refs_table",
    "session_card",
    "session_title",
]

_MOST: Final = 20
"""Rows of a table of changes."""
_MOST_REFS: Final = 10
_MOST_OPERATIONS: Final = 50
_FIELDS: Final = {"new_snapshot_id": "to", "previous_snapshot_id": "from"}
"""Words for fields of operations."""


class Snapshot(Protocol):
    """A snapshot's place in history."""

    @property
    def id(self) -> object: ...
    @property
    def flushed_at(self) -> int: ...
    @property
    def message(self) -> str: ...


class Changes(Protocol):
    """The changes of commits or of a session."""

    @property
    def new_groups(self) -> Collection[str]: ...
    @property
    def new_arrays(self) -> Collection[str]: ...
    @property
    def deleted_groups(self) -> Collection[str]: ...
    @property
    def deleted_arrays(self) -> Collection[str]: ...
    @property
    def updated_groups(self) -> Collection[str]: ...
    @property
    def updated_arrays(self) -> Collection[str]: ...
    @property
    def updated_chunks(self) -> Mapping[str, Sized]: ...
    @property
    def moved_nodes(self) -> Sequence[tuple[str, str]]: ...


class Operation(Protocol):
    """An entry of the operations log."""

    @property
    def updated_at(self) -> int: ...
    @property
    def detail(self) -> Any: ...


def diff_summary(diff: Changes) -> str:
    """Return in one line how much was changed."""
    chunks = sum(map(len, diff.updated_chunks.values()))
    counts = (
        (len(diff.new_arrays), "new array", ""),
        (len(diff.new_groups), "new group", ""),
        (len(diff.deleted_arrays), "deleted array", ""),
        (len(diff.deleted_groups), "deleted group", ""),
        (len(diff.moved_nodes), "moved node", ""),
        (len(diff.updated_arrays), "array", " with other metadata"),
        (len(diff.updated_groups), "group", " with other metadata"),
    )
    parts = [count(number, noun) + more for number, noun, more in counts if number]
    if chunks:
        parts.append(f"{count(chunks, 'chunk')} of {count(len(diff.updated_chunks), 'array')}")
    return ", ".join(parts) or "nothing changed"


def diff_card(diff: Changes, title: str) -> Card:
    """Return a card with a row for each array and group that was changed."""
    table = _changed(diff)
    return Card(title, [("Changed", diff_summary(diff))], [table] if table.rows else [])


def session_title(session: Any) -> str:
    """Return mode, branch and snapshot of a session or fork in one line."""
    attached = getattr(session, "is_attached", None)  # of forks alone
    if attached is not None:
        return f"fork at {session.snapshot_id}{'' if attached else ', not attached'}"
    where = f" on {session.branch!r}" if session.branch is not None else ""
    return f"{session.mode.value} session{where} at {session.snapshot_id}"


def session_card(session: Any) -> Card:
    """Return a card of a session or fork: where it stands, and what it changed so far."""
    title = session_title(session)
    # Nothing is open then, so not even the snapshot that it stands on can be looked up.
    if not getattr(session, "is_attached", True):
        return Card(title)
    base: Snapshot = session.workspace.base
    rows: list[tuple[str, object]] = [("Written", date(base.flushed_at))]
    if base.message:
        rows.append(("Message", first_line(base.message)))
    if session.read_only:
        return Card(title, rows)
    changed: Changes = session.status()
    table = _changed(changed)
    rows.append(("Uncommitted", diff_summary(changed)))
    return Card(title, rows, [table] if table.rows else [])


def _changed(diff: Changes) -> Table:
    """Return a row for each node, with the number of its chunks that were set or deleted."""
    happened: dict[str, list[str]] = {}
    for word, kind, paths in (
        ("new", "array", diff.new_arrays),
        ("new", "group", diff.new_groups),
        ("deleted", "array", diff.deleted_arrays),
        ("deleted", "group", diff.deleted_groups),
        ("other metadata", "array", diff.updated_arrays),
        ("other metadata", "group", diff.updated_groups),
    ):
        for path in paths:
            happened.setdefault(path, []).append(f"{word} ({kind})" if kind == "group" else word)
    for source, target in diff.moved_nodes:
        happened.setdefault(target, []).append(f"moved from {source}")
    paths = sorted({*happened, *diff.updated_chunks})
    rows = [
        (
            path,
            ", ".join(happened.get(path, ())) or "other chunks",
            count(len(diff.updated_chunks[path]), "chunk") if path in diff.updated_chunks else "",
        )
        for path in paths[:_MOST]
    ]
    return Table("Arrays and groups", ("Path", "Change", "Chunks"), rows, len(paths))


def commits_table(commits: Iterable[Snapshot], title: str, total: int | None = None) -> Table:
    """Return snapshots with their dates and messages."""
    rows = [(it.id, date(it.flushed_at), first_line(it.message)) for it in commits]
    return Table(title, ("Snapshot", "Written", "Message"), rows, total)


def refs_table(
    refs: Mapping[str, object], title: str, found: Callable[[Any], Snapshot | None]
) -> Table:
    """Return branches or tags with what they lead to; ``main`` comes first.

    Args:
        refs: ids of snapshots by name.
        title: of the table.
        found: looks a snapshot up in memory.
    """
    names = sorted(refs, key=lambda name: (name != "main", name))
    rows: list[tuple[object, ...]] = []
    # Cut before the look-ups: a repository may have thousands of tags, and a repr must not cost
    # that.
    for name in names[:_MOST_REFS]:
        info = found(refs[name])
        more = ("", "") if info is None else (date(info.flushed_at), first_line(info.message))
        rows.append((name, refs[name], *more))
    return Table(title, ("Name", "Snapshot", "Written", "Message"), rows, len(names))


def operations_table(operations: Iterable[Operation], title: str) -> Table:
    """Return a row for each operation on a repository, newest first."""
    rows = [(date(it.updated_at), *words_of(it.detail)) for it in operations]
    return Table(title, ("When", "What", "Details"), rows)


def operations_card(operations: Sequence[Operation], *, complete: bool) -> Card:
    """Return a card of the newest operations on a repository.

    Args:
        operations: newest first; the first of them are shown.
        complete: whether there are no older ones.
    """
    shown = operations_table(operations[:_MOST_OPERATIONS], "Newest first")
    note = "" if complete else "older ones are left out; operations(limit=None) reads all"
    title = f"Operations log: {'' if complete else 'the newest '}{count(len(operations), 'entry')}"
    tables = [replace(shown, total=len(operations))] if operations else []
    return Card(title, tables=tables, note=note)


def operation_card(operation: Operation) -> Card:
    """Return a card of one entry of the operations log."""
    what, details = words_of(operation.detail)
    rows = [("When", date(operation.updated_at)), *([("Details", details)] if details else [])]
    return Card(what, rows)


def words_of(detail: Any) -> tuple[str, str]:
    """Return the kind of an operation in words, and its details."""
    name = type(detail).__name__
    # CommitAmended -> "commit amended"
    words = "".join(f" {it.lower()}" if it.isupper() else it for it in name).strip()
    values = [(field, getattr(detail, field)) for field in detail.__dataclass_fields__]
    details = (
        f"{_FIELDS.get(field, field.replace('_', ' '))} {printable(_in_words(value))}"
        for field, value in values
    )
    return words.capitalize(), ", ".join(details)


def _in_words(value: Any) -> str:
    """Return the value of an operation's field; a status as its words and its reason."""
    availability = getattr(value, "availability", None)
    if availability is None:
        return str(value)
    why = f": {first_line(value.reason)}" if value.reason else ""
    return f"{availability.name.replace('_', ' ').lower()}{why}"
