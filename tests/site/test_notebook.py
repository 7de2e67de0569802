"""Objects shown by a notebook that ran: on phones and desktops, light and dark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from tests.site.conftest import SIZES, missing, opened, picture, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CELLS = [
    """
import zarr.api.asynchronous as zarr
from icechunk_async import Repository
repository = await Repository.create("memory://notebook")
session = await repository.writable_session("main")
rain = await zarr.create_array(
    session.store, name="rain", shape=(365, 180), chunks=(30, 180), dtype="f4"
)
await rain.setitem(slice(0, 30), 1.5)
session
""",
    """
changes = session.status()
first = await session.commit("the first <script>month</script>")
changes
""",
    "repository",
    "await repository.summary()",
    "await repository.lookup_snapshot(first)",
    "await anext(repository.ops_log())",
    "await repository.operations()",
    "await repository.ancestry_graph()",
    """
from icechunk_async import sync
blocking = sync.Repository.open("memory://notebook")
blocking
""",
    "blocking.readonly_session('main')",
    "blocking.operations()",
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a notebook, and serve it as pages, light and dark."""
    folder: Path = tmp_path_factory.mktemp("notebook")
    if find_spec("nbconvert") is None or find_spec("ipykernel") is None:
        missing("nbconvert", "pip install nbconvert ipykernel")
    cells: list[dict[str, Any]] = [
        {
            "cell_type": "code",
            "execution_count": None,
            "id": f"cell-{number}",
            "metadata": {},
            "outputs": [],
            "source": cell.strip(),
        }
        for number, cell in enumerate(CELLS)
    ]
    kernel = {"name": "python3", "display_name": "Python", "language": "python"}
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    (folder / "notebook.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    # Programs of others warn about encodings, which is not ours to mend.
    env = {name: it for name, it in os.environ.items() if not name.startswith("PYTHONWARN")}
    for scheme in ("light", "dark"):
        told = [f"--HTMLExporter.theme={scheme}", "--output", f"{scheme}.html", "notebook.ipynb"]
        command = [sys.executable, "-m", "nbconvert", "--execute", "--to", "html", *told]
        subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
    with serving(folder) as url:
        yield url


_INK = """all => all.map(it => {
  const own = getComputedStyle(it);
  return own.getPropertyValue(it.tagName == 'text' ? 'fill' : 'color');
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", SIZES)
def test_cards_are_readable_in_a_notebook(url: str, browser: Any, device: str, scheme: str) -> None:
    """Each object has a card; ink is that of the notebook, and only tables scroll sideways."""
    page, _ = opened(browser, device)  # nbconvert's pages ask for scripts of other sites
    page.goto(f"{url}/{scheme}.html", wait_until="domcontentloaded")
    assert page.locator(".icechunk-async").count() >= len(CELLS)  # a card may hold others
    assert page.locator(".icechunk-async svg text").count() > 0  # the graph, not an image of it
    inks = page.locator(".icechunk-async td, .icechunk-async .row, .icechunk-async text")
    found = {
        sum(map(int, it[it.index("(") + 1 : -1].split(",")[:3])) for it in inks.evaluate_all(_INK)
    }
    assert found
    assert all((it > 384) == (scheme == "dark") for it in found)
    wide = page.locator(".icechunk-async").evaluate_all(
        "all => all.filter(it => it.getBoundingClientRect().right > innerWidth).length"
    )
    assert wide == 0
    shown = page.inner_text("body")
    assert "the first <script>month</script>" in shown
    picture(page, f"notebook-{device}-{scheme}")
    page.close()
