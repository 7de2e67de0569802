"""The repo info file: fields, order, history, and what other writers leave out."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import Envelope
from icechunk_async.format.json.metadata import encode_items
from icechunk_async.format.operations_log import Availability, RepoInitialized, RepoStatus, Update
from icechunk_async.format.repo_info import (
    RepoInfo,
    SnapshotInfo,
    decode_repo_info,
    encode_repo_info,
)
from tests.unit.format.samples import SNAPSHOT_IDS, TEXTS, TIMES, snapshot_id
from tests.unit.format.table_builder import Offset, Scalar, Struct, TableBuilder
from tests.unit.format.update_samples import STATUSES, UPDATES
from tests.unit.format.wire import Table, root

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.format.ids import SnapshotId
    from tests.unit.format.table_builder import Field

ONLINE = RepoStatus(Availability.ONLINE, 5)
FIRST = SnapshotInfo(snapshot_id(5), None, 10, "Repository initialized")
SECOND = SnapshotInfo.of(snapshot_id(1), snapshot_id(5), 20, "Sécond", {"k": [1, 2, 300]})
THIRD = SnapshotInfo(snapshot_id(9), snapshot_id(1), 30, "", (), (snapshot_id(2), snapshot_id(3)))
INFO = RepoInfo(
    branches={"main": THIRD.id, "side": SECOND.id, "Zé": FIRST.id},
    tags={"v2": THIRD.id, "a/b": SECOND.id, "": FIRST.id},
    deleted_tags=frozenset({"z", "gone", "é"}),
    snapshots={it.id: it for it in (FIRST, SECOND, THIRD)},
    status=ONLINE,
    updates=(Update(RepoInitialized(), 10),),
)


def decoded(info: RepoInfo) -> RepoInfo:
    """Write and read."""
    return decode_repo_info(Envelope(2, encode_repo_info(info)))


def written(info: RepoInfo) -> Table:
    """Return the root table."""
    return root(encode_repo_info(info))


def test_a_repo_info_reads_back() -> None:
    """With nothing optional, and with everything."""
    assert decoded(INFO) == INFO
    full = replace(
        INFO,
        before_updates="repo.1.X",
        raw_metadata=tuple(encode_items({"owner": "é"}, 2)),
        raw_config=b"config, verbatim",
        enabled_flags=(3, 900),
        disabled_flags=(),
    )
    assert decoded(full) == full
    assert decoded(full).metadata == {"owner": "é"}


def test_optional_fields_are_left_out() -> None:
    """Config, flags and the next part of the log; metadata is always there."""
    table = written(INFO)
    assert table.slots == {0, 1, 2, 3, 4, 5, 6, 7}
    assert table.number(0, 1) == 2
    assert table.tables(6) == []


def test_every_list_is_sorted_by_bytes() -> None:
    """Refs by name, snapshots by id."""
    table = written(INFO)
    assert [it.string(0) for it in table.tables(1)] == ["", "a/b", "v2"]
    assert [it.string(0) for it in table.tables(2)] == ["Zé", "main", "side"]
    assert table.strings(3) == ["gone", "z", "é"]
    assert [it.raw(0, 12) for it in table.tables(4)] == [snapshot_id(it) for it in (1, 5, 9)]


def test_refs_count_snapshots_from_zero() -> None:
    """The first one's number is the default and left out."""
    branches = {it.string(0): it for it in written(INFO).tables(2)}
    assert branches["side"].slots == {0}
    assert branches["Zé"].number(1, 4) == 1
    assert branches["main"].number(1, 4) == 2


def test_parents_are_absolute_positions() -> None:
    """-1 is no parent; 0 is the default, and left out: it is not "no parent"."""
    second, first, third = written(INFO).tables(4)
    assert first.number(1, 4, signed=True) == -1
    assert second.number(1, 4, signed=True) == 1
    assert 1 not in third.slots
    assert decoded(INFO).snapshots[THIRD.id].parent_id == SECOND.id


def test_snapshots_have_their_fields() -> None:
    """Metadata always, pruned logs only if there are any."""
    second, first, third = written(INFO).tables(4)
    assert second.number(2, 8) == 20
    assert second.string(3) == "Sécond"
    assert [(it.string(0), it.blob(1)) for it in second.tables(4)] == [
        ("k", bytes.fromhex("010002002c01065101"))
    ]
    assert first.tables(4) == []
    assert 5 not in first.slots
    assert third.structs(5, 12, 1) == [snapshot_id(2), snapshot_id(3)]


def test_pruned_logs_keep_their_order() -> None:
    """It is the order of history, not that of ids."""
    third = replace(THIRD, pruned_ancestor_logs=(snapshot_id(8), snapshot_id(2), snapshot_id(4)))
    info = replace(INFO, snapshots={**INFO.snapshots, third.id: third})
    assert decoded(info).snapshots[third.id] == third


