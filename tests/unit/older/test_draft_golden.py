"""First drafts that another writer made, straight from the document, and files that others read."""

from __future__ import annotations

import io
import json
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import zarr

from icechunk_async import Repository
from icechunk_async.errors import (
    FormatError,
    SnapshotNotFoundError,
    UnsupportedBySpecError,
    VirtualAccessError,
)
from icechunk_async.format.draft.manifests import MANIFEST_SCHEMA
from icechunk_async.format.draft.structure import STRUCTURE_SCHEMA
from icechunk_async.storage import open_storage
from icechunk_async.upkeep import upgrade
from tests.helpers import memory_url, objects, read, write
from tests.unit.older.draft_golden import COMMITS, EXPECTED, SOURCE, golden_draft
from tests.unit.older.draft_writer import MANIFEST, STRUCTURE, DraftWriter, coord, group
from tests.unit.older.older_tools import array_at, opened_golden

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture(params=["", "data/here/"])
async def repository(request: pytest.FixtureRequest) -> AsyncIterator[Repository]:
    """Open the golden repository, whose files are beside the state file or below it."""
    async with opened_golden(golden_draft(request.param).objects, SOURCE) as opened:
        yield opened


@pytest.mark.parametrize("path", sorted(EXPECTED))
async def test_arrays_have_their_values(repository: Repository, path: str) -> None:
    """Inline, packed and virtual chunks, missing ones, of every kind of type."""
    session = await repository.readonly_session("main")
    array = await array_at(session, path)
    found = await array.getitem(slice(65500, None) if path == "long" else ...)
    expected = EXPECTED[path][65500:] if path == "long" else EXPECTED[path]
    assert np.asarray(found).tobytes() == expected.tobytes()


async def test_metadata_is_that_of_the_document(repository: Repository) -> None:
    """Names of dimensions, attributes inline and in a file, fill values to the bit."""
    session = await repository.readonly_session("main")
    documents = {
        path: json.loads(await read(session, f"{path}/zarr.json" if path else "zarr.json") or b"")
        for path in ("", "a", "a/packed", "a/two", "complex", "raw", "half", "scalar", "empty")
    }
    assert documents[""]["attributes"] == {
        "title": "Gölden",
        "list": [1, 2.5, None, {"deep": True}],
    }
    assert documents["a"]["attributes"] == {}
    assert documents["a/packed"]["attributes"] == {"units": "m", "long": "x" * 100}
    assert documents["a/packed"]["dimension_names"] == ["y", None]
    assert documents["a/packed"]["fill_value"] == -1
    assert documents["a/two"]["attributes"] == {"units": "K"}
    assert documents["a/two"]["codecs"] == [
        {"name": "bytes", "configuration": {"endian": "little"}}
    ]
    assert documents["complex"]["fill_value"] == [0.0, 0.0]
    assert documents["raw"]["fill_value"] == "AQID"
    assert documents["half"]["fill_value"] == "NaN"
    assert documents["scalar"]["fill_value"] == 0
    assert documents["empty"]["shape"] == [0]


async def test_history_and_references_are_those_of_the_state_file(repository: Repository) -> None:
    """Messages, properties, times to the millisecond, a branch, a tag, time travel."""
    infos = [info async for info in repository.ancestry(branch="main")]
    assert [info.message for info in infos] == [f"commit {n}" for n in range(COMMITS)][::-1]
    assert [info.metadata for info in infos] == [{"number": n} for n in range(COMMITS)][::-1]
    assert infos[0].flushed_at == 1_720_000_240_000_000
    branches = await repository.branches()
    assert branches == {"main": infos[0].id, "old": infos[3].id}
    assert await repository.tags() == {"v1": infos[3].id}
    session = await repository.readonly_session("main", as_of=infos[2].written_at)
    assert session.snapshot_id == infos[2].id
    with pytest.raises(SnapshotNotFoundError):
        await repository.readonly_session("main", as_of=infos[-1].written_at.replace(year=2023))


