"""From containers and what readers give to a backend's options."""

from __future__ import annotations

import json
import logging
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.credentials import (
    AzureAccountKey,
    AzureAnonymous,
    AzureBearerToken,
    AzureFromEnvironment,
    AzureSasToken,
    GcsAnonymous,
    GcsFromEnvironment,
    GcsServiceAccountFile,
    GcsServiceAccountKey,
    LocalFileSystemAccess,
    S3Anonymous,
    S3FromEnvironment,
    S3Refreshable,
    S3StaticCredentials,
)
from icechunk_async.engine.virtual import chunks as virtual
from icechunk_async.engine.virtual.chunks import check_unchanged
from icechunk_async.engine.virtual.sources import source_options, source_place
from icechunk_async.errors import (
    ExpiredCredentialsError,
    InvalidInputError,
    VirtualAccessError,
    VirtualSourceChangedError,
)
from icechunk_async.format.config import (
    AzureStore,
    ChecksumAlgorithm,
    GcsStore,
    HttpStore,
    LocalFileSystemStore,
    S3CompatibleStore,
    S3Options,
    S3Store,
    TigrisStore,
    VirtualChunkContainer,
)
from icechunk_async.format.manifest.chunk import VirtualChunk
from icechunk_async.storage import Retrieved, Version, open_storage
from tests.helpers import make_array, memory_url, read

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from icechunk_async.credentials import Credential
    from icechunk_async.format.config import ObjectStoreConfig
    from icechunk_async.storage import Storage

PREFIXES = {
    "s3": "s3://bucket/my%20data/",
    "tigris": "tigris://bucket/",
    "gs": "gs://bucket/x/",
    "gcs": "gcs://bucket/x/",
    "az": "az://container/x/",
    "azure": "azure://container/x/",
    "abfs": "abfs://container/x/",
    "http": "http://host:8080/x/",
    "https": "https://host/x%2Fy/",
    "file": "file:///data/my%20files/",
}
KEYS = S3StaticCredentials(
    access_key_id="given",
    secret_access_key="given",  # noqa: S106
    session_token="given",  # noqa: S106
)
MINIO = S3Options(
    region="eu",
    endpoint_url="http://localhost:9000",
    allow_http=True,
    anonymous=True,
    force_path_style=True,
    network_stream_timeout_seconds=7,
    requester_pays=True,
    checksum_algorithm=ChecksumAlgorithm.Crc32c,
)
REACHED = {
    "region": "eu",
    "endpoint_url": "http://localhost:9000",
    "allow_http": True,
    "force_path_style": True,
    "network_stream_timeout_seconds": 7,
    "requester_pays": True,
}
ACCOUNT = {"account": "acct"}


def _container(store: ObjectStoreConfig, scheme: str | None = None) -> VirtualChunkContainer:
    scheme = scheme or min(type(store).schemes)
    return VirtualChunkContainer(PREFIXES[scheme], store)


def test_every_scheme_has_a_place() -> None:
    """Buckets and servers are opened whole, directories by themselves; keys are decoded."""
    assert {scheme: _place(prefix) for scheme, prefix in PREFIXES.items()} == {
        "s3": ("s3", "s3://bucket", "my data/"),
        "tigris": ("s3", "s3://bucket", ""),
        "gs": ("gs", "gs://bucket", "x/"),
        "gcs": ("gs", "gs://bucket", "x/"),
        "az": ("az", "az://container", "x/"),
        "azure": ("az", "az://container", "x/"),
        "abfs": ("az", "az://container", "x/"),
        "http": ("http", "http://host:8080", "x/"),
        "https": ("http", "https://host", "x/y/"),
        "file": ("file", "file:///data/my%20files/", ""),
    }


def _place(prefix: str) -> tuple[str, str, str]:
    place = source_place(prefix)
    return place.backend, place.url, place.base


