"""The facade keeps a repository healthy as the official package does, script by script."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest

from tests.interop.scripts import same

if TYPE_CHECKING:
    from pathlib import Path

_BEGIN = """
storage = icechunk.local_filesystem_storage(place)
config = icechunk.RepositoryConfig(inline_chunk_threshold_bytes=0)
repository = icechunk.Repository.create(storage, config, spec_version=SPEC)

def write(message, value, **more):
    session = repository.writable_session("main")
    root = zarr.group(session.store)
    if "a" not in root:
        root.create_array("a", shape=(4,), chunks=(2,), dtype="u1", compressors=None)
    root["a"][:2] = value
    return session.commit(message, **more)

def now():
    return datetime.datetime.now(datetime.UTC)
"""


@pytest.fixture(params=[1, 2])
def spec(request: pytest.FixtureRequest) -> int:
    """A version of the format."""
    return int(request.param)


def _same(script: str, tmp_path: Path, spec: int = 2) -> None:
    same(_BEGIN.replace("SPEC", str(spec)) + inspect.cleandoc(script), tmp_path)


def test_the_same_files_are_expired_and_collected(tmp_path: Path, spec: int) -> None:
    """Both remove the same files and leave the same files."""
    script = """
    first, second = write("first", 1), write("second", 2)
    repository.create_branch("old", first)
    repository.create_tag("v1", first)
    third = write("third", 3)
    show(first, second, third)
    attempt(lambda: repository.expire_snapshots(datetime.datetime.now()), "InvalidInputError")
    show(repository.expire_snapshots(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)))
    show(repository.expire_snapshots(
        now(), delete_expired_branches=True, delete_expired_tags=True
    ))
    show(repository.list_branches(), repository.list_tags())
    show([info.message for info in repository.ancestry(branch="main")])
    attempt(lambda: repository.garbage_collect(datetime.datetime.now()), "InvalidInputError")
    for dry_run in (True, False):
        summary = repository.garbage_collect(now(), dry_run=dry_run)
        show(summary.snapshots_deleted, summary.chunks_deleted, summary.manifests_deleted)
        show(summary.attributes_deleted, summary.transaction_logs_deleted)
    show(repository.garbage_collect(now(), dry_run=True).snapshots_deleted)
    show(zarr.open_array(repository.readonly_session("main").store, path="a", mode="r")[:])
    """
    _same(script, tmp_path, spec)


def test_awaited_collection_deletes_the_same(tmp_path: Path) -> None:
    """The same, on a loop."""
    script = """
    first, second = write("first", 1), write("second", 2)
    show(first, second)

    async def awaited():
        show(await repository.expire_snapshots_async(now()))
        summary = await repository.garbage_collect_async(now())
        show(summary.snapshots_deleted, summary.chunks_deleted)

    asyncio.run(awaited())
    """
    _same(script, tmp_path)


def test_the_same_bytes_of_chunks_are_counted(tmp_path: Path, spec: int) -> None:
    """Bytes of chunks, blocking and awaited, and by the old name."""
    script = """
    import warnings
    write("first", 1)
    write("second", 2)
    stats = repository.chunk_storage_stats()
    show(stats.native_bytes, stats.virtual_bytes, stats.inlined_bytes)
    show(stats.non_virtual_bytes(), stats.total_bytes())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        show(repository.total_chunks_storage())
        show(asyncio.run(repository.total_chunks_storage_async()))
    show([(warning.category, warning.filename) for warning in caught][:1])
    show(asyncio.run(repository.chunk_storage_stats_async()).native_bytes)
    """
    _same(script, tmp_path, spec)


def test_manifests_are_rewritten_alike(tmp_path: Path) -> None:
    """As the configuration says now; as a commit, or in place of the tip."""
    script = """
    first = write("first", 1)
    show(first, len(repository.list_manifest_files(first)))
    info = repository.list_manifest_files(first)[0]
    show(info.num_chunk_refs, info.size_bytes > 0, info.id)
    anywhere = icechunk.ManifestSplitDimCondition.Any()
    rules = {icechunk.ManifestSplitCondition.AnyArray(): {anywhere: 1}}
    splitting = icechunk.ManifestSplittingConfig.from_dict(rules)
    manifest = icechunk.ManifestConfig(splitting=splitting)
    split = repository.reopen(icechunk.RepositoryConfig(manifest=manifest))
    second = split.rewrite_manifests("split", branch="main", metadata={"k": 1})
    show(second == repository.lookup_branch("main"), len(repository.list_manifest_files(second)))
    show([info.message for info in repository.ancestry(branch="main")])

    async def awaited():
        again = await split.rewrite_manifests_async(
            "amended", branch="main", commit_method="amend"
        )
        show(again == repository.lookup_branch("main"))
        show(len(await repository.list_manifest_files_async(again)))

    asyncio.run(awaited())
    show([info.message for info in repository.ancestry(branch="main")])
    """
    _same(script, tmp_path)


def test_files_are_shown_with_the_same_keys(tmp_path: Path) -> None:
    """The same keys at the first level, and values that do not depend on who wrote."""
    script = """
    first = write("first", 1)
    snapshot = repository.inspect_snapshot(first)
    manifest = repository.list_manifest_files(first)[0].id
    log = repository.inspect_transaction_log(first)
    show(sorted(snapshot), sorted(repository.inspect_repo_info()))
    show(sorted(repository.inspect_manifest(manifest)), sorted(log))

    async def awaited():
        show(await repository.inspect_snapshot_async(first) == snapshot)
        show(sorted(await repository.inspect_repo_info_async()))
        show(sorted(await repository.inspect_manifest_async(manifest)))
        show(await repository.inspect_transaction_log_async(first) == log)

    asyncio.run(awaited())
    """
    _same(script, tmp_path)


def test_the_first_snapshot_has_no_log_in_format_1(tmp_path: Path, spec: int) -> None:
    """Both refuse with the same class; in format 2 both show an empty log."""
    script = """
    first = repository.lookup_branch("main")
    try:
        show(repository.inspect_transaction_log(first)["new_groups"])
    except icechunk.StorageError as error:
        show("StorageError")
    """
    _same(script, tmp_path, spec)


def test_every_message_is_drawn(tmp_path: Path, spec: int) -> None:
    """Every message is in the text and in the picture."""
    script = """
    write("first", 1)
    repository.create_branch("dev", write("second", 2))
    for graph in (
        repository.ancestry_graph(),
        repository.ancestry_graph(branch="dev", plain=True),
        asyncio.run(repository.ancestry_graph_async(plain=True)),
    ):
        show(isinstance(graph, icechunk.AncestryGraph))
        for text in (str(graph), graph._repr_svg_()):
            show([word in text for word in ("first", "second", "dev")])
    attempt(lambda: repository.ancestry_graph(branch="nothing"))
    """
    _same(script, tmp_path, spec)


def test_the_remaining_awaited_spellings_do_the_same(tmp_path: Path) -> None:
    """Of what the other scripts call in their blocking form."""
    script = """
    elsewhere = icechunk.local_filesystem_storage(place + "/elsewhere")

    async def awaited():
        made = await icechunk.Repository.create_async(elsewhere, spec_version=1)
        opened = await icechunk.Repository.open_or_create_async(elsewhere)
        show(made.spec_version, opened.spec_version)
        await repository.save_config_async()
        fetched = await icechunk.Repository.fetch_config_async(storage)
        show(fetched.inline_chunk_threshold_bytes)
        again = await repository.reopen_async(icechunk.RepositoryConfig(max_concurrent_requests=3))
        show(again.config.max_concurrent_requests)
        await repository.set_metadata_async({"a": 1})
        show(await repository.update_metadata_async({"b": 2}))
        status = icechunk.RepoStatus(icechunk.RepoAvailability.read_only)
        await repository.set_status_async(status)
        show((await repository.get_status_async()).availability)
        await repository.set_status_async(icechunk.RepoStatus(icechunk.RepoAvailability.online))
        await repository.set_feature_flag_async("create_tag", False)
        show([flag.name for flag in await repository.disabled_feature_flags_async()])
        show(sorted(flag.name for flag in await repository.enabled_feature_flags_async()))

    asyncio.run(awaited())
    write("first", 1)
    first, second = (repository.writable_session("main") for _ in range(2))
    zarr.open_group(first.store)["a"][0] = 2
    zarr.open_group(second.store)["a"][3] = 3
    tip = first.commit("second")
    asyncio.run(second.rebase_async(icechunk.ConflictDetector()))
    show(second.snapshot_id == tip, second.status())
    attribution = icechunk.Attribution(client="app/1")
    show(icechunk.Repository.open(storage, attribution=attribution).attribution.client)
    show(repository.attribution.client, str(repository.storage).splitlines()[1:2])
    """
    _same(script, tmp_path)


def test_a_repository_is_migrated_in_place_after_a_rehearsal(tmp_path: Path) -> None:
    """In place, with a rehearsal; the old handle says so."""
    script = """
    show(write("first", 1))
    rehearsed = icechunk.upgrade_icechunk_repository(repository, dry_run=True)
    show(rehearsed.spec_version, repository.spec_version, repository.list_branches())
    migrated = icechunk.upgrade_icechunk_repository(repository, dry_run=False)
    show(migrated.spec_version, migrated.list_branches(), icechunk.supported_spec_versions())
    show([info.message for info in migrated.ancestry(branch="main")])
    attempt(lambda: repository.list_branches())
    attempt(lambda: repository.spec_version)
    attempt(lambda: icechunk.upgrade_icechunk_repository(migrated, dry_run=False))
    show(icechunk.Repository.open(storage).spec_version)
    show(zarr.open_array(migrated.readonly_session("main").store, path="a", mode="r")[:])
    """
    _same(script, tmp_path, 1)
