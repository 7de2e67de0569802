"""Metadata, status, flags, reopening and rewriting of manifests under adverse conditions."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository
from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async._runtime.progress import Progress
from icechunk_async.config import (
    LocalFileSystemStore,
    ManifestConfig,
    ManifestSplitCondition,
    ManifestSplitDimCondition,
    ManifestSplittingConfig,
    RepositoryConfig,
    StorageRetriesSettings,
    StorageSettings,
    VirtualChunkContainer,
)
from icechunk_async.engine.commit import flush
from icechunk_async.engine.history.repo_info.file import read_info
from icechunk_async.errors import (
    ConflictError,
    FeatureDisabledError,
    InvalidInputError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    RepositoryReadOnlyError,
    SessionStateError,
    SnapshotNotFoundError,
    StorageUnavailableError,
)
from icechunk_async.format.envelope import FileType, pack
from icechunk_async.format.ids import ManifestId, SnapshotId
from icechunk_async.format.operations_log import (
    Availability,
    FeatureFlagChanged,
    MetadataChanged,
    RepoStatusChanged,
)
from icechunk_async.format.operations_log import RepoStatus as StoredStatus
from icechunk_async.format.repo_info import encode_repo_info
from icechunk_async.repository import RepoAvailability, RepoStatus
from icechunk_async.storage import open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import make_array, memory_url, objects, read, write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async.storage import Data, Expected, Storage, Version

TWOS = RepositoryConfig(
    manifest=ManifestConfig(
        splitting=ManifestSplittingConfig(
            ((ManifestSplitCondition.any_array(), ((ManifestSplitDimCondition.Any(), 2),)),)
        )
    )
)
ONE_TRY = RepositoryConfig(storage=StorageSettings(retries=StorageRetriesSettings(max_tries=1)))
"""For storages that stay silent: the pauses between tries take real time."""
READ_ONLY = RepoStatus(RepoAvailability.READ_ONLY, None, "moving house")


class _Lossy(WrappedStorage):
    """Loses the reply to writes of keys with a prefix, or the request, for as long as told."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.prefix = "-"
        self.lose = 0
        self.carried_out = True

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        if not key.startswith(self.prefix) or self.lose == 0:
            return await self.wrapped.put(key, data, if_version=if_version)
        self.lose -= 1
        if self.carried_out:
            await self.wrapped.put(key, data, if_version=if_version)
        raise OutcomeUnknownError("no reply")


@pytest.fixture
async def new() -> AsyncIterator[Repository]:
    """Open an empty repository of format version 2."""
    async with Repository.create(memory_url()) as repository:
        yield repository


async def kinds(repository: Repository) -> list[type]:
    """Return the operations log without the creation, newest first."""
    return [type(it.detail) async for it in repository.ops_log()][:-1]


async def test_metadata_merged_by_many_at_once_is_all_there(new: Repository) -> None:
    """Everyone who merges is answered what the repository then held."""

    async def merge(number: int) -> dict[str, Any]:
        async with new.reopen() as mine:
            return await mine.update_metadata({f"k{number}": number})

    answers = await bounded_map(merge, range(8), limit=8)
    assert await new.get_metadata() == {f"k{number}": number for number in range(8)}
    assert sorted(len(it) for it in answers) == list(range(1, 9))
    assert await kinds(new) == [MetadataChanged] * 8


@pytest.mark.parametrize("carried_out", [True, False], ids=["landed", "lost"])
async def test_a_lost_reply_changes_administration_once(*, carried_out: bool) -> None:
    """Each change is in the log once, whether its write landed before the silence or not."""
    url = memory_url()
    async with Repository.create(url), open_storage(url) as plain:
        lossy = _Lossy(plain)
        lossy.prefix, lossy.carried_out = "repo", carried_out
        async with Repository.open(lossy) as repository:
            for change in (
                lambda: repository.update_metadata({"a": 1}),
                lambda: repository.set_status(READ_ONLY),
                lambda: repository.set_status(RepoStatus(RepoAvailability.ONLINE)),
                lambda: repository.set_feature_flag("create_tag", setting=False),
            ):
                lossy.lose = 2
                await change()
        async with Repository.open(plain) as repository:
            assert await repository.get_metadata() == {"a": 1}
            assert await kinds(repository) == [
                FeatureFlagChanged,
                RepoStatusChanged,
                RepoStatusChanged,
                MetadataChanged,
            ]


