"""The contract against circles of imports finds each of them, and names its modules."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import grimp
from tools.circles import AcyclicModules, find_circles

if TYPE_CHECKING:
    import pytest

FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}\n"
IN_A_FUNCTION = "def f():\n    {}\n"


def _graph(tmp_path: Path, patch: pytest.MonkeyPatch, **modules: str) -> grimp.ImportGraph:
    """Return the imports of a package with these modules; ``OWN`` is its name."""
    name = f"package_{uuid4().hex}"
    (tmp_path / name).mkdir()
    for module, text in {"__init__": "", **modules}.items():
        (tmp_path / name / f"{module}.py").write_text(text.replace("OWN", name), encoding="utf-8")
    patch.syspath_prepend(str(tmp_path))
    return grimp.build_graph(name, include_external_packages=True, cache_dir=None)


def _tails(circles: list[list[str]]) -> list[list[str]]:
    return [[module.partition(".")[2] for module in circle] for circle in circles]


def test_imports_in_functions_and_for_types_close_circles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each circle is found once, also one of three modules, and one with the package itself."""
    graph = _graph(
        tmp_path,
        monkeypatch,
        __init__=IN_A_FUNCTION.format("from OWN import low"),
        low="import OWN\n",
        a="from OWN import b\n",
        b=FOR_TYPES.format("from OWN.c import C"),
        c=IN_A_FUNCTION.format("import OWN.a"),
        uses_them="import OWN.a\nimport json\n",
    )
    assert _tails(find_circles(graph)) == [["", "low"], ["a", "b", "c"]]


def test_modules_that_only_use_those_below_are_in_no_circle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a module in a circle that several others use."""
    graph = _graph(
        tmp_path,
        monkeypatch,
        top="from OWN import left, right\n",
        left="from OWN import low\n",
        right="from OWN import left, low\n",
        low="import json\n",
    )
    assert find_circles(graph) == []


def test_a_broken_contract_names_the_modules_and_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is kept once one of the imports is gone."""
    graph = _graph(
        tmp_path,
        monkeypatch,
        a="from OWN import b, d\n",
        b=FOR_TYPES.format("from OWN.a import A"),
        c="from OWN import a\n",
        d="import json\n",
    )
    contract = AcyclicModules("circles", {}, {})
    check = contract.check(graph, verbose=False)
    assert not check.kept
    contract.render_broken_contract(check)
    ((circle, _),) = check.metadata["circles"]
    package = circle[0].partition(".")[0]
    printed = " ".join(capsys.readouterr().out.split())
    assert f"2 modules import one another: {package}.a, {package}.b." in printed
    assert f"{package}.a -> {package}.b (line 1)" in printed
    assert f"{package}.b -> {package}.a (line 3)" in printed
    assert not {f"{package}.c", f"{package}.d"} & set(re.findall(r"[\w.]+\b", printed))
    graph.remove_import(importer=f"{package}.b", imported=f"{package}.a")
    assert contract.check(graph, verbose=False).kept


def test_the_contract_is_in_force_without_exceptions() -> None:
    """For all packages, and with the imports that are there for types."""
    rules = ConfigParser()
    rules.read(Path(__file__).parents[3] / ".importlinter", encoding="utf-8")
    assert rules["importlinter:contract:circles"]["type"] == AcyclicModules.type_name
    assert "exclude_type_checking_imports" not in rules["importlinter"]
    assert "icechunk_async" in rules["importlinter"]["root_packages"].split()
