"""Whether both engines see the same repository, down to the last byte."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tests.interop.edits import contents, read_arrays
from tests.interop.files import FOLDERS, Files
from tests.interop.ours import Ours
from tests.interop.theirs import Theirs, open_official

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.interop.answers import Commit, Engine, Operation, Repo, Touched

__all__ = ["ENGINES", "View", "check_garbage", "collect", "other", "view", "views_agree"]

ENGINES: dict[str, Engine] = {"ours": Ours(), "theirs": Theirs()}


def other(name: str) -> Engine:
    """Return the engine of the other name."""
    return next(engine for it, engine in ENGINES.items() if it != name)


@dataclass
class View:
    """All that an engine says about a repository."""

    branches: dict[str, str]
    tags: dict[str, str]
    ancestries: dict[str, list[Commit]] = field(default_factory=dict)
    """By tip."""
    diffs: dict[tuple[str, str], Touched] = field(default_factory=dict)
    """From each parent to its child, and from each root to the tips."""
    contents: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Every key and value, by snapshot."""
    arrays: dict[str, Any] = field(default_factory=dict)
    """Types, shapes, attributes and values of every array, by snapshot."""
    operations: list[Operation] = field(default_factory=list)


async def view(repo: Repo, spec: int, *, everything: bool = False) -> View:
    """Ask an engine all there is to ask; of old snapshots only if ``everything``."""
    seen = View(await repo.branches(), await repo.tags())
    tips = {*seen.branches.values(), *seen.tags.values()}
    for tip in sorted(tips):
        line = seen.ancestries[tip] = await repo.ancestry(tip)
        pairs = [(line[-1].id, tip), *((it.parent or "", it.id) for it in line[:-1])]
        for pair in pairs if everything else pairs[:2]:
            if pair[0] != pair[1] and pair not in seen.diffs:
                seen.diffs[pair] = await repo.diff(*pair)
        for commit in line if everything else line[:1]:
            if commit.id not in seen.contents:
                store = await repo.reading(commit.id)
                seen.contents[commit.id] = await contents(store)
                seen.arrays[commit.id] = await read_arrays(store)
    if spec > 1:
        seen.operations = await repo.operations()
    return seen


async def views_agree(
    root: Path,
    spec: int,
    *,
    expected: Mapping[str, Mapping[str, bytes]] | None = None,
    source: Path | None = None,
    everything: bool = False,
) -> View:
    """Open a repository with both engines and compare all that they say.

    Args:
        root: the repository.
        spec: its format version.
        expected: what snapshots must contain.
        source: directory of the virtual chunk container, to be authorised.
        everything: look into every snapshot, not only into tips.
    """
    views: list[View] = []
    for engine in ENGINES.values():
        async with engine.open(root, source) as repo:
            views.append(await view(repo, spec, everything=everything))
    ours, theirs = views
    for snapshot, keys in theirs.contents.items():
        _same_keys(ours.contents[snapshot], keys, f"snapshot {snapshot}")
    for part in fields(View):
        if part.name != "diffs":
            assert getattr(ours, part.name) == getattr(theirs, part.name), part.name
    assert list(ours.diffs) == list(theirs.diffs)
    for pair, diff in theirs.diffs.items():
        assert _settled(ours.diffs[pair]) == _settled(diff), pair
    for snapshot, wanted in (expected or {}).items():
        if snapshot in ours.contents:
            _same_keys(ours.contents[snapshot], wanted, f"snapshot {snapshot} beside the oracle")
    return ours


def _settled(diff: Touched) -> Touched:
    """Leave out where the engines differ on purpose.

    Where one array took the path of another the official engine lists the chunks of either, as
    their random ids will have it; we list both. It lists the moves of later commits first; we
    list all in the order in which they were made.
    """
    chunks = dict(diff.chunks)
    for path in diff.deleted_arrays & diff.new_arrays & chunks.keys():
        chunks[path] = []
    return replace(diff, chunks=chunks, moves=tuple(sorted(diff.moves)))


def _same_keys(found: Mapping[str, bytes], wanted: Mapping[str, bytes], where: str) -> None:
    """Compare, and name what differs: whole contents would drown the message."""
    assert sorted(found) == sorted(wanted), where
    assert [key for key in wanted if found[key] != wanted[key]] == [], where


def collect(root: Path, *, dry_run: bool) -> dict[str, int]:
    """Run the official garbage collection with a cutoff in the future."""
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    summary = open_official(root).garbage_collect(tomorrow, dry_run=dry_run)
    counts = {
        "snapshots": summary.snapshots_deleted,
        "transactions": summary.transaction_logs_deleted,
        "manifests": summary.manifests_deleted,
        "chunks": summary.chunks_deleted,
    }
    return {**counts, "bytes": summary.bytes_deleted}


def check_garbage(root: Path) -> dict[str, int]:
    """The official dry run must count exactly what no branch or tag needs."""
    garbage = Files(root).garbage()
    expected = {folder: len(names) for folder, names in garbage.items()}
    expected["bytes"] = sum(
        (root / folder / name).stat().st_size for folder in FOLDERS for name in garbage[folder]
    )
    assert collect(root, dry_run=True) == expected
    return expected
