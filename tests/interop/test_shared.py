"""Manifests that several arrays share, in the official engines: read, changed, kept, collected."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
import zarr
import zarr.api.asynchronous as zarr_async

from icechunk_async import Repository
from tests.interop.answers import Policy, Settings
from tests.interop.comparing import ENGINES, check_garbage, collect, views_agree
from tests.interop.edits import (
    Sources,
    apply,
    array,
    delete_chunk,
    delete_node,
    dumps,
    resize,
    write,
)
from tests.interop.files import Files
from tests.interop.ours import url_of
from tests.interop.test_wheel_1 import Wheel1, agree
from tests.interop.theirs import open_official

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.interop.edits import Edit

SPECS = pytest.mark.parametrize("spec", [1, 2])
ARRAYS = 12


@pytest.fixture(scope="module")
def wheel(python_of_wheel_1: str) -> Iterator[Wheel1]:
    """Return a running wheel 1.x."""
    started = Wheel1(python_of_wheel_1)
    yield started
    started.close()


def name(number: int) -> str:
    """Return the name of an array; every third one has two axes."""
    return f"a{number:02}"


def plants() -> list[Edit]:
    """Return the edits that make small arrays of one and two axes, some chunks inline."""
    edits: list[Edit] = []
    for number in range(ARRAYS):
        shape = (4, 6) if number % 3 == 0 else (8,)
        chunks = (2, 3) if number % 3 == 0 else (2,)
        edits += [
            array(name(number), shape, chunks, plain=True),
            write(name(number), [0] * len(shape), shape, number),
        ]
    return edits


def change(number: int, seed: int) -> Edit:
    """Return the edit that changes one chunk of an array."""
    if number % 3 == 0:
        return write(name(number), [0, 0], [2, 3], seed)
    return write(name(number), [0], [2], seed)


async def planted(root: Path, spec: int, inline: int = 8, source: Path | None = None) -> None:
    """Make a repository whose arrays share one manifest; inline up to some bytes."""
    await ENGINES["ours"].create(root, spec, Settings(inline, (), source))
    sources = None if source is None else Sources(source, url_of(source))
    async with ENGINES["ours"].open(root, source) as repo:
        work = await repo.work()
        await apply(work.store, plants(), sources)
        await work.commit("planted")
    assert sorted(uses(root).values()) == [ARRAYS]


def uses(root: Path, branch: str = "main") -> Counter[str]:
    """Count the arrays of each manifest of a branch's tip."""
    official = open_official(root)
    shown = official.inspect_snapshot(official.lookup_branch(branch))
    return Counter(ref["id"] for node in shown["nodes"] for ref in node.get("manifest_refs", ()))


async def commit(root: Path, engine: str, *edits: Edit, **how: Any) -> str:
    """Commit edits with one of the engines."""
    async with ENGINES[engine].open(root) as repo:
        work = await repo.work()
        await apply(work.store, edits)
        return await work.commit("edited", **how)


@SPECS
@pytest.mark.parametrize("inline", [0, 8, 1000], ids=["native", "mixed", "inline"])
async def test_the_official_engine_reads_and_lists_every_array(
    spec: int, inline: int, tmp_path: Path
) -> None:
    """Every key, value, array and diff; and it collects nothing of it."""
    root = tmp_path / "repo"
    await planted(root, spec, inline)
    seen = await views_agree(root, spec, everything=True)
    assert max(len(arrays) for arrays in seen.arrays.values()) == ARRAYS
    official = open_official(root)
    (info,) = official.list_manifest_files(official.lookup_branch("main"))
    shown = official.inspect_manifest(info.id)
    assert (shown["num_arrays"], shown["total_chunk_refs"]) == (ARRAYS, info.num_chunk_refs)
    assert set(check_garbage(root).values()) == {0}


