"""The drawing of history: ids that can be used, a limit, and no colours in pipes."""

from __future__ import annotations

import io
import re
import sys
from typing import TYPE_CHECKING

import pytest

from icechunk_async.engine.history.graph import AncestryGraph, lay_out
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.repo_info import SnapshotInfo
from tests.helpers import write

if TYPE_CHECKING:
    from icechunk_async import Repository


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def commit(repository: Repository, count: int, branch: str = "main") -> None:
    """Make some commits."""
    for number in range(count):
        session = await repository.writable_session(branch)
        await write(session, "a/c/5", bytes([number]))
        await session.commit(f"{branch} {number}")


async def test_each_id_that_is_drawn_is_taken_as_a_ref(filled: Repository) -> None:
    """As pasted from the text; in both formats."""
    await commit(filled, 3)
    drawn = re.findall(r"[●│ ]+([0-9A-Z]{8,}) ", str(await filled.ancestry_graph()))
    whole = [str(it.id) async for it in filled.ancestry()]
    assert len(drawn) == len(whole)
    for letters, snapshot_id in zip(drawn, whole, strict=True):
        session = await filled.readonly_session(ref=letters)
        assert str(session.snapshot_id) == snapshot_id


def test_ids_that_begin_alike_are_drawn_longer() -> None:
    """So that each names one of those that are drawn."""
    ids = [SnapshotId(b"\1" * 8 + bytes([it]) * 4) for it in range(3)]
    infos = [SnapshotInfo(it, None, 0, "") for it in ids]
    graph = AncestryGraph(lay_out(infos, {}, {}), plain=True)
    words = {line.split()[1] for line in str(graph).splitlines()}
    assert len(words) == 3
    assert all(len(it) == graph.letters > 8 for it in words)
    assert all(it in graph.svg() for it in words)


async def test_the_newest_are_drawn_and_the_rest_is_mentioned(filled: Repository) -> None:
    """Fifty unless told otherwise; None draws all; text and picture say what is left out."""
    await commit(filled, 6)
    await filled.create_branch("dev", await filled.lookup_branch("main"))
    await commit(filled, 2, "dev")
    graph = await filled.ancestry_graph(limit=3)
    assert [row.info.message for row in graph.rows] == ["dev 1", "dev 0", "main 5"]
    assert "limit=3" in str(graph).splitlines()[-1]
    assert "limit=3" in graph.svg()
    every = await filled.ancestry_graph(limit=None)
    assert len(every.rows) == 10
    assert "limit" not in str(every) + every.svg()
    assert len((await filled.ancestry_graph(limit=10)).rows) == 10
    assert "limit" not in str(await filled.ancestry_graph(limit=10))
    for limit in (0, -1):
        with pytest.raises(InvalidInputError, match="1 snapshot or more"):
            await filled.ancestry_graph(limit=limit)


async def test_a_notebook_shows_the_drawing_in_its_own_ink(filled: Repository) -> None:
    """As a part of the page: the ink of an image is black, also on black paper."""
    graph = await filled.ancestry_graph()
    shown = graph._repr_html_()
    assert graph.svg() in shown
    assert 'fill="currentColor"' in shown


async def test_text_has_colours_on_terminals_alone(
    filled: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in pipes and files, nor with NO_COLOR; `plain` decides otherwise."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    graph = await filled.ancestry_graph()
    for stream, is_coloured in ((io.StringIO(), False), (_Terminal(), True)):
        monkeypatch.setattr(sys, "stdout", stream)
        print(graph)  # noqa: T201 -- what is tested
        assert ("\x1b[" in stream.getvalue()) is is_coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in str(graph)
    assert "\x1b[" in str(await filled.ancestry_graph(plain=False))
