"""Bases of merges that expired, that were collected, and that are not there; unknown names."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository, SnapshotId
from icechunk_async.conflicts import AttributesSolver, BasicConflictSolver
from icechunk_async.errors import (
    InvalidInputError,
    MergeConflictError,
    NotFoundError,
    SnapshotNotFoundError,
)
from tests.helpers import memory_url, objects
from tests.unit.engine.versions.stories import contents, contents_at
from tests.unit.engine.versions.test_merge_matrix import CHANGES, begin, changing
from tests.unit.engine.versions.test_solving import titled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def with_expired_base(repository: Repository, *, collected: bool) -> SnapshotId:
    """Let two branches begin at a snapshot that expired; return it."""
    await begin(repository)
    base = await repository.lookup_branch("main")
    await changing(("g/a/c/3", b"sss"))(repository, "side")
    await changing(("g/a/zarr.json", titled(by="main")))(repository, "main")
    await repository.expire_snapshots(datetime.now(UTC))
    if collected:
        await repository.garbage_collect(datetime.now(UTC))
    assert base not in [it.id async for it in repository.ancestry()]
    return base


def attributes(found: dict[str, bytes]) -> dict[str, Any]:
    """Return those of the array."""
    whole: dict[str, Any] = json.loads(found["g/a/zarr.json"])["attributes"]
    return whole


async def test_a_base_that_expired_counts_while_it_can_be_read() -> None:
    """Its id is in the history of both sides; each side brings what it changed since."""
    async with Repository.create(memory_url()) as repository:
        base = await with_expired_base(repository, collected=False)
        report = await repository.merge("side")
        assert report.base_id == base
        found = await contents_at(repository)
        assert (found["g/a/c/3"], attributes(found)) == (b"sss", {"by": "main"})
        assert (await repository.merge("side")).snapshot_id is None


async def test_without_its_base_a_merge_reports_what_it_cannot_tell(
    repository: Repository,
) -> None:
    """Which side changed a document is not known: neither is taken, and nothing is published."""
    base = await with_expired_base(repository, collected=True)
    before, files = await contents_at(repository), await objects(repository.storage)
    with pytest.raises(MergeConflictError) as caught:
        await repository.merge("side")
    report: Any = caught.value.context["report"]
    assert {(it.kind.name, it.path) for it in report.conflicts} == {
        ("ZARR_METADATA_DOUBLE_UPDATE", "/g/a"),
        ("CHUNK_DOUBLE_UPDATE", "/g/a"),
    }
    with pytest.raises(SnapshotNotFoundError, match=f"{base}, the common ancestor, is not there"):
        await repository.merge("side", base=base)
    assert await contents_at(repository) == before
    assert await objects(repository.storage) == files
    await repository.merge("side", solver=AttributesSolver(BasicConflictSolver()))
    found = await contents_at(repository)
    assert (found["g/a/c/3"], attributes(found)) == (b"sss", {"by": "main"})


@pytest.mark.parametrize("ours", ["shrink", "grow", "other codec"])
async def test_a_document_that_is_taken_without_a_base_fits_its_chunks(
    repository: Repository, ours: str
) -> None:
    """Chunks outside of a smaller grid go; under another codec those of the branch are a clash."""
    await begin(repository)
    await CHANGES[ours](repository, "side")
    await CHANGES["write chunk 3"](repository, "main")
    side = await contents_at(repository, branch="side")
    await repository.expire_snapshots(datetime.now(UTC))
    await repository.garbage_collect(datetime.now(UTC))
    pending = await repository.begin_merge("side")
    kinds = {it.kind.name for it in pending.conflicts}
    assert "ZARR_METADATA_DOUBLE_UPDATE" in kinds
    assert ("CHUNKS_UPDATED_IN_UPDATED_ARRAY" in kinds) == (ours == "other codec")
    assert await contents(pending.session) == await contents_at(repository)
    if ours == "other codec":
        pending.session.discard_changes()
        return
    await pending.take_source()
    await pending.commit()
    found = await contents_at(repository)
    assert found["g/a/zarr.json"] == side["g/a/zarr.json"]
    assert ("g/a/c/3" in found) == (ours == "grow")
    assert (await repository.verify("length")).is_healthy


async def test_snapshots_without_a_common_ancestor_need_a_base() -> None:
    """Another program may have made a separate history; the caller names what both share."""
    async with Repository.create(memory_url(), spec_version=1) as repository:
        await begin(repository)
        assets = repository.engine.assets
        tip = await assets.snapshot(await repository.lookup_branch("main"))
        alone = replace(tip, id=SnapshotId.random(), parent_id=None)
        await assets.put_snapshot(alone)
        await repository.create_branch("alone", alone.id)
        await CHANGES["write chunk 0"](repository, "alone")
        before, files = await contents_at(repository), await objects(repository.storage)
        for act in (repository.merge, repository.begin_merge, repository.propose):
            with pytest.raises(InvalidInputError, match=r"have no common ancestor\. Name.*base="):
                await act("alone")
        assert await contents_at(repository) == before
        assert await objects(repository.storage) == files
        await repository.merge("alone", base=tip.id)
        assert (await contents_at(repository))["g/a/c/0"] == b"xxx"


UNKNOWN: dict[str, Callable[[Repository], Awaitable[Any]]] = {
    "merge": lambda it: it.merge("nowhere"),
    "merge into": lambda it: it.merge("side", into="nowhere"),
    "merge base": lambda it: it.merge("side", base="nowhere"),
    "begin_merge": lambda it: it.begin_merge("nowhere"),
    "cherry_pick": lambda it: it.cherry_pick("nowhere"),
    "cherry_pick onto": lambda it: it.cherry_pick("side", onto="nowhere"),
    "revert": lambda it: it.revert("nowhere"),
    "revert on": lambda it: it.revert("main", on="nowhere"),
    "restore": lambda it: it.restore("nowhere"),
    "undo": lambda it: it.undo("nowhere"),
    "fast_forward": lambda it: it.fast_forward("nowhere", to="side"),
    "fast_forward to": lambda it: it.fast_forward("main", to="nowhere"),
    "squash": lambda it: it.squash("nowhere", since="side"),
    "squash since": lambda it: it.squash("main", since="nowhere"),
    "propose": lambda it: it.propose("nowhere"),
    "propose into": lambda it: it.propose("side", into="nowhere"),
    "blame": lambda it: it.blame("g/a", ref="nowhere"),
    "diff_values": lambda it: it.diff_values("nowhere"),
    "changes": lambda it: anext(it.changes("nowhere").__aiter__()),
    "watch": lambda it: anext(it.watch("nowhere").__aiter__()),
    "watch since": lambda it: anext(it.watch("main", since="nowhere").__aiter__()),
    "cube": lambda it: it.cube("g/a", ref="nowhere"),
}


@pytest.mark.parametrize("what", UNKNOWN)
async def test_unknown_names_are_one_sentence_and_change_nothing(
    repository: Repository, what: str
) -> None:
    """The name is in it; of branches, tags and snapshots in every place."""
    await begin(repository)
    await CHANGES["write chunk 0"](repository, "side")
    files = await objects(repository.storage)
    with pytest.raises(NotFoundError, match="nowhere"):
        await UNKNOWN[what](repository)
    assert await objects(repository.storage) == files
