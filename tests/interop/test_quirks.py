"""We read the odd input that the official engine accepts, and our next commit repairs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from zarr.core.buffer import default_buffer_prototype

from icechunk_async.errors import IcechunkError
from tests.interop.comparing import ENGINES
from tests.interop.edits import apply, array, contents, group, write
from tests.interop.theirs import icechunk

if TYPE_CHECKING:
    from pathlib import Path


SPECS = pytest.mark.parametrize("spec", [1, 2])

ODD_NODES = {
    "b//zarr.json": "b/zarr.json",
    "d/./e/zarr.json": "d/e/zarr.json",
    "/lead/zarr.json": "lead/zarr.json",
}
"""Keys that the official engine stores unchanged, and where we find them."""
ODD_CHUNKS = ("a/c", "a/c/0/0", "a/c/1/7/3")
"""Chunks of another number of axes than the array has."""


@SPECS
async def test_odd_keys_that_were_stored_are_read_and_healed(spec: int, tmp_path: Path) -> None:
    """Unnormalised paths are found in normal form, impossible chunks left out, then both agree."""
    root, prototype = tmp_path / "repo", default_buffer_prototype()
    await ENGINES["theirs"].create(root, spec)
    async with ENGINES["theirs"].open(root) as repo:
        work = await repo.work()
        await apply(work.store, [array("a", [6], [2], "u1", plain=True), group("g")])
        await apply(work.store, [write("a", [0], [6], 1, "u1")])
        regular = await contents(work.store)
        for key in ODD_NODES:
            await work.store.set(key, prototype.buffer.from_bytes(regular["g/zarr.json"]))
        for key in ODD_CHUNKS:
            await work.store.set(key, prototype.buffer.from_bytes(b"??"))
        odd = await work.commit("odd")
    wanted = {**regular, **dict.fromkeys(ODD_NODES.values(), regular["g/zarr.json"])}
    async with ENGINES["ours"].open(root) as repo:
        assert await contents(await repo.reading(odd)) == wanted
        work = await repo.work()
        await apply(work.store, [write("a", [0], [2], 2, "u1"), group("z")])
        healed = await work.commit("healed")
        wanted = await contents(await repo.reading(healed))
    assert {*ODD_NODES.values(), "z/zarr.json", "a/c/2"} <= wanted.keys()
    assert not wanted.keys() & {*ODD_NODES, *ODD_CHUNKS}
    async with ENGINES["theirs"].open(root) as repo:
        assert await contents(await repo.reading(healed)) == wanted
        touched = (await repo.diff(odd, healed)).chunks
    assert touched == {"/a": [(0,)]}


@SPECS
@pytest.mark.parametrize(
    "key", ["a/x", "a/c/-1", "a/c/9", "x/c/0", "a/c/0/", "x.json", "a/.zarray", "g/c/0"]
)
async def test_both_refuse_to_set_what_cannot_be_a_key(spec: int, key: str, tmp_path: Path) -> None:
    """Neither engine stores unknown keys, chunks outside of the grid, or chunks of no array."""
    for engine in ENGINES.values():
        root = tmp_path / engine.name
        await engine.create(root, spec)
        async with engine.open(root) as repo:
            work = await repo.work()
            await apply(work.store, [array("a", [6], [2], "u1", plain=True), group("g")])
            value = default_buffer_prototype().buffer.from_bytes(b"xy")
            with pytest.raises((IcechunkError, icechunk.IcechunkError)):
                await work.store.set(key, value)
            assert sorted(await contents(work.store)) == ["a/zarr.json", "g/zarr.json", "zarr.json"]
