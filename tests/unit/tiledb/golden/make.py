"""Write the golden arrays: `python -m tests.unit.tiledb.golden.make`; needs pip and PyPI.

Each release of TileDB writes some random arrays and those with its features. The newest one reads
them, except sparse arrays of TileDB 1, of which it reads cells twice. An archive for each release
holds the arrays, the jobs and the results.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from tests.tiledb import work
from tests.tiledb.engine import Engine
from tests.tiledb.jobs import FUTURE, dense_job, feature_jobs, labelled_job, sparse_job
from tests.tiledb.wheels import RELEASES, downloaded_library

_HERE = Path(__file__).parent
_NEWEST = "0.36.1"
_FEATURED = ("0.5.9", "0.10.5", "0.16.5", "0.22.3", _NEWEST)
_RANDOM = 2
_MOST_BYTES = 50_000
_TRIED = 10


def run(release: str, jobs: list[dict[str, Any]], out: Path, *, reader: str) -> set[int]:
    """Let a release work on jobs; return the numbers of those that worked."""
    out.mkdir(parents=True)
    (out / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    libraries = downloaded_library(release), downloaded_library(reader)
    command = [sys.executable, work.__file__, *libraries, str(out / "jobs.json"), str(out)]
    subprocess.run(command, check=True)
    errors = json.loads((out / "errors.json").read_text(encoding="utf-8"))
    return {n for n in range(len(jobs)) if not any(it.split("-")[0] == str(n) for it in errors)}


def packed(folder: Path, number: int) -> dict[str, bytes]:
    """Return the files of a job."""
    found = {str(it.relative_to(folder)): it.read_bytes() for it in folder.glob(f"{number}-*.npz")}
    for it in (folder / str(number)).rglob("*"):
        if it.is_file() and it.name != "__lock.tdb":
            found[str(it.relative_to(folder))] = it.read_bytes()
    return found


def choose(release: str, kind: str, scratch: Path) -> list[tuple[dict[str, Any], dict[str, bytes]]]:
    """Return some jobs of a kind that a release can do, and their files."""
    _, version, _ = RELEASES[release]
    make = {"dense": dense_job, "sparse": sparse_job}
    if kind == "features":
        jobs = feature_jobs(version)
    else:
        jobs = [make[kind](seed, version) for seed in range(_TRIED)]
    old = kind == "sparse" and version < (2, 0)
    out = scratch / release / kind
    good = run(release, jobs, out, reader=release if old else _NEWEST)
    found = []
    for number in sorted(good):
        files = packed(out, number)
        if kind == "features" or sum(map(len, files.values())) < _MOST_BYTES:
            inner = {f"{kind}-{name}": data for name, data in files.items()}
            found.append(({**jobs[number], "number": f"{kind}-{number}"}, inner))
    return found if kind == "features" else found[:_RANDOM]


def archive(path: Path, files: dict[str, bytes]) -> None:
    """Write an archive; names are sorted, so that files that are alike follow one another."""
    with tarfile.open(path, "w:xz", preset=9) as out:
        for name in sorted(files, key=lambda it: (it.rpartition("/")[2], it)):
            info = tarfile.TarInfo(name)
            info.size = len(files[name])
            out.addfile(info, io.BytesIO(files[name]))


def write(release: str, scratch: Path) -> None:
    """Write the archive of a release."""
    kinds = ("dense", "sparse", "features") if release in _FEATURED else ("dense", "sparse")
    chosen = [it for kind in kinds for it in choose(release, kind, scratch)]
    files = {"jobs.json": json.dumps([job for job, _ in chosen]).encode()}
    for _, found in chosen:
        files |= found
    archive(_HERE / f"by-{release}.tar.xz", files)


def write_group(scratch: Path) -> None:
    """Write a group with members, metadata and an array with a label, by the newest release."""
    engine = Engine(downloaded_library(_NEWEST))
    root = scratch / "group"
    engine.create_group(str(root))
    engine.create_group(str(root / "inner"))
    work.perform(engine, str(root / "labelled"), labelled_job())
    for name in ("plain", "gone"):
        work.perform(engine, str(root / name), {**labelled_job(), "labels": [], "steps": []})
    for time, text in ((10, "before"), (20, "after")):
        values = {"text": ["utf8", text], "number": ["int32", [time]], "both": ["float64", [1, 2]]}
        step = {"op": "metadata", "time": FUTURE + time, "set": values}
        engine.put_metadata(str(root / "labelled"), step)
    engine.put_metadata(str(root / "labelled"), {"time": FUTURE + 30, "delete": ["number"]})
    members = [{"uri": it, "name": it} for it in ("labelled", "plain", "inner", "gone")]
    first = {"time": FUTURE + 10, "add": members, "set": {"title": ["utf8", "a group"]}}
    engine.change_group(str(root), first)
    engine.change_group(str(root), {"time": FUTURE + 20, "remove": ["gone"]})
    files = {str(it.relative_to(root)): it.read_bytes() for it in root.rglob("*") if it.is_file()}
    archive(_HERE / "group.tar.xz", files)


def main() -> None:
    """Write all archives, or those of the releases that are named."""
    with tempfile.TemporaryDirectory() as scratch:
        for release in sys.argv[1:] or RELEASES:
            write(release, Path(scratch))
        if not sys.argv[1:] or _NEWEST in sys.argv:
            write_group(Path(scratch))


if __name__ == "__main__":
    main()
