"""Draw the history on the home page: `python -m tools.home` writes it into the page.

The ids of a repository differ each time, so the picture takes ids that stay. A test compares the
page with the drawing.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Final

import zarr.api.asynchronous as zarr

from icechunk_async import Repository

PAGE: Final = Path(__file__).parents[1] / "docs" / "index.md"
_DRAWN: Final = re.compile(r'(?<=<div class="history">\n)<svg.*?</svg>', re.DOTALL)
# Newest first, as the graph lists them.
_IDS: Final = ("BQK7B2EQ", "JHQ6BJQD", "TR2D1CNX", "Z3RBJ2K2", "HMTEZ0FZ", "1CECHNKR")


async def _add(repository: Repository, branch: str, month: int, message: str) -> None:
    session = await repository.writable_session(branch)
    rain = await zarr.open_array(store=session.store, path="rain")
    await rain.setitem(month, 1.5)
    await session.commit(message)


async def _draw() -> str:
    async with Repository.create("memory://home") as repository:
        session = await repository.writable_session("main")
        await zarr.create_array(session.store, name="rain", shape=(12,), chunks=(1,), dtype="f4")
        await session.commit("an empty year")
        await _add(repository, "main", 0, "January")
        january = await repository.lookup_branch("main")
        await repository.create_tag("v1", january)
        await repository.create_branch("review", january)
        await _add(repository, "review", 2, "March, from the new sensor")
        await _add(repository, "main", 1, "February")
        await repository.merge("review")
        graph = await repository.ancestry_graph()
    # An empty line would end the block of HTML in Markdown.
    drawn = graph.svg().replace("\n\n", "\n").strip()
    for known, row in zip(_IDS, graph.rows, strict=True):
        drawn = drawn.replace(str(row.info.id)[: len(known)], known)
    return drawn


def page() -> str:
    """Return the page with the history as the library draws it now."""
    drawn = asyncio.run(_draw())
    return _DRAWN.sub(lambda _: drawn, PAGE.read_text(encoding="utf-8"))


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
