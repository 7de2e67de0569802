"""Shallow copies: the history and every array of the origin, and none of its chunk objects."""

from __future__ import annotations

import os
import random
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from aiohttp import web

from icechunk_async import Repository
from icechunk_async.config import (
    AzureStore,
    GcsStore,
    HttpStore,
    LocalFileSystemStore,
    RepositoryConfig,
    S3CompatibleStore,
    S3Options,
    S3Store,
    TigrisStore,
    VirtualChunkContainer,
)
from icechunk_async.credentials import HttpAccess, LocalFileSystemAccess
from icechunk_async.engine.upkeep.copying.copy import copy_repository
from icechunk_async.engine.upkeep.copying.derivation import Derivation
from icechunk_async.engine.virtual.naming import container_at
from icechunk_async.errors import (
    InvalidInputError,
    RepositoryExistsError,
    StorageUnavailableError,
    VirtualAccessError,
    VirtualSourceChangedError,
)
from icechunk_async.format.digests import CONTENT_ROOT
from icechunk_async.format.id_set import format_ids
from icechunk_async.format.ids import ChunkId, ManifestId, NodeId
from icechunk_async.format.manifest.chunk import InlineChunk, NativeChunk, VirtualChunk
from icechunk_async.format.manifest.reading import Manifest
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.storage import StorageDescription, open_storage
from tests.helpers import memory_url, objects, read, write
from tests.unit.backends.loopback import serving
from tests.unit.engine.upkeep.copying.copy_tools import (
    Breaking,
    Busy,
    Counting,
    contents_of,
    make_origin,
    open_with_access,
    prefixes,
)
from tests.unit.engine.upkeep.upkeep_tools import littered

if TYPE_CHECKING:
    from pathlib import Path


async def test_shallow_copy_shows_all_of_its_origin_and_holds_no_chunk(
    tmp_path: Path, spec: int
) -> None:
    """Every chunk of every snapshot, of every kind; ids, logs and refs stay."""
    origin = await make_origin(tmp_path, spec, sums=True)
    ours, sources = prefixes(origin)
    copy = tmp_path / "copy"
    async with open_with_access(origin, sources) as repository:
        report = await repository.copy_to(copy, shallow=True)
        expected = await contents_of(repository)
        refs = await repository.branches(), await repository.tags()
        lines = [info async for info in repository.ancestry(branch="main")]
    assert report.origin_prefix == ours
    assert CONTENT_ROOT in lines[-2].metadata  # vouches for manifests that the copy does not have
    assert not (copy / "chunks").exists()
    async with open_with_access(copy, ours, sources) as repository:
        assert await contents_of(repository) == expected
        assert (await repository.branches(), await repository.tags()) == refs
        again = [info async for info in repository.ancestry(branch="main")]
        assert [(it.id, it.message, it.flushed_at) for it in again] == [
            (it.id, it.message, it.flushed_at) for it in lines
        ]
        assert again[-2].metadata == {"by": "me"}
        verified = await repository.verify("decode")
        assert [it for it in verified.findings if it.problem != "undecodable"] == []
        assert verified.chunks == 0
    for log in (origin / "transactions").iterdir():
        if log.name in {str(it.id) for it in lines}:
            assert (copy / "transactions" / log.name).read_bytes() == log.read_bytes()


async def test_containers_of_the_origin_stay_beside_the_new_one(tmp_path: Path) -> None:
    """It is named after its place, and stored. The reader gives access."""
    origin = await make_origin(tmp_path, 2)
    ours, sources = prefixes(origin)
    copy = tmp_path / "copy"
    async with Repository.open(origin) as repository:
        await repository.copy_to(copy, shallow=True)
    async with open_with_access(copy, sources) as repository:
        containers = {it.url_prefix: it for it in repository.config.virtual_chunk_containers or ()}
        assert containers.keys() == {ours, sources}
        assert containers[sources].name == "sources"
        assert containers[ours].store == LocalFileSystemStore(str(origin))
        assert (containers[ours].name or "").startswith("origin-")
        session = await repository.readonly_session(tag="v1")
        assert await read(session, "g/a/c/2") == b"a" * 50
        assert await read(session, "g/a/c/3") == bytes(range(10, 30))
        with pytest.raises(VirtualAccessError) as caught:
            await read(session, "g/a/c/0")
        assert caught.value.context["url_prefixes"] == (ours,)


