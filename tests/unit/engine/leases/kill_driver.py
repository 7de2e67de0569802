"""A program that kills its children at requests of a leased session, and looks at what is left.

It is run on its own because it forks, which a process with threads must not do.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path

from icechunk_async import Repository
from icechunk_async._runtime import clock
from icechunk_async.engine.leases.register import SessionState
from icechunk_async.errors import LeaseExpiredError, LeaseLostError
from icechunk_async.format.ids import SessionId
from icechunk_async.format.layout import lease_key, spill_prefix
from icechunk_async.storage import open_storage
from tests.helpers import make_array, read, write
from tests.killing import FAST, WRITES, Killing, in_child, kills

for _module in ("engine.upkeep.collect", "zarr.store"):
    importlib.import_module(f"icechunk_async.{_module}")  # here, so that no child has to
importlib.import_module("icechunk_async_local.storage")


LONG_AGO = 40 * 24 * 3600
"""Longer than any lease holds and dead ones are kept. Seconds."""
SPILLED = 4


def content(chunk: int) -> bytes:
    """Return the bytes of a chunk; every other one is kept in manifests."""
    return b"%d" % chunk * (700 if chunk % 2 else 1)


def notes_of(root: Path) -> Path:
    """Return where processes that work on a repository note what they were told."""
    return root.with_suffix(".txt")


def told(notes: Path, *words: object) -> None:
    """Note what the process was told, so that it outlives it."""
    with notes.open("a", encoding="utf-8") as file:
        file.write(" ".join(map(str, words)) + "\n")


async def prepare(root: Path, spec: int) -> None:
    """Make a repository with an array."""
    async with Repository.create(root, spec_version=spec, storage_options=FAST) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (100,), (1,))
        await session.commit("an array")


async def scenario(root: Path, place: int) -> None:
    """Begin, write, spill, resume, spill, commit; die at the place."""
    notes = notes_of(root)
    async with (
        open_storage(root, **FAST) as plain,
        Repository.open(Killing(plain, place)) as repository,
    ):
        session = await repository.writable_session("main", lease=True)
        told(notes, "session", session.session_id)
        for chunk in range(6):
            if chunk == 4:
                session = await repository.resume_session(session.session_id)
            await write(session, f"a/c/{chunk}", content(chunk))
            if chunk % 2:
                await session.spill()
                told(notes, "spilled", chunk)
        told(notes, "committed", await session.commit("all"))


def noted(notes: Path) -> dict[str, str]:
    """Return the notes of a process, the last of each kind."""
    lines = (
        [line.split() for line in notes.read_text("utf-8").splitlines()] if notes.exists() else []
    )
    return {line[0]: line[1] for line in lines}


async def check(root: Path) -> None:
    """Continue the session as a process that only knows its id."""
    known = noted(notes_of(root))
    async with Repository.open(root, storage_options=FAST) as repository:
        session_id = known.get("session")
        if session_id is None:
            assert len(await repository.sessions()) <= 1
            return
        tip = await repository.lookup_branch("main")
        spilled = int(known.get("spilled", -1))
        try:
            resumed = await repository.resume_session(session_id)
        except LeaseLostError as error:
            # Killed between the commit and the note: the lease says so, or the history does.
            if error.context["snapshot_id"] != str(tip):
                raise
            assert spilled == 5, "it was committed before all was spilled"
        else:
            assert "committed" not in known
            for chunk in range(6):
                found = await read(resumed, f"a/c/{chunk}")
                assert (
                    # What was told to be spilled must be there; what was being spilled may be.
                    found == content(chunk) if chunk <= spilled else found in {content(chunk), None}
                )
            await write(resumed, "a/c/50", b"more")
            tip = await resumed.commit("resumed")
        assert await repository.lookup_branch("main") == tip
        assert known.get("committed", str(tip)) == str(tip)
        line = [info.message async for info in repository.ancestry(branch="main")]
        assert len(line) == 3, line  # the first snapshot, the array, and the session once
        reader = await repository.readonly_session("main")
        for chunk in range(spilled + 1):
            assert await read(reader, f"a/c/{chunk}") == content(chunk)


async def leave(root: Path, *kinds: str) -> None:
    """Leave leased sessions that spilled, and note their ids by kind."""
    async with Repository.open(root, storage_options=FAST) as repository:
        for kind in kinds:
            session = await repository.writable_session("main", lease=True)
            for chunk in range(SPILLED):
                await write(session, f"a/c/{chunk}", content(chunk))
                if chunk % 2:
                    await session.spill()
            told(root.parent / "left", kind, session.session_id)


def left(root: Path) -> dict[str, SessionId]:
    """Return the sessions that were left, by kind."""
    return {kind: SessionId.parse(it) for kind, it in noted(root.parent / "left").items()}


async def resume(repository: Repository, session_id: SessionId) -> None:
    """Continue a session that was left, and see all that it spilled."""
    session = await repository.resume_session(session_id)
    for chunk in range(SPILLED):
        assert await read(session, f"a/c/{chunk}") == content(chunk)


async def end(root: Path, place: int) -> None:
    """End a session by hand; die at the place."""
    async with (
        open_storage(root, **FAST) as plain,
        Repository.open(Killing(plain, place, of=WRITES)) as repository,
    ):
        await repository.end_session(left(root)["ended"])
        told(notes_of(root), "ended", 1)


async def check_ended(root: Path) -> None:
    """See that the session is live and whole or ended, and that ending it again ends it."""
    session_id = left(root)["ended"]
    async with Repository.open(root, storage_options=FAST) as repository:
        (found,) = await repository.sessions()
        if found.state is SessionState.LIVE:
            assert "ended" not in noted(notes_of(root))
            await resume(repository, session_id)
        await repository.end_session(session_id)
        (found,) = await repository.sessions()
        assert found.state is SessionState.ENDED
        try:
            await repository.resume_session(session_id)
        except LeaseLostError:
            return
        raise AssertionError("it was ended, and resumed")


def age(root: Path) -> None:
    """Let what was left be old, but for the live session; take the lease from one of the old."""
    sessions = left(root)
    (root / lease_key(sessions["orphan"])).unlink()
    long_ago = clock.now_us() / 1e6 - LONG_AGO
    for kind in ("dead", "orphan"):
        for it in (
            root / lease_key(sessions[kind]),
            *(root / spill_prefix(sessions[kind])).glob("*"),
        ):
            if it.exists():
                os.utime(it, (long_ago, long_ago))


async def collect(root: Path, place: int) -> None:
    """Collect garbage, which removes dead leases; die at the place."""
    async with (
        open_storage(root, **FAST) as plain,
        Repository.open(Killing(plain, place, of=WRITES)) as repository,
    ):
        await repository.garbage_collect(clock.from_us(clock.now_us()))
        told(notes_of(root), "collected", 1)


async def check_collected(root: Path) -> None:
    """See that the live session is whole, and that the next collection removes all others."""
    sessions = left(root)

    def kept(kind: str) -> tuple[bool, int]:
        prefix = root / spill_prefix(sessions[kind])
        return (root / lease_key(sessions[kind])).exists(), len([*prefix.glob("*")])

    has_lease, spilled = kept("dead")
    # The order of removal: spills first, and the lease last, which names them.
    assert has_lease or not spilled, "nobody knows any more what was spilled"
    async with Repository.open(root, storage_options=FAST) as repository:
        if "collected" not in noted(notes_of(root)):
            if has_lease:
                try:
                    await repository.resume_session(sessions["dead"])
                except LeaseExpiredError:
                    pass
                else:
                    raise AssertionError("it has expired, and was resumed")
            await repository.garbage_collect(clock.from_us(clock.now_us()))
        assert kept("dead") == kept("orphan") == (False, 0)
        assert [it.session_id for it in await repository.sessions()] == [sessions["live"]]
        await resume(repository, sessions["live"])


ROLES = {
    "hold": (scenario, check),
    "end": (end, check_ended),
    "collect": (collect, check_collected),
}


def main(role: str, place: Path, spec: int, first: int, step: int) -> None:
    """Kill at every ``step``-th place from ``first`` on, until the scenario comes to its end."""
    fresh = place / "fresh"
    in_child(prepare(fresh, spec))
    if role == "end":
        in_child(leave(fresh, "ended"))
    elif role == "collect":
        in_child(leave(fresh, "dead", "orphan", "live"))
        age(fresh)
    work, look = ROLES[role]
    killed = 0
    for root, died in kills(fresh, work, first, step):
        in_child(look(root))
        shutil.rmtree(root)
        killed += died
    sys.stdout.write(f"{killed}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