async def test_wheel_1_reads_and_changes_shared_manifests(wheel: Wheel1, tmp_path: Path) -> None:
    """All that it says is what we say, before and after it changed, expired and collected."""
    root = tmp_path / "repo"
    await planted(root, 1)
    (old,) = uses(root)
    await agree(wheel, root)
    assert wheel.ask("collect", root=str(root), dry_run=True)["bytes"] == 0
    edits = [change(3, 50), resize(name(4), 4), delete_node(name(5)), delete_chunk(name(1), 0)]
    options: dict[str, Any] = {"root": str(root), "source": None, "branch": "main", "metadata": {}}
    tip = wheel.ask("commit", edits=dumps(edits), **options)
    await agree(wheel, root)
    assert uses(root)[old] == ARRAYS - 4
    await commit(root, "ours", *(change(it, 60) for it in range(6, ARRAYS)))
    seen = await agree(wheel, root)
    wheel.ask("expire", root=str(root), before=tip)
    wheel.ask("collect", root=str(root), dry_run=False)
    after = await agree(wheel, root)
    assert after.contents[seen.branches["main"]] == seen.contents[seen.branches["main"]]
    assert not any(Files(root).missing().values())


@SPECS
async def test_both_engines_commit_by_turns(spec: int, tmp_path: Path) -> None:
    """Each changes, appends to, shrinks and deletes arrays that share; the others stay put."""
    root = tmp_path / "repo"
    await planted(root, spec)
    (old,) = uses(root)
    await commit(root, "theirs", change(1, 100))
    assert uses(root)[old] == ARRAYS - 1
    await views_agree(root, spec)
    await commit(root, "ours", change(2, 101), change(3, 101))
    assert uses(root)[old] == ARRAYS - 3
    assert 2 in uses(root).values()  # these two share another one
    await views_agree(root, spec)
    await commit(root, "theirs", resize(name(4), 12), write(name(4), [8], [12], 102))
    await commit(root, "theirs", resize(name(5), 4), delete_chunk(name(7), 1))
    await commit(root, "theirs", delete_node(name(8)), change(2, 103))
    await views_agree(root, spec, everything=True)
    assert uses(root)[old] == ARRAYS - 7
    await commit(root, "ours", resize(name(4), 14), write(name(4), [12], [14], 104))
    await commit(root, "ours", delete_node(name(10)))
    # Less than half of the manifest was in use, so the rest has moved out of it.
    assert old not in uses(root)
    assert 4 in uses(root).values()
    await commit(root, "theirs", *(change(it, 105) for it in (0, 1, 2, 3, 6, 7, 9, 11)))
    await views_agree(root, spec, everything=True)
    async with Repository.open(root) as repository:
        assert (await repository.verify()).is_healthy


@SPECS
@pytest.mark.parametrize("first", ["ours", "theirs"])
async def test_sessions_rebase_over_the_other_engine(spec: int, first: str, tmp_path: Path) -> None:
    """Also over a commit of ours that moved arrays out, one of which the session changed."""
    root = tmp_path / "repo"
    await planted(root, spec)
    late = "theirs" if first == "ours" else "ours"
    async with ENGINES[late].open(root) as repo:
        work = await repo.work()
        await apply(work.store, [change(0, 200), change(11, 200)])
        await commit(root, first, *(change(it, 201) for it in range(1, 9)))
        assert await work.rebase(Policy()) == []
        await work.commit("late")
    seen = await views_agree(root, spec, everything=True)
    assert len(seen.arrays[seen.branches["main"]]) == ARRAYS
    async with Repository.open(root) as repository:
        assert (await repository.verify()).is_healthy


