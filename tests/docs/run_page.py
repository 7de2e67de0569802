"""Runs the blocks of Markdown pages in order, as a reader would; a page ends at the first failure.

Python blocks share one namespace and may await at the top level. Shell blocks run in the same
directory. What pages begin with, a fresh interpreter that imports NumPy and Zarr, is made once:
each page is a fork of a process that has imported them, and so is each command ``icechunk-async``
but those of the README, which people try first. Pages about Spark share an interpreter instead, in
which its JVM starts once.

``python run_page.py PAGE`` runs one page, ``python run_page.py`` those that `test_pages` asks for,
and ``python run_page.py --here`` does so without forks.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType

REPOSITORY = Path(__file__).parents[2]
# The tools that set up and check the project give warnings that do not concern its code.
_STRICT = {"PYTHONWARNINGS", "PYTHONWARNDEFAULTENCODING"}
_LENIENT = {name: value for name, value in os.environ.items() if name not in _STRICT}
_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
"""Those in tabs are indented."""
_TOP_LEVEL_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """Return line number, language and text of each block of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start()) + 1, match[2], dedent(match[3]))
        for match in _BLOCK.finditer(text)
    ]


def run(page: Path) -> None:
    """Run all blocks of a page; what it keeps below `/tmp/example` is in the working directory."""
    example = str(Path("example").absolute())
    namespace: dict[str, object] = {"__name__": "__main__"}
    with _commands(page) as command, asyncio.Runner() as runner:
        for line, language, text in blocks(page):
            print(f"--- {page.name}:{line} ({language})", flush=True)  # noqa: T201
            # A page names a fixed place so that it reads well. Two runs must not share it.
            text = text.replace("/tmp/example", example)  # noqa: PLW2901, S108
            match language:
                case "python":
                    # Line numbers of errors are those of the page.
                    padded = "\n" * line + text
                    code = compile(padded, str(page), "exec", flags=_TOP_LEVEL_AWAIT)
                    _execute(code, namespace, runner)
                case "sh":
                    for shell_line in text.splitlines():
                        _shell(shell_line, command)
                case "toml":
                    tomllib.loads(text)
                case "json":
                    json.loads(text)
                case _:
                    raise AssertionError(f"{page.name}:{line}: no way to run {language!r} blocks")


class _Command:
    """``icechunk-async``: forks of a process that is ready, or processes."""

    def __init__(self, requests: int | None, replies: int | None) -> None:
        self._requests = requests
        self._replies = replies

    def run(self, arguments: list[str]) -> None:
        """Run it to its end.

        Raises:
            subprocess.CalledProcessError: its exit code is not 0.
        """
        if self._requests is None or self._replies is None:
            program = Path(sys.executable).with_name("icechunk-async")
            subprocess.run([str(program), *arguments], check=True)
            return
        request = json.dumps([arguments, str(Path.cwd()), dict(os.environ)])
        os.write(self._requests, f"{request}\n".encode())
        code = os.read(self._replies, 1)[0]
        if code:
            raise subprocess.CalledProcessError(code, ["icechunk-async", *arguments])


@contextmanager
def _commands(page: Path) -> Iterator[_Command]:
    """Fork a process that waits for commands, before there are threads; if the page has any."""
    texts = [text for _, language, text in blocks(page) if language == "sh"]
    has_commands = re.search(r"^icechunk-async", "".join(texts), re.MULTILINE)
    if page.name == "README.md" or "icechunk_async.cli.app" not in sys.modules or not has_commands:
        yield _Command(None, None)
        return
    there, requests = os.pipe()
    replies, back = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(requests)
        with os.fdopen(there, encoding="utf-8") as lines:
            for line in lines:
                os.write(back, bytes([_in_fork(_command, *json.loads(line))]))
        os._exit(0)
    os.close(there)
    os.close(back)
    try:
        yield _Command(requests, replies)
    finally:
        os.close(requests)
        os.close(replies)
        os.waitpid(pid, 0)


