"""Repositories of the alpha that another writer made, straight from the schemas."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr

from icechunk_async.engine.history.numbers import decode_number, encode_number
from icechunk_async.errors import BranchNotFoundError, TagNotFoundError
from tests.helpers import read
from tests.unit.older.alpha_writer import base32, sequence
from tests.unit.older.golden import COMMITS, EXPECTED, SOURCE, golden
from tests.unit.older.older_tools import array_at, opened_golden
from tests.unit.older.schemas import check_objects

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async import Repository


@pytest.fixture
async def repository() -> AsyncIterator[Repository]:
    """Open the golden repository."""
    async with opened_golden(golden().objects, SOURCE) as opened:
        yield opened


def test_the_writer_keeps_to_the_schemas() -> None:
    """Otherwise reading what it writes would prove nothing."""
    objects = golden().objects
    snapshots = [key for key in objects if key.startswith("s/")]
    assert len(snapshots) == COMMITS
    left_out = set(snapshots[1:-1]) - set(snapshots[::8])  # they are all alike
    counts = check_objects({key: it for key, it in objects.items() if key not in left_out})
    assert counts["manifest"] == 4


@pytest.mark.parametrize(
    ("number", "name"), [(0, "ZZZZZZZZ"), (100, "ZZZZZZWV"), (1099511627775, "00000000")]
)
def test_numbers_are_named_as_the_specification_says(number: int, name: str) -> None:
    """Its examples, and every other number comes back."""
    assert encode_number(number) == name
    assert decode_number(name) == number
    assert sequence(number) == f"{name}.json"
    assert encode_number(number - 1 if number else 1) != name


def test_what_is_no_number_has_none() -> None:
    """Seven letters, a letter outside of the alphabet, lower case."""
    for text in ("ZZZZZZZ", "ZZZZZZZU", "zzzzzzzz", ""):
        assert decode_number(text) is None


@pytest.mark.parametrize("path", sorted(EXPECTED))
async def test_arrays_have_their_values(repository: Repository, path: str) -> None:
    """Inline, packed and virtual chunks, missing ones, of every kind of type."""
    session = await repository.readonly_session("main")
    found = await (await array_at(session, path)).getitem(...)
    assert np.asarray(found).tobytes() == EXPECTED[path].tobytes()


async def test_metadata_is_that_of_the_document(repository: Repository) -> None:
    """Names of dimensions, attributes inline and in a file, fill values to the bit."""
    session = await repository.readonly_session("main")
    documents = {
        path: json.loads(await read(session, f"{path}/zarr.json" if path else "zarr.json") or b"")
        for path in ("", "a", "a/packed", "a/two", "complex", "raw", "half")
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
    assert str(documents["complex"]["fill_value"]) == "[0.0, -0.0]"
    assert documents["raw"]["fill_value"] == "AQID"
    assert documents["half"]["fill_value"] == "NaN"


async def test_history_goes_on_where_a_snapshot_stops_listing(repository: Repository) -> None:
    """Each lists ten of its ancestors."""
    infos = [info async for info in repository.ancestry(branch="main")]
    assert [info.message for info in infos] == [f"commit {n}" for n in range(COMMITS)][::-1]
    assert [info.metadata["number"] for info in infos] == list(range(COMMITS))[::-1]
    assert infos[0].written_at.microsecond == 123456


async def test_references_are_found(repository: Repository) -> None:
    """The newest file of each branch, and tags."""
    branches, tags = await repository.branches(), await repository.tags()
    assert set(branches) == {"main", "old"}
    assert tags == {"v10": branches["old"]}
    info = await repository.lookup_snapshot(branches["main"])
    assert info.message == f"commit {COMMITS - 1}"
    with pytest.raises(BranchNotFoundError, match="'v10'"):
        await repository.lookup_branch("v10")
    with pytest.raises(TagNotFoundError, match="'old'"):
        await repository.lookup_tag("old")


async def test_time_travel_goes_by_the_files_of_the_branch(repository: Repository) -> None:
    """At and between the times of all of them."""
    infos = [info async for info in repository.ancestry(branch="main")]
    for info in infos[::7]:
        files = [it for it in infos if it.written_at <= info.written_at]
        # The file of a snapshot is a minute younger than the snapshot.
        wanted = files[1] if len(files) > 1 else None
        if wanted is not None:
            session = await repository.readonly_session("main", as_of=info.written_at)
            assert session.snapshot_id == wanted.id


async def test_diff_finds_what_changed_between_snapshots(repository: Repository) -> None:
    """By comparing manifests, as there are no logs."""
    infos = {info.message: info async for info in repository.ancestry(branch="main")}
    ids = [infos[f"commit {n}"].id for n in (14, 15, COMMITS - 2, COMMITS - 1)]
    lost = await repository.diff(from_snapshot_id=ids[0], to_snapshot_id=ids[1])
    assert {path: coords.tolist() for path, coords in lost.updated_chunks.items()} == {
        "/a/two": [[1], [2]]
    }
    new = await repository.diff(from_snapshot_id=ids[2], to_snapshot_id=ids[3])
    assert new.new_arrays == {"/half"}
    assert new.updated_chunks["/half"].tolist() == [[1]]
    assert not new.updated_arrays


async def test_commits_continue_the_sequence(repository: Repository) -> None:
    """With files that keep to the schemas; attributes in a file are not written again."""
    before = {key async for key in _keys(repository)}
    session = await repository.writable_session("main")
    two = await zarr.api.asynchronous.open_array(store=session.store, path="a/two", mode="r+")
    await two.setitem(slice(0, 2), 9)
    tip = await session.commit("ours")
    objects = {key: await _data(repository, key) async for key in _keys(repository)}
    assert f"r/main/{sequence(COMMITS)}" in objects.keys() - before
    assert not [key for key in objects.keys() - before if key.startswith("a/")]
    counts = check_objects({key: data for key, data in objects.items() if key not in before})
    assert counts == {"reference": 1, "snapshot": 1, "manifest": 1, "other": 0}
    document = json.loads(objects[f"s/{base32(tip)}"])
    assert document["total_parents"] == COMMITS
    assert document["short_term_parents"] == len(document["short_term_history"]) == 11
    stored = document["nodes"]["/a/packed"]["user_attributes"]
    assert stored["Ref"]["location"] == 1
    session = await repository.readonly_session("main")
    found = await (await array_at(session, "a/two")).getitem(...)
    assert found.tolist() == [9, 9, *EXPECTED["a/two"][2:].tolist()]
    found = await (await array_at(session, "a/packed")).getitem(...)
    assert found.tolist() == EXPECTED["a/packed"].tolist()


async def _keys(repository: Repository) -> AsyncIterator[str]:
    async for entry in repository.storage.list_prefix():
        yield getattr(entry, "key")  # noqa: B009 -- without a delimiter there are no prefixes


async def _data(repository: Repository, key: str) -> bytes:
    return bytes((await repository.storage.get(key)).data)
