"""Runs the blocks of one Markdown page in order, as a reader would; ends at the first failure.

Python blocks share one namespace and may await at the top level. Shell blocks run in the same
directory. Used as ``python run_page.py PAGE``.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType

REPOSITORY = Path(__file__).parents[2]
# The tools that set up and check the project give warnings that do not concern its code.
_STRICT = {"PYTHONWARNINGS", "PYTHONWARNDEFAULTENCODING"}
_LENIENT = {name: value for name, value in os.environ.items() if name not in _STRICT}
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TOP_LEVEL_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """Return line number, language and text of each block of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start()) + 1, match[1], match[2])
        for match in _BLOCK.finditer(text)
    ]


def run(page: Path) -> None:
    """Run all blocks of a page; what it keeps below `/tmp/example` is in the working directory."""
    example = str(Path("example").absolute())
    namespace: dict[str, object] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
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
                    for command in text.splitlines():
                        _shell(command)
                case "toml":
                    tomllib.loads(text)
                case "json":
                    json.loads(text)
                case _:
                    raise AssertionError(f"{page.name}:{line}: no way to run {language!r} blocks")


def _execute(code: CodeType, namespace: dict[str, object], runner: asyncio.Runner) -> None:
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(eval(code, namespace))  # noqa: S307 -- our own documentation
    else:
        exec(code, namespace)  # noqa: S102 -- our own documentation


def _shell(command: str) -> None:
    words = [it.replace("$PWD", str(Path.cwd())) for it in shlex.split(command)]
    if words[:2] == ["pip", "install"]:
        _check_requirements(words[2:])
    elif words == ["./dev", "test"]:
        _check_that_ci_runs("test")
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
    run(Path(sys.argv[1]))
