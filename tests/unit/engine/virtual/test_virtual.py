"""Virtual chunks: where they may lie, who may read them, and sources that changed."""

from __future__ import annotations

import math
import os
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.engine.virtual.chunks import VirtualLocations
from icechunk_async.errors import (
    InvalidCoordinatesError,
    InvalidInputError,
    InvalidStoreKeyError,
    NodeNotFoundError,
    VirtualAccessError,
    VirtualContainerError,
    VirtualSourceChangedError,
)
from icechunk_async.format.config import LocalFileSystemStore, S3Store, VirtualChunkContainer
from icechunk_async.format.manifest.chunk import VirtualChunk
from icechunk_async.storage import open_storage
from icechunk_async.zarr import VirtualChunkSpec
from icechunk_async.zarr.virtual.references import grid_refs, spec_refs
from tests.helpers import counted_calls, make_array, memory_url, read

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from icechunk_async import Session
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.storage import Storage

BUCKET = "s3://bucket/data/"
DATA = bytes(range(200))


def _config(*containers: VirtualChunkContainer) -> RepositoryConfig:
    return RepositoryConfig(virtual_chunk_containers=containers)


CONFIG = _config(
    VirtualChunkContainer(BUCKET, S3Store(), name="data"),
    VirtualChunkContainer("s3://closed/", S3Store()),
)


@pytest.fixture
async def bucket() -> AsyncIterator[Storage]:
    """Stand in for a bucket: any storage can serve virtual chunks."""
    async with open_storage(memory_url()) as storage:
        await storage.put("file.nc", DATA)
        await storage.put("with space.nc", DATA)
        yield storage


@pytest.fixture
async def repository(spec: int, bucket: Storage) -> AsyncIterator[Repository]:
    """Open a repository whose reader authorised one of two containers."""
    async with Repository.create(
        memory_url(),
        spec_version=spec,
        config=CONFIG,
        authorize_virtual_chunk_access={BUCKET: bucket},
    ) as repository:
        yield repository


@pytest.fixture
async def session(repository: Repository) -> Session:
    """Begin a session with an array of ten chunks."""
    session = await repository.writable_session("main")
    await make_array(session, "a", (10, 2), (1, 1))
    return session


@pytest.mark.parametrize(
    "location",
    [
        "s3://bucket/data/file.nc",
        "S3://bucket/data/file.nc",
        "vcc://data/file.nc",
        "s3://bucket/data/with%20space.nc",
        "vcc://data/with%20space.nc",
    ],
)
async def test_bytes_are_read_from_where_the_reference_says(
    repository: Repository, session: Session, location: str
) -> None:
    """Before and after a commit, whole and in part, by asynchronous and synchronous reads."""
    session.store.set_virtual_ref("a/c/3/1", location, offset=10, length=20)
    assert await read(session, "a/c/3/1") == DATA[10:30]
    await session.commit("virtual")
    reader = await repository.readonly_session("main")
    assert await read(reader, "a/c/3/1") == DATA[10:30]
    value = reader.store.get_sync("a/c/3/1")
    assert value is not None
    assert value.to_bytes() == DATA[10:30]


@pytest.mark.parametrize(
    "location",
    [
        *("file.nc", "/data/file.nc", "s3:file.nc", "s3://", "file://host", "", "s3:///x"),
        *("file:x", "file://[host/x", "file://[1]/x"),
    ],
)
async def test_relative_and_broken_locations_are_refused(session: Session, location: str) -> None:
    """A location is an absolute URL."""
    with pytest.raises(InvalidInputError, match="absolute URL"):
        session.store.set_virtual_ref("a/c/0/0", location, offset=0, length=1)
    assert not session.store.session.status().updated_chunks


