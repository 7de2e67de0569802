"""Repositories of spec 1 shared with the last official wheel that knew nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository
from tests.interop.answers import Settings
from tests.interop.comparing import ENGINES, view
from tests.interop.edits import DTYPES, apply, array, dumps, group, write
from tests.interop.files import FOLDERS, Files
from tests.interop.hierarchies import JSON_KINDS, Hierarchy, samples, seeded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.interop.answers import Touched
    from tests.interop.comparing import View
    from tests.interop.edits import Sources


WORKER = Path(__file__).with_name("wheel_1_worker.py")
SEEDS = range(max(1, int(os.environ.get("INTEROP_SEEDS", "3")) // 4))
OLD_DTYPES = tuple(it for it in DTYPES if it != "struct")
"""The types that Zarr spells today as it did beside wheel 1.x."""


class Wheel1:
    """A process that answers for wheel 1.x."""

    def __init__(self, python: str) -> None:
        """Start it."""
        root = WORKER.parents[2]
        environment = {**os.environ, "PYTHONPATH": str(root), "ICECHUNK_LOG": "error"}
        self._process = subprocess.Popen(
            [python, "-m", "tests.interop.wheel_1_worker"],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )

    def ask(self, request: str, /, **options: Any) -> Any:
        """Send a request and answer what came back."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([request, options]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process of wheel 1.x ended"
        answer = json.loads(line)
        assert "error" not in answer, answer
        return answer["value"]

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=240)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def wheel(python_of_wheel_1: str) -> Iterator[Wheel1]:
    """Return a running wheel 1.x."""
    started = Wheel1(python_of_wheel_1)
    yield started
    started.close()


def portable(seen: View) -> dict[str, Any]:
    """Return our view in the form in which the other process answers."""
    return {
        "branches": seen.branches,
        "tags": seen.tags,
        "ancestries": {
            tip: [
                [it.id, it.parent, it.written_at.isoformat(), it.message, it.metadata]
                for it in line
            ]
            for tip, line in seen.ancestries.items()
        },
        "diffs": {
            f"{start} {end}": _diff(diff)
            for (start, end), diff in seen.diffs.items()
            if any(
                it.id == end and it.parent == start
                for line in seen.ancestries.values()
                for it in line
            )
        },
        "contents": {
            snapshot: {key: base64.b64encode(value).decode() for key, value in keys.items()}
            for snapshot, keys in seen.contents.items()
        },
        "arrays": {
            snapshot: {
                path: [row[0], list(row[1]), row[2], hashlib.sha256(row[3]).hexdigest()]
                for path, row in arrays.items()
            }
            for snapshot, arrays in seen.arrays.items()
        },
    }


def _diff(diff: Touched) -> dict[str, Any]:
    names = [
        f"{what}_{kind}" for what in ("new", "deleted", "updated") for kind in ("groups", "arrays")
    ]
    chunks = {path: [list(row) for row in rows] for path, rows in diff.chunks.items()}
    return {**{name: sorted(getattr(diff, name)) for name in names}, "chunks": chunks}


async def agree(wheel: Wheel1, root: Path, source: Path | None = None) -> View:
    """Compare all that our engine and wheel 1.x say about a repository."""
    theirs = wheel.ask("view", root=str(root), source=None if source is None else str(source))
    async with ENGINES["ours"].open(root, source) as repo:
        seen = await view(repo, 1, everything=True)
    ours = portable(seen)
    for snapshot, arrays in ours["arrays"].items():  # the older Zarr does not know every type
        unknown = arrays.keys() - theirs["arrays"][snapshot].keys()
        assert all("(" in arrays[path][0] or "[" in arrays[path][0] for path in unknown), unknown
        for path in unknown:
            del arrays[path]
    for part, value in theirs.items():
        assert ours[part] == value, part
    return seen


@pytest.mark.parametrize("first", ["ours", "wheel"])
async def test_samples_cross_over(wheel: Wheel1, first: str, tmp_path: Path) -> None:
    """One array of each type, rank and size, and every kind of commit property, reads equal."""
    root = tmp_path / "repo"
    if first == "ours":
        await ENGINES["ours"].create(root, 1)
        async with ENGINES["ours"].open(root) as repo:
            work = await repo.work()
            await apply(work.store, samples())
            await work.commit("samples", JSON_KINDS)
    else:
        assert wheel.ask("create", root=str(root), inline=None, split=None, source=None)[:2] == "1."
        options = {"root": str(root), "source": None, "branch": "main", "metadata": JSON_KINDS}
        wheel.ask("commit", edits=dumps(samples(OLD_DTYPES)), **options)
    seen = await agree(wheel, root)
    assert max(len(arrays) for arrays in seen.arrays.values()) > 30
    assert wheel.ask("collect", root=str(root), dry_run=True)["bytes"] == 0


