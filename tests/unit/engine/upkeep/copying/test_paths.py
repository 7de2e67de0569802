"""Copies of chosen arrays and groups: each snapshot has a counterpart with those alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository, upkeep
from icechunk_async.engine.files.differences import difference
from icechunk_async.engine.upkeep.copying.copy import copy_repository
from icechunk_async.engine.upkeep.copying.derivation import COPIED_FROM, Derivation, as_paths
from icechunk_async.engine.upkeep.copying.plan import assets_of
from icechunk_async.engine.upkeep.copying.selection import Selection
from icechunk_async.errors import (
    InvalidInputError,
    NotFoundError,
    RepositoryExistsError,
    StorageUnavailableError,
)
from icechunk_async.format.envelope import FileType, pack, unpack
from icechunk_async.format.ids import ManifestId
from icechunk_async.format.manifest.writing import encode_manifest
from icechunk_async.format.snapshot import (
    ManifestFileInfo,
    ManifestRef,
    Nodes,
    decode_snapshot,
)
from icechunk_async.format.snapshot.writing import encode_snapshot
from icechunk_async.storage import open_storage
from tests.helpers import group_document, make_array, memory_url, objects, read, write
from tests.unit.engine.upkeep.copying.copy_tools import (
    Breaking,
    Counting,
    contents_of,
    make_origin,
    open_with_access,
    prefixes,
    shown_by,
    stored,
)
from tests.unit.engine.upkeep.upkeep_tools import now

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.storage import Storage


def is_chosen(key: str, paths: list[str]) -> bool:
    """Return whether a key belongs to chosen paths: it is below them, or the document above."""
    folder = key.rpartition("/")[0] if key.endswith("zarr.json") else key
    return any(
        folder == path
        or folder.startswith(f"{path}/")
        or (key.endswith("zarr.json") and (not folder or path.startswith(f"{folder}/")))
        for path in paths
    )


CHOICES = (["g/a"], ["g"], ["other", "/g/deep/b/"])
OFTEN = [
    (1, False, CHOICES[0]),
    (1, True, CHOICES[2]),
    (2, False, CHOICES[2]),
    (2, True, CHOICES[1]),
]


@pytest.mark.parametrize(
    ("spec", "shallow", "paths"),
    [
        pytest.param(*case, marks=() if case in OFTEN else pytest.mark.thorough)
        for case in product((1, 2), (False, True), CHOICES)
    ],
)
async def test_each_snapshot_has_a_counterpart_with_what_was_chosen(
    tmp_path: Path, spec: int, *, paths: list[str], shallow: bool
) -> None:
    """Times, messages and properties stay, and the id of the origin is among them."""
    origin = await make_origin(tmp_path, spec)
    ours, sources = prefixes(origin)
    copy = tmp_path / "copy"
    async with open_with_access(origin, sources) as repository:
        await repository.copy_to(copy, paths=paths, shallow=shallow)
        expected = await contents_of(repository)
        lines = {
            name: [info async for info in repository.ancestry(branch=name)]
            for name in ("main", "side")
        }
    access = (ours, sources) if shallow else (sources,)
    async with open_with_access(copy, *access) as repository:
        found = await contents_of(repository)
        named: dict[str, SnapshotId] = {}
        for name, line in lines.items():
            again = [info async for info in repository.ancestry(branch=name)]
            assert [(it.message, it.flushed_at) for it in again] == [
                (it.message, it.flushed_at) for it in line
            ]
            for old, new in zip(line, again, strict=True):
                named[str(old.id)] = new.id
                if old.parent_id is None:
                    assert new.id == old.id
                else:
                    assert new.metadata == {**old.metadata, COPIED_FROM: str(old.id)}
                    assert new.id != old.id
        assert await repository.lookup_tag("v1") == named[str(lines["main"][-3].id)]
        clean = [path.strip("/") for path in paths]
        for snapshot_id, content in expected.items():
            # Groups above a path are there if the path is.
            there = [it for it in clean if any(key.startswith(f"{it}/") for key in content)]
            some = {key: data for key, data in content.items() if is_chosen(key, there)}
            assert found.pop(str(named[snapshot_id])) == some, snapshot_id
        assert found == {}
        check = await repository.verify("length")
        assert check.is_healthy


async def test_only_chunks_of_chosen_arrays_are_copied(tmp_path: Path, spec: int) -> None:
    """No more than a collection of garbage would leave, and manifests that need no change stay."""
    origin = await make_origin(tmp_path, spec, sums=True)
    async with open_with_access(origin) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "other/alone", (4,), (1,))
        await write(session, "other/alone/c/0", b"x" * 1500)
        await session.commit("alone")
        await repository.copy_to(tmp_path / "copy", paths=["other"])
    theirs = {it.name for it in (origin / "chunks").iterdir()}
    ours = {it.name for it in (tmp_path / "copy" / "chunks").iterdir()}
    assert ours < theirs
    kept = dict.fromkeys(("chunks", "manifests"), 0)
    for folder in kept:
        for path in (tmp_path / "copy" / folder).iterdir():
            if (origin / folder / path.name).exists():  # else its arrays shared it with others
                kept[folder] += 1
                assert path.read_bytes() == (origin / folder / path.name).read_bytes()
    assert kept["chunks"] == len(ours)
    assert kept["manifests"] > 0
    async with Repository.open(tmp_path / "copy") as repository:
        assert (await repository.check_references()).is_whole
        found = await repository.garbage_collect(now(), dry_run=True)
        assert (found.chunks_deleted, found.manifests_deleted, found.snapshots_deleted) == (0, 0, 0)


async def test_nodes_that_are_moved_in_and_out_are_new_and_deleted(tmp_path: Path) -> None:
    """Each log says what differs between two snapshots of the copy, and nothing of other nodes."""
    origin = await make_origin(tmp_path, 2)
    for paths in (["g"], ["other"], ["other/deep"], ["g/a", "g/c"]):
        async with open_storage(origin) as source, open_storage(memory_url()) as destination:
            await copy_repository(source, destination, derivation=Derivation(as_paths(paths)))
            assets = assets_of(destination, 2)
            async with Repository.open(destination) as repository:
                lines = [info async for info in repository.ancestry(branch="main")]
            for info in lines[:-1]:
                assert info.parent_id is not None
                before, after = [await assets.read_snapshot(it) for it in (info.parent_id, info.id)]
                net = await difference(before, after, assets.manifests)
                log = await assets.transaction_log(info.id)
                for name in (
                    *("new_groups", "new_arrays", "deleted_groups", "deleted_arrays"),
                    *("updated_groups", "updated_arrays"),
                ):
                    assert getattr(log, name) == getattr(net, name), (paths, info.message, name)
                assert {(it.source, it.target) for it in log.moves} == {
                    (it.source, it.target) for it in net.moves
                }
                for node, coords in net.updated_chunks.items():
                    told = {tuple(it) for it in log.updated_chunks[node].tolist()}
                    assert {tuple(it) for it in coords.tolist()} <= told
                known = {it.id for it in (*before.nodes.values(), *after.nodes.values())}
                assert log.updated_chunks.keys() <= known
            report = await upkeep.verify(destination, "structure")
            assert report.is_healthy


async def test_unchanged_origin_costs_three_requests_and_new_commits_what_they_added(
    tmp_path: Path, spec: int
) -> None:
    """Chunks that the copy has are neither read nor listed."""
    origin = await make_origin(tmp_path, spec)
    derivation = Derivation(as_paths(["other"]))
    async with open_storage(origin) as here, open_storage(tmp_path / "copy") as there:
        source, destination = Counting(here), Counting(there)

        async def copied() -> list[tuple[str, str]]:
            source.requests.clear()
            destination.requests.clear()
            await copy_repository(source, destination, derivation=derivation)
            return [*source.requests, *destination.requests]

        await copied()
        unchanged = await copied()
        assert {operation for operation, _ in unchanged} <= {"get", "list_prefix"}
        if spec > 1:
            assert len(unchanged) == 3
        async with Repository.open(origin) as repository:
            for number in range(2):
                session = await repository.writable_session("main")
                name = "other/deep/b" if spec > 1 else "other/c"
                await write(session, f"{name}/c/{4 + number}", b"%d" % number * 3000)
                await write(session, "g/c/c/0" if spec > 1 else "g/deep/b/c/0", b"x" * 3000)
                await session.commit("more")
        added = await copied()
        chunks = [key for operation, key in added if operation == "put" and "chunks/" in key]
        assert len(chunks) == 2
        if spec > 1:
            assert "list_prefix" not in {operation for operation, _ in added}
            assert len(added) <= 40
    async with Repository.open(tmp_path / "copy") as repository:
        assert (await repository.check_references()).is_whole
        session = await repository.readonly_session("main")
        assert await read(session, f"{name}/c/5") == b"1" * 3000


async def test_unknown_paths_are_refused_by_name_with_those_that_are_alike(
    tmp_path: Path, spec: int
) -> None:
    """Before anything is written; a path at any of the chosen tips is known."""
    origin = await make_origin(tmp_path, spec)
    async with open_with_access(origin) as repository, open_storage(memory_url()) as destination:
        for more in ({}, {"shallow": True}, {"as_zarr": True}):
            options: Any = more
            with pytest.raises(NotFoundError, match=r"'/otherx'.*Did you mean.*'/other'") as caught:
                await repository.copy_to(destination, paths=["other", "otherx"], **options)
            assert caught.value.context["path"] == "/otherx"
            near: Any = caught.value.context["near"]
            assert "/other" in near
        with pytest.raises(NotFoundError, match=r"'/zzzzz' .* at the tip of main.*There are: "):
            await repository.copy_to(destination, paths=["zzzzz"], refs=["main"])
        with pytest.raises(NotFoundError, match="'/g/a'"):
            await repository.copy_to(destination, paths=["g/a"], refs=["main"])
        wrongs: tuple[Any, ...] = ("other", [], ["a//b"])
        for wrong in wrongs:
            with pytest.raises(InvalidInputError):
                await repository.copy_to(destination, paths=wrong)
        assert not await objects(destination)
        await repository.copy_to(destination, paths=["g/a"])  # of the tag


def test_paths_are_normal_and_none_is_below_another() -> None:
    """The root stands for everything."""
    assert as_paths(["b/", "/a/x", "a", "a/x/y"]) == ("/a", "/b")
    assert as_paths(["a", "ab"]) == ("/a", "/ab")
    assert as_paths(["a", "/"]) is None
    assert as_paths(None) is None


async def test_part_killed_at_a_write_is_whole_and_continued(tmp_path: Path, spec: int) -> None:
    """Chunks and manifests that are there are not written again.

    In format version 1 each branch and tag appears by itself.
    """
    origin = await make_origin(tmp_path, spec)
    _, sources = prefixes(origin)
    derivation = Derivation(as_paths(["other", "g/deep"]))
    async with open_storage(origin) as source, open_storage(memory_url()) as whole:
        await copy_repository(source, whole, derivation=derivation)
        expected = await stored(whole)
        killed = 0
        for writes in range(0, 100, 4):
            copy = memory_url()
            async with open_storage(copy) as destination:
                breaking = Breaking(destination)
                breaking.writes_left = writes
                try:
                    await copy_repository(source, breaking, derivation=derivation)
                except StorageUnavailableError:
                    killed += 1
                else:
                    break
                there = await objects(destination)
                shown = await shown_by(copy, sources)
                counting = Counting(destination)
                report = await copy_repository(source, counting, derivation=derivation)
                assert report.objects_copied
                written = {key for operation, key in counting.requests if operation == "put"}
                assert not written & {key for key in there if key.startswith(("chunks/", "manif"))}
                assert await stored(destination) == expected
                assert shown.items() <= (await shown_by(copy, sources)).items()
                assert shown == {} or spec == 1
        assert killed > 5


async def test_other_paths_are_refused_unless_history_may_be_replaced(tmp_path: Path) -> None:
    """Every snapshot would be another one. Chunks that both need are not copied again."""
    origin = await make_origin(tmp_path, 2)
    copy = tmp_path / "copy"
    async with open_with_access(origin) as repository:
        await repository.copy_to(copy, paths=["other"])
        for other in (["other", "g"], None):
            with pytest.raises(RepositoryExistsError, match=r"it holds /other.*discard_changes"):
                await repository.copy_to(copy, paths=other)
        chunks = {it.name for it in (copy / "chunks").iterdir()}
        async with open_storage(copy) as storage:
            counting = Counting(storage)
            await repository.copy_to(counting, paths=["other", "g"], discard_changes=True)
            written = {key for operation, key in counting.requests if operation == "put"}
        assert not {f"chunks/{it}" for it in chunks} & written
        await repository.copy_to(copy, discard_changes=True)
        expected = await repository.branches()
    async with Repository.open(copy) as repository:
        assert await repository.branches() == expected
        assert (await repository.check_references()).is_whole


async def test_paths_go_with_refs_and_a_time(tmp_path: Path, spec: int) -> None:
    """The oldest snapshot that is kept becomes a child of the first one, as in other copies."""
    origin = await make_origin(tmp_path, spec)
    _, sources = prefixes(origin)
    async with open_with_access(origin, sources) as repository:
        line = [info async for info in repository.ancestry(branch="main")]
        copy = tmp_path / "copy"
        await repository.copy_to(copy, paths=["other"], refs=["main"], since=line[1].id)
        expected = (await contents_of(repository))[str(line[1].id)]
    async with open_with_access(copy, sources) as repository:
        again = [info async for info in repository.ancestry(branch="main")]
        assert [it.message for it in again] == [it.message for it in (*line[:2], line[-1])]
        assert set(await repository.branches()) == {"main"}
        found = await contents_of(repository)
        kept = {key: it for key, it in expected.items() if is_chosen(key, ["other"])}
        assert found[str(again[1].id)] == kept
        if spec > 1:
            await repository.diff(from_snapshot_id=again[-1].id, to_snapshot_id=again[0].id)
        session = await repository.writable_session("main")
        await write(session, "other/zarr.json", group_document(name="here"))
        await session.commit("the copy takes commits")


@pytest.mark.parametrize("shallow", [False, True])
async def test_manifests_of_several_arrays_are_divided(tmp_path: Path, *, shallow: bool) -> None:
    """Other writers may put several arrays into one; what was not chosen is not referred to."""
    origin = tmp_path / "origin"
    async with Repository.create(origin) as repository:
        session = await repository.writable_session("main")
        for name in ("a", "b"):
            await make_array(session, name, (4,), (1,))
            for number in range(3):
                await write(session, f"{name}/c/{number}", name.encode() * (1000 + number))
        tip = await session.commit("two arrays")
    async with open_storage(origin) as storage:
        await _join_manifests(storage, tip)
    async with Repository.open(origin) as repository:
        session = await repository.readonly_session("main")
        assert await read(session, "b/c/2") == b"b" * 1002
        await repository.copy_to(tmp_path / "copy", paths=["a"], shallow=shallow)
        await repository.copy_to(tmp_path / "whole", shallow=True)
    if not shallow:
        assert len(list((tmp_path / "copy" / "chunks").iterdir())) == 3
    ours = f"{origin.as_uri()}/"
    for name, keys in (("copy", ["a"]), ("whole", ["a", "b"])):
        access = (ours,) if shallow or name == "whole" else ()
        async with open_with_access(tmp_path / name, *access) as repository:
            session = await repository.readonly_session("main")
            for key in keys:
                assert await read(session, f"{key}/c/2") == key.encode() * 1002
            assert (await repository.verify("length")).is_healthy


async def _join_manifests(storage: Storage, snapshot_id: SnapshotId) -> None:
    """Put the references of all arrays of a snapshot into one manifest, as others may."""
    assets = assets_of(storage, 2)
    key = assets.layout.names.snapshot(snapshot_id)
    snapshot = decode_snapshot(unpack((await storage.get(key)).data, FileType.SNAPSHOT))
    arrays: dict[Any, Any] = {}
    for node in snapshot.nodes.values():
        if node.array is not None:
            (ref,) = node.array.manifests
            arrays[node.id] = (await assets.manifests.read(ref.manifest_id)).refs(node.id, 1)
    joined = ManifestId.random()
    data = pack(encode_manifest(joined, arrays), FileType.MANIFEST, 2)
    await storage.put(assets.layout.names.manifest(joined), data)
    made = _with_manifest(snapshot, joined, len(data), sum(map(len, arrays.values())))
    await storage.put(key, pack(encode_snapshot(made, 2), FileType.SNAPSHOT, 2))


def _with_manifest(snapshot: Any, manifest_id: ManifestId, size: int, count: int) -> Any:
    nodes = [
        it
        if it.array is None
        else replace(it, array=replace(it.array, manifests=(ManifestRef(manifest_id, ((0, 3),)),)))
        for it in snapshot.nodes.values()
    ]
    files = {manifest_id: ManifestFileInfo(manifest_id, size, count)}
    return replace(snapshot, nodes=Nodes(nodes), manifests=files)


async def test_more_refs_bring_an_earlier_copy_up_to_date(tmp_path: Path) -> None:
    """With the same paths; what is there is not looked at."""
    origin = await make_origin(tmp_path, 2)
    derivation = Derivation(as_paths(["other"]))
    async with open_storage(origin) as source, open_storage(memory_url()) as destination:
        first = Selection.of(["main"], None)
        await copy_repository(source, destination, first, derivation)
        report = await copy_repository(source, destination, derivation=derivation)
        assert [(it.name, it.change) for it in report.refs] == [
            ("side", "created"),
            ("v1", "created"),
        ]
        assert report.objects_skipped == 0