async def test_locations_that_no_file_can_hold_are_refused(session: Session) -> None:
    """A commit would fail on them, with all other changes."""
    for location in ("s3://bucket/data/\udce9.nc", "file:///data/\udce9.nc"):
        with pytest.raises(InvalidInputError, match="lone surrogates"):
            session.store.set_virtual_ref("a/c/0/0", location, offset=0, length=1)
        with pytest.raises(InvalidInputError, match="lone surrogates"):
            session.store.set_virtual_refs("a", [VirtualChunkSpec((0, 0), location, 0, 1)])
    assert not session.store.session.status().updated_chunks


async def test_etags_that_no_file_can_hold_are_refused(session: Session) -> None:
    """A commit would fail on them, with all other changes."""
    store, url, etag = session.store, "s3://bucket/data/x.nc", "\udce9"
    one = np.ones(1, np.uint64)
    with pytest.raises(InvalidInputError, match=r"ETag .* lone surrogates"):
        store.set_virtual_ref("a/c/0/0", url, offset=0, length=1, checksum=etag)
    with pytest.raises(InvalidInputError, match=r"ETag .* lone surrogates"):
        store.set_virtual_refs("a", [VirtualChunkSpec((0, 0), url, 0, 1, etag)])
    with pytest.raises(InvalidInputError, match=r"ETag .* lone surrogates"):
        store.set_virtual_refs_arr("a", (1, 1), [url], one, one, checksum=etag)
    assert not session.status().updated_chunks


async def test_locations_outside_of_containers_are_refused(session: Session) -> None:
    """Unless validation is off: then reading is refused."""
    for location in ("s3://other/file.nc", "vcc://nobody/file.nc", "s3://bucket/database/file.nc"):
        with pytest.raises(VirtualContainerError, match="No virtual chunk container"):
            session.store.set_virtual_ref("a/c/0/0", location, offset=0, length=1)
        session.store.set_virtual_ref(
            "a/c/0/0", location, offset=0, length=1, validate_container=False
        )
        with pytest.raises(VirtualContainerError):
            await read(session, "a/c/0/0")


async def test_unauthorized_container_is_not_read(session: Session) -> None:
    """The error says how to authorise it."""
    location = "s3://closed/file.nc"
    session.store.set_virtual_ref("a/c/0/0", location, offset=0, length=1)
    with pytest.raises(VirtualAccessError, match=r"authorize_virtual_chunk_access=\{'s3://closed/"):
        await read(session, "a/c/0/0")


async def test_only_containers_of_the_repository_can_be_authorised(spec: int) -> None:
    """A slip in a prefix is an error at opening, not at the first read."""
    with pytest.raises(VirtualContainerError, match="has no virtual chunk container there"):
        async with Repository.create(
            memory_url(),
            spec_version=spec,
            config=CONFIG,
            authorize_virtual_chunk_access={"s3://bucket/dat": None},
        ):
            pass


async def test_references_and_containers_are_stored_without_access(
    repository: Repository, session: Session, spec: int
) -> None:
    """Opening the repository again shows containers; each must be authorised again."""
    session.store.set_virtual_ref("a/c/0/0", f"{BUCKET}file.nc", offset=0, length=5)
    await session.commit("virtual")
    async with Repository.open(repository.storage) as again:
        assert again.spec_version == spec
        assert again.config.virtual_chunk_containers == CONFIG.virtual_chunk_containers
        assert again.authorized_virtual_prefixes == frozenset()
        reader = await again.readonly_session("main")
        with pytest.raises(VirtualAccessError):
            await read(reader, "a/c/0/0")


