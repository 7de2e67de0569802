"""Conflicts settled by hand, and by the stock solvers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from icechunk_async import Repository
from icechunk_async.conflicts import (
    AttributesSolver,
    BasicConflictSolver,
    ConflictDetector,
    Newest,
    PerPath,
)
from icechunk_async.errors import (
    FormatError,
    InvalidInputError,
    MergeConflictError,
    RebaseFailedError,
)
from icechunk_async.format.ids import SnapshotId
from tests.helpers import array_document, group_document, memory_url, read, write
from tests.unit.engine.versions.stories import contents, contents_at
from tests.unit.engine.versions.test_merge_matrix import CHANGES, begin, changing


def titled(**attributes: object) -> bytes:
    """Return the document of the array with attributes."""
    return array_document((12,), (3,), attributes=attributes)


async def clashing(repository: Repository) -> None:
    """Let both sides change chunk 0 and the attributes, and each something else as well."""
    await begin(repository)
    await changing(("g/a/c/0", b"sss"), ("g/a/zarr.json", titled(a=1)))(repository, "side")
    await CHANGES["write chunk 3"](repository, "side")
    await changing(("g/a/c/0", b"mmm"), ("g/a/zarr.json", titled(b=2)))(repository, "main")


async def test_a_merge_settled_by_hand_is_one_commit(repository: Repository) -> None:
    """The session shows what will be committed, and nothing is published before."""
    await clashing(repository)
    before = await contents_at(repository)
    pending = await repository.begin_merge("side")
    assert {it.kind.name for it in pending.conflicts} == {
        "CHUNK_DOUBLE_UPDATE",
        "ZARR_METADATA_DOUBLE_UPDATE",
    }
    assert await read(pending.session, "g/a/c/0") == b"mmm"
    assert await read(pending.session, "g/a/c/3") == b"yyy"
    chunk, document = sorted(pending.conflicts, key=lambda it: not it.coords)
    with pytest.raises(MergeConflictError, match=r"2 conflict\(s\) .* are open"):
        await pending.commit()
    await pending.take_source(chunk)
    assert await read(pending.session, "g/a/c/0") == b"sss"
    await write(pending.session, "g/a/zarr.json", titled(a=1, b=2))
    pending.resolved(document)
    with pytest.raises(InvalidInputError, match="not an open conflict"):
        pending.keep_branch(document)
    assert pending.conflicts == ()
    assert await contents_at(repository) == before
    await pending.commit("by hand")
    found = await contents_at(repository)
    assert (found["g/a/c/0"], found["g/a/c/3"]) == (b"sss", b"yyy")
    assert json.loads(found["g/a/zarr.json"])["attributes"] == {"a": 1, "b": 2}
    assert (await repository.merge("side")).snapshot_id is None


async def test_keeping_the_branch_and_taking_the_source_settle_everything(
    repository: Repository,
) -> None:
    """Without arguments they are about all open conflicts."""
    await clashing(repository)
    kept = await repository.begin_merge("side")
    kept.keep_branch()
    assert await read(kept.session, "g/a/zarr.json") == titled(b=2)
    taken = await repository.begin_merge("side")
    await taken.take_source()
    assert await read(taken.session, "g/a/zarr.json") == titled(a=1)
    assert await read(taken.session, "g/a/c/0") == b"sss"
    kept.session.discard_changes()
    await taken.commit()


async def test_a_damaged_document_of_the_source_is_a_format_error() -> None:
    """In format 1, which looks into documents: a snapshot may bring any bytes."""
    async with Repository.create(memory_url(), spec_version=1) as repository:
        await clashing(repository)
        assets = repository.engine.assets
        tip = await assets.snapshot(await repository.lookup_branch("side"))
        node = replace(tip.nodes["/g/a"], user_data=b'{"node_type": "tree"}')
        hostile = replace(
            tip, id=SnapshotId.random(), parent_id=tip.id, nodes=tip.nodes.edited([node])
        )
        await assets.put_snapshot(hostile)
        log = await assets.transaction_log(tip.id)
        await assets.put_transaction_log(replace(log, id=hostile.id))
        await repository.create_branch("hostile", hostile.id)
        pending = await repository.begin_merge("hostile")
        (document,) = [it for it in pending.conflicts if not it.coords]
        with pytest.raises(FormatError, match="damaged node at '/g/a'"):
            await pending.take_source(document)
        assert document in pending.conflicts
        pending.session.discard_changes()


async def test_a_deletion_can_be_taken_and_a_lost_array_cannot(repository: Repository) -> None:
    """A conflict that taking one side cannot settle stays open."""
    await begin(repository)
    await CHANGES["delete array"](repository, "side")
    await CHANGES["write chunk 0"](repository, "main")
    pending = await repository.begin_merge("side")
    await pending.take_source()
    await pending.commit()
    assert "g/a/zarr.json" not in await contents_at(repository)
    again = await repository.begin_merge(str(await _parent(repository)), into="side")
    assert again.conflicts
    with pytest.raises(InvalidInputError, match="call resolved"):
        await again.take_source()
    assert again.conflicts
    again.session.discard_changes()


@pytest.mark.parametrize("kind", ["group", "array"])
async def test_a_node_that_the_source_replaced_is_as_the_branch_has_it(
    repository: Repository, kind: str
) -> None:
    """While that is a conflict, and if the branch is kept: no other node is at its path."""
    await begin(repository)
    if kind == "group":  # in whose place the source has an array
        await CHANGES["array for group"](repository, "side")
        await CHANGES["new array"](repository, "main")
    else:
        below = "g/a/b/zarr.json"
        replaced = ("g/a", None), ("g/a/zarr.json", group_document()), (below, titled())
        await changing(*replaced)(repository, "side")
        await CHANGES["write chunk 0"](repository, "main")
    before = await contents_at(repository)
    pending = await repository.begin_merge("side")
    assert pending.conflicts
    now = await contents(pending.session)
    node = "g/zarr.json" if kind == "group" else "g/a/zarr.json"
    assert now[node] == before[node]
    assert "g/a/b/zarr.json" not in now
    pending.keep_branch()
    if pending.session.has_uncommitted_changes:
        await pending.commit()
    assert await contents_at(repository) == now
    assert (await repository.verify("length")).is_healthy


@pytest.mark.parametrize("change", ["shrink", "other codec"])
async def test_chunks_that_the_branch_keeps_have_its_document(
    repository: Repository, change: str
) -> None:
    """The source's would cut them off, or give them another meaning."""
    await begin(repository)
    await CHANGES[change](repository, "side")
    await CHANGES["write chunk 3"](repository, "main")
    before = await contents_at(repository)
    pending = await repository.begin_merge("side")
    assert pending.conflicts
    assert await contents(pending.session) == before
    pending.keep_branch()
    assert not pending.session.has_uncommitted_changes


