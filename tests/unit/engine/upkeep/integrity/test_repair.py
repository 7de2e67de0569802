"""Repair: damage goes, what is sound stays, and a crash at any step does no harm."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, override

import pytest

from icechunk_async import Repository, RepositoryConfig, upkeep
from icechunk_async.config import LocalFileSystemStore, VirtualChunkContainer
from icechunk_async.credentials import LocalFileSystemAccess
from icechunk_async.engine.upkeep.integrity.closed import audit_closed
from icechunk_async.engine.upkeep.integrity.repair import restore_repo_object
from icechunk_async.errors import ConflictError, PermissionDeniedError, RepositoryReadOnlyError
from icechunk_async.format.envelope import FileType, pack, unpack
from icechunk_async.format.ids import NodeId
from icechunk_async.format.transaction_log import decode_transaction_log, encode_transaction_log
from icechunk_async.repository import RepoAvailability, RepoStatus
from icechunk_async.storage import CacheOptions, open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import make_array, memory_url, objects, read
from tests.unit.engine.upkeep.integrity.damaging import damage, filled, healthy, kinds_of
from tests.unit.engine.upkeep.upkeep_tools import CHUNK, commit, littered

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from icechunk_async.storage import ListEntry, Storage

_SEEDS = [1, 2, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(3, 40))]


class Dying(WrappedStorage):
    """Fails from some write on, before or after it was carried out."""

    def __init__(self, storage: Storage, writes: int, *, after: bool) -> None:
        """Let some writes pass."""
        super().__init__(storage)
        self._left, self._after = writes, after

    def _count(self, operation: str, *, now: bool) -> None:
        if operation in ("put", "copy", "delete") and now:
            self._left -= 1
            if self._left < 0:
                raise PermissionDeniedError("on purpose")

    @override
    async def before(self, operation: str, key: str) -> None:
        self._count(operation, now=not self._after)

    @override
    async def after(self, operation: str, key: str) -> None:
        self._count(operation, now=self._after)


async def repaired(url: str) -> None:
    """Verify, repair, and see that branches and all logs are whole."""
    async with Repository.open(url) as repository:
        plan = await repository.plan_repair(await repository.verify())
        assert plan.unrepairable == ()
        await plan.apply()
        await sound(repository)


async def sound(repository: Repository, level: Any = "decode") -> None:
    """See that branches are whole."""
    branches = sorted(await repository.branches())
    report = await repository.verify(level, refs=branches, ancestry=False)
    assert report.findings == ()
    left = await repository.verify("structure")
    assert [it for it in left.findings if it.kind == "transaction log"] == []


@pytest.mark.sampled
@pytest.mark.parametrize("spec", [1, 2])
@pytest.mark.parametrize("seed", _SEEDS)
async def test_damaged_logs_manifests_and_chunks_are_repaired(seed: int, spec: int) -> None:
    """One of each kind, in several ways; nothing but the chunks concerned is lost."""
    found = await healthy(seed, spec)
    dice = random.Random(seed)
    for kind in ("transactions", "manifests", "chunks"):
        for mode in ("deleted", "truncated"):
            made = damage(found, dice.choice(kinds_of(found)[kind]), mode, dice)
            url = await filled(made.objects)
            report = await upkeep.verify(url)
            await repaired(url)
            async with open_storage(url) as storage:
                now = await objects(storage)
            for key, data in found.items():
                if key.partition("/")[0] in ("chunks", "manifests", "transactions", "snapshots"):
                    is_damaged = key in {it.location for it in report.findings}
                    assert key == made.key or is_damaged or now.get(key) == data
            if mode == "truncated" and report.findings and kind != "chunks":
                assert now[f"quarantine/{made.key}"] == made.objects[made.key]


@pytest.mark.parametrize("kind", ["chunks", "manifests", "transactions"])
@pytest.mark.parametrize("mode", ["deleted", "truncated"])
async def test_what_a_cache_holds_does_not_hide_damage_from_a_repair(kind: str, mode: str) -> None:
    """Others cannot read what only the cache of this process has."""
    found = await healthy(2, 2, expires=False)
    url = await filled(found)
    cached = Repository.open(url, cache=CacheOptions(memory_bytes=1 << 24))
    async with open_storage(url) as storage, cached as repository:
        for key in kinds_of(found)[kind]:
            await repository.storage.get(key)
        for key in kinds_of(found)[kind]:
            if mode == "deleted":
                await storage.delete([key])
            else:
                await storage.put(key, found[key][:50])
        plan = await repository.plan_repair(await repository.verify("length"))
        assert plan.steps
        async with Repository.open(url) as other:
            wanted = await other.plan_repair(await other.verify("length"))
            assert plan.steps == wanted.steps
        await plan.apply()
        await sound(repository, "length")
        for key in [it.target for it in plan.steps if it.action == "rebuild log"]:
            now = bytes((await storage.get(key)).data)
            assert bytes((await repository.storage.get(key)).data) == now
            if mode == "truncated":
                assert bytes((await storage.get(f"quarantine/{key}")).data) == found[key][:50]


@pytest.mark.parametrize("spec", [1, 2])
async def test_rebuilt_log_is_that_of_the_commit(spec: int) -> None:
    """New, updated and deleted nodes, moves, and chunks set."""
    found = await healthy(2, spec, expires=False)
    async with Repository.open(await filled(found)) as repository:
        line = [it async for it in repository.ancestry(branch="main")]
        known = {f"transactions/{it.id}" for it in line if it.parent_id is not None}
    lost = {key: data for key, data in found.items() if key not in known}
    url = await filled(lost)
    await repaired(url)
    async with open_storage(url) as storage:
        now = await objects(storage)
    compared = 0
    for key in known:
        was, made = (
            decode_transaction_log(unpack(it[key], FileType.TRANSACTION_LOG).payload)
            for it in (found, now)
        )
        for name in ("new_groups", "new_arrays", "deleted_arrays", "updated_arrays", "moves"):
            assert getattr(made, name) == getattr(was, name), name
        for node, coords in made.updated_chunks.items():
            assert {*map(tuple, coords.tolist())} <= {
                *map(tuple, was.updated_chunks[node].tolist())
            }
        compared += 1
    assert compared > 2


@pytest.mark.parametrize("lost", ["new", "old", "both"])
@pytest.mark.parametrize("spec", [1, 2])
async def test_log_of_a_commit_whose_manifest_is_lost_names_all_that_may_have_changed(
    spec: int, lost: str
) -> None:
    """Of the commit or of the one before: a diff shows more than was changed, and never less."""
    url, line = await littered(spec)
    async with Repository.open(url) as repository, open_storage(url) as storage:
        tip, parent = line[-1], line[-2]
        own = {it.id for it in await repository.list_manifest_files(tip)}
        before = {it.id for it in await repository.list_manifest_files(parent)}
        assert not own & before
        was = await repository.diff(from_snapshot_id=parent, to_snapshot_id=tip)
        gone = {"new": own, "old": before, "both": own | before}[lost]
        doomed = [f"transactions/{tip}", *(f"manifests/{it}" for it in gone)]
        for key in doomed:
            await storage.put(key, b"damaged")
    async with Repository.open(url) as repository:
        plan = await repository.plan_repair(await repository.verify("length"))
        assert plan.unrepairable == ()
        await plan.apply()
        diff = await repository.diff(from_snapshot_id=parent, to_snapshot_id=tip)
        assert diff.updated_chunks.keys() == was.updated_chunks.keys() == {"/a"}
        shown = {*map(tuple, diff.updated_chunks["/a"].tolist())}
        assert shown >= {*map(tuple, was.updated_chunks["/a"].tolist())}
        await sound(repository, "length")


@pytest.mark.parametrize("spec", [1, 2])
async def test_lost_chunks_read_as_missing_and_history_is_left_alone(spec: int) -> None:
    """The commit drops one reference, on the branches that have it."""
    url, line = await littered(spec)
    async with Repository.open(url) as repository, open_storage(url) as storage:
        session = await repository.readonly_session("main")
        ref = (await session.store.get("a/c/3", _buffers())) is not None
        assert ref
        before = await objects(storage)
        (key,) = [it for it in before if it.startswith("chunks/") and before[it][:8] == b"commit 3"]
        await storage.delete([key])
        plan = await repository.plan_repair(await repository.verify("length"))
        assert [(it.action, it.target) for it in plan.steps] == [("drop chunks", "main")]
        assert "1 chunk(s) of '/a' are dropped: 3" in plan.steps[0].detail
        assert (await objects(storage)).keys() == before.keys() - {key}  # a plan changes nothing
        tips = await plan.apply()
        assert tips == {"main": await repository.lookup_branch("main")}
        after = await repository.readonly_session("main")
        assert await read(after, "a/c/3") is None
        assert await read(after, "a/c/2") == b"commit 2".ljust(len(CHUNK))
        diff = await repository.diff(from_snapshot_id=line[-1], to_branch="main")
        assert {it: coords.tolist() for it, coords in diff.updated_chunks.items()} == {"/a": [[3]]}
        assert [it.id async for it in repository.ancestry(branch="main")][1:] == line[::-1]
        await sound(repository, "length")
        again = await repository.plan_repair(await repository.verify("length"))
        assert again.steps == ()


def _buffers() -> Any:
    from zarr.core.buffer import default_buffer_prototype

    return default_buffer_prototype()


@pytest.mark.sampled
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("spec", [1, 2])
async def test_a_crash_at_any_step_is_finished_by_planning_again(spec: int, *, after: bool) -> None:
    """A log, a manifest and a chunk are damaged; each write of the repair is the last one once."""
    url, line = await littered(spec)
    async with Repository.open(url) as repository:
        await commit(repository, 5, "five")
    async with open_storage(url) as storage:
        found = await objects(storage)
    (chunk,) = [it for it in found if it.startswith("chunks/") and found[it][:8] == b"commit 1"]
    damaged = {**found, f"transactions/{line[3]}": b"damaged", chunk: found[chunk][:5]}
    for writes in range(30):
        url = await filled(damaged)
        async with open_storage(url) as storage:
            async with Repository.open(url) as repository:
                report = await repository.verify("length")
            assert len(report.findings) == 2
            try:
                async with Repository.open(Dying(storage, writes, after=after)) as repository:
                    await (await repository.plan_repair(report)).apply()
            except PermissionDeniedError:
                ended = False
            else:
                ended = True
            async with Repository.open(url) as repository:
                assert await readable(repository) >= {"commit 0", "commit 2", "commit 3", "five"}
                await (await repository.plan_repair(report)).apply()
                await sound(repository, "length")
        if ended:
            assert writes > 4
            return
    raise AssertionError("the repair never ended")


async def readable(repository: Repository) -> set[str]:
    """Return the contents of chunks that can be read."""
    session = await repository.readonly_session("main")
    texts: set[str] = set()
    for chunk in (0, 2, 3, 5):
        data = await read(session, f"a/c/{chunk}")
        if data is not None:
            texts.add(data.decode().strip())
    return texts


async def test_a_log_that_was_made_anew_is_not_made_again_from_the_same_report() -> None:
    """After a crash the damaged log stays in quarantine, and no sound one takes its place there."""
    url, line = await littered(2)
    key = f"transactions/{line[3]}"
    async with open_storage(url) as storage:
        log = decode_transaction_log(
            unpack((await storage.get(key)).data, FileType.TRANSACTION_LOG).payload
        )
        wrong = replace(log, new_groups=frozenset({NodeId(b"nowhere!")}))
        packed = pack(encode_transaction_log(wrong, 2), FileType.TRANSACTION_LOG, 2, level=3)
        await storage.put(key, packed)
        async with Repository.open(url) as repository:
            report = await repository.verify("structure")
            assert [(it.location, it.problem) for it in report.findings] == [(key, "disagrees")]
            await (await repository.plan_repair(report)).apply()
            again = await repository.plan_repair(report)
            assert again.steps == ()
        assert bytes((await storage.get(f"quarantine/{key}")).data) == packed


async def test_repair_of_a_branch_that_moved_is_refused() -> None:
    """A plan is of the tip that it looked at."""
    url, _ = await littered(2)
    async with Repository.open(url) as repository, open_storage(url) as storage:
        found = await objects(storage)
        (key,) = [it for it in found if it.startswith("chunks/") and found[it][:8] == b"commit 3"]
        await storage.delete([key])
        plan = await repository.plan_repair(await repository.verify("length"))
        await commit(repository, 7, "meanwhile")
        with pytest.raises(ConflictError):
            await plan.apply()
        await repository.set_status(RepoStatus(RepoAvailability.READ_ONLY))
        plan = await repository.plan_repair(await repository.verify("length"))
        with pytest.raises(RepositoryReadOnlyError):
            await plan.apply()


@pytest.mark.parametrize("is_missing", [True, False])
async def test_repo_object_is_restored_from_its_newest_sound_backup(*, is_missing: bool) -> None:
    """A damaged backup is passed over; a dry run changes nothing; a sound object is left alone."""
    url, line = await littered(2)
    async with Repository.open(url) as repository:
        await commit(repository, 5, "five")
    async with open_storage(url) as storage:
        assert await upkeep.restore_repo_object(storage) is None
        found = await objects(storage)
        backups = sorted(it for it in found if it.startswith("overwritten/repo."))
        await storage.put(backups[0], found[backups[0]][:60])
        await storage.delete(["repo"])
        if not is_missing:
            await storage.put("repo", found["repo"][:70])
        before = await objects(storage)
        step = await upkeep.restore_repo_object(storage)
        assert step is not None
        assert (step.action, step.target) == ("restore repo", "repo")
        assert backups[1] in step.detail
        assert await objects(storage) == before
        assert await upkeep.restore_repo_object(storage, dry_run=False) == step
        now = await objects(storage)
        assert now["repo"] == found[backups[1]]
        kept = [data for key, data in now.items() if key.startswith("quarantine/")]
        assert kept == ([] if is_missing else [found["repo"][:70]])
        async with Repository.open(storage) as repository:
            assert (await repository.verify("length")).is_healthy
            await commit(repository, 6, "after the repair")
    assert line


async def test_virtual_sources_that_moved_are_pointed_at(tmp_path: Path) -> None:
    """With new guards; a source that is too short is refused."""
    old, new = (tmp_path / it for it in ("old", "new"))
    old.mkdir()
    (old / "f").write_bytes(bytes(range(100)))
    prefix = f"{tmp_path.as_uri()}/"
    container = VirtualChunkContainer(prefix, LocalFileSystemStore(str(tmp_path)))
    config = RepositoryConfig(virtual_chunk_containers=(container,))
    access = {prefix: LocalFileSystemAccess()}
    url = memory_url()
    create = Repository.create(url, config=config, authorize_virtual_chunk_access=access)
    async with create as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (20,), (10,))
        for chunk in range(2):
            session.store.set_virtual_ref(
                f"a/c/{chunk}", f"{prefix}old/f", offset=10 * chunk, length=10, checksum=None
            )
        await session.commit("virtual")
        old.rename(new)
        report = await repository.verify()
        assert [it.problem for it in report.findings] == ["missing"]
        moved = {f"{prefix}old/": f"{prefix}new/"}
        plan = await repository.plan_repair(report, moved=moved)
        assert "2 virtual chunk(s) of '/a' are pointed at new sources" in plan.steps[0].detail
        await plan.apply()
        await sound(repository)
        after = await repository.readonly_session("main")
        assert await read(after, "a/c/1") == bytes(range(10, 20))
        assert (await repository.plan_repair(report, moved=moved)).steps == ()
        dropped = await repository.plan_repair(report)
        assert dropped.steps == ()


async def test_sources_that_moved_into_a_folder_below_move_once(tmp_path: Path) -> None:
    """A repair that was interrupted between two branches is finished by planning again."""
    (tmp_path / "f").write_bytes(bytes(range(100)))
    prefix = f"{tmp_path.as_uri()}/"
    container = VirtualChunkContainer(prefix, LocalFileSystemStore(str(tmp_path)))
    access = {prefix: LocalFileSystemAccess()}
    create = Repository.create(
        memory_url(),
        config=RepositoryConfig(virtual_chunk_containers=(container,)),
        authorize_virtual_chunk_access=access,
    )
    async with create as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (10,), (10,))
        session.store.set_virtual_ref("a/c/0", f"{prefix}f", offset=0, length=10, checksum=None)
        await repository.create_branch("side", await session.commit("virtual"))
        (tmp_path / "below").mkdir()
        (tmp_path / "f").rename(tmp_path / "below" / "f")
        report = await repository.verify()
        moved = {prefix: f"{prefix}below/"}
        plan = await repository.plan_repair(report, branches=["main"], moved=moved)
        await plan.apply()
        plan = await repository.plan_repair(report, moved=moved)
        assert [it.target for it in plan.steps] == ["side"]
        await plan.apply()
        await sound(repository)
        for branch in ("main", "side"):
            after = await repository.readonly_session(branch)
            assert await read(after, "a/c/0") == bytes(range(10))


class _Listing(WrappedStorage):
    """Counts the listings that are open."""

    open = 0

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Any = None
    ) -> AsyncIterator[ListEntry]:
        """List objects."""
        entries = self.wrapped.list_prefix(prefix, start_after=start_after, delimiter=delimiter)
        self.open += 1
        try:
            async for entry in entries:
                yield entry
        finally:
            self.open -= 1


async def test_listings_that_end_early_are_closed() -> None:
    """Before the function returns, and not when the event loop has time for it."""
    url, _ = await littered(2)
    async with open_storage(url) as plain:
        storage = _Listing(plain)
        await plain.delete(["repo"])
        assert await audit_closed(storage) is not None
        assert storage.open == 0
        assert await restore_repo_object(storage, dry_run=True) is not None
        assert storage.open == 0
