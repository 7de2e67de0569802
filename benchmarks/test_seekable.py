"""Find references in a large manifest that we wrote.

Both engines open the same repository and look up references in the middle of an array. Ours reads
an index and a few pieces of the manifest; the official engine reads all of it. The floor reads the
manifest's file: whoever has no index cannot do less.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zarr

from benchmarks.contest import FLOOR
from benchmarks.peers import tip_store
from benchmarks.references import CHUNK_BYTES, prepare

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.contest import Contest

ENGINES = ("ours", "official")


@pytest.mark.parametrize("neighbours", [1, 64])
def test_look_up(contest: Contest, tmp_path: Path, neighbours: int) -> None:
    """Open, and know one reference, or some in a row, which share their pieces."""
    count = contest.pick(2000, 1_000_000)
    directory = str(tmp_path / "repository")
    prepare("ours", directory, str(tmp_path / "source"), count, spec=2)
    first = count // 2

    def looking(engine: str) -> Callable[[], None]:
        def look() -> None:
            store: Any = tip_store(engine, directory)
            for number in range(first, first + neighbours):
                assert zarr.core.sync.sync(store.getsize(f"a/c/{number}")) == CHUNK_BYTES

        return look

    def read_all() -> None:
        for path in (Path(directory) / "manifests").iterdir():
            path.read_bytes()

    contest.race(
        f"open cold and look up {neighbours} of {count:,} references by us",
        {**{engine: looking(engine) for engine in ENGINES}, FLOOR: read_all},
        floor="read the manifest's file",
        targets={"official": 2.5},
    )
