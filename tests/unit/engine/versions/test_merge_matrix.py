"""Every pair of changes to one node: what a merge makes of it, and which it refuses."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.conflicts import BasicConflictSolver, ConflictKind, Resolution
from icechunk_async.errors import InvalidInputError, MergeConflictError
from tests.helpers import array_document, group_document, memory_url, read, write
from tests.unit.engine.versions.stories import contents_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from icechunk_async.conflicts import Answer, Clash

type Change = Callable[[Repository, str], Awaitable[None]]


def changing(*steps: tuple[str, bytes | None]) -> Change:
    """Return a commit that sets keys, or deletes them and all below."""

    async def commit(repository: Repository, branch: str) -> None:
        session = await repository.writable_session(branch)
        for key, data in steps:
            if data is None:
                await session.store.delete_dir(key)
            elif key.endswith("/c/") or "/c/" not in key or data:
                await write(session, key, data)
            else:
                await session.store.delete(key)
        await session.commit(f"{branch}: {', '.join(key for key, _ in steps)}")

    return commit


def moving(source: str, target: str) -> Change:
    """Return a commit that moves a node."""

    async def commit(repository: Repository, branch: str) -> None:
        session = await repository.rearrange_session(branch)
        await session.move(source, target)
        await session.commit(f"{branch}: {source} to {target}")

    return commit


DOCUMENT = array_document((12,), (3,))
TALLER = array_document((15,), (3,))
SHORTER = array_document((6,), (3,))
TITLED = array_document((12,), (3,), attributes={"title": "t"})
OTHER_CODEC = array_document((12,), (3,), codecs=[{"name": "bytes"}, {"name": "crc32c"}])

CHANGES: dict[str, Change] = {
    "write chunk 0": changing(("g/a/c/0", b"xxx")),
    "write chunk 3": changing(("g/a/c/3", b"yyy")),
    "erase chunk 0": changing(("g/a/c/0", b"")),
    "attributes": changing(("g/a/zarr.json", TITLED)),
    "grow": changing(("g/a/zarr.json", TALLER), ("g/a/c/4", b"zzz")),
    "shrink": changing(("g/a/zarr.json", SHORTER)),
    "other codec": changing(("g/a/zarr.json", OTHER_CODEC)),
    "delete array": changing(("g/a", None)),
    "delete group": changing(("g", None)),
    "move array": moving("/g/a", "/h/a"),
    "move group": moving("/g", "/h/g"),
    "new array": changing(("g/b/zarr.json", DOCUMENT), ("g/b/c/0", b"bbb")),
    "other new array": changing(("g/b/zarr.json", TALLER), ("g/b/c/1", b"ccc")),
    "array for group": changing(("g", None), ("g/zarr.json", DOCUMENT)),
}

REFUSED: dict[frozenset[str], ConflictKind] = {
    frozenset(pair.split(" + ")): kind
    for pair, kind in {
        "write chunk 0 + erase chunk 0": ConflictKind.CHUNK_DOUBLE_UPDATE,
        "write chunk 0 + other codec": ConflictKind.CHUNKS_UPDATED_IN_UPDATED_ARRAY,
        "write chunk 3 + other codec": ConflictKind.CHUNKS_UPDATED_IN_UPDATED_ARRAY,
        "erase chunk 0 + other codec": ConflictKind.CHUNKS_UPDATED_IN_UPDATED_ARRAY,
        "write chunk 3 + shrink": ConflictKind.CHUNKS_UPDATED_IN_UPDATED_ARRAY,
        "attributes + grow": ConflictKind.ZARR_METADATA_DOUBLE_UPDATE,
        "attributes + shrink": ConflictKind.ZARR_METADATA_DOUBLE_UPDATE,
        "attributes + other codec": ConflictKind.ZARR_METADATA_DOUBLE_UPDATE,
        "grow + shrink": ConflictKind.ZARR_METADATA_DOUBLE_UPDATE,
        "grow + other codec": ConflictKind.ZARR_METADATA_DOUBLE_UPDATE,
        "shrink + other codec": ConflictKind.ZARR_METADATA_DOUBLE_UPDATE,
    }.items()
}
CHANGING_ARRAY = {
    "write chunk 0",
    "write chunk 3",
    "erase chunk 0",
    "attributes",
    "grow",
    "shrink",
    "other codec",
}
DELETING = {"delete array", "delete group", "array for group"}
ADDING = {"new array", "other new array"}
BOTH_WAYS = os.environ.get("EXAMPLES") == "all"


def is_refused(one: str, other: str) -> bool:
    """Return whether a merge of two changes is refused; the same for both directions."""
    pair = frozenset((one, other))
    if pair in REFUSED or pair == ADDING:
        return True
    for deleting, changed in ((one, other), (other, one)):
        if deleting in DELETING and changed in CHANGING_ARRAY:
            return True
        if deleting in {"delete group", "array for group"} and changed in ADDING:
            return True
        if deleting in DELETING and changed == "move array":
            return True
        if deleting in {"delete group", "array for group"} and changed == "move group":
            return True
    return False


async def begin(repository: Repository) -> None:
    """Commit groups ``g`` and ``h``, and an array ``g/a`` of four chunks, and fork a branch."""
    await changing(
        ("zarr.json", group_document()),
        ("g/zarr.json", group_document()),
        ("h/zarr.json", group_document()),
        ("g/a/zarr.json", DOCUMENT),
        *((f"g/a/c/{at}", bytes([at] * 3)) for at in range(4)),
    )(repository, "main")
    await repository.create_branch("side", await repository.lookup_branch("main"))


@pytest.mark.parametrize("one", CHANGES)
async def test_merging_two_changes_is_refused_or_equals_one_after_the_other(one: str) -> None:
    """One change on a branch, another on ``main``: merged, or refused with the clash.

    Each pair in one direction by default, by turns as the table has them; thoroughly in both.
    """
    places = list(CHANGES)
    for other, change in CHANGES.items():
        distance = places.index(other) - places.index(one)
        if distance and not BOTH_WAYS and (distance > 0) == bool(distance % 2):
            continue
        async with Repository.create(memory_url()) as repository:
            await begin(repository)
            await CHANGES[one](repository, "side")
            await change(repository, "main")
            before = await contents_at(repository)
            planned = await repository.merge("side", dry_run=True)
            assert bool(planned.conflicts) == (is_refused(one, other) and one != other), other
            if planned.conflicts:
                kinds = {it.kind for it in planned.conflicts}
                wanted = REFUSED.get(frozenset((one, other)))
                assert wanted is None or wanted in kinds, other
                with pytest.raises(MergeConflictError, match="Nothing was published"):
                    await repository.merge("side")
                assert await contents_at(repository) == before
                continue
            await repository.merge("side")
            merged = await contents_at(repository)
            # Doing one after the other on a single branch gives the same.
            async with Repository.create(memory_url()) as straight:
                await begin(straight)
                await change(straight, "main")
                if one == other:
                    assert merged == before
                    continue
                try:
                    await _follow(CHANGES[one], straight, other)
                except Exception:  # noqa: BLE001, S112 -- its path is not there any more
                    continue
                assert merged == await contents_at(straight), (one, other)


TYPE = array_document((12,), (3,), data_type="int8")
FILL = array_document((12,), (3,), fill_value=7)
CHUNKS = array_document((12,), (4,))
MORE: dict[str, Change] = {
    **CHANGES,
    "write chunk 0 otherwise": changing(("g/a/c/0", b"mmm")),
    "other type": changing(("g/a/zarr.json", TYPE)),
    "other fill value": changing(("g/a/zarr.json", FILL)),
    "other chunk shape": changing(("g/a/zarr.json", CHUNKS)),
    "move array elsewhere": moving("/g/a", "/h/elsewhere"),
    "move group elsewhere": moving("/g", "/h/elsewhere"),
    "new group": changing(("n/zarr.json", group_document()), ("n/x/zarr.json", DOCUMENT)),
    "equal new group": changing(("n/zarr.json", group_document()), ("n/y/zarr.json", DOCUMENT)),
    "other new group": changing(("n/zarr.json", group_document(n=1))),
    "equal new array": changing(("g/b/zarr.json", DOCUMENT), ("g/b/c/2", b"ccc")),
}
DOCUMENTED: dict[tuple[str, str], tuple[list[str], list[str]]] = {
    # a row of the page: pairs that are as it says, and equal ones, which are merged
    ("writes chunks", "writes other chunks of the array"): (["write chunk 0 + write chunk 3"], []),
    ("writes a chunk", "writes or deletes the same chunk"): (
        ["write chunk 0 + write chunk 0 otherwise", "write chunk 0 + erase chunk 0"],
        ["write chunk 0 + write chunk 0"],
    ),
    ("writes chunks", "changes attributes, or resizes the array around them"): (
        ["write chunk 0 + attributes", "write chunk 0 + grow", "write chunk 0 + shrink"],
        [],
    ),
    ("writes chunks", "changes codecs, type, fill value or chunk shape"): (
        [
            "write chunk 0 + other codec",
            "write chunk 0 + other type",
            "write chunk 0 + other fill value",
            "write chunk 0 + other chunk shape",
        ],
        [],
    ),
    ("writes chunks behind the new end", "shrinks the array"): (["write chunk 3 + shrink"], []),
    ("changes the metadata of a node", "changes its metadata, too"): (
        ["attributes + grow", "attributes + other type"],
        ["attributes + attributes"],
    ),
    ("writes or changes a node", "moves it, or a group above it"): (
        [
            "write chunk 0 + move array",
            "write chunk 0 + move group",
            "attributes + move array",
            "attributes + move group",
        ],
        [],
    ),
    ("moves a node", "moves a group above it"): (["move array + move group"], []),
    ("moves a node", "moves it elsewhere"): (
        ["move array + move array elsewhere", "move group + move group elsewhere"],
        [],
    ),
    ("deletes a node", "deletes it, too"): (
        ["delete array + delete array", "delete group + delete array"],
        [],
    ),
    ("deletes a node", "writes, changes or moves it"): (
        [
            "delete array + write chunk 0",
            "delete array + attributes",
            "delete array + move array",
            "delete group + move group",
        ],
        [],
    ),
    ("deletes a group", "creates something in it"): (["delete group + new array"], []),
    ("creates a node", "creates another one at the same path"): (
        ["new array + other new array", "new group + other new group"],
        [],
    ),
    ("creates a group", "creates an equal one"): (["new group + equal new group"], []),
    ("creates an array", "creates an equal one at the same path"): (
        ["new array + equal new array"],
        [],
    ),
}


def documented() -> dict[tuple[str, str], str]:
    """Return the table of the page about merging: what becomes of changes of both branches."""
    page = Path(__file__).parents[4] / "docs" / "how-to" / "merge.md"
    table = page.read_text("utf-8").split("| One branch |")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {(one, other): merged for one, other, merged in rows}


def test_every_row_of_the_page_is_tested() -> None:
    """And no row that is not there."""
    assert documented().keys() == DOCUMENTED.keys()


@pytest.mark.parametrize("row", DOCUMENTED)
async def test_a_merge_does_what_the_page_says(row: tuple[str, str]) -> None:
    """In both directions."""
    says = documented()[row]
    pairs, equal = DOCUMENTED[row]
    assert bool(equal) == ("unless they are equal" in says)
    for pair in (*pairs, *equal):
        names = pair.split(" + ")
        for one, other in (names, names[::-1]):
            async with Repository.create(memory_url()) as repository:
                await begin(repository)
                await MORE[one](repository, "side")
                await MORE[other](repository, "main")
                planned = await repository.merge("side", dry_run=True)
                refused = says.startswith("conflict") and pair not in equal
                assert bool(planned.conflicts) == refused, (one, other)
                if not refused:
                    await repository.merge("side")


async def _follow(change: Change, repository: Repository, other: str) -> None:
    if other == "array for group" and change is CHANGES["delete group"]:
        raise LookupError  # it would delete the array
    if other in {"move array", "move group"} and change not in {
        CHANGES["move array"],
        CHANGES["move group"],
    }:
        raise LookupError
    await change(repository, "main")


@pytest.mark.parametrize(("moved", "place"), [("move array", "h/a"), ("move group", "h/g/a")])
@pytest.mark.parametrize("mover", ["side", "main"])
async def test_writes_follow_an_array_that_the_other_side_moved(
    moved: str, place: str, mover: str
) -> None:
    """Chunks, metadata and new neighbours arrive at the new place."""
    writer = "main" if mover == "side" else "side"
    async with Repository.create(memory_url()) as repository:
        await begin(repository)
        await CHANGES[moved](repository, mover)
        await CHANGES["write chunk 0"](repository, writer)
        await CHANGES["grow"](repository, writer)
        await repository.merge("side")
        session = await repository.readonly_session("main")
        assert await read(session, f"{place}/c/0") == b"xxx"
        assert await read(session, f"{place}/c/4") == b"zzz"
        assert await read(session, f"{place}/zarr.json") == TALLER
        assert await read(session, "g/a/zarr.json") is None


async def test_a_new_array_follows_the_group_that_the_other_side_moved() -> None:
    """It is created in the group, wherever that is now."""
    async with Repository.create(memory_url()) as repository:
        await begin(repository)
        await CHANGES["new array"](repository, "side")
        await CHANGES["move group"](repository, "main")
        await repository.merge("side")
        session = await repository.readonly_session("main")
        assert await read(session, "h/g/b/c/0") == b"bbb"
        assert await read(session, "g/zarr.json") is None


async def test_equal_arrays_that_both_sides_created_become_one() -> None:
    """Chunks of both are in it; a chunk that both wrote differently is a conflict."""
    async with Repository.create(memory_url()) as repository:
        await begin(repository)
        await changing(("b/zarr.json", DOCUMENT), ("b/c/0", b"000"))(repository, "side")
        await changing(("b/zarr.json", DOCUMENT), ("b/c/2", b"222"))(repository, "main")
        second = await repository.lookup_branch("main")
        await repository.merge("side")
        session = await repository.readonly_session("main")
        assert [await read(session, f"b/c/{at}") for at in range(4)] == [
            b"000",
            None,
            b"222",
            None,
        ]
        await repository.create_branch("late", second)
        await changing(("b/c/0", b"!!!"))(repository, "late")
        with pytest.raises(MergeConflictError) as caught:
            await repository.merge("late")
        (conflict,) = caught.value.context["report"].conflicts  # type: ignore[attr-defined]
        assert (conflict.path, conflict.coords) == ("/b", ((0,),))


async def test_a_clash_names_path_chunks_and_the_commits_of_both_sides() -> None:
    """So that people know whom to ask."""
    async with Repository.create(memory_url()) as repository:
        await begin(repository)
        await CHANGES["write chunk 3"](repository, "side")
        await CHANGES["write chunk 0"](repository, "side")
        await changing(("g/a/c/0", b"mmm"))(repository, "main")
        await CHANGES["new array"](repository, "main")
        (conflict,) = (await repository.merge("side", dry_run=True)).conflicts
        assert (conflict.path, conflict.coords) == ("/g/a", ((0,),))
        assert [it.message for it in conflict.source_commits] == ["side: g/a/c/0"]
        assert [it.message for it in conflict.branch_commits] == ["main: g/a/c/0"]


@pytest.mark.parametrize(("solver", "wanted"), [("ours", b"xxx"), ("theirs", b"mmm")])
async def test_a_solver_decides_with_ours_as_the_source(solver: str, wanted: bytes) -> None:
    """*Ours* is what is merged, *theirs* is the branch; everything else is merged as well."""

    class Chosen:
        def solve(self, clash: Clash) -> Sequence[Answer]:
            assert clash.ours.message == "side: g/a/c/3"
            assert clash.theirs.message == "main: g/a/c/0"
            return [Resolution(solver)] * len(clash.conflicts)

    async with Repository.create(memory_url()) as repository:
        await begin(repository)
        await CHANGES["write chunk 0"](repository, "side")
        await CHANGES["write chunk 3"](repository, "side")
        await changing(("g/a/c/0", b"mmm"))(repository, "main")
        await repository.merge("side", solver=Chosen())
        session = await repository.readonly_session("main")
        assert await read(session, "g/a/c/0") == wanted
        assert await read(session, "g/a/c/3") == b"yyy"


async def test_merging_again_brings_only_what_is_new() -> None:
    """Also back and forth between two branches."""
    async with Repository.create(memory_url()) as repository:
        await begin(repository)
        await CHANGES["write chunk 0"](repository, "side")
        await repository.merge("side")
        await changing(("g/a/c/0", b"mmm"))(repository, "main")
        await CHANGES["write chunk 3"](repository, "side")
        await repository.merge("side")
        assert (await repository.merge("side")).snapshot_id is None
        report = await repository.merge("main", into="side")
        assert {*report.changes.updated_chunks} == {"/g/a"}
        assert report.changes.updated_chunks["/g/a"].tolist() == [[0]]
        main, side = await contents_at(repository), await contents_at(repository, branch="side")
        assert main == side
        assert main["g/a/c/0"] == b"mmm"


async def test_a_stock_solver_of_rebases_serves_merges_too() -> None:
    """`BasicConflictSolver` keeps the source's chunks."""
    async with Repository.create(memory_url()) as repository:
        await begin(repository)
        await CHANGES["write chunk 0"](repository, "side")
        await changing(("g/a/c/0", b"mmm"))(repository, "main")
        await repository.merge("side", solver=BasicConflictSolver())
        session = await repository.readonly_session("main")
        assert await read(session, "g/a/c/0") == b"xxx"


