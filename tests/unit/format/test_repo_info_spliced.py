"""Histories in which little changed: the other entries are copied, and read as they did."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import Envelope
from icechunk_async.format.flatbuffers.blocks import table
from icechunk_async.format.flatbuffers.reading import Vectors
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.operations_log import (
    Availability,
    NewCommit,
    RepoInitialized,
    RepoStatus,
    Update,
)
from icechunk_async.format.repo_info import (
    OperationsLog,
    RepoInfo,
    SnapshotInfo,
    decode_repo_info,
    encode_repo_info,
    log_writing,
    snapshot_columns,
    snapshot_writing,
)
from icechunk_async.format.repo_info.snapshot_writing import _SNAPSHOT, _encode, _Numbering
from icechunk_async.format.repo_info.snapshots import Snapshots, SnapshotTable
from tests.helpers import examples
from tests.unit.format.samples import SNAPSHOT_IDS, snapshot_id
from tests.unit.format.table_builder import Offset, Scalar, Struct, TableBuilder
from tests.unit.format.update_samples import EVERY_KIND, UPDATES
from tests.unit.format.wire import root

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from icechunk_async.format.json.metadata import JSON
    from tests.unit.format.table_builder import Field

COUNT = 60
"""Enough that copying pays."""


def entry(number: int, parent: SnapshotId | None = None) -> SnapshotInfo:
    """Return an entry; no two are alike in all lengths."""
    items: dict[str, JSON] = {"name": "x" * (number % 5), "number": number} if number % 3 else {}
    made = SnapshotInfo.of(snapshot_id(number), parent, 9 + number, "m" * (number % 7), items)
    logs = (snapshot_id(900), snapshot_id(901))[: number % 4 // 2]
    return replace(made, pruned_ancestor_logs=logs)


def line(numbers: Sequence[int]) -> dict[SnapshotId, SnapshotInfo]:
    """Return entries, each the parent of the next one."""
    parents = [None, *map(snapshot_id, numbers)]
    return {
        snapshot_id(it): entry(it, parent) for it, parent in zip(numbers, parents, strict=False)
    }


def info_of(infos: dict[SnapshotId, SnapshotInfo], updates: Sequence[Update]) -> RepoInfo:
    """Return a repo info of values."""
    tip = next(reversed(infos))
    status = RepoStatus(Availability.ONLINE, 5)
    return RepoInfo({"main": tip}, {"old": next(iter(infos))}, frozenset(), infos, status, updates)


NUMBERS = [(it * 37) % 100 + 10 for it in range(COUNT)]
"""So that parents have greater and smaller ids."""
KINDS = list(EVERY_KIND.values())
UPDATES_OF_ALL_KINDS = tuple(
    Update(KINDS[it % len(KINDS)], 500 - it, f"repo.{it}.X" if it else None) for it in range(COUNT)
)


def decoded(payload: bytes | bytearray | memoryview) -> RepoInfo:
    """Read a file."""
    return decode_repo_info(Envelope(2, bytes(payload)))


def stored() -> RepoInfo:
    """Write entries one by one, and read the file."""
    return decoded(encode_repo_info(info_of(line(NUMBERS), UPDATES_OF_ALL_KINDS)))


def as_values(info: RepoInfo) -> RepoInfo:
    """Return the same with all entries decoded, so that all are written anew."""
    infos = {it.id: it for it in info.snapshots.values()}
    return replace(info, snapshots=infos, updates=tuple(info.updates))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Note the ids of snapshots, and the operations, that are written anew."""
    found: list[object] = []
    encode, encode_updates = snapshot_writing._encode, log_writing.encode_updates

    def one(info: SnapshotInfo, numbering: object) -> object:
        found.append(info.id)
        return encode(info, numbering)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]

    def many(updates: Sequence[Update]) -> object:
        found.extend(updates)
        return encode_updates(updates)

    monkeypatch.setattr(snapshot_writing, "_encode", one)
    monkeypatch.setattr(log_writing, "encode_updates", many)
    return found


def committed(info: RepoInfo, new: SnapshotInfo) -> RepoInfo:
    """Add a snapshot to a branch, and an entry to the log."""
    updates = OperationsLog.of(info.updates)
    newest = Update(NewCommit("main", new.id), info.updated_at + 1)
    updates = updates.with_newest(newest, replace(updates[0], backup_path="repo.new.X"), instead=1)
    infos = Snapshots.of(info.snapshots).edited([new])
    return replace(info, snapshots=infos, updates=updates, branches={"main": new.id})


BETWEEN = next(it for it in range(50, 100) if it not in NUMBERS)


