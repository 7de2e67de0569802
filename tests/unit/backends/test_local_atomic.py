"""Local writes between threads, between processes, and in processes that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.errors import PreconditionFailedError, StorageUnavailableError
from icechunk_async.storage import ABSENT, open_storage
from icechunk_async_local import filesystems, publishing
from icechunk_async_local.paths import RESERVED_PREFIX, place_of
from tests.unit.backends.local_tools import everything, failing, make_files, read, write

if TYPE_CHECKING:
    from icechunk_async.storage import Expected
    from icechunk_async_local.publishing import Draft

REPOSITORY = Path(__file__).parents[3]

COUNTER = textwrap.dedent("""
    import asyncio, sys
    from icechunk_async.errors import PreconditionFailedError
    from icechunk_async.storage import open_storage

    async def main(path, times):
        async with open_storage(path) as storage:
            print("ready", flush=True)
            sys.stdin.readline()
            while times:
                found = await storage.get("refs/number")
                body = b"%d" % (int(found.data) + 1)
                try:
                    await storage.put("refs/number", body, if_version=found.version)
                    times -= 1
                except PreconditionFailedError:
                    pass

    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
""")

WRITER = textwrap.dedent("""
    import itertools, sys
    from pathlib import Path
    from icechunk_async.storage import ABSENT
    from icechunk_async_local.paths import place_of
    from tests.unit.backends.local_tools import make_files, write

    files = make_files(Path(sys.argv[1]))
    for number in itertools.count():
        body = b"%06d" % number * (1000 + number % 7 * 1000)
        write(files, "refs/plain", body)
        found = files.read(place_of("refs/updated"))
        write(files, "refs/updated", body, found.version)
        write(files, f"made/{number}", body, ABSENT)
        files.delete([place_of(f"made/{number}")])
        if number == 0:
            print("running", flush=True)
""")


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a Python program with pipes to it."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )


def test_eight_processes_lose_no_update(tmp_path: Path) -> None:
    """A number that eight processes increment by compare-and-set counts every one of them."""
    write(make_files(tmp_path), "refs/number", b"0")
    processes = [start(COUNTER, str(tmp_path), "25") for _ in range(8)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        assert [process.wait(240) for process in processes] == [0] * 8
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert (tmp_path / "refs" / "number").read_bytes() == b"200"
    assert everything(tmp_path) == ["refs/", "refs/number"]


def test_a_writer_killed_at_any_call_leaves_the_old_object_or_the_new(tmp_path: Path) -> None:
    """At every system call: no mixture, no part, no lock that stays."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.backends.crash_driver", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    calls = {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines()}
    assert calls.keys() == {"put", "create", "update", "copy", "delete"}
    assert all(count >= 5 for count in calls.values()), calls


def test_a_writer_killed_at_a_random_moment_leaves_whole_objects(tmp_path: Path) -> None:
    """The same, where the last instruction lies within a system call."""
    files = make_files(tmp_path)
    write(files, "refs/updated", b"000000" * 1000)
    for number in range(5):
        process = start(WRITER, str(tmp_path))
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        time.sleep(0.005 * number)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for key in ("refs/plain", "refs/updated"):
            body = read(files, key)
            assert body == body[:6] * (1000 + int(body[:6]) % 7 * 1000)
        version = files.read(place_of("refs/updated")).version
        write(files, "refs/updated", b"000000" * 1000, version)
        rest = [name for name in everything(tmp_path) if not name.endswith("/")]
        unfinished = [name for name in rest if RESERVED_PREFIX.decode() in name]
        assert len(unfinished) <= number + 1
        made = {name for name in rest if name.startswith("made/")} - set(unfinished)
        assert len(made) <= 1
        files.delete([place_of(name) for name in made])