async def test_fast_forward_moves_only_to_descendants() -> None:
    """Commits of the branch are never lost."""
    async with Repository.create(memory_url()) as repository:
        await begin(repository)
        await CHANGES["write chunk 0"](repository, "side")
        tip = await repository.lookup_branch("side")
        assert await repository.fast_forward("main", to="side") == tip
        assert await repository.lookup_branch("main") == tip
        await CHANGES["write chunk 3"](repository, "main")
        with pytest.raises(InvalidInputError, match="Merge instead"):
            await repository.fast_forward("main", to="side")
        assert await repository.fast_forward("main", to="main") == (
            await repository.lookup_branch("main")
        )


async def test_history_is_drawn_with_the_branch_that_was_merged() -> None:
    """The other parent is in the snapshot's properties, and in the drawing."""
    async with Repository.create(memory_url()) as repository:
        await begin(repository)
        await CHANGES["write chunk 0"](repository, "side")
        await CHANGES["write chunk 3"](repository, "main")
        report = await repository.merge("side", message="joined")
        assert report.snapshot_id is not None
        info = await repository.lookup_snapshot(report.snapshot_id)
        assert info.metadata["icechunk-async"] == {"merged": [str(report.source_id)]}
        drawn = str(await repository.ancestry_graph(plain=True)).splitlines()
        assert [line[:3] for line in drawn[:5]] == ["●─╮", "│ │", "● │", "│ │", "│ ●"]
        assert "joined" in drawn[0]
        again = await repository.ancestry_graph(branch="main")
        assert len(again.rows) == 5
        picture = again.svg()
        assert picture.count("<circle") == 5
        assert "joined" in picture
