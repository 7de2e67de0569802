"""The picture of the rooms is drawn from imports, and says when it is out of date."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

import pytest
from tools import architecture
from tools.architecture import Module, Room

if TYPE_CHECKING:
    from pathlib import Path


def _room(name: str, top: int, *paths: str, left: int = 0) -> Room:
    return Room(name, paths or (name,), (left, top, 100, 40), "label", "rule", name)


def _module(path: str, *imports: str, lines: int = 100) -> Module:
    return Module(path, f"The module {path}.", lines, frozenset(imports))


ROOMS = [_room("top", 0), _room("middle", 100), _room("low", 200), _room("_runtime", 300)]


def _house(*modules: Module) -> architecture.House:
    return architecture.build({module.path: module for module in modules}, ROOMS)


def test_imports_inside_functions_and_for_types_count(tmp_path: Path) -> None:
    """Modules are found whether they are imported whole or by a name."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "a.py").write_text(
        '''"""Does a.\n\nMore."""\nfrom package import b\n\ndef f():\n    import package.c\n''',
        encoding="utf-8",
    )
    (package / "b.py").write_text("from package.c import name\n", encoding="utf-8")
    (package / "c.py").write_text("import json\n", encoding="utf-8")
    modules = architecture.read_modules([tmp_path])
    assert modules["package/a"].purpose == "Does a."
    assert modules["package/a"].imports == {"package/b", "package/c"}
    assert modules["package/b"].imports == {"package/c"}
    assert modules["package/c"].imports == frozenset()


def test_an_arrow_is_left_out_where_others_lead_the_same_way() -> None:
    """Arrows to the foundation are left out too."""
    house = _house(
        _module("top/a", "middle/b", "low/c", "_runtime/d"),
        _module("middle/b", "low/c"),
        _module("low/c", "top/a"),
        _module("_runtime/d"),
    )
    assert architecture.arrows(house) == ([("middle", "low"), ("top", "middle")], [("low", "top")])


def test_no_picture_is_drawn_of_a_room_that_uses_one_above_it() -> None:
    """The error names both."""
    house = _house(_module("top/a"), _module("middle/b"), _module("low/c", "top/a"))
    with pytest.raises(SystemExit, match="low uses top"):
        architecture.draw(house, {"size": [1, 1]})
    beside = [_room(name, 0, name) for name in ("one", "two")]
    modules = {"one": _module("one", "two"), "two": _module("two", "one")}
    assert architecture.arrows(architecture.build(modules, beside))[1] != []


def test_a_module_belongs_to_the_most_specific_room() -> None:
    """A module of no room stops the drawing, with advice."""
    rooms = [_room("all", 0, "package"), _room("part", 100, "package/part")]
    modules = {path: _module(path) for path in ("package/x", "package/part", "package/part/y")}
    house = architecture.build(modules, rooms)
    assert [len(house.modules[name]) for name in ("all", "part")] == [1, 2]
    with pytest.raises(SystemExit, match="stray belongs to no room"):
        architecture.build({"stray": _module("stray")}, rooms)


@pytest.mark.parametrize(("lines", "shown"), [(2300, 2000), (2600, 2600), (1500, 1500)])
def test_sizes_change_only_when_they_are_a_fifth_off(lines: int, shown: int) -> None:
    """So that not every commit changes the page."""
    modules = {path: _module(path, lines=lines) for path in ("top", "middle", "low", "_runtime")}
    house = architecture.build(modules, ROOMS)
    recorded = "| `top` | purpose | rule | none | 1 | 2000 |\n"
    table = architecture.table(house, modules, recorded)
    assert f"| `top` | The module top. | rule | none | 1 | {shown} |" in table


def test_check_fails_when_the_page_is_out_of_date(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Writing it makes the check pass."""
    # Reading the real modules takes seconds; the tests of the documentation do so.
    layout = tomllib.loads(architecture.LAYOUT.read_text(encoding="utf-8"))
    doors = [room.paths[0] for room in architecture.load_rooms(layout)]
    modules = {path: _module(path) for path in doors}
    monkeypatch.setattr(architecture, "read_modules", lambda _roots: modules)
    monkeypatch.setattr(architecture, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(architecture, "PICTURE", tmp_path / "picture.svg")
    architecture.PAGE.write_text(
        f"Before\n{architecture.BEGIN}\nstale text\n{architecture.END}\nAfter\n", encoding="utf-8"
    )
    assert architecture.main(["--check"]) == 1
    assert "run python -m tools.architecture" in capsys.readouterr().out
    assert architecture.main([]) == 0
    assert architecture.main(["--check"]) == 0
    page = architecture.PAGE.read_text(encoding="utf-8")
    assert page.startswith("Before\n")
    assert page.endswith("After\n")
    assert "stale text" not in page
