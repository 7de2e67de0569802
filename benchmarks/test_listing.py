"""List nodes through the store.

Ours is the native asynchronous store; both engines list the same repository on the local disk. The
snapshot is cached.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from zarr.core.buffer import default_buffer_prototype

from benchmarks.contest import FLOOR
from benchmarks.peers import create, native_store, tip_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from typing import Any

    from zarr.abc.store import Store

    from benchmarks.contest import Contest

PROTOTYPE = default_buffer_prototype()
GROUP = b'{"zarr_format":3,"node_type":"group","attributes":{}}'
ARRAY = (
    b'{"zarr_format":3,"node_type":"array","shape":[1000,1000],"data_type":"float64",'
    b'"chunk_grid":{"name":"regular","configuration":{"chunk_shape":[100,100]}},'
    b'"chunk_key_encoding":{"name":"default","configuration":{"separator":"/"}},'
    b'"codecs":[{"name":"bytes","configuration":{"endian":"little"}}],"fill_value":0,'
    b'"attributes":{"units":"K"}}'
)


async def _fill(store: Store, groups: int, arrays: int) -> None:
    await store.set("zarr.json", PROTOTYPE.buffer.from_bytes(GROUP))
    for group in range(groups):
        await store.set(f"g{group}/zarr.json", PROTOTYPE.buffer.from_bytes(GROUP))
        for array in range(arrays):
            key = f"g{group}/a{array}/zarr.json"
            await store.set(key, PROTOTYPE.buffer.from_bytes(ARRAY))


def _prepare(runner: asyncio.Runner, directory: str, groups: int, arrays: int) -> None:
    session = create("official", directory).writable_session("main")
    runner.run(_fill(session.store, groups, arrays))
    session.commit("nodes")


async def _list_all(store: Store, expected: int) -> None:
    assert len([key async for key in store.list_prefix("")]) == expected


async def _open_each(store: Store, expected: int) -> None:
    names = [name async for name in store.list_dir("g0")]
    found = 0
    for name in names:
        if name != "zarr.json":
            assert await store.get(f"g0/{name}/zarr.json", PROTOTYPE) is not None
            found += 1
    assert found == expected


async def _count_up(expected: int) -> None:
    """Take the expected number of texts from an asynchronous generator."""

    async def texts() -> AsyncIterator[str]:
        for number in range(expected):
            yield f"g0/a{number}/zarr.json"

    assert len([text async for text in texts()]) == expected


@pytest.mark.parametrize(
    ("title", "groups", "arrays", "work", "target"),
    [
        ("list_prefix over 10,000 nodes", 100, 99, _list_all, 30),
        ("open 1,000 arrays of a group by list_dir and get", 1, 1000, _open_each, 15),
    ],
    ids=["list-prefix", "list-dir"],
)
def test_list(
    contest: Contest,
    directory: str,
    title: str,
    groups: int,
    arrays: int,
    work: Callable[[Store, int], Coroutine[Any, Any, None]],
    target: float,
) -> None:
    """Nodes of one repository."""
    if contest.is_quick:
        groups, arrays = min(groups, 3), min(arrays, 10)
    expected = arrays if work is _open_each else 1 + groups * (1 + arrays)
    with asyncio.Runner() as runner:
        _prepare(runner, directory, groups, arrays)
        with native_store(runner, directory) as store:
            stores = {"ours": store, "official": tip_store("official", directory)}
            contest.race(
                f"store: {title}",
                {
                    **{
                        name: lambda store=store: runner.run(work(store, expected))
                        for name, store in stores.items()
                    },
                    FLOOR: lambda: runner.run(_count_up(expected)),
                },
                rounds=5,
                floor="an asynchronous generator of as many texts",
                targets={"official": target},
            )
