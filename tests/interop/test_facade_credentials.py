"""Credentials of the blocking facade beside the official ones, and what they are to the engine."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, get_args

import pytest

import icechunk_async.sync as facade
from tests.interop.facade_pair import PACKAGES, both, failing_alike

native: Any = pytest.importorskip(
    "icechunk_async.credentials", reason="this installation has no credentials for virtual chunks"
)


if TYPE_CHECKING:
    from collections.abc import Callable

WHEN = datetime(2040, 1, 2, 3, 4, 5, tzinfo=UTC)
SECRET = "SECRET"  # noqa: S105


def s3_keys() -> facade.S3StaticCredentials:
    """Return keys; a function that pickles."""
    return facade.S3StaticCredentials("key", SECRET, "token", WHEN)


def gcs_token() -> facade.GcsBearerCredential:
    """Return a token."""
    return facade.GcsBearerCredential(SECRET, expires_after=WHEN)


def azure_token() -> facade.AzureRefreshableCredential.SasToken:
    """Return a shared access signature."""
    return facade.AzureRefreshableCredential.SasToken(f"sig={SECRET}", WHEN)


KINDS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "s3 environment": (lambda it: it.s3_credentials(), "S3FromEnvironment"),
    "s3 anonymous": (lambda it: it.s3_credentials(anonymous=True), "S3Anonymous"),
    "s3 keys": (
        lambda it: it.s3_credentials(access_key_id="key", secret_access_key=SECRET),
        "S3StaticCredentials",
    ),
    "s3 function": (lambda it: it.s3_credentials(get_credentials=s3_keys), "S3Refreshable"),
    "gcs environment": (lambda it: it.gcs_credentials(from_env=True), "GcsFromEnvironment"),
    "gcs anonymous": (lambda it: it.gcs_credentials(anonymous=True), "GcsAnonymous"),
    "gcs file": (
        lambda it: it.gcs_credentials(service_account_file="/key.json"),
        "GcsServiceAccountFile",
    ),
    "gcs key": (
        lambda it: it.gcs_credentials(service_account_key=f'{{"k": "{SECRET}"}}'),
        "GcsServiceAccountKey",
    ),
    "gcs application": (
        lambda it: it.gcs_credentials(application_credentials="/adc.json"),
        "GcsServiceAccountFile",
    ),
    "gcs token": (lambda it: it.gcs_credentials(bearer_token=SECRET), "GcsBearerToken"),
    "gcs function": (
        lambda it: it.gcs_credentials(get_credentials=gcs_token, from_env=False),
        "GcsRefreshable",
    ),
    "azure environment": (lambda it: it.azure_credentials(), "AzureFromEnvironment"),
    "azure anonymous": (lambda it: it.azure_anonymous_credentials(), "AzureAnonymous"),
    "azure key": (lambda it: it.azure_credentials(access_key=SECRET), "AzureAccountKey"),
    "azure signature": (lambda it: it.azure_credentials(sas_token=SECRET), "AzureSasToken"),
    "azure token": (lambda it: it.azure_credentials(bearer_token=SECRET), "AzureBearerToken"),
    "azure function": (
        lambda it: it.azure_credentials(get_credentials=azure_token),
        "AzureRefreshable",
    ),
}


@pytest.mark.parametrize(("make", "engine"), KINDS.values(), ids=KINDS)
def test_arguments_choose_the_official_kinds(make: Callable[[Any], Any], engine: str) -> None:
    """Each becomes the engine's of the same meaning; no repr shows a secret; all pickle."""
    theirs, ours = both(make)
    assert type(ours).__qualname__ == type(theirs).__qualname__
    families: Any = (facade.S3Credentials, facade.GcsCredentials, facade.AzureCredentials)
    assert isinstance(ours, families)
    assert SECRET not in repr(ours)
    assert type(ours.to_native()) is getattr(native, engine)
    copy = pickle.loads(pickle.dumps(ours))
    assert type(copy.to_native()) is type(ours.to_native())


