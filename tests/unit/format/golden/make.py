"""Make the golden repositories with the official wheel that is installed; see README.md."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import zarr
from zarr.core.buffer import default_buffer_prototype

icechunk: Any = importlib.import_module("icechunk")

HERE = Path(__file__).parent
KEPT = ("repo", "config.yaml", "snapshots", "manifests", "transactions", "refs", "overwritten")
"""Metadata; chunk objects are left out."""
BUCKET = "s3://bucket/"


def config(**options: Any) -> Any:
    """Return a configuration that makes small inline chunks and knows one bucket."""
    made = icechunk.RepositoryConfig(inline_chunk_threshold_bytes=8, **options)
    store = icechunk.s3_store(region="us-east-1")
    made.set_virtual_chunk_container(icechunk.VirtualChunkContainer(BUCKET, store))
    return made


def add_array(group: Any, name: str, shape: tuple[int, ...], chunk: int, **more: Any) -> Any:
    """Create an array of bytes whose chunks are as long as they are written."""
    chunks = (chunk,) * len(shape)
    return group.create_array(
        name, shape=shape, chunks=chunks, dtype="u1", compressors=None, **more
    )


def fill(repo: Any) -> None:
    """Commit groups, arrays of several ranks and references of every kind."""
    session = repo.writable_session("main")
    root = zarr.create_group(store=session.store, attributes={"title": "golden é"})
    add_array(root, "scalar", (), 1)[...] = 7
    line = add_array(root, "line", (10,), 2, dimension_names=["x"])
    line[0:6], line[8:10] = 1, 2
    plane = add_array(root, "plane", (40, 60), 20, dimension_names=["y", None])
    plane[0:20, :], plane[20:40, 40:60] = 3, 4
    cube = add_array(root.create_group("group-a"), "cube", (4, 4, 4), 2)
    cube[0:2, 0:2, :], cube[2:4, 2:4, 2:4] = 5, 6
    root.create_group("group").create_group("deeper")
    add_array(root["group"], "empty", (3,), 1)
    session.commit("Fill", {"author": "golden", "count": 300, "nested": {"b": [1, -2], "a": None}})

    session = repo.writable_session("main")
    root = zarr.open_group(store=session.store)
    add_array(root, "virtual", (8,), 1)
    session.store.set_virtual_refs(
        "virtual",
        [
            icechunk.VirtualChunkSpec([0], f"{BUCKET}plain", 0, 1),
            icechunk.VirtualChunkSpec([1], f"{BUCKET}étag", 1, 1, etag_checksum='"abc"'),
            icechunk.VirtualChunkSpec(
                [3], f"{BUCKET}dated", 2, 1,
                last_updated_at_checksum=datetime(2024, 5, 6, tzinfo=UTC),
            ),
            icechunk.VirtualChunkSpec([7], f"{BUCKET}plain", 2**40, 1),
        ],
    )  # fmt: skip
    root["line"].attrs["units"] = "m"
    del root["group/deeper"]
    session.commit("Change")


def make_spec1(where: Path, **version: Any) -> None:
    """Make a repository of spec 1 with branches, tags and a deleted tag."""
    repo = icechunk.Repository.create(storage(where), config(), **version)
    repo.save_config()
    fill(repo)
    tip = repo.lookup_branch("main")
    repo.create_branch("side", tip)
    repo.create_tag("v1", tip)
    repo.create_tag("gone", tip)
    repo.delete_tag("gone")


def make_contents(where: Path) -> None:
    """Make a repository of spec 2 whose point is its hierarchy and its references."""
    repo = icechunk.Repository.create(storage(where), config(), spec_version=2)
    fill(repo)
    session = repo.rearrange_session("main")
    session.move("/group-a", "/group/moved")
    session.commit("Move")
    session = repo.writable_session("main")
    root = zarr.open_group(store=session.store)
    many = 1100
    add_array(root, "many", (many,), 1)
    session.store.set_virtual_refs(
        "many",
        [
            icechunk.VirtualChunkSpec(
                [at], f"{BUCKET}model/run-2024/member-{at % 7:03}/file-{at:06}.nc", 4000 + at, 100
            )
            for at in range(many)
        ],
    )
    session.commit("Many virtual references")
    session = repo.writable_session("main")
    zarr.open_group(store=session.store)["many"].attrs["units"] = "K"
    session.amend("Many virtual references, amended", metadata={"amended": True})


def make_history(where: Path) -> None:
    """Make a repository of spec 2 whose point is its repo info: every kind of operation."""
    options = config(num_updates_per_repo_info_file=20)
    repo = icechunk.Repository.create(storage(where), options, spec_version=2)
    ids = [commit(repo, number) for number in range(5)]
    repo.create_branch("side", ids[1])
    repo.create_branch("doomed", ids[1])
    repo.delete_branch("doomed")
    repo.reset_branch("side", ids[2])
    repo.create_tag("kept", ids[4])
    repo.create_tag("gone", ids[3])
    repo.delete_tag("gone")
    repo.set_metadata({"owner": "golden", "sizes": [1, 2, 300]})
    repo.update_metadata({"more": {"a": 1.5}})
    repo.set_feature_flag("move_node", setting=False)
    repo.set_feature_flag("create_tag", setting=True)
    repo.set_feature_flag("delete_tag", setting=True)
    repo.set_feature_flag("delete_tag", setting=None)
    session = repo.writable_session("side")
    zarr.open_group(store=session.store).attrs["detached"] = True
    session.flush("Detached")
    newest = next(iter(repo.ancestry(snapshot_id=ids[2]))).written_at
    repo.expire_snapshots(newest + timedelta(microseconds=1))
    repo.garbage_collect(newest - timedelta(days=9))
    repo.save_config()
    session = repo.writable_session("main")
    zarr.open_group(store=session.store).attrs["amended"] = True
    session.amend("Amended")
    repo.set_status(
        icechunk.RepoStatus(icechunk.RepoAvailability.read_only, datetime.now(UTC), "x")
    )


def commit(repo: Any, number: int) -> str:
    """Commit one small change."""
    session = repo.writable_session("main")
    if number == 0:
        zarr.create_group(store=session.store)
    zarr.open_group(store=session.store).attrs["number"] = number
    snapshot_id: str = session.commit(f"Commit {number}", {"number": number})
    return snapshot_id


def make_strays(where: Path) -> None:
    """Make a repository of spec 2 with chunks that do not fit their arrays."""
    repo = icechunk.Repository.create(storage(where), config(), spec_version=2)
    session = repo.writable_session("main")
    root = zarr.create_group(store=session.store)
    add_array(root, "scalar", (), 1)[...] = 7
    add_array(root, "line", (4,), 2)[:] = 1
    add_array(root, "plane", (2, 4), 2)[:] = 2
    add_array(root, "changed", (4,), 2)[:] = 3
    for key in ("scalar/c/0", "line/c/1/1", "plane/c/0", "plane/c/0/0/0"):
        put(session, key, b"stray")
    session.commit("Strays")
    session = repo.writable_session("main")
    array = zarr.open_group(store=session.store)["changed"]
    document = {**array.metadata.to_dict(), "shape": (2, 2)}
    document["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": (2, 2)}}
    put(session, "changed/zarr.json", json.dumps(document, default=str).encode())
    session.commit("Change a rank")


def put(session: Any, key: str, data: bytes) -> None:
    """Write a value through the session's store."""
    buffer = default_buffer_prototype().buffer.from_bytes(data)
    asyncio.run(session.store.set(key, buffer))


