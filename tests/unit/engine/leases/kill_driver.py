"""A program that kills its children at requests of a leased session, and looks at what is left.

It is run on its own because it forks, which a process with threads must not do.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

from icechunk_async import Repository
from icechunk_async.errors import LeaseLostError
from icechunk_async.storage import open_storage
from tests.helpers import make_array, read, write
from tests.killing import FAST, Killing, in_child

for _module in ("engine.upkeep.collect", "zarr.store"):
    importlib.import_module(f"icechunk_async.{_module}")  # here, so that no child has to
importlib.import_module("icechunk_async_local.storage")


def content(chunk: int) -> bytes:
    """Return the bytes of a chunk; every other one is kept in manifests."""
    return b"%d" % chunk * (700 if chunk % 2 else 1)


def told(notes: Path, *words: object) -> None:
    """Note what the process was told, so that it outlives it."""
    with notes.open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


async def prepare(root: Path, spec: int) -> None:
    """Make a repository with an array."""
    async with Repository.create(root, spec_version=spec, storage_options=FAST) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (100,), (1,))
        await session.commit("an array")


async def scenario(root: Path, notes: Path, place: int) -> None:
    """Begin, write, spill, resume, spill, commit; die at the place."""
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
    lines = [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []
    return {line[0]: line[1] for line in lines}


async def check(root: Path, known: dict[str, str]) -> None:
    """Continue the session as a process that only knows its id."""
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
            if error.context["snapshot_id"] != str(tip):
                raise
            assert spilled == 5, "it was committed before all was spilled"
        else:
            assert "committed" not in known
            for chunk in range(6):
                found = await read(resumed, f"a/c/{chunk}")
                assert (
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


def main(place: Path, spec: int, first: int, step: int) -> None:
    """Kill at every ``step``-th request from ``first`` on, until the scenario comes to its end."""
    fresh = place / "fresh"
    in_child(prepare(fresh, spec))
    killed, at = 0, first
    while True:
        root, notes = place / f"at-{at}", place / f"at-{at}.txt"
        shutil.copytree(fresh, root)
        died = in_child(scenario(root, notes, at))
        in_child(check(root, noted(notes)))
        shutil.rmtree(root)
        if not died:
            break
        killed += 1
        at += step
    sys.stdout.write(f"{killed}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
