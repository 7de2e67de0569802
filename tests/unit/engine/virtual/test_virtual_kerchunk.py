"""Kerchunk's references: what they may look like, and what becomes of them."""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.errors import (
    InvalidInputError,
    InvalidMetadataError,
    NodeExistsError,
    VirtualAccessError,
    VirtualContainerError,
    VirtualSourceChangedError,
)
from icechunk_async.format.config import LocalFileSystemStore, S3Store, VirtualChunkContainer
from icechunk_async.storage import open_storage
from icechunk_async.virtual import write_kerchunk_references
from icechunk_async.zarr.virtual.kerchunk import read_references
from tests.helpers import make_array, memory_url, read, write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from icechunk_async import Session
    from icechunk_async.storage import Storage

zarr: Any = import_module("zarr.api.asynchronous")
numcodecs: Any = import_module("numcodecs")

pytestmark = pytest.mark.filterwarnings("ignore:Numcodecs codecs", "ignore:The data type")

DATA = bytes(range(200))
BUCKET = "s3://bucket/"


def zarray(shape: tuple[int, ...], chunks: tuple[int, ...], **more: Any) -> str:
    """Return a ``.zarray`` of bytes without compression."""
    return json.dumps(
        {
            "zarr_format": 2,
            "shape": shape,
            "chunks": chunks,
            "dtype": "|u1",
            "compressor": None,
            "filters": None,
            "fill_value": 0,
            "order": "C",
            **more,
        }
    )


@pytest.fixture
async def bucket() -> AsyncIterator[Storage]:
    """Stand in for a bucket with one object."""
    async with open_storage(memory_url()) as storage:
        await storage.put("dir/f #1.nc", DATA)
        await storage.put("plain.nc", DATA)
        yield storage


@pytest.fixture
async def session(spec: int, bucket: Storage) -> AsyncIterator[Session]:
    """Begin a session whose repository has a container that may be read, and one that may not."""
    containers = (
        VirtualChunkContainer(BUCKET, S3Store()),
        VirtualChunkContainer("file:///closed/", LocalFileSystemStore("/closed")),
    )
    async with Repository.create(
        memory_url(),
        spec_version=spec,
        config=RepositoryConfig(virtual_chunk_containers=containers),
        authorize_virtual_chunk_access={BUCKET: bucket},
    ) as repository:
        yield await repository.writable_session("main")


async def _values(session: Session, path: str) -> Any:
    array = await zarr.open_array(store=session.store, path=path, mode="r")
    return np.asarray(await array.getitem(Ellipsis))


async def test_a_hierarchy_is_written_with_all_kinds_of_entries(session: Session) -> None:
    """Text, base64, whole objects, ranges, templates; missing chunks are fill values."""
    refs: dict[str, Any] = {
        ".zgroup": {"zarr_format": 2},
        ".zattrs": json.dumps({"title": "all"}),
        "a/.zarray": zarray((4, 6), (2, 3), fill_value=9),
        "a/.zattrs": {"_ARRAY_DIMENSIONS": ["y", "x"], "units": "K"},
        "a/0.0": ["{{u}}dir/f #1.nc", 10, 6],
        "a/0.1": ["{{ u }}plain.nc", 20, 6],
        "a/1.1": "abcdef",
        "deep/er/b/.zarray": zarray((200,), (200,)),
        "deep/er/b/0": ["s3://bucket/plain.nc"],
        "c/.zarray": zarray((), (), dtype="<i4", fill_value=None),
        "c/0": "base64:" + b64encode(np.int32(77).tobytes()).decode(),
        "d/.zarray": zarray((2, 2), (1, 2), dimension_separator="/"),
        "d/1/0": ["s3://bucket/plain.nc", 5, 2],
        "e/.zarray": zarray((0,), (1,)),
        ".zmetadata": "{}",
    }
    document = {"version": 1, "templates": {"u": BUCKET}, "refs": refs}
    assert await write_kerchunk_references(session, json.dumps(document), path="x/y") == 4
    a = await _values(session, "x/y/a")
    assert a[:2, :3].tobytes() == DATA[10:16]
    assert a[:2, 3:].tobytes() == DATA[20:26]
    assert a[2:, :3].tolist() == [[9] * 3] * 2
    assert a[2:, 3:].tobytes() == b"abcdef"
    assert (await _values(session, "x/y/deep/er/b")).tobytes() == DATA
    assert (await _values(session, "x/y/c")) == 77
    assert (await _values(session, "x/y/d")).tobytes() == b"\0\0" + DATA[5:7]
    array = await zarr.open_array(store=session.store, path="x/y/a", mode="r")
    assert array.metadata.dimension_names == ("y", "x")
    assert dict(array.attrs) == {"units": "K", "_FillValue": 9}
    group = await zarr.open_group(store=session.store, path="x/y", mode="r")
    assert group.attrs == {"title": "all"}
    assert sorted([name async for name in group.group_keys()]) == ["deep"]
    assert sorted(set(await session.all_virtual_chunk_locations())) == [
        "s3://bucket/dir/f%20%231.nc",
        "s3://bucket/plain.nc",
    ]


