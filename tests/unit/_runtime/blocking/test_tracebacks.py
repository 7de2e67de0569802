"""Tracebacks of the errors of blocking code."""

from __future__ import annotations

import asyncio
import gc
import os
import tomllib
import traceback
import weakref
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from icechunk_async import errors
from icechunk_async._runtime.blocking import portal, tracebacks
from icechunk_async._runtime.blocking.iterators import AsyncCloseableIterator
from icechunk_async.sync import IcechunkError, RefNotFoundError, Repository, in_memory_storage
from icechunk_async.sync.errors import translated
from tests.programs import run_program

_BEGIN = """
import icechunk_async.sync as ic
repo = ic.Repository.create(ic.in_memory_storage())
"""
_REMOVED = """
import shutil
import icechunk_async.sync as ic
repo = ic.Repository.create("here")
shutil.rmtree("here")
"""
_WRITE = """
import zarr
with repo.transaction("main", message="mine") as store:
    zarr.open_group(store).attrs["a"] = 1
"""
_USERS_AND_ONE_CALL = 2
_LINES = 8
"""The first, the last, and at most three for each of two calls."""


def _stderr(place: Path, script: str, **environment: str) -> list[str]:
    script = dedent(script)
    (place / "script.py").write_text(script, encoding="utf-8")
    done = run_program(
        script, name="script.py", directory=place, environment={**os.environ, **environment}
    )
    assert done.returncode == 1
    assert not done.stdout
    return done.stderr.splitlines()


_MISTAKES = {
    "a branch": (
        _BEGIN + 'session = repo.readonly_session("mainly")',
        "icechunk_async.sync.RefNotFoundError: There is no branch 'mainly'. The repository has: ma",
    ),
    "a place": (
        'import icechunk_async.sync as ic\nic.Repository.open("nowhere")',
        "icechunk_async.sync.RepositoryNotFoundError: There is no Icechunk repository at",
    ),
    "an argument": (
        _BEGIN + 'repo.readonly_session("main", tag="v1")',
        "icechunk_async.sync.InvalidInputError: Must provide one of branch, tag, or snapshot_id.",
    ),
    "a time without a zone": (
        "from datetime import datetime" + _BEGIN + "repo.expire_snapshots(datetime(2026, 1, 1))",
        "icechunk_async.sync.InvalidInputError: older_than must be a datetime with a time zone",
    ),
    "a loop": (
        _BEGIN + 'for it in repo.ancestry(branch="mainly"):\n    pass',
        "icechunk_async.sync.RefNotFoundError: There is no branch 'mainly'.",
    ),
    "a property": (
        _REMOVED + "repo.status",
        "icechunk_async.sync.RepositoryNotFoundError: The repository at",
    ),
    "a property from memory": (
        _BEGIN + "repo.close()\nrepo.config",
        "icechunk_async.sync.StorageError: The repository was closed. Open it again.",
    ),
    "a block that cannot begin": (
        _BEGIN + 'with repo.transaction("mainly", message="x") as store:\n    pass',
        "icechunk_async.sync.RefNotFoundError: There is no branch 'mainly'.",
    ),
    "a mistake in a block": (
        _BEGIN + 'with repo.transaction("main", message="x") as store:\n    repo.lookup_tag("v1")',
        "icechunk_async.sync.RefNotFoundError: There is no tag 'v1'.",
    ),
    "a block that cannot commit": (
        _BEGIN
        + 'with repo.transaction("main", message="theirs") as other:'
        + _WRITE.replace("\n", "\n    ")
        + '\n    zarr.open_group(other).attrs["a"] = 2',
        "icechunk_async.sync.ConflictError: Branch 'main' was expected at snapshot",
    ),
}


@pytest.mark.parametrize("mistake", list(_MISTAKES))
def test_a_mistake_shows_the_users_line_and_one_sentence(tmp_path: Path, mistake: str) -> None:
    """And at most the call of the library, none of the event loop and of the error's causes."""
    script, sentence = _MISTAKES[mistake]
    lines = _stderr(tmp_path, script)
    assert lines[-1].startswith(sentence)
    assert lines[0].startswith("Traceback")
    assert len([line for line in lines if line.startswith("  File")]) <= _USERS_AND_ONE_CALL
    assert len(lines) <= _LINES
    assert not any("During handling" in line or "direct cause" in line for line in lines)
    assert 'script.py", line' in lines[1]


def test_the_environment_asks_for_everything(tmp_path: Path) -> None:
    """Frames of the engine, and the engine's error as the cause."""
    script, sentence = _MISTAKES["a branch"]
    lines = _stderr(tmp_path, script, ICECHUNK_ASYNC_FULL_TRACEBACK="1")
    text = "\n".join(lines)
    assert "direct cause" in text
    assert "icechunk_async.errors.BranchNotFoundError" in text
    assert "in find_branch" in text
    assert lines[-1].startswith(sentence)


