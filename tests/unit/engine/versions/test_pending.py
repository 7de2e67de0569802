"""A merge that is half settled is continued from bytes: elsewhere, later, and never too early."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from datetime import UTC, datetime
from textwrap import dedent
from typing import TYPE_CHECKING

import anyio
import msgpack
import pytest
import zstandard

from icechunk_async import Repository
from icechunk_async.engine.versions.pending import decode_pending, encode_pending
from icechunk_async.errors import (
    BranchProtectedError,
    ChunksCollectedError,
    ConflictError,
    FormatError,
    IcechunkError,
    MergeConflictError,
    RebaseFailedError,
    SessionStateError,
    SnapshotNotFoundError,
)
from tests.helpers import memory_url, read, write
from tests.unit.engine.versions.stories import Story, contents, contents_at
from tests.unit.engine.versions.test_merge_matrix import CHANGES, begin, changing
from tests.unit.engine.versions.test_solving import clashing, titled

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.versions import PendingMerge

OTHER_PROCESS = dedent("""
    import asyncio, sys
    from pathlib import Path
    from icechunk_async import Repository
    from icechunk_async.errors import MergeConflictError

    async def main(root, saved):
        async with Repository.open(root) as repository:
            tip = await repository.lookup_branch("main")
            pending = await repository.resume_merge(Path(saved).read_bytes())
            (document,) = pending.conflicts
            try:
                await pending.commit()
            except MergeConflictError as error:
                print(error)
            assert await repository.lookup_branch("main") == tip
            await pending.take_source(document)
            print(await pending.commit())

    asyncio.run(main(*sys.argv[1:]))