@pytest.mark.parametrize("number", [BETWEEN, 500])
def test_a_commit_writes_one_snapshot_and_two_operations(
    number: int, written: list[object]
) -> None:
    """Numbers of parents change as the new one is before them; entries are copied even so."""
    info = committed(stored(), entry(number, snapshot_id(NUMBERS[-1])))
    written.clear()
    payload = encode_repo_info(info)
    assert written == [snapshot_id(number), *info.updates[:2]]
    again = decoded(payload)
    assert again == as_values(info)
    path = [it.id for it in again.ancestry(snapshot_id(number))]
    assert path == [snapshot_id(it) for it in [number, *reversed(NUMBERS)]]


@pytest.mark.parametrize("count", [3, 200])
def test_operations_of_earlier_commits_are_not_written_again(
    count: int, written: list[object]
) -> None:
    """Neither those on top of a file, nor the few that are in it."""
    info = stored()
    info = replace(info, updates=OperationsLog.of(info.updates).head(count))
    payload = b""
    for number in range(500, 510):
        info = committed(info, entry(number, snapshot_id(NUMBERS[-1])))
        written.clear()
        payload = bytes(encode_repo_info(info))
        new = [it for it in written if isinstance(it, Update)]
        if number > 500:
            assert new == [*info.updates[:2]]
    anew = replace(info, updates=OperationsLog(tuple(info.updates)))
    assert decoded(payload) == decoded(encode_repo_info(anew)) == as_values(info)


def test_an_operation_that_is_listed_twice_is_written_twice() -> None:
    """Entries that were written are known by their identity."""
    info = stored()
    log = OperationsLog.of(info.updates)
    info = replace(info, updates=log.with_newest(log[1], log[1], instead=0))
    assert decoded(encode_repo_info(info)) == as_values(info)


def test_the_first_place_is_not_told_in_the_file(written: list[object]) -> None:
    """The child of what was the first of all has no room for another number."""
    base = stored()
    (child,) = [
        it.id for it in base.snapshots.values() if it.parent_id == snapshot_id(min(NUMBERS))
    ]
    info = committed(base, entry(0, snapshot_id(NUMBERS[-1])))
    written.clear()
    payload = encode_repo_info(info)
    assert written == [snapshot_id(0), child, *info.updates[:2]]
    assert decoded(payload) == as_values(info)


EDITS = st.lists(st.tuples(st.sampled_from(NUMBERS[1:-1]), st.booleans()), max_size=8)


@examples(80)
@given(EDITS, st.sets(SNAPSHOT_IDS, max_size=4), st.lists(UPDATES, max_size=3), st.integers(1, 70))
def test_any_change_reads_as_if_written_anew(
    edits: list[tuple[int, bool]], more: set[SnapshotId], updates: list[Update], most: int
) -> None:
    """Entries replaced, dropped and added, in two steps; the log with other ends."""
    info = stored()
    first = snapshot_id(NUMBERS[0])
    half = len(edits) // 2
    for some, new in ((edits[:half], set[SnapshotId]()), (edits[half:], more)):
        infos = Snapshots.of(info.snapshots)
        gone = {snapshot_id(it) for it, is_gone in some if is_gone}
        orphans = [it for it in infos.values() if it.parent_id in gone and it.id not in gone]
        put = [replace(it, parent_id=first) for it in orphans]
        put += [entry(it, first) for it, is_gone in some if not is_gone]
        put += [SnapshotInfo(it, first, 7, "new") for it in new if it not in infos]
        put = [it for it in put if it.id not in gone]
        edited = infos.edited(put, gone)
        entries = OperationsLog.of(info.updates).with_newest(*updates, instead=len(updates) % 2)
        info = replace(info, snapshots=edited, updates=entries.cut(most)[0])
        payload = encode_repo_info(info)
        again = decoded(payload)
        assert again == as_values(info) == decoded(encode_repo_info(as_values(info)))
        assert len(info.snapshots) == len(list(info.snapshots)) == len(set(info.snapshots))
        assert len(info.updates) == len(list(info.updates))


def test_edited_snapshots_are_found_in_every_way() -> None:
    """By id, in their order and along their parents."""
    base = Snapshots.of(stored().snapshots)
    first, second, third = map(snapshot_id, NUMBERS[:3])
    edited = base.edited([entry(0, third), replace(base[third], parent_id=first)], [second])
    assert second in base
    assert second not in edited
    assert edited.get(second) is None
    assert [it.id for it in edited.ancestry(snapshot_id(0))] == [snapshot_id(0), third, first]
    assert [it.id for page in base.ancestry_pages(third) for it in page] == [third, second, first]
    back = edited.edited([entry(NUMBERS[1], first)], [snapshot_id(0)])
    assert set(back) == set(base)
    with pytest.raises(KeyError):
        list(edited.ancestry(second))


