"""Documents below ``leases/``, and forks of leased sessions, with any values in them."""

from __future__ import annotations

import pickle
import random
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
import zstandard

from icechunk_async import ForkSession
from icechunk_async.errors import IcechunkError
from icechunk_async.format.layout import lease_key, spill_prefix
from tests.helpers import make_array, objects, write
from tests.unit.engine.leases.lease_tools import World, filled, process
from tests.unit.test_fork_fuzz import check_committed, look, mutate, remade

if TYPE_CHECKING:
    from icechunk_async import Repository
    from icechunk_async.session import Session
    from icechunk_async.storage import Storage

HEAD_BYTES = 9
ROUNDS = 15
SEEDS = pytest.mark.parametrize(
    "seed", [0, *(pytest.param(it, marks=pytest.mark.thorough) for it in range(1, 50))]
)


def changed(data: bytes, chance: random.Random) -> bytes:
    """Return a document below ``leases/``, or the fork in it, with other values."""
    payload = zstandard.ZstdDecompressor().decompress(data[HEAD_BYTES:])
    document: dict[str, Any] = msgpack.unpackb(payload)
    if "changes" in document and chance.random() < 0.6:
        document["changes"] = remade(document["changes"], chance)
    else:
        mutate(document, chance)
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(msgpack.packb(document))
    return data[:HEAD_BYTES] + frame


async def _begun(repository: Repository, storage: Storage) -> tuple[Session, bytes, list[str]]:
    """Begin a session, spill, and publish; return it, a fork of it, and what is stored."""
    session = await repository.writable_session("main", lease=True)
    await make_array(session, "old", (3,), (1,))
    await write(session, "old/c/2", b"\x01")
    parcel = pickle.dumps(await session.fork())
    await write(session, "a/c/9", b"\x02" * 700)
    await session.spill()
    fork = await session.fork()
    await write(fork, "a/c/7", b"\x03" * 700)
    await fork.publish()
    keys = [it for it in await objects(storage) if it.startswith(spill_prefix(session.session_id))]
    return session, parcel, [*keys, lease_key(session.session_id)]


async def _use(parcel: bytes, storage: Storage) -> None:
    async with pickle.loads(parcel).attached(storage) as fork:
        await fork.refresh()
        await look(fork)
        await fork.publish()


@SEEDS
async def test_changed_documents_of_leases_are_refused_or_sound(seed: int) -> None:
    """By the session, a fork elsewhere, and one who resumes it. What they commit is a snapshot."""
    chance, world, refused = random.Random(seed), World(), 0
    async with filled(world, 1 + seed % 2) as storage, process(storage) as (repository, _):
        for number in range(ROUNDS):
            tip = await repository.lookup_branch("main")
            session, parcel, keys = await _begun(repository, storage)
            key = chance.choice(keys)
            if number > 0:
                await storage.put(key, changed(bytes((await storage.get(key)).data), chance))
            try:
                await _use(parcel, storage)
            except IcechunkError:
                refused += 1
            try:
                if chance.random() < 0.5:
                    session = await repository.resume_session(session.session_id)
                await session.refresh()
                await session.commit("changed", allow_missing_forks=True)
            except IcechunkError:
                refused += 1
                continue
            await check_committed(repository)
            await repository.reset_branch("main", tip)
        assert 0 < refused <= 2 * (ROUNDS - 1)  # that of which nothing was changed commits


@SEEDS
async def test_changed_forks_of_leased_sessions_are_refused_or_sound(seed: int) -> None:
    """With what they know of others, and what they are yet to publish."""
    chance, world, refused = random.Random(seed), World(), 0
    async with filled(world, 1 + seed % 2) as storage, process(storage) as (repository, _):
        for number in range(ROUNDS):
            tip = await repository.lookup_branch("main")
            session, _, _ = await _begun(repository, storage)
            fork = await session.fork()
            await fork.refresh()
            await write(fork, "a/c/8", b"\x04" * 700)
            if chance.random() < 0.7:
                await fork.publish()
            await write(fork, "a/c/9", b"\x05" * 700)
            await make_array(fork, "new", (3,), (1,))
            data = fork.to_bytes()
            try:
                back = ForkSession.from_bytes(remade(data, chance) if number > 0 else data)
                async with back.attached(storage):
                    await look(back)
                    if chance.random() < 0.7:
                        await back.publish()
                    await back.refresh()
                await session.merge(back)
                await session.commit("changed", allow_missing_forks=True)
            except IcechunkError:
                refused += 1
                continue
            await check_committed(repository)
            await repository.reset_branch("main", tip)
        assert 0 < refused < ROUNDS
