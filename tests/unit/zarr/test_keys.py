"""Store keys, parsed strictly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import InvalidStoreKeyError
from icechunk_async.zarr.keys import (
    ChunkKey,
    ForeignKey,
    MetadataKey,
    StoreKey,
    chunk_prefix,
    metadata_key,
    parse_chunk_keys,
    parse_key,
)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("zarr.json", MetadataKey("/")),
        ("a/b/zarr.json", MetadataKey("/a/b")),
        ("zarr.json/zarr.json", MetadataKey("/zarr.json")),
        ("c", ChunkKey("/", ())),
        ("c/0/12", ChunkKey("/", (0, 12))),
        ("a/c", ChunkKey("/a", ())),
        ("a/c/0/1/2", ChunkKey("/a", (0, 1, 2))),
        ("a/c/c/7", ChunkKey("/a/c", (7,))),
        ("abc/c/0", ChunkKey("/abc", (0,))),
        ("a/c/1/c", ChunkKey("/a/c/1", ())),
        ("räume/höhe c/c/4294967295", ChunkKey("/räume/höhe c", (4294967295,))),
        (".zarray", ForeignKey()),
        ("a/b/.zgroup", ForeignKey()),
        ("a/.zattrs", ForeignKey()),
        (".zmetadata", ForeignKey()),
    ],
)
def test_keys_of_documents_and_chunks_are_parsed(key: str, expected: StoreKey) -> None:
    """Documents, chunks with and without axes, and documents of Zarr format 2."""
    assert parse_key(key) == expected


@pytest.mark.parametrize(
    "key",
    [
        "",
        "foo",
        "abc/0",
        "a/c/00",
        "a/c/01",
        "a/c/-1",
        "a/c/1.5",
        "a/c/ 1",
        "a/c/4294967296",
        "a/c/0.1",
        "a/c/٣",
        "/a/zarr.json",
        "a//zarr.json",
        "a//c/0",
        "a/../zarr.json",
        "./zarr.json",
        "a/c/",
        "zarr.json/",
        "a\0/zarr.json",
        "\ud800/zarr.json",
    ],
)
def test_keys_that_are_refused(key: str) -> None:
    """With the key, and what keys look like."""
    with pytest.raises(InvalidStoreKeyError, match="no key of an Icechunk store"):
        parse_key(key)


@pytest.mark.parametrize("path", ["/", "/a", "/a/c", "/c/0"])
def test_keys_are_made_as_they_are_parsed(path: str) -> None:
    """Making and parsing are inverse."""
    assert parse_key(metadata_key(path)) == MetadataKey(path)
    assert parse_key(f"{chunk_prefix(path)}/3/4") == ChunkKey(path, (3, 4))
    assert parse_key(chunk_prefix(path)) == ChunkKey(path, ())


@pytest.mark.parametrize(
    "key",
    ["a/c/1", "b/c/1/2", "a/c/1/2/3", "a/c/01/2", "a/c/1/-2", "a/c/1/x", "a/zarr.json", "a/c/1/ 2"],
)
def test_keys_of_anything_but_chunks_of_one_array_are_refused(key: str) -> None:
    """Wherever it is among the keys."""
    for keys in ([key, "a/c/0/0"], ["a/c/0/0", key]):
        with pytest.raises(InvalidStoreKeyError):
            parse_chunk_keys(keys)


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 9)), min_size=1))
def test_coordinates_come_out_of_keys_as_they_went_in(coords: list[tuple[int, int]]) -> None:
    """Of an array whose own name looks like a chunk."""
    keys = [f"c/1/c/{it[0]}/{it[1]}" for it in coords]
    assert parse_chunk_keys(keys) == ("/c/1", coords)