async def test_unchanged_origin_costs_three_requests_and_new_commits_what_they_added(
    tmp_path: Path, spec: int
) -> None:
    """No chunk is read or looked for; unchanged manifests are not read again."""
    origin = await make_origin(tmp_path, spec)
    derivation = Derivation(None, VirtualChunkContainer(*_container(origin)))
    async with open_storage(origin) as here, open_storage(tmp_path / "copy") as there:
        source, destination = Counting(here), Counting(there)

        async def copied() -> list[tuple[str, str]]:
            source.requests.clear()
            destination.requests.clear()
            await copy_repository(source, destination, derivation=derivation)
            assert not [it for it in source.requests if "chunks" in it[1]]
            return [*source.requests, *destination.requests]

        await copied()
        unchanged = await copied()
        assert {operation for operation, _ in unchanged} <= {"get", "list_prefix"}
        if spec > 1:
            assert len(unchanged) == 3
        async with Repository.open(origin) as repository:
            session = await repository.writable_session("main")
            await write(session, f"{'g' if spec > 1 else 'other'}/c/c/6", b"6" * 3000)
            await session.commit("more")
        added = await copied()
        written = [key.partition("/")[0] for operation, key in added if operation == "put"]
        if spec > 1:
            assert sorted(written) == ["copies", "manifests", "repo", "snapshots", "transactions"]
            assert len(added) <= 20
            manifests = [key for _, key in source.requests if key.startswith("manifests/")]
            assert len(manifests) == 1
        else:
            assert written.count("manifests") == 1


def _container(origin: Path) -> tuple[str, Any, str]:
    return f"{origin.as_uri()}/", LocalFileSystemStore(str(origin)), "origin-x"


async def test_chunk_that_is_written_again_later_is_refused(tmp_path: Path, spec: int) -> None:
    """More than ten minutes after the copy; up to then clocks may disagree."""
    origin = await make_origin(tmp_path, spec)
    ours, sources = prefixes(origin)
    async with Repository.open(origin) as repository:
        await repository.copy_to(tmp_path / "copy", shallow=True)
    for minutes, is_refused in ((9, False), (11, True)):
        for chunk in (origin / "chunks").iterdir():
            at = time.time() + 60 * minutes
            os.utime(chunk, (at, at))
        async with open_with_access(tmp_path / "copy", ours, sources) as repository:
            session = await repository.readonly_session(tag="v1")
            if is_refused:
                with pytest.raises(VirtualSourceChangedError, match="was modified at"):
                    await read(session, "g/a/c/0")
            else:
                assert await read(session, "g/a/c/0") == b"a" * 2000


async def test_what_the_origin_collects_is_lost_and_said(tmp_path: Path) -> None:
    """Chunks that only old snapshots of the origin need; the check of the copy names them."""
    origin = await make_origin(tmp_path, 2)
    ours, sources = prefixes(origin)
    async with Repository.open(origin) as repository:
        await repository.copy_to(tmp_path / "copy", shallow=True)
        await repository.delete_branch("side")
        await repository.delete_tag("v1")
        await repository.rewrite_manifests("alone", branch="main")  # the tip's shares one with it
        await repository.expire_snapshots(datetime.now(UTC))
        await repository.garbage_collect(datetime.now(UTC))
    async with open_with_access(tmp_path / "copy", ours, sources) as repository:
        session = await repository.readonly_session(tag="v1")
        with pytest.raises(VirtualSourceChangedError, match="is gone"):
            await read(session, "g/a/c/0")
        assert await read(session, "g/deep/b/c/0") == b"b" * 2000
        assert {it.problem for it in (await repository.check_references()).broken} == {"missing"}


