"""Histories through the facade: long ones are decoded a page at a time."""

from __future__ import annotations

import gc
import pickle
from copy import copy
from dataclasses import FrozenInstanceError, fields, replace
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async._runtime.blocking.portal import run
from icechunk_async.format.envelope import Envelope
from icechunk_async.format.flatbuffers.reading import Vectors
from icechunk_async.format.operations_log import (
    Availability,
    RepoInitialized,
    RepoStatus,
    Update,
)
from icechunk_async.format.repo_info import (
    RepoInfo,
    decode_repo_info,
    encode_repo_info,
)
from icechunk_async.format.repo_info import (
    SnapshotInfo as NativeInfo,
)
from icechunk_async.sync.snapshots import SnapshotInfo
from tests.helpers import counted_calls
from tests.unit.format.samples import snapshot_id

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = ("id", "parent_id", "written_at", "message", "metadata")
LAST_US = 253_402_300_799_999_999
"""The last time that Python knows."""


def history(count: int, change: Callable[[int, NativeInfo], NativeInfo] | None = None) -> RepoInfo:
    """Return a file with a line of snapshots."""
    infos: list[NativeInfo] = []
    for number in range(count):
        parent = infos[-1].id if infos else None
        made = NativeInfo.of(
            snapshot_id(number), parent, 10**15 + number, f"é{number}", {"run": number, "by": "me"}
        )
        infos.append(made if change is None else change(number, made))
    info = RepoInfo(
        {"main": infos[-1].id}, {}, frozenset(), {it.id: it for it in infos},
        RepoStatus(Availability.ONLINE, 5), (Update(RepoInitialized(), 5),),
    )  # fmt: skip
    return decode_repo_info(Envelope(2, bytes(encode_repo_info(info))))


def found_in(info: RepoInfo) -> list[SnapshotInfo]:
    """Return the facade's snapshots."""
    pages = info.ancestry_pages(info.branches["main"])
    return [it for page in pages for it in SnapshotInfo.of_page(page)]


def values(info: SnapshotInfo) -> tuple[object, ...]:
    """Return all fields."""
    return tuple(getattr(info, name) for name in NAMES)


def irregular(number: int, info: NativeInfo) -> NativeInfo:
    """Give some snapshots other properties, or an impossible time."""
    match number % 50:
        case 3:
            return replace(info, raw_metadata=())
        case 7:
            other = NativeInfo.of(info.id, info.parent_id, 1, "", {"other": [1], "run": {"a": 1}})
            return replace(other, flushed_at=LAST_US + number)
        case 9:
            return replace(info, raw_metadata=info.raw_metadata[:1])
        case _:
            return info


@pytest.mark.parametrize("change", [None, irregular])
def test_pages_show_what_single_snapshots_show(
    change: Callable[[int, NativeInfo], NativeInfo] | None,
) -> None:
    """Whether all have the same properties or not."""
    info = history(700, change)
    singly = [SnapshotInfo.from_native(it) for it in reversed(list(info.snapshots.values()))]
    found = found_in(info)
    assert len(found) == 700
    by_id = {it.id: it for it in singly}
    assert list(map(values, found)) == [values(by_id[it.id]) for it in found]
    assert [it.parent_id for it in found] == [*(it.id for it in found[1:]), None]
    assert [it.id for it in info.ancestry(info.branches["main"])] == [
        snapshot_id(it) for it in reversed(range(700))
    ]


@pytest.mark.parametrize("first", [(), (("__icechunk", b"\x01\x04\x01"),)])
def test_names_that_all_commits_have_are_decoded_once(
    first: tuple[tuple[str, bytes], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first snapshot, which is no commit of anybody, has others or none."""
    info = history(300, lambda it, info: info if it else replace(info, raw_metadata=first))

    def decode(names: Vectors) -> list[str]:
        decoded.append(len(names))
        return original(names)

    decoded: list[int] = []
    original = Vectors.decode
    monkeypatch.setattr(Vectors, "decode", decode)
    found = [it.metadata for it in found_in(info)]
    assert found[:-1] == [{"run": it, "by": "me"} for it in range(299, 0, -1)]
    assert len(found[-1]) == len(first)
    texts = [it for it in decoded if it > 4]  # of values; names are decoded for all rows at once
    assert sum(texts) < 300


@pytest.mark.parametrize(("count", "number"), [(300, 40), (3, 1)])
def test_damaged_properties_are_those_of_one_snapshot(count: int, number: int) -> None:
    """The others on its page are shown."""
    raw = (("k", b"\xff\xff"),)
    info = history(count, lambda it, info: replace(info, raw_metadata=raw if it == number else ()))
    found = found_in(info)
    damaged = found[count - 1 - number]
    assert [it.metadata for it in found if it is not damaged] == [{}] * (count - 1)
    with pytest.raises(Exception, match="metadata item 'k'"):
        _ = damaged.metadata


def test_a_snapshot_of_a_page_is_a_value_as_any_other() -> None:
    """Compared, copied, pickled; and its fields cannot be replaced."""
    info = found_in(history(300))[200]
    made = SnapshotInfo(*values(info))  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    assert info == made
    assert copy(info) == pickle.loads(pickle.dumps(info)) == info
    assert info != replace(info, message="other")
    assert info.metadata is info.metadata
    assert tuple(it.name for it in fields(SnapshotInfo)) == NAMES
    assert SnapshotInfo("a", None, info.written_at, "m").metadata == {}
    with pytest.raises(FrozenInstanceError):
        info.message = "other"  # type: ignore[misc] # pyright: ignore[reportAttributeAccessIssue]


def test_snapshots_that_were_passed_leave_no_circles() -> None:
    """Of a long history nothing is left for the collector."""
    info = history(2000)
    gc.collect()
    gc.disable()
    try:
        assert len({it.message for it in info.ancestry(info.branches["main"])}) == 2000
        assert len({(it.message, str(it.metadata)) for it in found_in(info)}) == 2000
        assert gc.collect() <= 20
    finally:
        gc.enable()


def test_a_short_history_is_decoded_once() -> None:
    """It is looked at over and over, and makes no columns."""
    info = history(10)
    first = found_in(info)
    with counted_calls() as calls:
        again = found_in(info)
    assert [it.id for it in again] == [it.id for it in first]
    assert not {"SnapshotTable._row", "TableList._row", "SnapshotTable._decode"} & set(calls)


def test_a_long_history_takes_few_turns_of_the_loop_and_few_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two calls for each snapshot: the step of the iterator, and the field."""
    from icechunk_async.sync import Repository, in_memory_storage

    info = history(5000)
    repository = Repository.create(in_memory_storage())
    native: Any = repository.handle.ready
    monkeypatch.setattr(native.engine.history, "_listing", _returning(info))
    tip = info.branches["main"]
    monkeypatch.setattr(native.engine.history, "branch_tip", _returning(tip))
    monkeypatch.setattr(native.engine.history.state, "known_now", lambda: None)
    turns: list[object] = []

    def counted(work: Any) -> object:
        turns.append(work)
        return run(work)

    monkeypatch.setattr("icechunk_async._runtime.blocking.iterators.run", counted)
    with counted_calls() as calls:
        messages = [it.message for it in repository.ancestry(branch="main")]
    assert len(messages) == 5000
    assert len(turns) <= 8
    assert len(calls) <= 2 * 5000 + 2000


def _returning(value: object) -> Any:
    async def method(*_: object) -> object:
        return value

    return method
