"""Sessions whose base expired while they were open."""

from __future__ import annotations

import pytest

from icechunk_async import ForkSession, Repository
from icechunk_async.conflicts import BasicConflictSolver, ConflictDetector, VersionSelection
from icechunk_async.engine.commit.once import Transaction
from icechunk_async.errors import (
    ConflictError,
    FormatError,
    RebaseFailedError,
    SessionStateError,
    SnapshotNotFoundError,
)
from tests.helpers import memory_url, read, write
from tests.unit.engine.upkeep.upkeep_tools import CHUNK, commit, littered, now, read_all

DETECTOR = ConflictDetector()
KEPT = "kept_snapshot_id"


async def _expired(repository: Repository) -> None:
    """Let three commits follow, and expire all but the last."""
    for number in (50, 51, 52):
        await commit(repository, number, f"after {number}")
    await repository.expire_snapshots(now())
    await commit(repository, 53, "after it expired")


@pytest.mark.parametrize("expirations", [1, 2])
async def test_it_commits_over_the_gap(expirations: int) -> None:
    """Format 2 remembers what was touched; also if what remembers it expires in turn."""
    url, _ = await littered(2)
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/60", CHUNK)
        for _ in range(expirations):
            await _expired(repository)
        base = session.snapshot_id
        tip = await session.commit("late", rebase_with=DETECTOR)
        assert base not in [it.id async for it in repository.ancestry(branch="main")]
        reader = await repository.readonly_session("main")
        assert reader.snapshot_id == tip
        assert await read(reader, "a/c/60") == CHUNK
        assert await read(reader, "a/c/51") is not None
    await read_all(url)


async def _collected(url: str) -> None:
    """Expire the base, and delete its files, from another process."""
    async with Repository.open(url) as other:
        await _expired(other)
        assert (await other.garbage_collect(now())).manifests_deleted > 0


async def test_it_commits_over_the_gap_when_its_base_was_collected() -> None:
    """Neither the base's snapshot nor its manifests are needed: they are not called damaged."""
    url, _ = await littered(2)
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/60", b"inline")
        await _collected(url)
        with pytest.raises(ConflictError, match="another writer was first"):
            await session.commit("late")
        await session.commit("late", rebase_with=DETECTOR)
        reader = await repository.readonly_session("main")
        assert await read(reader, "a/c/60") == b"inline"
        assert await read(reader, "a/c/51") is not None
    await read_all(url)


async def test_without_its_base_a_session_is_told_what_became_of_it(spec: int) -> None:
    """Nothing is flushed or forked, and format 1 cannot commit; the repository is not damaged."""
    url, _ = await littered(spec)
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/60", b"inline")
        await _collected(url)
        base = session.snapshot_id
        with pytest.raises(SnapshotNotFoundError, match=f"{base}.*may have expired"):
            await session.fork()
        with pytest.raises(SnapshotNotFoundError, match=f"{base}.*may have expired"):
            await session.flush("late")
        if spec == 1:
            with pytest.raises(ConflictError, match="Format version 1 does not record") as refused:
                await session.commit("late", rebase_with=DETECTOR)
            assert KEPT not in refused.value.context  # a snapshot would need manifests of the base
        assert session.has_uncommitted_changes
        assert await read(session, "a/c/60") == b"inline"


async def test_a_manifest_that_is_missing_from_a_base_in_place_is_damage(spec: int) -> None:
    """This is no race: committing again would not help."""
    url, _ = await littered(spec)
    async with Repository.open(url) as repository:
        (manifest,) = await repository.list_manifest_files(await repository.lookup_branch("main"))
        await repository.storage.delete([f"manifests/{manifest.id}"])
        session = await repository.writable_session("main")
        await write(session, "a/c/60", b"inline")
        with pytest.raises(FormatError, match="damaged"):
            await session.commit("refused", rebase_with=DETECTOR)


async def test_a_manifest_that_only_an_old_base_needed_may_be_missing(spec: int) -> None:
    """A collection keeps a young snapshot that no branch holds, and not its older manifests."""
    url, _ = await littered(spec)
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/60", b"inline")
        (manifest,) = await repository.list_manifest_files(session.snapshot_id)
        async with Repository.open(url) as other:
            await commit(other, 50, "newer")
            await other.storage.delete([f"manifests/{manifest.id}"])
        with pytest.raises(ConflictError, match="another writer was first"):
            await session.commit("late")
        await session.commit("late", rebase_with=DETECTOR)
        reader = await repository.readonly_session("main")
        assert await read(reader, "a/c/60") == b"inline"
        assert await read(reader, "a/c/50") is not None


