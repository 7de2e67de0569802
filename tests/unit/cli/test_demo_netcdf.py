"""Finding the bytes of chunks in HDF5 files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path

    import h5py
else:
    h5py = pytest.importorskip("h5py", reason="the demo extra is not installed")

from icechunk_async.cli.demo.data import Variable, read_data, read_netcdf


def make(path: Path, **options: Any) -> Variable:
    """Write a file with one variable, and read its description."""
    with h5py.File(path, "w") as file:
        file.create_dataset("values", **options)
    return read_netcdf(path).variables["values"]


def chunk(path: Path, variable: Variable, row: int) -> np.ndarray[Any, Any]:
    """Read a chunk without HDF5."""
    offset, length = int(variable.offsets[row]), int(variable.lengths[row])
    dtype = variable.dtype.newbyteorder(">" if variable.endian == "big" else "<")
    data = path.read_bytes()[offset : offset + length]
    return np.frombuffer(data, dtype).reshape(variable.chunk_shape)


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<i2", ">u4", "u1"])
def test_chunks_are_found(tmp_path: Path, dtype: str) -> None:
    """Offsets and lengths lead to the values; chunks at the edge are whole."""
    values = np.arange(35).reshape(5, 7).astype(dtype)
    path = tmp_path / "a.nc"
    variable = make(path, data=values, chunks=(2, 3))
    assert variable.grid == (3, 3)
    whole = np.block([[chunk(path, variable, 3 * y + x) for x in range(3)] for y in range(3)])
    np.testing.assert_array_equal(whole[:5, :7], values)
    np.testing.assert_array_equal(read_data(path, "values", slice(1, 3)), values[1:3])


def test_unchunked_dataset_is_one_chunk(tmp_path: Path) -> None:
    """Contiguous data, and single numbers."""
    path = tmp_path / "a.nc"
    variable = make(path, data=np.arange(4.0))
    assert (variable.grid, variable.chunk_shape) == ((1,), (4,))
    np.testing.assert_array_equal(chunk(path, variable, 0), np.arange(4.0))
    variable = make(path, data=2.5)
    assert (variable.grid, variable.chunk_shape) == ((), ())
    assert chunk(path, variable, 0) == 2.5


@pytest.mark.parametrize("chunks", [None, (2,)])
def test_unwritten_chunks_have_no_bytes(tmp_path: Path, chunks: tuple[int, ...] | None) -> None:
    """Its value is the fill value."""
    variable = make(tmp_path / "a.nc", shape=(4,), dtype="f8", chunks=chunks, fillvalue=9.5)
    assert not variable.lengths.any()
    assert variable.fill_value == 9.5


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"data": np.zeros(9), "compression": "gzip"}, "compressed"),
        ({"data": np.zeros(9), "chunks": (3,), "shuffle": True}, "compressed"),
        ({"data": [b"text"]}, "not of numbers"),
    ],
)
def test_unsupported_datasets_are_refused(
    tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    """Rather than read wrongly."""
    with pytest.raises(InvalidInputError, match=problem):
        make(tmp_path / "a.nc", **options)


def test_names_of_axes_and_attributes(tmp_path: Path) -> None:
    """They are those of NetCDF. Internal names of the libraries are left out."""
    path = tmp_path / "a.nc"
    with h5py.File(path, "w") as file:
        file.attrs["title"] = np.bytes_(b"weather")
        time = file.create_dataset("time", data=np.arange(2.0))
        time.make_scale("time")
        time.attrs["valid_range"] = np.array([0, 5], np.int32)
        time.attrs["scale"] = np.array([2.5])
        data = file.create_dataset("data", data=np.zeros((2, 3)))
        data.dims[0].attach_scale(time)
        pair = file.create_dataset("pair", data=np.zeros(3))
        pair.make_scale("This is a netCDF dimension but not a netCDF variable.         3")
        data.dims[1].attach_scale(pair)
    found = read_netcdf(path)
    assert found.attributes == {"title": "weather"}
    assert set(found.variables) == {"time", "data"}
    assert found.variables["data"].dimensions == ("time", "pair")
    assert found.variables["time"].dimensions == ("time",)
    assert found.variables["time"].attributes == {"valid_range": [0, 5], "scale": 2.5}
