"""Drawings of history show every snapshot once, joined to its parent."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async import Repository, SnapshotId
from icechunk_async.engine.history.graph import AncestryGraph, Row, lay_out
from icechunk_async.errors import BranchNotFoundError, InvalidInputError
from icechunk_async.format.repo_info import SnapshotInfo

_SVG = "{http://www.w3.org/2000/svg}"


def _id(number: int) -> SnapshotId:
    return SnapshotId(number.to_bytes(12, "big"))


def _info(number: int, parent: int | None, at: int, message: str = "") -> SnapshotInfo:
    return SnapshotInfo(_id(number), None if parent is None else _id(parent), at, message)


def _named(rows: list[Row]) -> list[str]:
    """Return the lines of a plain drawing, ids replaced by a star."""
    lines = str(AncestryGraph(rows, plain=True)).split("\n")
    return [re.sub(r"\b[0-9A-Z]{8,20}\b", "*", line).rstrip() for line in lines]


def test_graph_draws_branches_where_they_forked() -> None:
    """A branch is drawn beside main until it joins where it began."""
    infos = [
        _info(0, None, 0, "begin"),
        _info(1, 0, 1, "second"),
        _info(2, 1, 2, "third"),
        _info(3, 0, 3, "aside\nwith details"),
        _info(4, 1, 4, "late"),
    ]
    branches = {"main": _id(2), "side": _id(3), "late": _id(4)}
    assert _named(lay_out(infos, branches, {"v1": _id(1)})) == [
        "  ●   * (late) late",
        "  │",
        "  │ ● * (side) aside",
        "  │ │",
        "● │ │ * (main) third",
        "│ │ │",
        "●─╯ │ * (v1) second",
        "│   │",
        "●───╯ * begin",
    ]


def test_graph_distinguishes_crossing_lines() -> None:
    """A line that goes by is crossed, not joined."""
    infos = [_info(0, None, 0), _info(1, 0, 1), *(_info(2 + i, 1, 3 - i) for i in range(2))]
    infos += [_info(9, 0, 9)]
    branches = {"main": _id(1), "a": _id(9), "b": _id(2), "c": _id(3)}
    drawn = _named(lay_out(infos, branches, {}))
    assert "●─┼─┴─╯ * (main)" in drawn


@st.composite
def _histories(draw: st.DrawFn) -> tuple[list[SnapshotInfo], dict[str, SnapshotId]]:
    count = draw(st.integers(1, 12))
    times = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))  # clocks may lie
    parents = [None, *(draw(st.integers(0, at - 1)) for at in range(1, count))]
    infos = [_info(it, parents[it], times[it]) for it in range(count)]
    tips = draw(st.lists(st.integers(0, count - 1), max_size=4))
    return infos, {("main" if not i else f"b{i}"): _id(tip) for i, tip in enumerate(tips)}


@given(_histories())
def test_every_snapshot_is_drawn_above_its_parent_and_joined_to_it(
    history: tuple[list[SnapshotInfo], dict[str, SnapshotId]],
) -> None:
    """Children come first and each line leads to the parent, even if clocks disagree."""
    infos, branches = history
    rows = lay_out(infos, branches, {})
    assert sorted(row.info.id for row in rows) == sorted(info.id for info in infos)
    leads: dict[int, SnapshotId] = {}  # where the line in each column goes
    for row in rows:
        ends = {column for column, target in leads.items() if target == row.info.id}
        assert set(row.joining) == ends - {row.lane}
        assert row.passing == leads.keys() - ends
        for column in ends:
            del leads[column]
        if row.info.parent_id is not None:
            leads[row.lane] = row.info.parent_id
        assert row.below == leads.keys()
    assert not leads
    labelled = {(name, row.info.id) for row in rows for name in row.branches}
    assert labelled == set(branches.items())


def test_svg_is_well_formed_with_any_message() -> None:
    """Messages and names are text, never markup or control characters."""
    rows = lay_out(
        [_info(0, None, 0, "<b> & \x1b[31m"), _info(1, 0, 1)], {"<main>": _id(1)}, {'"v"': _id(0)}
    )
    drawing = ET.fromstring(AncestryGraph(rows).svg())  # noqa: S314 - it is ours
    texts = ["".join(it.itertext()) for it in drawing.iter(f"{_SVG}text")]
    assert len(texts) == len(list(drawing.iter(f"{_SVG}circle"))) == len(rows)
    assert '("v")' in texts[1]
    assert "<b> & \\x1b[31m" in texts[1]
    assert "#" not in AncestryGraph(rows, plain=True).svg()


def test_colours_are_left_out_on_request() -> None:
    """A plain drawing can be piped anywhere."""
    graph = AncestryGraph(lay_out([_info(0, None, 0, "m")], {"main": _id(0)}, {}), plain=False)
    assert "\x1b[" in str(graph)
    assert "\x1b[" not in str(graph.uncoloured())
    assert str(AncestryGraph([])) == ""


def test_graph_renders_in_rich() -> None:
    """The output is text with styles, without escapes."""
    graph = AncestryGraph(lay_out([_info(0, None, 0, "m")], {"main": _id(0)}, {}), plain=False)
    drawn = graph.__rich__()
    assert drawn.plain == str(graph.uncoloured())
    assert drawn.spans


async def test_a_repository_draws_its_branches_or_one_line_of_descent() -> None:
    """Without arguments every branch is drawn, with one only what it stands on."""
    async with Repository.create("memory://drawn") as repository:
        ids: dict[str, SnapshotId] = {}
        for branch in ("main", "dev"):
            session = await repository.writable_session("main" if branch == "main" else "dev")
            ids[branch] = await session.commit(f"on {branch}", allow_empty=True)
            if branch == "main":
                await repository.create_branch("dev", ids["main"])
        await repository.create_tag("v1", ids["main"])
        both = await repository.ancestry_graph(plain=True)
        assert [row.info.message for row in both.rows] == [
            "on dev",
            "on main",
            "Repository initialized",
        ]
        assert "(main, v1) on main" in str(both)
        one = await repository.ancestry_graph(tag="v1", plain=True)
        assert [row.lane for row in one.rows] == [0, 0]
        with pytest.raises(BranchNotFoundError):
            await repository.ancestry_graph(branch="nope")
        with pytest.raises(InvalidInputError, match="not several"):
            await repository.ancestry_graph(branch="main", tag="v1")