async def test_functions_are_asked_for_credentials() -> None:
    """When they are needed, or at once where the first answer is to travel."""
    asked = facade.s3_refreshable_credentials(s3_keys).to_native()
    assert asked.initial is None
    assert asked.get_credentials() == s3_keys().to_native()
    function = (await asked.storage_options())["credentials"]
    assert (await function()).secret_access_key == SECRET
    scattered = facade.s3_refreshable_credentials(s3_keys, scatter_initial_credentials=True)
    assert scattered.current == s3_keys()
    assert scattered.to_native().initial == s3_keys().to_native()
    token = facade.gcs_refreshable_credentials(gcs_token, scatter_initial_credentials=True)
    assert token.to_native().initial.token == SECRET
    signature = facade.azure_refreshable_credentials(azure_token).to_native()
    assert signature.get_credentials().token == f"sig={SECRET}"


def test_contradictions_are_refused_alike() -> None:
    """With ValueError; a time without a zone with TypeError."""
    failing_alike(lambda it: it.s3_credentials(access_key_id="key"))
    failing_alike(lambda it: it.s3_credentials(anonymous=True, from_env=True))
    failing_alike(lambda it: it.s3_credentials(from_env=False))
    failing_alike(lambda it: it.gcs_credentials(bearer_token="x", from_env=True))  # noqa: S106
    failing_alike(lambda it: it.gcs_static_credentials())
    failing_alike(lambda it: it.azure_credentials(access_key="x", sas_token="y"))  # noqa: S106
    failing_alike(lambda it: it.azure_credentials(from_env=False))
    failing_alike(lambda it: it.azure_static_credentials())
    failing_alike(lambda it: it.containers_credentials({"s3://a/": 5}))
    failing_alike(lambda it: it.S3StaticCredentials("a", "b", None, datetime(2020, 1, 1)))


def test_kinds_are_taken_apart_alike() -> None:
    """Patterns match by attribute and by position."""
    for package in PACKAGES:
        keys = package.s3_static_credentials(access_key_id="a", secret_access_key="b")[0]  # noqa: S106
        assert (keys.access_key_id, keys.secret_access_key, keys.session_token) == ("a", "b", None)
        keys.session_token = "t"  # noqa: S105
        assert keys.session_token == "t"  # noqa: S105
        static = package.GcsStaticCredentials.BearerToken("x")
        assert package.GcsCredentials.Static(static)[0][0] == "x"
        assert package.AzureStaticCredentials.AccessKey("x")[0] == "x"
        key = package.AzureRefreshableCredential.AccessKey("x", None)
        assert (key.key, key.expires_after) == ("x", None)
        assert package.GcsBearerCredential("x").expires_after is None
        assert len(package.s3_anonymous_credentials()) == 0
        assert package.s3_refreshable_credentials(len).pickled_function == pickle.dumps(len)
    shown = both(lambda it: str(it.S3StaticCredentials("AKIAKEY", SECRET)))
    assert shown[0] == shown[1].replace("icechunk_async.sync", "icechunk")


def test_containers_are_authorised_alike() -> None:
    """Each with the credential of its kind, or with leave to read without."""
    for package in PACKAGES:
        found = package.containers_credentials(
            {
                "s3://a/": package.s3_from_env_credentials(),
                "gs://a/": package.credentials.gcs_anonymous_credentials(),
                "az://a/": package.azure_from_env_credentials(),
                "gs://b/": package.gcs_from_env_credentials(),
                "file:///a/": package.credentials.LocalFileSystemAccess,
                "https://a/": package.credentials.HttpAccess,
                "none": None,
            }
        )
        kinds = ("S3", "Gcs", "Azure", "Gcs", "LocalFileSystemAccess", "HttpAccess")
        wanted = [f"Credentials.{kind}" for kind in kinds]
        assert [type(it).__qualname__ for it in found.values()] == [*wanted, "NoneType"]
        assert isinstance(found["s3://a/"], package.Credentials)
    allowed = facade.containers_credentials({"s3://a/": facade.s3_credentials(anonymous=True)})
    credential = allowed["s3://a/"]
    assert credential is not None
    assert credential.to_native() == native.S3Anonymous()
    assert facade.Credentials.HttpAccess().to_native() == native.HttpAccess()


