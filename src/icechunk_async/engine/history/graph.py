"""The graph of history: what was merged into snapshots, and drawings with branches and tags.

Icechunk stores one parent for each snapshot. A merge by this library names the snapshots whose
changes it took in, too, as a property; other engines keep that property and do not read it.

Of drawings, rows are laid out first, as plain values; text and SVG are two renderings of them.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import field, replace
from heapq import heapify, heappop, heappush
from html import escape
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.text import printable
from icechunk_async.errors import InvalidInputError, SnapshotNotFoundError
from icechunk_async.format.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rich.text import Text

    from icechunk_async.engine.history.protocol import History
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.repo_info import SnapshotInfo

    type _Paint = Callable[[str, str], str]

__all__ = ["PROPERTY", "AncestryGraph", "Row", "draw", "lay_out", "lineage", "merged_into"]

PROPERTY: Final = "icechunk-async"
"""The property of a snapshot that says where its changes came from."""
_COLORS: Final = ("#4c9f2f", "#a653ff", "#0b84c6", "#d9822b", "#c2255c", "#12908e")
_TAG_COLOR: Final = "#5ec4f7"
_MUTED: Final = "#888888"
_SVG: Final = "http://www.w3.org/2000/svg"
_STEP: Final = 20
"""Width of a lane in an SVG, in pixels."""
_LINE: Final = 28
"""Height of a row in an SVG, in pixels."""
_LETTERS: Final = 8
"""Of an id, more if those begin two of the ids that are drawn."""


def merged_into(properties: Mapping[str, JSON]) -> list[SnapshotId]:
    """Return the snapshots whose changes were merged into one with these properties."""
    own = properties.get(PROPERTY)
    found = own.get("merged") if isinstance(own, dict) else None
    texts = [it for it in found if isinstance(it, str)] if isinstance(found, list) else []
    ids: list[SnapshotId] = []
    for text in texts:
        with suppress(InvalidInputError):  # anybody can write properties
            ids.append(SnapshotId.parse(text))
    return ids


async def lineage(history: History, start: SnapshotId) -> dict[SnapshotId, SnapshotInfo]:
    """Return a snapshot and all before it, merged ones included, each before its parents."""
    found: dict[SnapshotId, SnapshotInfo] = {}
    pending = [start]
    while pending:
        first = pending.pop()
        try:
            async for info in history.ancestry(first):
                if info.id in found:
                    break
                found[info.id] = info
                # Properties can name any snapshot, also one that never was here: what is not found
                # is left out.
                pending += merged_into(info.metadata)
        except SnapshotNotFoundError:
            if first == start:
                raise
            continue  # what was merged has expired
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """One snapshot of a drawing."""

    info: SnapshotInfo
    lane: int
    """Column that the snapshot stands in, from 0."""
    joining: tuple[int, ...]
    """Columns of lines that end here: branches that began at this snapshot."""
    passing: frozenset[int]
    """Columns of lines that go by."""
    below: frozenset[int]
    """Columns of lines that continue in the next row."""
    merging: tuple[int, ...] = ()
    """Columns of the lines to the snapshots that were merged into this one."""
    branches: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last column that lines of this snapshot reach."""
        columns = (self.lane, *self.joining, *self.merging)
        return min(columns), max(columns)

    @property
    def width(self) -> int:
        """Number of columns that the row needs."""
        return 1 + max({self.lane, *self.joining, *self.passing, *self.merging})


@dataclass(slots=True)
class _Lanes:
    """Which snapshot the line in each column leads to."""

    next: list[SnapshotId | None] = field(default_factory=list["SnapshotId | None"])
    drawn: set[int] = field(default_factory=set[int])
    """Columns whose line has started."""

    def waiting(self, snapshot_id: SnapshotId) -> list[int]:
        return [lane for lane, it in enumerate(self.next) if it == snapshot_id]

    def free(self, right_of: int = -1) -> int:
        for lane in range(right_of + 1, len(self.next)):
            if self.next[lane] is None:
                return lane
        self.next.append(None)
        return len(self.next) - 1

    def lead(self, snapshot_id: SnapshotId, right_of: int) -> int:
        """Return the column of a line to a snapshot, a new one unless there is one."""
        waiting = self.waiting(snapshot_id)
        lane = waiting[0] if waiting else self.free(right_of)
        self.next[lane] = snapshot_id
        self.drawn.add(lane)
        return lane