def test_the_callers_own_error_stays_its_context(tmp_path: Path) -> None:
    """Of a call in a handler, as Python shows all errors."""
    script = """
    import icechunk_async.sync as ic
    repo = ic.Repository.create(ic.in_memory_storage())
    try:
        {}["mine"]
    except KeyError:
        repo.lookup_tag("v1")
    """
    lines = _stderr(tmp_path, script)
    assert "KeyError: 'mine'" in lines
    assert sum("During handling" in line for line in lines) == 1
    assert not any("icechunk_async/" in line for line in lines)


def test_an_error_in_a_transaction_block_is_the_callers(tmp_path: Path) -> None:
    """Python shows it as if there were no block."""
    script = _BEGIN + 'with repo.transaction("main", message="x") as store:\n    {}["mine"]\n'
    lines = _stderr(tmp_path, script)
    assert lines[-1] == "KeyError: 'mine'"
    assert next(line.strip() for line in lines if line.startswith("    ")) == '{}["mine"]'
    assert not any("icechunk_async" in line or "contextlib" in line for line in lines)


def test_zarrs_own_calls_show_one_sentence_and_no_engine(tmp_path: Path) -> None:
    """Zarr shows its own frames; of this library there is the store, and no twin."""
    script = """
    import pathlib, icechunk_async.sync as ic, zarr
    repo = ic.Repository.create("here")
    with repo.transaction("main", message="data") as store:
        zarr.create_array(store, name="a", shape=(1,), dtype="i4")[:] = 1
    for it in pathlib.Path("here/manifests").iterdir():
        it.write_bytes(b"damaged")
    store = ic.Repository.open("here").readonly_session("main").store
    array = zarr.open_array(store, path="a", mode="r")
    print_this_line = array[:]
    """
    lines = _stderr(tmp_path, script)
    assert "    print_this_line = array[:]" in lines
    last = max(n for n, line in enumerate(lines) if line.startswith("icechunk_async."))
    assert lines[last].startswith("icechunk_async.sync.FormatError: A manifest file is truncated")
    ours = [line for line in lines if line.startswith("  File") and "icechunk_async" in line]
    assert ours
    assert all("sync/store.py" in line for line in ours)
    assert not any("During handling" in line or "direct cause" in line for line in lines)


def _of(package: str, source: str, **names: object) -> dict[str, Any]:
    """Return the names that a module of a package defines."""
    found: dict[str, Any] = {"__name__": f"{package}.module", **names}
    exec(dedent(source), found)  # noqa: S102
    return found


_BREAK = """
async def items():
    yield 1
    with translated():
        raise error
"""


@pytest.mark.parametrize("taken", [0, 1])
def test_a_loop_that_breaks_later_shows_the_loop(taken: int) -> None:
    """Whether the error came with the first items or was kept until they were used."""
    error = errors.FormatError("It is damaged.")
    module = _of("icechunk_async", _BREAK, translated=translated, error=error)
    items: AsyncCloseableIterator[int] = AsyncCloseableIterator(module["items"]())
    items._batch = 1 + taken  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(IcechunkError) as caught:
        for _ in items:
            pass
    assert len(_files(caught.value)) == 1
    assert caught.value.__cause__ is None


_THROW = """
def throw(error, reason):
    raise error from reason
"""
_CALL = """
async def call():
    with translated():
        try:
            try:
                network(OSError("of the network"), None)
            except OSError as first:
                client(reason, first)
        except type(reason) as second:
            backend(error, second)
"""


def _translated_from(error: BaseException, *, package: str, reason: Exception) -> BaseException:
    """Return the facade's error for one that a backend raised from its client's."""
    places = {"network": "aiohttp", "client": "aiobotocore", "backend": package}
    throwing = {name: _of(it, _THROW)["throw"] for name, it in places.items()}
    call = _of(
        "icechunk_async", _CALL, translated=translated, reason=reason, error=error, **throwing
    )
    with pytest.raises(type(error)) as caught:
        portal.run(call["call"]())
    return caught.value


@pytest.mark.parametrize("package", ["icechunk_async", "icechunk_async_s3"])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (errors.PermissionDeniedError("No credentials. Look at the cause."), "Profile is empty."),
        (errors.UnreachableError("No connection."), "The proxy refuses."),
        (errors.MissingDriverError("Install it."), "libssl.so.3 cannot be opened"),
    ],
)
def test_what_the_client_says_stays_the_cause_in_one_line(
    error: errors.IcechunkError, text: str, package: str
) -> None:
    """Without its frames and its own causes: 100 lines, and references to what they hold."""
    reason = RuntimeError(text)
    found = _translated_from(error, package=package, reason=reason)
    assert found.__cause__ is reason
    assert reason.__traceback__ is None
    assert reason.__cause__ is None
    assert reason.__context__ is None
    shown = "".join(traceback.format_exception(found)).splitlines()
    assert shown[0] == f"RuntimeError: {text}"
    assert not any("aiobotocore" in line or "aiohttp" in line for line in shown)


