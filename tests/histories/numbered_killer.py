"""Processes that commit to one repository with numbered states and are killed at random.

``python -m tests.histories.numbered_killer FOLDER KILLS SEED``: the repository is on a local disk,
of which only the creation of absent objects is used. Each process writes down what it begins and
what it was told, before the next step. The end comes when commits landed for each that was killed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from icechunk_async import Repository
from icechunk_async.conflicts import ConflictDetector
from icechunk_async.errors import ChunksCollectedError, ConflictError, OutcomeUnknownError
from icechunk_async.storage import open_storage
from tests.helpers import make_array, read, write
from tests.killing import FAST, in_child
from tests.without_updates import NUMBERED, WithoutUpdates

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

PROCESSES = 8
CHUNKS = 100_000
_LONGEST_SECONDS = 0.15
_COLLECTS_EVERY = 7


@asynccontextmanager
async def opened(root: Path) -> AsyncGenerator[Repository]:
    """Open the repository on a storage that replaces nothing."""
    async with (
        open_storage(root, **FAST) as plain,
        Repository.open(WithoutUpdates(plain)) as repository,
    ):
        yield repository


async def prepare(root: Path) -> None:
    """Create the repository."""
    async with (
        open_storage(root, **FAST) as plain,
        Repository.create(WithoutUpdates(plain), layout=NUMBERED) as repository,
    ):
        session = await repository.writable_session("main")
        await make_array(session, "a", (CHUNKS,), (1,))
        await session.commit("array")


def say(notes: int, word: str, number: int) -> None:
    """Write a line down in one step."""
    # Appended by one system call: lines of eight processes do not mix, and none is lost in a
    # buffer.
    os.write(notes, f"{word} {number}\n".encode())


async def work(root: Path, notes: int, first: int, end: Path) -> None:
    """Commit one chunk after the other, and sometimes collect, until ``end`` exists."""
    async with opened(root) as repository:
        number = first
        while not end.exists():  # noqa: ASYNC240 -- a lookup in memory
            session = await repository.writable_session("main")
            await write(session, f"a/c/{number}", b"%d" % number * 200)
            # Before the commit: a process that is killed in it has not landed it for all it knows.
            say(notes, "begun", number)
            try:
                await session.commit(str(number), rebase_with=ConflictDetector())
            except (ConflictError, ChunksCollectedError):
                say(notes, "refused", number)
                session.abandon()
            # Neither landed nor refused is written down, so that either is right.
            except OutcomeUnknownError:
                session.abandon()
            else:
                say(notes, "landed", number)
            number += 1
            if number % _COLLECTS_EVERY == 0:
                await repository.garbage_collect(datetime.now(UTC))


async def check(root: Path, told: Counter[tuple[str, int]]) -> None:
    """Compare the history with what the processes wrote down."""
    async with opened(root) as repository:
        infos = [it async for it in repository.ancestry(branch="main")]
        messages = Counter(it.message for it in infos)
        assert messages.most_common(1)[0][1] == 1, "a commit is there twice"
        for word, number in told:
            assert word != "landed" or str(number) in messages, f"{number} landed and is lost"
            assert word != "refused" or str(number) not in messages, f"{number} was refused"
        begun = {str(number) for word, number in told if word == "begun"}
        assert messages.keys() - {"array", "Repository initialized"} <= begun
        reader = await repository.readonly_session("main")
        for message in messages.keys() & begun:
            assert await read(reader, f"a/c/{message}") == message.encode() * 200
        report = await repository.verify("existence")
        assert report.findings == (), report.findings
        # A writer that was killed leaves its temporary file, whose name begins with a dot.
        states = len(list((root / "states").glob("[!.]*")))
        await repository.garbage_collect(datetime.now(UTC))
        left = len(list((root / "states").glob("[!.]*")))
        landed = sum(word == "landed" for word, _ in told)
        sys.stdout.write(f"{landed} {len(infos)} {states} {left}\n")
        sys.stdout.flush()  # nobody else does: the process ends by `os._exit`


def main(place: Path, kills: int, seed: int) -> None:
    """Kill processes at random, and start others in their place."""
    rng = random.Random(seed)
    root, end = place / "repository", place / "end"
    in_child(prepare(root))
    notes = os.open(place / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    started = 0

    def start() -> int:
        nonlocal started
        started += 1
        # Separate numbers for each process: a chunk that two write would be a conflict.
        first = started * 50
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(work(root, notes, first, end))
            except BaseException as error:  # noqa: BLE001 -- the parent shows it
                sys.stderr.write(f"{error!r}\n")
                os._exit(1)
            os._exit(0)
        return child

    children = [start() for _ in range(PROCESSES)]
    for _ in range(kills):
        time.sleep(rng.random() * _LONGEST_SECONDS)
        place_of = rng.randrange(PROCESSES)
        os.kill(children[place_of], signal.SIGKILL)
        _, status = os.waitpid(children[place_of], 0)
        if os.WIFEXITED(status):
            sys.exit("a process failed before it was killed")
        children[place_of] = start()
    # On a busy machine all may be killed before they commit.
    while (place / "notes").read_text("utf-8").count("landed") < kills:
        time.sleep(_LONGEST_SECONDS)
    end.touch()
    for child in children:
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit("a process failed")
    lines = (place / "notes").read_text("utf-8").split("\n")[:-1]
    told = Counter((word, int(number)) for word, number in map(str.split, lines))
    in_child(check(root, told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
