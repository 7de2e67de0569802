"""The official engine's stores read dense TileDB arrays that were written as references."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async import Repository
from icechunk_async.tiledb import open_array, write_virtual_array
from tests.interop.theirs import icechunk
from tests.unit.tiledb.archives import ARCHIVES, golden_jobs
from tests.unit.tiledb.virtual_arrays import access_to, expressible, placed, referring_config

if TYPE_CHECKING:
    from pathlib import Path


async def test_official_engine_reads_tiles_that_are_referred_to_and_copied(tmp_path: Path) -> None:
    """Zarr finds the codec by its entry point; the official engine fetches the bytes of tiles."""
    compared = strings = 0
    for number, job in enumerate(golden_jobs(ARCHIVES[-1])):
        if job["sparse"]:
            continue
        root = tmp_path / str(number)
        place = placed(ARCHIVES[-1], job["number"], root, name="array")
        async with (
            Repository.create(
                str(root / "repo"),
                config=referring_config(place),
                authorize_virtual_chunk_access=access_to(place),
            ) as repository,
            open_array(place) as array,
        ):
            texts = [
                it.name
                for it in array.schema.attributes
                if it.datatype.name in ("STRING_ASCII", "STRING_UTF8") and it.is_variable
            ]
            strings += len(texts)
            names = [*expressible(array.schema), *texts]
            session = await repository.writable_session("main")
            await write_virtual_array(session, array, attributes=names, copy=True)
            await session.commit("tiles")
            reading = await repository.readonly_session("main")
            ours = zarr.open_group(reading.store, mode="r")
            expected = {name: np.asarray(_array(ours, name)[...]) for name in names}
            axes = {name: (_dims(it), np.asarray(it[...])) for name, it in ours.arrays()}
            assert {it.name for it in array.schema.dimensions} <= axes.keys()
        theirs = icechunk.Repository.open(
            icechunk.local_filesystem_storage(str(root / "repo")),
            authorize_virtual_chunk_access=dict.fromkeys(
                access_to(place), icechunk.credentials.LocalFileSystemAccess
            ),
        )
        found = zarr.open_group(theirs.readonly_session("main").store, mode="r")
        for name, values in expected.items():
            np.testing.assert_array_equal(np.asarray(_array(found, name)[...]), values)
            compared += 1
        assert set(found.array_keys()) == axes.keys()
        for name, (dims, values) in axes.items():
            assert _dims(_array(found, name)) == dims
            np.testing.assert_array_equal(_array(found, name)[...], values)
    assert compared > 5
    assert strings > 1


async def test_official_engine_reads_cells_of_any_length(tmp_path: Path) -> None:
    """Numbers, as bytes: Zarr knows the type by the name that its registry has."""
    place = placed("by-0.8.0", "dense-1", tmp_path, name="array")
    access = access_to(place)
    async with (
        Repository.create(
            str(tmp_path / "repo"),
            config=referring_config(place),
            authorize_virtual_chunk_access=access,
        ) as repository,
        open_array(place) as array,
    ):
        expected = (await array.read(attributes=["attr 2"]))["attr 2"]
        session = await repository.writable_session("main")
        await write_virtual_array(session, array, attributes=["attr 2"], copy=True)
        await session.commit("cells")
    theirs = icechunk.Repository.open(icechunk.local_filesystem_storage(str(tmp_path / "repo")))
    group = zarr.open_group(theirs.readonly_session("main").store, mode="r")
    found = _array(group, "attr 2")
    for cell, wanted in zip(np.asarray(found[...]).flat, expected.flat, strict=True):
        np.testing.assert_array_equal(np.frombuffer(cell, found.attrs["element_dtype"]), wanted)
    group = zarr.open_group(theirs.writable_session("main").store, mode="r+")
    with pytest.warns(zarr.errors.UnstableSpecificationWarning):  # of Zarr's own name
        group["attr 2"].attrs["seen"] = True
    assert group["attr 2"].attrs["element_dtype"] == "<u2"


def _dims(array: Any) -> tuple[str, ...]:
    return tuple(array.metadata.dimension_names)


def _array(group: zarr.Group, name: str) -> Any:
    return group[name or "values"]