async def test_commits_and_collection_in_the_copy_leave_the_origin_alone(tmp_path: Path) -> None:
    """New chunks are the copy's. Like any copy that takes commits it is not overwritten."""
    origin = await make_origin(tmp_path, 2)
    ours, sources = prefixes(origin)
    copy = tmp_path / "copy"
    async with Repository.open(origin) as repository:
        await repository.copy_to(copy, shallow=True)
    async with open_storage(origin) as storage:
        before = await objects(storage)
    async with open_with_access(copy, ours, sources) as repository:
        session = await repository.writable_session("main")
        await write(session, "g/c/c/0", b"n" * 3000)
        await session.commit("here")
        await repository.garbage_collect(datetime.now(UTC))
        session = await repository.readonly_session("main")
        assert await read(session, "g/c/c/0") == b"n" * 3000
        assert await read(session, "g/c/c/1") == b"c" * 700
    assert len(list((copy / "chunks").iterdir())) == 1
    async with open_storage(origin) as storage:
        assert await objects(storage) == before
    async with Repository.open(origin) as repository:
        await repository.create_tag("v2", await repository.lookup_branch("main"))
        with pytest.raises(RepositoryExistsError, match="changed after the last copy"):
            await repository.copy_to(copy, shallow=True)
        await repository.copy_to(copy, shallow=True, discard_changes=True)
    async with open_with_access(copy, ours, sources) as repository:
        session = await repository.readonly_session(tag="v2")
        assert await read(session, "g/c/c/0") == b"c" * 2000


async def test_shallow_copy_of_a_shallow_copy_reads_the_first_origin(tmp_path: Path) -> None:
    """References that lead somewhere already are carried over; each place has a container."""
    origin = await make_origin(tmp_path, 2)
    ours, sources = prefixes(origin)
    first, second = tmp_path / "first", tmp_path / "second"
    async with Repository.open(origin) as repository:
        await repository.copy_to(first, shallow=True)
    async with open_with_access(first, ours, sources) as repository:
        expected = await contents_of(repository)
        session = await repository.writable_session("main")
        await write(session, "g/c/c/0", b"n" * 3000)
        added = await session.commit("here")
        await repository.copy_to(second, shallow=True)
    middle = f"{first.as_uri()}/"
    async with open_with_access(second, ours, sources, middle) as repository:
        found = await contents_of(repository)
        assert found.pop(str(added))["g/c/c/0"] == b"n" * 3000
        assert found == expected


@pytest.mark.parametrize("first_is_shallow", [False, True])
async def test_copies_with_chunks_and_without_do_not_mix(
    tmp_path: Path, *, first_is_shallow: bool
) -> None:
    """Also where the first one was interrupted, and whatever is to be discarded."""
    origin = await make_origin(tmp_path, 2)
    derivations = [Derivation(), Derivation(None, VirtualChunkContainer(*_container(origin)))]
    one, other = derivations[:: -1 if first_is_shallow else 1]
    for writes in (4, 10**9):
        async with open_storage(origin) as source, open_storage(memory_url()) as destination:
            breaking = Breaking(destination)
            breaking.writes_left = writes
            try:
                await copy_repository(source, breaking, derivation=one)
            except StorageUnavailableError:
                assert writes == 4
            before = await objects(destination)
            for discard in (False, True):
                with pytest.raises(RepositoryExistsError, match="Copy to an empty location"):
                    await copy_repository(
                        source, destination, derivation=other, discard_changes=discard
                    )
            assert await objects(destination) == before
            await copy_repository(source, destination, derivation=one)


async def test_shallow_copy_killed_at_a_write_is_absent_and_continued(
    tmp_path: Path, spec: int
) -> None:
    """Manifests that are there are not written again."""
    origin = await make_origin(tmp_path, spec)
    derivation = Derivation(None, VirtualChunkContainer(*_container(origin)))
    async with open_storage(origin) as source, open_storage(memory_url()) as whole:
        await copy_repository(source, whole, derivation=derivation)
        expected = await objects(whole)
        killed = 0
        for writes in range(1, 100, 4):
            async with open_storage(memory_url()) as destination:
                breaking = Breaking(destination)
                breaking.writes_left = writes
                try:
                    await copy_repository(source, breaking, derivation=derivation)
                except StorageUnavailableError:
                    killed += 1
                else:
                    break
                there = await objects(destination)
                assert "repo" not in there
                counting = Counting(destination)
                await copy_repository(source, counting, derivation=derivation)
                written = {key for operation, key in counting.requests if operation == "put"}
                assert not written & {key for key in there if key.startswith("manifests/")}
                assert (await objects(destination)).keys() == expected.keys()
        assert killed > 3