def lay_out(
    infos: Iterable[SnapshotInfo],
    branches: Mapping[str, SnapshotId],
    tags: Mapping[str, SnapshotId],
) -> list[Row]:
    """Place snapshots, children above parents, the newest first; ``main`` in the first column.

    Args:
        infos: snapshots to show; a parent that is not among them ends the line.
        branches: tips by name; those of other snapshots are not shown.
        tags: snapshots by name; those of other snapshots are not shown.
    """
    known = {info.id: info for info in infos}
    lanes = _Lanes()
    # Reserved before anything is placed, although other tips may be newer.
    if branches.get("main") in known:
        lanes.next.append(branches["main"])
    labels_b, labels_t = _by_target(branches), _by_target(tags)
    rows: list[Row] = []
    for info in _newest_first(known):
        waiting = lanes.waiting(info.id)
        lane, *joining = waiting or [lanes.free()]
        passing = frozenset(lanes.drawn - {lane, *joining})
        for column in (lane, *joining):
            # Free again, so that the next branch takes it: a long history with many short branches
            # stays narrow.
            lanes.next[column] = None
            lanes.drawn.discard(column)
        if info.parent_id in known:
            lanes.next[lane] = info.parent_id
            lanes.drawn.add(lane)
        merged = _parents(info, known) - {info.parent_id}
        merging = sorted({lanes.lead(it, lane) for it in sorted(merged)} - {lane})
        rows.append(
            Row(
                info,
                lane,
                tuple(joining),
                passing,
                frozenset(lanes.drawn),
                tuple(merging),
                labels_b.get(info.id, ()),
                labels_t.get(info.id, ()),
            )
        )
    return rows


def _by_target(refs: Mapping[str, SnapshotId]) -> dict[SnapshotId, tuple[str, ...]]:
    found: dict[SnapshotId, tuple[str, ...]] = {}
    for name in sorted(refs, key=lambda name: (name != "main", name)):
        found[refs[name]] = (*found.get(refs[name], ()), name)
    return found


def _newest_first(known: Mapping[SnapshotId, SnapshotInfo]) -> list[SnapshotInfo]:
    """Order by time, but put a parent after all its children even if clocks disagreed."""
    # Kahn's algorithm: a snapshot is ready when all of its children are placed, and of those that
    # are ready the newest comes first. What forms a circle is never ready, and is not drawn: only
    # damaged bytes can say so.
    children = dict.fromkeys(known, 0)
    parents = {info.id: _parents(info, known) for info in known.values()}
    for above in parents.values():
        for parent_id in above:
            children[parent_id] += 1
    ready = [(-it.flushed_at, str(it.id), it) for it in known.values() if not children[it.id]]
    heapify(ready)
    ordered: list[SnapshotInfo] = []
    while ready:
        info = heappop(ready)[2]
        ordered.append(info)
        for parent_id in parents[info.id]:
            children[parent_id] -= 1
            if not children[parent_id]:
                parent = known[parent_id]
                heappush(ready, (-parent.flushed_at, str(parent.id), parent))
    return ordered


def _parents(info: SnapshotInfo, known: Mapping[SnapshotId, SnapshotInfo]) -> frozenset[SnapshotId]:
    """Return the snapshots that stand below one: its parent, and what was merged into it."""
    first = () if info.parent_id is None else (info.parent_id,)
    # A snapshot is younger than what it was made of, so that properties cannot make a circle.
    merged = (it for it in merged_into(info.metadata) if it in known)
    older = (it for it in merged if known[it].flushed_at < info.flushed_at)
    return frozenset(it for it in (*first, *older) if it in known)


