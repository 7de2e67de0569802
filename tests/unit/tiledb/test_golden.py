"""Arrays that each format version's release of TileDB wrote, read as TileDB reads them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from icechunk_async.errors import InvalidInputError, NotFoundError, UnsupportedSpecVersionError
from icechunk_async.tiledb import open_array, open_group
from icechunk_async.tiledb.format.schema import VERSIONS
from icechunk_async.tiledb.format.tiles import decode_generic
from icechunk_async.tiledb.format.types import Datatype
from tests.tiledb.compare import columns_of_file, read_query, sorted_rows
from tests.tiledb.jobs import BASE, FUTURE, labelled_job, make_cells
from tests.tiledb.wheels import RELEASES
from tests.unit.tiledb.archives import (
    ARCHIVES,
    cases,
    files_below,
    filled,
    golden_jobs,
    load,
    stored_results,
)
from tests.unit.tiledb.encoders import generic

pytest.importorskip("pyarrow", reason="sparse arrays are read as Arrow, which is not installed")

CASES = cases()


def test_every_format_version_has_golden_arrays() -> None:
    """One release of TileDB for each."""
    written = {RELEASES[it.removeprefix("by-")][2] for it in ARCHIVES}
    assert written == set(VERSIONS)


def test_reference_names_the_versions_and_releases_that_are_tested() -> None:
    """The first and the last of both."""
    text = Path("docs/reference/tiledb.md").read_text(encoding="utf-8")
    releases = [RELEASES[it.removeprefix("by-")][1] for it in ARCHIVES]
    first, last = (f"{it[0]}.{it[1]}" for it in (min(releases), max(releases)))
    assert f"Format versions {min(VERSIONS)} to {max(VERSIONS)} are read" in text
    assert f"of TileDB {first} to {last}," in text


@pytest.mark.parametrize(("archive", "job"), CASES)
async def test_cells_are_those_that_tiledb_reads(archive: str, job: dict[str, Any]) -> None:
    """At every time that was asked for: dense arrays in order, sparse ones in any."""
    folder = job["number"]
    url = await filled(files_below(archive, folder))
    compared = 0
    for number, query in enumerate(job["queries"]):
        stored = stored_results(archive, folder, number)
        if stored is None:
            continue
        schema, found = await read_query(url, query)
        expected = columns_of_file(stored, schema)
        if schema.is_sparse:
            assert sorted_rows(found) == sorted_rows(expected)
        else:
            assert found == expected
        compared += 1
    assert compared


def _stated_version(archive: str) -> int:
    return RELEASES[archive.removeprefix("by-")][2]


@pytest.mark.parametrize("archive", ARCHIVES)
async def test_fragments_have_the_version_of_their_release(archive: str) -> None:
    """So the golden arrays show what they are meant to."""
    for job in golden_jobs(archive):
        url = await filled(files_below(archive, job["number"]))
        async with open_array(url) as array:
            assert {it.version for it in array.fragments} <= {_stated_version(archive)}
            assert array.schema.version == _stated_version(archive)


@pytest.mark.parametrize(
    ("version", "advice"), [(3, "older TileDB, and write it anew"), (23, "Upgrade icechunk-async")]
)
@pytest.mark.parametrize("what", ["schema", "fragment"])
async def test_other_versions_are_refused_by_their_number(
    version: int, advice: str, what: str
) -> None:
    """Older ones and newer ones, of the array and of one fragment; with what to do."""
    job = next(it for it in golden_jobs(ARCHIVES[-1]) if it["number"] == "features-0")
    files = files_below(ARCHIVES[-1], job["number"])
    mark = {"schema": "__schema/", "fragment": "/__fragment_metadata.tdb"}[what]
    (name,) = [it for it in files if mark in it]
    data, stated = files[name], version.to_bytes(4, "little")
    if what == "schema":
        changed = generic(stated + bytes(decode_generic(data, what))[4:])
    else:
        start = len(data) - 8 - int.from_bytes(data[-8:], "little")
        changed = data[:start] + stated + data[start + 4 :]
    url = await filled({**files, name: changed})
    told = f"The {what} of a TileDB array has format version {version}.*{advice}"
    with pytest.raises(UnsupportedSpecVersionError, match=told):
        async with open_array(url, end=job["queries"][0]["end"]):
            pass


async def test_group_has_members_and_metadata_of_its_time() -> None:
    """Also before a member was removed, and metadata was overwritten."""
    url = await filled(load("group"))
    async with open_group(url, end=FUTURE + 1000) as group:
        assert set(group.members) == {"labelled", "plain", "inner"}
        assert (await group.metadata())["title"].plain() == "a group"
        array = await group.array("labelled")
        metadata = {key: it.plain() for key, it in (await array.metadata()).items()}
        assert metadata == {"text": "after", "both": [1.0, 2.0]}
        inner = await group.group("inner")
        assert not inner.members
        with pytest.raises(NotFoundError, match="no member 'gone'"):
            await group.array("gone")
        with pytest.raises(InvalidInputError, match="is a group"):
            await group.array("inner")
    async with open_group(url, end=FUTURE + 10) as group:
        assert "gone" in group.members
        stored = await (await group.array("labelled")).metadata()
        metadata = {key: it.plain() for key, it in stored.items()}
        assert metadata == {"text": "before", "number": 10, "both": [1.0, 2.0]}


async def test_labels_are_read_for_their_coordinates() -> None:
    """Whole, and for some coordinates."""
    job = labelled_job()
    expected = make_cells(job, job["steps"][0], job["attrs"])["when"].values.view("<M8[s]")
    url = await filled(files_below("group", "labelled"))
    async with open_array(url) as array:
        np.testing.assert_array_equal(await array.label("when"), expected)
        np.testing.assert_array_equal(await array.label("when", slice(4, 7)), expected[3:6])
        with pytest.raises(InvalidInputError, match="no label 'where'"):
            await array.label("where")


async def test_members_of_old_groups_are_the_folders_in_them() -> None:
    """Before groups listed their members."""
    files = {"__tiledb_group.tdb": b"", "deep/__tiledb_group.tdb": b"", "else/x": b""}
    archive, job = ARCHIVES[0], golden_jobs(ARCHIVES[0])[0]
    files |= {f"old/{name}": it for name, it in files_below(archive, job["number"]).items()}
    async with open_group(await filled(files)) as group:
        assert {name: it.is_group for name, it in group.members.items()} == {
            "deep": True,
            "old": False,
        }
        assert (await group.array("old")).schema.version == 4


async def test_enumerations_are_loaded_by_attribute() -> None:
    """Text and numbers, with their order."""
    archive = ARCHIVES[-1]
    job = next(it for it in golden_jobs(archive) if "enumerations" in it)
    url = await filled(files_below(archive, job["number"]))
    async with open_array(url) as array:
        found = await array.enumerations()
    assert set(found) == {"kind", "size"}
    assert found["kind"].datatype is Datatype.STRING_UTF8
    assert found["kind"].items()[7] == b"kind 7"
    assert found["size"].is_ordered
    assert not found["kind"].is_ordered


async def test_a_region_is_read_by_coordinates() -> None:
    """Slices, single coordinates, and what is left out; a domain need not begin at 0."""
    archive, job = next(
        (archive, it)
        for archive in reversed(ARCHIVES)
        for it in golden_jobs(archive)
        if not it["sparse"] and it["dims"][0]["domain"][0] != 0
    )
    url = await filled(files_below(archive, job["number"]))
    name = job["attrs"][0]["name"]
    async with open_array(url, end=BASE + 1_000_000) as array:
        whole = (await array.read(attributes=[name]))[name]
        low, high = job["dims"][0]["domain"]
        part = (await array.read([slice(low, low + 1)], [name]))[name]
        _same(part, whole[:1])
        one = (await array.read([high], [name]))[name]
        _same(one, whole[-1])
        assert whole.shape[: len(array.shape)] == array.shape
        assert math.prod(array.shape) == whole.size or whole.ndim > len(array.shape)
        for wrong in ([slice(low - 1, high)], [high + 1], [slice(low, high, 2)]):
            with pytest.raises(InvalidInputError):
                await array.read(wrong)
        with pytest.raises(InvalidInputError, match="has no attribute"):
            await array.read(attributes=["none"])


def _same(one: Any, other: Any) -> None:
    assert np.ma.getmaskarray(one).tolist() == np.ma.getmaskarray(other).tolist()
    assert repr(np.ma.getdata(one).tolist()) == repr(np.ma.getdata(other).tolist())
