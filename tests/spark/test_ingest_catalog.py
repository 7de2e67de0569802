"""The record of ingested files: written in chunks, so that a rerun costs what changed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import zarr
from pyarrow import ipc

from icechunk_async.errors import FormatError
from icechunk_async.spark import ingested_files
from icechunk_async.spark.ingest.catalog import Catalog, Entry
from icechunk_async.sync import Repository, RepositoryConfig
from icechunk_async.sync.storage import local_filesystem_storage

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FILES = 20_000
PLACE = "_ingest/files"


def entry(number: int, stamp: str = "one", arrays: Sequence[str] | None = None) -> Entry:
    """Return the entry of a file."""
    location = f"s3://bucket/data/{hash((number, 1)) & 0xFFFFFFFF:08x}/{number}.nc"
    named = None if arrays is None else tuple(arrays)
    return Entry(location, f"{stamp}-{number * 7919:x}", "/", 4 * number, 4, 2, named)


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    """A repository whose chunks are all objects."""
    config = RepositoryConfig(inline_chunk_threshold_bytes=0)
    return Repository.create(local_filesystem_storage(str(tmp_path / "repo")), config)


def write(repo: Repository, catalog: Catalog) -> None:
    """Write a catalog in a commit."""
    session = repo.writable_session("main")
    catalog.write(session.store, "/")
    if session.has_uncommitted_changes:
        session.commit("wrote the catalog")


def read(repo: Repository) -> Catalog:
    """Read the catalog of the branch."""
    return Catalog.read(repo.readonly_session("main").store, "/")


def chunk_bytes(path: Path) -> dict[str, int]:
    """Return the sizes of all chunk objects."""
    return {it.name: it.stat().st_size for it in (path / "repo" / "chunks").iterdir()}


def test_catalog_is_written_where_files_changed(repo: Repository, tmp_path: Path) -> None:
    """Of 20,000 files, one that is new and one that changed cost two chunks of twenty."""
    catalog = Catalog(tuple(entry(it) for it in range(FILES)), "time", ("t",), (), {"": ["title"]})
    write(repo, catalog)
    assert read(repo) == catalog
    whole = chunk_bytes(tmp_path)
    assert len(whole) == 20

    entries = [*catalog.entries, entry(FILES)]
    entries[3] = replace(entries[3], stamp="two")
    write(repo, replace(catalog, entries=tuple(entries)))
    assert read(repo).entries == tuple(entries)
    new = {name: size for name, size in chunk_bytes(tmp_path).items() if name not in whole}
    assert len(new) == 2
    assert sum(new.values()) * 8 < sum(whole.values())

    tip = repo.lookup_branch("main")
    write(repo, replace(catalog, entries=tuple(entries)))
    assert repo.lookup_branch("main") == tip


def test_catalog_shrinks_and_grows(repo: Repository) -> None:
    """Files that were removed do not come back, and settings change."""
    some = tuple(entry(it, arrays=["a", "g/b"]) for it in range(3000))
    write(repo, Catalog(some))
    for entries in (some[:1500], (), some[2:1200], some[1000:]):
        catalog = Catalog(entries, attributes={"g": [str(len(entries))]})
        write(repo, catalog)
        assert read(repo) == catalog
    table = ingested_files(repo)
    assert table.num_rows == 2000
    assert table.column("arrays").to_pylist() == [["a", "g/b"]] * 2000


def test_catalogs_of_earlier_versions_are_read_and_replaced(repo: Repository) -> None:
    """Those were the bytes of an Arrow stream, as one chunk."""
    old = Catalog((entry(1), entry(2, arrays=["v"])), None, (), (), {})
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, old.table().schema) as writer:
        writer.write_table(old.table())
    written: Any = sink.getvalue()
    data = np.frombuffer(written, np.uint8)
    session = repo.writable_session("main")
    settings: dict[str, Any] = {"concat_dim": None, "arrays": [], "loaded": [], "attributes": {}}
    array: Any = zarr.create_array(
        session.store,
        name=PLACE,
        shape=data.shape,
        chunks=data.shape,
        dtype="u1",
        attributes={"ingest": settings},
    )
    array[...] = data
    session.commit("made by an earlier version")
    assert read(repo) == old
    more = replace(old, entries=(*old.entries, entry(3)))
    write(repo, more)
    assert read(repo) == more
    assert zarr.open_array(repo.readonly_session("main").store, path=PLACE).shape == (3,)


NULLS = '{"location":null,"stamp":null,"group":"/","start":0,"count":0,"references":0}'


@pytest.mark.parametrize(
    "text", ["", "no JSON", "[]", "5", '{"location": 5}', '{"location": "x"}', "[" * 100_000, NULLS]
)
def test_other_texts_are_no_catalog(repo: Repository, text: str) -> None:
    """Each is refused with one error."""
    write(repo, Catalog((entry(1),)))
    session = repo.writable_session("main")
    array: Any = zarr.open_array(session.store, path=PLACE, mode="r+")
    array[0] = text
    session.commit("spoiled")
    with pytest.raises(FormatError, match="not a list of ingested files"):
        read(repo)
