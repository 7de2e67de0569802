"""Import, and open for the first time.

In a process that has imported zarr, as every program that reads arrays has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.contest import FLOOR
from benchmarks.peers import chunked, create

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.contest import Contest

UNASKED = ("aiobotocore", "aiohttp", "dask", "gcsfs", "matplotlib", "obstore", "pyspark", "xarray")
MODULES = {"ours": "icechunk_async.sync", "official": "icechunk"}


def test_import(contest: Contest) -> None:
    """Seconds beyond those of zarr."""
    found = contest.children(
        "import Repository, after zarr",
        lambda: {
            **{
                name: (
                    "benchmarks.importing:import_after_zarr",
                    {"module": module, "unasked": UNASKED},
                )
                for name, module in MODULES.items()
            },
            FLOOR: ("benchmarks.floors:load_code", {"module": MODULES["ours"]}),
        },
        floor="load the compiled code of our modules, and run none",
        metrics={"seconds": {}, "cpu seconds": {}},
        limits={"seconds": 0.150},
        rounds=7,
        environment={"PYTHONDONTWRITEBYTECODE": ""},
    )
    assert set(found["ours"]["imported unasked"]) == {0}


def test_first_open(contest: Contest, tmp_path: Path) -> None:
    """Seconds to import, open a repository on the local disk and read a chunk."""
    session = create("official", str(tmp_path / "repository")).writable_session("main")
    chunked(session.store, 4, 8000)[:] = 1
    session.commit("filled")
    contest.children(
        "import, open and read a first chunk, after zarr",
        lambda: {
            name: (
                "benchmarks.importing:first_open",
                {"module": module, "directory": str(tmp_path / "repository")},
            )
            for name, module in MODULES.items()
        },
        metrics={"seconds": {}},
        rounds=7,
        environment={"PYTHONDONTWRITEBYTECODE": ""},
    )
