"""Scanners of files: every chunk decodes to the values that the file's own library reads."""

from __future__ import annotations

import itertools
import json
import math
import struct
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

from icechunk_async.errors import InvalidInputError, InvalidMetadataError
from icechunk_async.spark.ingest import hdf5
from icechunk_async.spark.ingest.grib import Message, grid_of, read_index
from icechunk_async.spark.ingest.hdf5 import scan_hdf5
from icechunk_async.spark.ingest.plan import to_units
from icechunk_async.spark.ingest.scan import LARGE_BYTES, SMALL_BYTES, Scanned, SourceState, divided
from icechunk_async.spark.ingest.source import RemoteFile
from icechunk_async.spark.ingest.tasks import ScanOptions, _decode, load_values, scan_source
from icechunk_async.spark.shared import SharedRepository
from tests.spark.sources import open_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STATE = SourceState(1, "version", "etag", None)
UNTYPED: Any = h5py
"""h5py's types know neither links nor what is put into files by name."""


def scan(path: Path, **options: Any) -> Scanned:
    """Scan a file."""
    with path.open("rb") as file:
        return scan_hdf5(file, path.as_uri(), STATE, **options)


def decoded(path: Path, found: Scanned, name: str) -> Any:
    """Decode an array of a file by what a scan says of it."""
    array = found.arrays[name]
    data = path.read_bytes()
    places = array.places
    chunks = {
        "/".join(["c", *map(str, at)]): data[int(start) : int(start) + int(size)]
        for at, start, size in zip(
            places.coords.tolist(), places.offsets, places.lengths, strict=True
        )
    }
    inline = {"/".join(["c", *map(str, at)]): it for at, it in array.inline.items()}
    return _decode(array.document, {**chunks, **inline})


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="contiguous"),
        pytest.param({"chunks": (4, 5)}, id="chunks"),
        pytest.param({"chunks": (4, 5), "compression": "gzip"}, id="gzip"),
        pytest.param({"chunks": (3, 7), "shuffle": True, "compression": "gzip"}, id="shuffle"),
        pytest.param({"chunks": (4, 5), "fletcher32": True}, id="fletcher32"),
        pytest.param(
            {"chunks": (7, 3), "shuffle": True, "compression": 4, "fletcher32": True}, id="all"
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<i2", ">u4", "u1", "?", "<c8", "<f2"])
def test_chunks_decode_to_what_the_file_holds(
    tmp_path: Path, options: dict[str, Any], dtype: str
) -> None:
    """Every layout and filter that has a codec, of every type."""
    path = tmp_path / "file.h5"
    values = np.arange(10 * 12).reshape(10, 12).astype(dtype)
    with h5py.File(path, "w") as file:
        file.create_dataset("a/b", data=values, **options)
    found = scan(path)
    np.testing.assert_array_equal(decoded(path, found, "a/b"), values)
    assert set(found.groups) == {"", "a"}
    copy = Scanned.from_bytes(found.to_bytes())
    np.testing.assert_array_equal(
        copy.arrays["a/b"].places.offsets, found.arrays["a/b"].places.offsets
    )


def test_scan_copies_compact_data_and_leaves_out_unwritten_data(tmp_path: Path) -> None:
    """Contiguous data becomes a chunk, compact data is copied, unwritten data is left out."""
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("scalar", data=np.float32(3))
        whole: Any = file
        lower: Any = h5py
        plist = lower.h5p.create(lower.h5p.DATASET_CREATE)
        plist.set_layout(lower.h5d.COMPACT)
        space = lower.h5s.create_simple((4,))
        lower.h5d.create(whole.id, b"compact", lower.h5t.NATIVE_INT32, space, plist)
        whole["compact"][...] = np.arange(4)
        file.create_dataset("never", shape=(4, 4), dtype="i4", chunks=(2, 2), fillvalue=7)
        file.create_dataset("empty", shape=(0, 4), dtype="i4")
        file.create_dataset("never_contiguous", shape=(4,), dtype="f4", fillvalue=np.nan)
    found = scan(path)
    assert decoded(path, found, "scalar") == 3
    assert list(found.arrays["compact"].inline) == [(0,)]
    np.testing.assert_array_equal(decoded(path, found, "compact"), np.arange(4))
    np.testing.assert_array_equal(decoded(path, found, "never"), np.full((4, 4), 7))
    assert decoded(path, found, "empty").shape == (0, 4)
    assert np.isnan(decoded(path, found, "never_contiguous")).all()


def test_contiguous_data_is_divided_into_chunks(tmp_path: Path) -> None:
    """By steps of the dimension of concatenation; else only where it is large."""
    path = tmp_path / "file.h5"
    values = np.arange(6 * 4, dtype="f4").reshape(6, 4)
    with h5py.File(path, "w") as file:
        data = file.create_dataset("v", data=values)
        time = file.create_dataset("time", data=np.arange(6))
        time.make_scale("time")
        data.dims[0].attach_scale(time)
    assert len(scan(path).arrays["v"].places) == 1
    found = scan(path, concat_dim="time")
    assert found.arrays["v"].dimensions == ("time", "phony_dim_0")
    assert len(found.arrays["v"].places) == 6
    np.testing.assert_array_equal(decoded(path, found, "v"), values)


@pytest.mark.parametrize(("length", "rows"), [(16_777_216, 4_194_304), (16_777_259, 16_777_259)])
def test_large_arrays_are_not_divided_into_very_many_pieces(length: int, rows: int) -> None:
    """As one whose length is prime would be, a reference for each of its elements."""
    assert divided((length,), ("x",), 8, None) == (rows,)


class _Counted(int):
    """A length that counts how often it is divided."""

    times = 0

    def __mod__(self, other: int) -> int:
        _Counted.times += 1
        return int(self) % other


def test_a_chunk_is_the_largest_divisor_that_fits() -> None:
    """Of any length; one of many digits is divided no oftener than its root."""
    for length, most in itertools.product(range(1, 200), range(1, 33)):
        width = LARGE_BYTES // most
        best = max(it for it in range(1, min(length, LARGE_BYTES // width) + 1) if not length % it)
        assert divided((length, width), ("x", "y"), 1, None) == (
            best if best * width >= SMALL_BYTES else length,
            width,
        )
    _Counted.times = 0
    prime = _Counted(16_777_259)
    assert divided((prime,), ("x",), 8, None) == (16_777_259,)
    assert _Counted.times <= math.isqrt(prime)


def test_attributes_needed_for_decoding_are_kept(tmp_path: Path) -> None:
    """Fill values mask only where the file says so; what JSON cannot hold is left out."""
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        plain = file.create_dataset("plain", data=np.zeros(3, "i2"))
        plain.attrs["units"] = np.bytes_(b"K")
        plain.attrs["valid_range"] = [0, 5]
        plain.attrs["missing_value"] = np.float32(np.nan)
        masked = file.create_dataset("masked", data=np.zeros(3, "i2"))
        masked.attrs["_FillValue"] = np.array([-9], "i2")
    found = scan(path)
    assert found.arrays["plain"].document["attributes"] == {"units": "K", "valid_range": [0, 5]}
    assert found.arrays["masked"].document["attributes"] == {"_FillValue": -9}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda f: f.create_dataset("x", data=np.zeros(9), chunks=(3,), compression="lzf"), "lzf"),
        (
            lambda f: f.create_dataset("x", data=np.zeros(9, "i4"), chunks=(3,), scaleoffset=2),
            "scaleoffset",
        ),
        (lambda f: f.create_dataset("x", data=["a", "b"]), "varying length"),
        (lambda f: f.create_dataset("x", data=np.zeros(3, [("a", "i4"), ("b", "f8")])), "of type"),
        (lambda f: f.create_dataset("x", data=h5py.Empty("f4")), "null dataspace"),  # type: ignore[attr-defined]
        (lambda f: f.create_dataset("x", (9,), "f4", external=[("raw", 0, 36)]), "other files"),
        (lambda f: f.update(x=UNTYPED.ExternalLink("other.h5", "/y")), "another file"),
        (lambda f: f.update(x=f["/"]), "a group that it is in"),
        (lambda f: f.update(x=UNTYPED.SoftLink("/")), "a group that it is in"),
    ],
)
def test_unsupported_arrays_are_refused_with_a_reason(
    tmp_path: Path, make: Callable[[Any], Any], words: str
) -> None:
    """And can be left out."""
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as file:
        make(file)
        file.create_dataset("good", data=np.zeros(3))
    with pytest.raises((InvalidInputError, InvalidMetadataError), match=words):
        scan(path)
    assert set(scan(path, skip=["x"]).arrays) == {"good"}


def test_links_within_a_file_are_followed_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten groups, each with two links to the next, are a thousand paths."""
    path = tmp_path / "file.h5"
    with UNTYPED.File(path, "w") as file:
        file["nothing"] = UNTYPED.SoftLink("/missing")
        file["group/array"] = np.zeros(3)
        file["again"] = UNTYPED.SoftLink("/group")
    found = scan(path)
    assert set(found.arrays) == {"group/array", "again/array"}
    assert found.arrays["again/array"].places.offsets == found.arrays["group/array"].places.offsets
    with UNTYPED.File(path, "a") as file:
        below = file.create_group("last")
        for number in range(10):
            above = file.create_group(f"part{number}")
            above["a"] = above["b"] = below
            below = above
    monkeypatch.setattr(hdf5, "_MOST_NODES", 1000)
    with pytest.raises(InvalidInputError, match=r"more than 1,000 .*skip="):
        scan(path)
    assert len(scan(path, skip=[f"part{it}" for it in range(5, 10)]).groups) < 200


def test_a_remote_file_reads_any_part(tmp_path: Path) -> None:
    """Across blocks, beyond the end, again and again with few requests."""
    data = np.random.default_rng(0).bytes(3_000_000)
    asked: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> bytes:
        asked.append((start, stop))
        return data[start:stop]

    file = RemoteFile(read, len(data))
    for start, size in [(0, 10), (1_048_570, 20), (2_999_990, 100), (5, 2_500_000)]:
        file.seek(start)
        assert file.read(size) == data[start : start + size]
    assert len(asked) == 3
    assert file.seek(-5, 2) == len(data) - 5


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The place of a repository."""
    return (tmp_path / "repo").as_uri()


def scan_in(url: str, sources: Path, location: str, **options: Any) -> tuple[Scanned, Any]:
    """Scan a source through the containers of a repository; answer also how to read arrays."""
    repo = open_for(url, sources)

    async def work(native: Any) -> Scanned:
        virtual = native.engine.virtual
        _, found = await scan_source(virtual, location, ScanOptions(**options))
        assert found is not None
        return await load_values(virtual, found, list(found.arrays))

    found = SharedRepository.of(repo).ask(work)
    return found, {name: it.values for name, it in found.arrays.items()}


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_stores_of_zarr_are_listed(tmp_path: Path, url: str, zarr_format: Any) -> None:
    """Both formats, shards, separators, scalars, missing chunks, attributes."""
    sources = tmp_path / "sources"
    root = zarr.open_group(sources / "s.zarr", mode="w", zarr_format=zarr_format)
    root.attrs["about"] = "all"
    values = np.arange(100.0).reshape(10, 10)
    group = root.create_group("g")
    first = group.create_array("a", shape=(10, 10), chunks=(4, 3), dtype="f8", fill_value=0)
    first[:8] = values[:8]
    key: Any = {"name": "v2", "separator": "/"}
    second: Any = root.create_array(
        "b", shape=(10, 10), chunks=(4, 4), dtype="i4", chunk_key_encoding=key
    )
    second[:] = values
    third = root.create_array("c", shape=(), dtype="f4")
    third[()] = 5
    if zarr_format == 3:
        shards = root.create_array("s", shape=(8, 8), chunks=(2, 2), shards=(4, 4), dtype="i2")
        shards[:] = np.arange(64).reshape(8, 8)
    found, arrays = scan_in(url, sources, (sources / "s.zarr").as_uri())
    expected = np.where(np.arange(10)[:, None] < 8, values, 0)
    np.testing.assert_array_equal(arrays["g/a"], expected)
    np.testing.assert_array_equal(arrays["b"], values)
    assert arrays["c"] == 5
    assert found.groups[""] == {"about": "all"}
    if zarr_format == 3:
        np.testing.assert_array_equal(arrays["s"], np.arange(64).reshape(8, 8))


def test_references_of_kerchunk_are_read(tmp_path: Path, url: str) -> None:
    """As JSON and as Parquet, with whole objects, parts and inline chunks."""
    sources = tmp_path / "sources"
    sources.mkdir()
    values = np.arange(12, dtype="<i4")
    (sources / "raw.bin").write_bytes(values.tobytes())
    (sources / "one.bin").write_bytes(values[:4].tobytes())
    metadata = {
        ".zgroup": {"zarr_format": 2},
        "x/.zarray": {
            "zarr_format": 2,
            "shape": [12],
            "chunks": [4],
            "dtype": "<i4",
            "fill_value": None,
            "order": "C",
            "filters": None,
            "compressor": None,
        },
        "x/.zattrs": {"_ARRAY_DIMENSIONS": ["n"]},
    }
    whole, raw = str(sources / "one.bin"), str(sources / "raw.bin")
    inline = values[8:].tobytes()
    refs = {
        **metadata,
        "x/0": [whole],
        "x/1": [raw, 16, 16],
        "x/2": "base64:CAAAAAkAAAAKAAAACwAAAA==",
    }
    (sources / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    _, arrays = scan_in(url, sources, (sources / "refs.json").as_uri())
    np.testing.assert_array_equal(arrays["x"], values)

    parts = sources / "refs.parq"
    (parts / "x").mkdir(parents=True)
    (parts / ".zmetadata").write_text(json.dumps({"metadata": metadata, "record_size": 2}))
    for number, rows in enumerate(
        [
            {"path": [whole, raw], "offset": [0, 16], "size": [0, 16], "raw": [None, None]},
            {"path": [None, None], "offset": [0, 0], "size": [0, 0], "raw": [inline, None]},
        ]
    ):
        columns: dict[str, Any] = dict(rows)
        table = pa.Table.from_pydict(
            {
                **rows,
                "path": pa.array(columns["path"], pa.string()),
                "raw": pa.array(columns["raw"], pa.binary()),
            }
        )
        pq.write_table(table, str(parts / "x" / f"refs.{number}.parq"))
    again, arrays = scan_in(f"{url}2", sources, parts.as_uri())
    np.testing.assert_array_equal(arrays["x"], values)
    assert again.num_references == 0  # all of them were copied here


def test_folder_without_the_documents_of_its_arrays_holds_no_references(
    tmp_path: Path, url: str
) -> None:
    """Only the files of an array, or another document in that place; the error names the folder."""
    parts = tmp_path / "sources" / "refs.parq"
    (parts / "x").mkdir(parents=True)
    columns = {"path": ["a"], "offset": [0], "size": [0], "raw": [b""]}
    pq.write_table(pa.table(columns), str(parts / "x" / "refs.0.parq"))
    with pytest.raises(InvalidInputError, match=r"refs\.parq/' has no '\.zmetadata'"):
        scan_in(url, tmp_path / "sources", parts.as_uri())
    for number, wrong in enumerate(("[]", "{}", '{"metadata": {}, "record_size": "x"}', "\0")):
        (parts / ".zmetadata").write_text(wrong)
        with pytest.raises(InvalidInputError, match=r"refs\.parq/' holds no kerchunk references"):
            scan_in(f"{url}{number}", tmp_path / "sources", parts.as_uri())


WGRIB = """1:0:d=2020010100:TMP:2 m above ground:anl:
2:300:d=2020010100:UGRD:10 m above ground:anl:
3:700:d=2020010106:TMP:2 m above ground:6 hour fcst:
"""
ECMWF = (
    '{"date": "20200101", "step": "0", "levtype": "sfc", "param": "2t", "_offset": 0, '
    '"_length": 9}\n'
    '{"date": "20200101", "step": "6", "levtype": "pl", "levelist": "500", "param": "t", '
    '"_offset": 9, "_length": 5}\n'
)


def test_indexes_of_grib_files_are_understood() -> None:
    """Of wgrib2 and ECMWF; what codecs would decode wrongly is refused."""
    assert read_index(WGRIB, "x.idx") == [
        Message("TMP", "2 m above ground", "d=2020010100:anl", 0, 300),
        Message("UGRD", "10 m above ground", "d=2020010100:anl", 300, 400),
        Message("TMP", "2 m above ground", "d=2020010106:6 hour fcst", 700, None),
    ]
    found = read_index(ECMWF, "x.index")
    assert [it.name for it in found] == ["2t_sfc", "t_pl_500"]
    assert (found[1].offset, found[1].length) == (9, 5)
    with pytest.raises(InvalidInputError, match="several fields"):
        read_index(WGRIB.replace("2:300:", "1.2:0:"), "x.idx")
    with pytest.raises(InvalidInputError, match="no index"):
        read_index("nothing", "x.idx")
    with pytest.raises(InvalidInputError, match="no message of GRIB 2"):
        grid_of(b"nothing at all", "x")


def test_a_message_without_a_codec_is_refused(tmp_path: Path, url: str) -> None:
    """Before anything is stored that nobody could read."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "f.grib2").write_bytes(bytes(1000))
    (sources / "f.grib2.idx").write_text(WGRIB)
    with pytest.raises(InvalidInputError, match="No codec 'none-such'"):
        scan_in(url, sources, (sources / "f.grib2.idx").as_uri(), grib_codec={"name": "none-such"})


def grib_message(values: Any) -> bytes:
    """Return a message of GRIB 2 on a regular grid, with tenths as whole numbers."""
    rows, columns = values.shape
    packed = np.round(values.ravel() * 10 - values.min() * 10).astype(">u2")
    sections = [
        (1, struct.pack(">HHBBBHBBBBBBB", 7, 0, 2, 1, 1, 2020, 1, 1, 0, 0, 0, 0, 1)),
        (
            3,
            struct.pack(">BIBBH", 0, values.size, 0, 0, 0)
            + struct.pack(">BBIBIBIIIII", 6, 0, 0, 0, 0, 0, 0, columns, rows, 0, 0xFFFFFFFF)
            + struct.pack(">IIBIIIIB", 90_000_000, 0, 48, 80_000_000, 2_000_000, 10**6, 10**7, 0),
        ),
        (
            4,
            struct.pack(
                ">HHBBBBBHBBIBBIBBI", 0, 0, 0, 0, 2, 0, 0, 0, 0, 1, 0, 103, 0, 2, 255, 0, 0
            ),
        ),
        (5, struct.pack(">IHfHHBB", values.size, 0, values.min() * 10, 0, 1, 16, 0)),
        (6, b"\xff"),
        (7, packed.tobytes()),
    ]
    body = b"".join(struct.pack(">IB", 5 + len(it), number) + it for number, it in sections)
    body += b"7777"
    return b"GRIB\0\0" + bytes([0, 2]) + struct.pack(">Q", 16 + len(body)) + body


def test_messages_of_grib_become_chunks(tmp_path: Path, url: str) -> None:
    """One array for each variable and level, decoded by the codec of another package."""
    pytest.importorskip("gribberish", reason="gribberish decodes GRIB: see the group spark")
    sources = tmp_path / "sources"
    sources.mkdir()
    fields = [np.arange(6.0).reshape(2, 3) + number / 10 for number in range(3)]
    messages = [grib_message(it) for it in fields]
    starts = np.cumsum([0, *map(len, messages)])
    names = ["TMP:2 m above ground", "UGRD:10 m above ground", "TMP:2 m above ground"]
    lines = [
        f"{number + 1}:{start}:d=2020010{number + 1}00:{name}:anl:"
        for number, (start, name) in enumerate(zip(starts, names, strict=False))
    ]
    (sources / "f.grib2").write_bytes(b"".join(messages))
    (sources / "f.grib2.idx").write_text("\n".join(lines))
    found, arrays = scan_in(url, sources, (sources / "f.grib2.idx").as_uri())
    np.testing.assert_allclose(arrays["TMP_2_m_above_ground"], [fields[0], fields[2]], atol=1e-5)
    np.testing.assert_allclose(arrays["UGRD_10_m_above_ground"], [fields[1]], atol=1e-5)
    np.testing.assert_array_equal(arrays["latitude"], [90, 80])
    np.testing.assert_array_equal(arrays["longitude"], [0, 1, 2])
    attributes = found.arrays["TMP_2_m_above_ground"].document["attributes"]
    assert attributes["grib_messages"] == ["d=2020010100:anl", "d=2020010300:anl"]


def test_guards_use_only_states_that_every_reader_sees() -> None:
    """An ETag where there is one, else the time, rounded up to whole seconds."""
    state = SourceState(5, "v", '"etag"', 1_500_000)
    assert state.guard("auto") == ('"etag"', 0)
    assert state.guard("last-modified") == (None, 2)
    assert state.guard("none") == (None, 0)
    assert SourceState(5, "v", None, 2_000_000).guard("auto") == (None, 2)
    assert SourceState(5, "v", None, None).guard("auto") == (None, 0)


def test_times_are_copied_in_the_units_of_the_first_file() -> None:
    """Where the type can hold them, else refused."""
    from icechunk_async.spark.ingest.scan import Places, ScannedArray

    def array(units: str, values: Any) -> ScannedArray:
        document = {"shape": [2], "attributes": {"units": units}}
        return ScannedArray(document, Places.none(1), values=np.array(values, "i4"))

    first = array("days since 2000-01-01", [0, 1]).document
    moved = to_units(array("hours since 2000-01-02", [0, 48]), first)
    assert moved.tolist() == [1, 3]
    assert moved.dtype == np.int32
    with pytest.raises(InvalidInputError, match="not whole numbers"):
        to_units(array("hours since 2000-01-02", [0, 5]), first)
