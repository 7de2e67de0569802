"""Which writes a branch holds is told by every later snapshot."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import pytest

from icechunk_async.conflicts import ConflictDetector
from icechunk_async.engine.commit.publisher import WRITTEN_ONCE
from tests.helpers import group_document, write

if TYPE_CHECKING:
    from icechunk_async import Repository

HELD = {WRITTEN_ONCE: {"daily": 7}}


async def test_later_snapshots_carry_which_writes_a_branch_holds(
    filled: Repository, spec: int
) -> None:
    """Commits, also rebased ones, and amendments; other properties are not carried."""
    behind = await filled.writable_session("main")
    await write(behind, "behind/zarr.json", group_document())
    session = await filled.writable_session("main")
    await session.commit("held", {**HELD, "by": "Spark"}, allow_empty=True)
    await behind.commit("rebased", {"by": "others"}, rebase_with=ConflictDetector())
    session = await filled.writable_session("main")
    await write(session, "g/zarr.json", group_document())
    tip = await (session.commit("more") if spec == 1 else session.amend("amended"))
    found = [info async for info in filled.ancestry(branch="main")]
    told = [
        {name: it for name, it in info.metadata.items() if not name.startswith("__")}
        for info in found
    ]
    assert told[0] == HELD
    if spec == 1:
        assert told[1] == {**HELD, "by": "others"}
    await filled.expire_snapshots(found[0].written_at)
    assert (await filled.lookup_snapshot(tip)).metadata == HELD
    session = await filled.writable_session("main")
    newer = {WRITTEN_ONCE: {"daily": 8}}
    newest = await session.commit("newer", newer, allow_empty=True)
    assert (await filled.lookup_snapshot(newest)).metadata == newer


@pytest.mark.parametrize("method", ["amend", "new_commit"])
async def test_rewritten_manifests_carry_it_too(
    filled: Repository, spec: int, method: Literal["amend", "new_commit"]
) -> None:
    """So that it is there when older snapshots have expired."""
    if spec == 1 and method == "amend":
        pytest.skip("format version 1 has no amendments")
    session = await filled.writable_session("main")
    await session.commit("held", HELD, allow_empty=True)
    await filled.rewrite_manifests("rewritten", branch="main", commit_method=method)
    await filled.expire_snapshots(datetime.now(UTC))
    session = await filled.writable_session("main")
    await write(session, "g/zarr.json", group_document())
    tip = await filled.lookup_snapshot(await session.commit("more"))
    assert tip.metadata[WRITTEN_ONCE] == HELD[WRITTEN_ONCE]