@pytest.mark.parametrize(
    "error",
    [
        errors.UnreachableError("No connection (the proxy refuses). Check the network."),
        errors.BucketNotFoundError("The server answered 404 (the proxy refuses)."),
        errors.InvalidURLError("The URL has no bucket."),
        errors.FormatError("A file is truncated."),
    ],
)
def test_a_cause_that_says_nothing_more_is_left_out(error: errors.IcechunkError) -> None:
    """The sentence quotes it, or is complete without it."""
    found = _translated_from(
        error, package="icechunk_async_s3", reason=ValueError("the proxy refuses")
    )
    assert found.__cause__ is None
    assert len("".join(traceback.format_exception(found)).splitlines()) < _LINES


@pytest.mark.parametrize("package", ["mine", "icechunk_async_mine"])
def test_a_storage_of_the_caller_is_shown(package: str) -> None:
    """An error that the caller's own backend raised keeps its frames, whatever it is called."""
    found = _translated_from(
        errors.StorageFullError("It is full."), package=package, reason=ValueError("disk")
    )
    assert isinstance(found.__cause__, errors.StorageFullError)
    assert "throw" in _files(found.__cause__)


def test_every_package_of_the_distribution_is_left_out() -> None:
    """Those that the wheel brings, and no others."""
    text = (Path(__file__).parents[4] / "pyproject.toml").read_text(encoding="utf-8")
    wheel = tomllib.loads(text)["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {Path(it).name for it in wheel["packages"]} == tracebacks._OURS  # pyright: ignore[reportPrivateUsage]


def test_every_package_that_storages_need_is_left_out() -> None:
    """Those that come with the library, and with the extras of its backends and for telemetry."""
    text = (Path(__file__).parents[4] / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"]
    chosen = ("s3", "gcs", "azure", "http", "obstore", "fsspec", "telemetry")
    needed = [*project["dependencies"], *(it for name in chosen for it in extras[name])]
    named = {
        "google-crc32c": "google",
        "opentelemetry-api": "opentelemetry",
        "pyyaml": "yaml",
        "typing-extensions": "typing_extensions",
    }
    packages = {it.partition(">=")[0] for it in needed}
    assert {named.get(it, it) for it in packages} <= tracebacks._LIBRARIES  # pyright: ignore[reportPrivateUsage]


def _callers_function() -> None:
    raise KeyError("of the caller")


async def _refuse_for_the_caller() -> None:
    with translated():
        try:
            _callers_function()
        except KeyError as error:
            raise errors.InvalidInputError("It failed.") from error


def _files(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_the_callers_function_that_failed_is_shown() -> None:
    """A hook or a refresh of credentials: its error is the cause, with its own lines."""
    with pytest.raises(IcechunkError) as caught:
        portal.run(_refuse_for_the_caller())
    reason = caught.value.__cause__
    while reason is not None and not isinstance(reason, KeyError):
        reason = reason.__cause__
    assert reason is not None
    assert "_callers_function" in _files(reason)


async def _fail_unexpectedly() -> None:
    with translated():
        raise errors.StorageError("It failed in an unusual way.") from OSError("of the storage")


async def _fail_by_mistake() -> None:
    raise AssertionError("a mistake of this library")


def test_unexpected_errors_keep_everything() -> None:
    """A plain `StorageError` says to look at its cause; other errors are nobody's sentence."""
    with pytest.raises(errors.StorageError) as caught:
        portal.run(_fail_unexpectedly())
    assert isinstance(caught.value.__cause__, errors.StorageError)
    assert isinstance(caught.value.__cause__.__cause__, OSError)
    assert "_fail_unexpectedly" in _files(caught.value)
    with pytest.raises(AssertionError) as other:
        portal.run(_fail_by_mistake())
    assert "result" in _files(other.value)


def test_awaited_twins_show_the_same() -> None:
    """The frames are those of the test and of the event loop that it runs."""
    repository = Repository.create(in_memory_storage())

    async def ask() -> None:
        await repository.lookup_branch_async("mainly")

    with pytest.raises(RefNotFoundError) as caught:
        asyncio.run(ask())
    assert _files(caught.value)[-1] == "ask"
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def _refused(repository: Repository) -> weakref.ref[RefNotFoundError]:
    try:
        repository.lookup_branch("mainly")
    except RefNotFoundError as error:
        return weakref.ref(error)
    raise AssertionError


def test_an_error_is_freed_without_the_garbage_collector() -> None:
    """It holds no frame that holds it: what the frames hold, such as arrays, goes with it."""
    repository = Repository.create(in_memory_storage())
    gc.collect()
    gc.disable()
    try:
        seen = _refused(repository)
        for _ in range(3):  # the loop forgets the call that failed
            repository.list_branches()
        assert seen() is None
    finally:
        gc.enable()