def test_flags_are_sorted_and_may_be_empty() -> None:
    """Once touched the lists stay; unknown flags are carried along."""
    table = written(replace(INFO, enabled_flags=(900, 3, 65535), disabled_flags=()))
    flags = table.structs(10, 2, 2)
    assert flags is not None
    assert [int.from_bytes(it, "little") for it in flags] == [3, 900, 65535]
    assert table.structs(11, 2, 2) == []


def test_metadata_is_decoded_when_asked_for() -> None:
    """Rewriting carries it verbatim, even if it is damaged."""
    broken = replace(SECOND, raw_metadata=(("k", b"\xff\xff"),))
    info = replace(INFO, snapshots={**INFO.snapshots, SECOND.id: broken})
    found = decoded(info).snapshots[SECOND.id]
    assert found.raw_metadata == broken.raw_metadata
    with pytest.raises(FormatError, match="'k'"):
        _ = found.metadata
    assert decoded(INFO).snapshots[SECOND.id].metadata == {"k": [1, 2, 300]}


def test_times_are_aware() -> None:
    """Microseconds since the epoch; one beyond all calendars is the last moment."""
    assert FIRST.written_at == datetime(1970, 1, 1, 0, 0, 0, 10, tzinfo=UTC)
    assert replace(FIRST, flushed_at=2**64 - 1).written_at == datetime.max.replace(tzinfo=UTC)


def test_ancestry_leads_to_the_root() -> None:
    """From any listed snapshot."""
    assert list(INFO.ancestry(THIRD.id)) == [THIRD, SECOND, FIRST]
    assert list(INFO.ancestry(FIRST.id)) == [FIRST]
    with pytest.raises(KeyError):
        list(INFO.ancestry(snapshot_id(77)))


@pytest.mark.parametrize("parents", [{5: 5}, {5: 9}, {5: 1}, {1: 1}])
def test_a_circle_of_parents_is_refused(parents: dict[int, int]) -> None:
    """When it is walked; the file can be opened."""
    changed = {
        snapshot_id(child): replace(INFO.snapshots[snapshot_id(child)], parent_id=snapshot_id(to))
        for child, to in parents.items()
    }
    info = decoded(replace(INFO, snapshots={**INFO.snapshots, **changed}))
    with pytest.raises(FormatError, match="circle"):
        list(info.ancestry(THIRD.id))


class OtherRepo:
    """A repo info with the tables asked for."""

    def __init__(self) -> None:
        """Begin with one snapshot, on branch main."""
        self.out = TableBuilder()
        self.fields: dict[int, Field] = {0: Scalar(2, 1)}
        self.snapshots = [self.snapshot(1, {1: Scalar(-1, 4, signed=True)})]
        self.refs = [self.ref("main", 0)]

    def snapshot(self, number: int, fields: Mapping[int, Field]) -> Offset:
        """Write a SnapshotInfo."""
        message = self.out.string("m")
        return self.out.table({0: Struct(snapshot_id(number)), 3: message, **fields})

    def ref(self, name: str, index: int) -> Offset:
        """Write a Ref."""
        return self.out.table({0: self.out.string(name), 1: Scalar(index, 4)})

    def update(self, kind: int = 1) -> Offset:
        """Write an Update."""
        return self.out.table({0: Scalar(kind, 1), 1: self.out.table({}), 2: Scalar(7, 8)})

    def decode(self, spec: int = 2, fields: Mapping[int, Field] | None = None) -> RepoInfo:
        """Read it; ``fields`` of the root replace the plain ones."""
        out = self.out
        plain: dict[int, Field] = {
            0: Scalar(2, 1), 1: out.offsets([]), 2: out.offsets(self.refs), 3: out.offsets([]),
            4: out.offsets(self.snapshots), 5: out.table({}), 7: out.offsets([self.update()]),
        }  # fmt: skip
        return decode_repo_info(Envelope(spec, out.finish(out.table({**plain, **(fields or {})}))))


def test_a_minimal_file_reads() -> None:
    """Everything absent has its default."""
    info = OtherRepo().decode()
    assert info.branches == {"main": snapshot_id(1)}
    assert info.snapshots == {snapshot_id(1): SnapshotInfo(snapshot_id(1), None, 0, "m")}
    assert info.status == RepoStatus(Availability.ONLINE, 0)
    assert info.updates == (Update(RepoInitialized(), 7),)
    assert (info.metadata, info.raw_config, info.before_updates) == ({}, None, None)
    assert info.enabled_flags is info.disabled_flags is None


def test_an_absent_parent_is_the_first_snapshot() -> None:
    """A missing parent is encoded as -1."""
    other = OtherRepo()
    other.snapshots.append(other.snapshot(2, {}))
    assert other.decode().snapshots[snapshot_id(2)].parent_id == snapshot_id(1)


@pytest.mark.parametrize("parent", [2, 1000, 2**31 - 1, -2, -(2**31)])
def test_a_parent_outside_of_the_file_is_refused(parent: int) -> None:
    """Beyond the list, or negative in any other way than -1."""
    other = OtherRepo()
    other.snapshots.append(other.snapshot(2, {1: Scalar(parent, 4, signed=True)}))
    with pytest.raises(FormatError, match="parent outside"):
        other.decode().snapshots.get(snapshot_id(2))
    with pytest.raises(FormatError, match="parent outside"):
        other.decode().check()


