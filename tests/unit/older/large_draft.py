"""A first draft with a large manifest, for programs that know nothing of Icechunk."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async import Repository
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.refs import ChunkRefs
from tests.helpers import make_array, write

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "END",
    "FIRST",
    "SIDE",
    "check_nodes",
    "manifests",
    "structure_file",
    "write_large_draft",
]

SIDE: Final = 300
"""Chunks along each axis of the array ``big``."""
FIRST, END = (238, 0), (243, 0)
"""Rows of chunks whose coordinates take one byte, and two."""


async def write_large_draft(folder: Path) -> None:
    """Write a draft with an array of 90,000 references, and another that has a chunk inline."""
    async with Repository.create(folder, layout="first-draft") as repository:
        session = await repository.writable_session("main")
        await write(session, "zarr.json", b'{"zarr_format": 3, "node_type": "group"}')
        await make_array(session, "big", (SIDE, SIDE), (1, 1))
        await make_array(session, "small", (10,), (1,))
        await write(session, "small/c/7", b"\x07")
        coords = np.indices((SIDE, SIDE)).reshape(2, -1).T.astype(np.uint32)
        refs = ChunkRefs.build(
            coords,
            Kind.NATIVE,
            objects=np.arange(SIDE * SIDE, dtype=np.uint32),
            offsets=np.arange(SIDE * SIDE, dtype=np.uint64),
            lengths=np.ones(SIDE * SIDE, np.uint64),
            chunk_ids=np.random.default_rng(1).integers(0, 256, (SIDE * SIDE, 12), np.uint8),
        )
        session.workspace.set_refs("/big", refs)
        await session.commit("filled")


def structure_file(folder: Path) -> Path:
    """Return the structure file of ``main``."""
    state = json.loads((folder / "state.json").read_bytes())
    tip = state["refs"]["main"]["snapshot-id"]
    (name,) = [it["structure-file"] for it in state["snapshots"] if it["snapshot-id"] == tip]
    return folder / "s" / str(name)


def manifests(folder: Path, node: dict[str, Any]) -> list[str]:
    """Return the files that a row of the structure file names for an array."""
    return [str(folder / "i" / it["inventory_file"]) for it in node["inventories"]]


def check_nodes(nodes: Mapping[str, dict[str, Any]]) -> None:
    """Assert that another program found the rows of the structure file, by path."""
    assert {path: row["type"] for path, row in nodes.items()} == {
        "/": "group",
        "/big": "array",
        "/small": "array",
    }
    metadata = nodes["/big"]["array_metadata"]
    assert metadata["shape"] == [SIDE, SIDE]
    assert metadata["chunk_grid"]["configuration"]["chunk_shape"] == [1, 1]
    assert [it["extent"] for it in nodes["/small"]["inventories"]] == [[[7, 8]]]
