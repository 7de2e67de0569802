"""kill -9 at the writes of a copy and of a repair, on disk; the official engine looks as well."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import zarr

from icechunk_async import Repository
from icechunk_async.credentials import LocalFileSystemAccess
from icechunk_async.errors import FormatError, IcechunkError, RepositoryNotFoundError
from tests.helpers import group_document, make_array, read, write
from tests.interop.sides import keys_and_values
from tests.interop.test_derived_copies import opened, place
from tests.interop.theirs import icechunk
from tests.interop.upkeep_killer import REPAIR, repair
from tests.killing import run_killer
from tests.unit.engine.upkeep.copying.copy_tools import make_origin

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.session import AnySession

    type Shown = dict[str, dict[str, bytes | None]]

WHOLE: dict[str, Any] = {}
PART = {"refs": ["main", "v1"]}
PATHS = {"paths": ["g"]}
SHALLOW = {"shallow": True}
FEW = 31
"""A step between kills that leaves a few."""


def _each(*few: tuple[int, dict[str, Any]]) -> list[Any]:
    """Return format versions, arguments and places to kill at: a few, and thoroughly all."""
    thorough = [
        pytest.param(spec, options, first, 4, marks=pytest.mark.thorough)
        for spec in (1, 2)
        for options in (WHOLE, PART, PATHS, SHALLOW, {**PATHS, **SHALLOW})
        for first in range(4)
    ]
    return [*((spec, options, 5, FEW) for spec, options in few), *thorough]


def kill(work: str, origin: Path, fresh: Path, first: int, step: int) -> list[Path]:
    """Kill a process at some of its places; return the directories that are left."""
    run_killer("tests.interop.upkeep_killer", work, origin, fresh, first, step)
    left = sorted(fresh.parent.glob("at-*"))
    assert len(left) >= 2
    return left


async def ours(root: Path, *directories: Path) -> Shown:
    """Return all that our engine shows of a repository; nothing if it is absent."""
    access = {f"{it.as_uri()}/": LocalFileSystemAccess() for it in directories}
    try:
        async with Repository.open(root, authorize_virtual_chunk_access=access) as repository:
            found: Shown = {}
            for tip in {**await repository.branches(), **await repository.tags()}.values():
                async for it in repository.ancestry(snapshot_id=tip):
                    session = await repository.readonly_session(snapshot_id=it.id)
                    keys = [key async for key in session.store.list()]
                    found[str(it.id)] = {key: await read(session, key) for key in keys}
            return found
    except RepositoryNotFoundError:
        return {}


def theirs(root: Path, *directories: Path) -> Shown:
    """Return all that the official engine shows of a repository; nothing if it is absent."""
    if not icechunk.Repository.exists(place(root)):
        return {}
    repository = opened(root, *directories)
    tips = {repository.lookup_branch(it) for it in repository.list_branches()}
    tips |= {repository.lookup_tag(it) for it in repository.list_tags()}
    return {
        it.id: keys_and_values(repository.readonly_session(snapshot_id=it.id).store)
        for tip in tips
        for it in repository.ancestry(snapshot_id=tip)
    }


async def shown(root: Path, *directories: Path) -> Shown:
    """Return all that both engines show, which is the same."""
    found = await ours(root, *directories)
    assert theirs(root, *directories) == found
    return found


async def refs(root: Path) -> dict[str, str]:
    """Return where branches and tags point."""
    async with Repository.open(root) as repository:
        branches, tags = await repository.branches(), await repository.tags()
        return {f"branch {name}": str(it) for name, it in branches.items()} | {
            f"tag {name}": str(it) for name, it in tags.items()
        }


async def go_on(origin: Path) -> None:
    """Change what an earlier copy brought: commits, and refs that come, move and go."""
    async with Repository.open(origin) as repository:
        for number in range(2):
            session = await repository.writable_session("main")
            await write(session, "g/deep/zarr.json", group_document(name=str(number)))
            await make_array(session, f"g/new{number}", (4,), (1,))
            await write(session, f"g/new{number}/c/0", b"6" * 900)
            await session.commit(f"later {number}")
        await repository.create_tag("v2", await repository.lookup_branch("main"))
        await repository.reset_branch("side", await repository.lookup_tag("v1"))


async def check_copies(left: list[Path], origin: Path, options: dict[str, Any]) -> None:
    """See what each kill left, and that copying again brings what no kill would have."""
    directories = [origin.parent / "sources"]
    if "shallow" in options:
        directories.append(origin)
    fresh = left[0].with_name("fresh")
    before, after = (
        await ours(fresh, *directories),
        await ours(left[0].with_name("not-killed"), *directories),
    )
    is_old = not (origin / "repo").exists()
    wanted = await refs(left[0].with_name("not-killed"))
    for root in left:
        found = await shown(root, *directories)
        if is_old:  # a reference at a time, and each snapshot is whole
            assert found.items() <= {**before, **after}.items()
        else:
            assert found in (before, after)
        async with Repository.open(origin) as repository:
            await repository.copy_to(root, **options)
            again = await repository.copy_to(root, **options)
        assert again.objects_copied == 0
        assert await shown(root, *directories) == after
        assert await refs(root) == wanted
        assert await _findings(root, *directories) == ()


async def _findings(root: Path, *directories: Path) -> tuple[object, ...]:
    access = {f"{it.as_uri()}/": LocalFileSystemAccess() for it in directories}
    async with Repository.open(root, authorize_virtual_chunk_access=access) as repository:
        return (await repository.verify("sums")).findings


@pytest.mark.parametrize(("spec", "options", "first", "step"), _each((2, WHOLE), (1, PATHS)))
async def test_a_copy_that_was_killed_is_absent_or_whole_and_finished_by_copying_again(
    tmp_path: Path, spec: int, options: dict[str, Any], first: int, step: int
) -> None:
    """Before and after a write; the official engine sees the same at every moment."""
    origin = await make_origin(tmp_path, spec, sums=spec == 2 or None)
    fresh = tmp_path / "copies" / "fresh"
    fresh.mkdir(parents=True)
    left = kill(json.dumps(options), origin, fresh, first, step)
    await check_copies(left, origin, options)


@pytest.mark.parametrize(
    ("spec", "options", "first", "step"), _each((1, WHOLE), (2, {**PATHS, **SHALLOW}))
)
async def test_a_sync_that_was_killed_shows_the_old_or_the_new_state_and_is_finished_by_the_next(
    tmp_path: Path, spec: int, options: dict[str, Any], first: int, step: int
) -> None:
    """The copy shows a part of no commit; changes that somebody made there are undone, or not."""
    origin = await make_origin(tmp_path, spec, sums=spec == 2 or None)
    fresh = tmp_path / "copies" / "fresh"
    async with Repository.open(origin) as repository:
        await repository.copy_to(fresh, **options)
    await go_on(origin)
    left = kill(json.dumps(options), origin, fresh, first, min(step, 7))
    await check_copies(left, origin, options)


@pytest.mark.parametrize(
    "places", [pytest.param((it, 4), marks=pytest.mark.thorough) for it in range(4)]
)
async def test_a_plain_hierarchy_that_was_killed_has_no_root_and_is_finished_by_writing_again(
    tmp_path: Path, places: tuple[int, int]
) -> None:
    """Zarr libraries find nothing before all is there."""
    origin = await make_origin(tmp_path, 2)
    options = {"as_zarr": True, "refs": ["v1"]}
    access = {f"{(origin.parent / 'sources').as_uri()}/": LocalFileSystemAccess()}
    fresh = tmp_path / "copies" / "fresh"
    fresh.mkdir(parents=True)
    left = kill(json.dumps(options), origin, fresh, *places)
    wanted = _files(fresh.with_name("not-killed"))
    for root in left:
        files = _files(root)
        note = files.pop("icechunk-copy.json", None)  # its removal is the last of all writes
        assert "zarr.json" not in files or files == wanted
        if note is None and files:
            assert files == wanted  # it was killed when all was done
            continue
        async with Repository.open(origin, authorize_virtual_chunk_access=access) as repository:
            await repository.copy_to(root, as_zarr=True, refs=["v1"])
        assert _files(root) == wanted


def _files(root: Path) -> dict[str, bytes]:
    """Return all files but those that the killed process was writing, which no listing shows."""
    files = [it for it in root.rglob("*") if it.is_file()]
    return {
        str(it.relative_to(root)): it.read_bytes()
        for it in files
        if not it.name.startswith(".icechunk-tmp-")
    }


async def harm(origin: Path) -> None:
    """Damage logs of a branch, a manifest of the other, and chunks that their tips need."""
    async with Repository.open(origin) as repository:
        line = [str(it.id) async for it in repository.ancestry(branch="main")]
        side = str(await repository.lookup_branch("side"))
        used = [{it.id for it in await repository.list_manifest_files(id_)} for id_ in line]
        (own,) = {it.id for it in await repository.list_manifest_files(side)} - set().union(*used)
    (origin / "transactions" / line[0]).unlink()
    (origin / "transactions" / line[1]).write_bytes(b"damaged")
    (origin / "manifests" / str(own)).write_bytes(b"damaged")
    large = [it for it in (origin / "chunks").iterdir() if it.stat().st_size == 1500]
    assert len(large) == 2
    for it in large:
        it.write_bytes(it.read_bytes()[:-1])


type Tips = dict[str, tuple[list[str], dict[str, object]]]
"""Of each branch the messages, and what reading each key gives; an error by its class."""


async def keys_of(root: Path) -> set[str]:
    """Return the keys of the tips of branches."""
    async with Repository.open(root) as repository:
        sessions = [await repository.readonly_session(it) for it in await repository.branches()]
        return {key for session in sessions async for key in session.store.list()}


async def tips_of(root: Path, keys: set[str]) -> Tips:
    """Return all that the branches show; nothing if the repository cannot be opened."""
    found: Tips = {}
    sources = f"{(root.parents[1] / 'sources').as_uri()}/"
    access = {sources: LocalFileSystemAccess()}
    try:
        async with Repository.open(root, authorize_virtual_chunk_access=access) as repository:
            for branch in await repository.branches():
                messages = [it.message async for it in repository.ancestry(branch=branch)]
                session = await repository.readonly_session(branch)
                found[branch] = messages, {it: await _outcome(session, it) for it in keys}
    except FormatError:
        return {}
    return found


async def _outcome(session: AnySession, key: str) -> object:
    try:
        return await read(session, key)
    except IcechunkError as error:
        return type(error)


def _quarantined(root: Path) -> set[tuple[str, bytes]]:
    """Return the damaged objects that were put aside, by kind."""
    return {
        (str(it.relative_to(root / "quarantine").parent), it.read_bytes())
        for it in (root / "quarantine").rglob("*")
        if it.is_file()
    }


_ENDS = [
    (2, True, 2, 13, ()),
    *(
        (spec, restores, first, 3, (pytest.mark.thorough,))
        for spec, restores in ((1, False), (2, False), (2, True))
        for first in range(3)
    ),
]


@pytest.mark.parametrize(
    ("spec", "restores", "first", "step"), [pytest.param(*it[:4], marks=it[4]) for it in _ENDS]
)
async def test_a_repair_that_was_killed_harms_nothing_and_ends_as_if_it_had_not_been(
    tmp_path: Path, spec: int, first: int, step: int, *, restores: bool
) -> None:
    """Logs, a manifest, chunks and the object that makes it a repository; both engines see it."""
    origin = await make_origin(tmp_path, spec, sums=spec == 2 or None)
    fresh = tmp_path / "repairs" / "fresh"
    shutil.copytree(origin, fresh)
    keys = await keys_of(fresh)
    await harm(fresh)
    before = await tips_of(fresh, keys)
    if restores:
        (fresh / "repo").write_bytes((fresh / "repo").read_bytes()[:90])
        assert await tips_of(fresh, keys) == {}
    left = kill(REPAIR, origin, fresh, first, step)
    ended = fresh.with_name("not-killed")
    after = await tips_of(ended, keys)
    assert await _findings_at_tips(ended) == ()
    assert _quarantined(ended)
    for root in left:
        for branch, (_, values) in (await tips_of(root, keys)).items():
            for key, value in values.items():
                assert value in (before[branch][1][key], after[branch][1][key])
        await repair(root)
        assert await tips_of(root, keys) == after
        assert await _findings_at_tips(root) == ()
        assert _quarantined(root) == _quarantined(ended)
        repository = opened(root, tmp_path / "sources")
        for branch in after:
            store = repository.readonly_session(branch).store
            found = keys_and_values(store)
            assert {key: found.get(key) for key in keys} == after[branch][1]
        session = repository.writable_session("main")
        zarr.group(session.store, path="new")
        session.commit("later")


async def _findings_at_tips(root: Path) -> tuple[object, ...]:
    async with Repository.open(root) as repository:
        branches = sorted(await repository.branches())
        return (await repository.verify("sums", refs=branches, ancestry=False)).findings