def make_migrated(where: Path, source: Path) -> None:
    """Bring a repository of spec 1 to spec 2: files of both versions side by side."""
    shutil.copytree(source, where)
    repo = icechunk.Repository.open(storage(where))
    repo = icechunk.upgrade_icechunk_repository(repo, dry_run=False)
    session = repo.writable_session("main")
    zarr.open_group(store=session.store).attrs["migrated"] = True
    session.commit("After migration")


def storage(where: Path) -> Any:
    """Return a storage in a local folder."""
    return icechunk.local_filesystem_storage(str(where))


def keep(made: Path, name: str) -> None:
    """Copy the metadata of a repository here."""
    shutil.rmtree(HERE / name, ignore_errors=True)
    for part in KEPT:
        if (made / part).is_dir():
            shutil.copytree(made / part, HERE / name / part)
        elif (made / part).exists():
            (HERE / name).mkdir(exist_ok=True)
            shutil.copy(made / part, HERE / name / part)


def drop_unused_backups(where: Path) -> None:
    """Keep only the backup in which the log of operations continues."""
    repo = icechunk.Repository.open(storage(where))
    named = repo.inspect_repo_info().get("repo_before_updates")
    for path in (where / "overwritten").iterdir():
        if path.name != named:
            path.unlink()


def answers(name: str) -> dict[str, Any]:
    """Ask the official engine what it sees in a golden repository."""
    repo = icechunk.Repository.open(storage(HERE / name))
    snapshots = sorted(path.name for path in (HERE / name / "snapshots").iterdir())
    logs = sorted(path.name for path in (HERE / name / "transactions").iterdir())
    tip = repo.readonly_session("main")
    files = {it.id for ref in snapshots for it in _files(repo, ref)}
    found: dict[str, Any] = {
        "branches": {branch: repo.lookup_branch(branch) for branch in repo.list_branches()},
        "tags": {tag: repo.lookup_tag(tag) for tag in repo.list_tags()},
        "ancestry": [it.id for it in repo.ancestry(branch="main")],
        "snapshots": {it: repo.inspect_snapshot(it) for it in snapshots},
        "logs": {it: brief(repo.inspect_transaction_log(it)) for it in logs},
        "manifests": {it: repo.inspect_manifest(it) for it in sorted(files)},
        "locations": sorted(tip.all_virtual_chunk_locations())[::100],
    }
    if (HERE / name / "repo").exists():
        found["repo_info"] = repo.inspect_repo_info()
        found["operations"] = [type(it.kind).__name__ for it in repo.ops_log()]
    return found