@pytest.mark.parametrize("order", [0, 1, -1])
def test_many_ids_are_found_as_one_by_one(order: int) -> None:
    """Whether they are listed, were left out, lie on top, or are unknown."""
    base = decoded(other_file(lambda *_: {}, order=order)) if order else stored()
    table = base.snapshots
    first, second, *others = table
    ids = [*others, *map(snapshot_id, range(200, 260)), first, second, SnapshotId(b"\xff" * 12)]
    edited = Snapshots.of(table).edited([entry(230)], [second])
    assert edited.among(ids) == {it for it in ids if it in edited}
    assert edited.among(ids[:2]) == set(ids[:2])
    assert edited.among([snapshot_id(230), second]) == {snapshot_id(230)}


def test_many_entries_are_left_out_without_looking_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An expiration drops hundreds."""
    base = stored()

    def refuse(self: object, row: int) -> bytes:
        raise AssertionError(row)

    monkeypatch.setattr(SnapshotTable, "id", refuse)
    kept, *gone = base.snapshots
    assert list(Snapshots.of(base.snapshots).edited((), gone)) == [kept]


def test_a_long_line_of_ancestors_is_decoded_where_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To count them, or to look at the first ones, decodes few of them."""
    looked: list[int] = []
    some = snapshot_columns.SnapshotColumns.some_tables

    def counted(self: snapshot_columns.SnapshotColumns, rows: Sequence[int]) -> object:
        looked.append(len(rows))
        return some(self, rows)

    monkeypatch.setattr(snapshot_columns.SnapshotColumns, "some_tables", counted)
    infos = line(range(3000))
    found = decoded(encode_repo_info(info_of(infos, UPDATES_OF_ALL_KINDS)))
    ancestors = list(found.ancestry(snapshot_id(2999)))
    assert len(ancestors) == 3000
    assert sum(looked) == 0
    assert ancestors[2000].message == infos[snapshot_id(999)].message
    assert 0 < sum(looked) <= 2048
    assert ancestors == list(reversed(infos.values()))


def test_a_whole_line_of_ancestors_is_one_page() -> None:
    """Callers that stop after a few get short pages first; each by columns has fixed costs."""
    infos = line(range(3000))
    found = decoded(encode_repo_info(info_of(infos, UPDATES_OF_ALL_KINDS)))
    whole = list(found.ancestry_pages(snapshot_id(2999), whole=True))
    some = list(found.ancestry_pages(snapshot_id(2999)))
    assert ([len(it) for it in whole], [len(it) for it in some]) == ([3000], [4, 12, 1024, 1960])
    assert [it for page in whole for it in page] == [it for page in some for it in page]


