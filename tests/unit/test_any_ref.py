"""One argument for any ref, refs of the wrong kind, and times as people write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

import icechunk_async.sync as icechunk
from icechunk_async import Repository, SnapshotId
from icechunk_async._runtime import clock
from icechunk_async.errors import (
    BranchNotFoundError,
    InvalidInputError,
    NotFoundError,
    TagNotFoundError,
    WrongTypeError,
)
from tests.helpers import memory_url, write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ANY_KIND = [
    {"branch": "v1"},
    {"branch": "v1", "as_of": "2026-01-01"},
]


async def _tagged(filled: Repository) -> SnapshotId:
    """Tag the tip as v1, and commit once more; return what is tagged."""
    tagged = await filled.lookup_branch("main")
    await filled.create_tag("v1", tagged)
    session = await filled.writable_session("main")
    await write(session, "a/c/5", b"\x05")
    await session.commit("five")
    return tagged


async def test_a_ref_is_a_branch_a_tag_or_a_snapshot(filled: Repository) -> None:
    """In every method that takes one; ids by their first letters and steps back as well."""
    tagged = await _tagged(filled)
    tip = await filled.lookup_branch("main")
    named: dict[SnapshotId | str, SnapshotId] = {
        "main": tip,
        "v1": tagged,
        str(tagged): tagged,
        str(tip)[:10]: tip,
        "main~1": tagged,
        tagged: tagged,
    }
    for ref, expected in named.items():
        assert (await filled.readonly_session(ref=ref)).snapshot_id == expected
        assert (await anext(aiter(filled.ancestry(ref=ref)))).id == expected
        assert (await filled.add_sums(ref=ref)).snapshot_id == expected
        assert (await filled.analyze(ref=ref)).snapshot_id == expected
        assert (await filled.check_content(ref=ref)).snapshot_id == expected
    found = await filled.diff(from_ref="v1", to_ref="main~0")
    assert found.updated_chunks["/a"].tolist() == [[5]]
    assert "five" not in str(await filled.ancestry_graph(ref="v1", plain=True))
    assert "five" in str(await filled.ancestry_graph(ref="main", plain=True))


@pytest.mark.parametrize(
    "more", [{"branch": "main"}, {"tag": "v1"}, {"snapshot_id": "1CECHNKREP0F1RSTCMT0"}]
)
async def test_a_ref_stands_alone(filled: Repository, more: dict[str, Any]) -> None:
    """Beside another name it is refused, also with a time."""
    with pytest.raises(InvalidInputError, match="Give one of them"):
        await filled.readonly_session(ref="main", **more)
    with pytest.raises(InvalidInputError, match="Give one of them"):
        await filled.readonly_session(ref="main", as_of="2026-01-01", **more)
    with pytest.raises(InvalidInputError, match="Give one of them"):
        await anext(aiter(filled.ancestry(ref="main", **more)))
    for upkeep in (filled.add_sums, filled.analyze, filled.check_content):
        with pytest.raises(InvalidInputError, match="Give one of them"):
            await upkeep(ref="main", **more)


async def test_a_misspelt_ref_is_refused_with_near_names(filled: Repository) -> None:
    """Near names are in the message."""
    with pytest.raises(NotFoundError, match=r"'main_' is not a branch.*'main' meant"):
        await filled.readonly_session(ref="main_")


async def test_a_name_of_another_kind_is_told(filled: Repository) -> None:
    """A tag given as a branch and so on; the error stays that of the kind that was asked for."""
    tagged = await _tagged(filled)
    there = r"There is a tag 'v1': give it as tag='v1' or ref='v1'"
    for arguments in ANY_KIND:
        with pytest.raises(BranchNotFoundError, match=there):
            await filled.readonly_session(**arguments)
    with pytest.raises(BranchNotFoundError, match=there):
        await anext(aiter(filled.ancestry(branch="v1")))
    with pytest.raises(BranchNotFoundError, match=there):
        await filled.writable_session("v1")
    with pytest.raises(
        TagNotFoundError, match=r"There is a branch 'main': give it as branch='main'"
    ):
        await filled.readonly_session(tag="main")
    with pytest.raises(InvalidInputError, match=r"not a SnapshotId.*There is a tag 'v1'"):
        await filled.readonly_session(snapshot_id="v1")
    with pytest.raises(BranchNotFoundError, match=f"snapshot_id='{tagged}' or ref='{tagged}'"):
        await filled.readonly_session(str(tagged))
    with pytest.raises(BranchNotFoundError) as caught:
        await filled.readonly_session("nothing")
    assert "give it as" not in str(caught.value)


async def test_times_are_given_as_people_write_them(filled: Repository) -> None:
    """An ISO 8601 text, a `datetime`, or how long ago it was."""
    before = await filled.lookup_branch("main")
    moment = clock.from_us(clock.now_us())
    later = moment + timedelta(days=1)
    for as_of in (later, later.isoformat(), later.date().isoformat(), timedelta(0)):
        session = await filled.readonly_session("main", as_of=as_of)
        assert session.snapshot_id == before
    assert (await filled.readonly_session(ref="main", as_of=later)).snapshot_id == before
    with pytest.raises(NotFoundError, match="no snapshot yet"):
        await filled.readonly_session("main", as_of="2001-01-01")
    with pytest.raises(NotFoundError, match="no snapshot yet"):
        await filled.readonly_session("main", as_of=timedelta(days=3650))
    assert await filled.expire_snapshots("2001-01-01", dry_run=True) == set()
    assert not (await filled.garbage_collect(timedelta(days=1), dry_run=True)).bytes_deleted


@pytest.mark.parametrize(
    ("as_of", "error", "message"),
    [
        ("yesterday", InvalidInputError, "as_of is 'yesterday', which is no time; give a datetime"),
        (timedelta(days=999_999), InvalidInputError, "longer than the calendar reaches"),
        (20260101, WrongTypeError, "as_of must be a datetime with a zone.*not 20260101"),
    ],
)
async def test_what_is_no_time_is_refused(
    filled: Repository, as_of: Any, error: type[Exception], message: str
) -> None:
    """With what to give."""
    with pytest.raises(error, match=message):
        await filled.readonly_session("main", as_of=as_of)
    with pytest.raises(InvalidInputError):
        await filled.expire_snapshots(as_of)
    with pytest.raises(InvalidInputError):
        await filled.garbage_collect(as_of)


def test_the_facade_takes_the_same() -> None:
    """A ref in place of a branch, a tag and an id, and times as texts."""
    with icechunk.Repository.create(memory_url()) as repository:
        tip = repository.lookup_branch("main")
        repository.create_tag("v1", tip)
        for ref in ("main", "v1", tip, tip[:8]):
            assert repository.readonly_session(ref=ref).snapshot_id == tip
            assert [it.id for it in repository.ancestry(ref=ref)] == [tip]
            assert str(repository.analyze(ref=ref).snapshot_id) == tip
        repository.diff(from_ref="v1", to_ref="main")
        tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
        assert repository.readonly_session("main", as_of=tomorrow).snapshot_id == tip
        with pytest.raises(icechunk.IcechunkError, match="There is a tag 'v1'"):
            repository.readonly_session("v1")
        with pytest.raises(icechunk.IcechunkError, match="Must provide one"):
            repository.readonly_session("main", ref="main")
        with pytest.raises(icechunk.IcechunkError, match="which is no time"):
            repository.readonly_session("main", as_of="yesterday")
        assert repository.expire_snapshots("2001-01-01") == set()


async def test_steps_back_leave_no_history_open(
    filled: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reading ends before the snapshot is returned."""
    history, still_open = type(filled.engine.history), [0]
    ancestry: Any = history.ancestry

    async def noted(*arguments: Any, **more: Any) -> AsyncIterator[Any]:
        still_open[0] += 1
        try:
            async for info in ancestry(*arguments, **more):
                yield info
        finally:
            still_open[0] -= 1

    monkeypatch.setattr(history, "ancestry", noted)
    await filled.readonly_session(ref="main~1")
    assert still_open == [0]
