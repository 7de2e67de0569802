"""Opening a repository at any moment of its migration, and handles that were open before."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import product
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.errors import ConflictError, IcechunkError
from icechunk_async.format.layout import CONFIG, REPO_INFO, branch_key
from icechunk_async.storage import open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from icechunk_async.upkeep import upgrade
from tests.helpers import memory_url, objects

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from icechunk_async.storage import RangeRequest, Retrieved, Storage

MARKERS = (REPO_INFO, branch_key("main"))


class _Recorder(WrappedStorage):
    """Keeps the contents of a storage after each change."""

    def __init__(self, wrapped: Storage) -> None:
        super().__init__(wrapped)
        self.states: list[dict[str, bytes]] = []

    async def after(self, operation: str, key: str) -> None:
        if operation in ("put", "delete"):
            self.states.append(await objects(self.wrapped))


class _AtMoments(WrappedStorage):
    """Shows each marker at the moments given, and all else at the end."""

    def __init__(self, moments: Sequence[Storage], seen: dict[str, list[int]]) -> None:
        super().__init__(moments[-1])
        self._moments = moments
        self._seen = seen

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        left = self._seen.get(key if key != CONFIG else MARKERS[1])
        if not left:
            return await self.wrapped.get(key, byte_range)
        moment = left[0] if key == CONFIG else left.pop(0)
        return await self._moments[moment].get(key, byte_range)


async def _states() -> list[dict[str, bytes]]:
    url = memory_url()
    async with Repository.create(url, spec_version=1) as repository:
        await repository.create_branch("side", await repository.lookup_branch("main"))
        await repository.create_tag("v1", await repository.lookup_branch("main"))
    async with open_storage(url) as plain:
        recorder = _Recorder(plain)
        recorder.states.append(await objects(plain))
        await upgrade(recorder)
        return recorder.states


def _looks(moments: int) -> Iterator[tuple[dict[str, list[int]], bool]]:
    """Yield what two looks for both markers see, and whether the first sees only version 1.

    The requests of one look run at the same time; those of the second begin after the first.
    """
    for info, main in product(range(moments), repeat=2):
        for later in range(max(info, main), moments):
            yield {MARKERS[0]: [info, later], MARKERS[1]: [main, later]}, info == 0 and main < 2


async def _open(storage: Storage) -> int:
    async with Repository.open(storage) as repository:
        return repository.spec_version


async def _open_or_create(storage: Storage) -> int:
    async with Repository.open_or_create(storage) as repository:
        return repository.spec_version


async def _open_or_create_beside(storage: Storage) -> int:
    open_or_create = Repository.open_or_create(storage, spec_version=1, check_clean_root=False)
    async with open_or_create as repository:
        return repository.spec_version


async def _exists(storage: Storage) -> int:
    return 2 if await Repository.exists(storage) else 0


@pytest.mark.parametrize("attempt", [_open, _open_or_create, _open_or_create_beside, _exists])
def test_repository_is_found_at_every_moment_of_its_migration(
    attempt: Callable[[Storage], Awaitable[int]],
) -> None:
    """For all that two looks at both markers may see. Nothing else is created or missing."""

    async def scenario() -> None:
        states = await _states()
        async with AsyncExitStack() as stack:
            moments: list[Storage] = []
            for state in states:
                moments.append(await stack.enter_async_context(open_storage(memory_url())))
                for key, data in state.items():
                    await moments[-1].put(key, data)
            wrong: list[str] = []
            for seen, only_one in _looks(len(states)):
                shown = str(seen)
                try:
                    found = await attempt(_AtMoments(moments, seen))
                except IcechunkError as error:
                    wrong.append(f"{shown}: {error}")
                else:
                    if found != 2 and not (found == 1 and only_one):
                        wrong.append(f"{shown}: {found}")
            assert wrong == []
            assert await objects(moments[-1]) == states[-1]

    asyncio.run(scenario())


async def test_handle_opened_before_a_migration_says_so() -> None:
    """It neither shows a repository without branches and tags, nor creates any that are lost."""
    url = memory_url()
    async with Repository.create(url, spec_version=1) as old, open_storage(url) as storage:
        tip = await old.lookup_branch("main")
        await old.create_tag("v1", tip)
        session = await old.writable_session("main")
        await upgrade(storage)
        before = await objects(storage)
        attempts: list[Callable[[], Awaitable[object]]] = [
            old.list_branches,
            old.list_tags,
            lambda: old.lookup_branch("main"),
            lambda: old.lookup_tag("v1"),
            lambda: old.create_branch("other", tip),
            lambda: old.create_tag("v2", tip),
            lambda: old.reset_branch("main", tip),
            lambda: old.writable_session("main"),
            lambda: session.commit("late", allow_empty=True),
        ]
        for attempt in attempts:
            with pytest.raises(ConflictError, match="migrated to format version 2"):
                await attempt()
        lost = {key for key in (await objects(storage)).keys() - before.keys() if "refs/" in key}
        assert lost == set()
        async with Repository.open(storage) as new:
            assert await new.list_branches() == {"main"}
            assert await new.list_tags() == {"v1"}
