"""Dense arrays as arrays of Zarr whose chunks refer to tiles."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr.api.asynchronous as zarr_async

from icechunk_async.errors import (
    FormatError,
    InvalidInputError,
    NodeExistsError,
    UnsupportedFeatureError,
    VirtualContainerError,
)
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.tiledb import (
    Attribute,
    Datatype,
    TileDBCodec,
    open_array,
    write_virtual_array,
)
from icechunk_async.tiledb.arrays.cells import Cells
from icechunk_async.tiledb.format.types import VAR, default_fill
from icechunk_async.tiledb.zarr.copies import byte_strings, element_attributes
from icechunk_async.zarr.decoding import ChunkCodec
from tests.helpers import read
from tests.unit.tiledb.archives import ARCHIVES, cases, golden_jobs
from tests.unit.tiledb.virtual_arrays import expressible, placed, referring

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async import Session
    from icechunk_async.tiledb import TileDBArray

NUMBERS = {f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)} | {
    "FLOAT32",
    "FLOAT64",
    "BOOL",
}
_QUICK = (ARCHIVES[0], ARCHIVES[-1])
DENSE = cases(
    lambda job: (
        not job["sparse"] and not all(it.get("var") or it.get("nullable") for it in job["attrs"])
    ),
    quick=_QUICK,
)


async def _same(store: Any, path: str, array: TileDBArray, names: list[str]) -> None:
    domain = array.schema.current_domain or [(it.low, it.high) for it in array.schema.dimensions]
    starts = array.grid().origin
    region = [
        slice(start, int(high or 0) + 1) for start, (_, high) in zip(starts, domain, strict=True)
    ]
    expected = await array.read(region, attributes=names)
    for name in names:
        made = await zarr_async.open_array(store=store, path=f"{path}/{name or 'values'}")
        found: Any = await made.getitem(...)
        wanted = expected[name]
        if wanted.dtype.kind in "mM":
            wanted = wanted.view("i8")
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("archive", "job"), DENSE)
async def test_zarr_reads_what_the_array_holds(
    archive: str, job: dict[str, Any], tmp_path: Path
) -> None:
    """Of every version, with any filters and orders, referred to and copied."""
    place = placed(archive, job["number"], tmp_path)
    async with referring(place) as repository, open_array(place) as array:
        names = expressible(array.schema)
        session = await repository.writable_session("main")
        found = await write_virtual_array(session, array, "deep/er", attributes=names, copy=True)
        snapshot = await session.commit("tiles")
        reading = await repository.readonly_session(snapshot_id=snapshot)
        assert await _virtual_chunks(reading) == found.referenced
        await _same(reading.store, "deep/er", array, names)


async def _virtual_chunks(session: Session) -> int:
    """Return the number of virtual chunks that a session sees."""
    found = 0
    async for key in session.store.list():
        array, mark, coords = key.rpartition("/c/")
        if mark:
            kind = await session.chunk_type(array, tuple(map(int, coords.split("/"))))
            found += kind.name == "VIRTUAL"
    return found


def _mixed() -> tuple[str, dict[str, Any]]:
    """Return the newest golden array with several fragments and an attribute for Zarr."""
    return next(
        (archive, job)
        for archive in reversed(ARCHIVES)
        for job in golden_jobs(archive)
        if not job["sparse"]
        and sum(it["op"] == "write" for it in job["steps"]) > 1
        and any(not it.get("var") and not it.get("nullable") for it in job["attrs"])
    )


async def test_tiles_of_several_fragments_are_copied_only_on_request(tmp_path: Path) -> None:
    """Else the error names the first one and its fragments, and nothing is written."""
    archive, job = _mixed()
    place = placed(archive, job["number"], tmp_path)
    async with referring(place) as repository, open_array(place) as array:
        names = expressible(array.schema)
        session = await repository.writable_session("main")
        with pytest.raises(InvalidInputError, match="Set copy=True") as refused:
            await write_virtual_array(session, array, attributes=names)
        assert any(it.name.text in str(refused.value) for it in array.fragments)
        assert not session.has_uncommitted_changes
        found = await write_virtual_array(
            session, array, attributes=names, copy=True, overwrite=True
        )
        assert found.copied > 0
        await _same(session.store, "", array, names)


async def test_references_need_no_tile_to_be_read(tmp_path: Path) -> None:
    """Writing them reads metadata alone."""
    archive, job = ARCHIVES[-1], _number("features-0")
    place = placed(archive, job["number"], tmp_path)
    async with open_storage(place) as storage, referring(place) as repository:
        counted = LatencyStorage(storage, seconds=0)
        async with open_array(counted, end=job["queries"][0]["end"]) as array:
            session = await repository.writable_session("main")
            found = await write_virtual_array(session, array, attributes=["a0", "a1"], copy=True)
        read = {key.rpartition("/")[2] for operation, key in counted.log if operation == "get"}
        assert found.referenced > 0
        assert found.copied == 0
        assert not read & {"a0.tdb", "a1.tdb"}


def _number(number: str) -> dict[str, Any]:
    return next(it for it in golden_jobs(ARCHIVES[-1]) if it["number"] == number)


async def test_attributes_that_zarr_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    """Before anything is written: of variable length, null, or text."""
    reasons: set[str] = set()
    for archive in ARCHIVES[-3:]:
        for job in golden_jobs(archive):
            if job["sparse"]:
                continue
            place = placed(archive, job["number"], tmp_path / archive / job["number"])
            async with referring(place) as repository, open_array(place) as array:
                session = await repository.writable_session("main")
                for it in array.schema.attributes:
                    if it.name in expressible(array.schema):
                        continue
                    with pytest.raises(InvalidInputError, match=repr(it.name)) as refused:
                        await write_virtual_array(session, array, attributes=[it.name])
                    reasons.add(str(refused.value).partition(": ")[2].partition(".")[0])
                assert not session.has_uncommitted_changes
    assert reasons >= {"its cells have variable length", "its cells may be null"}


NULLABLE = [
    pytest.param(archive, job, id=f"{archive}-{job['number']}")
    for archive in (*ARCHIVES[-6:], "by-0.8.11", "by-0.10.5")
    for job in golden_jobs(archive)
    if not job["sparse"] and any(it.get("nullable") and not it.get("var") for it in job["attrs"])
]


@pytest.mark.parametrize(("archive", "job"), NULLABLE)
async def test_null_cells_are_those_of_a_second_array(
    archive: str, job: dict[str, Any], tmp_path: Path
) -> None:
    """It refers to tiles as well; together they hold what TileDB does."""
    place = placed(archive, job["number"], tmp_path)
    async with referring(place) as repository, open_array(place) as array:
        names = [
            it.name
            for it in array.schema.attributes
            if it.is_nullable and not it.is_variable and it.datatype.name in NUMBERS
        ]
        session = await repository.writable_session("main")
        found = await write_virtual_array(
            session, array, "grid", attributes=names, copy=True, validity=True
        )
        assert (found.referenced + found.copied) % 2 == 0
        for name in names:
            values: Any = await zarr_async.open_array(store=session.store, path=f"grid/{name}")
            flags: Any = await zarr_async.open_array(
                store=session.store, path=f"grid/{name}_validity"
            )
            assert values.attrs["ancillary_variables"] == f"{name}_validity"
            assert flags.attrs["flag_meanings"] == "null valid"
            expected = (await array.read(attributes=[name]))[name]
            is_valid = ~np.ma.getmaskarray(expected)
            if is_valid.ndim > flags.ndim:
                is_valid = is_valid[..., 0]
            np.testing.assert_array_equal(await flags.getitem(...), is_valid)
            stored = np.ma.getdata(expected)
            stored = stored.view("i8") if stored.dtype.kind in "mM" else stored
            read = await values.getitem(...)
            np.testing.assert_array_equal(read[is_valid], stored[is_valid])


def _is_text(it: dict[str, Any]) -> bool:
    return bool(it.get("var")) and it["dtype"] in ("utf8", "ascii")


TEXTS = [
    pytest.param(
        archive,
        job,
        id=f"{archive}-{job['number']}",
        marks=() if archive in (*_QUICK, "by-0.8.11") else pytest.mark.thorough,
    )
    for archive in ARCHIVES
    for job in golden_jobs(archive)
    if not job["sparse"] and any(map(_is_text, job["attrs"]))
]


@pytest.mark.parametrize(("archive", "job"), TEXTS)
async def test_text_is_copied_to_strings(archive: str, job: dict[str, Any], tmp_path: Path) -> None:
    """All of its tiles, in any order; null cells are those of a second array."""
    place = placed(archive, job["number"], tmp_path)
    async with referring(place) as repository, open_array(place) as array:
        names = [it["name"] for it in job["attrs"] if _is_text(it)]
        session = await repository.writable_session("main")
        found = await write_virtual_array(
            session, array, "grid", attributes=names, copy=True, validity=True
        )
        assert found.copied > 0
        expected = await array.read(attributes=names)
        for name in names:
            made: Any = await zarr_async.open_array(store=session.store, path=f"grid/{name}")
            assert made.metadata.to_dict()["data_type"] == "string"
            assert made.metadata.to_dict()["codecs"][0]["name"] == "vlen-utf8"
            values, wanted = np.asarray(await made.getitem(...)), expected[name]
            is_valid = ~np.ma.getmaskarray(wanted)
            assert values.shape == wanted.shape
            assert values[is_valid].tolist() == np.ma.getdata(wanted)[is_valid].tolist()
            if np.ma.isMaskedArray(wanted):
                assert set(values[~is_valid].tolist()) <= {made.metadata.fill_value}
                flags: Any = await zarr_async.open_array(
                    store=session.store, path=f"grid/{name}_validity"
                )
                np.testing.assert_array_equal(await flags.getitem(...), is_valid)


async def test_what_may_be_null_is_refused_also_as_a_copy(tmp_path: Path) -> None:
    """Without an array of validity, of numbers and of text; nothing is written."""
    for archive, number, name in (("by-0.10.5", "dense-1", "a2"), ("by-0.10.5", "dense-2", "a0")):
        place = placed(archive, number, tmp_path / archive / number)
        async with referring(place) as repository, open_array(place) as array:
            session = await repository.writable_session("main")
            with pytest.raises(InvalidInputError, match=f"{name!r}.*null. With validity=True"):
                await write_virtual_array(session, array, attributes=[name], copy=True)
            assert not session.has_uncommitted_changes


@pytest.mark.parametrize("archive", ["by-0.6.6", "by-0.7.7", "by-0.8.0"])
async def test_numbers_of_variable_length_are_copied_to_bytes(archive: str, tmp_path: Path) -> None:
    """On request; an attribute names the type with which NumPy makes numbers of each cell."""
    place = placed(archive, "dense-1", tmp_path)
    async with referring(place) as repository, open_array(place) as array:
        session = await repository.writable_session("main")
        with pytest.raises(InvalidInputError, match=r"'attr 2'.*copied to an array of bytes"):
            await write_virtual_array(session, array, "grid", attributes=["attr 2"])
        assert not session.has_uncommitted_changes
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no type or codec that may change
            # Of tests before this one, whose sessions are collected when it pleases Python.
            warnings.filterwarnings("ignore", "A session on branch", ResourceWarning)
            found = await write_virtual_array(
                session, array, "grid", attributes=["attr 2"], copy=True
            )
        assert (found.referenced, found.copied > 0) == (0, True)
        made: Any = await zarr_async.open_array(store=session.store, path="grid/attr 2")
        document = json.loads((await read(session, "grid/attr 2/zarr.json")) or b"")
        assert document["data_type"] == "bytes"
        assert document["codecs"][0]["name"] == "vlen-bytes"
        assert dict(made.attrs) == {"tiledb_datatype": "uint16", "element_dtype": "<u2"}
        expected = (await array.read(attributes=["attr 2"]))["attr 2"]
        values = np.asarray(await made.getitem(...))
        assert values.shape == expected.shape
        assert len({len(it) for it in expected.flat}) > 1
        for cell, wanted in zip(values.flat, expected.flat, strict=True):
            numbers = np.frombuffer(cell, made.attrs["element_dtype"])
            np.testing.assert_array_equal(numbers, wanted)


def _attribute(datatype: Datatype, values: int = VAR) -> Any:
    """Return an attribute, of which only the type matters."""
    fill = default_fill(datatype) * (1 if values == VAR else values)
    return Attribute("a", datatype, values, (), fill)


@pytest.mark.parametrize(
    ("datatype", "stored", "about", "cells"),
    [
        ("CHAR", [1, -1], {}, [b"\x01\xff", b""]),
        ("BLOB", [1, 255], {}, [b"\x01\xff", b""]),
        ("BOOL", [0, 7], {"element_dtype": "|b1"}, [b"\x00\x01", b""]),
        ("INT32", [1, -2], {"element_dtype": "<i4"}, [b"\1\0\0\0\xfe\xff\xff\xff", b""]),
        (
            "DATETIME_DAY",
            [1, 2],
            {"element_dtype": "<M8[D]"},
            [b"\1" + bytes(7) + b"\2" + bytes(7), b""],
        ),
        ("TIME_MS", [1], {"element_dtype": "<m8[ms]"}, [b"\1" + bytes(7), b""]),
        ("STRING_UTF16", [228], {"element_dtype": "<u2"}, ["ä".encode("utf-16-le"), b""]),
    ],
)
def test_bytes_are_those_of_the_values(
    datatype: str, stored: list[int], about: dict[str, Any], cells: list[bytes]
) -> None:
    """Of each kind of type; null cells are the fill value."""
    it = _attribute(Datatype[datatype])
    assert element_attributes(it) == {"tiledb_datatype": datatype.lower(), **about}
    values = np.array(stored).astype(it.dtype)
    found = Cells(it, values, np.array([0, len(stored), len(stored)]))
    assert byte_strings(found, b"?").tolist() == cells
    null = Cells(it, values, found.offsets, np.array([True, False]))
    assert byte_strings(null, b"?").tolist() == [cells[0], b"?"]


def test_text_of_fixed_length_is_bytes_of_that_length() -> None:
    """Also where it holds NUL bytes."""
    it = _attribute(Datatype.STRING_ASCII, 2)
    found = byte_strings(Cells(it, np.frombuffer(b"ab\0\0c\0", "u1").reshape(3, 2)), b"")
    assert found.tolist() == [b"ab", b"\0\0", b"c\0"]


async def test_sparse_fragments_in_dense_arrays_are_refused(tmp_path: Path) -> None:
    """By their name: TileDB wrote such ones before 2.5. Another call does not read half of them."""
    place = placed(ARCHIVES[-1], "features-0", tmp_path)
    async with referring(place) as repository, open_array(place) as array:
        first = array.fragments[0]
        sparse = copy.copy(first)
        object.__setattr__(sparse, "footer", replace(first.footer, is_dense=False))
        mixed = replace(array, fragments=(sparse, *array.fragments[1:]))
        session = await repository.writable_session("main")
        for work in (mixed.read(), write_virtual_array(session, mixed, "grid", copy=True)):
            with pytest.raises(UnsupportedFeatureError, match=first.name.text):
                await work
        assert not session.has_uncommitted_changes


async def test_text_that_is_not_valid_is_a_format_error(tmp_path: Path) -> None:
    """It names the attribute; other text is never put in its place."""
    place = placed("by-0.8.11", "dense-1", tmp_path)
    (file,) = place.glob("*/attr 2_var.tdb")  # it has no filters
    async with open_array(place) as array:
        found: Any = (await array.read(attributes=["attr 2"]))["attr 2"]
    texts: list[str] = found.compressed().tolist()
    text = max((it.encode() for it in texts), key=len)
    data = file.read_bytes()
    assert text in data
    file.write_bytes(data.replace(text, b"\xff" * len(text), 1))
    async with referring(place) as repository, open_array(place) as array:
        session = await repository.writable_session("main")
        with pytest.raises(FormatError, match=r"'attr 2'.*not valid UTF-8"):
            await write_virtual_array(
                session, array, attributes=["attr 2"], copy=True, validity=True, overwrite=True
            )


async def test_array_that_no_container_covers_is_refused(tmp_path: Path) -> None:
    """Nothing is written, unless containers are not to be checked; a location may name one."""
    job = _number("features-0")
    place = placed(ARCHIVES[-1], job["number"], tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    async with referring(other) as repository, open_array(place) as array:
        session = await repository.writable_session("main")
        with pytest.raises(VirtualContainerError):
            await write_virtual_array(session, array, attributes=["a0"], copy=True)
        assert not session.has_uncommitted_changes
    async with referring(place) as repository, open_array(place) as array:
        session = await repository.writable_session("main")
        options: dict[str, Any] = {"attributes": ["a0"], "copy": True}
        await write_virtual_array(session, array, "a", location="vcc://tiledb/", **options)
        await _same(session.store, "a", array, ["a0"])
        with pytest.raises(NodeExistsError, match="'/a' exists"):
            await write_virtual_array(session, array, "a", **options)
        await write_virtual_array(session, array, "a", overwrite=True, **options)
        await _same(session.store, "a", array, ["a0"])


async def test_sparse_array_is_refused(tmp_path: Path) -> None:
    """The error says how to read it."""
    job = next(it for it in golden_jobs(ARCHIVES[-1]) if it["sparse"])
    place = placed(ARCHIVES[-1], job["number"], tmp_path)
    async with referring(place) as repository, open_array(place) as array:
        session = await repository.writable_session("main")
        with pytest.raises(InvalidInputError, match="is sparse"):
            await write_virtual_array(session, array)


_CODEC = {
    "name": "icechunk_async.tiledb",
    "configuration": {
        "filters": [{"name": "zstd"}], "datatype": "float32", "values": 1, "version": 22,
    },
}  # fmt: skip


def _document(codec: object, **more: object) -> bytes:
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [6],
            "data_type": "float32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3]}},
            "chunk_key_encoding": {"name": "default"},
            "fill_value": 0,
            "codecs": [codec],
            "attributes": {},
            **more,
        }
    ).encode()


async def test_zarr_finds_the_codec_by_its_entry_point() -> None:
    """Its document is that which the array stores, and chunks that Zarr writes are read again."""
    codec = ChunkCodec.of(_document(_CODEC))
    values = np.array([1, np.nan, -0.0], "f4")
    data = await codec.encode(values)
    np.testing.assert_array_equal((await codec.decode(data)).view("u4"), values.view("u4"))
    assert TileDBCodec.from_dict(_CODEC).to_dict() == _CODEC  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 8, b"\xff" * 8 + b"\x28\xb5\x2f\xfd" + b"\xff" * 20, b"\0" * 8, b"\x01" * 40],
)
async def test_damaged_chunk_is_a_format_error(data: bytes) -> None:
    """Of both forms."""
    codec = ChunkCodec.of(_document(_CODEC))
    with pytest.raises(FormatError):
        await codec.decode(data)


@pytest.mark.parametrize(
    "change",
    [
        {"filters": [{"name": "none at all"}]}, {"filters": 5}, {"datatype": "float128"},
        {"datatype": 7}, {"values": 0}, {"values": "many"}, {"version": 3}, {"version": [1]},
        {"filters": [{"name": "webp"}]}, {"filters": [{"name": "float-scale", "byte_width": 3}]},
    ],
)  # fmt: skip
def test_document_of_a_codec_that_is_not_one_is_a_format_error(change: dict[str, Any]) -> None:
    """Documents come from storage."""
    configuration: Any = {**_CODEC["configuration"], **change}  # type: ignore[dict-item]
    with pytest.raises(FormatError):
        TileDBCodec.from_dict({"name": "icechunk_async.tiledb", "configuration": configuration})
    with pytest.raises(FormatError):
        TileDBCodec.from_dict({"name": "icechunk_async.tiledb"})


def test_array_of_another_type_than_its_tiles_is_refused() -> None:
    """Bytes are not taken for values of another type."""
    with pytest.raises(InvalidInputError, match="makes arrays of float32"):
        ChunkCodec.of(_document(_CODEC, data_type="int32"))