@pytest.mark.parametrize("change", ["rewritten", "removed", "truncated"])
async def test_a_changed_source_is_refused_by_etag(
    session: Session, bucket: Storage, change: str
) -> None:
    """The error names the source; without a guard only missing bytes are noticed."""
    etag = (await bucket.get("file.nc")).version.token
    location = f"{BUCKET}file.nc"
    session.store.set_virtual_ref("a/c/0/0", location, offset=150, length=50, checksum=f'"{etag}"')
    session.store.set_virtual_ref("a/c/1/0", location, offset=150, length=50)
    assert await read(session, "a/c/0/0") == DATA[150:]
    match change:
        case "rewritten":
            await bucket.put("file.nc", DATA[::-1])
        case "removed":
            await bucket.delete(["file.nc"])
        case _:
            await bucket.put("file.nc", DATA[:160])
    with pytest.raises(VirtualSourceChangedError, match=r"s3://bucket/data/file\.nc"):
        await read(session, "a/c/0/0")
    if change == "rewritten":
        assert await read(session, "a/c/1/0") == DATA[::-1][150:]
    else:
        with pytest.raises(VirtualSourceChangedError):
            await read(session, "a/c/1/0")


async def test_bad_references_store_nothing(session: Session) -> None:
    """Lengths, offsets, keys, grids and columns that do not fit."""
    store, url = session.store, f"{BUCKET}file.nc"
    spec = VirtualChunkSpec([0, 1], url, 0, 1)
    for offset, length in ((-1, 5), (0, 0), (0, -3), (1 << 63, 1)):
        with pytest.raises(InvalidInputError, match="virtual chunk"):
            store.set_virtual_ref("a/c/0/0", url, offset=offset, length=length)
    with pytest.raises(InvalidStoreKeyError):
        store.set_virtual_ref("a/zarr.json", url, offset=0, length=1)
    with pytest.raises(NodeNotFoundError):
        store.set_virtual_ref("b/c/0", url, offset=0, length=1)
    with pytest.raises(InvalidCoordinatesError):
        store.set_virtual_ref("a/c/10/0", url, offset=0, length=1)
    with pytest.raises(InvalidInputError, match="does not fit"):
        store.set_virtual_refs("a", [VirtualChunkSpec([1], url, 0, 1)])
    for index in ([-1, 0], [0, 1 << 32], [1 << 70, 0], [0, -(1 << 70)], [0, 0, 0], []):
        with pytest.raises(InvalidInputError, match="does not fit"):
            store.set_virtual_refs("a", [spec, VirtualChunkSpec(index, url, 0, 1)])
    for offset, length in ((-1, 5), (0, 0), ((1 << 63) - 1, 1), (1 << 70, 1), (1, 1 << 70)):
        with pytest.raises(InvalidInputError, match="cannot be a virtual chunk"):
            store.set_virtual_refs("a", [spec, VirtualChunkSpec([0, 0], url, offset, length)])
    with pytest.raises(InvalidCoordinatesError, match="3 such chunks"):
        store.set_virtual_refs("a", [VirtualChunkSpec([i, 0], url, 0, 1) for i in range(13)])
    ones = np.ones(4, np.uint64)
    with pytest.raises(InvalidInputError, match="needs 4 locations"):
        store.set_virtual_refs_arr("a", (2, 2), [url] * 3, ones, ones)
    with pytest.raises(InvalidCoordinatesError):
        store.set_virtual_refs_arr("a", (2, 2), [url] * 4, ones, ones, arr_offset=(9, 0))
    bad = ["s3://x/y", url, "", "vcc://x/y"]
    with pytest.raises(VirtualContainerError) as caught:
        store.set_virtual_refs_arr("a", (2, 2), bad, ones, ones, arr_offset=(3, 0))
    assert caught.value.context["chunks"] == [[3, 0], [4, 1]]
    for offset, length in ((-1, 5), (1 << 62, 1), (0, -1)):
        with pytest.raises(InvalidInputError, match="negative"):
            store.set_virtual_refs_arr("a", (1, 1), [url], np.array([offset]), np.array([length]))
    with pytest.raises(InvalidInputError, match="no bytes"):
        store.set_virtual_refs_arr("a", (2, 2), [url] * 4, ones, ones * 0)
    assert session.status().updated_chunks == {}


