"""Proposals: what is checked is what is published, and what is refused publishes nothing."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

import anyio
import anyio.to_thread
import numpy as np
import pytest
import zarr.api.asynchronous as zarr

from icechunk_async import Repository
from icechunk_async.config import RepositoryConfig
from icechunk_async.engine.proposals.files import append, load, load_all, newest_numbers, record_key
from icechunk_async.engine.upkeep.own_files import delete_ended
from icechunk_async.errors import (
    ChecksFailedError,
    ConflictError,
    FormatError,
    InvalidInputError,
    MergeConflictError,
    NotFoundError,
    NothingToCommitError,
    PermissionDeniedError,
    ProposalNotFoundError,
    ProposalStateError,
    UnsupportedBySpecError,
)
from icechunk_async.format.layout import PROPOSALS, proposal_prefix, snapshot_key
from icechunk_async.proposals import Check, ProposalState
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import memory_url, objects, read, write
from tests.unit.engine.proposals.places import Counting, begin, commit, contents

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.proposals import Proposal
    from icechunk_async.session import Session
    from icechunk_async.storage import Data, Expected, RangeRequest, Retrieved, Version

NO_INLINE = RepositoryConfig(inline_chunk_threshold_bytes=0)


async def proposed(repository: Repository, *checks: Any, **more: Any) -> Proposal:
    """Propose chunk 1 from a branch ``side``."""
    await begin(repository, "side")
    await commit(repository, "side", c1=1)
    return await repository.propose("side", checks=checks, **more)


async def test_the_very_snapshot_that_was_checked_is_published(repository: Repository) -> None:
    """No commit is made when it is accepted, and readers of the branch see nothing before."""
    check = Counting()
    proposal = await proposed(repository, check, title="chunk one", metadata={"who": "ops"})
    base = await repository.lookup_branch("main")
    assert proposal.candidate.target_id == base
    assert proposal.passed
    assert check.seen == [proposal.candidate.snapshot_id]
    assert await contents(await repository.readonly_session("main")) == {}
    assert await contents(await proposal.session()) == {1: 1}

    published = await proposal.accept()

    assert published == proposal.candidate.snapshot_id == await repository.lookup_branch("main")
    assert check.seen == [published]  # it passed on this state already
    assert await contents(await repository.readonly_session("main")) == {1: 1}
    info = await repository.lookup_snapshot(published)
    assert (info.parent_id, info.message) == (base, "chunk one")
    assert info.metadata["who"] == "ops"
    own: Any = info.metadata["icechunk-async"]
    assert own == {"merged": [str(proposal.source_id)], "proposal": str(proposal.id)}
    again = await repository.proposal(str(proposal.id))
    assert again.state is ProposalState.ACCEPTED
    assert await repository.merge("side", dry_run=True) is not None
    assert (await repository.merge("side")).snapshot_id is None  # it knows that it was merged


@pytest.mark.parametrize(
    ("said", "match"), [("too cold", r"'counting' failed \(too cold\)"), (None, None)]
)
async def test_a_failed_check_publishes_nothing(
    repository: Repository, said: str | None, match: str | None
) -> None:
    """Until it passes on that state, by running it again."""
    check = Counting(said)
    proposal = await proposed(repository, check)
    base = await repository.lookup_branch("main")
    if match is not None:
        with pytest.raises(ChecksFailedError, match=match) as caught:
            await proposal.accept()
        assert caught.value.context["checks"] == ["counting"]
        assert await repository.lookup_branch("main") == base
        assert len(check.seen) == 1
        check.said = None
        (result,) = await proposal.run_checks()
        assert result.passed
    assert await proposal.accept() == await repository.lookup_branch("main") != base


async def raises(session: Session, proposal: Proposal) -> str | None:
    """Fail."""
    raise RuntimeError(f"no\x1b[31m {proposal.id} {session.snapshot_id}")


async def hangs(session: Session, proposal: Proposal) -> str | None:
    """Never end."""
    await anyio.sleep_forever()
    return None


async def exits(session: Session, proposal: Proposal) -> Never:
    """End the process."""
    sys.exit(3)


async def cancels(session: Session, proposal: Proposal) -> None:
    """Wait for something that was cancelled."""
    waiting = asyncio.create_task(anyio.sleep_forever())
    waiting.cancel()
    await waiting


class UnspeakableError(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError


async def unspeakable(session: Session, proposal: Proposal) -> Never:
    """Raise it."""
    raise UnspeakableError


async def odd(session: Session, proposal: Proposal) -> Any:
    """Return nonsense."""
    return 7


def blocking(session: Session, proposal: Proposal) -> Any:
    """Be no async function."""


@pytest.mark.parametrize(
    ("check", "outcome", "detail"),
    [
        (raises, "error", "RuntimeError: no"),
        (Check("hangs", hangs, timeout_seconds=0.01), "timed out", "stopped after 0.01 s"),
        (odd, "error", "returned int"),
        (exits, "error", "SystemExit: 3"),
        (cancels, "error", "CancelledError"),
        (unspeakable, "error", "UnspeakableError, which cannot be shown"),
        (blocking, "error", "no async function"),
        (Check("gone", ["/nowhere/to/be/found"]), "error", "FileNotFoundError"),
        (
            Check("says", ["sh", "-c", "echo on $ICECHUNK_ASYNC_BRANCH; exit 3"]),
            "failed",
            "on main",
        ),
        (Check("slow", ["sh", "-c", "sleep 60 & wait"], timeout_seconds=0.2), "timed out", "0.2 s"),
    ],
    ids=lambda it: getattr(it, "name", getattr(it, "__name__", None)),
)
async def test_whatever_a_check_does_is_a_result(check: Any, outcome: str, detail: str) -> None:
    """And nothing of it is published."""
    async with Repository.create(memory_url()) as repository:
        proposal = await proposed(repository, check)
        (result,) = proposal.results
        assert result.outcome == outcome
        assert detail in result.detail
        assert 0 <= result.seconds < 30
        with pytest.raises(ChecksFailedError):
            await proposal.accept()
        assert await contents(await repository.readonly_session("main")) == {}


def wait_for_end(process: Path) -> None:
    """Wait until a process is killed; that nobody waits for it does not matter."""
    late = time.monotonic() + 240
    while process.exists() and "State:\tZ" not in (process / "status").read_text("utf-8"):
        assert time.monotonic() < late
        time.sleep(0.01)


async def test_what_a_command_leaves_running_is_killed(tmp_path: Path) -> None:
    """Also if it ended itself: its output has not ended, so it takes until the time is over."""
    for seconds in (0.5, 5, 30):  # on a busy machine the first may pass before the command's start
        note = tmp_path / f"pid {seconds}"
        command = ["sh", "-c", f"sleep 600 & echo $! > '{note}.new'; mv '{note}.new' '{note}'"]
        async with Repository.create(memory_url()) as repository:
            check = Check("leaves", command, timeout_seconds=seconds)
            proposal = await proposed(repository, check)
            assert proposal.results[0].outcome == "timed out"
        if note.exists():
            break
    await anyio.to_thread.run_sync(wait_for_end, Path("/proc", note.read_text("utf-8").strip()))


async def test_a_command_reads_the_merged_state(tmp_path: Any) -> None:
    """In another process, from what its environment says."""
    program = (
        "import asyncio, os\n"
        "from icechunk_async import Repository\n"
        "async def main():\n"
        "    async with Repository.open(os.environ['ICECHUNK_ASYNC_URL']) as it:\n"
        "        await it.readonly_session(snapshot_id=os.environ['ICECHUNK_ASYNC_SNAPSHOT'])\n"
        "    print('read', os.environ['ICECHUNK_ASYNC_SNAPSHOT'])\n"
        "asyncio.run(main())\n"
    )
    async with Repository.create(f"{tmp_path}/repository") as repository:
        proposal = await proposed(repository, Check("audit", ["python", "-c", program]))
        (result,) = proposal.results
        assert result.outcome == "passed", result.detail
        assert result.detail == f"read {proposal.candidate.snapshot_id}"


async def test_a_branch_that_moved_is_merged_and_checked_anew(repository: Repository) -> None:
    """Or refused, as asked."""
    check = Counting()
    proposal = await proposed(repository, check)
    first = proposal.candidate
    await commit(repository, "main", c2=2)
    with pytest.raises(ConflictError, match="when_moved='retry'"):
        await proposal.accept(when_moved="refuse")
    assert await contents(await repository.readonly_session("main")) == {2: 2}
    published = await proposal.accept()
    assert published not in {first.snapshot_id, None}
    assert check.seen == [first.snapshot_id, published]
    assert await contents(await repository.readonly_session("main")) == {1: 1, 2: 2}


async def test_a_check_that_fails_on_the_new_state_publishes_nothing(
    repository: Repository,
) -> None:
    """Though it passed on the one that was proposed."""

    async def few(session: Session, proposal: Proposal) -> str | None:
        del proposal
        return None if len(await contents(session)) < 2 else "too many chunks"

    proposal = await proposed(repository, few)
    assert proposal.passed
    tip = await commit(repository, "main", c2=2)
    with pytest.raises(ChecksFailedError, match="too many chunks"):
        await proposal.accept()
    assert await repository.lookup_branch("main") == tip


async def test_another_process_passes_its_own_checks(repository: Repository) -> None:
    """Commands and functions are never taken from the storage."""
    proposal = await proposed(repository, Counting())
    opened = await repository.proposal(proposal.id)
    with pytest.raises(InvalidInputError, match="never read from the storage"):
        await opened.run_checks()
    await commit(repository, "main", c2=2)
    with pytest.raises(ChecksFailedError, match="'counting' was not run; pass it as checks="):
        await opened.accept()
    other = Counting("no")
    with pytest.raises(ChecksFailedError, match="failed"):
        await opened.accept(checks=[other])
    mine = Counting()
    assert await opened.accept(checks=[mine]) == mine.seen[-1]


async def test_a_source_that_moved_or_is_gone_is_refused(repository: Repository) -> None:
    """A refresh proposes what it is now."""
    check = Counting()
    proposal = await proposed(repository, check)
    base = await repository.lookup_branch("main")
    await commit(repository, "side", c3=3)
    with pytest.raises(ProposalStateError, match=r"which was reviewed, and it is at .* now"):
        await proposal.accept()
    await proposal.refresh()
    assert proposal.results[0].passed
    await repository.delete_branch("side")
    with pytest.raises(ProposalStateError, match="'side', which was deleted") as caught:
        await proposal.accept()
    assert await repository.lookup_branch("main") == base
    assert str(caught.value).count(".") == 1 or "nothing was published" in str(caught.value)
    await repository.create_branch("side", proposal.source_id)
    await proposal.accept()
    assert await contents(await repository.readonly_session("main")) == {1: 1, 3: 3}


async def test_accepting_and_closing_happen_once(repository: Repository) -> None:
    """One sentence each."""
    proposal = await proposed(repository)
    await proposal.accept()
    tip = await repository.lookup_branch("main")
    for again in (proposal.accept, proposal.close, proposal.refresh):
        with pytest.raises(ProposalStateError, match="was accepted already, as snapshot"):
            await again()
    await commit(repository, "side", c4=4)
    other = await repository.propose("side")
    await other.close("not now")
    assert [it.id for it in await repository.proposals()] == []
    assert [it.id for it in await repository.proposals(include_ended=True)] == [
        proposal.id,
        other.id,
    ]
    with pytest.raises(ProposalStateError, match=r"was closed \(not now\)"):
        await (await repository.proposal(other.id)).accept()
    assert await repository.lookup_branch("main") == tip


async def test_what_cannot_be_proposed_leaves_nothing(repository: Repository) -> None:
    """Neither a record nor a snapshot."""
    await begin(repository, "side", "clash")
    with pytest.raises(NothingToCommitError, match="has all changes of 'side' already"):
        await repository.propose("side")
    await commit(repository, "clash", c1=1)
    await commit(repository, "main", c1=2)
    before = await objects(repository.storage)
    twice = [Counting(), Counting()]
    wrong: list[tuple[type[Exception], Callable[[], Any]]] = [
        (MergeConflictError, lambda: repository.propose("clash")),
        (NotFoundError, lambda: repository.propose("nowhere")),
        (NotFoundError, lambda: repository.propose("clash", into="nowhere")),
        (InvalidInputError, lambda: repository.propose("main")),
        (InvalidInputError, lambda: repository.propose("clash", title="x" * 501)),
        (InvalidInputError, lambda: repository.propose("clash", title="two\nlines")),
        (InvalidInputError, lambda: repository.propose("clash", message="x" * 20_001)),
        (InvalidInputError, lambda: repository.propose("clash", checks=twice)),
        (InvalidInputError, lambda: repository.propose("clash", checks=["pytest"])),  # type: ignore[list-item]
        (InvalidInputError, lambda: repository.propose("clash", metadata={"a": object()})),  # type: ignore[dict-item]
        (InvalidInputError, lambda: repository.propose("clash", compare_chunks=-1)),
    ]
    for kind, ask in wrong:
        with pytest.raises(kind):
            await ask()
    assert await objects(repository.storage) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: Check("", Counting()),
        lambda: Check("x" * 201, Counting()),
        lambda: Check("x", "pytest"),
        lambda: Check("x", []),
        lambda: Check("x", ["a", 1]),  # type: ignore[list-item]
        lambda: Check("x", Counting(), timeout_seconds=0),
        lambda: Check("x", Counting(), timeout_seconds=float("inf")),
    ],
)
def test_checks_that_make_no_sense_are_refused(make: Callable[[], Check]) -> None:
    """When they are made."""
    with pytest.raises(InvalidInputError):
        make()


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda _: b"{}",
        lambda _: b"[" * 100_000,
        lambda it: it[:-20],
        lambda it: it.replace(b'"state": "open"', b'"state": "merged"'),
        lambda it: it.replace(b'"version": 1', b'"version": 2'),
        lambda it: it.replace(b'"more_nodes": 0', b'"more_nodes": -1'),
        lambda it: it.replace(b'"number": 0', b'"number": 1'),
        lambda it: it.replace(b'"title": "', b'"title": "' + b"x" * 600),
        lambda it: it.replace(b'"candidate": {"snapshot": "', b'"candidate": {"snapshot": "!'),
        lambda _: b" " * (17 << 20),
    ],
)
async def test_a_damaged_record_is_one_sentence(
    repository: Repository, damage: Callable[[bytes], bytes]
) -> None:
    """Others are listed, and collection works."""
    proposal = await proposed(repository)
    await commit(repository, "side", c5=5)
    other = await repository.propose("side")
    base = await repository.lookup_branch("main")
    key = record_key(proposal.id, 0)
    data = bytes((await repository.storage.get(key)).data)
    assert damage(data) != data
    await repository.storage.put(key, damage(data))
    with pytest.raises(FormatError):
        await repository.proposal(proposal.id)
    with pytest.raises(FormatError):
        await proposal.accept()
    assert [it.id for it in await repository.proposals()] == [other.id]
    (found,) = (await repository.verify("structure")).findings
    assert (found.kind, found.location, found.problem) == ("proposal", key, "unreadable")
    assert str(proposal.id) in found.detail
    assert (await repository.verify("structure", refs=["main"])).findings == ()
    await repository.garbage_collect(datetime.now(UTC))
    assert await repository.lookup_branch("main") == base


async def test_a_stored_command_is_never_run(repository: Repository, tmp_path: Any) -> None:
    """A record may say what it wants."""
    proposal = await proposed(repository, Check("touch", ["touch", str(tmp_path / "ran")]))
    (tmp_path / "ran").unlink()
    key = record_key(proposal.id, (await newest_numbers(repository.storage))[proposal.id])
    document = json.loads(bytes((await repository.storage.get(key)).data))
    document["candidate"]["results"] = []
    document["checks"] = [["touch", str(tmp_path / "ran")]]
    await repository.storage.put(key, json.dumps(document).encode())
    with pytest.raises(FormatError, match="unusable checks"):
        await repository.proposal(proposal.id)
    document["checks"] = ["touch"]
    await repository.storage.put(key, json.dumps(document).encode())
    with pytest.raises(ChecksFailedError):
        await (await repository.proposal(proposal.id)).accept()
    assert not (tmp_path / "ran").exists()


async def test_missing_proposals_and_text_that_is_no_id_are_refused(repository: Repository) -> None:
    """And text that is no id."""
    await begin(repository)
    with pytest.raises(ProposalNotFoundError, match="no proposal 0000000000000000000"):
        await repository.proposal("00000000000000000000")
    with pytest.raises(InvalidInputError, match="ProposalId"):
        await repository.proposal("../../etc")
    assert await repository.proposals() == []


async def test_collection_keeps_what_open_proposals_need(repository: Repository) -> None:
    """And deletes proposals that ended before the cutoff, and their candidates."""
    proposal = await proposed(repository, Counting())
    candidate = snapshot_key(proposal.candidate.snapshot_id)
    later = datetime.now(UTC)
    await repository.expire_snapshots(later)
    report = await repository.garbage_collect(later)
    assert report.proposal_files_deleted == 0
    assert candidate in await objects(repository.storage)
    await proposal.close()
    early = await repository.garbage_collect(later - timedelta(hours=1))
    assert early.proposal_files_deleted == 0
    dry = await repository.garbage_collect(datetime.now(UTC), dry_run=True)
    assert dry.proposal_files_deleted > 0
    done = await repository.garbage_collect(datetime.now(UTC))
    assert done.proposal_files_deleted == dry.proposal_files_deleted
    left = await objects(repository.storage)
    assert candidate not in left
    assert not [it for it in left if it.startswith(PROPOSALS)]


async def test_two_collections_at_once_delete_proposals_that_ended(repository: Repository) -> None:
    """One has listed a proposal when the other deletes it."""
    proposal = await proposed(repository)
    await proposal.close()

    class Late(WrappedStorage):
        async def before(self, operation: str, key: str) -> None:
            if operation == "list_prefix" and key == proposal_prefix(proposal.id):
                done = await delete_ended(self.wrapped, datetime.now(UTC), dry_run=False)
                assert done.count > 0

    tally = await delete_ended(Late(repository.storage), datetime.now(UTC), dry_run=False)
    assert (tally.count, tally.failures) == (0, [])


async def test_a_candidate_that_was_collected_is_made_anew(repository: Repository) -> None:
    """Other engines do not know what proposals need."""
    check = Counting()
    proposal = await proposed(repository, check)
    await repository.storage.delete([snapshot_key(proposal.candidate.snapshot_id)])
    async with Repository.open(repository.storage.description.url) as other:
        opened = await other.proposal(proposal.id)
        published = await opened.accept(checks=[check])
    assert check.seen[-1] == published != proposal.candidate.snapshot_id
    assert await contents(await repository.readonly_session("main")) == {1: 1}


async def test_a_huge_record_is_not_read(repository: Repository) -> None:
    """The listing shows that it is too large."""
    proposal = await proposed(repository)
    await repository.storage.put(record_key(proposal.id, 1), bytes(40 << 20))

    class Unread(WrappedStorage):
        async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
            raise AssertionError(f"{key} was read")

    storage = Unread(repository.storage)
    with pytest.raises(FormatError, match="has 41943040 bytes, and at most 16777216"):
        await load(storage, proposal.id)
    assert await load_all(storage) != ([], {})


async def test_a_candidate_that_does_not_follow_the_branch_is_made_anew(
    repository: Repository,
) -> None:
    """A record that names another snapshot would drop commits of the branch, or publish nothing."""
    proposal = await proposed(repository)
    await commit(repository, "main", c9=9)
    await proposal.refresh()
    tip = await repository.lookup_branch("main")
    for wrong in (proposal.source_id, tip):  # a sibling, and the tip itself
        await proposal.reload()
        candidate = replace(proposal.candidate, snapshot_id=wrong)
        assert await append(repository.storage, proposal._record, candidate=candidate) is not None
    published = await (await repository.proposal(proposal.id)).accept()
    assert (await repository.lookup_snapshot(published)).parent_id == tip
    assert (await contents(await repository.readonly_session("main")))[9] == 9


async def test_accepting_that_cannot_go_on_leaves_an_open_proposal(repository: Repository) -> None:
    """A process was killed before it moved the branch, and the branch moved since."""
    proposal = await proposed(repository)
    record = (await repository.proposal(proposal.id))._record
    assert await append(repository.storage, record, state=ProposalState.ACCEPTING) is not None
    await commit(repository, "main", c7=7)
    with pytest.raises(ConflictError, match="nothing was published"):
        await proposal.accept(when_moved="refuse")
    assert (await repository.proposal(proposal.id)).state is ProposalState.OPEN


@pytest.mark.parametrize("first", [PermissionDeniedError("no (on purpose)"), None])
async def test_what_was_published_is_returned_whatever_comes_then(
    repository: Repository, first: Exception | None
) -> None:
    """The state that says so cannot be stored, or another process stores one before."""
    proposal_id = (await proposed(repository)).id

    class Late(WrappedStorage):
        moved = False

        async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
            if key.startswith(PROPOSALS) and key.endswith(".json") and self.moved:
                if first is not None:
                    raise first
                self.moved = False  # once
                record = (await repository.proposal(proposal_id))._record
                await append(repository.storage, record, state=ProposalState.ACCEPTING)
            version = await self.wrapped.put(key, data, if_version=if_version)
            self.moved |= not key.startswith(PROPOSALS)
            return version

    async with Repository.open(Late(repository.storage)) as other:
        accepting = await other.proposal(proposal_id)
        published = await accepting.accept()
        assert accepting.state is ProposalState.ACCEPTED
    assert await repository.lookup_branch("main") == published
    again = await repository.proposal(proposal_id)
    if first is None:
        assert again.state is ProposalState.ACCEPTED
    else:
        assert await again.accept() == published


async def test_damage_can_be_mended_by_a_proposal() -> None:
    """Chunks of the branch that are lost, or that no codec reads: the review says so."""
    for damage in (None, b"\xff" * 9):
        async with Repository.create(memory_url(), config=NO_INLINE) as repository:
            session = await repository.writable_session("main")
            await zarr.create_array(
                session.store, name="x", data=np.arange(400.0), chunks=(100,), fill_value=-1
            )
            base = await session.commit("base")
            await repository.create_branch("mend", base)
            for key in [it for it in await objects(repository.storage) if it.startswith("chunks/")]:
                if damage is None:
                    await repository.storage.delete([key])
                else:
                    await repository.storage.put(key, damage)
            session = await repository.writable_session("mend")
            array = await zarr.open_array(store=session.store, path="x")
            await array.setitem(..., np.ones(400))
            await session.commit("mended")
            proposal = await repository.propose("mend")
            (review,) = proposal.review.arrays
            assert review.changed == 4
            assert "not compared" in review.note
            await proposal.accept()


async def test_closing_while_it_is_accepted_waits_for_the_outcome(repository: Repository) -> None:
    """A process said that it is about to accept it, and was killed."""
    proposal = await proposed(repository)
    storage = repository.storage
    record = (await repository.proposal(proposal.id))._record
    assert await append(storage, record, state=ProposalState.ACCEPTING) is not None
    with pytest.raises(ProposalStateError, match="is being accepted"):
        await proposal.close()
    await commit(repository, "main", c7=7)  # then it cannot land any more
    await proposal.close()
    assert proposal.state is ProposalState.CLOSED
    assert await append(storage, record, state=ProposalState.ACCEPTING) is None


async def test_copies_leave_proposals_behind(repository: Repository) -> None:
    """They are about one place."""
    await proposed(repository)
    target = memory_url()
    await repository.copy_to(target)
    async with Repository.open(target) as copy:
        assert await copy.proposals() == []


@pytest.mark.parametrize("layout", ["alpha", "first-draft"])
async def test_layouts_before_version_1_have_no_proposals(layout: str) -> None:
    """And say so."""
    async with Repository.create(memory_url(), layout=layout, probe=False) as repository:
        with pytest.raises(UnsupportedBySpecError, match="has no proposals"):
            await repository.propose("main")
        with pytest.raises(UnsupportedBySpecError, match="has no protection of branches"):
            await repository.protect_branch()
        assert await repository.protected_branches() == {}


async def test_numbered_states_have_proposals() -> None:
    """Records are only ever created."""
    async with Repository.create(memory_url(), layout="format-2-numbered") as repository:
        proposal = await proposed(repository, Counting())
        assert await proposal.accept() == await repository.lookup_branch("main")


async def test_the_review_says_what_changes(repository: Repository) -> None:
    """Nodes, keys of metadata, chunks, and values with a map."""
    await begin(repository, "side")
    await commit(repository, "main", c1=1)
    await repository.reset_branch("side", await repository.lookup_branch("main"))
    session = await repository.writable_session("side")
    await write(session, "a/c/1", b"\x05")
    await write(session, "a/c/2", b"\x03")
    await write(session, "g/zarr.json", b'{"zarr_format": 3, "node_type": "group"}')
    await session.commit("more")
    review = (await repository.propose("side")).review
    assert [(it.kind, it.path) for it in review.nodes] == [("created", "/g")]
    (array,) = review.arrays
    assert (array.path, array.added, array.changed, array.removed) == ("/a", 1, 1, 0)
    assert (array.cells, array.changed_cells) == (40, 2)
    assert (array.min_change, array.mean_change, array.max_change) == (3, 3.5, 4)
    assert [(it.index, it.before, it.after) for it in array.first] == [
        ((1,), "1", "5"),
        ((2,), "0", "3"),
    ]
    assert array.values is not None
    assert array.values.values[1:3] == (4.0, 3.0)
    few = (await repository.propose("side", compare_chunks=1)).review.arrays[0]
    assert few.cells is None
    assert "Values were not compared: 2 chunks changed" in few.note


@pytest.mark.parametrize("attributes", [[1], "x"])
async def test_attributes_that_are_no_object_are_reviewed_as_one_value(
    repository: Repository, attributes: Any
) -> None:
    """Zarr does not allow them, and a store takes them."""
    await begin(repository, "side")
    session = await repository.writable_session("side")
    document = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    await write(session, "zarr.json", json.dumps(document).encode())
    await session.commit("odd")
    (node,) = (await repository.propose("side")).review.nodes
    assert [(it.key, it.after) for it in node.keys] == [("attributes", json.dumps(attributes))]


@pytest.mark.parametrize("document", [b"{", b"[]", b"[" * 100_000])
async def test_the_mending_of_a_damaged_document_can_be_proposed(
    repository: Repository, document: bytes
) -> None:
    """Another writer may have stored any bytes, and the review says which."""
    base = await begin(repository)
    session = await repository.writable_session("main")
    session.workspace.tree.set_node("/", document, None)
    await session.commit("damaged")
    await repository.create_branch("side", await repository.lookup_branch("main"))
    session = await repository.writable_session("side")
    before = await repository.readonly_session(snapshot_id=base)
    await write(session, "zarr.json", await read(before, "zarr.json") or b"")
    await session.commit("mended")
    (node,) = (await repository.propose("side")).review.nodes
    damaged, *keys = node.keys
    assert damaged.before is not None
    assert damaged.before.startswith(f"damaged: {document[:50]!r}"[:-1])
    assert (damaged.key, damaged.after) == ("zarr.json", None)
    assert {it.key for it in keys} >= {"node_type", "zarr_format"}


async def test_the_past_of_a_branch_has_no_state_that_was_not_visible() -> None:
    """Between the proposal and its acceptance the branch was at its old tip."""
    async with Repository.create(memory_url()) as repository:
        proposal = await proposed(repository)
        base = await repository.lookup_branch("main")
        between = datetime.now(UTC)
        assert (
            await repository.lookup_snapshot(proposal.candidate.snapshot_id)
        ).written_at < between
        published = await proposal.accept()
        then = await repository.readonly_session("main", as_of=between)
        assert then.snapshot_id == base
        now = await repository.readonly_session("main", as_of=datetime.now(UTC))
        assert now.snapshot_id == published


async def test_accepting_what_was_checked_takes_few_requests() -> None:
    """No chunk, manifest or snapshot is written: two records, their pages, and the branch."""
    url = memory_url()
    async with Repository.create(url) as repository:
        proposal_id = (await proposed(repository, Counting())).id
    async with open_storage(url) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.open(storage) as repository:
            proposal = await repository.proposal(proposal_id)
            storage.forget()
            await proposal.accept()
            assert storage.requests == {
                "list_prefix": 1,  # the proposal's records
                "get": 2,  # the newest one, and the candidate, which may be gone
                "get_if_changed": 5,  # branches, tags, tip, needed checks, before the move
                "put": 5,  # two records and pages, and the branch
                "copy": 1,  # its backup
            }