@pytest.mark.parametrize(
    ("store", "access", "expected"),
    [
        (S3CompatibleStore(MINIO), None, {**REACHED, "anonymous": True}),
        (
            S3Store(MINIO),
            replace(KEYS, endpoint_url="http://localhost:9000"),
            {
                **REACHED,
                **dict.fromkeys(("access_key_id", "secret_access_key", "session_token"), "given"),
            },
        ),
        (
            S3Store(MINIO),
            S3FromEnvironment("http://localhost:9000"),
            {**REACHED, "anonymous": False},
        ),
        (S3Store(MINIO), S3Anonymous(), {**REACHED, "anonymous": True}),
        (S3Store(MINIO), {"region": "us"}, {**REACHED, "anonymous": True, "region": "us"}),
        (
            S3Store(MINIO),
            {"profile": "p", "endpoint_url": "http://localhost:9000"},
            {**REACHED, "profile": "p"},
        ),
        (TigrisStore(), S3Anonymous(), {"preset": "tigris", "anonymous": True}),
        (GcsStore(), None, {"token": "anonymous"}),
        (GcsStore(), GcsFromEnvironment(), {"token": None}),
        (GcsStore({"google_skip_signature": "true"}), None, {"token": "anonymous"}),
        (GcsStore({"service_account_key": '{"a": 1}'}), None, {"token": {"a": 1}}),
        (GcsStore({"skip_signature": "1"}), GcsServiceAccountFile("/k"), {"token": "/k"}),
        (
            GcsStore({"timeout": "2 minutes"}),
            GcsAnonymous(),
            {
                "token": "anonymous",
                "read_timeout_seconds": 120.0,
            },
        ),
        (GcsStore(), GcsServiceAccountKey(json.dumps({"b": 2})), {"token": {"b": 2}}),
        (AzureStore(ACCOUNT), AzureAnonymous(), {"account_name": "acct", "anonymous": True}),
        (AzureStore(ACCOUNT), AzureFromEnvironment(), {"account_name": "acct", "anonymous": False}),
        (AzureStore(ACCOUNT), AzureAccountKey("k"), {"account_name": "acct", "account_key": "k"}),
        (
            AzureStore({**ACCOUNT, "azure_storage_access_key": "k"}),
            None,
            {"account_name": "acct", "account_key": "k"},
        ),
        (
            AzureStore({**ACCOUNT, "sas_token": "sig=1"}),
            AzureSasToken("sig=2"),
            {"account_name": "acct", "sas_token": "sig=2"},
        ),
        (
            AzureStore({**ACCOUNT, "skip_signature": "true"}),
            {"connection_string": "c"},
            {"connection_string": "c"},
        ),
        (
            HttpStore({"timeout": "500ms", "connect_timeout": "3s"}),
            None,
            {
                "timeout_seconds": 0.5,
                "connect_timeout_seconds": 3.0,
                "unversioned": True,
            },
        ),
        (LocalFileSystemStore("/x"), LocalFileSystemAccess(), {"follow_links": True}),
    ],
)
async def test_what_the_reader_gives_is_laid_over_what_is_stored(
    store: ObjectStoreConfig, access: Any, expected: dict[str, object]
) -> None:
    """Of two ways to say who asks, the reader's counts; reading sends no checksums."""
    found = await source_options(_container(store), access)
    defaults = {"allow_http": False, "anonymous": False, "force_path_style": False}
    defaults["requester_pays"] = False
    assert {**defaults, **found} == {**defaults, **expected}


