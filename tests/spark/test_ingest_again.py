"""What was ingested stays true: of other files, of what was deleted, of data behind an index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark import ingest_virtual
from tests.spark.here import session_here
from tests.spark.sources import open_for

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.sync import Repository


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A directory to ingest from."""
    directory = tmp_path / "sources"
    directory.mkdir()
    return directory


@pytest.fixture
def repo(url: str, sources: Path) -> Repository:
    """A repository that may read it."""
    return open_for(url, sources)


def write_store(path: Path, value: int, steps: int = 4, **attributes: Any) -> str:
    """Write a Zarr store with one array of one value, in place of what is there."""
    group = zarr.open_group(path, mode="w", zarr_format=3, attributes=attributes)
    array: Any = group.create_array(
        "v", shape=(steps,), chunks=(2,), dtype="i8", dimension_names=["t"], compressors=None
    )
    array[...] = value
    return str(path)


def read(repo: Repository, path: str) -> list[int]:
    """Read an array of the branch."""
    store = repo.readonly_session("main").store
    found: Any = zarr.open_array(store, path=path, mode="r")
    values: list[int] = np.asarray(found[...]).tolist()
    return values


def ingest(repo: Repository, files: list[str], **options: Any) -> list[str]:
    """Ingest; answer the status of each file."""
    made = ingest_virtual(session_here(), repo, files, **options)
    found: list[str] = made.report.column("status").to_pylist()
    return found


def test_no_group_of_a_file_lies_within_that_of_another(repo: Repository, sources: Path) -> None:
    """In either order, in one run or over several: each would take the other's data with it."""
    groups = {"a.zarr": "x", "b.zarr": "x/y", "c.zarr": "c"}

    def group_of(location: str) -> str:
        return groups[location.rstrip("/").rpartition("/")[2]]

    a, b, c = (write_store(sources / name, number) for number, name in enumerate(groups))
    for files in ([a, b], [b, a]):
        with pytest.raises(InvalidInputError, match=r"'/x/y'.*'/x'|'/x'.*'/x/y'"):
            ingest(repo, files, group_of=group_of)
    for root, first, then in (("outer", a, b), ("inner", b, a)):
        assert ingest(repo, [first], group=root, group_of=group_of) == ["ingested"]
        with pytest.raises(InvalidInputError, match=r"a\.zarr.*b\.zarr|b\.zarr.*a\.zarr"):
            ingest(repo, [then], group=root, group_of=group_of)
    with pytest.raises(InvalidInputError, match=r"'/outer/x' of .*a\.zarr"):
        ingest(repo, [c], group="outer/x/below")
    # What leaves a group, or leaves at all, is no obstacle.
    groups["a.zarr"] = "z"
    assert ingest(repo, [b, a], group="outer", group_of=group_of) == ["ingested"] * 2
    assert (read(repo, "outer/z/v"), read(repo, "outer/x/y/v")) == ([0] * 4, [1] * 4)
    groups["c.zarr"] = "z/c"
    statuses = ingest(repo, [c], group="outer", group_of=group_of, mode="overwrite")
    assert statuses == ["ingested", "removed", "removed"]
    assert read(repo, "outer/z/c/v") == [2] * 4


def test_what_stays_in_its_group_is_not_written_into(repo: Repository, sources: Path) -> None:
    """A file that cannot be read as it is now stays where it was, whatever group it is to have."""
    groups = {"a.zarr": "x", "b.zarr": "x/y"}

    def group_of(location: str) -> str:
        return groups[location.rstrip("/").rpartition("/")[2]]

    a, b = (write_store(sources / name, number) for number, name in enumerate(groups))
    ingest(repo, [a], group_of=group_of)
    groups["a.zarr"] = "z"
    (sources / "a.zarr" / "zarr.json").write_text("broken")
    with pytest.raises(InvalidInputError, match=r"'/x/y' and '/x'"):
        ingest(repo, [a, b], group_of=group_of)


def test_a_group_that_was_deleted_is_ingested_again(repo: Repository, sources: Path) -> None:
    """What the catalog says of a file is believed only while its group is there."""
    files = [write_store(sources / name, 1) for name in ("a.zarr", "b.zarr")]
    ingest(repo, files)
    session = repo.writable_session("main")
    del zarr.open_group(session.store, mode="a")["a"]
    session.commit("Deleted one")
    assert ingest(repo, files) == ["ingested", "unchanged"]
    assert read(repo, "a/v") == [1] * 4
    assert ingest(repo, files) == ["unchanged"] * 2