@dataclass(frozen=True, slots=True, repr=False)
class AncestryGraph:
    """A drawing of history: text when printed, SVG in a notebook."""

    rows: Sequence[Row]
    plain: bool | None = None
    """Without colours; None: text without them unless it goes to a terminal."""
    limit: int | None = None
    """The number of snapshots that were asked for, if there are more."""

    def __str__(self) -> str:
        """Draw with characters, and in colour (ANSI) as `plain` says."""
        is_plain = not _on_terminal() if self.plain is None else self.plain
        return self._text(_unpainted if is_plain else _ansi)

    def _text(self, paint: _Paint) -> str:
        width = max((row.width for row in self.rows), default=0)
        letters = self.letters
        lines: list[str] = []
        for row in self.rows:
            lines.append(_text_row(row, width, letters, paint))
            if row.below:
                cells = (paint("│", _color(c)) if c in row.below else " " for c in range(width))
                lines.append(" ".join(cells))
        return "\n".join([*lines, *([paint(self._rest, _MUTED)] if self._rest else [])])

    @property
    def letters(self) -> int:
        """The number of letters of each id: enough to tell the drawn ids apart."""
        ids = {str(row.info.id) for row in self.rows}
        longest = max(map(len, ids), default=_LETTERS)
        alike = (it for it in range(_LETTERS, longest) if len({i[:it] for i in ids}) == len(ids))
        return next(alike, longest)

    @property
    def _rest(self) -> str:
        if self.limit is None:
            return ""
        return f"... and earlier snapshots, which limit={self.limit} leaves out"

    __repr__ = __str__

    def __rich__(self) -> Text:
        """Draw where rich prints it."""
        from rich.text import Text  # noqa: PLC0415 - not without need

        return Text.from_ansi(self._text(_unpainted if self.plain else _ansi))

    def uncoloured(self) -> AncestryGraph:
        """Return the same drawing without colours."""
        return replace(self, plain=True)

    def _repr_svg_(self) -> str:
        """Draw for a notebook."""
        return self.svg()

    def _repr_html_(self) -> str:
        """Draw for a notebook as a part of its page: an image would not have the page's ink."""
        return f'<div class="icechunk-async" style="overflow-x:auto">{self.svg()}</div>'

    def svg(self) -> str:
        """Draw as an SVG document."""
        columns = max((row.width for row in self.rows), default=1)
        left = columns * _STEP + 12
        letters, rest = self.letters, self._rest
        longest = max((*(len(_caption(row, letters)) for row in self.rows), len(rest)))
        height = _LINE * (len(self.rows) + bool(rest)) + 8
        size = f'width="{left + 8 * longest + 10}" height="{height}"'
        parts = [f'<svg xmlns="{_SVG}" {size} font-family="monospace" font-size="13">']
        for index, row in enumerate(self.rows):
            parts += self._svg_lines(row, index)
        for index, row in enumerate(self.rows):
            parts += self._svg_row(row, index, left, letters)
        if rest:
            at = f'x="{left}" y="{_y(len(self.rows)) + 4}" fill="currentColor"'
            parts.append(f"<text {at}>{escape(rest)}</text>")
        return "\n".join([*parts, "</svg>"])

    def _shade(self, column: int) -> str:
        return "currentColor" if self.plain else _color(column)

    def _svg_lines(self, row: Row, index: int) -> list[str]:
        y = _y(index)
        down = [(_x(it), y, _x(it), y + _LINE, it) for it in sorted(row.below)]
        across = [(_x(row.lane), y, _x(it), y, it) for it in (*row.joining, *row.merging)]
        return [
            f'<path d="M{x1} {y1}L{x2} {y2}" stroke="{self._shade(column)}" stroke-width="2"/>'
            for x1, y1, x2, y2, column in (*down, *across)
        ]

    def _svg_row(self, row: Row, index: int, left: int, letters: int) -> list[str]:
        y, shade = _y(index), self._shade(row.lane)
        names = [
            f'<tspan font-weight="bold" fill="{shade}">{escape(it)}</tspan>'
            for it in map(printable, row.branches)
        ]
        tag_shade = "currentColor" if self.plain else _TAG_COLOR
        names += [
            f'<tspan font-style="italic" fill="{tag_shade}">{escape(it)}</tspan>'
            for it in map(printable, row.tags)
        ]
        labels = f" ({', '.join(names)})" if names else ""
        muted = "currentColor" if self.plain else _MUTED
        words = (
            f'<tspan fill="{muted}">{_short(row, letters)}</tspan>{labels} {escape(_title(row))}'
        )
        return [
            f'<circle cx="{_x(row.lane)}" cy="{y}" r="5" fill="{shade}"/>',
            f'<text x="{left}" y="{y + 4}" fill="currentColor">{words}</text>',
        ]


