"""Repeated ingests: other files, deleted output, and changed data behind an index."""

from __future__ import annotations

import json
import shutil
import struct
from typing import TYPE_CHECKING, Any

import anyio.lowlevel
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from anyio import to_thread

from icechunk_async.errors import FormatError, InvalidInputError, VirtualSourceChangedError
from icechunk_async.spark import ingest_virtual
from icechunk_async.spark.ingest import ingest as ingest_module
from icechunk_async.spark.ingest import tasks as tasks_module
from icechunk_async.spark.ingest.scan import SourceState
from icechunk_async.spark.ingest.source import list_folder
from icechunk_async.spark.ingest.tasks import (
    FileWork,
    ScanOptions,
    load_values,
    look_at_files,
    scan_source,
)
from icechunk_async.spark.shared import SharedRepository, workspace_of
from icechunk_async.spark.tasks import run_job
from icechunk_async.zarr.virtual.kerchunk import location_of
from tests.spark.here import session_here
from tests.spark.sources import make_newer, open_for

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


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """The jobs that run: their phase, and the files of each task."""
    found: list[tuple[str, list[int]]] = []

    def run(*args: Any, phase: str, **options: Any) -> Any:
        if args[2]:
            found.append((phase, [len(it.files) for it in args[2]]))
        return run_job(*args, phase=phase, **options)

    monkeypatch.setattr(ingest_module, "run_job", run)
    return found


def test_unchanged_files_are_looked_at_in_few_tasks(
    repo: Repository, sources: Path, jobs: list[tuple[str, list[int]]]
) -> None:
    """A rerun costs what changed: only that is scanned, and starting tasks takes Spark longest."""
    files = [write_store(sources / f"{it:02}.zarr", it) for it in range(32)]
    assert ingest(repo, files) == ["ingested"] * 32
    assert jobs == [("scanning files", [1] * 32)]
    jobs.clear()
    assert ingest(repo, files) == ["unchanged"] * 32
    assert jobs == [("looking for changes", [4] * 8)]  # the session says that it has eight cores
    jobs.clear()
    write_store(sources / "03.zarr", 103)
    (sources / "05.zarr" / "zarr.json").write_text("broken", "utf-8")
    files.append(write_store(sources / "32.zarr", 32))
    statuses = ingest(repo, files)
    assert [statuses[it] for it in (2, 3, 5, 32)] == ["unchanged", "ingested", "kept", "ingested"]
    assert jobs == [("looking for changes", [4] * 8), ("scanning files", [1] * 3)]
    assert (read(repo, "03/v"), read(repo, "32/v")) == ([103] * 4, [32] * 4)


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
    with pytest.raises(InvalidInputError, match=r"'/outer/x', which was ingested from .*a\.zarr"):
        ingest(repo, [c], group="outer/x/below")
    # What leaves a group, or leaves at all, is no obstacle.
    groups["a.zarr"] = "z"
    assert ingest(repo, [b, a], group="outer", group_of=group_of) == ["ingested"] * 2
    assert (read(repo, "outer/z/v"), read(repo, "outer/x/y/v")) == ([0] * 4, [1] * 4)
    groups["c.zarr"] = "z/c"
    statuses = ingest(repo, [c], group="outer", group_of=group_of, mode="overwrite")
    assert statuses == ["ingested", "removed", "removed"]
    assert read(repo, "outer/z/c/v") == [2] * 4


def test_group_of_a_kept_file_is_not_overwritten(repo: Repository, sources: Path) -> None:
    """A file that cannot be read now keeps its group, even if it should get another."""
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
    """A catalog entry counts only while its group exists."""
    files = [write_store(sources / name, 1) for name in ("a.zarr", "b.zarr")]
    ingest(repo, files)
    session = repo.writable_session("main")
    del zarr.open_group(session.store, mode="a")["a"]
    session.commit("Deleted one")
    assert ingest(repo, files) == ["ingested", "unchanged"]
    assert read(repo, "a/v") == [1] * 4
    assert ingest(repo, files) == ["unchanged"] * 2


