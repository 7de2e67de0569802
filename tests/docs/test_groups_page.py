"""The class for commits in groups, which users copy from the page, loses and invents no write."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository
from icechunk_async.conflicts import ConflictDetector
from tests.docs.run_page import blocks
from tests.helpers import make_array, memory_url, read, write

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from icechunk_async import ForkSession

    type Change = Callable[[ForkSession], Coroutine[Any, Any, None]]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "several-writers.md"


def group_class() -> Any:
    """Return the class as the page shows it."""
    for _, _, code in blocks(PAGE):
        for node in ast.parse(code).body if "class Group" in code else ():
            if isinstance(node, ast.ClassDef) and node.name == "Group":
                found: dict[str, Any] = {"asyncio": asyncio, "ConflictDetector": ConflictDetector}
                exec(compile(ast.Module([node], []), str(PAGE), "exec"), found)  # noqa: S102
                return found["Group"]
    raise AssertionError("the page shows no class 'Group'")


def put(key: str) -> Change:
    """Return a change that writes one chunk."""

    async def change(fork: ForkSession) -> None:
        await write(fork, f"a/c/{key}", key.encode())

    return change


async def stored(repository: Repository, count: int) -> list[bool]:
    """Return which of the chunks are there at the tip."""
    session = await repository.readonly_session("main")
    return [await read(session, f"a/c/{it}") == str(it).encode() for it in range(count)]


async def test_a_writer_that_is_cancelled_keeps_no_other_from_landing() -> None:
    """Not those of its group, which it began to commit, and not the next group."""
    async with Repository.create(memory_url()) as repository:
        async with repository.transaction("main", message="made") as store:
            await make_array(store.session, "a", (4,), (1,))
        group = group_class()(repository)
        began = asyncio.Event()

        async def slow(fork: ForkSession) -> None:
            began.set()
            await put("0")(fork)

        first, second = (asyncio.create_task(group.write(it)) for it in (slow, put("1")))
        await began.wait()
        third = asyncio.create_task(group.write(put("2")))
        first.cancel()
        await second
        await third
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await stored(repository, 4) == [True, True, True, False]


async def test_a_change_that_ends_in_an_error_is_not_published() -> None:
    """Nor is one that is cancelled: the writer is told, and the others land."""
    async with Repository.create(memory_url()) as repository:
        async with repository.transaction("main", message="made") as store:
            await make_array(store.session, "a", (3,), (1,))
        group = group_class()(repository)

        async def given_up(fork: ForkSession) -> None:
            await put("0")(fork)
            raise asyncio.CancelledError

        async def broken(fork: ForkSession) -> None:
            await put("1")(fork)
            raise ValueError("broken")

        writes = (group.write(it) for it in (given_up, broken, put("2")))
        given, error, landed = await asyncio.gather(*writes, return_exceptions=True)
        assert isinstance(given, asyncio.CancelledError)
        assert isinstance(error, ValueError)
        assert landed == await repository.lookup_branch("main")
        assert await stored(repository, 3) == [False, False, True]