async def test_unfinished_files_are_hidden_and_harmless(tmp_path: Path) -> None:
    """Files of a killed writer are hidden; their folder is not removed."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".icechunk-tmp-1-left").write_bytes(b"left")
    (tmp_path / "a" / "b#1").write_bytes(b"left by the official engine")
    (tmp_path / ".icechunk-tmp-folder").mkdir()
    (tmp_path / ".icechunk-tmp-folder" / "x").write_bytes(b"left")
    async with open_storage(tmp_path) as storage:
        assert [entry async for entry in storage.list_prefix()] == []
        assert [entry async for entry in storage.list_prefix("a/")] == []
        assert [entry async for entry in storage.list_prefix("a/b")] == []
        assert [entry async for entry in storage.list_prefix(".icechunk-tmp-")] == []
        assert [entry async for entry in storage.list_prefix(".icechunk-tmp-folder/")] == []
        assert [entry async for entry in storage.list_prefix(delimiter="/")] == []
        await storage.put("a/c", b"x")
        await storage.delete(["a/c"])
        assert (tmp_path / "a").exists()


async def test_old_unfinished_files_in_the_root_are_removed(tmp_path: Path) -> None:
    """Opening removes those that are a day old, and no others."""
    day_ago = time.time_ns() / 1e9 - 25 * 3600
    old, new = tmp_path / ".icechunk-tmp-old", tmp_path / ".icechunk-tmp-new"
    folder, deep = tmp_path / ".icechunk-tmp-probe-old", tmp_path / "a" / ".icechunk-tmp-old"
    (tmp_path / "a").mkdir()
    folder.mkdir()
    ordinary = tmp_path / "ordinary"
    for path in (old, new, deep, ordinary, folder / "first"):
        path.write_bytes(b"x")
    for path in (old, deep, ordinary, folder):
        os.utime(path, (day_ago, day_ago))
    async with open_storage(tmp_path):
        pass
    assert everything(tmp_path) == [".icechunk-tmp-new", "a/", "a/.icechunk-tmp-old", "ordinary"]


def test_a_lock_that_is_held_too_long_is_reported(tmp_path: Path) -> None:
    """The error says where the lock is, who holds it, and that nothing changed."""
    files = make_files(tmp_path, lock_timeout_seconds=0.05)
    version = write(files, "refs/a", b"1")
    folder = os.open(tmp_path / "refs", os.O_RDONLY)
    try:
        assert filesystems.try_lock(folder, exclusive=True)
        for expected in (None, version):
            with pytest.raises(StorageUnavailableError) as caught:
                write(files, "refs/a", b"2", expected)
            assert str(tmp_path / "refs") in str(caught.value)
            assert f"(process {os.getpid()})" in str(caught.value)
        failures = files.delete([place_of("refs/a")])
        assert [type(failure.error) for failure in failures] == [StorageUnavailableError]
        filesystems.unlock(folder)
        assert read(files, "refs/a") == b"1"
        write(files, "refs/a", b"2", version)
    finally:
        os.close(folder)
    assert everything(tmp_path) == ["refs/", "refs/a"]


def test_plain_writes_share_the_lock(tmp_path: Path) -> None:
    """Chunks that are written at the same time do not wait for each other."""
    files = make_files(tmp_path, lock_timeout_seconds=0.0)
    write(files, "chunks/a", b"1")
    folder = os.open(tmp_path / "chunks", os.O_RDONLY)
    try:
        assert filesystems.try_lock(folder, exclusive=False)
        write(files, "chunks/b", b"2")
        files.copy(place_of("chunks/b"), place_of("chunks/c"), None)
        assert files.delete([place_of("chunks/a")]) == []
        with pytest.raises(StorageUnavailableError):
            write(files, "chunks/b", b"3", files.read(place_of("chunks/b")).version)
    finally:
        os.close(folder)


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    """An update lands when the holder lets go."""
    files = make_files(tmp_path)
    version = write(files, "a", b"1")
    folder = os.open(tmp_path, os.O_RDONLY)
    assert filesystems.try_lock(folder, exclusive=True)
    timer = threading.Timer(0.05, os.close, (folder,))
    timer.start()
    write(files, "a", b"2", version)
    timer.join()
    assert read(files, "a") == b"2"


@pytest.mark.parametrize("change", ["put", "delete", "create", "update"])
def test_no_write_comes_between_check_and_update(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes of names in the folder wait until an update has checked and written."""
    files = make_files(tmp_path)
    version = write(files, "refs/a", b"1")
    rename = publishing.Publisher._rename
    interrupted = threading.Event()
    finished = threading.Event()
    outcome: list[object] = []

    def other() -> None:
        interrupted.wait(240)
        try:
            if change == "delete":
                outcome.append(files.delete([place_of("refs/a")]))
            else:
                expected = {"put": None, "create": ABSENT, "update": version}[change]
                outcome.append(write(files, "refs/a", b"other", expected))
        except PreconditionFailedError:
            outcome.append("refused")
        finished.set()

    def slow_rename(self: Any, draft: Draft, place: Any, **more: Any) -> None:
        if threading.current_thread() is not thread:
            interrupted.set()
            assert not finished.wait(0.1) or change == "create"
        rename(self, draft, place, **more)

    thread = threading.Thread(target=other)
    monkeypatch.setattr(publishing.Publisher, "_rename", slow_rename)
    thread.start()
    write(files, "refs/a", b"updated", version)
    thread.join()
    if change == "put":
        assert read(files, "refs/a") == b"other"
    elif change == "delete":
        assert outcome == [[]]
        assert not (tmp_path / "refs").exists()
    else:
        assert outcome == ["refused"]
        assert read(files, "refs/a") == b"updated"


