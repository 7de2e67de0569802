"""The cost of a lookup in a manifest that arrays share follows the array, not its neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository
from icechunk_async.errors import FormatError
from icechunk_async.format.manifest import reading
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import make_array, memory_url, read, write

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from icechunk_async.zarr import IcechunkStore

ARRAYS = 20
CHUNKS = (0, 1, 2, 9)
MISSING = (3, 5, 8)
ALL = "all"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of decodings from now on: of one array its references, or `ALL`."""
    found: list[Any] = []
    one, every = reading.decode_array, reading.decode_manifest

    def decode_array(*args: Any) -> Any:
        refs = one(*args)
        found.append(sum(map(len, refs)))
        return refs

    def decode_manifest(*args: Any, **options: Any) -> Any:
        found.append(ALL)
        return every(*args, **options)

    monkeypatch.setattr(reading, "decode_array", decode_array)
    monkeypatch.setattr(reading, "decode_manifest", decode_manifest)
    return found


@pytest.fixture
async def storage() -> AsyncGenerator[LatencyStorage]:
    """Return a storage with a repository whose arrays share one manifest."""
    async with open_storage(memory_url()) as plain:
        async with Repository.create(plain) as repository:
            session = await repository.writable_session("main")
            for number in range(ARRAYS):
                await make_array(session, f"a{number}", (10,), (1,))
                for chunk in CHUNKS:
                    await write(session, f"a{number}/c/{chunk}", bytes([number, chunk]))
            await session.commit("filled")
        yield LatencyStorage(plain, seconds=0)


def _weight(store: IcechunkStore) -> int:
    return store.workspace.assets.manifests._cache._weight


@pytest.mark.parametrize("blocking", [False, True])
async def test_reading_an_array_decodes_that_array(
    storage: LatencyStorage,
    decoded: list[Any],
    blocking: bool,  # noqa: FBT001
) -> None:
    """The first chunk none, all others together one, which the cache counts; one request."""
    opened = storage.wrapped if blocking else storage
    async with Repository.open(opened) as repository:
        session = await repository.readonly_session("main")
        storage.forget()

        async def chunk(number: int) -> bytes | None:
            if not blocking:
                return await read(session, f"a3/c/{number}")
            value = session.store.get_sync(f"a3/c/{number}")
            return None if value is None else value.to_bytes()

        assert await chunk(0) == bytes([3, 0])
        assert decoded == []
        before = _weight(session.store)
        for number in CHUNKS:
            assert await chunk(number) == bytes([3, number])
        assert await chunk(5) is None
        assert decoded == [len(CHUNKS)]
        assert _weight(session.store) == before > ARRAYS * len(CHUNKS)  # counted beforehand
        assert blocking or storage.requests["get"] == 1


async def test_a_chunk_that_does_not_exist_decodes_its_array(
    storage: LatencyStorage, decoded: list[Any]
) -> None:
    """Only their order tells that it is not there."""
    async with Repository.open(storage) as repository:
        session = await repository.readonly_session("main")
        for number in MISSING:
            assert await read(session, f"a4/c/{number}") is None
        assert decoded == [len(CHUNKS)]


async def test_reading_many_arrays_decodes_all_once(
    storage: LatencyStorage, decoded: list[Any]
) -> None:
    """A chunk of each, and more of each later."""
    async with Repository.open(storage) as repository:
        session = await repository.readonly_session("main")
        for chunk in (1, 0, 2):
            for number in range(ARRAYS):
                assert await read(session, f"a{number}/c/{chunk}") == bytes([number, chunk])
        assert decoded == [ALL]
        held = session.workspace.assets.manifests._cache._entries
        assert [it.columns is None for it, _ in held.values()] == [False]


@pytest.mark.parametrize("arrays", [1, 3])
async def test_what_was_decoded_for_readers_is_not_decoded_for_a_commit(
    decoded: list[Any], arrays: int
) -> None:
    """An array is often read before it is changed; here all arrays of a manifest are."""
    async with open_storage(memory_url()) as storage:
        async with Repository.create(storage) as repository:
            session = await repository.writable_session("main")
            for number in range(arrays):
                await make_array(session, f"a{number}", (10,), (1,))
                for chunk in CHUNKS:
                    await write(session, f"a{number}/c/{chunk}", bytes([number, chunk]))
            await session.commit("filled")
        async with Repository.open(storage) as repository:
            session = await repository.writable_session("main")
            for number in range(arrays):
                for chunk in CHUNKS:
                    assert await read(session, f"a{number}/c/{chunk}") == bytes([number, chunk])
                await write(session, f"a{number}/c/5", b"new")
            assert decoded == [len(CHUNKS)] * arrays
            await session.commit("changed")
            assert decoded == [len(CHUNKS)] * arrays
            session = await repository.readonly_session("main")
            for number in range(arrays):
                assert await read(session, f"a{number}/c/5") == b"new"
                assert await read(session, f"a{number}/c/9") == bytes([number, 9])


async def test_damage_in_another_array_does_not_matter(
    storage: LatencyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers check the references that they use, and no others."""
    one = reading.decode_array

    def damaged(vector: Any, dictionary: bytes | None) -> Any:
        refs = one(vector, dictionary)
        if refs[0].ref(0).data[0] == 3:  # type: ignore[union-attr]
            raise FormatError("damaged")
        return refs

    def all_damaged(*_: object, **__: object) -> Any:
        raise FormatError("damaged")

    monkeypatch.setattr(reading, "decode_array", damaged)
    monkeypatch.setattr(reading, "decode_manifest", all_damaged)
    async with Repository.open(storage) as repository:
        session = await repository.readonly_session("main")
        for number in (2, 4):
            for chunk in CHUNKS:
                assert await read(session, f"a{number}/c/{chunk}") == bytes([number, chunk])
        with pytest.raises(FormatError, match="damaged"):
            await read(session, "a3/c/5")
        with pytest.raises(FormatError, match="damaged"):
            await session.workspace.all_refs("/a2")