async def _parent(repository: Repository) -> str:
    infos = [it async for it in repository.ancestry()]
    return str(infos[1].id)


async def test_a_pending_merge_follows_the_branch(repository: Repository) -> None:
    """Other commits are kept; what they changed as well makes it fail, with nothing lost."""
    await clashing(repository)
    pending = await repository.begin_merge("side", solver=BasicConflictSolver())
    pending.keep_branch()
    await changing(("g/a/c/1", b"111"))(repository, "main")
    await pending.commit()
    found = await contents_at(repository)
    assert (found["g/a/c/0"], found["g/a/c/1"], found["g/a/c/3"]) == (b"sss", b"111", b"yyy")

    await changing(("g/a/c/2", b"222"))(repository, "side")
    late = await repository.begin_merge("side")
    await changing(("g/a/c/2", b"!!!"))(repository, "main")
    with pytest.raises(RebaseFailedError):
        await late.commit()
    assert (await contents_at(repository))["g/a/c/2"] == b"!!!"
    late.session.discard_changes()


async def test_newest_keeps_what_was_committed_last(repository: Repository) -> None:
    """For each chunk by itself, whichever branch is younger."""
    await begin(repository)
    await changing(("g/a/c/0", b"old"))(repository, "side")
    await changing(("g/a/c/0", b"new"), ("g/a/c/1", b"old"))(repository, "main")
    await changing(("g/a/c/1", b"new"))(repository, "side")
    await repository.merge("side", solver=Newest())
    found = await contents_at(repository)
    # One conflict covers both chunks: its newest commit is that of the side.
    assert found["g/a/c/1"] == b"new"


async def test_newest_is_the_session_in_a_rebase(repository: Repository) -> None:
    """It is not committed yet."""
    await begin(repository)
    session = await repository.writable_session("main")
    await write(session, "g/a/c/0", b"ses")
    await changing(("g/a/c/0", b"oth"))(repository, "main")
    await session.commit("mine", rebase_with=Newest())
    assert (await contents_at(repository))["g/a/c/0"] == b"ses"


