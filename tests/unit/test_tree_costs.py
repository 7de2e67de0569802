"""The cost of large hierarchies follows what is read and changed, not how many nodes there are.

Counts of nodes that are decoded and encoded, and of calls; seconds are in ``benchmarks``.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository
from icechunk_async.config import (
    ManifestConfig,
    ManifestPreloadCondition,
    ManifestPreloadConfig,
    RepositoryConfig,
)
from icechunk_async.engine.files.preload import choose
from icechunk_async.format.envelope import Envelope
from icechunk_async.format.ids import NodeId, SnapshotId
from icechunk_async.format.snapshot import (
    Node,
    Nodes,
    Snapshot,
    decode_snapshot,
    table,
    writing,
)
from icechunk_async.format.snapshot.writing import encode_snapshot
from tests.helpers import array_document, counted_calls, group_document, memory_url, read, write

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from icechunk_async import Session

NO_PRELOAD = RepositoryConfig(
    manifest=ManifestConfig(preload=ManifestPreloadConfig(max_arrays_to_scan=0))
)
SMALL, LARGE = 300, 3000
"""Enough that copying pays."""
GROWTH = 400
"""Calls that a tree ten times as large may cost more: searches take a few steps more."""
SHARED = 600
"""Calls to decode a manifest that 60 arrays share: more than the six of the small tree."""


class Counted:
    """The paths of nodes that were decoded and encoded."""

    def __init__(self) -> None:
        """Begin with none."""
        self.decoded: list[str] = []
        self.encoded: list[str] = []


@contextmanager
def counted_nodes() -> Generator[Counted]:
    """Note which nodes are decoded and encoded."""
    counted = Counted()
    decode_one, decode_many = table.decode_node, table.decode_nodes
    encode = writing._NodeWriter.node

    def one(row: Any, path: str) -> Node:
        counted.decoded.append(path)
        return decode_one(row, path)

    def many(tables: Any, paths: Sequence[str]) -> Iterator[Node]:
        counted.decoded += paths
        return decode_many(tables, paths)

    def encoded(self: writing._NodeWriter, node: Node) -> Any:
        counted.encoded.append(node.path)
        return encode(self, node)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "decode_node", one)
        patch.setattr(table, "decode_nodes", many)
        patch.setattr(writing._NodeWriter, "node", encoded)
        yield counted


async def tree(url: str, count: int) -> None:
    """Make a hierarchy: groups of fifty arrays, the first of which have a chunk."""
    async with Repository.create(url) as repository:
        session = await repository.writable_session("main")
        await write(session, "zarr.json", group_document())
        document = array_document((10,), (1,))
        for number in range(count):
            group, place = divmod(number, 50)
            name = f"g{group:03}" if place == 0 else f"g{group:03}/a{place:02}"
            await write(session, f"{name}/zarr.json", document if place else group_document())
            if place == 1:
                await write(session, f"{name}/c/0", b"chunk")
        await session.commit("made")


@pytest.fixture(scope="module")
def trees() -> dict[int, str]:
    """Return the URLs of a small and of a large hierarchy, by their sizes."""
    urls = {count: memory_url() for count in (SMALL, LARGE)}
    for count, url in urls.items():
        asyncio.run(tree(url, count))
    return urls


async def test_reading_a_chunk_decodes_one_node(trees: dict[int, str]) -> None:
    """A lookup looks at a few paths on its way, and decodes none of the other nodes."""
    calls: dict[int, int] = {}
    for count, url in trees.items():
        async with Repository.open(url, config=NO_PRELOAD) as repository:
            with counted_nodes() as counted, counted_calls() as made:
                session = await repository.readonly_session("main")
                assert await read(session, "g001/a01/c/0") == b"chunk"
            assert counted.decoded == ["/g001/a01"]
            assert "index" not in vars(session.workspace.base.nodes.table)
            calls[count] = len(made)
    assert calls[LARGE] < calls[SMALL] + GROWTH  # no other array of the shared manifest is decoded


@pytest.mark.parametrize(
    ("wanted", "decoded"), [("^time", 0), ("^a0[12]$", 2), ("^g[0-9]*$", 0), ("", 49)]
)
async def test_preload_decodes_the_nodes_of_wanted_names(
    trees: dict[int, str], wanted: str, decoded: int
) -> None:
    """Of the arrays that are scanned for a new session most have another name."""
    named = ManifestPreloadCondition.name_matches(wanted)
    config = ManifestPreloadConfig(preload_if=named, max_arrays_to_scan=49)
    async with Repository.open(trees[LARGE], config=NO_PRELOAD) as repository:
        base = (await repository.readonly_session("main")).workspace.base
        with counted_nodes() as counted:
            chosen = choose(base, config, 100)
    assert len(counted.decoded) == decoded
    assert len(chosen) == (decoded > 0)  # that of the first array


async def change(session: Session, what: str, turn: int) -> str:
    """Change one thing, another one in each turn; return the path of the node."""
    match what:
        case "chunk":
            path = "g002/a01"
            await write(session, f"{path}/c/{turn}", b"more")
        case "document":
            path = "g002"
            await write(session, f"{path}/zarr.json", group_document(turn=turn))
        case "node":
            path = f"g002/new-{turn}"
            await write(session, f"{path}/zarr.json", group_document())
        case _:
            path = f"g002/a{turn + 7:02}"
            await session.store.delete(f"{path}/zarr.json")
    return f"/{path}"


@pytest.mark.parametrize("what", ["chunk", "document", "node", "deletion"])
async def test_commit_encodes_what_changed(trees: dict[int, str], what: str) -> None:
    """The first commit of a process looks at the file; the next ones only copy."""
    calls: dict[int, int] = {}
    for count, url in trees.items():
        async with Repository.open(url, config=NO_PRELOAD) as repository:
            for turn in range(2):
                with counted_nodes() as counted, counted_calls() as made:
                    session = await repository.writable_session("main")
                    path = await change(session, what, turn)
                    await session.commit("one")
                assert len(counted.decoded) <= 1
                assert len(counted.encoded) <= turn + 1
                assert (path in counted.encoded) == (what != "deletion")
            calls[count] = len(made)
    assert calls[LARGE] < calls[SMALL] + GROWTH + (SHARED if what == "chunk" else 0)


def test_a_snapshot_is_opened_with_few_calls() -> None:
    """Its root is one table, which columns would take longer to read."""
    nodes = [Node(NodeId(number.to_bytes(8)), f"/a{number:04}", b"{}") for number in range(1000)]
    ids = SnapshotId(bytes(12)), SnapshotId(bytes(range(12)))
    snapshot = Snapshot(*ids, 5, "a message", {"a": 1, "b": "c"}, Nodes(nodes), {})
    for spec_version in (1, 2):
        envelope = Envelope(spec_version, encode_snapshot(snapshot, spec_version))
        with counted_calls() as calls:
            found = decode_snapshot(envelope)
        assert found.message == "a message"
        assert len(found.nodes) == 1000
        assert len(calls) < 200, calls
        assert not any(it.startswith(("Tables.", "Vectors.", "Buffer.")) for it in calls)


async def test_commit_of_a_chunk_in_each_array_takes_few_calls() -> None:
    """For each of them, of twenty chunks; without those that do not depend on their number."""
    calls: dict[int, int] = {}
    for arrays in (20, 60):
        async with Repository.create(memory_url(), config=NO_PRELOAD) as repository:
            for chunks in (range(20), [3], [4]):
                session = await repository.writable_session("main")
                for number in range(arrays):
                    if len(chunks) > 1:
                        document = array_document((20,), (1,))
                        await write(session, f"a{number:02}/zarr.json", document)
                    for chunk in chunks:
                        await write(session, f"a{number:02}/c/{chunk}", bytes(chunks))
                with counted_calls() as made:
                    await session.commit("more")
            calls[arrays] = len(made)
    assert calls[60] - calls[20] < 40 * 375, (calls[60] - calls[20]) / 40