def test_access_to_what_is_no_container_does_no_harm() -> None:
    """The official engine ignores it; the facade also says so."""
    for package in PACKAGES:
        expected = (
            pytest.warns(UserWarning, match="no virtual chunk container")
            if package is facade
            else nullcontext()
        )
        access = package.containers_credentials(
            {"s3://nope/": package.s3_credentials(anonymous=True)}
        )
        storage = package.in_memory_storage()
        with expected:
            package.Repository.create(storage, authorize_virtual_chunk_access=access)
        with expected:
            repo = package.Repository.open(storage, authorize_virtual_chunk_access=access)
        with expected:
            again = repo.reopen(authorize_virtual_chunk_access=access)
        assert again.list_branches() == {"main"}


@pytest.mark.parametrize(
    "name",
    [
        "AnyAzureCredential",
        "AnyAzureStaticCredential",
        "AnyCredential",
        "AnyGcsCredential",
        "AnyGcsStaticCredential",
        "AnyObjectStoreConfig",
        "AnyS3Credential",
    ],
)
def test_unions_have_the_official_members(name: str) -> None:
    """They serve annotations and `isinstance`."""
    members = [
        {member.__qualname__ for member in get_args(getattr(package, name))} for package in PACKAGES
    ]
    assert members[0] <= members[1]


PLACE = {"bucket": "b", "prefix": "p"}
GIVEN: dict[str, tuple[Callable[[Any], Any], dict[str, object]]] = {
    "keys": (
        lambda it: it.s3_storage(**PLACE, access_key_id="a", secret_access_key=SECRET),
        {"access_key_id": "a", "secret_access_key": SECRET},
    ),
    "anonymous": (lambda it: it.s3_storage(**PLACE, anonymous=True), {"anonymous": True}),
    "gcs": (lambda it: it.gcs_storage(**PLACE, anonymous=True), {"token": "anonymous"}),
    "azure": (
        lambda it: it.azure_storage(account="acc", container="c", prefix="a b", access_key=SECRET),
        {"account_name": "acc", "account_key": SECRET},
    ),
}


@pytest.mark.parametrize(("make", "options"), GIVEN.values(), ids=GIVEN)
async def test_storages_bring_their_credentials_to_the_engine(
    make: Callable[[Any], Any], options: dict[str, object]
) -> None:
    """As options of the backends; what the storage says itself goes first."""
    storage = make(facade)
    location, found = await storage.place()
    assert options.items() <= found.items()
    assert SECRET not in repr(storage)
    assert location in {"s3://b/p", "gs://b/p", "az://c/a%20b"}


async def test_a_storage_with_a_function_travels() -> None:
    """The function is found by its name where the storage is unpickled."""
    storage = facade.s3_storage(bucket="b", prefix="p", get_credentials=s3_keys)
    _, found = await pickle.loads(pickle.dumps(storage)).place()
    assert (await found["credentials"]()).access_key_id == "key"


def _fresh_keys() -> facade.S3StaticCredentials:
    return facade.S3StaticCredentials("id", "secret")


def test_a_function_is_asked_once_by_all_that_open_a_storage() -> None:
    """They share the engine's credential, which knows the newest answer."""
    made = facade.s3_refreshable_credentials(_fresh_keys)
    first = made.to_native()
    assert made.to_native() is first
    assert facade.s3_refreshable_credentials(_fresh_keys).to_native() is first
    scattered = facade.s3_refreshable_credentials(_fresh_keys, scatter_initial_credentials=True)
    assert scattered.to_native().initial is not None