def delete(repo: Repository, *paths: str) -> None:
    """Delete nodes by hand."""
    session = repo.writable_session("main")
    for path in paths:
        group, _, name = path.rpartition("/")
        del zarr.open_group(session.store, path=group, mode="a")[name]
    session.commit("Deleted by hand")


def write_pair(path: Path, value: int) -> str:
    """Write a Zarr store of two arrays, one of them in a group."""
    write_store(path, value)
    array: Any = (
        zarr.open_group(path, mode="a")
        .create_group("g")
        .create_array(
            "w", shape=(2,), chunks=(2,), dtype="i8", dimension_names=["t"], compressors=None
        )
    )
    array[...] = value
    return str(path)


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "not listed"])
@pytest.mark.parametrize("gone", ["a/v", "a/g/w", "a/g"])
def test_an_array_deleted_within_a_group_is_ingested_again(
    repo: Repository, sources: Path, gone: str, *, listed: bool
) -> None:
    """Whether its file is listed or not; other files are not read again."""
    a, b = (write_pair(sources / name, number) for number, name in enumerate(("a.zarr", "b.zarr")))
    ingest(repo, [a, b])
    delete(repo, gone)
    assert sorted(ingest(repo, [a, b] if listed else [b])) == ["ingested", "unchanged"]
    assert (read(repo, "a/v"), read(repo, "a/g/w")) == ([0] * 4, [0] * 2)
    assert ingest(repo, [a, b]) == ["unchanged"] * 2


def test_an_array_that_cannot_be_brought_back_is_reported(repo: Repository, sources: Path) -> None:
    """The rest of its group stays, and the report names what is missing."""
    a = write_pair(sources / "a.zarr", 1)
    ingest(repo, [a])
    delete(repo, "a/v")
    (sources / "a.zarr" / "zarr.json").write_text("broken", "utf-8")
    done = ingest_virtual(session_here(), repo, [a])
    (row,) = done.report.to_pylist()
    assert row["status"] == "kept"
    assert "'/a/v' is missing and cannot be ingested again" in row["reason"]
    assert not done.published.committed
    assert read(repo, "a/g/w") == [1, 1]


@pytest.mark.parametrize("place", ["/v", "/"])
@pytest.mark.parametrize("document", [b"{", b"[]", b"[" * 100_000, b'{"attributes": [1]}'])
def test_what_is_damaged_in_the_output_is_not_written_over(
    repo: Repository, sources: Path, place: str, document: bytes
) -> None:
    """Another writer may have stored any bytes: the error says whose they are."""

    def concatenate(*files: str) -> None:
        ingest_virtual(session_here(), repo, files, concat_dim="t", load=())

    a, b = (write_store(sources / f"{it}.zarr", it) for it in (1, 2))
    concatenate(a)
    session = repo.writable_session("main")
    workspace = workspace_of(session)
    node = workspace.node(place)
    assert node is not None
    workspace.tree.set_node(place, document, node.array)
    damaged = session.commit("damaged")
    with pytest.raises(FormatError, match=f"'{place}'"):
        concatenate(a, b)
    assert repo.lookup_branch("main") == damaged


def test_a_concatenated_array_that_was_deleted_comes_back_with_all_files(
    repo: Repository, sources: Path
) -> None:
    """Those that are not listed, too; one that cannot be read stops it, and nothing is lost."""

    def concatenate(*files: str) -> list[str]:
        done = ingest_virtual(session_here(), repo, files, concat_dim="t", load=())
        statuses: list[str] = done.report.column("status").to_pylist()
        return statuses

    a, b, c = (write_uniform(sources / f"{it}.zarr", it) for it in (1, 2, 3))
    concatenate(a, b)
    delete(repo, "w")
    assert concatenate(c) == ["ingested"] * 3
    assert read(repo, "v") == read(repo, "w") == [1, 1, 2, 2, 3, 3]
    delete(repo, "v")
    (sources / "1.zarr" / "zarr.json").write_text("broken", "utf-8")
    with pytest.raises(InvalidInputError, match="written anew with the others"):
        concatenate(b, c)
    assert read(repo, "w") == [1, 1, 2, 2, 3, 3]
    delete(repo, "w")  # all of it: begin with what is listed
    assert concatenate(b, c) == ["ingested"] * 2
    assert read(repo, "v") == [2, 2, 3, 3]


