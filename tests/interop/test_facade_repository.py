"""The facade's repository does what the official one does, script by script."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import sync
from tests.interop.scripts import same
from tests.interop.theirs import icechunk

if TYPE_CHECKING:
    from pathlib import Path

_BEGIN = """
storage = icechunk.local_filesystem_storage(place)
repository = icechunk.Repository.create(storage, spec_version=SPEC)

def write(message, value, branch="main", **more):
    session = repository.writable_session(branch)
    root = zarr.group(session.store)
    if "a" not in root:
        root.create_array("a", shape=(4, 6), chunks=(2, 3), dtype="i4")
    root["a"][:2] = value
    return session.commit(message, **more)
"""


@pytest.fixture(params=[1, 2])
def spec(request: pytest.FixtureRequest) -> int:
    """A version of the format."""
    return int(request.param)


def _same(script: str, tmp_path: Path, spec: int) -> None:
    same(_BEGIN.replace("SPEC", str(spec)) + inspect.cleandoc(script), tmp_path)


@pytest.mark.parametrize("name", ["Repository", "Session", "ForkSession", "IcechunkStore"])
def test_every_member_has_the_same_arguments(name: str) -> None:
    """Names, order, defaults, and whether they go by position."""
    theirs, ours = getattr(icechunk, name), getattr(sync, name)
    inherited = set(dir(object)) | {"__class_getitem__", "__hash__"}
    for member in sorted(set(dir(theirs)) - inherited):
        if member.startswith("_") and not member.startswith("__"):
            continue
        wanted, found = inspect.getattr_static(theirs, member), getattr(ours, member)
        if isinstance(wanted, property):
            assert isinstance(inspect.getattr_static(ours, member), property), member
        elif callable(getattr(theirs, member)) and not member.startswith("__"):
            added = _ADDED.get(member, ())
            both = (_arguments(found), _arguments(getattr(theirs, member)))
            same, official = ([it for it in them if it[0] not in added] for them in both)
            assert same == official, member
            assert inspect.iscoroutinefunction(found) == inspect.iscoroutinefunction(
                getattr(theirs, member)
            ), member
    assert _arguments(ours) == _arguments(theirs)


_COMMITTING = ("timeout_seconds", "once", "unchanged")
_SETTINGS = (
    *("storage_options", "cache", "hedge", "packing", "sums", "verify_reads", "after_commit"),
    *("layout", "probe"),
)
_OPENING = ("create", "open", "open_or_create")
_PLACES = ("exists", "fetch_config", "fetch_spec_version")
_REPORTING = ("chunk_storage_stats", "garbage_collect", "rewrite_manifests")
_READING = (
    "ancestry",
    "ancestry_graph",
    "ancestry_graph_async",
    "async_ancestry",
    "readonly_session",
    "readonly_session_async",
)


def _pairs(*names: str) -> list[str]:
    return [*names, *(f"{it}_async" for it in names)]


_ADDED = {
    **dict.fromkeys(_pairs(*_OPENING), _SETTINGS),
    **dict.fromkeys(_pairs(*_PLACES), ("storage_options",)),
    **dict.fromkeys(_pairs(*_REPORTING), ("progress",)),
    **dict.fromkeys(_pairs("expire_snapshots"), ("dry_run",)),
    **dict.fromkeys(_pairs("amend", "flush"), ("allow_missing_forks",)),
    **dict.fromkeys(_pairs("merge"), ("allow_overlaps",)),
    "reindex_array": ("vectorized",),
    **dict.fromkeys(("commit", "commit_async"), (*_COMMITTING, "allow_missing_forks")),
    **dict.fromkeys(
        ("writable_session", "writable_session_async"), ("lease", "owner", "deduplicate")
    ),
    **dict.fromkeys(("diff", "diff_async"), ("from_ref", "to_ref")),
    **dict.fromkeys(_READING, ("ref",)),
    **dict.fromkeys(("ancestry_graph", "ancestry_graph_async"), ("ref", "limit", "plain")),
    "transaction": (*_COMMITTING, "deduplicate"),
}
"""Arguments that the official methods do not have, or whose default is another."""


def _arguments(function: object) -> list[tuple[str, object, object]]:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    return [(it.name, it.kind, it.default) for it in signature.parameters.values()]


def test_repositories_are_created_and_opened_alike(tmp_path: Path, spec: int) -> None:
    """And looking for what is there, and what is not."""
    script = """
    elsewhere = icechunk.local_filesystem_storage(place + "/elsewhere")
    Repository = icechunk.Repository
    show(Repository.exists(storage), Repository.exists(elsewhere))
    show(Repository.fetch_spec_version(storage), Repository.fetch_spec_version(elsewhere))
    show(Repository.fetch_config(storage))
    attempt(lambda: Repository.fetch_config(elsewhere))
    attempt(lambda: Repository.open(elsewhere))
    attempt(lambda: Repository.create(storage))
    show(repository.spec_version, Repository.open(storage).spec_version)
    show(Repository.open_or_create(storage).spec_version)
    made = Repository.open_or_create(elsewhere, create_version=1)
    show(made.spec_version, Repository.exists(elsewhere), made.list_branches())
    show(repository.default_commit_metadata(), repository.authorized_virtual_container_prefixes)
    """
    _same(script, tmp_path, spec)


def test_a_configuration_is_given_saved_and_laid_over_alike(tmp_path: Path, spec: int) -> None:
    """Given, saved, fetched, laid over."""
    script = """
    config = icechunk.RepositoryConfig(inline_chunk_threshold_bytes=7)
    other = icechunk.Repository.open(storage, config)
    show(other.config.inline_chunk_threshold_bytes, icechunk.Repository.fetch_config(storage))
    other.save_config()
    fetched = icechunk.Repository.fetch_config(storage)
    show(fetched.inline_chunk_threshold_bytes)
    show(icechunk.Repository.open(storage).config.inline_chunk_threshold_bytes)
    again = other.reopen(icechunk.RepositoryConfig(max_concurrent_requests=3))
    show(again.config.max_concurrent_requests, again.config.inline_chunk_threshold_bytes)
    show(other.config.max_concurrent_requests)
    show(again.writable_session("main").config == again.config)
    """
    _same(script, tmp_path, spec)


def test_branches_and_tags_change_and_are_refused_alike(tmp_path: Path, spec: int) -> None:
    """Every operation, and every refusal."""
    script = """
    first, second = write("first", 1), write("second", 2)
    show(first, second, repository.list_branches(), repository.list_tags())
    repository.create_branch("dev", first)
    show(repository.lookup_branch("dev"), repository.list_branches())
    exists = {1: "AlreadyExistsError"}.get(int(repository.spec_version))
    attempt(lambda: repository.create_branch("dev", first), exists)
    attempt(lambda: repository.create_branch("other", "nonsense"))
    attempt(lambda: repository.lookup_branch("other"))
    repository.reset_branch("dev", second)
    show(repository.lookup_branch("dev"))
    attempt(lambda: repository.reset_branch("dev", first, from_snapshot_id=first))
    repository.reset_branch("dev", first, from_snapshot_id=second)
    show(repository.lookup_branch("dev"))
    attempt(lambda: repository.delete_branch("main"))
    repository.delete_branch("dev")
    attempt(lambda: repository.delete_branch("dev"))
    repository.create_tag("v1", first)
    attempt(lambda: repository.create_tag("v1", second))
    show(repository.lookup_tag("v1"), repository.list_tags())
    repository.delete_tag("v1")
    attempt(lambda: repository.lookup_tag("v1"))
    attempt(lambda: repository.create_tag("v1", first))
    attempt(lambda: repository.delete_tag("v2"))
    """
    _same(script, tmp_path, spec)


def test_sessions_begin_alike_at_a_branch_a_tag_a_snapshot_and_a_time(
    tmp_path: Path, spec: int
) -> None:
    """Sessions start from a branch, a tag, a snapshot and a time."""
    script = """
    first = write("first", 1)
    between = datetime.datetime.now(datetime.UTC)
    second = write("second", 2)
    repository.create_tag("v1", first)
    for session in (
        repository.readonly_session("main"),
        repository.readonly_session(tag="v1"),
        repository.readonly_session(snapshot_id=first),
        repository.readonly_session("main", as_of=between),
    ):
        show(session.snapshot_id, session.branch, session.mode, session.read_only)
        show(zarr.open_array(session.store, path="a", mode="r")[:])
    attempt(lambda: repository.readonly_session("other"))
    attempt(lambda: repository.readonly_session(tag="other"))
    attempt(lambda: repository.readonly_session(snapshot_id="nonsense"))
    missing = {1: "SnapshotNotFoundError"}.get(int(repository.spec_version))
    attempt(lambda: repository.readonly_session(snapshot_id="ZCECHNKREP0F1RSTCMTG"), missing)
    long_ago = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    attempt(lambda: repository.readonly_session("main", as_of=long_ago))
    naive = datetime.datetime(2020, 1, 1)
    attempt(lambda: repository.readonly_session("main", as_of=naive), "InvalidInputError")
    attempt(lambda: repository.writable_session("other"))
    session = repository.writable_session("main")
    show(session.snapshot_id, session.branch, session.mode, session.read_only)
    """
    _same(script, tmp_path, spec)


@pytest.mark.parametrize("named", [{}, {"branch": "main", "tag": "v1"}])
def test_exactly_one_place_is_named(tmp_path: Path, named: dict[str, Any]) -> None:
    """Both say so with a ``ValueError``."""
    repository = sync.Repository.create(tmp_path / "ours")
    other = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path / "theirs")))
    for each in (repository, other):
        for call in (each.readonly_session, each.ancestry, each.async_ancestry):
            with pytest.raises(ValueError, match="Must provide one of branch, tag, or snapshot_id"):
                call(**named)
    with pytest.raises(ValueError, match="Must provide one"):
        repository.diff(from_branch="main")


def test_history_and_differences_are_the_same(tmp_path: Path, spec: int) -> None:
    """Ancestry, differences, single snapshots."""
    script = """
    first = write("first", 1, metadata={"by": "me", "list": [1, 2.5, None, {"a": True}]})
    second = write("second", 2)
    show(list(repository.ancestry(branch="main")))
    show([info.id for info in repository.ancestry(snapshot_id=first)])
    show(repository.lookup_snapshot(second))
    attempt(lambda: repository.lookup_snapshot("nonsense"))
    missing = {1: "SnapshotNotFoundError"}.get(int(repository.spec_version))
    attempt(lambda: repository.lookup_snapshot("ZCECHNKREP0F1RSTCMTG"), missing)
    attempt(lambda: repository.ancestry(branch="other"))
    attempt(lambda: repository.ancestry(tag="other"))
    show(repository.diff(from_snapshot_id=first, to_branch="main"))
    root = list(repository.ancestry(branch="main"))[-1].id
    show(repository.diff(from_snapshot_id=root, to_snapshot_id=second))
    attempt(lambda: repository.diff(from_branch="main", to_snapshot_id=first))
    history = repository.ancestry(branch="main")
    show(next(history).message, [info.message for info in history], list(history))

    async def awaited():
        infos = repository.async_ancestry(branch="main")
        show((await anext(infos)).message)
        await infos.aclose()
        show([info.message async for info in repository.async_ancestry(branch="main")])

    asyncio.run(awaited())
    """
    _same(script, tmp_path, spec)


def test_the_log_of_operations_is_the_same(tmp_path: Path) -> None:
    """Newest first, blocking and awaited."""
    script = """
    first = write("first", 1)
    repository.create_branch("dev", first)
    repository.create_tag("v1", first)
    repository.reset_branch("dev", write("second", 2))
    repository.delete_tag("v1")
    repository.delete_branch("dev")
    repository.save_config()
    show(list(repository.ops_log()))

    async def awaited():
        show([update async for update in repository.ops_log_async()])

    asyncio.run(awaited())
    """
    _same(script, tmp_path, 2)


def test_awaited_spellings_do_the_same_on_loops_that_come_and_go(tmp_path: Path, spec: int) -> None:
    """On loops that come and go."""
    script = """
    first = write("first", 1)

    async def refs():
        await repository.create_branch_async("dev", first)
        await repository.create_tag_async("v1", first)
        show(await repository.list_branches_async(), await repository.list_tags_async())
        show(await repository.lookup_branch_async("dev"), await repository.lookup_tag_async("v1"))
        session = await repository.writable_session_async("dev")
        zarr_group = await zarr.api.asynchronous.open_group(session.store)
        await (await zarr_group.create_group("g")).update_attributes({"x": 1})
        show(session.has_uncommitted_changes, session.status())
        second = await session.commit_async("second", {"k": 1})
        show(second, await repository.lookup_branch_async("dev"))
        show(await repository.diff_async(from_tag="v1", to_branch="dev"))
        await repository.reset_branch_async("main", second, from_snapshot_id=first)
        await repository.delete_branch_async("dev")
        await repository.delete_tag_async("v1")
        show(await repository.lookup_snapshot_async(second))
        try:
            await repository.lookup_branch_async("dev")
        except icechunk.IcechunkError as error:
            show(type(error).__name__, error.kind)

    async def opening():
        opened = await icechunk.Repository.open_async(storage)
        show(await opened.list_branches_async(), opened.spec_version)
        show(await icechunk.Repository.exists_async(storage))
        show(await icechunk.Repository.fetch_spec_version_async(storage))
        session = await opened.readonly_session_async("main")
        show(session.snapshot_id, session.read_only)
        together = [opened.lookup_branch_async("main") for _ in range(20)]
        show(set(await asyncio.gather(*together)))

    asyncio.run(refs())
    asyncio.run(opening())
    """
    _same(script, tmp_path, spec)


def test_a_transaction_commits_at_the_end_of_its_block_or_nothing(
    tmp_path: Path, spec: int
) -> None:
    """Commit at the end of the block, or nothing."""
    script = """
    with repository.transaction("main", message="first", metadata={"k": 1}) as store:
        zarr.create_array(store, name="a", shape=(4,), chunks=(2,), dtype="i4")[:] = 1
    show(list(repository.ancestry(branch="main"))[0])

    def failing():
        with repository.transaction("main", message="second") as store:
            zarr.open_array(store, path="a")[:] = 2
            raise KeyError("stop")

    attempt(failing)
    show([info.message for info in repository.ancestry(branch="main")])

    def racing():
        with repository.transaction("main", message="late") as store:
            zarr.open_array(store, path="a")[:2] = 3
            with repository.transaction("main", message="early") as other:
                zarr.open_array(other, path="a")[2:] = 4

    attempt(racing)

    def rebasing():
        solver = icechunk.BasicConflictSolver()
        with repository.transaction("main", message="late", rebase_with=solver) as store:
            zarr.open_array(store, path="a")[:2] = 3
            with repository.transaction("main", message="early 2") as other:
                zarr.open_array(other, path="a")[2:] = 5

    attempt(rebasing)
    show([info.message for info in repository.ancestry(branch="main")])
    show(zarr.open_array(repository.readonly_session("main").store, path="a", mode="r")[:])
    """
    _same(script, tmp_path, spec)


def test_metadata_of_the_repository_and_of_commits_is_the_same(tmp_path: Path) -> None:
    """Its own, its status, its flags; defaults of commits."""
    script = """
    show(repository.get_metadata(), repository.metadata)
    repository.set_metadata({"a": 1, "b": {"c": [1, None]}})
    show(repository.update_metadata({"a": 2}), repository.metadata)
    repository.set_default_commit_metadata({"by": "default", "k": 1})
    write("first", 1, metadata={"k": 2})
    show(repository.default_commit_metadata(), list(repository.ancestry(branch="main"))[0])
    show(repository.status.availability, repository.get_status().limited_availability_reason)
    closed = icechunk.RepoStatus(
        icechunk.RepoAvailability.read_only, limited_availability_reason="maintenance"
    )
    repository.set_status(closed)
    show(repository.status.availability, repository.status.limited_availability_reason)
    attempt(lambda: repository.writable_session("main"))
    repository.set_status(icechunk.RepoStatus(icechunk.RepoAvailability.online))
    flags = {flag.name: (flag.id, flag.default_enabled, flag.setting, flag.enabled)
             for flag in repository.feature_flags()}
    show(flags)
    repository.set_feature_flag("create_tag", False)
    show([flag.name for flag in repository.disabled_feature_flags()])
    show(sorted(flag.name for flag in repository.enabled_feature_flags()))
    attempt(lambda: repository.create_tag("v1", repository.lookup_branch("main")))
    repository.set_feature_flag("create_tag", None)
    repository.create_tag("v1", repository.lookup_branch("main"))
    attempt(lambda: repository.set_feature_flag("nonsense", True))

    async def awaited():
        show(await repository.get_metadata_async())
        show((await repository.get_status_async()).availability)
        show(len(await repository.feature_flags_async()))

    asyncio.run(awaited())
    """
    _same(script, tmp_path, 2)


def test_people_are_shown_the_same_lines(tmp_path: Path, spec: int) -> None:
    """Where users read it: the same lines."""
    script = """
    write("first", 1)
    session = repository.writable_session("main")
    zarr.open_group(session.store)["a"][0] = 3
    readonly = repository.readonly_session("main")
    here = place
    for value in (session, readonly, session.store, readonly.store, session.status(), storage):
        lines = str(value).replace(here, "here").splitlines()
        show([line for line in lines if not line.startswith("<")])
    """
    _same(script, tmp_path, spec)


def test_repositories_travel(tmp_path: Path, spec: int) -> None:
    """As plain data, with what they were given."""
    script = """
    write("first", 1)
    config = icechunk.RepositoryConfig(inline_chunk_threshold_bytes=7)
    opened = icechunk.Repository.open(storage, config)
    opened.set_default_commit_metadata({"by": "me"})
    copy = pickle.loads(pickle.dumps(opened))
    show(copy.list_branches(), copy.spec_version, copy.default_commit_metadata())
    show(copy.config.inline_chunk_threshold_bytes)
    repository = copy
    write("second", 2)
    show([info.metadata for info in copy.ancestry(branch="main")][:2])
    """
    _same(script, tmp_path, spec)