async def test_diff_finds_what_changed_between_snapshots(repository: Repository) -> None:
    """By comparing manifests, as there are no logs."""
    infos = {info.message: info async for info in repository.ancestry(branch="main")}
    ids = [infos[f"commit {n}"].id for n in range(COMMITS)]
    lost = await repository.diff(from_snapshot_id=ids[1], to_snapshot_id=ids[2])
    assert {path: coords.tolist() for path, coords in lost.updated_chunks.items()} == {
        "/a/two": [[1], [2]]
    }
    new = await repository.diff(from_snapshot_id=ids[3], to_snapshot_id=ids[4])
    assert new.new_arrays == {"/half"}
    assert new.updated_chunks["/half"].tolist() == [[1]]


async def test_commits_continue_it_with_the_same_schemas(repository: Repository) -> None:
    """The state file keeps what was there; pyarrow finds the schemas of the document."""
    before = await objects(repository.storage)
    session = await repository.writable_session("main")
    two = await zarr.api.asynchronous.open_array(store=session.store, path="a/two", mode="r+")
    await two.setitem(slice(0, 2), 9)
    tip = await session.commit("ours", {"author": "us"})
    after = await objects(repository.storage)
    new = {key: data for key, data in after.items() if before.get(key) != data}
    assert before.items() <= {**after, "state.json": before["state.json"]}.items()
    was, state = json.loads(before["state.json"]), json.loads(after["state.json"])
    assert state["snapshots"][:-1] == was["snapshots"]
    assert state["generation"] == was["generation"] + 1
    assert state["id"] == was["id"]
    assert state.get("store_root") == was.get("store_root")
    assert {name: state["refs"][name] for name in ("v1", "old")} == {
        name: was["refs"][name] for name in ("v1", "old")
    }
    entry = state["snapshots"][-1]
    assert entry["snapshot-id"] == str(tip) == state["refs"]["main"]["snapshot-id"]
    assert entry["parent-snapshot-id"] == was["snapshots"][-1]["snapshot-id"]
    assert entry["properties"] == {"message": "ours", "author": "us"}
    (structure,) = [data for key, data in new.items() if "s/" in key]
    (manifest,) = [data for key, data in new.items() if "i/" in key]
    table = pq.read_table(io.BytesIO(structure))
    assert table.schema.remove_metadata().equals(STRUCTURE)
    rows = {it["path"]: it for it in table.to_pylist()}
    assert rows["/a/packed"]["attrs_reference"]["row"] == 1  # they were not written again
    assert rows["/a/packed"]["inventories"][0]["inventory_file"].startswith("inventory-")
    assert rows["/a/two"]["array_metadata"]["shape"] == [6]
    chunks = pq.read_table(io.BytesIO(manifest))
    assert chunks.schema.equals(MANIFEST)
    assert [(it["array_id"], it["coord"]) for it in chunks.to_pylist()] == [
        (4, coord(0)),
        (4, coord(1)),
        (4, coord(2)),
    ]
    session = await repository.readonly_session("main")
    found = await (await array_at(session, "a/two")).getitem(...)
    assert found.tolist() == [9, 9, *EXPECTED["a/two"][2:].tolist()]
    found = await (await array_at(session, "a/packed")).getitem(...)
    assert found.tolist() == EXPECTED["a/packed"].tolist()


def test_the_schemas_are_those_of_the_document() -> None:
    """With the descriptions of fields; nothing is added, and nothing is left out."""
    assert MANIFEST_SCHEMA.equals(MANIFEST)
    assert STRUCTURE_SCHEMA.remove_metadata().equals(STRUCTURE)
    described = {
        field.name: field.metadata[b"description"].decode()
        for field in STRUCTURE_SCHEMA
        if field.metadata
    }
    assert described == {
        "id": "unique identifier for the node",
        "type": "array or group",
        "path": "path to the node within the store",
        "array_metadata": "All the Zarr array metadata",
        "inline_attrs": "user-defined attributes, stored inline with this entry",
        "attrs_reference": "user-defined attributes, stored in a separate attributes file",
    }


