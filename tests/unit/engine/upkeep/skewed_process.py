"""A process whose clock is wrong by some hours: it writes and commits, or collects garbage."""

from __future__ import annotations

import asyncio
import sys
import time
from datetime import timedelta

HOURS = float(sys.argv[2])
_real_ns, _real = time.time_ns, time.time
time.time_ns = lambda: _real_ns() + int(HOURS * 3600 * 10**9)
time.time = lambda: _real() + HOURS * 3600

from icechunk_async import Repository  # noqa: E402 -- only with the clock
from icechunk_async._runtime import clock  # noqa: E402
from icechunk_async.errors import InvalidInputError  # noqa: E402
from tests.helpers import write  # noqa: E402
from tests.unit.engine.upkeep.upkeep_tools import CHUNK  # noqa: E402


def say(line: str) -> None:
    """Tell the process that waits."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def write_slowly(location: str) -> None:
    """Write a chunk, wait for a line, and commit."""
    async with Repository.open(location) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/1", CHUNK)
        say("written")
        await asyncio.to_thread(sys.stdin.readline)
        say(str(await session.commit("late")))


async def collect(location: str) -> None:
    """Collect what is older than an hour by the clock of this process."""
    cutoff = clock.from_us(clock.now_us()) - timedelta(hours=1)
    async with Repository.open(location) as repository:
        try:
            report = await repository.garbage_collect(cutoff)
        except InvalidInputError as error:
            say(f"refused: {error}")
        else:
            say(f"deleted {report.chunks_deleted}")


if __name__ == "__main__":
    asyncio.run({"write": write_slowly, "collect": collect}[sys.argv[1]](sys.argv[3]))
