"""A small lint of English: `python -m tools.english [PATH ...]`.

It looks for the tics listed in `english.toml` and prints the file, the line, what it found and
what to write instead. `--counts` prints how often each room has them. `--clean` reads only the
paths that are meant to stay free of them, as tox's `lint` does.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

REPOSITORY: Final = Path(__file__).parents[1]
CONFIGURATION: Final = Path(__file__).with_suffix(".toml")

_FENCED = re.compile(r"^([ \t]*)(```+|~~~+).*?^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_TARGET = re.compile(r"\]\([^)]*\)|<!--.*?-->", re.DOTALL)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Passage:
    """A piece of prose and where it starts."""

    kind: str
    line: int
    text: str


@dataclass(frozen=True)
class Tic:
    """A habit of language, and what to write instead."""

    pattern: re.Pattern[str]
    instead: str
    first: bool = False
    only: frozenset[str] = frozenset({"docstring", "comment", "message", "markdown"})

    def find(self, passage: Passage) -> Iterator[tuple[int, str]]:
        """Yield the line and the words of each occurrence in a passage."""
        if passage.kind not in self.only or (self.first and passage.kind != "docstring"):
            return
        if self.first:
            match = self.pattern.match(passage.text.lstrip())
            if match:
                yield passage.line, match[0]
            return
        for match in self.pattern.finditer(passage.text):
            line = passage.line + passage.text.count("\n", 0, match.start())
            yield line, " ".join(match[0].split())


@dataclass(frozen=True)
class Finding:
    """An occurrence of a tic."""

    path: Path
    line: int
    words: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.words!r}; instead: {self.instead}"


@dataclass(frozen=True)
class Configuration:
    """The contents of `english.toml`."""

    tics: tuple[Tic, ...]
    roots: tuple[str, ...]
    skip: frozenset[str]
    clean: tuple[str, ...]

    @classmethod
    def load(cls, path: Path = CONFIGURATION) -> Configuration:
        """Read the file."""
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        every = Tic(re.compile(""), "").only
        return cls(
            tics=tuple(
                Tic(
                    # A space of a pattern is any white space: a phrase may break over lines.
                    re.compile(tic["pattern"].replace(" ", r"\s+")),
                    tic["instead"],
                    tic.get("first", False),
                    frozenset(tic.get("only", every)),
                )
                for tic in document["tic"]
            ),
            roots=tuple(document["sources"]["roots"]),
            skip=frozenset(document["sources"]["skip"]),
            clean=tuple(document["clean"]["paths"]),
        )


def passages_of_python(source: str) -> Iterator[Passage]:
    """Yield the docstrings, the comments and the messages of a module."""
    tree = ast.parse(source)
    documented = set()
    for node in ast.walk(tree):
        body = node.body if isinstance(node, _DOCUMENTED) else []
        # Strings below attributes are docstrings too.
        if isinstance(node, ast.Module | ast.ClassDef):
            statements: Sequence[ast.stmt] = body
        else:
            statements = body[:1]
        for statement in statements:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                documented.add(statement.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            kind = "docstring" if node in documented else "message"
            # Other strings are messages only if they have words; keys and names have no style.
            if kind == "docstring" or " " in node.value:
                yield Passage(kind, node.lineno, _without_code(node.value))
    yield from _comments(source)


def _comments(source: str) -> Iterator[Passage]:
    """Yield each block of comment lines as one passage, so that a tic may break over lines."""
    first, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        # A line that does not follow the last one begins another block.
        if lines and token.start[0] != first + len(lines):
            yield Passage("comment", first, _without_code("\n".join(lines)))
            lines = []
        first = first if lines else token.start[0]
        lines.append(token.string.lstrip("#: "))
    if lines:
        yield Passage("comment", first, _without_code("\n".join(lines)))


def passages_of_markdown(source: str) -> Iterator[Passage]:
    """Yield the text of a page without its code and the targets of its links."""
    yield Passage("markdown", 1, _without_code(_blank(_TARGET, _blank(_FENCED, source))))


def _without_code(text: str) -> str:
    return _blank(_CODE, text)


def _blank(pattern: re.Pattern[str], text: str) -> str:
    """Replace the matches by a placeholder that keeps the number of lines."""
    # The backticks stay, because a Sphinx role before them is one of the tics.
    return pattern.sub(lambda match: "`" + "\n" * match[0].count("\n") + "`", text)


def files(paths: Sequence[str], configuration: Configuration) -> Iterator[Path]:
    """Yield the Python and Markdown files below some paths, relative to the repository."""
    for pattern in paths:
        for path in sorted(REPOSITORY.glob(pattern)):
            found = sorted(path.rglob("*")) if path.is_dir() else [path]
            for file in found:
                relative = file.relative_to(REPOSITORY)
                if file.suffix in {".py", ".md"} and str(relative) not in configuration.skip:
                    yield relative


def check(path: Path, configuration: Configuration) -> list[Finding]:
    """Return the tics of one file, in the order of its lines."""
    source = (REPOSITORY / path).read_text(encoding="utf-8")
    passages = passages_of_python if path.suffix == ".py" else passages_of_markdown
    found = [
        Finding(path, line, words, tic.instead)
        for passage in passages(source)
        for tic in configuration.tics
        for line, words in tic.find(passage)
    ]
    return sorted(found, key=lambda finding: finding.line)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check files and print what was found; return 1 if there was anything."""
    parser = argparse.ArgumentParser(prog="python -m tools.english", description=__doc__)
    parser.add_argument("paths", nargs="*", help="files or folders, relative to the repository")
    parser.add_argument("--clean", action="store_true", help="only the paths kept clean")
    parser.add_argument("--counts", action="store_true", help="print a count for each room")
    options = parser.parse_args(arguments)
    configuration = Configuration.load()
    paths = options.paths or (configuration.clean if options.clean else configuration.roots)
    found = [
        finding for path in files(paths, configuration) for finding in check(path, configuration)
    ]
    if options.counts:
        rooms = Counter(str(finding.path.parent) for finding in found)
        lines = [f"{count:6d} {room}" for room, count in sorted(rooms.items())]
    else:
        lines = [str(finding) for finding in found]
    sys.stdout.write("".join(f"{line}\n" for line in [*lines, f"{len(found)} tics"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
