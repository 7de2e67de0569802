"""A repository with a branch to propose, and checks that are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.helpers import group_document, make_array, read, write

if TYPE_CHECKING:
    from icechunk_async import Repository, SnapshotId
    from icechunk_async.proposals import Proposal
    from icechunk_async.session import Session

__all__ = ["CHUNKS", "Counting", "begin", "commit", "contents"]

CHUNKS = 40


async def begin(repository: Repository, *branches: str) -> SnapshotId:
    """Commit an array of 40 chunks to ``main``, and make branches of it."""
    session = await repository.writable_session("main")
    await write(session, "zarr.json", group_document())
    await make_array(session, "a", (CHUNKS,), (1,))
    base = await session.commit("base")
    for branch in branches:
        await repository.create_branch(branch, base)
    return base


async def commit(repository: Repository, branch: str, **chunks: int) -> SnapshotId:
    """Commit chunks of the array to a branch, by number: ``c3=7``."""
    session = await repository.writable_session(branch)
    for name, value in chunks.items():
        await write(session, f"a/c/{name[1:]}", bytes([value]))
    return await session.commit(f"{chunks}")


async def contents(session: Session) -> dict[int, int]:
    """Return the chunks that a session sees."""
    found = {number: await read(session, f"a/c/{number}") for number in range(CHUNKS)}
    return {number: data[0] for number, data in found.items() if data is not None}


class Counting:
    """A check that says what it is told to, and notes the snapshots that it looked at."""

    def __init__(self, said: str | None = None) -> None:
        self.said = said
        self.seen: list[SnapshotId] = []
        self.__name__ = "counting"

    async def __call__(self, session: Session, proposal: Proposal) -> str | None:
        """Look at a snapshot."""
        del proposal
        self.seen.append(session.snapshot_id)
        return self.said
