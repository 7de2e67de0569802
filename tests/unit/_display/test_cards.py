"""Objects show what they hold, as text and as HTML, without a request and without harm."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository, sync
from icechunk_async._display.cards import Card, Table, byte_size
from icechunk_async.config import RepositoryConfig
from icechunk_async.errors import InvalidInputError, UnsupportedBySpecError
from icechunk_async.format.repo_info import SnapshotInfo
from icechunk_async.results import RepoAvailability, RepoStatus
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import array_document, group_document, make_array, memory_url, write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BAD = "x\x1b[31m\u202e<script>alert(1)</script>\"'&"
DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
MICROSECONDS = re.compile(r"\d{16}")


class _Tags(HTMLParser):
    """Collects the names of elements, and whether each is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(shown: str) -> str:
    """Return the text of a card, whose HTML is whole and has no element but those of cards."""
    tags = _Tags()
    tags.feed(shown)
    assert tags.open == []
    ours = {"style", "div", "header", "b", "br", "details", "summary", "table", "tr", "th", "td"}
    assert tags.seen <= ours
    return html.unescape(re.sub(r"<[^>]*>", " ", shown.partition("</style>")[2]))


@pytest.fixture
async def storage() -> AsyncIterator[LatencyStorage]:
    """Return a storage that counts requests."""
    async with open_storage(memory_url()) as plain:
        yield LatencyStorage(plain, seconds=0)


async def fill(repository: Repository) -> None:
    """Commit an array and a group, tag them, and change two chunks in a second commit."""
    session = await repository.writable_session("main")
    await write(session, "zarr.json", group_document())
    await write(session, "inner/zarr.json", group_document())
    await make_array(session, "rain", (10, 4), (1, 4))
    await write(session, "rain/c/0/0", b"\x00" * 4)
    await repository.create_tag("v1", await session.commit("first\nwith a second line"))
    session = await repository.writable_session("main")
    await write(session, "rain/c/1/0", b"\x01" * 4)
    await write(session, "rain/c/2/0", b"\x01" * 4)
    await session.commit("second")
    await repository.create_branch("dev", await repository.lookup_tag("v1"))


@pytest.mark.parametrize("spec", [2], indirect=True)
async def test_an_open_repository_shows_refs_and_commits_without_a_request(
    storage: LatencyStorage, spec: int
) -> None:
    """In format 2, which has them in memory; branches and tags with dates and messages."""
    async with Repository.create(storage, spec_version=spec) as repository:
        await fill(repository)
        storage.forget()
        text, card = repr(repository), checked(repository._repr_html_())
        assert not storage.log
        tip = str(await repository.lookup_branch("main"))
    for shown in (text, card):
        assert storage.description.url in shown
        for words in ("main", "dev", "v1", tip, "first", "second", "summary()"):
            assert words in shown
        assert re.search(DATE, shown)
        assert not MICROSECONDS.search(shown)
        assert "with a second line" not in shown


async def test_a_repository_with_files_for_refs_says_what_to_call(storage: LatencyStorage) -> None:
    """Format 1 keeps no list of refs in memory, and a card does not read one."""
    async with Repository.create(storage, spec_version=1) as repository:
        await fill(repository)
        storage.forget()
        assert "summary()" in repr(repository)
        assert "summary()" in checked(repository._repr_html_())
        assert not storage.log


