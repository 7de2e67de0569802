"""The operations log: sixteen kinds of entry, each with its number and slots."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.blocks import REF, Shape, finish, table, vector
from icechunk_async.format.flatbuffers.buffer import Buffer
from icechunk_async.format.flatbuffers.reading import Tables
from icechunk_async.format.operations_log import (
    Availability,
    FeatureFlagChanged,
    NewCommit,
    RepoStatus,
    RepoStatusChanged,
    Update,
    UpdateDetail,
)
from icechunk_async.format.repo_info.log_columns import decode_updates
from icechunk_async.format.repo_info.log_writing import encode_updates
from tests.unit.format.samples import snapshot_id
from tests.unit.format.table_builder import Field, Scalar, Struct, TableBuilder
from tests.unit.format.update_samples import EVERY_KIND, UPDATES
from tests.unit.format.wire import Table, root

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from icechunk_async.format.flatbuffers.blocks import Block
    from tests.unit.format.table_builder import Offset

EVERY = pytest.mark.parametrize(
    ("number", "detail"), EVERY_KIND.items(), ids=[type(it).__name__ for it in EVERY_KIND.values()]
)


def written(log: Sequence[Update]) -> bytes:
    """Write a buffer whose root has the log in slot 0."""
    return finish(table(Shape(REF), vector(encode_updates(log))))


def decoded(payload: bytes) -> tuple[Update, ...]:
    """Read it."""
    return decode_updates(Tables.root(Buffer(payload)).vector(0, 4, 4).tables())


def detail_table(detail: UpdateDetail) -> Table:
    """Write an entry and answer the table of its detail."""
    return root(written([Update(detail, 5)])).tables(0)[0].table(1)


@EVERY
def test_every_kind_has_its_number(number: int, detail: UpdateDetail) -> None:
    """The numbers are those of the schema's union."""
    (table,) = root(written([Update(detail, 99, "repo.1.X")])).tables(0)
    assert table.number(0, 1) == number
    assert table.number(2, 8) == 99
    assert table.string(3) == "repo.1.X"


@EVERY
def test_every_kind_reads_back(number: int, detail: UpdateDetail) -> None:
    """With and without a backup."""
    assert number in range(1, 17)
    updates = (Update(detail, 2**63, None), Update(detail, 1, "repo.é"), Update(detail, 0, ""))
    assert decoded(written(updates)) == updates


COMMITS = st.builds(
    Update,
    st.builds(
        NewCommit,
        st.sampled_from(["main", "", "é"]),
        st.integers(0, 2**32).map(snapshot_id),
    ),
    st.integers(0, 2**64 - 1),
    st.none() | st.text(alphabet="a.\0é", max_size=6),
)


@given(st.lists(COMMITS | st.sampled_from([Update(it, 7, "b") for it in EVERY_KIND.values()])))
def test_batched_entries_equal_single_ones(updates: list[Update]) -> None:
    """Commits whose texts are equally long are copies of one, filled in."""
    alone = [block for it in updates for block in encode_updates([it])]
    assert encode_updates(updates) == alone