@SPECS
@pytest.mark.parametrize("collector", ["ours", "theirs"])
async def test_either_engine_expires_and_collects_shared_manifests(
    spec: int, collector: str, tmp_path: Path
) -> None:
    """Nothing that an array uses goes, even if only one uses the manifest; the rest is the same."""
    root = tmp_path / "repo"
    await planted(root, spec, inline=0)
    await commit(root, "theirs", *(change(it, 300) for it in range(1, ARRAYS)))
    await commit(root, "ours", change(1, 301), delete_node(name(2)))
    before = await views_agree(root, spec)
    expected = {before.branches["main"]: before.contents[before.branches["main"]]}
    if collector == "ours":
        async with Repository.open(root) as repository:
            await repository.expire_snapshots(datetime.now(UTC))
            await repository.garbage_collect(datetime.now(UTC))
    else:
        open_official(root).expire_snapshots(datetime.now(UTC))
        collect(root, dry_run=False)
    await views_agree(root, spec, expected=expected)
    assert set(check_garbage(root).values()) == {0}
    assert not any(Files(root).missing().values())
    async with Repository.open(root) as repository:
        assert (await repository.verify()).is_healthy
        # A chunk that a shared manifest mentions for an array that left it is still kept: by both.
        await repository.rewrite_manifests("again", branch="main")
        await repository.expire_snapshots(datetime.now(UTC))
    collect(root, dry_run=False)
    tip = (await views_agree(root, spec)).branches["main"]
    shown = open_official(root).inspect_snapshot(tip)
    chunks = sum(it["num_chunk_refs"] for it in shown["manifests"])
    assert len(Files(root).ids("chunks")) == chunks


@SPECS
async def test_either_engine_rewrites_shared_manifests(spec: int, tmp_path: Path) -> None:
    """The official engine gives each array a separate manifest; we let them share again."""
    root = tmp_path / "repo"
    await planted(root, spec)
    open_official(root).rewrite_manifests("apart", branch="main")
    assert sorted(uses(root).values()) == [1] * ARRAYS
    before = await views_agree(root, spec)
    async with Repository.open(root) as repository:
        await repository.rewrite_manifests("together", branch="main")
    assert sorted(uses(root).values()) == [ARRAYS]
    after = await views_agree(root, spec)
    tips = (seen.contents[seen.branches["main"]] for seen in (before, after))
    assert next(tips) == next(tips)
    assert set(check_garbage(root).values()) == {0}


@SPECS
async def test_virtual_chunks_share_too(spec: int, tmp_path: Path) -> None:
    """With those of the repository in one manifest; the official engine reads and changes them."""
    root, source = tmp_path / "repo", tmp_path / "source"
    source.mkdir()
    (source / "data").write_bytes(bytes(range(200)))
    await planted(root, spec, source=source)
    async with Repository.open(root) as repository:
        session = await repository.writable_session("main")
        for number in range(4):
            session.store.set_virtual_ref(
                f"{name(number)}/c/0" + "/0" * (number % 3 == 0),
                f"{url_of(source)}data",
                offset=number,
                length=8 if number % 3 else 24,
            )
        await session.commit("virtual")
    assert sorted(uses(root).values()) == [4, ARRAYS - 4]
    await views_agree(root, spec, source=source)
    official = open_official(root, source)
    session = official.writable_session("main")
    session.store.set_virtual_ref(f"{name(1)}/c/1", f"{url_of(source)}data", offset=9, length=8)
    session.commit("theirs")
    assert sorted(uses(root).values()) == [1, 3, ARRAYS - 4]
    await views_agree(root, spec, source=source)


GROWING = range(1, 5)
"""Arrays of one axis that grow, with one of two axes."""


def growth(length: int) -> list[Edit]:
    """Return the edits that append a chunk to each of them."""
    edits: list[Edit] = []
    for number in GROWING:
        if number % 3 == 0:
            edits += [resize(name(number), length, 6)]
            edits += [write(name(number), [length - 2, 0], [length, 6], length)]
        else:
            edits += [resize(name(number), length)]
            edits += [write(name(number), [length - 2], [length], length)]
    return edits