async def test_snapshots_that_are_collected_meanwhile_lead_to_the_newer_state(
    tmp_path: Path,
) -> None:
    """Nothing else looks whether chunks are there, so the history of the origin is asked again."""
    origin = await make_origin(tmp_path, 2)
    ours, sources = prefixes(origin)

    async def collect() -> None:
        async with Repository.open(origin) as repository:
            await repository.delete_branch("side")
            await repository.delete_tag("v1")
            await repository.expire_snapshots(datetime.now(UTC))
            await repository.garbage_collect(datetime.now(UTC))

    async with open_storage(origin) as source, open_storage(tmp_path / "copy") as destination:
        # After all manifests and snapshots were read.
        busy = Busy(destination, ("put", "snapshots/"), collect)
        container = VirtualChunkContainer(*_container(origin))
        await copy_repository(source, busy, derivation=Derivation(None, container))
    async with open_with_access(tmp_path / "copy", ours, sources) as repository:
        assert set(await repository.branches()) == {"main"}
        await contents_of(repository)


async def test_places_that_no_container_can_name_are_refused() -> None:
    """Nothing is written."""
    url, _ = await littered(2)
    async with Repository.open(url) as repository, open_storage(memory_url()) as destination:
        with pytest.raises(InvalidInputError, match="cannot be the origin of a shallow copy"):
            await repository.copy_to(destination, shallow=True)
        with pytest.raises(InvalidInputError, match="nor shallow"):
            await repository.copy_to(destination, shallow=True, as_zarr=True)
        assert not await objects(destination)


async def test_another_container_for_the_place_of_the_origin_is_refused(tmp_path: Path) -> None:
    """Its references are by its name, which the new one would take away."""
    origin = tmp_path / "origin"
    prefix = f"{origin.as_uri()}/"
    container = VirtualChunkContainer(prefix, LocalFileSystemStore(str(origin)), "mine")
    config = RepositoryConfig(virtual_chunk_containers=(container,))
    async with Repository.create(origin, config=config) as repository:
        with pytest.raises(InvalidInputError, match="'mine' for the place where it lies"):
            await repository.copy_to(tmp_path / "copy", shallow=True)
    assert not (tmp_path / "copy").exists()


async def test_repository_on_a_web_server_is_copied_without_listing(tmp_path: Path) -> None:
    """A copy of ones own of somebody else's archive, to add to."""
    origin = await make_origin(tmp_path, 2)
    _, sources = prefixes(origin)

    async def answer(request: web.Request) -> web.StreamResponse:
        path = tmp_path / request.path.lstrip("/")
        return web.FileResponse(path) if path.is_file() else web.Response(status=404)

    async with serving(answer) as url:
        async with Repository.open(f"{url}/origin") as repository:
            report = await repository.copy_to(tmp_path / "copy", shallow=True, paths=["other"])
        assert report.origin_prefix == f"{url}/origin/"
        access: dict[str, Any] = {
            report.origin_prefix: HttpAccess(),
            sources: LocalFileSystemAccess(),
        }
        async with Repository.open(
            tmp_path / "copy", authorize_virtual_chunk_access=access
        ) as repository:
            session = await repository.readonly_session(tag="v1")
            assert await read(session, "other/c/c/0") == b"c" * 2000
            assert await read(session, "other/c/c/1") == b"c" * 700