@pytest.mark.parametrize(
    ("ours", "theirs", "merged"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"n": {"x": 1, "y": 2}}, {"n": {"x": 1, "z": 3}}, {"n": {"x": 1, "y": 2, "z": 3}}),
        ({"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2}),
        ({"a": 1}, {"a": 2}, None),
        ({"a": 1}, {"a": True}, None),
        ({"n": {"x": 1}}, {"n": 5}, None),
    ],
)
async def test_attributes_are_merged_key_by_key(
    repository: Repository,
    ours: dict[str, object],
    theirs: dict[str, object],
    merged: dict[str, object] | None,
) -> None:
    """A key that both changed differently is a conflict."""
    await begin(repository)
    await changing(("g/a/zarr.json", titled(**ours)))(repository, "side")
    await changing(("g/a/zarr.json", titled(**theirs)))(repository, "main")
    if merged is None:
        with pytest.raises(MergeConflictError):
            await repository.merge("side", solver=AttributesSolver())
        return
    await repository.merge("side", solver=AttributesSolver())
    found = await contents_at(repository)
    assert json.loads(found["g/a/zarr.json"])["attributes"] == merged


@pytest.mark.parametrize("changed", [True, 1.0])
async def test_a_value_of_another_type_is_a_change(repository: Repository, changed: object) -> None:
    """To Python it equals the one before, and would be taken for unchanged."""
    await begin(repository)
    await changing(("g/a/zarr.json", titled(n={"x": 1})))(repository, "main")
    await repository.reset_branch("side", await repository.lookup_branch("main"))
    await changing(("g/a/zarr.json", titled(n={"x": 1}, b=2)))(repository, "side")
    await changing(("g/a/zarr.json", titled(n={"x": changed})))(repository, "main")
    await repository.merge("side", solver=AttributesSolver())
    found = json.loads((await contents_at(repository))["g/a/zarr.json"])["attributes"]
    assert repr(found["n"]["x"]) == repr(changed)
    assert found["b"] == 2


@pytest.mark.parametrize("document", [b"{", b"[]", b"[" * 100_000])
async def test_a_damaged_document_is_not_merged(repository: Repository, document: bytes) -> None:
    """A snapshot may bring any bytes: the error says whose they are."""
    await begin(repository)
    await changing(("g/a/zarr.json", titled(a=1)))(repository, "side")
    session = await repository.writable_session("main")
    node = session.workspace.array("/g/a")
    session.workspace.tree.set_node("/g/a", document, node.array)
    await session.commit("damaged")
    with pytest.raises(FormatError, match="'/g/a'"):
        await repository.merge("side", solver=AttributesSolver())


async def test_a_grown_array_and_new_attributes_go_together(repository: Repository) -> None:
    """The chunks behind the old end are kept."""
    await begin(repository)
    await CHANGES["grow"](repository, "side")
    await CHANGES["attributes"](repository, "main")
    await repository.merge("side", solver=AttributesSolver())
    found = await contents_at(repository)
    document = json.loads(found["g/a/zarr.json"])
    assert (document["shape"], document["attributes"]) == ([15], {"title": "t"})
    assert found["g/a/c/4"] == b"zzz"


async def test_solvers_are_chosen_by_path(repository: Repository) -> None:
    """The first pattern that fits counts, and the default decides the rest."""
    await begin(repository)
    for branch, data in (("side", b"sss"), ("main", b"mmm")):
        await changing(
            ("h/b/zarr.json", array_document((12,), (3,))), ("g/a/c/0", data), ("h/b/c/0", data)
        )(repository, branch)
    both = PerPath({"/g/*": BasicConflictSolver()})
    with pytest.raises(MergeConflictError) as caught:
        await repository.merge("side", solver=both)
    report = caught.value.context["report"]
    assert [it.path for it in report.conflicts] == ["/h/b"]  # type: ignore[attr-defined]
    solver = PerPath(
        {"/g/*": BasicConflictSolver(), "/*": ConflictDetector()}, BasicConflictSolver()
    )
    with pytest.raises(MergeConflictError):
        await repository.merge("side", solver=solver)
    await repository.merge("side", solver=PerPath({}, BasicConflictSolver()))
    assert (await contents_at(repository))["h/b/c/0"] == b"sss"


async def test_a_solver_that_returns_too_little_is_refused(repository: Repository) -> None:
    """Nothing is published."""

    class Lazy:
        def solve(self, clash: object) -> list[object]:
            del clash
            return []

    await clashing(repository)
    before = await contents_at(repository)
    for solver in (Lazy(), PerPath({"*": Lazy()}), AttributesSolver(Lazy())):  # type: ignore[dict-item, arg-type]
        with pytest.raises(InvalidInputError, match="one for each"):
            await repository.merge("side", solver=solver)  # type: ignore[arg-type]
    assert await contents_at(repository) == before
