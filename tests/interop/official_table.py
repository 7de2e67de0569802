"""Writes docs/reference/official-names.md: each official name, its place here, and its test.

Run ``python -m tests.interop.official_table`` to write the page anew.
"""

from __future__ import annotations

import ast
import textwrap
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import icechunk_async.sync as facade
from tests.interop import official_names
from tests.interop.facade_differences import DIFFERENT
from tests.interop.theirs import icechunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["PAGE", "Row", "outdated", "page", "rows"]

_ROOT: Final = Path(__file__).parents[2]
PAGE: Final = _ROOT / "docs" / "reference" / "official-names.md"
_ABOUT_ALL: Final = ("tests/interop/test_facade_parity.py", "tests/unit/sync/test_parity.py")
"""They compare all names, and show what none of them does."""
_TESTS: Final = ("tests/interop/test_facade*.py", "tests/unit/sync/**/test_*.py")
_ABOUT_VALUES: Final = ("answers", "credentials", "errors", "storages", "values")
"""Tests of the facade about other things than repositories, sessions and stores."""
_OPENED: Final = ("IcechunkStore", "Repository", "Session")
"""Classes whose members are listed, too: people look for these."""
_INSIDE: Final = ("opening", "official")
"""Rooms of the facade without public modules."""
_HEAD: Final = """# Names of the official package

`import icechunk_async.sync as icechunk` gives code that was written for the official package the
same names. The table tells where each of them is found below `icechunk_async.sync`, and one of
the tests that use it. A check compares names, members and signatures with the official
package {version}; what differs on purpose is said in the last column.

This page is generated. To write it anew, run `python -m tests.interop.official_table`.

| Official name | Here | Shown by | Different |
| --- | --- | --- | --- |
"""


class Row(NamedTuple):
    """One line of the table."""

    name: str
    here: str | None
    tests: tuple[str, ...]
    """All that use the name, the one that is most about it first."""
    different: str

    def line(self, test: str | None) -> str:
        """Return the line of the page, with one of the tests."""
        return f"| `{self.name}` | {_code(self.here)} | {_code(test)} | {self.different} |"


def rows() -> list[Row]:
    """Return a line for each public name."""
    used = _uses()
    found = [
        Row(label, _place(module, name), _sorted(used.get(name, [])), DIFFERENT.get(label, ""))
        for module, public in official_names.names().items()
        for name in public
        for label in [f"{module}.{name}" if module else name]
        if not module or not hasattr(icechunk, name)
    ]
    for cls in _OPENED:
        for member in _own_members(getattr(icechunk, cls)):
            label = f"{cls}.{member}"
            place = _place("", cls)
            here = place and f"{place}.{member}" if _has(cls, member) else None
            tests = [it for it in used.get(member, []) if not _is_about_values(it[1])]
            found.append(Row(label, here, _sorted(tests), DIFFERENT.get(label, "")))
    return sorted(found)


def page() -> str:
    """Return the page."""
    lines = [row.line(row.tests[0] if row.tests else None) + "\n" for row in rows()]
    return _HEAD.format(version=icechunk.__version__) + "".join(lines)


def outdated() -> list[str]:
    """Return the faults of the page: names without a line, and lines that are no longer true.

    A line may have any of the tests that use its name.
    """
    lines = set(PAGE.read_text(encoding="utf-8").splitlines())
    return [
        row.name for row in rows() if not lines & {row.line(test) for test in row.tests or (None,)}
    ]


def _code(text: str | None) -> str:
    return f"`{text}`" if text else "none"


def _place(module: str, name: str) -> str | None:
    """Return the module of the facade that has a name, below ``icechunk_async.sync``."""
    try:
        home = import_module(f"{facade.__name__}.{module}".rstrip("."))
    except ModuleNotFoundError:
        return None
    if not hasattr(home, name):
        return None
    where = str(getattr(getattr(home, name), "__module__", ""))
    below = where.removeprefix(facade.__name__).strip(".")
    found = where.startswith(facade.__name__) and below.partition(".")[0] not in _INSIDE
    return ".".join(filter(None, (below if found else module, name)))


def _own_members(cls: type) -> list[str]:
    """Return the members that the official package wrote, not those that it inherits from Zarr."""
    own = [vars(base) for base in cls.__mro__ if base.__module__.startswith("icechunk")]
    return [name for name in official_names.members(cls) if any(name in it for it in own)]


def _is_about_values(label: str) -> bool:
    return any(f"test_facade_{subject}.py" in label for subject in _ABOUT_VALUES)


def _has(cls: str, member: str) -> bool:
    return hasattr(getattr(facade, cls, None), member)


def _uses() -> Mapping[str, list[tuple[int, str]]]:
    """Return for each identifier the tests that use it, each with how many it uses."""
    found: dict[str, list[tuple[int, str]]] = {}
    paths = {path for pattern in _TESTS for path in _ROOT.glob(pattern)}
    for path in sorted(paths - {_ROOT / it for it in _ABOUT_ALL}):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        helpers = _identifiers_of_helpers(tree)
        for test in _tests(tree):
            label = f"{path.relative_to(_ROOT).as_posix()}::{test.name}"
            used = set(_identifiers(test))
            for helper in used & helpers.keys():
                used |= helpers[helper]
            for name in used:
                found.setdefault(name, []).append((len(used), label))
    return found


def _tests(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
            "test"
        ):
            yield node


def _identifiers_of_helpers(tree: ast.Module) -> dict[str, set[str]]:
    """Return the names that a module's functions and tables use, and so the tests that use them."""
    found: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = set(_identifiers(node))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found[target.id] = set(_identifiers(node))
    return found


def _identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value  # names in tables of parameters
            if "\n" in node.value:  # perhaps a script that both packages run
                with suppress(SyntaxError):
                    yield from _identifiers(ast.parse(textwrap.dedent(node.value)))


def _sorted(uses: list[tuple[int, str]]) -> tuple[str, ...]:
    """Return tests in order; one that uses few names is the most about each of them."""
    return tuple(label for _, label in sorted(uses))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