async def test_a_summary_tells_refs_commits_arrays_and_sizes(
    storage: LatencyStorage, spec: int
) -> None:
    """As fields, as text and as a card; sizes of chunks if asked."""
    async with Repository.create(storage, spec_version=spec) as repository:
        await fill(repository)
        storage.forget()
        found = await repository.summary(measure=True)
        plain = await repository.summary("v1", commits=1)
        tip, first = await repository.lookup_branch("main"), await repository.lookup_tag("v1")
        with pytest.raises(InvalidInputError, match="not -1"):
            await repository.summary(commits=-1)
    assert found.branches == {"main": tip, "dev": first}
    assert found.tags == {"v1": first}
    assert [it.message.split("\n")[0] for it in found.commits[:2]] == ["second", "first"]
    (array,) = found.arrays
    assert (array.path, array.shape, array.grid) == ("/rain", (10, 4), (10, 1))
    assert (array.data_type, array.size_bytes) == ("uint8", 40)
    assert (found.groups, found.chunks, found.array_bytes) == (2, 3, 40)
    assert found.stored_bytes == 16  # three chunks; one is inline in the manifests of two snapshots
    assert (plain.snapshot.id, len(plain.commits), plain.stored_bytes) == (first, 1, None)
    assert len(found.operations) == (5 if spec == 2 else 0)
    for shown in (repr(found), checked(found._repr_html_())):
        for words in ("/rain", "10, 4", "uint8", "40 bytes", "v1", "dev", "second", str(tip)):
            assert words in shown
        assert ("New commit" in shown) == (spec == 2)
        assert not MICROSECONDS.search(shown)


@pytest.mark.parametrize("spec", [2], indirect=True)
async def test_a_summary_costs_two_requests(storage: LatencyStorage, spec: int) -> None:
    """The refs with the history, and the file of the snapshot; however many commits there are."""
    async with Repository.create(storage, spec_version=spec) as repository:
        await fill(repository)
    async with Repository.open(storage) as repository:
        storage.forget()
        await repository.summary()
        assert [key.partition("/")[0] for _, key in storage.log] == ["repo", "snapshots"]


async def test_a_session_shows_its_changes_by_array(filled: Repository) -> None:
    """With counts; one that reads shows its snapshot, and a fork its own changes."""
    session = await filled.writable_session("main")
    await write(session, "a/c/2", b"2")
    await write(session, "a/c/3", b"3")
    await make_array(session, "b", (1,), (1,))
    for shown in (repr(session), checked(session._repr_html_())):
        assert f"writable session on 'main' at {session.snapshot_id}" in shown
        assert "1 new array, 2 chunks of 1 array" in shown
        assert re.search(r"/a +other chunks +2 chunks", shown)
        assert re.search(r"/b +new", shown)
        assert re.search(DATE, shown)
    assert repr(session.store).count("\n") == 0
    session.discard_changes()
    fork = await session.fork()
    assert "nothing changed" in repr(fork)
    reading = await filled.readonly_session("main")
    assert repr(reading).startswith("<readonly session at ")
    assert "Message: filled" in repr(reading)
    assert "filled" in checked(reading._repr_html_())
    session.discard_fork(fork)


@pytest.mark.parametrize("spec", [2], indirect=True)
async def test_snapshots_differences_and_operations_show_dates_and_counts(
    filled: Repository,
) -> None:
    """In one line where they come in lists; microseconds nowhere."""
    tip = await filled.lookup_branch("main")
    info = await filled.lookup_snapshot(tip)
    assert re.fullmatch(
        rf"SnapshotInfo\(id='{tip}', parent_id='\w+', written_at='{DATE}', message='filled'\)",
        repr(info),
    )
    assert "filled" in checked(info._repr_html_())
    root = [it.id async for it in filled.ancestry()][-1]
    diff = await filled.diff(from_snapshot_id=root, to_snapshot_id=tip)
    for shown in (repr(diff), checked(diff._repr_html_())):
        assert "1 new array, 1 new group, 2 chunks of 1 array" in shown
        assert re.search(r"/a +new +2 chunks", shown)
    newest = await anext(filled.ops_log())
    assert re.fullmatch(
        rf"Update\(NewCommit\(branch='main', .*\), updated_at='{DATE}'\)", repr(newest)
    )
    card = checked(newest._repr_html_())
    assert "New commit" in card
    assert f"branch main, to {tip}" in card
    state = filled.engine.history.state
    assert state is not None
    status = state.seen().status
    for shown in (repr(info), repr(newest), card, repr(status)):
        assert not MICROSECONDS.search(shown)