async def test_addresses_and_files_of_the_repository_are_not_followed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A repository's author cannot send the reader's token elsewhere; the names are logged."""
    cases: list[tuple[ObjectStoreConfig, Credential]] = [
        (
            GcsStore({"google_service_account": "/etc/key", "base_url": "https://evil"}),
            GcsAnonymous(),
        ),
        (
            AzureStore({**ACCOUNT, "endpoint": "https://evil", "use_emulator": "true"}),
            AzureAnonymous(),
        ),
    ]
    with caplog.at_level(logging.WARNING):
        for store, access in cases:
            assert "evil" not in repr(await source_options(_container(store), access))
    assert "base_url, google_service_account" in caplog.text
    assert "endpoint, use_emulator" in caplog.text
    assert "evil" not in caplog.text


NO_ADDRESSES = ["evil.example/", "x@evil.example/", "evil.example#", "e.x\\"]
EVIL = S3Options(region="eu", endpoint_url="https://evil.example", anonymous=False)


@pytest.mark.parametrize(
    "access",
    [
        None,
        KEYS,
        S3FromEnvironment(),
        S3Refreshable(lambda: KEYS),
        {"profile": "p"},
        {"anonymous": False},
        {"region": "us"},
    ],
    ids=repr,
)
async def test_a_repository_cannot_send_the_readers_keys_to_an_endpoint(
    access: Credential | dict[str, object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader names it, in the credential, in a configuration, or in the environment."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    container = _container(S3Store(EVIL))
    elsewhere = _container(S3Store(replace(EVIL, endpoint_url="https://mine.example")))
    for own in (None, elsewhere, _container(S3Store())):
        with pytest.raises(VirtualAccessError, match="S3FromEnvironment") as caught:
            await source_options(container, access, own)
        assert caught.value.context["endpoint_url"] == "https://evil.example"
    options = await source_options(container, access, container)
    assert options["endpoint_url"] == "https://evil.example"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://evil.example")
    assert (await source_options(container, access)).keys() == options.keys()


async def test_keys_go_to_the_endpoint_that_the_reader_named() -> None:
    """Not to that of the container, which is followed only without keys."""
    container, mine = _container(S3Store(EVIL)), "https://mine.example"
    for access in (
        replace(KEYS, endpoint_url=mine),
        S3FromEnvironment(mine),
        S3Refreshable(lambda: KEYS, endpoint_url=mine),
        {"endpoint_url": mine},
    ):
        assert (await source_options(container, access))["endpoint_url"] == mine
    for nobody in (S3Anonymous(), {"anonymous": True}):
        options = await source_options(container, nobody)
        assert (options["endpoint_url"], options["anonymous"]) == ("https://evil.example", True)


async def test_none_opens_no_azure_container() -> None:
    """There is nobody whom it could stand for."""
    with pytest.raises(VirtualAccessError, match="AzureFromEnvironment"):
        await source_options(_container(AzureStore(ACCOUNT)), None)


async def test_expired_credentials_open_nothing() -> None:
    """It is told before anything is sent."""
    past = datetime.now(UTC) - timedelta(seconds=1)
    cases: list[tuple[ObjectStoreConfig, Credential]] = [
        (
            S3Store(),
            replace(KEYS, expires_after=past),
        ),
        (AzureStore(ACCOUNT), AzureSasToken("sig=1", past)),
        (AzureStore(ACCOUNT), AzureBearerToken("t", past)),
    ]
    for store, access in cases:
        with pytest.raises(ExpiredCredentialsError, match="ended at"):
            await source_options(_container(store), access)


async def test_malformed_secret_is_not_shown_in_the_error() -> None:
    """This holds for the secrets of the reader and of the repository."""
    cases: list[tuple[ObjectStoreConfig, Credential | None]] = [
        (GcsStore(), GcsServiceAccountKey("secret")),
        (GcsStore({"service_account_key": "secret"}), None),
    ]
    for store, access in cases:
        with pytest.raises(InvalidInputError) as caught:
            await source_options(_container(store), access)
        assert "secret" not in f"{caught.value}{caught.value.context}{caught.value.__cause__}"


@pytest.mark.parametrize("key", ["null", '"google_default"', '"/home/me/key.json"', "[" * 100_000])
async def test_a_key_of_the_repository_never_stands_for_the_readers_identity(key: str) -> None:
    """The driver takes such a value for a way to find credentials on the reader's machine."""
    store = GcsStore({"service_account_key": key})
    for access in (None, GcsAnonymous()):
        with pytest.raises(InvalidInputError, match="no JSON object"):
            await source_options(_container(store), access)


@pytest.mark.parametrize("scheme", ["s3", "gs", "gcs", "az", "abfs", "azure", "tigris"])
async def test_containers_are_opened_through_their_backends(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket is opened for reading, and keys in it are whole and decoded."""
    opened: list[tuple[str, dict[str, object]]] = []

    @asynccontextmanager
    async def fake(url: str, **options: object) -> AsyncGenerator[Storage]:
        opened.append((url, options))
        async with open_storage(memory_url()) as storage:
            base = source_place(PREFIXES[scheme]).base
            await storage.put(f"{base}a b.nc", b"0123456789")
            yield storage

    monkeypatch.setattr(virtual, "open_storage", fake)
    store: ObjectStoreConfig
    access: Credential | None
    match scheme:
        case "s3":
            store, access = S3Store(S3Options(region="eu")), None
        case "tigris":
            store, access = TigrisStore(), None
        case "gs" | "gcs":
            store, access = GcsStore(), GcsAnonymous()
        case _:
            store, access = AzureStore(ACCOUNT), AzureAnonymous()
    container = _container(store, scheme)
    async with Repository.create(
        memory_url(),
        config=RepositoryConfig(virtual_chunk_containers=(container,)),
        authorize_virtual_chunk_access={container.url_prefix: access},
    ) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (1,), (1,))
        location = f"{container.url_prefix}a%20b.nc"
        session.store.set_virtual_ref("a/c/0", location, offset=2, length=3)
        assert await read(session, "a/c/0") == b"234"
    ((url, options),) = opened
    assert url == source_place(container.url_prefix).url
    assert options["read_only"] is True


def test_an_etag_may_be_another_text_than_the_version() -> None:
    """If a store has both, other programs record the ETag while we may have the version."""
    found = Retrieved(b"", Version("123"), 0, etag='"d41d8"')
    for etag in ("d41d8", '"d41d8"', "123"):
        check_unchanged(VirtualChunk("s3://b/x", 0, 1, etag=etag), found)
    with pytest.raises(VirtualSourceChangedError, match="d41d8"):
        check_unchanged(VirtualChunk("s3://b/x", 0, 1, etag="124"), found)