def test_properties_of_one_snapshot_make_no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many it has: columns pay only for names that all of a page have."""
    selected: list[int] = []
    select = Vectors.select

    def counted(self: Vectors, rows: Any) -> Vectors:
        selected.append(len(rows))
        return select(self, rows)

    infos = line(NUMBERS)
    tip = next(reversed(infos))
    properties: dict[str, JSON] = {str(it): it for it in range(500)}
    infos[tip] = SnapshotInfo.of(tip, infos[tip].parent_id, 9, "", properties)
    table = Snapshots.of(decoded(encode_repo_info(info_of(infos, ()))).snapshots).table
    assert table is not None
    rows = [table.find(it) for it in reversed(infos)]
    tables = table.columns.some_tables([it for it in rows if it is not None])
    monkeypatch.setattr(Vectors, "select", counted)
    assert snapshot_columns.metadata_of(tables) == [it.metadata for it in reversed(infos.values())]
    assert len(selected) < 5


type Fields = Callable[[TableBuilder, int], dict[int, Field]]


def other_file(
    fields: Fields, update_fields: Fields = lambda *_: {}, *, order: int = 1, first: str = "m"
) -> bytes:
    """Return a file as other writers make them: vtables are shared, children first.

    What is made ``first``, a message, comes last in the file, before something that is not
    referred to.
    """
    out = TableBuilder()
    out.blob(b"")
    text = out.string(first)
    infos: list[Offset] = []
    for number in range(COUNT)[::order]:
        plain: dict[int, Field] = {
            3: out.string("m" * (number % 5)) if infos else text,
            0: Struct(snapshot_id(number)), 2: Scalar(9 + number, 8), 4: out.offsets([]),
            1: Scalar(order * (number - 1) if order > 0 else COUNT - number, 4, signed=True),
        }  # fmt: skip
        if number == 0:
            plain[1] = Scalar(-1, 4, signed=True)
        infos.append(out.table({**plain, **fields(out, number)}))
    updates = []
    for number in range(COUNT):
        detail = out.table({})
        plain = {0: Scalar(1, 1), 1: detail, 2: Scalar(500 - number, 8)}
        plain[3] = out.string(f"repo.{number}.X") if number else None
        updates.append(out.table({**plain, **update_fields(out, number)}))
    tip = COUNT - 1 if order > 0 else 0
    main = out.table({0: out.string("main"), 1: Scalar(tip, 4)})
    none = out.offsets([])
    root_fields: dict[int, Field] = {
        0: Scalar(2, 1), 1: none, 2: out.offsets([main]), 3: none,
        4: out.offsets(infos), 5: out.table({}), 7: out.offsets(updates),
    }  # fmt: skip
    return out.finish(out.table(root_fields))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("length", range(8))
def test_entries_of_other_writers_are_copied(
    order: int, length: int, written: list[object]
) -> None:
    """Also if they share vtables and lie in another order; each text keeps the zero at its end."""
    base = decoded(other_file(lambda *_: {}, order=order, first="f" * length))
    assert [it.id for it in base.ancestry(base.branches["main"])] == [
        snapshot_id(it) for it in reversed(range(COUNT))
    ]
    info = committed(base, entry(500, base.branches["main"]))
    payload = encode_repo_info(info)
    assert len(written) == 3
    again = decoded(payload)
    assert again == as_values(info)
    stored_infos = Snapshots.of(again.snapshots).table
    stored_log, _, _ = OperationsLog.of(again.updates).stored
    assert stored_infos is not None
    assert stored_log is not None
    for tables in (stored_infos.tables, stored_log.tables):
        texts = tables.vector(3, 1, 1)
        ends = (texts.starts + texts.counts)[texts.starts > 0].tolist()
        assert [payload[end] for end in ends] == [0] * len(ends)


def test_files_of_other_writers_do_not_grow_with_commits() -> None:
    """Entries that left the log are left behind, sooner or later."""
    info = decoded(other_file(lambda *_: {}))
    anew = len(encode_repo_info(as_values(info)))
    for number in range(200):
        info = committed(info, replace(entry(0), message=str(number)))
        info = replace(info, updates=OperationsLog.of(info.updates).cut(COUNT)[0])
        payload = encode_repo_info(info)
        assert len(payload) < 2 * anew
        info = decoded(payload)
    assert info.snapshots[snapshot_id(0)].message == "199"
    assert [it.updated_at for it in info.updates] == list(range(700, 640, -1))


def test_entries_with_fields_that_we_do_not_know_are_written_anew(written: list[object]) -> None:
    """Their meaning is not known, so they are not passed on as if it were."""

    def fields(out: TableBuilder, number: int) -> dict[int, Field]:
        return {6: out.blob(b"later")} if number == 7 else {}

    def update_fields(out: TableBuilder, number: int) -> dict[int, Field]:
        return {4: out.blob(b"later")} if number == 8 else {}

    base = decoded(other_file(fields, update_fields))
    info = committed(base, entry(500, base.branches["main"]))
    payload = encode_repo_info(info)
    assert written == [snapshot_id(7), snapshot_id(500), *info.updates[:2], info.updates[9]]
    tables = {it.raw(0, 12): it for it in root(payload).tables(4)}
    assert 6 not in tables[snapshot_id(7)].slots
    assert all(4 not in it.slots for it in root(payload).tables(7))
    assert decoded(payload) == as_values(info)


def test_files_of_a_later_version_are_written_anew(written: list[object]) -> None:
    """All of their entries may have a field that we do not know."""
    base = decoded(
        other_file(lambda out, _: {6: out.blob(b"l")}, lambda out, _: {4: out.blob(b"l")})
    )
    info = committed(base, entry(500, base.branches["main"]))
    payload = encode_repo_info(info)
    assert len(written) >= 2 * COUNT
    assert decoded(payload) == as_values(info)


def test_entries_that_share_things_are_told_apart() -> None:
    """A shared message does not change with one snapshot, nor do properties of another."""
    shared: list[Field] = []

    def fields(out: TableBuilder, number: int) -> dict[int, Field]:
        if not shared:
            shared.append(out.string("shared"))
        return {3: shared[0]} if number % 2 else {}

    def properties(out: TableBuilder, _: int) -> dict[int, Field]:
        return {4: out.offsets([out.table({0: out.string("name"), 1: out.blob(b"value")})])}

    base = decoded(other_file(fields))
    info = committed(base, entry(500, base.branches["main"]))
    assert decoded(encode_repo_info(info)) == as_values(info)
    sharing = Snapshots.of(base.snapshots).table
    plain = Snapshots.of(decoded(other_file(properties)).snapshots).table
    assert sharing is not None
    assert plain is not None
    places, _ = sharing.tables.find(1, 4)
    assert not snapshot_writing._are_apart(sharing, places)
    places, _ = plain.tables.find(1, 4)
    assert snapshot_writing._are_apart(plain, places)
    for tables in (plain.tables, plain.tables.vector(4, 4, 4).tables()):
        for shift in (-3, 0, 3):
            at_a_vtable = tables.vtable_places[:1] + shift
            assert not snapshot_writing._are_apart(plain, np.concatenate([places, at_a_vtable]))


@pytest.mark.parametrize("slot", [0, 3])
def test_a_damaged_snapshot_is_not_copied(slot: int) -> None:
    """A commit looks at all that it takes over."""
    base = decoded(other_file(lambda _, number: {slot: None} if number == 50 else {}))
    with pytest.raises(FormatError, match="required field"):
        encode_repo_info(committed(base, entry(500)))


@pytest.mark.parametrize(("slot", "field"), [(0, Scalar(99, 1)), (1, None)])
def test_a_damaged_operation_is_not_copied(slot: int, field: Field) -> None:
    """Nor one of a kind that is not known."""
    base = decoded(other_file(lambda *_: {}, lambda _, it: {slot: field} if it == 50 else {}))
    with pytest.raises(FormatError):
        encode_repo_info(committed(base, entry(500, base.branches["main"])))


def test_a_parent_that_lies_upon_something_else_is_not_replaced() -> None:
    """Of a hostile file: the entries are written anew, each with what it had."""
    payload = bytearray(other_file(lambda *_: {}))
    base = decoded(payload)
    genuine = Snapshots.of(base.snapshots).table
    assert genuine is not None
    vtables = genuine.tables.vtable_places
    vtable = vtables.item(9)
    time_slot, parent_slot = vtable + 4 + 2 * 2, vtable + 4 + 2 * 1
    payload[parent_slot : parent_slot + 2] = payload[time_slot : time_slot + 2]
    hostile = Snapshots.of(decoded(payload).snapshots).table
    assert hostile is not None
    assert not genuine.columns.layout.foreign.any()
    assert hostile.columns.layout.foreign.tolist() == (vtables == vtable).tolist()


def test_dropping_a_parent_without_its_child_is_an_error() -> None:
    """No file is written in which a parent is missing."""
    base = stored()
    infos = Snapshots.of(base.snapshots).edited([], [snapshot_id(NUMBERS[5])])
    with pytest.raises(KeyError):
        encode_repo_info(replace(base, snapshots=infos))


@pytest.mark.parametrize("logs", [(), (snapshot_id(900),)])
@pytest.mark.parametrize("flushed_at", [0, 9])
def test_an_entry_that_is_written_again_is_as_if_written_anew(
    logs: tuple[SnapshotId, ...], flushed_at: int
) -> None:
    """Its bytes are kept, and the number of its parent is put into them."""
    parents = [snapshot_id(number) for number in range(3)]
    infos = [SnapshotInfo(it, None, 1, "parent") for it in parents]
    for parent in (parents[2], None, parents[0], parents[1]):
        new = SnapshotInfo(snapshot_id(9), parent, flushed_at, "m", (), logs)
        for kept in (new, replace(new), new):
            numbering = _Numbering(Snapshots([*infos, kept]))
            number = -1 if parent is None else parents.index(parent)
            plain = table(_SNAPSHOT, bytes(kept.id), number, flushed_at, *kept.blocks)
            assert _encode(kept, numbering) == plain
    moved = SnapshotInfo(snapshot_id(9), parents[2], flushed_at, "m", (), logs)
    for count in (3, 2, 1):
        numbering = _Numbering(Snapshots([*infos[3 - count :], moved]))
        plain = table(_SNAPSHOT, bytes(moved.id), count - 1, flushed_at, *moved.blocks)
        assert _encode(moved, numbering) == plain


def test_little_on_top_of_a_file_is_light() -> None:
    """With more it is read again, so that it is copied."""
    info = stored()
    assert info.is_light
    assert committed(info, entry(500)).is_light
    for number in range(500, 540):
        info = committed(info, entry(number))
    assert not info.is_light
    assert not info_of(
        line(NUMBERS), [Update(RepoInitialized(), it) for it in range(COUNT)]
    ).is_light