def test_encoding_a_log_builds_alike_commits_once() -> None:
    """A file that is not based on another one writes all of it."""
    log = [Update(NewCommit("main", snapshot_id(it)), it + 1, "repo.1.X") for it in range(1000)]
    built: list[Shape] = []

    def counted(shape: Shape, *values: Any) -> Block:
        built.append(shape)
        return table(shape, *values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("icechunk_async.format.repo_info.log_writing.table", counted)
        encode_updates(log)
        assert len(built) == 2


def test_the_newest_entry_has_no_backup() -> None:
    """The field is left out."""
    newest, older = root(written([Update(EVERY_KIND[1], 9), Update(EVERY_KIND[3], 8, "b")])).tables(
        0
    )
    assert newest.slots == {0, 1, 2}
    assert older.slots == {0, 1, 2, 3}


def test_names_come_first_and_ids_follow() -> None:
    """Slots of the kinds that have both."""
    for number, previous in ((6, 6), (8, 8), (9, 9), (10, 10)):
        table = detail_table(EVERY_KIND[number])
        assert table.slots == {0, 1}
        assert table.raw(1, 12) == snapshot_id(previous)
    amended = detail_table(EVERY_KIND[11])
    assert amended.string(0) == "main"
    assert (amended.raw(1, 12), amended.raw(2, 12)) == (snapshot_id(11), snapshot_id(12))
    assert detail_table(EVERY_KIND[12]).raw(0, 12) == snapshot_id(13)
    assert detail_table(EVERY_KIND[5]).string(0) == "tag é"


def test_kinds_without_data_are_empty_tables() -> None:
    """The number says it all."""
    for number in (1, 3, 4, 13, 14):
        assert detail_table(EVERY_KIND[number]).slots == set()


def test_migrations_tell_both_versions() -> None:
    """One byte each."""
    table = detail_table(EVERY_KIND[2])
    assert (table.number(0, 1), table.number(1, 1)) == (1, 2)


@pytest.mark.parametrize(
    ("detail", "slots"),
    [
        (FeatureFlagChanged(3, new_value=True, is_set=True), {0, 1, 2}),
        (FeatureFlagChanged(3, new_value=False, is_set=True), {0, 2}),
        (FeatureFlagChanged(3, new_value=False, is_set=False), {0}),
        (FeatureFlagChanged(0, new_value=False, is_set=False), set()),
    ],
)
def test_flags_leave_defaults_out(detail: FeatureFlagChanged, slots: set[int]) -> None:
    """False and 0 are absent."""
    assert detail_table(detail).slots == slots
    assert decoded(written([Update(detail, 1)])) == (Update(detail, 1),)


def test_a_status_has_a_table_of_its_own() -> None:
    """Availability, since when, and why."""
    status = detail_table(EVERY_KIND[16]).table(0)
    assert (status.number(0, 1), status.number(1, 8), status.string(2)) == (1, 77, "why")
    online = RepoStatusChanged(RepoStatus(Availability.ONLINE, 0))
    assert detail_table(online).table(0).slots == set()


def test_entries_keep_their_order() -> None:
    """Newest first, whatever the kinds."""
    updates = tuple(
        replace(Update(detail, 100 - place), backup_path=f"b{place}" if place else None)
        for place, detail in enumerate([*EVERY_KIND.values(), *reversed(EVERY_KIND.values())])
    )
    assert decoded(written(updates)) == updates


@settings(deadline=None)
@given(st.lists(UPDATES, max_size=8))
def test_logs_read_back(updates: list[Update]) -> None:
    """Any entries in any order."""
    assert list(decoded(written(updates))) == updates


def entry(fields: Mapping[int, Field], out: TableBuilder) -> bytes:
    """Write one entry with these fields."""
    tables: list[Offset] = [out.table(fields)]
    return out.finish(out.table({0: out.offsets(tables)}))


@pytest.mark.parametrize("number", [0, 17, 255])
def test_an_unknown_kind_is_refused(number: int) -> None:
    """Rewriting the file would lose it."""
    out = TableBuilder()
    detail = out.table({})
    with pytest.raises(FormatError, match=f"unknown type {number}"):
        decoded(entry({0: Scalar(number, 1), 1: detail}, out))


def test_an_entry_without_detail_is_refused() -> None:
    """Both parts of a union are required."""
    with pytest.raises(FormatError, match="'update_type'"):
        decoded(entry({0: Scalar(1, 1)}, TableBuilder()))


@EVERY
def test_required_fields_of_every_kind_are_required(number: int, detail: UpdateDetail) -> None:
    """Names, ids and statuses; numbers have defaults."""
    out = TableBuilder()
    payload = entry({0: Scalar(number, 1), 1: out.table({})}, out)
    needs = {5, 6, 7, 8, 9, 10, 11, 12, 16}
    if number in needs:
        with pytest.raises(FormatError, match="required field"):
            decoded(payload)
    else:
        (update,) = decoded(payload)
        assert type(update.detail) is type(detail)


def test_later_fields_are_passed_over() -> None:
    """In the entry and in its detail."""
    out = TableBuilder()
    name, extra = out.string("n"), out.blob(b"new")
    detail = out.table({0: name, 1: Struct(snapshot_id(3)), 2: extra, 3: Scalar(1, 8)})
    (update,) = decoded(entry({0: Scalar(10, 1), 1: detail, 4: extra}, out))
    assert update.detail == NewCommit("n", snapshot_id(3))
