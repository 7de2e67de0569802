"""The types of what methods return are importable from a module that users may import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import results
from tests.helpers import write

if TYPE_CHECKING:
    from icechunk_async import Repository


@pytest.mark.parametrize("spec", [2], indirect=True)
async def test_values_that_methods_return_are_of_the_types_in_results(filled: Repository) -> None:
    """All of them, under the name of their class."""
    session = await filled.writable_session("main")
    await write(session, "a/c/2", b"2")
    await filled.create_tag("v1", session.snapshot_id)
    tip = await filled.lookup_branch("main")
    seen: list[results.Progress] = []
    await filled.check_references(progress=seen.append)
    first = [it.id async for it in filled.ancestry()][-1]
    updates = [it async for it in filled.ops_log()]
    batches = [it async for it in session.array_chunk_iterator("a")]
    returned: list[Any] = [
        await filled.ancestry_graph(),
        await filled.diff(from_snapshot_id=first, to_branch="main"),
        await filled.get_status(),
        (await filled.get_status()).availability,
        *await filled.feature_flags(),
        *await filled.list_manifest_files(tip),
        *[it.id for it in await filled.list_manifest_files(tip)],
        await filled.lookup_snapshot(tip),
        await session.chunk_type("a", (0,)),
        await session.get_node_id("a"),
        session.mode,
        session.status(),
        *batches,
        *updates,
        *[it.detail for it in updates],
        *seen,
    ]
    for value in returned:
        name = type(value).__name__
        name = {"Availability": "RepoAvailability"}.get(name, name)
        assert type(value) is getattr(results, name)
        assert name in results.__all__
    assert len({type(it) for it in returned}) > 15