async def test_metadata_that_is_not_json_changes_nothing(new: Repository) -> None:
    """Metadata is checked before anything is written."""
    bad: Any = {"a": {"b": object()}}
    for change in (new.set_metadata, new.update_metadata):
        with pytest.raises(InvalidInputError, match=r"\['a'\]\['b'\]"):
            await change(bad)
    assert await kinds(new) == []


async def test_open_sessions_honour_a_read_only_status(new: Repository) -> None:
    """A status set by somebody else stops a commit, and the session can commit afterwards."""
    session = await new.writable_session("main")
    await make_array(session, "a", (4,), (1,))
    async with new.reopen() as other:
        await other.set_status(READ_ONLY)
        with pytest.raises(RepositoryReadOnlyError, match="moving house"):
            await session.commit("too late")
        with pytest.raises(RepositoryReadOnlyError):
            await new.rewrite_manifests("too late", branch="main")
        await other.set_status(READ_ONLY)  # again, although nothing may be changed
        await other.set_status(RepoStatus(RepoAvailability.ONLINE))
    await session.commit("in time")
    assert await kinds(new) != []


async def test_a_repository_set_offline_by_others_is_read_and_not_written_to() -> None:
    """The status offline is reported; it is never set here, and can be set back."""
    url = memory_url()
    async with Repository.create(url) as repository, open_storage(url) as storage:
        with pytest.raises(InvalidInputError, match="READ_ONLY"):
            await repository.set_status(RepoStatus(RepoAvailability.OFFLINE))
        found = await storage.get("repo")
        info = read_info(found).info
        object.__setattr__(info, "status", StoredStatus(Availability.OFFLINE, 7, "gone"))
        data = pack(encode_repo_info(info), FileType.REPO_INFO, 2)
        await storage.put("repo", data, if_version=found.version)
        assert await repository.get_status() == RepoStatus(
            RepoAvailability.OFFLINE, datetime(1970, 1, 1, 0, 0, 0, 7, UTC), "gone"
        )
        with pytest.raises(RepositoryReadOnlyError, match="offline: gone"):
            await repository.writable_session("main")
        assert (await repository.inspect_repo_info())["branches"]
        await repository.set_status(RepoStatus(RepoAvailability.ONLINE))
        await repository.writable_session("main")


async def test_a_flag_that_does_not_exist_is_refused(new: Repository) -> None:
    """The message lists those that do."""
    with pytest.raises(InvalidInputError, match="move_node, create_tag, delete_tag"):
        await new.set_feature_flag("teleport", setting=True)
    assert await kinds(new) == []


async def test_feature_flags_bind_handles_opened_before(new: Repository) -> None:
    """The newest state decides, and the error says how to change it."""
    tip = await new.lookup_branch("main")
    async with new.reopen() as other:
        await other.set_feature_flag("create_tag", setting=False)
    with pytest.raises(FeatureDisabledError, match="set_feature_flag") as caught:
        await new.create_tag("v1", tip)
    assert caught.value.context["feature"] == "create_tag"
    assert caught.value.kind == "feature-disabled"


async def test_reopen_overrides_the_configuration_in_force(spec: int) -> None:
    """Both handles work side by side; what neither names stays."""
    url = memory_url()
    stored = RepositoryConfig(inline_chunk_threshold_bytes=7)
    given = RepositoryConfig(max_concurrent_requests=3, num_updates_per_repo_info_file=9)
    async with (
        Repository.create(url, spec_version=spec, config=stored),
        Repository.open(url, config=given) as repository,
    ):
        repository.default_commit_metadata = {"by": "me"}
        over = RepositoryConfig(get_partial_values_concurrency=4, max_concurrent_requests=5)
        async with repository.reopen(over) as again:
            found = again.config
            assert found.inline_chunk_threshold_bytes == 7
            assert (found.max_concurrent_requests, found.get_partial_values_concurrency) == (5, 4)
            assert found.num_updates_per_repo_info_file == 9
            assert again.default_commit_metadata == {"by": "me"}
            session = await again.writable_session("main")
            await make_array(session, "a", (4,), (1,))
            tip = await session.commit("by the second")
        assert await repository.lookup_branch("main") == tip
        assert repository.config.max_concurrent_requests == 3


