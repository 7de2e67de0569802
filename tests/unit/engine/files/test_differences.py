"""Comparing snapshots finds what the log of a commit lists."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.engine.changes.compare import compare_refs
from icechunk_async.engine.files.differences import difference
from icechunk_async.format.ids import ChunkId
from icechunk_async.format.manifest.chunk import InlineChunk, NativeChunk, VirtualChunk
from icechunk_async.format.manifest.refs import ChunkRefs
from tests.helpers import array_document, examples, group_document, memory_url, write

if TYPE_CHECKING:
    from icechunk_async import Session
    from icechunk_async.format.manifest.chunk import ChunkRef

_STEPS = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from(["array", "group", "attributes", "delete", "chunk", "cut", "drop"]),
            st.sampled_from(["a", "b", "g/a"]),
            st.integers(0, 5),
        ),
        min_size=1,
        max_size=6,
    ),
    min_size=1,
    max_size=4,
)


async def _do(session: Session, what: str, path: str, number: int) -> None:
    node = session.workspace.node(f"/{path}")
    is_array = node is not None and node.array is not None
    match what:
        case "array" if node is None:
            await write(session, f"{path}/zarr.json", array_document((6,), (1,)))
        case "group" if node is None:
            await write(session, f"{path}/zarr.json", group_document(number=number))
        case "attributes" if is_array:
            document = array_document((6,), (1,), attributes={"number": number})
            await write(session, f"{path}/zarr.json", document)
        case "cut" if is_array:
            await write(session, f"{path}/zarr.json", array_document((number,), (1,)))
        case "delete" if node is not None:
            await session.store.delete(f"{path}/zarr.json")
        case "drop" if is_array:
            await session.store.delete(f"{path}/c/{number}")
        case "chunk" if is_array and node is not None and node.array is not None:
            if number < node.array.grid[0]:
                await write(session, f"{path}/c/{number}", b"x" * 100)
        case _:
            pass


@examples(40)
@given(_STEPS)
@example([[("array", "a", 0), ("chunk", "a", 4)], [("cut", "a", 2)]])
@example([[("array", "a", 0), ("chunk", "a", 0)], [("cut", "a", 0)]])
def test_comparing_snapshots_finds_what_the_log_of_the_commit_lists(steps: list[Any]) -> None:
    """Every node of the log is found; of chunks those that exist before or after."""
    asyncio.run(_compare(steps))


async def _compare(steps: list[Any]) -> None:
    config = RepositoryConfig(inline_chunk_threshold_bytes=0)
    async with Repository.create(memory_url(), config=config) as repository:
        assets = repository.engine.assets
        for commit in steps:
            session = await repository.writable_session("main")
            for step in commit:
                await _do(session, *step)
            await session.commit("step", allow_empty=True)
            info = await repository.lookup_snapshot(await repository.lookup_branch("main"))
            after, log = await assets.snapshot(info.id), await assets.transaction_log(info.id)
            assert info.parent_id is not None
            before = await assets.snapshot(info.parent_id)
            found = await difference(before, after, assets.manifests)
            nodes = ("new_groups", "new_arrays", "deleted_groups", "deleted_arrays")
            for name in (*nodes, "updated_groups", "updated_arrays"):
                assert getattr(found, name) == getattr(log, name), name
            for node_id, coords in found.updated_chunks.items():
                listed = {tuple(it) for it in log.updated_chunks[node_id].tolist()}
                assert {tuple(it) for it in coords.tolist()} <= listed
            for node_id, coords in log.updated_chunks.items():
                seen = {tuple(it) for it in found.chunks_of(node_id, coords.shape[1]).tolist()}
                path = after.nodes.path_of(node_id)
                assert path is not None
                reading = await repository.readonly_session(snapshot_id=info.id)
                there = {
                    tuple(it) for it in (await reading.workspace.all_refs(path)).coords.tolist()
                }
                assert {tuple(it) for it in coords.tolist()} & there <= seen


def _refs(refs: dict[tuple[int, ...], ChunkRef]) -> ChunkRefs:
    return ChunkRefs.from_mapping(1, dict(refs)).sort()


_ONE, _OTHER = ChunkId(b"1" * 16), ChunkId(b"2" * 16)
_VIRTUAL = VirtualChunk("s3://b/one", 0, 10)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (InlineChunk(b"one"), InlineChunk(b"two")),
        (InlineChunk(b"abc"), NativeChunk(_ONE, 0, 3)),
        (NativeChunk(_ONE, 0, 3), NativeChunk(_OTHER, 0, 3)),
        (NativeChunk(_ONE, 0, 3), NativeChunk(_ONE, 1, 3)),
        (NativeChunk(_ONE, 0, 3), NativeChunk(_ONE, 0, 4)),
        (_VIRTUAL, replace(_VIRTUAL, location="s3://b/two")),
        (_VIRTUAL, replace(_VIRTUAL, offset=1)),
        (_VIRTUAL, replace(_VIRTUAL, etag="e")),
        (_VIRTUAL, replace(_VIRTUAL, last_modified=5)),
        (replace(_VIRTUAL, etag="e"), replace(_VIRTUAL, etag="f")),
    ],
)
def test_any_difference_of_a_reference_shows(before: ChunkRef, after: ChunkRef) -> None:
    """Among references that are equal, which do not show."""
    others: dict[tuple[int, ...], ChunkRef] = {
        (0,): InlineChunk(b"same"),
        (1,): NativeChunk(_ONE, 7, 7),
        (2,): replace(_VIRTUAL, etag="e"),
        (3,): replace(_VIRTUAL, location="s3://b/three"),
    }
    one, other = _refs({**others, (4,): before}), _refs({(4,): after, **others})
    assert compare_refs(one, other).coords.tolist() == [[4]]
    assert compare_refs(one, one).coords.tolist() == []


def test_chunks_that_come_and_go_show_at_any_rank() -> None:
    """Also in an array without axes, which has one chunk."""
    nothing = ChunkRefs.empty(0)
    single = ChunkRefs.from_mapping(0, {(): InlineChunk(b"x")})
    for pair in ((nothing, single), (single, nothing)):
        assert compare_refs(*pair).coords.shape == (1, 0)
    assert compare_refs(single, single).coords.shape == (0, 0)
    some = _refs({(0,): _VIRTUAL, (2,): _VIRTUAL})
    more = _refs({(1,): _VIRTUAL, (2,): _VIRTUAL})
    assert np.array_equal(compare_refs(some, more).coords, [[0], [1]])