@pytest.mark.parametrize("slot", [1, 2])
@pytest.mark.parametrize("index", [1, 2**32 - 1])
def test_a_ref_outside_of_the_file_is_refused(slot: int, index: int) -> None:
    """Tags and branches."""
    other = OtherRepo()
    vector = other.out.offsets([other.ref("x", index)])
    with pytest.raises(FormatError, match="point outside"):
        other.decode(fields={slot: vector})


def test_a_snapshot_listed_twice_is_refused() -> None:
    """Its parent would be ambiguous."""
    other = OtherRepo()
    other.snapshots.append(other.snapshot(1, {}))
    with pytest.raises(FormatError, match="twice"):
        other.decode().check()


@pytest.mark.parametrize(("header", "field"), [(1, 2), (2, 1), (2, 3), (2, 0)])
def test_the_file_is_of_spec_2_only(header: int, field: int) -> None:
    """Both its header and its own field are checked."""
    with pytest.raises(FormatError, match="format version"):
        OtherRepo().decode(spec=header, fields={0: Scalar(field, 1)})


@pytest.mark.parametrize("slot", [1, 2, 3, 4, 5, 7])
def test_required_fields_are_required(slot: int) -> None:
    """Tags, branches, deleted tags, snapshots, status and updates."""
    with pytest.raises(FormatError, match="required field"):
        OtherRepo().decode(fields={slot: None})


def test_an_empty_log_of_operations_reads() -> None:
    """No one writes it; the official engine reads it."""
    other = OtherRepo()
    info = other.decode(fields={7: other.out.offsets([])})
    assert (info.updates, info.updated_at) == ((), 0)


@pytest.mark.parametrize("availability", [3, 255])
def test_an_unknown_availability_is_refused(availability: int) -> None:
    """Whether writing is allowed could not be told."""
    other = OtherRepo()
    with pytest.raises(FormatError, match="unknown availability"):
        other.decode(fields={5: other.out.table({0: Scalar(availability, 1)})})


def test_an_empty_list_of_pruned_logs_reads() -> None:
    """No one writes it."""
    other = OtherRepo()
    other.snapshots.append(other.snapshot(2, {5: other.out.structs(b"", 12, 1)}))
    assert other.decode().snapshots[snapshot_id(2)].pruned_ancestor_logs == ()


@st.composite
def repo_infos(draw: st.DrawFn) -> RepoInfo:
    """Draw a repo info; parents lead anywhere, also in circles."""
    ids: list[SnapshotId] = draw(st.lists(SNAPSHOT_IDS, min_size=1, max_size=6, unique=True))
    some = st.sampled_from(ids)
    items = st.dictionaries(TEXTS, st.integers() | TEXTS, max_size=2).map(
        lambda metadata: tuple(
            (name, b"%d" % len(str(value))) for name, value in sorted(metadata.items())
        )
    )
    pruned = st.lists(SNAPSHOT_IDS, max_size=3).map(tuple)
    infos = [
        SnapshotInfo(
            it, draw(st.none() | some), draw(TIMES), draw(TEXTS), draw(items), draw(pruned)
        )
        for it in ids
    ]
    refs = st.dictionaries(TEXTS, some, max_size=3)
    flags = st.none() | st.sets(st.integers(0, 65535)).map(lambda it: tuple(sorted(it)))
    return RepoInfo(
        branches={"main": draw(some)} | draw(refs),
        tags=draw(refs),
        deleted_tags=draw(st.frozensets(TEXTS, max_size=3)),
        snapshots={info.id: info for info in infos},
        status=draw(STATUSES),
        updates=tuple(draw(st.lists(UPDATES, min_size=1, max_size=5))),
        before_updates=draw(st.none() | TEXTS),
        raw_metadata=draw(items),
        raw_config=draw(st.none() | st.binary(max_size=20)),
        enabled_flags=draw(flags),
        disabled_flags=draw(flags),
    )


@settings(deadline=None)
@given(repo_infos())
def test_repo_infos_read_back(info: RepoInfo) -> None:
    """Any contents survive a first and a second round trip."""
    found = decoded(info)
    assert found == info
    assert encode_repo_info(found) == encode_repo_info(info)


@settings(deadline=None)
@given(repo_infos())
def test_files_are_in_order(info: RepoInfo) -> None:
    """Names and ids by their bytes; every word aligned; pruned lists never empty."""
    table = written(info)
    for slot in (1, 2):
        names = [(it.string(0) or "").encode() for it in table.tables(slot)]
        assert names == sorted(set(names))
        assert all((it.number(1, 4) or 0) < len(info.snapshots) for it in table.tables(slot))
    deleted = [name.encode() for name in table.strings(3)]
    assert deleted == sorted(set(deleted))
    ids = [it.raw(0, 12) for it in table.tables(4)]
    assert ids == sorted(info.snapshots)
    assert all(it.structs(5, 12, 1) != [] for it in table.tables(4))
