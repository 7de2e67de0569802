"""Datasets written by the facade and by the official package: the same arrays, the same errors."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr
import zarr
from xarray.tests import create_test_data

from icechunk_async.sync.xarray import open_dataset, to_icechunk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    type Write = Callable[..., None]

# Importing xarray's tests turns it on.
xr.set_options(warn_for_unclosed_files=False)  # type: ignore[no-untyped-call]
PACKAGES = ("icechunk", "icechunk_async.sync")
WRITERS: dict[str, Write] = {
    "icechunk": import_module("icechunk.xarray").to_icechunk,
    "icechunk_async.sync": to_icechunk,
}
DASK = [pytest.param(False, id="memory"), pytest.param(True, id="dask")]


def dataset(*, lazy: bool) -> xr.Dataset:
    """Return xarray's own test dataset, in blocks if ``lazy``."""
    data = create_test_data(5)
    data.attrs["title"] = "test"
    return data.chunk(dim1=4, dim2=5) if lazy else data


def packed(*, lazy: bool) -> xr.Dataset:
    """Return a dataset that is stored otherwise than it is shown: times, scaled numbers, text."""
    times = np.datetime64("2020-01-01", "ns") + np.arange(6) * np.timedelta64(1, "D")
    data = xr.Dataset(
        {
            "temperature": (("time", "x"), 10 + np.arange(24.0).reshape(6, 4) / 4),
            "name": (("x",), np.array(["a", "b", "c", "d"])),
            "flag": (("time",), np.arange(6) % 2 == 0),
            "scalar": 3,
        },
        coords={"time": times, "x": [1.0, 2.0, 3.0, 4.0]},
    )
    data["temperature"].encoding = {"scale_factor": 0.25, "add_offset": 5.0, "dtype": "int16"}
    data["temperature"].encoding["_FillValue"] = -1
    return data.chunk(time=2) if lazy else data


