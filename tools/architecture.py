"""Draw the rooms of the house from their imports: `python -m tools.architecture`.

It reads the imports of all modules, including those inside functions and under `TYPE_CHECKING`,
and writes `docs/explanation/architecture.svg` and the table in `architecture.md` beside it.
`--check` writes nothing and fails if one of them is out of date. `architecture.toml` says which
modules make up a room and where it stands.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

REPOSITORY: Final = Path(__file__).parents[1]
LAYOUT: Final = Path(__file__).with_suffix(".toml")
PICTURE: Final = REPOSITORY / "docs" / "explanation" / "architecture.svg"
PAGE: Final = REPOSITORY / "docs" / "explanation" / "architecture.md"
BEGIN: Final = "<!-- rooms: written by python -m tools.architecture -->"
END: Final = "<!-- /rooms -->"

_FOUNDATION = "_runtime"
_ROW = re.compile(
    r"^\| `(?P<room>[^`]+)` .*\| (?P<modules>\d+) \| (?P<lines>\d+) \|$", re.MULTILINE
)


@dataclass(frozen=True)
class Module:
    """A module: its path below a source root, its lines and the modules that it imports."""

    path: str
    purpose: str
    lines: int
    imports: frozenset[str]


@dataclass(frozen=True)
class Room:
    """A room of the layout."""

    name: str
    paths: tuple[str, ...]
    box: tuple[int, int, int, int]
    label: str
    rule: str
    title: str

    def covers(self, path: str) -> int:
        """Return how specific the path of the room that covers a module is, or -1."""
        matching = [
            len(pattern)
            for pattern in self.paths
            if fnmatch(path, pattern) or fnmatch(path, f"{pattern}/*")
        ]
        return max(matching, default=-1)


@dataclass
class House:
    """All rooms, the modules in each, and which room uses which."""

    rooms: dict[str, Room]
    modules: dict[str, list[Module]] = field(default_factory=lambda: defaultdict(list))
    uses: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def is_downward(self, user: str, used: str) -> bool:
        """Return whether a room stands above another, or beside it."""
        return self.rooms[user].box[1] <= self.rooms[used].box[1]


def read_modules(roots: Iterable[Path]) -> dict[str, Module]:
    """Parse every module below some source roots, by path without `.py` and `/__init__`."""
    sources = {
        str(file.relative_to(root).with_suffix("")).removesuffix("/__init__"): file
        for root in roots
        for file in sorted(root.rglob("*.py"))
    }
    modules = {}
    for path, file in sources.items():
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        modules[path] = Module(
            path,
            (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " "),
            source.count("\n"),
            frozenset(_imports(tree, sources.keys())),
        )
    return modules


def _imports(tree: ast.Module, known: Iterable[str]) -> Iterator[str]:
    known = set(known)
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            # The whole tree, and not its first level: imports within functions and for types count,
            # since they are what circles hide in.
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from icechunk_async.engine import open` is engine/open where there is such a module
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [
                name if name.replace(".", "/") in known else node.module for name in submodules
            ]
        yield from (name.replace(".", "/") for name in names if name.replace(".", "/") in known)


def build(modules: Mapping[str, Module], rooms: Sequence[Room]) -> House:
    """Put modules into rooms, and count the imports between rooms."""
    house = House({room.name: room for room in rooms})
    home = {}
    for path, module in modules.items():
        # The longest pattern wins: a room within a room takes its modules out of the outer one.
        best = max(rooms, key=lambda room: room.covers(path))
        if best.covers(path) < 0:
            raise SystemExit(
                f"{path} belongs to no room of {LAYOUT.name}: add it to a room's paths"
            )
        home[path] = best.name
        house.modules[best.name].append(module)
    for path, module in modules.items():
        for imported in module.imports:
            if home[imported] != home[path]:
                house.uses[home[path]][home[imported]] += 1
    return house


def arrows(house: House) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the arrows worth drawing, and those that point upwards.

    An arrow is left out if others lead the same way: of a uses b, b uses c and a uses c, the last
    says nothing new.
    """
    down = defaultdict(set)
    up = []
    for user, counts in house.uses.items():
        for used in counts:
            if used == _FOUNDATION:
                continue
            # Of two rooms side by side that use each other, the rarer direction is the wrong one.
            back = house.uses.get(used, Counter())[user]
            is_rarer = house.is_downward(used, user) and back >= counts[used]
            if is_rarer or not house.is_downward(user, used):
                up.append((user, used))
            else:
                down[user].add(used)

    # `seen`, since arrows beside each other may form circles.
    def reaches(start: str, goal: str, seen: set[str]) -> bool:
        return any(
            middle == goal or (middle not in seen and reaches(middle, goal, seen | {middle}))
            for middle in down[start]
        )

    drawn = [
        (user, used)
        for user in list(down)
        for used in down[user]
        if not any(reaches(middle, used, {user, middle}) for middle in down[user] if middle != used)
    ]
    return sorted(drawn), sorted(up)


