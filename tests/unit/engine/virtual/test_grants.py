"""Which containers a reader's grants open: their own and those below, never a neighbour."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.engine.virtual.chunks import as_code, settle_grants
from icechunk_async.errors import InvalidInputError, VirtualAccessError, VirtualContainerError
from icechunk_async.format.config import LocalFileSystemStore, S3Store, VirtualChunkContainer
from icechunk_async.storage import open_storage
from tests.helpers import make_array, memory_url, read

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("grant", "container"),
    [
        ("s3://bucket", "s3://bucket/"),
        ("s3://bucket/", "s3://bucket/"),
        ("s3://bucket", "s3://bucket/a/b/"),
        ("s3://bucket/a", "s3://bucket/a/b/"),
        ("file:///d", "file:///d/"),
        ("file:///d", "file:///d/e/"),
        ("https://host:8080", "https://host:8080/x/"),
        # With a separate grant, a container may have any path.
        ("file:///d/../e/", "file:///d/../e/"),
    ],
)
def test_grant_opens_its_container_and_those_below(grant: str, container: str) -> None:
    """With or without the slash at the end."""
    settled = settle_grants([container], {grant: "access"})
    assert {it: (found.given, found.access) for it, found in settled.items()} == {
        container: (grant, "access")
    }


@pytest.mark.parametrize(
    ("grant", "container"),
    [
        ("s3://bucket", "s3://bucket-evil/"),
        ("s3://bucket", "s3://bucket.evil.org/"),
        ("https://host", "https://host@evil/"),
        ("https://host", "https://host:8080/"),
        ("s3://bucket/a", "s3://bucket/ab/"),
        ("s3://bucket/a", "s3://bucket/"),
        ("s3://bucket", "gs://bucket/"),
        ("file:///d", "file:///dd/"),
        ("file:///d", "file:///d/../etc/"),
        ("file:///d", "file:///d/x/%2e%2E/%2E./etc/"),
        ("file:///d", "file:///d/%252e%252e/etc/"),
        ("file:///d", "file:///d/x%2F..%2F..%2Fetc/"),
        ("file:///d", "file:///d/..\\etc/"),
        ("https://host/a", "https://host/a/./b/"),
        ("s3://", "s3://bucket/"),
        ("s3:/", "s3://bucket/"),
        ("file://", "file:///d/"),
        ("file:///", "file:///d/"),
        ("file://localhost", "file://localhost/d/"),
        ("", "s3://bucket/"),
    ],
)
def test_grant_never_opens_a_neighbour(grant: str, container: str) -> None:
    """Nor what is above it, nor what climbs out of it, nor all buckets at once."""
    with pytest.raises(VirtualContainerError):
        settle_grants([container], {grant: None})


def test_longest_grant_decides() -> None:
    """Each container is opened once, by the grant that is nearest."""
    containers = ["s3://bucket/", "s3://bucket/a/", "s3://bucket/a/b%20c/"]
    found = settle_grants(containers, {"s3://bucket/a": 2, "s3://bucket": 1})
    assert {it: grant.access for it, grant in found.items()} == dict(
        zip(containers, (1, 2, 2), strict=True)
    )
    assert [found[it].below for it in containers] == ["", "", "b c/"]


def test_all_grants_without_container_are_named_at_once() -> None:
    """Those that are right are not."""
    granted = {"s3://one": None, "s3://good": None, "file:///two/": None}
    with pytest.raises(VirtualContainerError) as raised:
        settle_grants(["s3://good/"], granted)
    assert raised.value.context["url_prefixes"] == ("s3://one", "file:///two/")
    assert "'s3://one', 'file:///two/'" in str(raised.value)


def test_grant_given_twice_is_refused() -> None:
    """The slash alone does not tell which of two credentials is meant."""
    with pytest.raises(InvalidInputError, match="given twice"):
        settle_grants(["s3://bucket/"], {"s3://bucket": 1, "s3://bucket/": 2})


def test_missing_grants_are_shown_as_code_that_parses() -> None:
    """It parses, with a credential that fits each container."""
    code = as_code(["s3://b/", "file:///it's/", "gcs://c/"])
    parsed = ast.parse(code).body[0]
    assert isinstance(parsed, ast.Assign)
    assert isinstance(parsed.value, ast.Dict)
    assert [ast.unparse(it) for it in parsed.value.values] == [
        "LocalFileSystemAccess()",
        "GcsFromEnvironment()",
        "S3FromEnvironment()",
    ]


async def test_reading_names_all_missing_grants_at_once(spec: int) -> None:
    """A reader of many containers learns of all by one error, not of one a run."""
    containers = tuple(
        VirtualChunkContainer(f"s3://{name}/", S3Store()) for name in ("one", "two", "three")
    )
    config = RepositoryConfig(virtual_chunk_containers=containers)
    async with (
        open_storage(memory_url()) as source,
        Repository.create(
            memory_url(),
            spec_version=spec,
            config=config,
            authorize_virtual_chunk_access={"s3://two": source},
        ) as repository,
    ):
        session = await repository.writable_session("main")
        await make_array(session, "a", (1, 1), (1, 1))
        session.store.set_virtual_ref("a/c/0/0", "s3://one/x", offset=0, length=1)
        with pytest.raises(VirtualAccessError) as raised:
            await read(session, "a/c/0/0")
    assert as_code(["s3://one/", "s3://three/"]) in str(raised.value)
    assert raised.value.context["url_prefixes"] == ("s3://one/", "s3://three/")


async def test_parent_grant_reads_files_and_open_storage_below(spec: int, tmp_path: Path) -> None:
    """Keys of an open storage stay relative to the grant, also for containers below it."""
    (tmp_path / "in ner").mkdir()
    (tmp_path / "in ner" / "file").write_bytes(b"of files")
    container = f"{tmp_path.as_uri()}/in%20ner/"
    config = RepositoryConfig(
        virtual_chunk_containers=(
            VirtualChunkContainer(container, LocalFileSystemStore(str(tmp_path / "in ner"))),
            VirtualChunkContainer("s3://bucket/in%20ner/", S3Store()),
        )
    )
    async with open_storage(memory_url()) as bucket:
        await bucket.put("in ner/file", b"of bucket")
        async with Repository.create(
            memory_url(),
            spec_version=spec,
            config=config,
            authorize_virtual_chunk_access={tmp_path.as_uri(): None, "s3://bucket": bucket},
        ) as repository:
            assert repository.authorized_virtual_prefixes == {container, "s3://bucket/in%20ner/"}
            session = await repository.writable_session("main")
            await make_array(session, "a", (2, 1), (1, 1))
            session.store.set_virtual_ref("a/c/0/0", f"{container}file", offset=0, length=8)
            session.store.set_virtual_ref(
                "a/c/1/0", "s3://bucket/in%20ner/file", offset=0, length=9
            )
            assert await read(session, "a/c/0/0") == b"of files"
            assert await read(session, "a/c/1/0") == b"of bucket"