@pytest.mark.parametrize(
    ("first", "shape"), [((2**32 - 2, 5), (2, 3)), ((0, 0, 9), (2, 1, 2)), ((), ())]
)
def test_a_box_lists_its_chunks_in_order(first: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Up to the last chunk that there can be."""

    def box(first: tuple[int, ...]) -> ChunkRefs:
        ones = np.ones(math.prod(shape), np.uint64)
        return grid_refs(
            VirtualLocations([]),
            shape,
            ["s3://bucket/key"] * len(ones),
            ones,
            ones,
            first=first,
            checksum=None,
            validate_containers=False,
        )

    expected = product(*(range(at, at + size) for at, size in zip(first, shape, strict=True)))
    assert box(first).coords.tolist() == [list(row) for row in expected]
    for beyond in (-1, 2**32 - 1) if shape else ():
        with pytest.raises(InvalidInputError, match="leaves any chunk grid"):
            box((beyond, *first[1:]))


async def test_changing_columns_after_the_call_changes_no_reference(session: Session) -> None:
    """A caller may refill the columns for the next array. References keep the old values."""
    url = f"{BUCKET}file.nc"
    urls = [url] * 4
    offsets, lengths = np.arange(4, dtype=np.uint64), np.full(4, 3, np.uint64)
    session.store.set_virtual_refs_arr("a", (4, 1), urls, offsets, lengths)
    offsets[:], lengths[:], urls[:] = 7, 9, [""] * 4
    for row in range(4):
        assert await read(session, f"a/c/{row}/0") == DATA[row : row + 3]


async def test_columns_and_lists_say_the_same_as_single_references(session: Session) -> None:
    """A box of chunks at an offset, with gaps; a list with guards."""
    url = f"{BUCKET}file.nc"
    offsets = np.arange(6, dtype=np.uint64) * 3
    session.store.set_virtual_refs_arr(
        "/a/",
        (3, 2),
        [url, url, "", url, url, url],
        offsets,
        np.full(6, 3, np.uint64),
        arr_offset=(4, 0),
    )
    expected = {
        (4 + place // 2, place % 2): DATA[place * 3 : place * 3 + 3]
        for place in range(6)
        if place != 2
    }
    for i in range(10):
        for j in range(2):
            assert await read(session, f"a/c/{i}/{j}") == expected.get((i, j))
    now = datetime.now(UTC) + timedelta(days=1)
    session.store.set_virtual_refs(
        "a",
        [
            VirtualChunkSpec([0, 0], url, 1, 2),
            VirtualChunkSpec([0, 1], url, 2, 2, last_updated_at_checksum=now),
            VirtualChunkSpec([0, 0], url, 5, 2),
        ],
    )
    assert await read(session, "a/c/0/0") == DATA[5:7]
    assert await read(session, "a/c/0/1") == DATA[2:4]


def test_lists_of_specifications_are_columns() -> None:
    """Each has its guard, the ETag before the time; the last of equal chunks counts."""
    now = datetime(2030, 1, 1, 0, 0, 0, 1, tzinfo=UTC)
    urls = [f"s3://bucket/{it % 3}" for it in range(100)]
    specs = [
        VirtualChunkSpec(
            (99 - it, 0) if it % 7 else [3, 0],
            urls[it],
            it,
            1 + it,
            f"tag {it % 2}" if it % 5 == 0 else None,
            now if it % 2 else None,
        )
        for it in range(100)
    ]
    with counted_calls() as calls:
        refs = spec_refs(VirtualLocations([]), specs, 2, validate_containers=False)
    assert len(calls) < 400
    expected = {tuple(it.index): it for it in specs}
    assert [tuple(it) for it in refs.coords.tolist()] == sorted(expected)
    for row, coords in enumerate(refs.coords.tolist()):
        spec = expected[tuple(coords)]
        limit = None if spec.etag_checksum else spec.last_updated_at_checksum
        assert refs.ref(row) == VirtualChunk(
            spec.location,
            spec.offset,
            spec.length,
            spec.etag_checksum,
            None if limit is None else int(now.timestamp()) + 1,
        )
    assert len(spec_refs(VirtualLocations([]), [], 2, validate_containers=True)) == 0
    scalar = [VirtualChunkSpec([], urls[0], it, 5) for it in range(3)]
    refs = spec_refs(VirtualLocations([]), scalar, 0, validate_containers=False)
    assert refs.offsets.tolist() == [2]


@pytest.mark.parametrize("fraction_ns", [0, 1, 500_000_000, 999_999_999])
async def test_local_files_with_fractions_of_seconds_are_guarded_by_time(
    spec: int, tmp_path: Path, fraction_ns: int
) -> None:
    """The recorded time is the file's own; a later change is refused."""
    directory = tmp_path / "source files"
    directory.mkdir()
    touched_ns = directory.stat().st_mtime_ns
    file = directory / "data.bin"
    file.write_bytes(DATA)
    modified_ns = 1_700_000_000 * 10**9 + fraction_ns
    os.utime(file, ns=(modified_ns, modified_ns))
    os.utime(directory, ns=(touched_ns, touched_ns))
    prefix = f"{directory.as_uri()}/"
    container = VirtualChunkContainer(prefix, LocalFileSystemStore(str(directory)))
    async with Repository.create(
        memory_url(),
        spec_version=spec,
        config=_config(container),
        authorize_virtual_chunk_access={prefix: None},
    ) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (2,), (1,))
        moment = datetime.fromtimestamp(modified_ns / 10**9, UTC)
        session.store.set_virtual_ref("a/c/0", file.as_uri(), offset=0, length=9, checksum=moment)
        await session.commit("virtual")
        reader = await repository.readonly_session("main")
        assert await read(reader, "a/c/0") == DATA[:9]
        later_ns = -(-modified_ns // 10**9) * 10**9 + 1000  # beyond the second that is recorded
        os.utime(file, ns=(later_ns, later_ns))
        with pytest.raises(VirtualSourceChangedError, match=r"data\.bin"):
            await read(reader, "a/c/0")
    assert directory.stat().st_mtime_ns == touched_ns  # nothing was tried in it, either


async def test_links_of_an_archive_are_followed(tmp_path: Path) -> None:
    """To a file or a folder, within the container or out of it, as other engines read them."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_bytes(DATA)
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "latest").symlink_to("../real/file")
    (archive / "folder").symlink_to(tmp_path / "real")
    prefix = f"{archive.as_uri()}/"
    container = VirtualChunkContainer(prefix, LocalFileSystemStore(str(archive)))
    async with Repository.create(
        memory_url(), config=_config(container), authorize_virtual_chunk_access={prefix: None}
    ) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (2,), (1,))
        for at, name in enumerate(("latest", "folder/file")):
            session.store.set_virtual_ref(f"a/c/{at}", f"{prefix}{name}", offset=at, length=9)
            assert await read(session, f"a/c/{at}") == DATA[at : at + 9]
    with pytest.raises(InvalidInputError, match="read_only=True"):
        async with open_storage(archive, follow_links=True):
            pass


def test_file_locations_are_normalised_and_others_kept() -> None:
    """Dots are resolved in file URLs only; object keys stay unchanged."""
    locations = VirtualLocations(
        [
            VirtualChunkContainer("file:///data/", LocalFileSystemStore("/data")),
            VirtualChunkContainer("s3://bucket/", S3Store()),
        ]
    )
    assert locations.normalize("file:///data/a/../b.nc") == "file:///data/b.nc"
    assert locations.normalize("s3://bucket/a/../b//c.nc?x") == "s3://bucket/a/../b//c.nc?x"
    with pytest.raises(VirtualContainerError):
        locations.normalize("file:///data/../secret")
    assert locations.resolve("s3://bucket/a%2Fb%20c.nc#part") == ("s3://bucket/", "a/b c.nc")