def _on_terminal() -> bool:
    """Return whether what is printed goes to a terminal that may show colours."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


async def draw(
    history: History, start: SnapshotId | None, *, plain: bool | None, limit: int | None
) -> AncestryGraph:
    """Draw the newest snapshots of an ancestry; of all branches if ``start`` is None."""
    branches, tags = await gather(history.branches(), history.tags())
    infos: dict[SnapshotId, SnapshotInfo] = {}
    pending = list(branches.values()) if start is None else [start]
    wanted = set(pending)
    while pending:
        tip = pending.pop()
        try:
            drawn = 0
            async for info in history.ancestry(tip):
                # One more than is drawn shows that there are more.
                if info.id in infos or (limit is not None and drawn > limit):
                    break
                drawn += 1
                infos[info.id] = info
                pending += merged_into(info.metadata)
        except SnapshotNotFoundError:
            if tip in wanted:
                raise  # what was merged may have expired
    if limit is None or len(infos) <= limit:
        return AncestryGraph(lay_out(infos.values(), branches, tags), plain)
    newest = _newest_first(infos)[:limit]
    return AncestryGraph(lay_out(newest, branches, tags), plain, limit)


def _text_row(row: Row, width: int, letters: int, paint: _Paint) -> str:
    first, last = row.span
    cells: list[str] = []
    for column in range(width):
        if column == row.lane:
            cells.append(paint("●", _color(column)))
        elif column in row.joining or column in row.merging:
            cells.append(paint(_corner(row, column), _color(column)))
        elif column in row.passing:
            crossed = first < column < last
            cells.append(paint("┼" if crossed else "│", _color(column)))
        else:
            cells.append(paint("─", _color(last)) if first < column < last else " ")
        joined = first <= column < last
        cells.append(paint("─", _color(last)) if joined else " ")
    names = [paint(printable(name), _color(row.lane)) for name in row.branches]
    names += [paint(printable(name), _TAG_COLOR) for name in row.tags]
    labels = f" ({', '.join(names)})" if names else ""
    return f"{''.join(cells)}{paint(_short(row, letters), _MUTED)}{labels} {_title(row)}".rstrip()


def _corner(row: Row, column: int) -> str:
    """Return the sign for a line that meets the row's own in a column."""
    first, last = row.span
    # A line that ends here, begins here, or goes by: at least one of the two is true.
    above = column in row.joining or column in row.passing
    below = column in row.below
    if column == first:
        return {(True, True): "├", (True, False): "╰", (False, True): "╭"}[above, below]
    if column == last:
        return {(True, True): "┤", (True, False): "╯", (False, True): "╮"}[above, below]
    return {(True, True): "┼", (True, False): "┴", (False, True): "┬"}[above, below]


def _caption(row: Row, letters: int) -> str:
    names = ", ".join(map(printable, (*row.branches, *row.tags)))
    return f"{_short(row, letters)} ({names}) {_title(row)}"


def _short(row: Row, letters: int) -> str:
    """Return the first letters of the id, which `Repository` takes as a ref."""
    return str(row.info.id)[:letters]


def _title(row: Row) -> str:
    """Return the first line of the message."""
    return printable(row.info.message.split("\n", 1)[0])


def _x(column: int) -> int:
    return 15 + column * _STEP


def _y(index: int) -> int:
    return 15 + index * _LINE


def _color(column: int) -> str:
    return _COLORS[column % len(_COLORS)]


def _ansi(text: str, color: str) -> str:
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return f"\x1b[38;2;{red};{green};{blue}m{text}\x1b[0m"


def _unpainted(text: str, color: str) -> str:
    return text
