"""The golden arrays, as files in memory."""

from __future__ import annotations

import io
import json
import tarfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async.storage import open_storage
from tests.helpers import memory_url

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    type Job = dict[str, Any]

__all__ = ["ARCHIVES", "cases", "files_below", "filled", "golden_jobs", "load", "stored_results"]

_GOLDEN = Path(__file__).parent / "golden"
ARCHIVES = sorted(
    (it.name.removesuffix(".tar.xz") for it in _GOLDEN.glob("by-*.tar.xz")),
    key=lambda it: [int(part) for part in it.removeprefix("by-").split(".")],
)


@cache
def load(archive: str) -> dict[str, bytes]:
    """Return the files of an archive."""
    with tarfile.open(_GOLDEN / f"{archive}.tar.xz") as packed:
        found: dict[str, bytes] = {}
        for member in packed.getmembers():
            data = packed.extractfile(member)
            assert data is not None
            found[member.name] = data.read()
    return found


def golden_jobs(archive: str) -> list[Job]:
    """Return the jobs whose arrays an archive has; ``number`` names the folder of the array."""
    jobs: list[Job] = json.loads(load(archive)["jobs.json"])
    return jobs


def cases(
    fits: Callable[[Job], bool] = lambda _: True, *, quick: Sequence[str] = ARCHIVES
) -> list[Any]:
    """Return parameters for a test: an archive and a job for each array that fits.

    Those of other archives than ``quick`` are left to thorough runs.
    """
    return [
        pytest.param(
            archive,
            job,
            id=f"{archive}-{job['number']}",
            marks=() if archive in quick else pytest.mark.thorough,
        )
        for archive in ARCHIVES
        for job in golden_jobs(archive)
        if fits(job)
    ]


def files_below(archive: str, folder: str) -> dict[str, bytes]:
    """Return the files of one array."""
    start = f"{folder}/"
    return {
        name.removeprefix(start): data
        for name, data in load(archive).items()
        if name.startswith(start)
    }


def stored_results(archive: str, folder: str, query: int) -> dict[str, Any] | None:
    """Return the cells that TileDB read; None if it refused the query."""
    data = load(archive).get(f"{folder}-{query}.npz")
    return None if data is None else dict(np.load(io.BytesIO(data)))


async def filled(files: Mapping[str, bytes]) -> str:
    """Return the URL of memory that holds some files."""
    url = memory_url()
    async with open_storage(url) as storage:
        for name, data in files.items():
            await storage.put(name, data)
    return url
