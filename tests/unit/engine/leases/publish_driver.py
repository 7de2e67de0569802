"""Processes that work on one leased session by its forks, and ones that are killed at it.

It is run on its own because it forks, which a process with threads must not do.
"""

from __future__ import annotations

import asyncio
import pickle
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from icechunk_async import Repository
from icechunk_async.errors import LeaseLostError
from icechunk_async.storage import open_storage
from tests.helpers import make_array, read, write
from tests.killing import FAST, Killing, in_child, kills
from tests.unit.engine.leases.kill_driver import content, noted, notes_of, told

if TYPE_CHECKING:
    from icechunk_async.session import ForkSession

CHUNKS = 6


async def prepare(root: Path, spec: int) -> None:
    """Begin a session with an array that is not committed, and write down two forks of it."""
    async with Repository.create(root, spec_version=spec, storage_options=FAST) as repository:
        session = await repository.writable_session("main", lease=True)
        await make_array(session, "a", (100,), (1,))
        forks = [await session.fork() for _ in range(2)]
        (root.parent / "forks").write_bytes(pickle.dumps([fork.to_bytes() for fork in forks]))
        told(root.parent / "prepared", "session", session.session_id)


def fork_of(root: Path, number: int) -> ForkSession:
    """Return a fork that was written down."""
    from icechunk_async import ForkSession

    parcels: list[bytes] = pickle.loads((root.parent / "forks").read_bytes())
    return ForkSession.from_bytes(parcels[number])


async def publish(root: Path, place: int) -> None:
    """Publish pairs of chunks, with what the other fork published in view; die at the place."""
    notes = notes_of(root)
    one = fork_of(root, 0)
    async with open_storage(root, **FAST) as plain, one.attached(Killing(plain, place)):
        for pair in range(0, CHUNKS, 2):
            await write(one, f"a/c/{pair}", content(pair))
            await write(one, f"a/c/{pair + 1}", content(pair + 1))
            await one.publish()
            told(notes, "published", pair + 1)
            await one.refresh()


async def commit(root: Path, place: int) -> None:
    """Take in what forks published, show own changes, and commit; die at the place."""
    notes = notes_of(root)
    session_id = noted(root.parent / "prepared")["session"]
    async with (
        open_storage(root, **FAST) as plain,
        Repository.open(Killing(plain, place)) as repository,
    ):
        session = await repository.resume_session(session_id)
        await write(session, "a/c/80", content(80))
        await session.refresh()
        told(notes, "refreshed", 1)
        fork = await session.fork()
        await write(fork, "a/c/81", content(81))
        await fork.publish()
        told(notes, "published", 81)
        told(notes, "committed", await session.commit("all"))


async def check(root: Path, published: int, known: dict[str, str]) -> None:
    """Continue as a process that knows the session's id and what was told."""
    session_id = noted(root.parent / "prepared")["session"]
    async with Repository.open(root, storage_options=FAST) as repository:
        try:
            session = await repository.resume_session(session_id)
        except LeaseLostError as error:
            tip = str(await repository.lookup_branch("main"))
            if not error.context["snapshot_id"] == tip == known.get("committed", tip):
                raise
        else:
            assert "committed" not in known
            other = fork_of(root, 1)
            async with open_storage(root, **FAST) as storage, other.attached(storage):
                await write(other, "a/c/90", content(90))
            await session.merge(other)
            await session.commit("resumed")
        line = [info.message async for info in repository.ancestry(branch="main")]
        assert len(line) == 2, line
        reader = await repository.readonly_session("main")
        for pair in range(0, CHUNKS, 2):
            found = [await read(reader, f"a/c/{it}") for it in (pair, pair + 1)]
            whole = [content(pair), content(pair + 1)]
            # A pair is published in one step: never one chunk of it alone.
            assert found == whole if pair < published else found in ([None, None], whole), found
        if "refreshed" in known:
            assert await read(reader, "a/c/80") == content(80)
        if known.get("published") == "81":
            assert await read(reader, "a/c/81") == content(81)
        # Its holder was told of the commit, and so had removed them.
        left = [it async for it in repository.storage.list_prefix("leases/spills/")]
        assert "committed" not in known or not left


def kill(place: Path, spec: int, first: int, step: int) -> None:
    """Kill publishers and committers at every ``step``-th request, until they come to their end."""
    fresh = place / "fresh"
    in_child(prepare(fresh, spec))
    killed = 0
    for role in (publish, commit):
        if role is commit:
            assert not in_child(publish(fresh, 1 << 30))
        for root, died in kills(fresh, role, first, step):
            known = noted(notes_of(root))
            published = CHUNKS if role is commit else int(known.get("published", -1)) + 1
            in_child(check(root, published, known if role is commit else {}))
            shutil.rmtree(root)
            notes_of(root).unlink(missing_ok=True)
            killed += died
    sys.stdout.write(f"{killed}\n")


async def work(root: Path, me: int, workers: int, rounds: int) -> None:
    """Write a chunk each round, and continue when those of all others can be read."""
    fork = fork_of(root, me)
    async with open_storage(root, **FAST) as storage, fork.attached(storage), asyncio.timeout(250):
        for turn in range(rounds):
            await write(fork, f"a/c/{10 * me + turn}", content(10 * me + turn))
            await fork.publish()
            wanted = [content(10 * it + turn) for it in range(workers)]
            while [await read(fork, f"a/c/{10 * it + turn}") for it in range(workers)] != wanted:
                await fork.refresh()
                await asyncio.sleep(0.05)


if __name__ == "__main__":
    if sys.argv[1] == "kill":
        kill(Path(sys.argv[2]), *map(int, sys.argv[3:]))
    else:
        asyncio.run(work(Path(sys.argv[2]), *map(int, sys.argv[3:])))
