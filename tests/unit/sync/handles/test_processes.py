"""Interpreters that exit, fork, are interrupted and hand work to others; each in a process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import pytest

from tests.programs import run_program

if TYPE_CHECKING:
    from pathlib import Path

_BEGIN = """
import asyncio, atexit, os, pickle, signal, sys, threading, time
import icechunk_async.sync as icechunk
import zarr
from icechunk_async._runtime.blocking import portal
portal._EXIT_SECONDS = 100.0  # a busy machine may take some of the usual 5
repository = icechunk.Repository.create({place!r})
with repository.transaction("main", message="data") as store:
    array = zarr.create_array(store, name="a", shape=(4,), chunks=(2,), dtype="i4")
    array[:] = 7
"""


_WARNINGS = ("-W", "error", "-W", "ignore:A session on branch:ResourceWarning")
"""These programs end in the middle of their work."""


def _run(text: str, place: str = "", *, code: int = 0, fresh: bool = False) -> str:
    """Return the output of a script, which must exit quickly and print nothing on stderr.

    A ``fresh`` one runs in an interpreter that has imported nothing.
    """
    begin = _BEGIN.format(place=place) if place else ""
    end = "\nprint('end', time.monotonic(), flush=True)" if place and not code else ""
    script = begin + textwrap.dedent(text) + end
    # That of the official engine, which its tests set, is understood here, and loads logging.
    environment = {name: it for name, it in os.environ.items() if name != "ICECHUNK_LOG"}
    if fresh:
        done = subprocess.run(
            [sys.executable, *_WARNINGS, "-c", script],
            capture_output=True,
            encoding="utf-8",
            env=environment,
            timeout=240,
            check=False,
        )
    else:
        done = run_program(script, environment=environment, flags=_WARNINGS)
    exited = time.monotonic()
    assert (done.stderr, done.returncode) == ("", code)
    if not end:
        return done.stdout
    printed, _, rest = done.stdout.partition("end ")
    ended, _, after = rest.partition("\n")
    assert exited - float(ended) < 50  # else something was waited for that did not come
    return printed + after


@pytest.fixture
def place(tmp_path: Path) -> str:
    """Where a script keeps its repository."""
    return str(tmp_path / "repository")


def test_importing_is_quick() -> None:
    """Neither zarr nor NumPy is loaded before they are needed."""
    script = """
    import sys
    import icechunk_async.sync as icechunk
    assert not {"zarr", "numpy", "asyncio", "icechunk_async.storage"} & set(sys.modules)
    icechunk.Repository
    assert "zarr" not in sys.modules
    """
    _run(script, fresh=True)


def test_programs_import_numpy_with_the_repository() -> None:
    """And not at the first session, on their event loop; the command, which needs none, never."""
    script = """
    import sys
    from icechunk_async.repository import Repository
    assert "numpy" not in sys.modules
    from icechunk_async import Repository
    assert "numpy" in sys.modules
    """
    _run(script, fresh=True)


@pytest.mark.parametrize(
    ("package", "most"), [("icechunk_async", 78), ("icechunk_async.sync", 116)]
)
def test_importing_the_repository_brings_what_every_program_needs(package: str, most: int) -> None:
    """The modules of upkeep, inspection, credentials and storage trials are imported on use."""
    script = f"""
    import sys
    from {package} import Repository
    ours = {{it for it in sys.modules if it.startswith("icechunk_async")}}
    unasked = {{
        *("credentials.azure", "credentials.gcs", "credentials.s3", "credentials.web"),
        *("engine.upkeep.check", "engine.upkeep.collect", "engine.upkeep.compact"),
        *("engine.upkeep.inspect", "engine.upkeep.migration.upgrade", "engine.upkeep.rewrite"),
        *("engine.upkeep.statistics", "storage.probe", "sync.ops", "zarr.store"),
    }}
    assert not {{f"icechunk_async.{{it}}" for it in unasked}} & ours
    assert not {{"aiobotocore", "aiohttp", "fsspec", "rich", "xarray"}} & set(sys.modules)
    assert len(ours) <= {most}, len(ours)
    """
    _run(script, fresh=True)


def test_reading_a_first_chunk_imports_only_what_reads(place: str) -> None:
    """Where no bytecode is kept, as in many containers, each module is compiled before it.

    Nor AnyIO's half for asyncio, nor the page of entities that ``html`` brings.
    """
    _run(_BEGIN.format(place=place), fresh=True)
    script = f"""
    import sys, zarr
    before = set(sys.modules)
    import icechunk_async.sync as icechunk
    repository = icechunk.Repository.open({place!r})
    session = repository.readonly_session("main")
    assert zarr.open_array(session.store, path="a", mode="r")[0] == 7
    repr(session)
    rooms = ("icechunk_async.engine.leases", "icechunk_async.engine.commit.", "anyio._backends")
    found = {{it for it in sys.modules if it.startswith(rooms)}}
    assert not found - {{"icechunk_async.engine.commit.turns"}}, found
    unasked = {{
        *("engine.history.graph", "engine.history.ref_files.history", "engine.tree.listing"),
        *("engine.virtual.sources", "format.config.codec", "format.flatbuffers.reading"),
        *("format.flatbuffers.writing", "format.json.flexbuffers", "format.manifest.reading"),
        *("format.manifest.refs", "format.manifest.seekable.reading", "format.manifest.writing"),
        *("format.transaction_log", "format.zarr_document", "storage.policies.cache"),
        *("storage.policies.coalesce", "storage.policies.hedge", "storage.policies.observe"),
        *("storage.policies.retry", "format.flatbuffers.splicing", "format.snapshot.layout"),
        *("sync.credentials", "zarr.listing", "zarr.virtual.references"),
    }}
    new = set(sys.modules) - before
    assert not {{"html", *(f"icechunk_async.{{it}}" for it in unasked)}} & new
    ours = {{it for it in sys.modules if it.startswith("icechunk_async")}}
    assert len(ours) <= 147, len(ours)
    """
    _run(script, fresh=True)


@pytest.mark.parametrize("end", ["", "sys.exit(3)"])
def test_the_interpreter_exits_with_repositories_open(place: str, end: str) -> None:
    """And with sessions, stores and arrays that refer to them."""
    script = f"""
    session = repository.readonly_session("main")
    print(session.branch, zarr.open_array(session.store, path="a", mode="r")[0])
    {end}
    """
    assert _run(script, place, code=3 if end else 0) == "None 7\n"


def test_the_interpreter_exits_after_the_repository_was_removed(place: str) -> None:
    """With writes that were not committed: nothing is left that could be made durable."""
    script = f"""
    import shutil
    import numpy as np
    repository.close()
    again = icechunk.Repository.open(icechunk.local_filesystem_storage({place!r}))
    session = again.writable_session("main")
    zarr.create_array(session.store, name="b", data=np.arange(9000), chunks=(1000,))
    shutil.rmtree(os.path.dirname({place!r}))
    """
    assert _run(script, place) == ""


def test_the_interpreter_exits_in_the_middle_of_iterations(place: str) -> None:
    """That nobody closed."""
    script = """
    for number in range(9):
        with repository.transaction("main", message=str(number)) as store:
            zarr.open_array(store, path="a")[0] = number
    history = repository.ancestry(branch="main")
    print(next(history).message)
    keys = repository.readonly_session("main").store.list()
    print(next(keys))
    """
    assert _run(script, place) == "8\nzarr.json\n"


def test_the_interpreter_exits_while_daemon_threads_wait_for_answers(place: str) -> None:
    """The work that they wait for is cancelled."""
    script = """
    from icechunk_async._runtime.blocking import portal
    began = threading.Event()

    async def forever():
        began.set()
        await asyncio.Event().wait()

    def work():
        while True:
            repository.list_branches()

    def wait():
        portal.run(forever())

    threading.excepthook = lambda *_: None
    for target in (work, wait):
        threading.Thread(target=target, daemon=True).start()
    began.wait()
    """
    assert _run(script, place) == ""


def test_a_call_after_the_end_is_refused(place: str) -> None:
    """With a sentence, and without a new thread."""
    script = """
    from icechunk_async._runtime.blocking import portal

    def late():
        try:
            repository.list_branches()
        except RuntimeError as error:
            print(error)

    # Exit handlers run last in, first out: this one after the portal's.
    atexit.unregister(portal._stop)
    atexit.register(late)
    atexit.register(portal._stop)
    """
    assert _run(script, place).startswith("The interpreter is exiting")


def test_an_interrupt_cancels_the_call_and_the_session_stays_usable(place: str) -> None:
    """Ctrl-C in the middle of a commit loses nothing."""
    script = """
    from icechunk_async.engine.commit.publisher import Publisher
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="a")[0] = 9
    entered = threading.Event()

    async def slow(*args, **kwargs):
        entered.set()
        await asyncio.sleep(60)

    publish, Publisher._publish = Publisher._publish, slow
    interrupting = threading.Thread(
        target=lambda: (entered.wait(), os.kill(os.getpid(), signal.SIGINT))
    )
    interrupting.start()
    began = time.monotonic()
    try:
        session.commit("interrupted")
    except KeyboardInterrupt:
        print("interrupted", time.monotonic() - began < 50)
    interrupting.join()
    Publisher._publish = publish
    print(session.commit("finished") == repository.lookup_branch("main"))
    print([info.message for info in repository.ancestry(branch="main")])
    """
    assert _run(script, place) == (
        "interrupted True\nTrue\n['finished', 'data', 'Repository initialized']\n"
    )


def test_an_interrupted_opening_leaves_nothing_open(place: str) -> None:
    """Its connections close although nobody got the repository."""
    script = """
    from icechunk_async import handles
    from icechunk_async.engine.history import opening
    entered = threading.Event()
    find = opening.find

    async def slow(storage):
        entered.set()
        await asyncio.sleep(60)

    before = len(handles._all_open)
    opening.find = slow
    threading.Thread(target=lambda: (entered.wait(), os.kill(os.getpid(), signal.SIGINT))).start()
    try:
        icechunk.Repository.open(sys.argv[0] or ".")
    except KeyboardInterrupt:
        print("interrupted", len(handles._all_open) == before)
    opening.find = find
    """
    assert _run(script, place) == "interrupted True\n"


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_a_forked_child_uses_what_its_parent_opened(kind: str, place: str) -> None:
    """The child has its own loop and connections, even if threads of the parent are at work."""
    script = """
    session = repository.readonly_session("main")
    store, writing = session.store, repository.writable_session("main")
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            repository.list_branches()

    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    import warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads, as tools do
    codes = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            try:
                assert repository.list_branches() == {"main"}
                assert zarr.open_array(store, path="a", mode="r")[0] == 7
                with repository.transaction("main", message="child") as mine:
                    zarr.open_array(mine, path="a")[1] = 1
                os._exit(0)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    stop.set()
    for thread in threads:
        thread.join()
    print(codes, zarr.open_array(store, path="a", mode="r")[0])
    """
    place = place if kind == "local" else "memory://mine"
    assert _run(script, place) == "[0, 0, 0] 7\n"


def test_a_fork_waits_for_the_step_of_the_loop_that_is_under_way(
    place: str, tmp_path: Path
) -> None:
    """A child would wait for ever for a lock that the loop holds, such as that of an import."""
    # It ends as soon as the main thread waits for it, on its way to fork.
    slowly = """
    import builtins, sys, threading, time, traceback
    builtins.began.set()
    forking = threading.main_thread().ident
    while True:
        stack = traceback.extract_stack(sys._current_frames()[forking])
        if {"hold", "wait"} <= {frame.name for frame in stack}:
            break
        time.sleep(0.01)
    """
    (tmp_path / "imported_slowly.py").write_text(textwrap.dedent(slowly), encoding="utf-8")
    script = f"""
    import builtins
    import warnings
    from icechunk_async._runtime.blocking import portal
    warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads, as tools do
    sys.path.insert(0, {str(tmp_path)!r})
    builtins.began = threading.Event()
    portal._FORK_SECONDS = 200  # a busy machine may need more than the five seconds

    async def step():
        import imported_slowly

    thread = threading.Thread(target=portal.run, args=(step(),))
    thread.start()
    began.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        import imported_slowly
        portal.run(step())
        os._exit(repository.list_branches() != {{"main"}})
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    thread.join()
    print(repository.list_branches())
    """
    assert _run(script, place) == "0\n{'main'}\n"


def test_a_forked_child_writes_a_fork_through_its_own_connections(place: str) -> None:
    """Nothing that the parent opened is used; the changes come back as usual, and are committed."""
    script = """
    import pickle
    session = repository.writable_session("main")
    root = zarr.open_group(session.store)
    fork = session.fork()
    zarr.open_array(fork.store, path="a")[0] = 11
    parents = fork.handle.now().workspace.assets.storage
    answers, answering = os.pipe()
    if os.fork() == 0:
        try:
            zarr.open_array(fork.store, path="a")[1] = 12
            own = fork.handle.now().workspace.assets.storage
            assert own is not parents
            assert own is repository.handle.now().engine.storage
            os.write(answering, pickle.dumps(fork))
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    os.close(answering)
    assert fork.handle.now().workspace.assets.storage is parents
    with open(answers, "rb") as reading:
        session.merge(pickle.load(reading))
    session.commit("of the child")
    print(zarr.open_array(repository.readonly_session("main").store, path="a")[:3].tolist())
    """
    assert _run(script, place) == "[11, 12, 7]\n"


def test_a_forked_child_cannot_use_a_writable_session(place: str) -> None:
    """Parent and child would both commit its changes."""
    script = """
    session = repository.writable_session("main")
    store = session.store
    for use in (lambda: session.commit("x"), lambda: zarr.open_array(store, path="a")[0]):
        child = os.fork()
        if child == 0:
            try:
                use()
                os._exit(1)
            except icechunk.IcechunkError as error:
                os._exit(0 if "Session.fork()" in str(error) else 2)
            except BaseException:
                os._exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(session.commit("here", allow_empty=True) is not None)
    """
    assert _run(script, place) == "0\n0\nTrue\n"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_process_pools_are_given_stores_and_repositories(
    method: str, place: str, tmp_path: Path
) -> None:
    """They are opened where they are used; what is written there is seen here."""
    module = tmp_path / "pooled.py"
    module.write_text(
        textwrap.dedent(
            """
            import zarr

            def read(store):
                return int(zarr.open_array(store, path="a", mode="r")[:].sum())

            def write(repository, number):
                with repository.transaction("main", message=f"by {number}") as store:
                    zarr.open_array(store, path="a")[number] = number
                return repository.spec_version.value
            """
        ),
        encoding="utf-8",
    )
    script = f"""
    import multiprocessing, warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads, as tools do
    sys.path.insert(0, {str(tmp_path)!r})
    import pooled
    if __name__ == "__main__":
        session = repository.readonly_session("main")
        with multiprocessing.get_context({method!r}).Pool(2) as pool:
            print(pool.map(pooled.read, [session.store] * 4))
            print(pool.apply(pooled.write, (repository, 0)))
            pool.close()
            pool.join()
        print(zarr.open_array(repository.readonly_session("main").store, path="a", mode="r")[:])
    """
    found = _run(script, place, fresh=method == "spawn")
    assert found == "[28, 28, 28, 28]\n2\n[0 7 7 7]\n"
