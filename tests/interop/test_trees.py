"""Hierarchies of many nodes, in which each engine changes a few that the other one wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from zarr.core.buffer import default_buffer_prototype

from tests.helpers import array_document, group_document
from tests.interop.comparing import ENGINES, check_garbage, views_agree
from tests.interop.edits import contents

if TYPE_CHECKING:
    from pathlib import Path

    from zarr.abc.store import Store

SPECS = pytest.mark.parametrize("spec", [1, 2])
PROTOTYPE = default_buffer_prototype()
ROUNDS = 3


async def put(store: Store, key: str, data: bytes) -> None:
    """Write a value."""
    await store.set(key, PROTOTYPE.buffer.from_bytes(data))


async def plant(store: Store) -> None:
    """Write groups of arrays of several ranks, of which some have chunks."""
    await put(store, "zarr.json", group_document())
    for group in range(6):
        await put(store, f"g{group}/zarr.json", group_document(number=group))
        for number in range(8):
            rank = number % 3
            names = [f"dim{axis}" if axis else None for axis in range(rank)]
            document = array_document((4,) * rank, (2,) * rank, dimension_names=names)
            await put(store, f"g{group}/a{number}/zarr.json", document)
            if number % 2:
                await put(store, f"g{group}/a{number}/c{'/1' * rank}", bytes([number]) * 2**rank)


async def change(store: Store, turn: int) -> None:
    """Give a node another document, delete, create and move on; nodes next to others, and apart."""
    await put(store, f"g{turn}/zarr.json", group_document(turn=turn))
    await put(store, f"g{turn}/a4/c/0", bytes([turn, 9]))
    await put(store, f"g{turn}/a5/c/0/{turn % 2}", bytes([turn] * 4))
    await put(store, f"g{turn}/a4/zarr.json", array_document((6,), (2,)))
    await store.delete(f"g{turn}/a7/zarr.json")
    await put(store, f"g{turn}/a7-new/zarr.json", array_document((4,), (2,)))
    await put(store, f"g{turn}/a7-new/c/1", b"nn")
    await store.delete_dir(f"g{turn + 3}")


@SPECS
@pytest.mark.parametrize("first", ["ours", "theirs"])
async def test_engines_change_trees_of_each_other(tmp_path: Path, first: str, spec: int) -> None:
    """Most nodes are copied, from files that each engine lays out in its way."""
    turns = [first, *(name for name in ENGINES if name != first)]
    await ENGINES[first].create(tmp_path, spec)
    async with ENGINES[first].open(tmp_path) as repo:
        work = await repo.work()
        await plant(work.store)
        await work.commit("planted")
    expected: dict[str, dict[str, bytes]] = {}
    for turn in range(ROUNDS):
        async with ENGINES[turns[(turn + 1) % 2]].open(tmp_path) as repo:
            work = await repo.work()
            await change(work.store, turn)
            wanted = await contents(work.store)
            expected[await work.commit(f"turn {turn}")] = wanted
    assert len(expected) == ROUNDS
    await views_agree(tmp_path, spec, expected=expected, everything=True)
    check_garbage(tmp_path)


@SPECS
async def test_engines_read_many_commits_of_one_process(tmp_path: Path, spec: int) -> None:
    """Their changes lie on top of one file, until they are many."""
    await ENGINES["ours"].create(tmp_path, spec)
    async with ENGINES["ours"].open(tmp_path) as repo:
        work = await repo.work()
        await plant(work.store)
        await work.commit("planted")
        expected: dict[str, dict[str, bytes]] = {}
        for number in range(24):
            work = await repo.work()
            document = array_document((number + 9,), (2,))
            await put(work.store, f"g{number % 6}/a{number % 8 | 1}/zarr.json", document)
            await put(work.store, f"g{number % 6}/b{number}/zarr.json", group_document())
            wanted = await contents(work.store) if number % 11 == 1 else None
            snapshot = await work.commit(f"commit {number}")
            if wanted is not None:
                expected[snapshot] = wanted
    async with ENGINES["theirs"].open(tmp_path) as repo:
        for snapshot, wanted in expected.items():
            assert await contents(await repo.reading(snapshot)) == wanted
    await views_agree(tmp_path, spec)
