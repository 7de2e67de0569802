"""The command as a process: pipes, signals, colours, the time that it takes to start."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Sample

COMMAND = [sys.executable, "-m", "icechunk_async.cli"]

HELP_AND_MODULES = """
import sys
from icechunk_async.cli import main
for command in ([], ["log"], ["demo"], ["branch", "list"]):
    sys.argv = ["icechunk-async", *command, "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (command, end.code)
heavy = {"zarr", "numpy", "xarray", "matplotlib", "h5py", "yaml", "msgpack"}
print("heavy:", sorted(heavy & set(sys.modules)), file=sys.stderr)
"""

HANG = """
import asyncio, sys
from icechunk_async import Repository
from icechunk_async.cli import main

async def hang(*_arguments, **_options):
    print("ready", flush=True)
    await asyncio.sleep(60)
    yield

Repository.ancestry = hang
sys.argv = ["icechunk-async", "log", sys.argv[1]]
main()
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a process to its end."""
    return subprocess.run(
        arguments,
        capture_output=True,
        encoding="utf-8",
        timeout=240,
        check=False,
        env={**os.environ, **environment},
    )


def test_help_imports_nothing_heavy() -> None:
    """Of all and of single commands: neither zarr, NumPy nor plotting libraries."""
    finished = run(sys.executable, "-c", HELP_AND_MODULES)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == "heavy: []\n"


def test_an_interrupt_ends_quietly(sample: Sample) -> None:
    """Ctrl-C: exit code 130, no traceback."""
    with subprocess.Popen(
        [sys.executable, "-c", HANG, str(sample.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=240)
    assert (process.returncode, stderr) == (130, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["log", "{sample}"],
        ["log", "{sample}", "--json"],
        ["cat", "{sample}", "deep/large/c/0"],
        ["--help"],
        ["--version"],
    ],
)
def test_a_broken_pipe_is_no_error(sample: Sample, arguments: list[str]) -> None:
    """The reader may stop reading, as ``head`` does."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        finished = subprocess.run(
            [*COMMAND, *(it.format(sample=sample.path) for it in arguments)],
            stdout=writing,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            timeout=240,
            check=False,
        )
    finally:
        os.close(writing)
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize(
    "arguments",
    [
        ["log", "{sample}"],
        ["log", "{sample}", "--json"],
        ["--help"],
        ["log", "--help"],
        ["--version"],
        ["--show-completion", "bash"],
    ],
)
def test_output_that_cannot_be_written_is_one_sentence(
    sample: Sample, arguments: list[str]
) -> None:
    """A disk that is full: neither a traceback nor a success."""
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        finished = subprocess.run(
            [*COMMAND, *(it.format(sample=sample.path) for it in arguments)],
            stdout=full,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            timeout=240,
            check=False,
        )
    assert finished.returncode == 1
    assert re.fullmatch(r"Error: .*No space left.* --debug .*\.\n", finished.stderr)


def test_work_without_a_standard_output_is_done(sample: Sample) -> None:
    """A service may start the command with its output closed."""
    for arguments in (["--version"], ["log", str(sample.path)]):
        finished = run("sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, *arguments)
        assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- >&- 2>&-"])
def test_work_without_standard_streams_is_done(sample: Sample, tmp_path: Path, closed: str) -> None:
    """Also by a command that would ask, warn and show its progress on a terminal."""
    path = shutil.copytree(sample.path, tmp_path / "copy")
    arguments = ["gc", str(path), "--older-than", "0m"]
    finished = run("sh", "-c", f'exec "$@" {closed}', "sh", *COMMAND, *arguments)
    assert finished.returncode == 0, finished.stderr
    assert "Traceback" not in finished.stderr


def test_output_to_a_pipe_has_whole_lines_and_no_colours(sample: Sample) -> None:
    """However narrow a terminal would be, ids and messages are not folded."""
    finished = run(*COMMAND, "log", str(sample.path))
    assert "\x1b" not in finished.stdout
    assert len(finished.stdout.splitlines()) == 4


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_can_be_switched_off(
    sample: Sample,
    environment: dict[str, str],
    coloured: bool,  # noqa: FBT001
) -> None:
    """NO_COLOR counts, also where colours are forced."""
    finished = run(*COMMAND, "log", str(sample.path), FORCE_COLOR="1", **environment)
    assert ("\x1b[33m" in finished.stdout) is coloured
