"""Files of NetCDF's classic format: every chunk decodes to what NetCDF's own library reads."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Literal

import netCDF4
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from icechunk_async.errors import InvalidInputError, InvalidMetadataError
from icechunk_async.spark import ingest_virtual
from icechunk_async.spark.ingest.netcdf3 import scan_netcdf3
from icechunk_async.spark.ingest.scan import Scanned, SourceState
from icechunk_async.spark.ingest.tasks import _decode
from tests.spark.here import session_here
from tests.spark.sources import open_for

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification")

type Format = Literal["NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA"]

FORMATS: list[Format] = ["NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA"]


def scan(path: Path, **options: Any) -> Scanned:
    """Scan a file."""
    state = SourceState(path.stat().st_size, "version", "etag", None)
    with path.open("rb") as file:
        return scan_netcdf3(file, path.as_uri(), state, **options)


def decoded(path: Path, found: Scanned, name: str) -> Any:
    """Decode an array by what a scan says of it."""
    array, data = found.arrays[name], path.read_bytes()
    places = zip(
        array.places.coords.tolist(), array.places.offsets, array.places.lengths, strict=True
    )
    chunks = {
        "/".join(["c", *map(str, at)]): data[int(start) : int(start) + int(size)]
        for at, start, size in places
    }
    return _decode(array.document, chunks)


def write(
    path: Path, form: Format, *, start: int = 0, steps: int = 3, shift: int = 0
) -> dict[str, Any]:
    """Write a file with many kinds of variables; return their stored values."""
    random = np.random.default_rng(start)
    with netCDF4.Dataset(path, "w", format=form) as file:
        file.title, file.levels = "a file", np.array([1, 2], "i4")
        file.createDimension("time", None)
        file.createDimension("x", 5)
        file.createDimension("letters", 6)
        kinds = ["i1", "i2", "i4", "f4", "f8"]
        kinds += ["u1", "u2", "u4", "i8", "u8"] if form == "NETCDF3_64BIT_DATA" else []
        file.createVariable("time", "f8", ("time",))[:] = np.arange(start, start + steps)
        file["time"].units = "days since 2000-01-01"
        for kind in kinds:
            values = random.integers(0, 100, (steps, 5)).astype(kind)
            file.createVariable(f"by_{kind}", kind, ("time", "x"))[:] = values
            file.createVariable(f"all_{kind}", kind, ("x",))[:] = values[0]
        scaled = file.createVariable("scaled", "i2", ("time", "x"), fill_value=-9)
        scaled.scale_factor, scaled.add_offset = np.float64(0.5), np.float64(10)
        scaled[:] = np.ma.masked_less(random.integers(0, 9, (steps, 5)) + shift, 4)
        file.createVariable("name", "S1", ("x", "letters"))[:] = np.array(
            [list(f"{it}".ljust(6, "\0")) for it in ("a", "bc", "", "defghi", "j")], "S1"
        )
        file.createVariable("scalar", "f4", ())[...] = 1.5
    with netCDF4.Dataset(path) as file:
        file.set_auto_mask(False)
        file.set_auto_scale(False)
        file.set_auto_chartostring(False)
        return {name: np.asarray(it[...]) for name, it in file.variables.items()}


@pytest.mark.parametrize("form", FORMATS)
def test_every_variable_decodes_to_what_the_library_reads(tmp_path: Path, form: Format) -> None:
    """By record and in one piece, of every type, text and numbers without a dimension."""
    path = tmp_path / "file.nc"
    stored = write(path, form)
    found = scan(path)
    assert found.groups == {"": {"title": "a file", "levels": [1, 2]}}
    assert found.arrays.keys() == stored.keys()
    for name in stored.keys() - {"name"}:
        np.testing.assert_array_equal(decoded(path, found, name), stored[name], name)
    assert decoded(path, found, "name").tolist() == [b"a", b"bc", b"", b"defghi", b"j"]
    assert found.arrays["name"].dimensions == ("x",)
    assert len(found.arrays["by_f4"].places) == 3
    assert len(found.arrays["all_f4"].places) == 1


@pytest.mark.parametrize("kind", ["i1", "i2", "S1", "i4"])
def test_records_of_a_single_variable_are_not_padded(tmp_path: Path, kind: Any) -> None:
    """As the specification says of a special case."""
    path = tmp_path / "file.nc"
    with netCDF4.Dataset(path, "w", format="NETCDF3_CLASSIC") as file:
        file.createDimension("time", None)
        file.createDimension("x", 3)
        values = np.arange(1, 13).reshape(4, 3).astype(kind)
        file.createVariable("v", kind, ("time", "x"))[:] = values
    answer = decoded(path, scan(path), "v")
    wanted = [b"".join(row) for row in values] if kind == "S1" else values
    np.testing.assert_array_equal(answer, wanted)


def test_unfinished_file_has_the_records_that_fit(tmp_path: Path) -> None:
    """Their number is then told by the size of the file."""
    path = tmp_path / "file.nc"
    stored = write(path, "NETCDF3_CLASSIC")
    data = bytearray(path.read_bytes())
    data[4:8] = b"\xff" * 4
    path.write_bytes(data)
    found = scan(path)
    np.testing.assert_array_equal(decoded(path, found, "by_f8"), stored["by_f8"])


def test_files_are_concatenated_along_their_records(tmp_path: Path, url: str) -> None:
    """And read as xarray reads the files, gaps and times decoded."""
    sources = tmp_path / "sources"
    sources.mkdir()
    paths = [sources / f"{it}.nc" for it in range(2)]
    write(paths[0], "NETCDF3_CLASSIC", steps=2)
    write(paths[1], "NETCDF3_64BIT_OFFSET", start=2, steps=3, shift=2)
    repository = open_for(url, sources)
    ingest_virtual(session_here(), repository, [str(it) for it in paths], concat_dim="time")
    found = xr.open_zarr(
        repository.readonly_session("main").store, consolidated=False, zarr_format=3, chunks=None
    )
    with (
        xr.open_dataset(paths[0], engine="netcdf4") as first,
        xr.open_dataset(paths[1], engine="netcdf4") as second,
    ):
        for name in ("scaled", "by_i2", "time"):
            wanted = np.concatenate([first[name].values, second[name].values])
            np.testing.assert_array_equal(found[name].values, wanted)
        np.testing.assert_array_equal(found["all_f8"].values, first["all_f8"].values)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    """Wherever it ends: in its header, or before its last record does."""
    path = tmp_path / "file.nc"
    write(path, "NETCDF3_CLASSIC")
    data = path.read_bytes()
    for size in [*range(4, 700, 7), len(data) - 40]:
        path.write_bytes(data[:size])
        with pytest.raises(InvalidInputError, match="damaged"):
            scan(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"CDF\x03" + bytes(60), "version is 3"),
        (b"CDF\x01" + struct.pack(">iii", 0, 10, 2**30) + bytes(60), "entries"),
        (b"CDF\x01" + struct.pack(">iii", 0, 9, 1) + bytes(60), "begins with 9"),
        (b"CDF\x01" + struct.pack(">iii", 0, 10, -1) + bytes(60), "size of -1"),
        (b"CDF\x01" + struct.pack(">iiii", 0, 10, 1, 0) + bytes(60), "name ''"),
    ],
)
def test_a_header_that_no_library_writes_is_refused(
    tmp_path: Path, data: bytes, words: str
) -> None:
    """With what is wrong with it."""
    path = tmp_path / "file.nc"
    path.write_bytes(data)
    with pytest.raises(InvalidInputError, match=words):
        scan(path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_corrupt_bytes_raise_only_our_errors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Nor does it refer to what lies outside of the file."""
    path = tmp_path_factory.getbasetemp() / "changed.nc"
    original = path.with_name("whole.nc")
    if not original.exists():
        write(original, "NETCDF3_64BIT_DATA")
    whole = bytearray(original.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, 1200))
        whole[at] = data.draw(st.sampled_from([0, 1, 2, 5, 10, 0x7F, 0x80, 0xFF]))
    path.write_bytes(whole)
    try:
        found = scan(path)
    except (InvalidInputError, InvalidMetadataError):
        return
    for array in found.arrays.values():
        ends = array.places.offsets + array.places.lengths
        assert not len(ends) or int(ends.max()) <= len(whole)
