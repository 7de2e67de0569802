"""References of chunks.

Each measurement is a process of its own, so that the peak of its memory can be told. Ours is synced
to the disk when a commit returns; the official engine's is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from benchmarks.contest import FLOOR

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.contest import Contest

ENGINES = ("ours", "official")
HERE = "benchmarks.references"
FLOORS = "benchmarks.floors"
MILLION = 1_000_000
SEEKABLE = {"seconds": 0.050, "peak memory": 60e6, "bytes": 3e6}


def _counted(contest: Contest, count: int) -> int:
    if count > MILLION and contest.size != "huge":
        pytest.skip("ten million references take minutes and gigabytes to make: use --size huge")
    return contest.pick(count // 1000, count)


@pytest.mark.parametrize("spec", [2, 1])
def test_set_virtual(contest: Contest, tmp_path: Path, spec: int) -> None:
    """From columns in memory to a commit."""
    count = _counted(contest, MILLION)
    made = {"engine": "ours", "directory": str(tmp_path / "made"), "count": count, "spec": spec}
    contest.call(f"{HERE}:set_virtual", made)
    contest.children(
        f"set {count:,} virtual references and commit, format {spec}",
        lambda: {
            **{
                engine: (
                    f"{HERE}:set_virtual",
                    {**made, "engine": engine, "directory": str(tmp_path / uuid4().hex)},
                )
                for engine in ENGINES
            },
            FLOOR: (f"{FLOORS}:compress_manifest", {"directory": made["directory"]}),
        },
        metrics={"seconds": {"official": 8}, "peak memory": {"official": 3}},
        floor="compress the same manifest on one thread, write and sync it",
    )


@pytest.mark.parametrize("spec", [2, 1])
def test_set_native(contest: Contest, spec: int) -> None:
    """Chunks in memory, so that no disk is measured."""
    count = contest.pick(500, 100_000 if contest.size == "full" else MILLION)
    contest.children(
        f"commit {count:,} native references, format {spec}",
        lambda: {
            **{
                engine: (f"{HERE}:set_native", {"engine": engine, "count": count, "spec": spec})
                for engine in ENGINES
            },
            FLOOR: (f"{FLOORS}:compress_ids", {"count": count}),
        },
        metrics={
            "seconds": {"official": 4} if count == MILLION else {},
            "peak memory": {},
            "seconds in all": {},
        },
        floor="make and compress as many random ids",
        rounds=contest.pick(1, 3 if contest.size == "full" else 1),
        note="without the time in which the chunks are written; seconds in all: with it",
    )


@pytest.mark.parametrize("spec", [2, 1])
@pytest.mark.parametrize("writer", ENGINES)
@pytest.mark.parametrize("count", [MILLION, 10 * MILLION], ids=["1m", "10m"])
def test_open_cold(contest: Contest, tmp_path: Path, count: int, writer: str, spec: int) -> None:
    """Open a repository and read the first chunk, from a manifest written by either engine."""
    wanted = _counted(contest, count)
    directory = str(tmp_path / "repository")
    _prepare(contest, writer, tmp_path, wanted, spec)
    floor = "read" if writer == "ours" else "decompress"  # only ours has an index
    contest.children(
        f"open cold and read a chunk, {wanted:,} references by {_by(writer)}, format {spec}",
        lambda: {
            **{
                engine: (f"{HERE}:open_cold", {"engine": engine, "directory": directory})
                for engine in ENGINES
            },
            FLOOR: (f"{FLOORS}:{floor}_manifest", {"directory": directory}),
        },
        floor="read the manifest's file" + (" and decompress it" if floor == "decompress" else ""),
        metrics={
            "seconds": {"official": 2.5},
            "peak memory": {"official": 2} if count > MILLION else {},
            "bytes": {},
        },
        # What our layout of large manifests is for.
        limits=SEEKABLE if count > MILLION and writer == "ours" else {},
        rounds=5,
    )


@pytest.mark.parametrize("spec", [2, 1])
@pytest.mark.parametrize("writer", ENGINES)
def test_iterate(contest: Contest, tmp_path: Path, writer: str, spec: int) -> None:
    """Every reference, from a cold repository."""
    count = _counted(contest, MILLION)
    directory = str(tmp_path / "repository")
    _prepare(contest, writer, tmp_path, count, spec)
    listed = {"directory": directory, "count": count}
    contest.children(
        f"iterate over {count:,} references by {_by(writer)} as columns, format {spec}",
        lambda: {
            **{engine: (f"{HERE}:iterate", {"engine": engine, **listed}) for engine in ENGINES},
            "ours, a table of files": (f"{HERE}:iterate_columns", listed),
            FLOOR: (f"{FLOORS}:decompress_manifest", {"directory": directory}),
        },
        floor="read the manifest's file and decompress it",
        metrics={"seconds": {"official": 5}, "peak memory": {}},
        note="both return a list with a text for each reference, but for the table of files",
    )


@pytest.mark.parametrize("spec", [2, 1])
@pytest.mark.parametrize(
    ("count", "split"),
    [(MILLION, None), (MILLION // 2, MILLION // 10), (MILLION, MILLION // 10)],
    ids=["one-manifest", "split-of-half", "split"],
)
def test_change_one(
    contest: Contest, tmp_path: Path, count: int, split: int | None, spec: int
) -> None:
    """Open a repository, give one chunk another reference, and commit."""
    count = _counted(contest, count)
    pieces = None if split is None else _counted(contest, split)
    for engine in ENGINES:
        _prepare(contest, engine, tmp_path / engine, count, spec, pieces)
    layout = "one manifest" if pieces is None else f"manifests of {pieces:,}"
    contest.children(
        f"change one of {count:,} references in {layout} and commit, format {spec}",
        lambda: {
            **{
                engine: (
                    f"{HERE}:change_one",
                    {"engine": engine, "directory": str(tmp_path / engine / "repository")},
                )
                for engine in ENGINES
            },
            FLOOR: (
                f"{FLOORS}:write_manifest",
                {"directory": str(tmp_path / "ours" / "repository")},
            ),
        },
        metrics={"seconds": {"official": 4}},
        floor="write the manifest's file and sync it",
        note="the process opens the repository first",
    )


def _prepare(
    contest: Contest, engine: str, folder: Path, count: int, spec: int, split: int | None = None
) -> None:
    folder.mkdir(exist_ok=True)
    contest.call(
        f"{HERE}:prepare",
        {
            "engine": engine,
            "directory": str(folder / "repository"),
            "source": str(folder / "source"),
            "count": count,
            "spec": spec,
            "split": split,
        },
    )


def _by(writer: str) -> str:
    return "us" if writer == "ours" else "the official engine"