def _command(arguments: list[str], directory: str, environment: dict[str, str]) -> None:
    from icechunk_async.cli import main

    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["icechunk-async", *arguments]
    main()


def _in_fork(work: Callable[..., None], *arguments: Any) -> int:
    """Return the exit code of a fork that does some work."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255
    os._exit(_finished(work, *arguments))


def _finished(work: Callable[..., None], *arguments: Any) -> int:
    """Return the exit code that an interpreter would end with after some work."""
    code = 1
    try:
        work(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 -- as the interpreter does
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def serve(run_one: Callable[[str, str], int]) -> None:
    """Run pages: each line of input asks for one, each line of output is an exit code.

    What a page prints goes to a file.
    """
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # or programs of pages would read requests
    for line in requests:
        asked = json.loads(line)
        with Path(asked["output"]).open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        code = run_one(asked["page"], asked["directory"])
        print(code, file=replies, flush=True)


def _forked(page: str, directory: str) -> int:
    """Return the exit code of a page that runs in a fork of this process."""
    return _in_fork(_page, page, directory)


def _here(page: str, directory: str) -> int:
    """Return the exit code of a page that runs in this process, and end what it has of Spark.

    PySpark keeps the JVM, in which the next page starts its own context.
    """
    environment = dict(os.environ)
    code = _finished(_page, page, directory)
    os.environ.clear()
    os.environ.update(environment)
    sql = sys.modules.get("pyspark.sql")
    session = sql and sql.SparkSession.getActiveSession()
    if session is not None:
        session.stop()
    return code


def _page(page: str, directory: str) -> None:
    os.chdir(directory)
    run(Path(page))


def _execute(code: CodeType, namespace: dict[str, object], runner: asyncio.Runner) -> None:
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(eval(code, namespace))  # noqa: S307 -- our own documentation
    else:
        exec(code, namespace)  # noqa: S102 -- our own documentation


def _shell(line: str, command: _Command) -> None:
    words = [it.replace("$PWD", str(Path.cwd())) for it in shlex.split(line)]
    if words[:2] == ["pip", "install"]:
        _check_requirements(words[2:])
    elif words == ["./dev", "test"]:
        _check_that_ci_runs("test")
    elif words[0] == "icechunk-async":
        command.run(words[1:])
    elif words[0] == "./dev":
        arguments = [str(Path("demo").absolute())] if words[1:] == ["demo"] else []
        subprocess.run([*words, *arguments], cwd=REPOSITORY, env=_LENIENT, check=True)
    else:
        # Programs that a page names by where they were set up are those of this environment.
        program = Path(sys.executable).parent / Path(words[0]).name
        is_tool = words[0].startswith(".venv/")
        cwd, env = (REPOSITORY, _LENIENT) if is_tool else (None, None)
        subprocess.run([str(program), *words[1:]], cwd=cwd, env=env, check=True)


def _check_requirements(requirements: list[str]) -> None:
    """Make sure that extras of ours exist; what they bring is tested by installing the wheel."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for requirement in requirements:
        name, _, extras = requirement.rstrip("]").partition("[")
        if name == project["name"]:
            unknown = set(filter(None, extras.split(","))) - set(project["optional-dependencies"])
            assert not unknown, f"there is no extra {unknown}"


def _check_that_ci_runs(argument: str) -> None:
    """The command that runs every check cannot be run by one of them; CI runs it."""
    last = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1]
    assert last.endswith(f'/../dev" {argument}'), last


if __name__ == "__main__":
    if sys.argv[1:] == ["--here"]:
        serve(_here)
    elif sys.argv[1:]:
        run(Path(sys.argv[1]))
    else:
        # With NumPy and Zarr, which all pages import, and Matplotlib and xarray, which many do.
        for name in ("cli.app", "repository", "sync"):
            importlib.import_module(f"icechunk_async.{name}")
        for name in ("matplotlib.figure", "xarray"):
            importlib.import_module(name)
        serve(_forked)
