"""Import, and open for the first time.

In a process that has imported zarr, as every program that reads arrays has.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import zarr

from benchmarks.contest import FLOOR
from benchmarks.peers import chunked, create

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from benchmarks.contest import Contest

UNASKED = ("aiobotocore", "aiohttp", "dask", "gcsfs", "matplotlib", "obstore", "pyspark", "xarray")
BRANCHES = ("branch", "list")
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
    # No driver and no extra is imported before somebody asks for it.
    assert set(found["ours"]["imported unasked"]) == {0}


def _command(arguments: list[str]) -> dict[str, tuple[str, dict[str, object]]]:
    return {"ours": ("benchmarks.importing:start_command", {"arguments": arguments})}


def test_start_of_the_command(contest: Contest, tmp_path: Path) -> None:
    """CPU of a process from its start to its end; the official engine has no command."""
    place = str(tmp_path / "repository")
    create("official", place)
    rows = {
        "--version": ["--version"],
        "log": ["log", place],
        "branch list": [*BRANCHES, place],
        "status": ["status", place],
    }
    for name, arguments in rows.items():
        contest.children(
            f"command: {name}",
            partial(_command, arguments),
            metrics={"seconds": {}, "cpu seconds": {}},
            limits={"cpu seconds": 0.25},
            rounds=7,
            environment={"PYTHONDONTWRITEBYTECODE": ""},
        )


def _first_opens(
    contest: Contest, place: Path, workload: str, environment: Mapping[str, str]
) -> None:
    """Have processes import, open a repository and read a chunk."""
    session = create("official", str(place)).writable_session("main")
    chunked(session.store, 4, 8000)[:] = 1
    session.commit("filled")
    contest.children(
        workload,
        lambda: {
            name: (
                "benchmarks.importing:first_open",
                {"module": module, "directory": str(place)},
            )
            for name, module in MODULES.items()
        },
        metrics={"seconds": {}},
        rounds=7,
        environment=environment,
    )


def test_first_open(contest: Contest, tmp_path: Path) -> None:
    """Seconds to import, open a repository on the local disk and read a chunk."""
    workload = "import, open and read a first chunk, after zarr"
    _first_opens(contest, tmp_path / "repository", workload, {"PYTHONDONTWRITEBYTECODE": ""})


def test_first_open_without_bytecode(contest: Contest, tmp_path: Path) -> None:
    """The same where Python has compiled nothing yet, as in a fresh container."""
    nothing = str(tmp_path / "nothing")
    _first_opens(
        contest,
        tmp_path / "repository",
        "import, open and read a first chunk, after zarr, without bytecode",
        # Bytecode is looked for in an empty folder, and not written there, so that each turn
        # compiles.
        {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": nothing},
    )


def test_first_dataset(contest: Contest, tmp_path: Path) -> None:
    """Seconds to open 200 variables with xarray, the first in the process."""
    session = create("official", str(tmp_path / "repository")).writable_session("main")
    group = zarr.create_group(session.store)
    for number in range(contest.pick(3, 200)):
        group.create_array(f"v{number}", shape=(4,), dtype="f4", dimension_names=["x"])
    session.commit("filled")
    contest.children(
        f"xarray: open {contest.pick(3, 200)} variables, the first in the process",
        lambda: {
            name: (
                "benchmarks.importing:first_dataset",
                {"module": module, "directory": str(tmp_path / "repository")},
            )
            for name, module in MODULES.items()
        },
        metrics={"seconds": {}},
        rounds=5,
        environment={"PYTHONDONTWRITEBYTECODE": ""},
    )