@pytest.mark.parametrize("expected", [None, ABSENT], ids=["put", "create"])
@pytest.mark.parametrize("step", ["mkdir", "open"])
def test_a_folder_that_is_removed_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, expected: Expected
) -> None:
    """Deleting the last object of a folder does not make a writer fail."""
    files = make_files(tmp_path)
    original = getattr(os, step)
    removed = 0

    def interfere(path: bytes, *arguments: int, **keywords: int) -> object:
        nonlocal removed
        if removed == 20 or (step == "open" and RESERVED_PREFIX not in os.fsencode(path)):
            return original(path, *arguments, **keywords)
        removed += 1
        if step == "mkdir":
            original(path, *arguments, **keywords)
        for folder in ("a/b", "a"):
            with suppress(OSError):
                (tmp_path / folder).rmdir()
        return original(path, *arguments, **keywords) if step == "open" else None

    monkeypatch.setattr(os, step, interfere)
    write(files, "a/b/c", b"body", expected)
    assert removed == 20
    assert read(files, "a/b/c") == b"body"


def test_a_folder_that_never_stays_is_reported(tmp_path: Path) -> None:
    """A writer does not try for ever."""
    files = make_files(tmp_path)
    with (
        failing("open", 2, when=lambda *a: b".icechunk-tmp-" in os.fsencode(a[0])) as failed,
        pytest.raises(StorageUnavailableError, match="Find out who removes it"),
    ):
        write(files, "a/b", b"x")
    assert failed["open"] == 100


async def test_a_mixed_crowd_of_writers_and_removers_is_consistent(tmp_path: Path) -> None:
    """Creating and deleting the same few keys in the same folders ends with what was done last."""
    async with open_storage(tmp_path) as storage:

        async def work(number: int) -> None:
            key = f"{number % 3}/{number % 5}"
            try:
                await storage.put(key, b"%d" % number, if_version=ABSENT)
            except PreconditionFailedError:
                await storage.delete([key])

        await bounded_map(work, range(600), limit=64)
        keys = [getattr(entry, "key", "") async for entry in storage.list_prefix()]
        for key in keys:
            await storage.get(key)
        await storage.delete(keys)
    assert everything(tmp_path) == []


async def test_racing_handles_in_separate_threads_exclude_each_other(tmp_path: Path) -> None:
    """Two loops with a handle each exclude each other, as two processes do."""
    async with open_storage(tmp_path) as storage:
        await storage.put("number", b"0")

    async def count() -> None:
        async with open_storage(tmp_path) as storage:
            for _ in range(100):
                while True:
                    found = await storage.get("number")
                    body = b"%d" % (int(bytes(found.data)) + 1)
                    try:
                        await storage.put("number", body, if_version=found.version)
                        break
                    except PreconditionFailedError:
                        continue

    def run(_: int) -> None:
        asyncio.run(count())

    await bounded_map(lambda n: asyncio.to_thread(run, n), range(2), limit=2)
    assert (tmp_path / "number").read_bytes() == b"200"
