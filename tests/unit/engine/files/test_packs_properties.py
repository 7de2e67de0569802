"""Packing changes where chunks are stored, and nothing else, for any sequence of operations."""

from __future__ import annotations

import asyncio
import os
import pickle
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from icechunk_async import ForkSession, Packing, Repository, RepositoryConfig
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.conflicts import BasicConflictSolver
from icechunk_async.errors import IcechunkError
from icechunk_async.storage import ByteRange
from tests.helpers import make_array, memory_url, read, write

CHUNKS = 8
PATHS = ("a", "b")
PACKINGS = (Packing.off(), Packing(40, 25), Packing(200, 200), Packing(1 << 20, 1 << 10))
KINDS = (
    *["set"] * 6,
    *[
        "many",
        "delete",
        "resize",
        "drop",
        "discard",
        "commit",
        "amend",
        "fork",
        "compact",
        "rebase",
    ],
)


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that is done; what of it counts depends on the kind."""

    kind: str
    path: str
    chunk: int
    size: int


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(KINDS),
        st.sampled_from(PATHS),
        st.integers(0, CHUNKS - 1),
        st.integers(1, 60),
    ),
    max_size=30,
)


class Worker:
    """Does the steps in one repository and notes everything that it sees."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self.seen: list[object] = []
        self.count = 0

    async def run(self, steps: list[Step]) -> list[object]:
        """Return all that was seen."""
        self.session = await self.repository.writable_session("main")
        for path in PATHS:
            await make_array(self.session, path, (CHUNKS,), (1,))
        for step in steps:
            self.count += 1
            await self.do(step)
        await self.do(Step("commit", "a", 0, 1))
        return self.seen

    async def do(self, step: Step) -> None:
        """Do one thing, and note what came of it."""
        try:
            await getattr(self, step.kind)(step)
        except IcechunkError as error:
            self.seen.append(type(error))
        await self.look()

    async def look(self) -> None:
        """Note every chunk of the session, also the middle of each."""
        for path in PATHS:
            for number in range(CHUNKS):
                self.seen.append(await read(self.session, f"{path}/c/{number}"))
                part = await self.session.workspace.read_chunk(
                    f"/{path}", (number,), ByteRange(3, 9)
                )
                self.seen.append(part if part is None else bytes(part))

    def data(self, step: Step) -> bytes:
        """Return bytes that no other step writes."""
        return self.count.to_bytes(2) * step.size

    async def set(self, step: Step) -> None:
        """Write a chunk."""
        await write(self.session, f"{step.path}/c/{step.chunk}", self.data(step))

    async def many(self, step: Step) -> None:
        """Write several at a time."""
        data = self.data(step)
        await bounded_map(
            lambda number: write(self.session, f"{step.path}/c/{number}", data + bytes([number])),
            range(step.chunk + 1),
            limit=4,
        )

    async def delete(self, step: Step) -> None:
        """Delete a chunk."""
        await self.session.store.delete(f"{step.path}/c/{step.chunk}")

    async def resize(self, step: Step) -> None:
        """Give the array another length; what is cut off is gone."""
        await make_array(self.session, step.path, (step.chunk + 1,), (1,))

    async def drop(self, step: Step) -> None:
        """Delete the array and make it again."""
        await self.session.store.delete(f"{step.path}/zarr.json")
        await make_array(self.session, step.path, (CHUNKS,), (1,))

    async def discard(self, _: Step) -> None:
        """Take back all changes."""
        self.session.discard_changes()

    async def commit(self, _: object) -> None:
        """Publish the changes, on top of what compaction did."""
        await self.session.commit("step", allow_empty=True, rebase_with=BasicConflictSolver())
        self.session = await self.repository.writable_session("main")

    async def amend(self, _: Step) -> None:
        """Put the changes into the tip, wherever compaction left it."""
        await self.session.rebase(BasicConflictSolver())
        await self.session.amend("step", allow_empty=True)
        self.session = await self.repository.writable_session("main")

    async def fork(self, step: Step) -> None:
        """Let two forks write, one elsewhere, and merge them."""
        here, away = await self.session.fork(), await self.session.fork()
        away = pickle.loads(pickle.dumps(away))
        async with away.attached(self.repository.storage):
            await write(away, f"{step.path}/c/{step.chunk}", self.data(step))
            self.seen.append(await read(away, f"{step.path}/c/0"))
        await write(here, f"{step.path}/c/{(step.chunk + 1) % CHUNKS}", self.data(step))
        back = ForkSession.from_bytes(away.to_bytes())
        await back.merge(here)
        await self.session.merge(back)

    async def compact(self, step: Step) -> None:
        """Write sparse objects anew; it is nothing where none are shared."""
        await self.repository.compact("main", min_live_share=min(1.0, step.size / 40))

    async def rebase(self, step: Step) -> None:
        """Follow a commit of somebody else's."""
        other = await self.repository.writable_session("main")
        await write(other, f"{step.path}/c/{step.chunk}", self.data(step))
        await other.commit("other")
        await self.session.rebase(BasicConflictSolver())


async def _run(steps: list[Step], packing: Packing, spec: int) -> list[object]:
    config = RepositoryConfig(inline_chunk_threshold_bytes=10)
    options: dict[str, Any] = {"spec_version": spec, "config": config, "packing": packing}
    async with Repository.create(memory_url(), **options) as repository:
        return await Worker(repository).run(steps)


@settings(max_examples=int(os.environ.get("PACKING_EXAMPLES", "20")), deadline=None)
@given(steps=STEPS, packing=st.sampled_from(PACKINGS[1:]), spec=st.sampled_from([1, 2]))
def test_packing_changes_nothing_that_is_read(
    steps: list[Step], packing: Packing, spec: int
) -> None:
    """Sets, overwrites, deletions, forks, merges, commits, rebases and compaction agree."""
    with asyncio.Runner() as runner:
        plain = runner.run(_run(steps, PACKINGS[0], spec))
        assert runner.run(_run(steps, packing, spec)) == plain