@pytest.mark.parametrize("first", ["ours", "wheel"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_turns_with_wheel_1(
    wheel: Wheel1, first: str, seed: int, tmp_path: Path, sources: Sources
) -> None:
    """Edits, branches, tags and tombstones by turns; both agree on all of it after each."""
    root, source = tmp_path / "repo", sources.directory
    pick = seeded(f"wheel {first} {seed}")
    model = Hierarchy(pick, virtual=True, dtypes=OLD_DTYPES)
    inline, split = pick.choice([(None, None), (0, 2), (40, 3)])
    if first == "ours":
        splits = () if split is None else ((("AnyArray", ""), ((None, split),)),)
        await ENGINES["ours"].create(root, 1, Settings(inline, splits, source))
    else:
        wheel.ask("create", root=str(root), inline=inline, split=split, source=str(source))
    for turn in range(4):
        edits, metadata = model.edits(10), {"turn": turn}
        if (turn % 2 == 0) == (first == "ours"):
            async with ENGINES["ours"].open(root, source) as repo:
                work = await repo.work()
                await apply(work.store, edits, sources)
                tip = await work.commit("by us", metadata, empty=True)
                await repo.create_tag(f"t{turn}", tip)
                await repo.create_branch(f"b{turn}", tip)
                if turn > 1:
                    await repo.delete_tag(f"t{turn - 1}")
                    await repo.reset_branch(f"b{turn - 1}", tip)
        else:
            options = {"root": str(root), "source": str(source), "branch": "main"}
            tip = wheel.ask("commit", edits=dumps(edits), metadata=metadata, **options)
            for do in ("create_tag", "create_branch"):
                wheel.ask("refs", root=str(root), do=do, name=f"{do[7]}{turn}", snapshot=tip)
            if turn > 1:
                wheel.ask("refs", root=str(root), do="delete_tag", name=f"t{turn - 1}")
                wheel.ask("refs", root=str(root), do="delete_branch", name=f"b{turn - 1}")
        seen = await agree(wheel, root, source)
        assert seen.branches["main"] == tip
    garbage = {folder: len(names) for folder, names in Files(root).garbage().items()}
    counted = wheel.ask("collect", root=str(root), dry_run=True)
    assert {folder: counted[folder] for folder in FOLDERS} == garbage
    shutil.copytree(root, copied := tmp_path / "collected")
    wheel.ask("collect", root=str(copied), dry_run=False)
    after = await agree(wheel, copied, source)
    assert (after.contents, after.ancestries) == (seen.contents, seen.ancestries)


async def test_history_that_wheel_1_expired_goes_on(wheel: Wheel1, tmp_path: Path) -> None:
    """A snapshot rewritten in place by expiration is read, and committed upon by both."""
    root = tmp_path / "repo"
    await ENGINES["ours"].create(root, 1)
    ids = []
    async with ENGINES["ours"].open(root) as repo:
        for turn in range(5):
            work = await repo.work()
            await apply(work.store, [group(f"g{turn}"), array(f"g{turn}/a", [8], [2])])
            await apply(work.store, [write(f"g{turn}/a", [0], [8], turn)])
            ids.append(await work.commit(f"step {turn}"))
    expired = wheel.ask("expire", root=str(root), before=ids[3])
    assert set(ids[:3]) == set(expired)
    wheel.ask("collect", root=str(root), dry_run=False)
    seen = await agree(wheel, root)
    line = [it.id for it in seen.ancestries[ids[-1]]]
    assert line[:2] == [ids[4], ids[3]]
    assert len(line) == 3
    async with ENGINES["ours"].open(root) as repo:
        work = await repo.work()
        await apply(work.store, [write("g0/a", [0], [8], 9)])
        await work.commit("on top")
    options: dict[str, Any] = {"root": str(root), "source": None, "branch": "main"}
    wheel.ask("commit", edits=dumps([group("last")]), metadata={}, **options)
    await agree(wheel, root)
    assert Files(root).missing() == {folder: set[str]() for folder in FOLDERS}


async def test_copies_without_chunks_and_of_chosen_arrays_are_read_by_wheel_1(
    wheel: Wheel1, tmp_path: Path
) -> None:
    """It finds chunks that stay at the origin, though it knows no names of containers."""
    origin = tmp_path / "origin"
    wheel.ask("create", root=str(origin), inline=0, split=None, source=None)
    options: dict[str, Any] = {"root": str(origin), "source": None, "branch": "main"}
    edits = [group("g"), array("g/a", [8], [2]), array("b", [8], [2])]
    edits += [write(path, [0], [8], 3) for path in ("g/a", "b")]
    wheel.ask("commit", edits=dumps(edits), metadata={"by": "them"}, **options)
    wheel.ask("commit", edits=dumps([write("g/a", [0], [2], 4)]), metadata={}, **options)
    for name, how in (("shallow", {"shallow": True}), ("paths", {"paths": ["g"], "shallow": True})):
        copied: Any = how
        async with Repository.open(origin) as repository:
            await repository.copy_to(tmp_path / name, **copied)
        seen = await agree(wheel, tmp_path / name, origin)
        assert any("g/a" in arrays for arrays in seen.arrays.values())
        options = {"root": str(tmp_path / name), "source": str(origin), "branch": "main"}
        wheel.ask("commit", edits=dumps([write("g/a", [0], [2], 5)]), metadata={}, **options)
        await agree(wheel, tmp_path / name, origin)