def brief(log: dict[str, Any]) -> dict[str, Any]:
    """Keep the first coordinates of each array, and how many there are."""
    for array in log["updated_chunks"]:
        array["count"] = len(array["chunks"])
        array["chunks"] = array["chunks"][:20]
    return log


def _files(repo: Any, snapshot_id: str) -> list[Any]:
    """The manifests of a snapshot; a detached or expired one may not be listed any more."""
    try:
        return list(repo.list_manifest_files(snapshot_id))
    except icechunk.IcechunkError:
        return []


def main() -> None:
    """Make what the installed release makes, and with 2.3.0 also the answers."""
    release = icechunk.__version__
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if release == "1.1.21":
            make_spec1(work / "spec1")
            keep(work / "spec1", "spec1-by-1.1.21")
            return
        if release != "2.3.0":
            sys.exit(f"needs icechunk 1.1.21 or 2.3.0, found {release}")
        make_spec1(work / "spec1", spec_version=1)
        keep(work / "spec1", "spec1-by-2.3.0")
        make_migrated(work / "migrated", HERE / "spec1-by-1.1.21")
        drop_unused_backups(work / "migrated")
        keep(work / "migrated", "migrated-by-2.3.0")
        make_contents(work / "contents")
        drop_unused_backups(work / "contents")
        keep(work / "contents", "spec2-contents-by-2.3.0")
        make_strays(work / "strays")
        drop_unused_backups(work / "strays")
        keep(work / "strays", "spec2-strays-by-2.3.0")
        make_history(work / "history")
        drop_unused_backups(work / "history")
        keep(work / "history", "spec2-history-by-2.3.0")
    for path in sorted(HERE.glob("*-by-*")):
        if path.is_dir():
            text = json.dumps(answers(path.name), sort_keys=True, separators=(",", ":"))
            (path / "answers.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