class Written:
    """A repository of each package, into which the same was written."""

    def __init__(self, directory: Path) -> None:
        self.repositories: dict[str, Any] = {}
        for package in PACKAGES:
            module = import_module(package)
            storage = module.local_filesystem_storage(str(directory / package))
            self.repositories[package] = module.Repository.create(storage)
        self.directory = directory

    def write(self, obj: Any, **arguments: Any) -> list[str]:
        """Write and commit with each package; answer what each raised, or an empty text."""
        raised: list[str] = []
        for package, repository in self.repositories.items():
            session = repository.writable_session("main")
            try:
                WRITERS[package](obj, session, **arguments)
            except Exception as error:  # noqa: BLE001 - it is compared
                raised.append(f"{type(error).__name__}: {error}")
            else:
                raised.append("")
                session.commit("written")
        return raised

    def read(self, group: str | None = None) -> xr.Dataset:
        """Return the group, which both packages must have stored alike."""
        opened = [
            open_dataset(repository.readonly_session("main"), group)
            for repository in self.repositories.values()
        ]
        first, second = (it.load() for it in opened)
        xr.testing.assert_identical(first, second)
        documents = [
            zarr.open_group(repository.readonly_session("main").store, path=group or "", mode="r")
            for repository in self.repositories.values()
        ]
        for name, array in documents[0].arrays():
            assert array.metadata == documents[1][name].metadata
        return second


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Make both repositories."""
    return Written(tmp_path)


@pytest.mark.parametrize("lazy", DASK)
@pytest.mark.parametrize("make", [dataset, packed])
def test_a_new_dataset_is_written_alike(
    written: Written, make: Callable[..., xr.Dataset], *, lazy: bool
) -> None:
    """Values, attributes, encodings and chunks; in a group, and in the root."""
    data = make(lazy=lazy)
    assert written.write(data) == ["", ""]
    assert written.write(data, group="deep/group") == ["", ""]
    xr.testing.assert_identical(written.read(), data.load())
    xr.testing.assert_identical(written.read("deep/group"), data)


@pytest.mark.parametrize("lazy", DASK)
def test_a_dataset_is_appended_alike_along_a_dimension(written: Written, *, lazy: bool) -> None:
    """Along a dimension; what lacks it stays."""
    data = packed(lazy=lazy)
    assert written.write(data.isel(time=slice(0, 4))) == ["", ""]
    assert written.write(data.isel(time=slice(4, 6)), append_dim="time") == ["", ""]
    xr.testing.assert_identical(written.read(), data.load())


@pytest.mark.parametrize("lazy", DASK)
@pytest.mark.parametrize("region", [{"time": slice(2, 4)}, "auto", {"time": "auto"}])
def test_a_region_is_written_alike_by_position_and_by_coordinates(
    written: Written, region: Any, *, lazy: bool
) -> None:
    """The region is given by position or found by the coordinates."""
    data = packed(lazy=False).drop_vars("scalar")
    encoding = {
        "flag": {"chunks": (2,)},
        "temperature": {**data["temperature"].encoding, "chunks": (2, 4)},
    }
    assert written.write(data, encoding=encoding) == ["", ""]
    part = data[["temperature", "flag"]].isel(time=slice(2, 4)).copy(deep=True)
    part["temperature"][:] = 0
    part["flag"][:] = False
    part = part.chunk(time=2) if lazy else part
    if region != "auto":
        part = part.drop_vars("x")
    assert written.write(part, region=region) == ["", ""]
    expected = data.copy(deep=True)
    expected["temperature"][2:4] = 0
    expected["flag"][2:4] = False
    xr.testing.assert_equal(written.read(), expected)


def test_each_mode_writes_or_refuses_alike(written: Written) -> None:
    """Each does, or refuses, what it does there."""
    data = dataset(lazy=False)
    other = data.assign(var1=data.var1 + 1)
    assert written.write(data) == ["", ""]
    first, second = written.write(other)
    assert first == second
    assert first.startswith("FileExistsError")
    assert written.write(other[["var1"]], mode="a") == ["", ""]
    xr.testing.assert_identical(written.read(), other)
    assert written.write(data[["var1"]], mode="r+") == ["", ""]
    xr.testing.assert_identical(written.read(), data)
    assert written.write(data[["var2"]], mode="w") == ["", ""]
    assert set(written.read().data_vars) == {"var2"}
    first, second = written.write(data[["var3"]], mode="r+")
    assert first == second
    assert "var3" in first


def test_arrays_and_encodings_are_written_and_checked_alike(written: Written) -> None:
    """An array is a dataset of one variable; encodings are checked."""
    array = dataset(lazy=False)["var1"]
    assert written.write(array, encoding={"var1": {"dtype": "f4", "chunks": (4, 9)}}) == ["", ""]
    assert written.read()["var1"].dtype == np.float32
    assert written.write(array.rename(None), group="unnamed") == ["", ""]
    written.read("unnamed")
    first, second = written.write(array, group="x", encoding={"var1": {"colour": "red"}})
    assert first == second != ""


def test_blocks_that_do_not_fit_are_refused_or_aligned(written: Written) -> None:
    """With the same words, where the official package refuses."""
    data = packed(lazy=False)
    encoding = {"temperature": {"chunks": (4, 4)}}
    crooked = data.chunk(time=3)
    first, second = written.write(crooked, encoding=encoding)
    assert first == second
    assert "safe_chunks" in first or "align_chunks" in first
    assert written.write(crooked, encoding=encoding, align_chunks=True, mode="w") == ["", ""]
    xr.testing.assert_identical(written.read(), data)
    # It writes at the caller's risk. We refuse, because a chunk could lose half of its values.
    first, second = written.write(crooked, encoding=encoding, safe_chunks=False, mode="w")
    assert first == ""
    assert "two blocks meet" in second


def test_a_session_that_reads_writes_nothing(written: Written) -> None:
    """Both packages raise an error."""
    for package, write in (*WRITERS.items(), ("icechunk_async.sync", to_icechunk)):
        session = written.repositories[package].readonly_session("main")
        with pytest.raises(Exception, match=r"(?i)read.only"):
            write(dataset(lazy=False), session)