""")


async def test_another_process_continues_a_merge(tmp_path: Path) -> None:
    """With what was settled and written here; while a conflict is open it publishes nothing."""
    saved = tmp_path / "saved"
    async with Repository.create(tmp_path / "repository") as repository:
        await clashing(repository)
        before = await contents_at(repository)
        pending = await repository.begin_merge("side")
        chunk, document = sorted(pending.conflicts, key=lambda it: not it.coords)
        await write(pending.session, "g/a/c/0", b"by hand" * 100)  # too long to be inline
        pending.resolved(chunk)
        saved.write_bytes(await pending.to_bytes())
        assert document in pending.conflicts
        assert await contents_at(repository) == before
    command = [sys.executable, "-W", "error", "-c", OTHER_PROCESS]
    ended = await anyio.run_process(
        [*command, str(tmp_path / "repository"), str(saved)], stderr=subprocess.STDOUT, check=False
    )
    said = ended.stdout.decode().strip().splitlines()
    assert ended.returncode == 0, said
    assert "1 conflict(s) of the merge are open, at '/g/a'. Nothing was published." in said[0]
    async with Repository.open(tmp_path / "repository") as repository:
        assert str(await repository.lookup_branch("main")) == said[-1]
        found = await contents_at(repository)
        assert (found["g/a/c/0"], found["g/a/c/3"]) == (b"by hand" * 100, b"yyy")
        assert json.loads(found["g/a/zarr.json"])["attributes"] == {"a": 1}
        assert (await repository.merge("side")).snapshot_id is None


async def again(repository: Repository, pending: PendingMerge) -> PendingMerge:
    """Return a merge as another process has it."""
    return await repository.resume_merge(await pending.to_bytes())


@pytest.mark.parametrize("one", CHANGES)
async def test_every_kind_of_merge_comes_back_as_it_was(one: str) -> None:
    """Its session, report and open conflicts, whatever both sides changed."""
    for other in CHANGES:
        async with Repository.create(memory_url()) as repository:
            await begin(repository)
            await CHANGES[one](repository, "side")
            await CHANGES[other](repository, "main")
            pending = await repository.begin_merge("side")
            resumed = await again(repository, pending)
            assert await contents(resumed.session) == await contents(pending.session)
            assert resumed.conflicts == pending.conflicts
            _assert_same_reports(resumed, pending)
            assert await resumed.to_bytes() == await pending.to_bytes()
            if not resumed.conflicts and resumed.session.has_uncommitted_changes:
                merged = await contents(resumed.session)
                await resumed.commit()
                assert await contents_at(repository) == merged


def _assert_same_reports(one: PendingMerge, other: PendingMerge) -> None:
    ends = [(it.branch, it.base_id, it.source_id) for it in (one.report, other.report)]
    assert ends[0] == ends[1]
    assert one.report.conflicts == other.report.conflicts
    chunks = [
        {path: it.tolist() for path, it in pending.report.changes.updated_chunks.items()}
        for pending in (one, other)
    ]
    assert chunks[0] == chunks[1]
    assert one.report.changes.moved_nodes == other.report.changes.moved_nodes


@pytest.mark.parametrize("seed", range(6))
async def test_random_merges_come_back(seed: int) -> None:
    """With moves, virtual chunks and deletions."""
    story, other = (Story(random.Random(31 * seed + at), top) for at, top in enumerate("lr"))
    async with Repository.create(memory_url(), spec_version=1 + seed % 2) as repository:
        await story.begin(repository)
        await other.begin(repository)
        await repository.create_branch("side", await repository.lookup_branch("main"))
        for _ in range(3):
            await story.commit(repository, "side")
            await other.commit(repository, "main")
        resumed = await again(repository, await repository.begin_merge("side"))
        wanted = await contents(resumed.session)
        await resumed.commit()
        assert await contents_at(repository) == wanted
        assert (await repository.merge("side")).snapshot_id is None


async def test_what_is_settled_stays_so_and_what_is_open_too(repository: Repository) -> None:
    """Over several days."""
    await clashing(repository)
    pending = await repository.begin_merge("side")
    chunk, document = sorted(pending.conflicts, key=lambda it: not it.coords)
    await pending.take_source(chunk)
    pending = await again(repository, pending)
    assert pending.conflicts == (document,)
    assert {chunk, document} == set(pending.report.conflicts)
    assert await read(pending.session, "g/a/c/0") == b"sss"
    pending = await again(repository, pending)
    with pytest.raises(MergeConflictError, match=r"1 conflict\(s\)"):
        await pending.commit()
    await write(pending.session, "g/a/zarr.json", titled(a=1, b=2))
    pending.resolved()
    pending = await again(repository, pending)
    assert pending.conflicts == ()
    made = await pending.commit()
    with pytest.raises(SessionStateError, match=f"committed, as snapshot {made}"):
        await pending.to_bytes()
    found = await contents_at(repository)
    assert (found["g/a/c/0"], found["g/a/zarr.json"]) == (b"sss", titled(a=1, b=2))


async def test_of_two_who_continue_one_merge_one_commits(repository: Repository) -> None:
    """The other changed the same, and is refused; commits of others are kept."""
    await clashing(repository)
    pending = await repository.begin_merge("side")
    await pending.take_source()
    one, other = await again(repository, pending), await again(repository, pending)
    await changing(("g/a/c/1", b"111"))(repository, "main")
    await one.commit()
    found = await contents_at(repository)
    assert (found["g/a/c/0"], found["g/a/c/1"]) == (b"sss", b"111")
    with pytest.raises(RebaseFailedError):
        await other.commit()
    assert await contents_at(repository) == found
    other.session.discard_changes()


async def test_a_branch_that_was_reset_or_protected_refuses(repository: Repository) -> None:
    """Nothing is published."""
    await clashing(repository)
    tip = await repository.lookup_branch("main")
    pending = await repository.begin_merge("side")
    await pending.take_source()
    saved = await pending.to_bytes()
    await repository.reset_branch("main", [it.id async for it in repository.ancestry()][1])
    resumed = await repository.resume_merge(saved)
    with pytest.raises(ConflictError, match="main"):
        await resumed.commit()
    resumed.session.discard_changes()
    await repository.reset_branch("main", tip)
    if repository.spec_version > 1:
        await repository.protect_branch("main")
        with pytest.raises(BranchProtectedError):
            await repository.resume_merge(saved)
    assert await repository.lookup_branch("main") == tip


async def test_what_was_collected_meanwhile_is_named() -> None:
    """The chunks written by hand are garbage until the commit, which finds out."""
    async with Repository.create(memory_url()) as repository:
        await clashing(repository)
        pending = await repository.begin_merge("side")
        await write(pending.session, "g/a/c/0", b"by hand" * 100)
        pending.keep_branch()
        saved = await pending.to_bytes()
        tip = await repository.lookup_branch("main")
        await repository.garbage_collect(datetime.now(UTC))
        resumed = await repository.resume_merge(saved)
        with pytest.raises(ChunksCollectedError):
            await resumed.commit()
        assert await repository.lookup_branch("main") == tip
        await write(resumed.session, "g/a/c/0", b"once more" * 100)
        await resumed.commit()
    async with Repository.create(memory_url()) as elsewhere:
        with pytest.raises(SnapshotNotFoundError, match="which the merge stands on, is not there"):
            await elsewhere.resume_merge(saved)


def _says_the_same(changed: bytes, saved: bytes) -> bool:
    try:
        document = zstandard.decompress(changed[9:])
    except zstandard.ZstdError:
        return False
    return changed[:9] == saved[:9] and document == zstandard.decompress(saved[9:])


async def test_damaged_bytes_are_format_errors(repository: Repository) -> None:
    """Cut off, changed anywhere, or of another kind; bits that Zstandard ignores are no damage."""
    await clashing(repository)
    pending = await repository.begin_merge("side")
    saved = await pending.to_bytes()
    chance = random.Random(0)
    damaged = [b"", b"ICAMERGE", b"ICAFORK" + saved[7:], saved[:8] + b"\x09" + saved[9:]]
    damaged += [saved[: chance.randrange(len(saved))] for _ in range(20)]
    for _ in range(60):
        changed = bytearray(saved)
        changed[chance.randrange(len(saved))] ^= 1 << chance.randrange(8)
        if not _says_the_same(bytes(changed), saved):
            damaged.append(bytes(changed))
    for data in damaged:
        with pytest.raises(FormatError):
            await repository.resume_merge(data)


async def test_forged_bytes_do_no_harm(repository: Repository) -> None:
    """Values of other types, conflicts that are not listed, nodes that are not there."""
    await clashing(repository)
    saved = await (await repository.begin_merge("side")).to_bytes()
    tip = await repository.lookup_branch("main")
    whole = msgpack.unpackb(zstandard.decompress(saved[9:]))
    chance = random.Random(1)
    strange: list[object] = [
        None,
        -1,
        1 << 40,
        "",
        "/",
        "/nowhere",
        b"",
        [],
        [["/g", "/q"]],
        {},
        [[1, 2, 3, 4]],
    ]
    for name in whole:
        for value in strange:
            await _resume_forged(repository, {**whole, name: value})
    for part in ("diff", "conflicts"):
        for _ in range(60):
            forged = msgpack.unpackb(msgpack.packb(whole))
            inner = forged[part]
            at = chance.choice([*inner]) if part == "diff" else chance.randrange(len(inner))
            if part == "diff":
                inner[at] = chance.choice(strange)
            else:
                inner[at][chance.randrange(6)] = chance.choice(strange)
            await _resume_forged(repository, forged)
    assert await repository.lookup_branch("main") == tip


async def _resume_forged(repository: Repository, document: dict[str, object]) -> None:
    data = b"ICAMERGE\x01" + zstandard.compress(msgpack.packb(document))
    try:
        resumed = await repository.resume_merge(data)
    except IcechunkError:
        return
    resumed.session.abandon()


async def test_moves_that_cannot_be_made_are_format_errors(repository: Repository) -> None:
    """And nodes that are where they cannot be."""
    await begin(repository)
    await CHANGES["new array"](repository, "side")
    state = decode_pending(await (await repository.begin_merge("side")).to_bytes())
    state.changes.moves.requested.append(("/nowhere", "/else"))
    with pytest.raises(FormatError, match="moves what cannot be moved"):
        await repository.resume_merge(encode_pending(state))
    state.changes.moves.requested[:] = [("/h", "/g/b")]
    with pytest.raises(FormatError):
        await repository.resume_merge(encode_pending(state))
