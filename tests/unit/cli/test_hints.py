"""Errors of the command speak its language: options and commands, no Python."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import icechunk_async
from icechunk_async.cli.hints import in_command_words
from tests.unit.cli.conftest import run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.cli.conftest import Sample

_LIBRARY = Path(icechunk_async.__file__).parent
_BACKENDS = Path(__file__).parents[3] / "backends"

PYTHON = re.compile(
    r"\b(?:Repository|repository|[Ss]ession|fork|store)\.[a-z]\w*"
    r"|icechunk_async\.\w+|\bawait\b|(?<![\w.])[a-z]\w+\(\)"
    r"|(?<!--option )\b[a-z]\w+=(?:[A-Z.'{\[]|(?=[\s,.;)]|$))"
)

# Rooms of which no command hands on an error, and why.
UNREACHABLE = {
    "_display/": "what objects show in Python",
    "arrow/": "for other programs",
    "cli/": "its own words",
    "credentials/": "a command cannot give credentials as values",
    "engine/commit/forks.py": "no command forks",
    "engine/commit/hooks.py": "a command has no hooks",
    "engine/history/summary.py": "what repositories show in Python",
    "engine/leases/member.py": "no command forks",
    "engine/tree/workspace.py": "sessions of commands do what they are for",
    "engine/versions/timeline.py": "no command makes a cube",
    "datasets/": "no command opens a dataset",
    "gateway/": "answers over HTTP",
    "handles.py": "for code that blocks",
    "plugins/": "for other programs",
    "repository.py": "about the lifetime of objects",
    "session.py": "about the lifetime of objects",
    "spark/": "for other programs",
    "sync/": "for code that blocks",
    "testing/": "for authors of backends",
    "xarray.py": "no command opens a dataset of xarray",
    "zarr/cube.py": "no command makes a cube",
    "zarr/datasets.py": "no command writes a dataset of xarray",
    "zarr/queries/by_chunk.py": "no command opens a dataset of xarray",
}
# Texts that only look like Python.
FINE = (
    "a part 'sig='",
    "charset=",
    "boundary=",
    "VirtualChunkContainer(",
    "AccessToken(expires_at",
)
AUTHORIZE = (
    "open the repository with authorize_virtual_chunk_access={'s3://a/': None, 's3://b/': "
    "S3Anonymous()}, beside what it was opened with, or with other credentials of "
    "icechunk_async.credentials."
)


def _messages() -> Iterator[tuple[str, str]]:
    """Return every text that could be part of a message, and where it is."""
    for root in (_LIBRARY, _BACKENDS):
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not name.startswith(tuple(UNREACHABLE)):
                yield from ((f"{name}:{line}", text) for line, text in _texts(path))


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts.update(node.values)
        elif isinstance(node, ast.Expr):  # documentation
            parts.add(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name == "__repr__":  # code by intent
            parts.update(ast.walk(node))
    for node in ast.walk(tree):
        if node in parts or not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        if isinstance(node, ast.Constant):
            text = node.value if isinstance(node.value, str) else ""
        else:
            text = "".join(
                str(it.value) if isinstance(it, ast.Constant) else _value(it) for it in node.values
            )
        if " " in text and not text.lstrip().startswith("<"):
            yield node.lineno, text


def _value(part: ast.expr) -> str:
    """Return a sample of what a part of a text stands for."""
    if "as_code" in ast.unparse(part):
        return "authorize_virtual_chunk_access={'s3://a/': None}"
    return "'it'"


def test_no_message_names_python() -> None:
    """Of all rooms that commands reach; a new message with a call in it fails here."""
    found = [
        f"{where}: {said}"
        for where, text in _messages()
        if PYTHON.search(said := in_command_words(text)) and not any(it in said for it in FINE)
    ]
    assert not found, "\n".join(["Add these to cli/hints.py:", *found])


def test_the_rooms_that_are_left_out_exist() -> None:
    """Else something else may be left out by mistake."""
    assert all((_LIBRARY / name).exists() for name in UNREACHABLE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Use https, or pass allow_http=True if so.",
         "Use https, or give --option allow_http=true if so."),
        ("Give 'allow_http=True'.", "Give --option allow_http=true."),
        ("Pass access_key_id= and secret_access_key= instead.",
         "Give --option access_key_id=... and --option secret_access_key=... instead."),
        ("or give token=... ('anonymous').", "or give --option token=... ('anonymous')."),
        ("durability='often' is not known.", "--option durability=often is not known."),
        ("give the option preset='ceph'.", "give --option preset=ceph."),
        ("create with probe=False to", "create with --no-probe to"),
        ("There is no branch 'v1'. There is a tag 'v1': give it as tag='v1' or ref='v1'.",
         "There is no branch 'v1'. There is a tag 'v1'."),
        (AUTHORIZE, "add --authorize 's3://a/' --authorize 's3://b/'."),
        ("part 'sig=' of a SAS URL", "part 'sig=' of a SAS URL"),
        ("AccessToken(expires_at=...) needs", "AccessToken(expires_at=...) needs"),
        ("a message of somebody, x=1 and so on", "a message of somebody, x=1 and so on"),
    ],
)  # fmt: skip
def test_python_becomes_options(text: str, said: str) -> None:
    """Options of the backend, flags of the command, and nothing else."""
    assert in_command_words(text) == said


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("log", "{none}"), "create one with 'icechunk-async init'"),
        (
            ("log", "obstore+s3://b/r", "-o", "endpoint_url=http://h"),
            "give --option allow_http=true",
        ),
        (("log", "{sample}", "-o", "durability=often"), "--option durability=often is"),
        (("end-session", "{sample}", "0" * 20), "'icechunk-async sessions' lists"),
        (("review", "{sample}", "0" * 20), "'icechunk-async review --all' lists"),
        (("cat", "{sample}", "outside/c/0"), "add: --authorize {container}"),
        (("rewrite-manifests", "{sample}", "--amend", "--always", "--branch", "first"), "--amend"),
    ],
)
def test_hints_can_be_typed(
    sample: Sample, repository: Path, tmp_path: Path, arguments: tuple[str, ...], hint: str
) -> None:
    """As they are printed."""
    run("branch", "create", repository, "first", sample.first)
    places = {"none": tmp_path / "none", "sample": repository, "container": sample.container}
    outcome = run(*(it.format(**places) for it in arguments))
    assert outcome.exit_code == 1
    assert hint.format(**places) in outcome.stderr
    assert not PYTHON.search(outcome.stderr)


def test_a_message_that_a_repository_made_long_is_not_looked_through() -> None:
    """A URL of phrases that begin again and again would take minutes, and more."""
    short = "Publish it with force=True."
    assert in_command_words(short) != short
    long = short + "open the repository with authorize_virtual_chunk_access={}, " * 70
    assert in_command_words(long) == long