@pytest.mark.parametrize(
    ("url", "options", "prefix", "store"),
    [
        ("s3://b/a b/", {}, "s3://b/a b/", S3Store()),
        (
            "s3://b",
            {
                "region": "eu-west-1",
                "anonymous": True,
                "secret_access_key": "hidden",
                "requester_pays": True,
            },
            "s3://b/",
            S3Store(S3Options(region="eu-west-1", anonymous=True, requester_pays=True)),
        ),
        (
            "obstore+s3://b/x",
            {"endpoint_url": "http://[::1]:9", "allow_http": True},
            "s3://b/x/",
            S3CompatibleStore(
                S3Options(endpoint_url="http://[::1]:9", allow_http=True, force_path_style=True)
            ),
        ),
        ("s3://b/x", {"preset": "tigris"}, "s3://b/x/", TigrisStore()),
        ("gs://b/x/y", {"token": "hidden"}, "gs://b/x/y/", GcsStore()),
        (
            "az://box/a%20b",
            {"account_name": "acc"},
            "az://box/a b/",
            AzureStore({"account": "acc"}),
        ),
        (
            "az://box",
            {"connection_string": "AccountName=acc;AccountKey=hidden"},
            "az://box/",
            AzureStore({"account": "acc"}),
        ),
        ("https://h:1/p", {"headers": {"x": "hidden"}}, "https://h:1/p/", HttpStore()),
        ("file:///d/a%20b", {}, "file:///d/a b/", LocalFileSystemStore("/d/a b")),
        ("file:///d/100%2525", {}, "file:///d/100%2525/", LocalFileSystemStore("/d/100%25")),
    ],
)
def test_place_of_a_storage_is_named_without_secrets(
    url: str, options: dict[str, Any], prefix: str, store: Any
) -> None:
    """The name is the same whenever the place is."""
    found = container_at(StorageDescription(url, options))
    assert (found.url_prefix, found.store) == (prefix, store)
    assert found == container_at(StorageDescription(url, options))
    assert "hidden" not in repr(found)


@pytest.mark.parametrize("account", [None, ""])
def test_azure_needs_the_name_of_its_account(
    monkeypatch: pytest.MonkeyPatch, account: str | None
) -> None:
    """An address alone does not tell it; the environment may."""
    description = StorageDescription("az://box/x", {"account_name": account})
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(InvalidInputError, match="account_name="):
        container_at(description)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "told")
    assert container_at(description).store == AzureStore({"account": "told"})


@pytest.mark.parametrize("seed", range(4))
def test_each_reference_keeps_its_bytes(seed: int) -> None:
    """Native ones become virtual, with their offsets; others stay. Objects are named once."""
    dice = random.Random(seed)
    ids = [ChunkId.random() for _ in range(5)]
    refs: dict[tuple[int, ...], Any] = {}
    for at in range(200):
        kind = dice.choice("niv") if seed else "n"
        if kind == "n":
            refs[at, 0] = NativeChunk(dice.choice(ids), dice.randrange(9), 5, 1 << 32)
        elif kind == "i":
            refs[at, 0] = InlineChunk(b"%d" % at)
        else:
            guards: list[dict[str, Any]] = [{}, {"etag": "e"}, {"last_modified": 5}]
            guard = dice.choice(guards)
            refs[at, 0] = VirtualChunk(f"s3://x/{dice.randrange(3)}", at, 7, **guard)
    node = NodeId.random()
    manifest = Manifest(ManifestId.random(), {node: ChunkRefs.from_mapping(2, refs)})
    container = VirtualChunkContainer("file:///o/", LocalFileSystemStore("/o"), "o")
    for spec, place in ((1, "file:///o/chunks/"), (2, "vcc://o/chunks/")):
        made = Derivation(None, container).rewritten(manifest, frozenset(), 77, spec)
        assert made is not None
        for row, (coords, ref) in enumerate(refs.items()):
            expected = ref
            if isinstance(ref, NativeChunk):
                location = f"{place}{ref.chunk_id}"
                expected = VirtualChunk(location, ref.offset, ref.length, None, 77)
            found = made[node].ref(row)
            assert tuple(made[node].coords[row].tolist()) == coords
            if isinstance(found, InlineChunk):
                assert bytes(found.data) == bytes(expected.data)
            else:
                assert found == expected
        assert len(made[node].locations) <= 5 + 3 * bool(seed)


def test_texts_of_many_ids_are_those_of_each() -> None:
    """None, one and many."""
    for count in (0, 1, 100):
        ids = [ChunkId.random() for _ in range(count)]
        rows = np.frombuffer(b"".join(ids), np.uint8).reshape(count, 12)
        assert format_ids(rows) == [str(it) for it in ids]
