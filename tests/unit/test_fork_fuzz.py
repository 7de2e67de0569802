"""Forks that come back changed: refused with an error in words, or merged into sound changes."""

from __future__ import annotations

import pickle
import random
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
import zstandard

from icechunk_async import ForkSession, Repository
from icechunk_async.errors import IcechunkError
from tests.helpers import array_document, group_document, make_array, read, write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from icechunk_async.session import Session

HEAD_BYTES = 8
FORKS = 120
LEAVES = (None, True, 0, 1, -1, 2**31, 2**32, 2**63, 2**64 - 1, b"", b"x", b"\0" * 8, "", "/", "/a")


async def prepared(session: Session) -> bytes:
    """Write in a fork whatever a fork can change; return its bytes."""
    fork = await session.fork()
    await write(fork, "zarr.json", group_document(changed=True))
    await write(fork, "a/zarr.json", array_document((6,), (1,), dimension_names=["x"]))
    await write(fork, "a/c/0", b"\x07" * 700)
    await write(fork, "a/c/3", b"\x08")
    await make_array(fork, "g/new", (4, 4), (2, 2))
    await write(fork, "g/new/c/1/1", b"\x01\x02\x03\x04")
    await write(fork, "g/new/c/0/1", b"\x05" * 700)
    await fork.store.delete("a/c/1")
    await fork.store.delete("old/zarr.json")
    await make_array(fork, "scalar", (), ())
    await write(fork, "scalar/c", b"\x09")
    return fork.to_bytes()


def places(value: object) -> Iterator[tuple[Any, Any]]:
    """Iterate over every container of a document with each of its keys."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield value, key
            yield from places(item)


def mutate(document: dict[str, Any], rng: random.Random) -> None:
    """Change one to three values of a document: their type, value, order or number."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        container, key = rng.choice(list(places(document)))
        value = container[key]
        match rng.randrange(7):
            case 0 if isinstance(container, list):
                del container[key]
            case 1 if isinstance(container, list):
                container.insert(key, value)
            case 2 if isinstance(container, list):
                rng.shuffle(container)
            case 3 if isinstance(value, int) and not isinstance(value, bool):
                container[key] = value + rng.choice((-1, 1, 7))
            case 4 if isinstance(value, bytes) and value:
                changed = bytearray(value)
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
                container[key] = bytes(changed)
            case 5:
                other, name = rng.choice(list(places(document)))
                container[key] = msgpack.unpackb(msgpack.packb(other[name]))
            case _:
                container[key] = rng.choice(LEAVES)


def remade(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes of a fork with a changed document and a checksum that is right."""
    payload = zstandard.ZstdDecompressor().decompress(data[HEAD_BYTES:])
    document: dict[str, Any] = msgpack.unpackb(payload)
    mutate(document, rng)
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(msgpack.packb(document))
    return data[:HEAD_BYTES] + frame


@pytest.fixture
async def wide(filled: Repository) -> Repository:
    """Put more into a repository, so that there is something to change."""
    session = await filled.writable_session("main")
    await make_array(session, "old", (3,), (1,))
    await write(session, "old/c/2", b"\x01")
    await write(session, "g/zarr.json", group_document())
    await session.commit("more")
    return filled


async def check_committed(repository: Repository) -> None:
    """The tip that was merged and committed is a sound snapshot, and its documents are readable."""
    report = await repository.verify(level="structure")
    assert report.findings == ()
    reader = await repository.readonly_session("main")
    async for key in reader.store.list():
        if key.endswith("zarr.json"):
            assert await read(reader, key)


async def look(fork: ForkSession) -> None:
    """Read all that a fork shows, and write to it."""
    async for key in fork.store.list():
        await read(fork, key)
    await write(fork, "a/c/5", b"\x06")
    fork.to_bytes()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(it, marks=pytest.mark.thorough) for it in range(1, 50))]
)
async def test_changed_forks_are_refused_or_sound(wide: Repository, seed: int) -> None:
    """No value of a fork makes merging crash, or a commit that is no snapshot."""
    rng = random.Random(seed)
    outcomes = {"refused": 0, "merged": 0}
    for _ in range(FORKS):
        session = await wide.writable_session("main")
        data = remade(await prepared(session), rng)
        try:
            back = ForkSession.from_bytes(data)
            async with back.attached(wide.storage):
                await look(back)
            await session.merge(back)
            tip = await wide.lookup_branch("main")
            await session.commit("merged", allow_missing_forks=True)
        except IcechunkError:
            outcomes["refused"] += 1
            continue
        outcomes["merged"] += 1
        await check_committed(wide)
        await wide.reset_branch("main", tip)
    assert min(outcomes.values()) > 0


async def test_changed_pickles_are_refused_or_sound(wide: Repository) -> None:
    """No change of the bytes that travel in the pickle makes another fork of it."""
    rng = random.Random(7)
    session = await wide.writable_session("main")
    data = await prepared(session)
    pickled = pickle.dumps(ForkSession.from_bytes(data))
    assert pickled.count(data) == 1
    start, refused = pickled.index(data), 0
    for _ in range(300):
        changed = bytearray(pickled)
        for place in rng.sample(range(start, start + len(data)), rng.choice((1, 1, 2, 5))):
            changed[place] ^= 1 << rng.randrange(8)
        try:
            back: ForkSession = pickle.loads(bytes(changed))
        except IcechunkError:
            refused += 1
        else:  # a bit that nothing depends on, such as a window larger than needed
            assert back.to_bytes() == data
    assert refused > 290


def test_every_document_of_the_fuzz_differs() -> None:
    """Mutations change something, most of the time."""
    rng = random.Random(3)
    before = {"a": [1, b"xy", [2, 3]], "b": {"c": "d"}}
    changed = 0
    for _ in range(100):
        document = msgpack.unpackb(msgpack.packb(before))
        mutate(document, rng)
        changed += document != before
    assert changed > 70