def write_uniform(path: Path, value: int) -> str:
    """Write a Zarr store with two arrays of two steps."""
    group = zarr.open_group(path, mode="w", zarr_format=3)
    for name in ("v", "w"):
        array: Any = group.create_array(
            name, shape=(2,), chunks=(2,), dtype="i8", dimension_names=["t"], compressors=None
        )
        array[...] = value
    return str(path)


def write_references(sources: Path, *, as_parquet: bool) -> str:
    """Write references of kerchunk to ``data.bin``."""
    array = {"zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<i8", "fill_value": 0}
    array |= {"compressor": None, "filters": None, "order": "C"}
    metadata = {".zgroup": {"zarr_format": 2}, "v/.zarray": array}
    data = str(sources / "data.bin")
    if not as_parquet:
        refs = {**metadata, "v/0": [data, 0, 32]}
        (sources / "k.json").write_text(json.dumps({"version": 1, "refs": refs}))
        return str(sources / "k.json")
    (sources / "k.parq" / "v").mkdir(parents=True)
    about = json.dumps({"metadata": metadata, "record_size": 1})
    (sources / "k.parq" / ".zmetadata").write_text(about)
    table = pa.Table.from_pydict({"path": [data], "offset": [0], "size": [32]})
    pq.write_table(table, str(sources / "k.parq" / "v" / "refs.0.parq"))
    return str(sources / "k.parq")


@pytest.mark.parametrize("as_parquet", [False, True])
def test_references_are_ingested_again_when_what_they_refer_to_changed(
    repo: Repository, sources: Path, *, as_parquet: bool
) -> None:
    """Else nothing would be said to have changed, and guards would refuse every read."""
    data = sources / "data.bin"
    data.write_bytes(np.full(4, 1, "<i8").tobytes())
    file = write_references(sources, as_parquet=as_parquet)
    assert [ingest(repo, [file]) for _ in range(2)] == [["ingested"], ["unchanged"]]
    data.write_bytes(np.full(4, 2, "<i8").tobytes())
    make_newer(data)
    assert ingest(repo, [file]) == ["ingested"]
    assert read(repo, "k/v") == [2] * 4


def test_no_job_looks_at_references_that_have_to_be_scanned(
    repo: Repository, sources: Path, jobs: list[tuple[str, list[int]]]
) -> None:
    """Of kerchunk: only their contents say what they refer to. Others beside them are looked at."""
    (sources / "data.bin").write_bytes(np.full(4, 1, "<i8").tobytes())
    first = write_references(sources, as_parquet=False)
    files = [str(sources / f"{number}.json") for number in range(12)]
    for file in files:
        shutil.copy(first, file)
    assert ingest(repo, files) == ["ingested"] * 12
    jobs.clear()
    assert ingest(repo, files) == ["unchanged"] * 12
    assert jobs == [("scanning files", [1] * 12)]
    stores = [write_store(sources / f"store{it}.zarr", it) for it in range(12)]
    ingest(repo, stores)
    jobs.clear()
    assert ingest(repo, [*files, *stores]) == ["unchanged"] * 24
    looking, scanning = jobs
    assert (looking[0], sum(looking[1])) == ("looking for changes", 12)
    assert (scanning[0], sum(scanning[1])) == ("scanning files", 12)


