"""Edits that several tests build on, and making commits of them."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from tests.interop.answers import Settings
from tests.interop.comparing import ENGINES
from tests.interop.edits import (
    apply,
    array,
    attributes,
    delete_chunk,
    delete_node,
    group,
    resize,
    write,
)
from tests.interop.files import Files
from tests.interop.hierarchies import JSON_KINDS, samples

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.interop.answers import Engine
    from tests.interop.edits import Edit

__all__ = [
    "AMENDED",
    "BASE",
    "COMMITTED",
    "HISTORY",
    "amend",
    "both",
    "commit",
    "history",
    "make_base",
    "use_originals",
]

BASE = [
    group("g"),
    array("g/a", [8, 8], [2, 2]),
    write("g/a", [0, 0], [8, 8], 1),
    array("g/b", [20], [5]),
    write("g/b", [0], [20], 2),
    group("h"),
]
COMMITTED = [
    attributes("g", first=1),
    write("g/a", [0, 0], [4, 4], 3),
    array("h/new", [6], [2]),
    write("h/new", [0], [4], 4),
    group("h/sub"),
    delete_chunk("g/b", 0),
]
AMENDED = [
    attributes("g", second=2),
    attributes("h/new", more=True),
    write("g/a", [2, 2], [6, 6], 5),
    write("h/new", [2], [6], 6),
    delete_node("h/sub"),
    delete_node("g/b"),
    array("g/b", [3], [1]),
    write("g/b", [0], [3], 7),
    group("late"),
]


async def commit(engine: Engine, root: Path, edits: Sequence[Edit], message: str = "edits") -> str:
    """Apply edits to main and commit them."""
    async with engine.open(root) as repo:
        work = await repo.work()
        await apply(work.store, edits)
        return await work.commit(message)


async def amend(engine: Engine, root: Path, edits: Sequence[Edit]) -> str:
    """Apply edits to main and amend its tip."""
    async with engine.open(root) as repo:
        work = await repo.work()
        await apply(work.store, edits)
        return await work.amend("amended", {"by": "someone"})


_originals: dict[tuple[object, ...], tuple[Path, list[str]]] = {}
_places: list[Path] = []


def use_originals(directory: Path) -> None:
    """Keep repositories here that several tests begin with, each made once."""
    _originals.clear()
    _places[:] = [directory]


async def history(
    engine: Engine, root: Path, spec: int, steps: Sequence[list[Edit]], settings: Settings
) -> list[str]:
    """Create a repository, commit each step, touch refs; return the commits.

    A second one that is like it is a copy, and has the same ids.
    """
    key = engine.name, spec, repr(steps), repr(settings)
    if key not in _originals:
        original = _places[0] / str(len(_originals))
        _originals[key] = original, await _history(engine, original, spec, steps, settings)
    original, ids = _originals[key]
    shutil.copytree(original, root)
    return list(ids)


async def make_base(root: Path, spec: int, edits: Sequence[Edit]) -> Path:
    """Create a repository with one commit of these edits by the official engine, or copy it."""
    key = spec, repr(edits)
    if key not in _originals:
        original = _places[0] / str(len(_originals))
        await ENGINES["theirs"].create(original, spec)
        _originals[key] = original, [await commit(ENGINES["theirs"], original, edits, "base")]
    shutil.copytree(_originals[key][0], root)
    return root


async def _history(
    engine: Engine, root: Path, spec: int, steps: Sequence[list[Edit]], settings: Settings
) -> list[str]:
    await engine.create(root, spec, settings)
    ids = []
    async with engine.open(root) as repo:
        for number, edits in enumerate(steps):
            work = await repo.work()
            await apply(work.store, edits)
            ids.append(await work.commit(f"step {number}", JSON_KINDS if number == 0 else {}))
        await repo.create_branch("b", ids[0])
        await repo.create_tag("t", ids[0])
        await repo.create_tag("gone", ids[0])
        await repo.delete_tag("gone")
        await repo.reset_branch("b", ids[-1])
    return ids


HISTORY = (
    samples(),
    [
        array("time", [40], [1], "<f8", dimension_names=["time"]),
        write("time", [0], [30], 1, "<f8"),
        attributes("empty", changed=True),
        delete_node("types"),
    ],
    [write("time", [12], [20], 2, "<f8"), delete_chunk("time", 3), resize("time", 25)],
    [resize("time", 60), write("time", [50], [55], 3, "<f8"), delete_chunk("time", 59)],
)


async def both(
    tmp_path: Path, spec: int, steps: Sequence[list[Edit]], settings: Settings | None = None
) -> tuple[Files, list[str], Files, list[str]]:
    """Write the same history with both engines."""
    made: list[Any] = []
    for name, engine in ENGINES.items():
        ids = await history(engine, tmp_path / name, spec, steps, settings or Settings())
        made += [Files(tmp_path / name), ids]
    return made[0], made[1], made[2], made[3]