async def test_inspecting_a_missing_object_is_refused(filled: Repository) -> None:
    """Missing files are named."""
    missing = SnapshotId.random()
    for look in (filled.inspect_snapshot, filled.list_manifest_files):
        with pytest.raises(SnapshotNotFoundError, match=str(missing)):
            await look(missing)
    manifest = ManifestId.random()
    with pytest.raises(ObjectNotFoundError, match=str(manifest)):
        await filled.inspect_manifest(manifest)
    with pytest.raises(ObjectNotFoundError, match=str(missing)):
        await filled.inspect_transaction_log(str(missing))


async def test_a_missing_transaction_log_is_explained(filled: Repository, spec: int) -> None:
    """In format 1 the first snapshot has none; any other that is missing is damage."""
    tip = await filled.lookup_branch("main")
    *_, first = [info.id async for info in filled.ancestry(branch="main")]
    if spec == 1:
        with pytest.raises(ObjectNotFoundError, match="first of its repository") as refused:
            await filled.inspect_transaction_log(first)
        assert refused.value.context["key"] == f"transactions/{first}"
    else:
        assert (await filled.inspect_transaction_log(first))["new_groups"] == []
    await filled.storage.delete([f"transactions/{tip}"])
    with pytest.raises(ObjectNotFoundError, match="damaged"):
        await filled.inspect_transaction_log(tip)
    with pytest.raises(ObjectNotFoundError, match="no snapshot with this id"):
        await filled.inspect_transaction_log(SnapshotId.random())


async def test_rewriting_manifests_keeps_values_and_reports_progress(filled: Repository) -> None:
    """Each array counts once; chunks stay where they are, and nothing is logged as touched."""
    steps: list[Progress] = []
    before = await filled.lookup_branch("main")
    filled.default_commit_metadata = {"by": "me", "why": "default"}
    async with filled.reopen(TWOS) as splitting:
        session = await splitting.writable_session("main")
        await make_array(session, "b", (6,), (1,))
        for chunk in range(6):
            await write(session, f"b/c/{chunk}", bytes([chunk + 1]))
        await session.commit("second array")
        tip = await splitting.rewrite_manifests(
            "split", branch="main", metadata={"why": "size"}, progress=steps.append
        )
        assert steps == [Progress("rewriting arrays", done, 2) for done in (1, 2)]
        assert await splitting.lookup_branch("main") == tip
        info = await splitting.lookup_snapshot(tip)
        assert (info.message, info.metadata["by"], info.metadata["why"]) == ("split", "me", "size")
        files = await splitting.list_manifest_files(tip)
        assert sorted(it.num_chunk_refs for it in files) == [2, 2, 4]  # the first cells share
        log = await splitting.inspect_transaction_log(tip)
        assert not any(value for name, value in log.items() if name != "header")
        again = await splitting.list_manifest_files(
            await splitting.rewrite_manifests("by the same rules", branch="main")
        )
        assert len(again) == len(files)
        assert {it.id for it in again}.isdisjoint(it.id for it in files)
        session = await splitting.readonly_session("main")
        assert await read(session, "b/c/5") == b"\x06"
        assert (await splitting.diff(from_snapshot_id=before, to_branch="main")).new_arrays == {
            "/b"
        }