async def test_an_array_takes_the_place_of_another(session: Session) -> None:
    """Nothing of the old one shows through; a second time writes the same."""
    refs = {"a/.zarray": zarray((4,), (1,)), "a/2": [f"{BUCKET}plain.nc", 3, 1]}
    await make_array(session, "a", (4,), (1,))
    await write(session, "a/c/0", b"x")
    for _ in range(2):
        assert await write_kerchunk_references(session, refs) == 1
        assert (await _values(session, "a")).tolist() == [0, 0, 3, 0]
    await session.commit("references")
    assert await read(session, "a/c/2") == DATA[3:4]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    ("dtype", "filters", "compressor"),
    [
        ("<f4", [{"id": "shuffle", "elementsize": 4}, {"id": "zlib", "level": 4}], None),
        (">i2", None, {"id": "zlib", "level": 1}),
        ("<i8", [{"id": "delta", "dtype": "<i8", "astype": "<i2"}], {"id": "gzip", "level": 1}),
        (
            "<f8",
            [{"id": "fixedscaleoffset", "scale": 10, "offset": 0, "dtype": "<f8", "astype": ">i4"}],
            {"id": "bz2", "level": 1},
        ),
        ("<u2", None, {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": -1, "blocksize": 0}),
        ("|u1", None, {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 1, "blocksize": 0}),
        ("<i4", None, {"id": "zstd", "level": 3}),
        ("<i4", [{"id": "fletcher32"}], None),
        ("<c8", None, {"id": "lz4", "acceleration": 1}),
        ("|b1", None, None),
        ("|S3", None, {"id": "zlib", "level": 1}),
        ("<U2", None, None),
        ("<M8[s]", None, None),
    ],
)
async def test_every_codec_and_type_decodes(
    session: Session,
    bucket: Storage,
    dtype: str,
    filters: list[dict[str, Any]] | None,
    compressor: dict[str, Any] | None,
    *,
    order: Any,
) -> None:
    """Chunks that numcodecs encoded for Zarr format 2 are read through the references."""
    values = np.arange(12).reshape(3, 4).astype(dtype)
    data: Any = values.ravel(order=order) if filters else values.tobytes(order)
    for codec in [*(filters or ()), *((compressor,) if compressor else ())]:
        data = numcodecs.get_codec(dict(codec)).encode(data)
    data = data.tobytes() if hasattr(data, "tobytes") else bytes(data)
    await bucket.put("encoded", b"_" * 7 + data)
    document = zarray(
        (3, 4),
        (3, 4),
        dtype=dtype,
        filters=filters,
        compressor=compressor,
        order=order,
        fill_value=None,
    )
    refs = {"a/.zarray": document, "a/0.0": [f"{BUCKET}encoded", 7, len(data)]}
    await write_kerchunk_references(session, refs)
    found = await _values(session, "a")
    assert found.tolist() == values.tolist()


async def test_text_of_any_length_decodes(session: Session) -> None:
    """Arrays of objects are those of text."""
    data = numcodecs.VLenUTF8().encode(np.array(["x", "größer"], object))
    document = zarray((2,), (2,), dtype="|O", filters=[{"id": "vlen-utf8"}], fill_value="")
    inline = "base64:" + b64encode(bytes(data)).decode()
    await write_kerchunk_references(session, {"a/.zarray": document, "a/0": inline})
    assert (await _values(session, "a")).tolist() == ["x", "größer"]


DELTA = {"id": "delta", "dtype": "|u1"}
GOOD = {"a/.zarray": zarray((4, 4), (2, 2)), "a/0.0": [f"{BUCKET}plain.nc", 0, 4]}


@pytest.mark.parametrize(
    ("more", "kind", "found"),
    [
        ({"a/0.9": [f"{BUCKET}f", 0, 4]}, InvalidInputError, r"chunk \[0, 9\] of '/a'"),
        ({"a/9.0": "abcd"}, InvalidInputError, r"chunk \[9, 0\] of '/a'"),
        ({"a/0": [f"{BUCKET}f", 0, 4]}, InvalidInputError, "no chunk of an array of 2 axes"),
        ({"a/0.x": [f"{BUCKET}f", 0, 4]}, InvalidInputError, "no chunk of an array"),
        ({"a/0.-1": [f"{BUCKET}f", 0, 4]}, InvalidInputError, "no chunk of an array"),
        ({"b/0": [f"{BUCKET}f", 0, 4]}, InvalidInputError, "belongs to no array"),
        ({"a/0.1": [f"{BUCKET}f", 0]}, InvalidInputError, "neither text nor"),
        ({"a/0.1": 7}, InvalidInputError, "neither text nor"),
        ({"a/0.1": [f"{BUCKET}f", -1, 4]}, InvalidInputError, "no offset or length"),
        ({"a/0.1": [f"{BUCKET}f", 0, 1.5]}, InvalidInputError, "no offset or length"),
        ({"a/0.1": [f"{BUCKET}f", 0, 0]}, InvalidInputError, "without any bytes"),
        ({"a/0.1": [None, 0, 4]}, InvalidInputError, "is no URL"),
        ({"a/0.1": ["some/f.nc", 0, 4]}, InvalidInputError, "is relative"),
        ({"a/0.1": ["{{x}}/f", 0, 4]}, InvalidInputError, "template"),
        ({"a/0.1": ["{{f(c='x')}}", 0, 4]}, InvalidInputError, "template"),
        ({"a/0.1": ["s3://other/f", 0, 4]}, VirtualContainerError, "s3://other/f"),
        ({"a/0.1": ["s3://other/f"]}, VirtualContainerError, "s3://other/f"),
        ({"a/0.1": ["/closed/f"]}, VirtualAccessError, "file:///closed/f"),
        ({"a/0.1": [f"{BUCKET}gone"]}, VirtualSourceChangedError, "gone"),
        ({"b/.zarray": "{"}, InvalidInputError, "'b/.zarray' in the references is no JSON"),
        ({"b/.zarray": ["x", 0, 1]}, InvalidInputError, "is no JSON object"),
        ({"b/.zarray": zarray((1,), (1,), compressor={"id": "nosuch"})}, InvalidMetadataError, "b"),
        ({"b/.zarray": zarray((1,), (1,), dtype="|O")}, InvalidMetadataError, "'/b'"),
        ({"b/.zarray": "{}"}, InvalidMetadataError, "'/b'"),
        (
            {"b/.zarray": zarray((1,), (1,), filters=[{"id": "zlib"}, DELTA])},
            InvalidMetadataError,
            "after one that makes bytes",
        ),
        (
            {"b/.zarray": zarray((1,), (1,)), "b/.zattrs": {"_ARRAY_DIMENSIONS": ["x", "y"]}},
            InvalidMetadataError,
            "2 names for 1 axes",
        ),
        ({"old/.zarray": zarray((1,), (1,))}, NodeExistsError, "a group already"),
        ({"array/.zgroup": {"zarr_format": 2}}, NodeExistsError, "an array already"),
        ({"array/x/.zgroup": {"zarr_format": 2}}, NodeExistsError, "an array already"),
        ({"../b/.zgroup": {"zarr_format": 2}}, InvalidInputError, "no node path|not a node path"),
    ],
)
async def test_what_cannot_be_written_changes_nothing(
    session: Session, more: Mapping[str, Any], kind: type[Exception], found: str
) -> None:
    """One bad entry among good ones: the error names it, and the session is unchanged."""
    await make_array(session, "array", (1,), (1,))
    await zarr.create_group(store=session.store, path="old")
    before = session.status()
    with pytest.raises(kind, match=found):
        await write_kerchunk_references(session, {**GOOD, **more})
    assert session.status() == before


async def test_malformed_reference_documents_are_refused(session: Session) -> None:
    """No JSON, no mapping, or references that are yet to be generated."""
    cases: list[tuple[Any, str]] = [
        ("{", "no JSON"),
        ("references.json", "no JSON.*the text of a file, not its name"),
        (Path("references.json"), "are a PosixPath.*the text of a file"),
        ("[]", "are a list"),
        ({}, "name no group and no array"),
        ({"version": 1, "refs": {}}, "name no group and no array"),
        ({"version": 1, "refs": {}, "gen": [{"key": "x"}]}, "'gen' section"),
        ('{"refs":' * 5000, "cannot be understood|no JSON"),
        ({"refs": {**GOOD, "a/0.1": ["{{u}}/f", 0, 4]}, "templates": 7}, "cannot be understood"),
        ({**GOOD, "a/0.99999999999999999999": ["/f", 0, 4]}, "cannot be understood"),
        ({**GOOD, "a/0.99999999999999999999": "inline"}, "cannot be understood"),
        ({**GOOD, "a/0.1": "base64:x"}, "cannot be understood"),
        ({**GOOD, "a/0.1": [["/f"], 0, 4]}, "cannot be understood"),
        ({**GOOD, "a/.zattrs": {"_ARRAY_DIMENSIONS": 7}}, "cannot be understood"),
    ]
    for document, found in cases:
        with pytest.raises(InvalidInputError, match=found):
            await write_kerchunk_references(session, document)


async def test_containers_need_not_be_known(session: Session) -> None:
    """The caller can allow unknown containers. A guard applies to all references."""
    refs = {**GOOD, "a/0.1": ["s3://other/f", 0, 4]}
    wrong = "W/never"
    assert await write_kerchunk_references(session, refs, validate_containers=False, checksum=wrong)
    with pytest.raises(VirtualSourceChangedError, match="W/never"):
        await read(session, "a/c/0/0")
    with pytest.raises(VirtualContainerError):
        await read(session, "a/c/0/1")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("/data/a b#1.nc", "file:///data/a%20b%231.nc"),
        ("file:///data/a b%20.nc", "file:///data/a%20b%2520.nc"),
        ("s3://b/x y%3F?.nc", "s3://b/x%20y%253F%3F.nc"),
        ("gs://b/plain.nc", "gs://b/plain.nc"),
        ("https://h/x%20y.nc?z", "https://h/x%20y.nc?z"),
        ("vcc://name/x%20y.nc", "vcc://name/x%20y.nc"),
    ],
)
def test_paths_of_fsspec_become_urls(url: str, expected: str) -> None:
    """They are literal, where those of locations are percent-encoded."""
    refs = {"a/.zarray": zarray((1,), (1,)), "a/0": [url, 0, 1]}
    assert read_references(refs, path="/").urls == (expected,)


def test_reading_many_references_makes_no_object_each() -> None:
    """Columns take a few bytes a reference, and equal URLs are one."""
    count = 100_000
    refs: dict[str, Any] = {"a/.zarray": zarray((count,), (1,))}
    refs.update((f"a/{at}", [f"s3://b/{at % 7}", at, 1]) for at in range(count))
    found = read_references(refs, path="/")
    chunks = found.nodes[0].chunks
    assert chunks is not None
    assert len(found.urls) == 7
    assert (len(chunks.codes), chunks.inline) == (count, {})
    assert np.frombuffer(chunks.offsets, "u8").tolist() == [*range(count)]
    assert zlib.crc32(chunks.coordinates().tobytes()) == zlib.crc32(
        np.arange(count, dtype="u8").tobytes()
    )
