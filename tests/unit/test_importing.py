"""Public names are imported without collecting garbage, and nothing stays switched."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from icechunk_async._runtime.importing import import_quickly

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_COUNT = """
import gc, zarr
gc.collect()
before = sum(it["collections"] for it in gc.get_stats())
from {module} import Repository
print(sum(it["collections"] for it in gc.get_stats()) - before, gc.isenabled())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory that modules are found in."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture(params=[True, False], ids=["on", "off"])
def collects(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Let garbage be collected, or not."""
    is_on: bool = request.param
    if not is_on:
        gc.disable()
    yield is_on
    gc.enable()


@pytest.mark.parametrize("module", ["icechunk_async", "icechunk_async.sync"])
def test_no_garbage_is_collected(module: str) -> None:
    """A first import of ``Repository`` makes hundreds of thousands of objects that stay."""
    code = _COUNT.format(module=module)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True
    )
    collections, is_on = done.stdout.split()
    # Those of the moments before and after.
    assert int(collections) <= 3
    assert is_on == "True"


def test_collecting_stays_as_it_was(folder: Path, *, collects: bool) -> None:
    """Whoever switched it off finds it off."""
    name = f"quick_{collects}"
    (folder / f"{name}.py").write_text("import gc\nwas_on = gc.isenabled()\n", encoding="utf-8")
    assert import_quickly(name).was_on is False
    assert gc.isenabled() is collects


def test_collecting_stays_as_it_was_where_an_import_fails(folder: Path, *, collects: bool) -> None:
    """Also where a module cannot be imported."""
    (folder / "broken_quickly.py").write_text("raise ImportError('as it goes')\n", encoding="utf-8")
    with pytest.raises(ImportError, match="as it goes"):
        import_quickly("broken_quickly")
    assert gc.isenabled() is collects