@SPECS
@pytest.mark.parametrize("turns", [("ours",), ("ours", "theirs")])
async def test_both_engines_append_by_the_stored_rule(
    spec: int, turns: tuple[str, ...], tmp_path: Path
) -> None:
    """Each writes the last cells; ours puts those of all arrays together; both read all of it."""
    root = tmp_path / "repo"
    rule = ((("AnyArray", ""), ((0, 3),)),)
    await ENGINES["ours"].create(root, spec, Settings(0, rule))
    async with ENGINES["ours"].open(root) as repo:
        work = await repo.work()
        await apply(work.store, plants()[2 * GROWING.start : 2 * GROWING.stop])
        await work.commit("planted")
    sealed: set[str] = set()
    for turn in range(8):
        await commit(root, turns[turn % len(turns)], *growth(2 * (turn + 5)))
        assert sealed <= uses(root).keys(), "full cells are not written again"
        if turns[turn % len(turns)] == "ours":
            assert len(GROWING) in uses(root).values()
        cells = -(-(turn + 5) // 3)
        shown = open_official(root).inspect_snapshot(open_official(root).lookup_branch("main"))
        lengths = {len(node.get("manifest_refs", ())) for node in shown["nodes"]} - {0}
        assert lengths == {cells}
        last = {
            node["manifest_refs"][-1]["id"] for node in shown["nodes"] if "manifest_refs" in node
        }
        sealed = uses(root).keys() - last if (turn + 5) % 3 else set(uses(root))
        if turn % 3 == 2:
            await views_agree(root, spec)
    await views_agree(root, spec, everything=True)
    assert set(check_garbage(root).values()) == {0}
    open_official(root).expire_snapshots(datetime.now(UTC))
    collect(root, dry_run=False)
    await views_agree(root, spec)
    async with Repository.open(root) as repository:
        assert (await repository.verify()).is_healthy


async def test_wheel_1_appends_by_the_stored_rule(wheel: Wheel1, tmp_path: Path) -> None:
    """As well."""
    root = tmp_path / "repo"
    await ENGINES["ours"].create(root, 1, Settings(0, ((("AnyArray", ""), ((0, 3),)),)))
    await commit(root, "ours", *plants()[2 * GROWING.start : 2 * GROWING.stop])
    options: dict[str, Any] = {"root": str(root), "source": None, "branch": "main", "metadata": {}}
    for turn in range(6):
        edits = growth(2 * (turn + 5))
        if turn % 2:
            await commit(root, "ours", *edits)
            assert len(GROWING) in uses(root).values()
        else:
            wheel.ask("commit", edits=dumps(edits), **options)
        await agree(wheel, root)
    assert wheel.ask("collect", root=str(root), dry_run=True)["bytes"] == 0


@SPECS
async def test_the_official_engine_appends_by_a_rule_that_we_chose(
    spec: int, tmp_path: Path
) -> None:
    """It divides what is there, as ours would, and writes the last cells from then on."""
    root = tmp_path / "repo"
    names = tuple(map(name, range(142)))
    async with Repository.create(root, spec_version=spec) as repository:
        session = await repository.writable_session("main")
        for it in names:
            await zarr_async.create_array(
                session.store, name=it, shape=(20,), chunks=(1,), dtype="u1", dimension_names=["t"]
            )
        await session.commit("planted")
        assert await repository.split_appends("t") == 14
    official = open_official(root)
    for length in (21, 22):
        session = official.writable_session("main")
        array = zarr.open_array(session.store, path=names[7])
        array.resize((length,))
        array[:] = length
        session.commit("theirs")
    shown = official.inspect_snapshot(official.lookup_branch("main"))
    (refs,) = (node["manifest_refs"] for node in shown["nodes"] if node.get("manifest_refs"))
    assert [it["extents"] for it in refs] == [[[0, 14]], [[14, 22]]]
    await commit(root, "ours", resize(names[7], 23), write(names[7], [22], [23], 5))
    await views_agree(root, spec)