@pytest.mark.parametrize(("chunk", "clashes"), [(3, False), (50, True), (52, True), (53, True)])
async def test_conflicts_in_the_gap_are_those_after_the_base(chunk: int, *, clashes: bool) -> None:
    """Commits that expired before the session began do not count, though the log has them, too."""
    url, _ = await littered(2)  # which wrote chunks 0 to 3
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        await write(session, f"a/c/{chunk}", CHUNK)
        await _expired(repository)
        if clashes:
            with pytest.raises(RebaseFailedError, match="chunk double update"):
                await session.commit("late", rebase_with=DETECTOR)
        ours = BasicConflictSolver(on_chunk_conflict=VersionSelection.USE_OURS)
        await session.commit("late", rebase_with=ours if clashes else DETECTOR)
        reader = await repository.readonly_session("main")
        assert await read(reader, f"a/c/{chunk}") == CHUNK


async def test_a_named_commit_finds_its_way_over_the_gap() -> None:
    """The base is not asked for the transactions that it records."""
    url, _ = await littered(2)
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/60", CHUNK)
        await _expired(repository)
        once = Transaction("job", 1)
        first = await session.commit("late", rebase_with=DETECTOR, once=once)
        again = await repository.writable_session("main")
        await write(again, "a/c/60", CHUNK)
        assert await again.commit("late", rebase_with=DETECTOR, once=once) == first
        assert again.already_committed


async def test_format_1_says_that_it_cannot_know() -> None:
    """It does not record what expired commits touched; nothing is published and no change lost."""
    url, _ = await littered(1)
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/60", CHUNK)
        await _expired(repository)
        with pytest.raises(
            ConflictError, match=r"the base expired\. Format version 1 does not"
        ) as it:
            await session.commit("late", rebase_with=DETECTOR)
        assert await read(session, "a/c/60") == CHUNK
    async with Repository.open(url) as repository:  # the process is gone, and its work is not
        kept = await repository.readonly_session(snapshot_id=str(it.value.context[KEPT]))
        assert await read(kept, "a/c/60") == CHUNK
        assert await read(kept, "a/c/51") is None


async def test_a_reset_branch_is_told_from_an_expired_base(spec: int) -> None:
    """Where that can be known."""
    url, line = await littered(spec)
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/60", CHUNK)
        await repository.reset_branch("main", line[1])
        told = "the branch was reset or its tip amended" if spec == 2 else "reset, or the base"
        with pytest.raises(ConflictError, match=told):
            await session.commit("late", rebase_with=DETECTOR)


async def test_work_on_an_unpublished_snapshot_is_not_continued(spec: int) -> None:
    """Its commits would conflict with everything."""
    url = memory_url()
    async with Repository.create(url, spec_version=spec) as repository:
        await commit(repository, 1, "first")
        gone = await repository.writable_session("main")
        clean = ForkSession.from_bytes((await gone.fork()).to_bytes())
        await write(gone, "a/c/5", CHUNK)
        dirty = ForkSession.from_bytes((await gone.fork()).to_bytes())
        await commit(repository, 2, "newer")
        session = await repository.writable_session("main")
        with pytest.raises(SessionStateError, match="forked from a session that had changes"):
            await session.resume(dirty)
        assert not session.has_uncommitted_changes
        await session.resume(clean)
        assert session.snapshot_id == clean.snapshot_id


async def test_work_on_an_expired_snapshot_is_continued() -> None:
    """Format 2 knows what came after it."""
    url, _ = await littered(2)
    async with Repository.open(url) as repository:
        gone = await repository.writable_session("main")
        root = await gone.fork()
        await write(root, "a/c/60", CHUNK)
        await _expired(repository)
        session = await repository.writable_session("main")
        await session.resume(ForkSession.from_bytes(root.to_bytes()))
        await session.commit("late", rebase_with=DETECTOR)
        reader = await repository.readonly_session("main")
        assert await read(reader, "a/c/60") == CHUNK


async def test_nothing_is_flushed_onto_an_expired_snapshot(spec: int) -> None:
    """The next collection would delete what it builds on; another handle expired it."""
    url, _ = await littered(spec)
    async with Repository.open(url) as repository, Repository.open(url) as other:
        session = await repository.writable_session("main")
        await write(session, "a/c/60", CHUNK)
        await _expired(other)
        with pytest.raises(SnapshotNotFoundError, match="It may have expired"):
            await session.flush("late")
        later = await repository.writable_session("main")
        await write(later, "a/c/61", CHUNK)
        await commit(other, 62, "newer")
        await later.flush("beside")
