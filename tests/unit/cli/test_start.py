"""The modules that a command imports before it does anything."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import typer
from typer.main import get_group

from icechunk_async.cli.app import LISTED

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Sample

SCRIPT = """
import os
import sys
from icechunk_async.cli import main
sys.argv = ["icechunk-async", *{arguments!r}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(*sys.modules, os.environ.get("OPENBLAS_NUM_THREADS"), file=sys.stderr)
"""


@cache
def modules(*arguments: str) -> frozenset[str]:
    """Return the modules of a process when a command is done, and its threads for matrices.

    The same command starts once for all tests.
    """
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(arguments=arguments)],
        capture_output=True,
        # Without the width of a terminal, which readline adds behind Python's back: pytest uses it.
        # Nor with the threads that Dask's workers of other tests ask for.
        env={name: it for name, it in os.environ.items() if name != "OPENBLAS_NUM_THREADS"},
        encoding="utf-8",
        timeout=240,
        check=True,
    )
    assert done.stdout
    return frozenset(done.stderr.split())


def test_the_version_needs_nearly_nothing() -> None:
    """Neither the parser of arguments, nor what prints tables, nor asyncio."""
    found = modules("--version")
    assert not found & {"typer", "rich", "pydantic", "asyncio", "numpy", "zarr"}
    ours = {it for it in found if it.startswith("icechunk_async")}
    assert ours == {"icechunk_async", "icechunk_async._version", "icechunk_async.cli"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("log", "{}"),
        ("log", "{}", "--limit", "1", "--json"),
        ("branch", "list", "{}"),
        ("tag", "list", "{}"),
        ("show", "{}", "v1"),
        ("diff", "{}", "v1", "main"),
    ],
)
def test_history_needs_no_library_of_arrays(sample: Sample, arguments: tuple[str, ...]) -> None:
    """Nor YAML, which format version 1 alone has, nor the modules of other commands."""
    found = modules(*(it.format(sample.path) for it in arguments))
    assert "1" in found
    unasked = {"zarr", "numcodecs", "xarray", "yaml", "h5py", "aiohttp", "fsspec", "rich.progress"}
    assert not found & unasked
    commands = {it for it in found if it.startswith("icechunk_async.cli.commands.")}
    rooms = {"data", "operate", "versions"}
    own = {"branch": {"refs"}, "tag": {"refs"}, "log": {"log"}}.get(
        arguments[0], {"history", "log"}
    )
    assert {it.split(".")[-1] for it in commands} - rooms == own


@pytest.mark.parametrize(
    "command", [("log",), ("branch", "list"), ("tag", "list"), ("status",), ("ops",)]
)
def test_refs_history_and_status_need_no_numpy(sample: Sample, command: tuple[str, ...]) -> None:
    """Their files are small and read table by table; nor what reads or writes columns."""
    found = modules(*command, str(sample.path))
    columns = ("buffer", "reading", "splicing", "writing")
    assert not found & {f"icechunk_async.format.flatbuffers.{it}" for it in columns}
    assert not found & {"numpy", "flatbuffers", "msgpack"}


@pytest.mark.parametrize("command", [("log",), ("branch", "list"), ("tag", "list")])
def test_arguments_that_are_text_need_no_pydantic(sample: Sample, command: tuple[str, ...]) -> None:
    """Typer would import it to convert text to text. Nor is OpenTelemetry, which nobody set up."""
    found = modules(*command, str(sample.path))
    assert not found & {"pydantic", "pydantic_core", "opentelemetry"}


OFTEN = pytest.mark.parametrize(
    "command", [("log",), ("branch", "list"), ("tag", "list"), ("status",)]
)


@OFTEN
def test_tables_in_pipes_need_no_rich(sample: Sample, command: tuple[str, ...]) -> None:
    """Where all letters are one column wide; a terminal gets colours and folded lines from it."""
    assert "rich" not in modules(*command, str(sample.path))


@OFTEN
def test_opening_a_path_looks_for_no_entry_points(sample: Sample, command: tuple[str, ...]) -> None:
    """The backend for files comes with the library; to look for others imports a mail reader."""
    assert not {"importlib.metadata", "email", "csv"} & modules(*command, str(sample.path))


@pytest.mark.parametrize("command", [("log",), ("branch", "list"), ("tag", "list"), ("ops",)])
def test_json_needs_no_rich(sample: Sample, command: tuple[str, ...]) -> None:
    """Rich is imported when something is printed for people."""
    assert "rich" not in modules(*command, str(sample.path), "--json")


@pytest.mark.parametrize(
    ("command", "most"), [(("log",), 109), (("branch", "list"), 108), (("tag", "list"), 108)]
)
def test_refs_and_history_need_no_sessions(
    sample: Sample, command: tuple[str, ...], most: int
) -> None:
    """Nor snapshots, manifests, leases or what commits; the number of all modules is bounded."""
    ours = {it for it in modules(*command, str(sample.path)) if it.startswith("icechunk_async")}
    rooms = (
        *("session", "engine.leases", "engine.changes", "engine.commit.publisher"),
        *("format.manifest", "format.snapshot", "format.transaction_log"),
    )
    assert not {it for it in ours if it.startswith(tuple(f"icechunk_async.{it}" for it in rooms))}
    assert len(ours) <= most, len(ours)


@OFTEN
def test_nothing_is_imported_that_is_not_asked_for(
    sample: Sample, command: tuple[str, ...]
) -> None:
    """Each took some hundredths of the start.

    AnyIO's half for asyncio serves tasks that wait at the same time, OpenSSL's hashes and random
    numbers serve the cache on disk, aiofiles calls that are slow, and hints failures.
    """
    found = modules(*command, str(sample.path))
    assert not found & {"anyio._backends._asyncio", "hashlib", "random", "secrets", "aiofiles"}
    assert not found & {"icechunk_async.cli.hints", "icechunk_async.storage.policies.disk_cache"}


@OFTEN
def test_few_classes_are_compiled(sample: Sample, command: tuple[str, ...]) -> None:
    """Ours are made when they are used; those of Typer, AnyIO and backends remain."""
    counted = """
import dataclasses
process = dataclasses._process_class
def counted(cls, *arguments, **named):
    print("compiled", cls.__module__)
    return process(cls, *arguments, **named)
dataclasses._process_class = counted
"""
    script = counted + SCRIPT.format(arguments=(*command, str(sample.path)))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, encoding="utf-8", check=True
    )
    found = [it.split()[1] for it in done.stdout.splitlines() if it.startswith("compiled ")]
    # One field is made there, after which those of ours are copied.
    ours = [it for it in found if it.startswith("icechunk_async.")]
    assert set(ours) <= {"icechunk_async._runtime.dataclasses"}
    assert len(ours) <= 1
    assert 0 < len(found) <= 36, found


def test_programs_of_the_user_keep_their_threads() -> None:
    """Commands that may start some leave the environment alone; what the user says counts."""
    assert "None" in modules("propose", "--help")


def test_listed_commands_are_those_that_modules_register() -> None:
    """A command that is not listed would not be found."""
    for module in set(LISTED.values()):
        part = typer.Typer()
        import_module(f"icechunk_async.cli.{module}").register(part)
        registered = set(get_group(part).commands)
        assert registered == {name for name, where in LISTED.items() if where == module}
