"""Repositories that tests of the two old layouts begin with, and ways to look at them."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import zarr

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.config import S3Store, VirtualChunkContainer
from icechunk_async.storage import Capabilities, open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import make_array, memory_url, read, write
from tests.unit.older.golden import VIRTUAL_URL

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Mapping

    from icechunk_async import Session
    from icechunk_async.storage import Storage

__all__ = [
    "CONFIG",
    "OnlyCreates",
    "array_at",
    "commit",
    "contents",
    "created",
    "damage",
    "holding",
    "opened_golden",
    "read_all",
]

CONFIG: Final = RepositoryConfig(
    virtual_chunk_containers=(VirtualChunkContainer(f"{VIRTUAL_URL}/", S3Store()),)
)
"""Of a reader of the golden repositories."""
_WRONG: Final[tuple[Any, ...]] = (
    None, True, -1, 0, 2**32, 2**63, 2**64, 2**70, 0.5, 1e308, float("nan"), "", "x", "/", "../x",
    [], {}, [[]], [0] * 16, [256] * 16, [-1], ["x"], {"x": 1}, {"Inline": {}}, "Group", "branch",
    "2024-01-01", 10**4000,
)  # fmt: skip


class OnlyCreates(WrappedStorage):
    """A storage that creates objects if absent, and updates none on condition."""

    @property
    def capabilities(self) -> Capabilities:
        """Say so."""
        return Capabilities(
            conditional_update=False, reasons={"conditional_update": "it cannot"}, verified=True
        )


@asynccontextmanager
async def created(layout: Any, location: Any = None, **options: Any) -> AsyncIterator[Repository]:
    """Create a repository with an array ``a`` of 10 chunks, of which 0 and 1 are written."""
    async with Repository.create(location or memory_url(), layout=layout, **options) as it:
        session = await it.writable_session("main")
        await write(session, "zarr.json", b'{"zarr_format": 3, "node_type": "group"}')
        await make_array(session, "a", (10,), (1,))
        await write(session, "a/c/0", b"\x00")
        await write(session, "a/c/1", b"\x01")
        await session.commit("filled")
        yield it


async def commit(repository: Repository, chunk: int, branch: str = "main") -> Any:
    """Commit one chunk of the array ``a``."""
    session = await repository.writable_session(branch)
    await write(session, f"a/c/{chunk}", bytes([chunk]))
    return await session.commit(f"chunk {chunk}")


@asynccontextmanager
async def holding(found: Mapping[str, bytes]) -> AsyncIterator[Storage]:
    """Hold objects in memory."""
    async with open_storage(memory_url()) as storage:
        await asyncio.gather(*(storage.put(key, data) for key, data in found.items()))
        yield storage


@asynccontextmanager
async def opened_golden(found: Mapping[str, bytes], source: bytes) -> AsyncIterator[Repository]:
    """Open a golden repository, whose virtual chunks are in an object."""
    async with holding(found) as storage, holding({"data": source}) as place:
        access = {f"{VIRTUAL_URL}/": place}
        async with Repository.open(
            storage, config=CONFIG, authorize_virtual_chunk_access=access
        ) as repository:
            yield repository


async def array_at(session: Session, path: str) -> Any:
    """Open an array by Zarr."""
    root = await zarr.api.asynchronous.open_group(session.store, mode="r")
    return await root.getitem(path)


async def read_all(storage: Storage) -> None:
    """Read a chunk of a golden repository, and all files that lead to it."""
    async with Repository.open(storage) as repository:
        session = await repository.readonly_session("main")
        await read(session, "a/packed/c/0/0")


async def contents(repository: Repository) -> dict[str, Any]:
    """Return all that a golden repository says, with ids as they are in version 2."""
    history = [info async for info in repository.ancestry(branch="main")]
    said: dict[str, Any] = {
        "history": [
            (it.id[:12], it.parent_id and it.parent_id[:12], it.written_at, it.message, it.metadata)
            for it in history
        ],
        "branches": {name: it[:12] for name, it in (await repository.branches()).items()},
        "tags": {name: it[:12] for name, it in (await repository.tags()).items()},
    }
    for info in (*history[:3], *history[15:20], history[-1]):
        session = await repository.readonly_session(snapshot_id=info.id)
        nodes = session.workspace.base.nodes
        for path, node in nodes.items():
            about = [node.id, json.loads(node.user_data)]
            if node.array is not None:
                refs = await session.workspace.all_refs(path)
                about += [refs.coords.tolist(), node.array.dimension_names]
                about += [await _chunk(session, path, coords) for coords in refs.coords.tolist()]
            said[f"{info.message} {path}"] = about
    return said


async def _chunk(session: Session, path: str, coords: list[int]) -> Any:
    if path == "/virtual":
        return repr(await session.workspace.find_chunk(path, tuple(coords)))
    return await read(session, "/".join([path.strip("/"), "c", *map(str, coords)]))


def damage(rng: random.Random, document: Any) -> Any:
    """Return a document with one value replaced, removed or repeated."""
    places: list[tuple[Any, Any]] = []
    level = [document]
    while level:
        it = level.pop()
        keys = it.keys() if isinstance(it, dict) else range(len(it))
        places += [(it, key) for key in keys]
        level += [it[key] for key in keys if isinstance(it[key], dict | list)]
    container, key = rng.choice(places)
    match rng.randrange(4):
        case 0 if isinstance(container, dict):
            del container[key]
        case 1 if isinstance(container, list):
            container.insert(key, container[key])
        case 2 if isinstance(container, dict):
            container[rng.choice(["x", "Ref", "/b", "4/0/0"])] = container[key]
        case _:
            container[key] = rng.choice(_WRONG)
    return document
