"""Catalogs of Intake open repositories by URL, beside the official engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import intake
import numpy as np
import pytest
import xarray as xr
from dask.array import Array
from intake.readers.datatypes import Zarr
from intake.readers.entry import Catalog
from intake.readers.readers import DaskZarr, XArrayDatasetReader

from icechunk_async import sync
from icechunk_async.sync.xarray import to_icechunk

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the path of a repository whose tag `v1` holds zeros, and whose branch holds ones."""
    with sync.Repository.create(str(tmp_path / "weather")) as repository:
        for number in range(2):
            session = repository.writable_session("main")
            values = np.full(4, float(number))
            to_icechunk(xr.Dataset({"rain": ("day", values)}), session, group="surface", mode="w")
            tip = session.commit(f"number {number}")
            if not number:
                repository.create_tag("v1", tip)
    return str(tmp_path / "weather")


def _catalog(folder: Path, **entries: Any) -> Any:
    """Return a catalog that went through a file."""
    made = Catalog()
    for name, reader in entries.items():
        made[name] = reader
    made.to_yaml_file(str(folder / "catalog.yaml"))
    return intake.from_yaml_file(str(folder / "catalog.yaml"))


def test_entries_name_a_tag_or_follow_a_branch(url: str, tmp_path: Path) -> None:
    """By the engine of xarray, eager or with Dask; the dataset knows its repository."""
    found = _catalog(
        tmp_path,
        held=XArrayDatasetReader(
            Zarr(f"{url}/|icechunk:@tag.v1/surface"), engine="icechunk-async", chunks={}
        ),
        followed=XArrayDatasetReader(
            Zarr(f"{url}/|icechunk:"),
            engine="icechunk-async",
            group="surface",
            storage_options={"read_only": True},
        ),
    )
    held, followed = found["held"].read(), found["followed"].read()
    assert isinstance(held.rain.data, Array)
    assert (held.rain == 0).all()
    assert (followed.rain == 1).all()
    assert [it.icechunk.snapshot.message for it in (held, followed)] == ["number 0", "number 1"]


def test_entries_read_keys_by_fsspec(url: str, tmp_path: Path) -> None:
    """Readers that know Zarr and fsspec alone, as Intake has them for datasets and arrays."""
    place = f"icechunk://{url}/|icechunk:@tag.v1"
    found = _catalog(
        tmp_path,
        dataset=XArrayDatasetReader(Zarr(place, root="surface"), consolidated=False),
        array=DaskZarr(Zarr(f"{place}/surface/rain")),
    )
    assert (found["dataset"].read().rain == 0).all()
    assert (found["array"].read().compute() == 0).all()


def test_an_entry_that_leads_nowhere_says_why(url: str, tmp_path: Path) -> None:
    """The sentence of the repository, with the names that there are."""
    reader = XArrayDatasetReader(Zarr(f"{url}/|icechunk:@tag.v2/surface"), engine="icechunk-async")
    found = _catalog(tmp_path, wrong=reader)
    with pytest.raises(sync.IcechunkError, match="no tag 'v2'"):
        found["wrong"].read()