async def test_rewriting_holds_only_a_few_manifests(
    spec: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifests are stored one by one while others are made, not all at the end.

    Those of arrays with more cells than may wait for one to share.
    """
    monkeypatch.setattr(flush, "_CELLS_TOGETHER", 49)
    url = memory_url()
    async with Repository.create(url, spec_version=spec), open_storage(url) as plain:
        waiting: list[int] = []

        class Counting(WrappedStorage):
            async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
                if key.startswith("snapshots/"):
                    waiting.append(-1)
                waiting.append(key.startswith("manifests/"))
                return await self.wrapped.put(key, data, if_version=if_version)

        async with Repository.open(Counting(plain)) as repository:
            session = await repository.writable_session("main")
            for name in ("a", "b"):
                await make_array(session, name, (100,), (1,))
                for chunk in range(100):
                    await write(session, f"{name}/c/{chunk}", b"\x07")
            await session.commit("filled")
            waiting.clear()
            async with repository.reopen(TWOS) as splitting:
                await splitting.rewrite_manifests("split", branch="main")
            assert waiting[: waiting.index(-1)] == [True] * 100


async def test_commit_racing_a_rewrite_makes_one_of_them_conflict(filled: Repository) -> None:
    """The second one fails; nothing is lost, and calling again works."""
    session = await filled.writable_session("main")
    await write(session, "a/c/5", b"\x05")

    async def rewriting() -> bool:
        try:
            await filled.rewrite_manifests("rewritten", branch="main")
        except ConflictError:
            return False
        return True

    async def committing() -> bool:
        try:
            await session.commit("committed")
        except ConflictError:
            return False
        return True

    won = await gather(rewriting(), committing())
    assert sorted(won) == [False, True]
    messages = [it.message async for it in filled.ancestry(branch="main")]
    assert messages[0] == ("rewritten" if won[0] else "committed")
    await filled.rewrite_manifests("again", branch="main")


@pytest.mark.parametrize("carried_out", [True, False], ids=["landed", "lost"])
async def test_a_rewrite_settles_lost_replies_or_says_that_nothing_changed(
    spec: int, *, carried_out: bool
) -> None:
    """A reference is settled; of a file that nothing refers to, it says that nothing changed."""
    url = memory_url()
    async with Repository.create(url, spec_version=spec), open_storage(url) as plain:
        lossy = _Lossy(plain)
        async with Repository.open(lossy, config=ONE_TRY) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "a", (4,), (1,))
            await write(session, "a/c/1", b"\x01")
            tip = await session.commit("filled")
            lossy.prefix, lossy.carried_out = "repo" if spec == 2 else "refs/", carried_out
            lossy.lose = 1
            rewritten = await repository.rewrite_manifests("rewritten", branch="main")
            assert [it.id async for it in repository.ancestry()][:2] == [rewritten, tip]
            lossy.prefix, lossy.lose, lossy.carried_out = "manifests/", 100, False
            with pytest.raises(StorageUnavailableError, match="Nothing was published"):
                await repository.rewrite_manifests("failing", branch="main")
            lossy.lose = 0
            assert await repository.lookup_branch("main") == rewritten
            before = set(await objects(plain))
            await repository.rewrite_manifests("at last", branch="main")
            assert len([key for key in set(await objects(plain)) - before if "manif" in key]) == 1


async def test_rewriting_refuses_invalid_requests(new: Repository) -> None:
    """The first snapshot cannot be amended, and there are two ways to commit."""
    with pytest.raises(SessionStateError, match="new_commit"):
        await new.rewrite_manifests("x", branch="main", commit_method="amend")
    wrong: Any = "squash"
    with pytest.raises(InvalidInputError, match="squash"):
        await new.rewrite_manifests("x", branch="main", commit_method=wrong)


async def test_reopening_keeps_authorisations_unless_others_are_given() -> None:
    """None keeps what the first handle may read; an empty mapping takes it away."""
    prefix = "file:///somewhere/"
    container = VirtualChunkContainer(prefix, LocalFileSystemStore("/somewhere"))
    config = RepositoryConfig(virtual_chunk_containers=(container,))
    url = memory_url()
    async with (
        Repository.create(url, config=config),
        Repository.open(url, authorize_virtual_chunk_access={prefix: None}) as repository,
        repository.reopen() as same,
        repository.reopen(authorize_virtual_chunk_access={}) as other,
    ):
        assert same.authorized_virtual_prefixes == repository.authorized_virtual_prefixes
        assert repository.authorized_virtual_prefixes == {prefix}
        assert other.authorized_virtual_prefixes == frozenset()