@pytest.mark.parametrize("spec", [2], indirect=True)
async def test_showing_a_damaged_history_does_not_fail(
    filled: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parents form a circle; what can be shown is, and the damage is told."""
    state = filled.engine.history.state
    assert state is not None
    info = state.seen()
    tip = await filled.lookup_branch("main")
    circle = {tip: SnapshotInfo(tip, tip, 0, "its own parent")}
    monkeypatch.setattr(state, "seen", lambda: dataclasses.replace(info, snapshots=circle))
    for shown in (repr(filled), checked(filled._repr_html_())):
        assert "Damaged: " in re.sub(" +", " ", shown)
        assert "circle" in shown


@pytest.mark.parametrize("spec", [2], indirect=True)
async def test_names_of_others_do_no_harm_in_cards(repository: Repository) -> None:
    """Branches, tags, messages, properties, paths, types and axes, in text and in HTML."""
    session = await repository.writable_session("main")
    await write(session, "zarr.json", group_document())
    document = json.loads(array_document((2,), (1,), dimension_names=[BAD]))
    document["data_type"] = {"name": BAD, "configuration": {}}
    await write(session, f"{BAD.replace('/', '')}/zarr.json", json.dumps(document).encode())
    shown: list[Any] = [session, session.status()]
    texts = [(repr(it), it._repr_html_()) for it in shown]
    tip = await session.commit(BAD, {BAD: BAD})
    name = BAD.replace("/", "")
    await repository.create_branch(name, tip)
    await repository.create_tag(f"tag {name}", tip)
    info = await repository.lookup_snapshot(tip)
    summary = await repository.summary()
    operation = await anext(repository.ops_log())
    texts += [(repr(it), it._repr_html_()) for it in (repository, summary, info, operation)]
    for text, card in texts:
        assert all(line.isprintable() for line in text.split("\n"))
        seen = checked(card)
        assert "\x1b" not in card
        assert "\u202e" not in card
        assert "<script>" in seen  # as letters


@pytest.mark.parametrize("spec", [2], indirect=True)
async def test_the_operations_log_shows_itself_as_a_table(filled: Repository) -> None:
    """Newest first, a row for each entry, with dates and words; it is a sequence."""
    await filled.create_tag(f"v{BAD.replace('/', '')}", await filled.lookup_branch("main"))
    await filled.set_status(RepoStatus(RepoAvailability.READ_ONLY, None, f"audit {BAD}"))
    log = await filled.operations()
    assert list(log) == [it async for it in filled.ops_log()]
    assert log.complete
    assert log[-1] == log[len(log) - 1]
    assert not log[:2].complete
    assert log[1:].complete
    for shown in (repr(log), checked(log._repr_html_())):
        assert f"Operations log: {len(log)} entries" in shown
        assert re.search(rf"{DATE} +Tag created +name vx", shown)
        assert re.search(rf"{DATE} +Repo status changed +status read only: audit x", shown)
        assert re.search(rf"{DATE} +New commit +branch main, to \w+", shown)
        assert shown.index("Tag created") < shown.index("New commit") < shown.index("initialized")
        assert not MICROSECONDS.search(shown)
        assert "older ones" not in shown
    assert all(line.isprintable() for line in repr(log).split("\n"))
    assert "\x1b" not in log._repr_html_()
    assert repr(log[:0]).startswith("<Operations log: the newest 0 entries>")


@pytest.mark.parametrize("spec", [2], indirect=True)
async def test_a_long_operations_log_is_cut_and_says_so(filled: Repository) -> None:
    """The card counts what was read and is not shown, and tells that there is more to read."""
    tip = await filled.lookup_branch("main")
    for number in range(60):
        await filled.create_tag(f"v{number:02}", tip)
    log = await filled.operations(limit=55)
    assert (len(log), log.complete) == (55, False)
    for shown in (repr(log), checked(log._repr_html_())):
        assert "the newest 55 entries" in shown
        assert "and 5 more" in shown
        assert "operations(limit=None) reads all" in shown
        assert shown.count("Tag created") == 50
    assert repr(log[50:]).count("Tag created") == 5
    whole = await filled.operations(limit=None)
    assert whole.complete
    assert "and more" not in repr(whole)
    assert f"{len(whole)} entries" in repr(whole)
    for wrong in (0, -1, "3", 2.5):
        with pytest.raises(InvalidInputError, match=f"limit={wrong!r} entries"):
            await filled.operations(limit=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [1], indirect=True)
async def test_format_1_says_that_it_keeps_no_operations_log(filled: Repository) -> None:
    """An error, not an empty table."""
    with pytest.raises(UnsupportedBySpecError, match="version 2"):
        await filled.operations()


@pytest.mark.parametrize("spec", [2], indirect=True)
async def test_the_operations_log_costs_one_request_for_each_file_of_it(
    storage: LatencyStorage, spec: int
) -> None:
    """The newest entries are in the repo info object; older ones are read only if asked for."""
    config = RepositoryConfig(num_updates_per_repo_info_file=5)
    async with Repository.create(storage, spec_version=spec, config=config) as repository:
        await fill(repository)
        tip = await repository.lookup_branch("main")
        for number in range(8):
            await repository.create_tag(f"more{number}", tip)
        storage.forget()
        assert not (await repository.operations(limit=4)).complete
        assert [key.partition("/")[0] for _, key in storage.log] == ["repo"]
        storage.forget()
        assert (await repository.operations(limit=None)).complete
        assert {key.partition("/")[0] for _, key in storage.log} == {"repo", "overwritten"}


async def test_long_lists_are_cut_and_say_so(filled: Repository) -> None:
    """Twenty rows of changes, ten of refs."""
    tip = await filled.lookup_branch("main")
    for number in range(12):
        await filled.create_tag(f"v{number:02}", tip)
    session = await filled.writable_session("main")
    for number in range(25):
        await write(session, f"g{number}/zarr.json", group_document())
    assert "... and 5 more" in repr(session)
    assert "and 5 more" in checked(session._repr_html_())
    assert "and 2 more" in repr(await filled.summary())
    session.discard_changes()


def test_the_facade_shows_the_same_cards() -> None:
    """One renderer draws both; the rows of the official package come first or last."""
    with sync.Repository.create(memory_url()) as repository:
        session = repository.writable_session("main")
        group = sync.snapshots.Diff(new_groups={"/g"}, updated_chunks={"/a": [[0], [1]]})
        card = checked(group._repr_html_())
        assert re.search(r"/a +other chunks +2 chunks", card)
        tip = repository.lookup_branch("main")
        card = checked(repository._repr_html_())
        for words in ("icechunk_async.sync.Repository (v2)", "Branches", tip, "storage"):
            assert words in card
        card = checked(session._repr_html_())
        assert "has_uncommitted_changes: False" in re.sub(" +", " ", card)
        assert "Uncommitted: nothing changed" in re.sub(" +", " ", card)
        assert repository.summary().branches.keys() == {"main"}
        log = repository.operations(limit=1)
        assert list(log) == [next(repository.ops_log())]
        assert log[0].updated_at.tzinfo is not None
        for shown in (repr(log), checked(log._repr_html_())):
            assert re.search(rf"{DATE} +Repo initialized", shown)
        info = next(repository.ancestry(branch="main"))
        assert "Repository initialized" in checked(info._repr_html_())


def test_cards_fold_values_and_count_rows() -> None:
    """A value that is a card is folded away; a table tells how many rows are left out."""
    inner = Card("inner", [("a", 1)])
    table = Table("Things", ("Name", "Size"), [("one", 1)], total=3)
    card = Card("outer", [("first", inner), ("second", "x\ny")], [table], "a note")
    assert card.text() == (
        "<outer>\nfirst:\n    a: 1\nsecond: x\ny\nThings:\n    one  1\n    ... and 2 more\n(a note)"
    )
    assert "and 2 more" in checked(card.html())
    assert dataclasses.replace(card, tables=[], note="").html().count("<details>") == 1


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1500, "1.5 kB"), (263_456, "263 kB"),
     (999_999, "1 MB"), (10**18, "1 EB"), (10**22, "10,000 EB")],
)  # fmt: skip
def test_sizes_are_in_units_that_people_read(size: int, text: str) -> None:
    """Three digits."""
    assert byte_size(size) == text