def test_few_folders_are_listed_at_a_time(
    repo: Repository, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task holds the listings of these, and folders may have many objects."""
    files = [location_of(write_store(sources / f"{it}.zarr", it), {}) for it in range(12)]
    at_once: list[int] = []
    listing = 0

    async def listed(*args: Any) -> Any:
        nonlocal listing
        listing += 1
        at_once.append(listing)
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        found = await list_folder(*args)
        listing -= 1
        return found

    monkeypatch.setattr(tasks_module, "list_folder", listed)
    work = FileWork(ScanOptions(), tuple((it, "old") for it in files))
    SharedRepository.of(repo).ask(lambda native: look_at_files(native, work))
    assert (len(at_once), max(at_once), listing) == (12, 4, 0)


def test_an_index_is_scanned_again_when_its_file_changed(repo: Repository, sources: Path) -> None:
    """Of GRIB: two looks tell, and nothing is read where neither is another."""
    file, index = sources / "f.grib2", sources / "f.grib2.idx"
    section = struct.pack(">IB7xH16xII", 72, 3, 0, 1, 1)
    message = b"GRIB\0\0\0\2" + bytes(8) + section + bytes(40)
    file.write_bytes(message)
    index.write_text("1:0:d=2020010100:TMP:2 m above ground:anl:")
    options = ScanOptions(grib_codec={"name": "bytes"})

    async def scan(native: Any) -> tuple[str, Any]:
        return await scan_source(native.engine.virtual, index.as_uri(), options, known)

    known: str | None = None
    first, found = SharedRepository.of(repo).ask(scan)
    assert found is not None
    known = first
    assert SharedRepository.of(repo).ask(scan) == (first, None)
    make_newer(file)
    second, found = SharedRepository.of(repo).ask(scan)
    assert found is not None
    assert second != first


@pytest.mark.parametrize("kind", ["zarr", "kerchunk"])
def test_values_are_not_copied_of_a_file_that_changed_meanwhile(
    repo: Repository, sources: Path, kind: str
) -> None:
    """Between the scan and the copy; they would be stored under the stamp of the earlier state."""
    data = sources / "a.zarr" / "v" / "c" / "0"
    file = f"{write_store(sources / 'a.zarr', 1)}/"
    if kind == "kerchunk":
        data = sources / "data.bin"
        data.write_bytes(np.full(4, 1, "<i8").tobytes())
        file = write_references(sources, as_parquet=False)

    async def copy(native: Any) -> Any:
        virtual = native.engine.virtual
        _, found = await scan_source(virtual, location_of(file, {}), ScanOptions())
        assert found is not None
        copied = await load_values(virtual, found, ["v"])
        await to_thread.run_sync(make_newer, data)
        with pytest.raises(VirtualSourceChangedError, match="changed while it was read"):
            await load_values(virtual, found, ["v"])
        return copied.arrays["v"].values

    np.testing.assert_array_equal(SharedRepository.of(repo).ask(copy), [1] * 4)


def test_listed_times_are_compared_at_the_precision_of_replies() -> None:
    """Some stores list milliseconds, and reply whole seconds."""
    listed = SourceState(4, "", None, 1_700_000)
    for modified, holds in ((1_700_000, True), (1_000_000, True), (2_000_000, False)):
        assert listed.holds_for(SourceState(4, "v", None, modified)) is holds
    assert not listed.holds_for(SourceState(5, "v", None, 1_700_000))


def test_groups_have_the_attributes_of_the_first_file_as_it_is_now(
    repo: Repository, sources: Path
) -> None:
    """Where files are concatenated; what others added stays."""

    def attributes() -> dict[str, Any]:
        store = repo.readonly_session("main").store
        return zarr.open_group(store, path="all", mode="r").attrs.asdict()

    options: dict[str, Any] = {"group": "all", "concat_dim": "t", "load": []}
    session = repo.writable_session("main")
    zarr.open_group(session.store, path="all", mode="a", attributes={"by": "us"})
    session.commit("Made the group")
    a = write_store(sources / "a.zarr", 1, version=1)
    b = write_store(sources / "b.zarr", 2, version=7)
    ingest(repo, [a, b], **options)
    assert attributes() == {"by": "us", "version": 1}
    write_store(sources / "a.zarr", 3, version=2)
    assert ingest(repo, [a, b], **options) == ["ingested", "unchanged"]
    assert attributes() == {"by": "us", "version": 2}
    write_store(sources / "a.zarr", 4, title="new")
    assert ingest(repo, [a, b], **options) == ["ingested", "unchanged"]
    assert attributes() == {"by": "us", "title": "new"}
    write_store(sources / "b.zarr", 2, version=8)
    assert ingest(repo, [a, b], **options) == ["unchanged", "ingested"]
    assert attributes() == {"by": "us", "title": "new"}
    ingest(repo, [b], **options, mode="overwrite")
    assert attributes() == {"by": "us", "version": 8}
    assert read(repo, "all/v") == [2] * 4