def draw(house: House, layout: Mapping[str, Any]) -> str:
    """Return the picture as SVG."""
    width, height = layout["size"]
    drawn, up = arrows(house)
    if up:
        wrong = ", ".join(f"{user} uses {used}" for user, used in up)
        raise SystemExit(
            f"Rooms use others that stand above them in {LAYOUT.name}, or that use them: {wrong}. "
            "Move what they use down, or the room."
        )
    frame = layout["frame"]
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" role="img">'
        ),
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _rectangle(frame["box"], "#f3f6fa", "#c3cfdd"),
    ]
    x, y, *_ = frame["box"]
    parts.append(
        f'<text x="{x + 10}" y="{y + 18}" font-size="13" fill="#5b6b7f">{frame["name"]}</text>'
    )
    leaving, entering = _ports(house, drawn)
    parts += [_arrow(house, pair, leaving, entering) for pair in drawn]
    for room in house.rooms.values():
        x, y, w, h = room.box
        fill = "#eef0f2" if room.name == _FOUNDATION else "#ffffff"
        parts.append(_rectangle(room.box, fill, "#51657d"))
        middle = x + w / 2
        parts.append(
            f'<text x="{middle:g}" y="{y + h / 2 - 4:g}" font-size="16" font-weight="bold" '
            f'text-anchor="middle" fill="#1d2b3a">{escape(room.title)}</text>'
        )
        parts.append(
            f'<text x="{middle:g}" y="{y + h / 2 + 15:g}" font-size="12" '
            f'text-anchor="middle" fill="#51657d">{escape(room.label)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _rectangle(box: Sequence[int], fill: str, stroke: str) -> str:
    x, y, w, h = box
    return (
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="{stroke}"/>'
    )


Ports = dict[tuple[str, str], tuple[float, float]]


def _ports(house: House, pairs: Sequence[tuple[str, str]]) -> tuple[Ports, Ports]:
    """Return where each arrow leaves its room and enters the other.

    Arrows straight down run vertically where the two rooms overlap; the others are spread along
    the side, in the order of where they lead, so that they do not cross near the room.
    """
    leaving: Ports = {}
    entering: Ports = {}
    for ends, own, other in ((leaving, 0, 1), (entering, 1, 0)):
        grouped = defaultdict(list)
        for pair in pairs:
            grouped[pair[own]].append(pair)
        for name, group in grouped.items():
            x, y, w, h = house.rooms[name].box
            group.sort(key=lambda pair: _middle(house.rooms[pair[other]]))
            for number, pair in enumerate(group, 1):
                is_upper = house.rooms[pair[other]].box[1] > y
                ends[pair] = x + w * number / (len(group) + 1), y + h if is_upper else y
    for pair in pairs:
        (ax, ay, aw, ah), (bx, by, bw, bh) = (house.rooms[name].box for name in pair)
        # Side by side: from side to side, at half the height.
        if ay == by:
            right = bx > ax
            leaving[pair] = (ax + aw if right else ax), ay + ah / 2
            entering[pair] = (bx if right else bx + bw), by + bh / 2
            continue
        # The narrower room decides where a vertical arrow runs.
        narrow = leaving[pair][0] if aw <= bw else entering[pair][0]
        low, high = max(ax, bx) + 12, min(ax + aw, bx + bw) - 12
        if low <= narrow <= high:
            leaving[pair] = narrow, leaving[pair][1]
            entering[pair] = narrow, entering[pair][1]
    return leaving, entering


def _middle(room: Room) -> float:
    return room.box[0] + room.box[2] / 2


def _arrow(house: House, pair: tuple[str, str], leaving: Ports, entering: Ports) -> str:
    (x1, y1), (x2, y2) = leaving[pair], entering[pair]
    if house.rooms[pair[0]].box[1] == house.rooms[pair[1]].box[1]:
        sign = 1 if x2 > x1 else -1
        line = f"M {x1:g} {y1:g} L {x2 - 8 * sign:g} {y2:g}"
        head = f"{x2:g},{y2:g} {x2 - 9 * sign:g},{y2 - 4.5:g} {x2 - 9 * sign:g},{y2 + 4.5:g}"
    else:
        sign = 1 if y2 > y1 else -1
        bend = (y2 - y1) / 2
        line = (
            f"M {x1:g} {y1:g} C {x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2 - 8 * sign:g}"
        )
        head = f"{x2:g},{y2:g} {x2 - 4.5:g},{y2 - 9 * sign:g} {x2 + 4.5:g},{y2 - 9 * sign:g}"
    return (
        f'<path d="{line}" fill="none" stroke="#51657d" stroke-width="1.4"/>'
        f'<polygon points="{head}" fill="#51657d"/>'
    )


def table(house: House, modules: Mapping[str, Module], recorded: str) -> str:
    """Return the table of rooms and of the folders inside them.

    Sizes are kept as `recorded` says while they are right within a fifth, so that not every commit
    changes the page.
    """
    known = {
        match["room"]: (int(match["modules"]), int(match["lines"]))
        for match in _ROW.finditer(recorded)
    }
    direct = set(arrows(house)[0])
    rows = [
        "| Room | What it is for | What it may do | Uses these and theirs | Modules | Lines |",
        "|---|---|---|---|--:|--:|",
    ]
    for room in house.rooms.values():
        members = house.modules[room.name]
        sizes = len(members), sum(module.lines for module in members)
        modules_count, lines = _steady(sizes, known.get(room.name))
        door = modules.get(room.paths[0])
        purpose = door.purpose if door else room.label
        uses = ", ".join(f"`{used}`" for used in house.rooms if (room.name, used) in direct)
        rows.append(
            f"| `{room.name}` | {_plain(purpose)} | {room.rule} | {uses or 'none'} "
            f"| {modules_count} | {lines} |"
        )
    return "\n".join(rows)


def _plain(docstring: str) -> str:
    return docstring.replace("``", "`").replace("|", "\\|").strip()


def _steady(sizes: tuple[int, int], known: tuple[int, int] | None) -> tuple[int, int]:
    modules, lines = sizes[0], max(100, round(sizes[1], -2))
    if known and all(
        # Otherwise each commit would change the page, and two branches would clash in it.
        abs(old - new) <= max(new / 5, slack)
        for old, new, slack in zip(known, (modules, lines), (1, 100), strict=True)
    ):
        return known
    return modules, lines


def load_rooms(layout: Mapping[str, Any]) -> list[Room]:
    """Return the rooms of a layout."""
    return [
        Room(
            room["name"],
            tuple(room["paths"]),
            tuple(room["box"]),
            room["label"],
            room["rule"],
            room.get("title", room["name"].rpartition("/")[2]),
        )
        for room in layout["room"]
    ]


def generate() -> dict[Path, str]:
    """Return the files that describe the present source, by path."""
    layout = tomllib.loads(LAYOUT.read_text(encoding="utf-8"))
    modules = read_modules([REPOSITORY / "src", REPOSITORY / "backends"])
    house = build(modules, load_rooms(layout))
    page = PAGE.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    # The table as it stands says which sizes to keep, see `_steady`.
    recorded, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} has no place for the table: {BEGIN} ... {END}")
    rooms = table(house, modules, recorded)
    return {
        PICTURE: draw(house, layout),
        PAGE: f"{before}{BEGIN}\n\n{rooms}\n\n{END}{after}",
    }


def outdated() -> dict[Path, str]:
    """Return the files that do not describe the source, with what they should contain."""
    return {
        path: text
        for path, text in generate().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the picture and the table, or check them."""
    parser = argparse.ArgumentParser(prog="python -m tools.architecture", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if out of date")
    options = parser.parse_args(arguments)
    stale = outdated()
    for path, text in stale.items():
        if options.check:
            sys.stdout.write(f"{path} is out of date: run python -m tools.architecture\n")
        else:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote {path}\n")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