async def _opened(writer: DraftWriter) -> dict[str, Any]:
    async with open_storage(memory_url()) as storage:
        for key, data in writer.objects.items():
            await storage.put(key, data)
        async with Repository.open(storage) as repository:
            return {
                "branches": await repository.branches(),
                "history": [it.message async for it in repository.ancestry(branch="main")],
            }


async def test_a_state_file_without_references_has_its_newest_snapshot_as_main() -> None:
    """References, parents and properties are optional."""
    writer = DraftWriter()
    first = writer.snapshot([], None)
    writer.snapshot([group(1, "/")], first, {"message": "second"})
    writer.state(refs=None)
    found = await _opened(writer)
    assert list(found["branches"]) == ["main"]
    assert found["history"] == ["second", ""]


@pytest.mark.parametrize("root", ["../beside", "/data"])
async def test_files_outside_of_the_location_at_no_url_are_refused(root: str) -> None:
    """The error says where they are."""
    writer = DraftWriter()
    writer.snapshot([], None)
    writer.state(store_root=root)
    with pytest.raises(FormatError, match="store_root"):
        await _opened(writer)


FILES = "s3://elsewhere/data"


async def test_files_at_another_url_are_read_and_written_there_by_leave() -> None:
    """The state file stays where it is; forks that travel take the leave along."""
    async with open_storage(memory_url()) as storage, open_storage(memory_url()) as files:
        for key, data in golden_draft(f"{FILES}/").objects.items():
            place = storage if key == "state.json" else files
            await place.put(key.removeprefix(f"{FILES}/"), data)
        before = await objects(storage)
        with pytest.raises(VirtualAccessError, match=rf"{FILES}.*authorize_virtual_chunk_access"):
            async with Repository.open(storage):
                pass
        with pytest.raises(UnsupportedBySpecError, match="one place"):
            await upgrade(storage)
        async with Repository.open(
            storage, authorize_virtual_chunk_access={f"{FILES}/": files}
        ) as repository:
            session = await repository.readonly_session("main")
            found = await (await array_at(session, "a/packed")).getitem(...)
            assert found.tolist() == EXPECTED["a/packed"].tolist()
            writable = await repository.writable_session("main")
            two = await zarr.api.asynchronous.open_array(store=writable.store, path="a/two")
            await two.setitem(slice(0, 2), 9)
            await writable.commit("apart")
            again = await repository.readonly_session("main")
            assert (await (await array_at(again, "a/two")).getitem(...)).tolist()[:2] == [9, 9]
        after = await objects(storage)
        assert list(after) == list(before) == ["state.json"]
        assert json.loads(after["state.json"])["store_root"] == FILES


async def test_files_in_another_folder_are_opened_by_their_url(tmp_path: Path) -> None:
    """None is leave enough for a place that needs no credentials."""
    root = (tmp_path / "files").as_uri()
    for key, data in golden_draft(f"{root}/").objects.items():
        path = tmp_path / "state" / key
        if key != "state.json":
            path = tmp_path / "files" / key.removeprefix(f"{root}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    leave = {root: None}
    async with Repository.open(
        tmp_path / "state", authorize_virtual_chunk_access=leave
    ) as repository:
        session = await repository.writable_session("main")
        fork = pickle.loads(pickle.dumps(await session.fork()))
        async with fork.attached():
            await write(fork, "a/two/c/0", b"12345678")
        await session.merge(fork)
        await session.commit("forked")
        reader = await repository.readonly_session("main")
        assert await read(reader, "a/two/c/0") == b"12345678"
    assert [it.name for it in (tmp_path / "state").iterdir()] == ["state.json"]
