"""The queue of the writers of a folder: order, and writers that end or stop without a word."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository
from icechunk_async.conflicts import ConflictDetector
from icechunk_async.engine.commit import turns
from icechunk_async.storage import open_storage, queueing
from icechunk_async.storage.extensions import QueuesWriters
from icechunk_async.storage.queueing import queue_of_machine
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import make_array, until, write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from icechunk_async import Session
    from icechunk_async.storage.extensions import WriterNumber

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux has locks that queue writers"
)

HOLDER = """
import asyncio, sys
from icechunk_async.storage import open_storage

async def main():
    async with open_storage(sys.argv[1]) as storage:
        number = storage.take_number("main")
        print("holds", flush=True)
        sys.stdin.readline()

asyncio.run(main())
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a number for ``main``."""
    (tmp_path / "some").touch()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path.as_uri()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


def taken(storage: object, line: str = "main") -> WriterNumber:
    """Take a number."""
    assert isinstance(storage, QueuesWriters)
    number = storage.take_number(line)
    assert number is not None
    return number


async def test_numbers_are_called_in_the_order_of_arrival(tmp_path: Path) -> None:
    """Those of other handles count, too; those of other lines do not."""
    (tmp_path / "some").touch()
    async with open_storage(tmp_path) as one, open_storage(tmp_path) as other:
        first = taken(one)
        await asyncio.sleep(0.001)
        second = taken(other)
        elsewhere = taken(other, "dev")
        await asyncio.sleep(0.001)
        third = taken(one)
        assert first.ahead() == []
        assert elsewhere.ahead() == []
        assert second.ahead() < third.ahead()  # the longer list is the greater one
        assert (len(second.ahead()), len(third.ahead())) == (1, 2)
        second.give_back()
        second.give_back()
        assert len(third.ahead()) == 1
        first.give_back()
        assert third.ahead() == []
        third.give_back()
        elsewhere.give_back()


async def test_of_very_many_the_first_is_always_named(tmp_path: Path) -> None:
    """Nobody would wait for that one otherwise."""
    (tmp_path / "some").touch()
    async with open_storage(tmp_path) as storage:
        numbers = []
        for _ in range(200):
            numbers.append(taken(storage))
            await asyncio.sleep(0.00001)
        assert numbers[0].ahead() == []
        (first,) = numbers[1].ahead()
        assert all(number.ahead()[0] == first for number in numbers[1:])
        for number in numbers:
            number.give_back()


async def test_a_killed_writer_is_in_no_queue(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    """The kernel drops its number."""
    async with open_storage(tmp_path) as storage:
        number = taken(storage)
        assert len(number.ahead()) == 1
        holder.kill()
        await until(lambda: number.ahead() == [])
        number.give_back()


class _Forked:
    """A child process of this one, with copies of all that is open."""

    def __enter__(self) -> None:
        read, self._write = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._write)
            os.read(read, 1)
            os._exit(0)
        os.close(read)

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        os.waitpid(self._child, 0)


@pytest.mark.blocks_the_loop  # forks on it; if the facade is in use, a fork waits for its loop
async def test_a_number_given_back_is_free_although_a_child_has_a_copy(tmp_path: Path) -> None:
    """A fork copies descriptors, and with them the lock."""
    (tmp_path / "some").touch()
    async with open_storage(tmp_path) as storage:
        number = taken(storage)
        await asyncio.sleep(0.001)
        next_one = taken(storage)
        with _Forked():
            number.give_back()
            assert next_one.ahead() == []
        next_one.give_back()


async def test_a_stopped_writer_is_overlooked(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once; later commits of this process do not wait for it again."""
    url = tmp_path.as_uri()
    holder.send_signal(signal.SIGSTOP)
    try:
        monkeypatch.setattr(turns, "_ELSEWHERE_SECONDS", 0.2)
        asked = 0
        async with Repository.create(url, check_clean_root=False) as repository:
            real = turns._wait_for

            async def counted(number: Any, state: Any) -> None:
                nonlocal asked
                asked += len(number.ahead())
                await real(number, state)

            monkeypatch.setattr(turns, "_wait_for", counted)
            for turn in range(3):
                session = await repository.writable_session("main")
                await write(session, f"{turn}/zarr.json", b'{"zarr_format":3,"node_type":"group"}')
                await session.commit(str(turn), rebase_with=ConflictDetector())
        assert asked == 1
        async with open_storage(tmp_path) as storage:  # another handle learns it by itself
            number = taken(storage)
            (stopped,) = number.ahead()
            number.overlook(stopped)
            assert number.ahead() == []
            await asyncio.sleep(0.001)
            later = taken(storage)
            (mine,) = later.ahead()  # those behind the stopped one count
            assert mine != stopped
            number.give_back()
            later.give_back()
    finally:
        holder.send_signal(signal.SIGCONT)


class Elsewhere(WrappedStorage):
    """A storage without a queue, as services are."""


async def test_writers_of_a_machine_queue_at_a_storage_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each makes one try, on what those before it left, and none of another branch waits."""
    monkeypatch.setattr(turns, "_ELSEWHERE_SECONDS", 3600.0)  # however slow this machine is
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(open_storage(tmp_path))
        repository = await stack.enter_async_context(Repository.create(Elsewhere(plain)))
        session = await repository.writable_session("main")
        await make_array(session, "a", (8,), (1,))
        await repository.create_branch("other", await session.commit("first"))

        counting = LatencyStorage(Elsewhere(plain), seconds=0)
        # Each stands for a process: repositories at a storage of the caller share nothing.
        sessions: list[Session] = []
        for number in range(8):
            opened = await stack.enter_async_context(Repository.open(counting))
            sessions.append(await opened.writable_session("main"))
            await write(sessions[-1], f"a/c/{number}", b"%04d" % number)
        counting.forget()
        async with asyncio.TaskGroup() as group:
            for number, session in enumerate(sessions):
                commit = session.commit(str(number), rebase_with=ConflictDetector())
                group.create_task(commit)
        made = [key for operation, key in counting.log if operation == "put"]
        assert len([key for key in made if key.startswith("snapshots/")]) == 8
        assert len([key for key in made if key == "repo"]) == 8
        messages = [it.message async for it in repository.ancestry(branch="main")]
        assert messages[:8] == [str(number) for number in reversed(range(8))]


def test_a_writer_does_not_wait_for_one_of_another_place(tmp_path: Path) -> None:
    """Lines are told apart by URL and branch."""
    shared = queue_of_machine.take(f"{tmp_path.as_uri()}\0main")
    assert shared is not None
    later = queue_of_machine.take(f"{tmp_path.as_uri()}\0dev")
    other = queue_of_machine.take(f"{tmp_path.as_uri()}/other\0main")
    same = queue_of_machine.take(f"{tmp_path.as_uri()}\0main")
    assert later is not None
    assert other is not None
    assert same is not None
    assert (later.ahead(), other.ahead(), len(same.ahead())) == ([], [], 1)
    for number in (shared, later, other, same):
        number.give_back()


async def test_writers_race_where_the_machine_has_no_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may be missing, or be out of locks."""
    monkeypatch.setattr(queueing, "_MACHINE_FOLDER", str(tmp_path / "missing"))
    assert queue_of_machine.take("main") is None
    async with (
        open_storage(tmp_path) as plain,
        Repository.create(Elsewhere(plain)) as repository,
    ):
        session = await repository.writable_session("main")
        await make_array(session, "a", (8,), (1,))
        assert await session.commit("first")
