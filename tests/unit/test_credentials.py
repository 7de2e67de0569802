"""Credentials: what they show, how they travel, and how new ones are asked for."""

from __future__ import annotations

import logging
import pickle
import threading
from dataclasses import FrozenInstanceError, fields
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from icechunk_async import credentials as all_credentials
from icechunk_async.credentials import (
    AzureAccountKey,
    AzureAnonymous,
    AzureBearerToken,
    AzureFromEnvironment,
    AzureRefreshable,
    AzureSasToken,
    Credential,
    GcsAnonymous,
    GcsBearerToken,
    GcsFromEnvironment,
    GcsRefreshable,
    GcsServiceAccountFile,
    GcsServiceAccountKey,
    HttpAccess,
    HttpBearerToken,
    HttpHeaders,
    HttpRefreshable,
    LocalFileSystemAccess,
    S3Anonymous,
    S3FromEnvironment,
    S3Refreshable,
    S3StaticCredentials,
)
from icechunk_async.errors import ExpiredCredentialsError, InvalidInputError

SECRET = "hunter2"  # noqa: S105 - nobody's
SOON = datetime.now(UTC) + timedelta(minutes=1)
LATER = datetime.now(UTC) + timedelta(days=1)  # a busy machine may take hours to come to a test
PAST = datetime.now(UTC) - timedelta(hours=1)


def keys(expires_after: datetime | None = None, name: str = "id") -> S3StaticCredentials:
    """Return keys for S3."""
    return S3StaticCredentials(
        access_key_id=name,
        secret_access_key=SECRET,
        session_token=SECRET,
        expires_after=expires_after,
    )


def ask_s3() -> S3StaticCredentials:
    """Return keys, as a function of a module that a worker can import."""
    return keys()


async def ask_gcs() -> GcsBearerToken:
    """Return a token."""
    return GcsBearerToken(SECRET)


async def ask_azure() -> AzureSasToken:
    """Return a signature."""
    return AzureSasToken(f"sig={SECRET}", LATER)


async def ask_http() -> HttpBearerToken:
    """Return a token."""
    return HttpBearerToken(SECRET)


EXAMPLES: list[Credential] = [
    keys(),
    S3FromEnvironment(),
    S3Anonymous(),
    S3Refreshable(ask_s3, keys(LATER)),
    GcsServiceAccountFile("/keys/file.json"),
    GcsServiceAccountKey(f'{{"private_key": "{SECRET}"}}'),
    GcsBearerToken(SECRET, LATER),
    GcsFromEnvironment(),
    GcsAnonymous(),
    GcsRefreshable(ask_gcs, GcsBearerToken(SECRET, LATER)),
    AzureAccountKey(SECRET),
    AzureSasToken(f"sig={SECRET}"),
    AzureBearerToken(SECRET),
    AzureFromEnvironment(),
    AzureAnonymous(),
    AzureRefreshable(ask_azure, AzureAccountKey(SECRET)),
    HttpAccess(),
    HttpHeaders({"Authorization": SECRET}),
    HttpBearerToken(SECRET),
    HttpRefreshable(ask_http, HttpBearerToken(SECRET)),
    LocalFileSystemAccess(),
]


def test_the_examples_are_all_kinds() -> None:
    """Otherwise the tests below would miss a kind."""
    public = {getattr(all_credentials, name) for name in all_credentials.__all__}
    classes = {it for it in public if isinstance(it, type) and it is not Credential}
    assert {type(example) for example in EXAMPLES} == classes


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda it: type(it).__name__)
async def test_a_credential_travels_and_shows_no_secret(
    example: Credential, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers get all of it; people see none of the secret; nothing can be changed."""
    caplog.set_level(logging.DEBUG)
    travelled = pickle.loads(pickle.dumps(example))
    assert travelled == example
    assert isinstance(example, Credential)
    for shown in (repr(example), str(example), f"{example}", caplog.text):
        assert SECRET not in shown
    for item in fields(cast("Any", example)):
        with pytest.raises((FrozenInstanceError, TypeError)):
            setattr(example, item.name, None)
    options = await example.storage_options()
    assert SECRET not in f"{[it for it in options.values() if not isinstance(it, str | dict)]}"
    pickle.loads(pickle.dumps(dict(options)))  # as a storage's description carries them


def test_times_without_a_zone_are_refused() -> None:
    """They could mean any time."""
    naive = datetime(2030, 1, 1)
    for make in (
        lambda: keys(naive),
        lambda: GcsBearerToken("t", naive),
        lambda: AzureSasToken("sig=1", naive),
        lambda: AzureAccountKey("k", naive),
        lambda: AzureBearerToken("t", naive),
        lambda: HttpHeaders({}, naive),
        lambda: HttpBearerToken("t", naive),
    ):
        with pytest.raises(InvalidInputError, match="time zone"):
            make()
    with pytest.raises(InvalidInputError, match="empty"):
        S3StaticCredentials(access_key_id="", secret_access_key=SECRET)


async def test_what_was_answered_before_counts_once_and_while_it_is_good() -> None:
    """A store that refuses it gets fresh ones, and a token about to expire is never used."""
    asked: list[int] = []

    async def ask() -> S3StaticCredentials:
        asked.append(1)
        return keys(LATER, "new")

    for initial, expected in (
        (keys(LATER, "old"), ["old", "new", "new"]),
        (keys(None, "old"), ["old", "new", "new"]),
        (keys(SOON, "old"), ["new"] * 3),
        (keys(PAST, "old"), ["new"] * 3),
        (None, ["new"] * 3),
    ):
        answer: Any = (await S3Refreshable(ask, initial).storage_options())["credentials"]
        assert [(await answer()).access_key_id for _ in range(3)] == expected


async def test_all_that_open_a_storage_share_one_answer() -> None:
    """Each store that refuses it asks for another, and the next ones begin with that."""
    asked: list[int] = []

    def ask() -> S3StaticCredentials:
        asked.append(1)
        return keys(LATER, f"answer {len(asked)}")

    credential = S3Refreshable(ask)
    handles: list[Any] = [(await credential.storage_options())["credentials"] for _ in range(3)]
    assert [(await it()).access_key_id for it in handles] == ["answer 1"] * 3
    assert (await handles[0]()).access_key_id == "answer 2"  # it was refused
    assert (await handles[1]()).access_key_id == "answer 2"
    assert (await handles[1]()).access_key_id == "answer 3"
    assert len(asked) == 3
    assert credential == S3Refreshable(ask)
    assert "answer" not in repr(credential)


async def test_an_answer_that_ends_is_not_shared() -> None:
    """Neither with later handles, nor with other processes."""
    answers = iter([keys(SOON, "first"), keys(LATER, "second")])
    credential = S3Refreshable(lambda: next(answers))
    for expected in ("first", "second", "second"):
        ask: Any = (await credential.storage_options())["credentials"]
        assert (await ask()).access_key_id == expected
    assert credential._newest.__reduce__() == (type(credential._newest), ())


async def test_a_plain_function_may_block() -> None:
    """It runs on a thread; one that answers an awaitable is awaited."""
    threads: list[int] = []

    def ask() -> GcsBearerToken:
        threads.append(threading.get_ident())
        return GcsBearerToken("plain")

    answer: Any = (await GcsRefreshable(ask).storage_options())["token"]
    assert (await answer()) == GcsBearerToken("plain")
    assert threads != [threading.get_ident()]
    assert len(threads) == 1
    later: Any = (await GcsRefreshable(lambda: ask_gcs()).storage_options())["token"]  # noqa: PLW0108
    assert (await later()).token == SECRET

    class Asking:
        async def __call__(self) -> GcsBearerToken:
            threads.append(threading.get_ident())
            return GcsBearerToken("object")

    mine: Any = (await GcsRefreshable(Asking()).storage_options())["token"]
    assert (await mine()) == GcsBearerToken("object")
    assert threads[-1] == threading.get_ident()


async def test_a_function_that_answers_something_else_is_named() -> None:
    """The error says what it should answer, and shows nothing of what it did."""
    wrong: Any = lambda: SECRET  # noqa: E731
    for owner, kind in (
        (S3Refreshable(wrong), "S3StaticCredentials"),
        (GcsRefreshable(wrong), "GcsBearerToken"),
        (HttpRefreshable(wrong), "HttpHeaders or HttpBearerToken"),
    ):
        (ask,) = (await owner.storage_options()).values()
        with pytest.raises(InvalidInputError, match=f"answered a str.*{kind}") as caught:
            await cast("Any", ask)()
        assert SECRET not in str(caught.value)
    with pytest.raises(InvalidInputError, match="AzureAccountKey or AzureSasToken"):
        await AzureRefreshable(wrong).storage_options()


async def test_the_first_answer_decides_how_azure_is_asked() -> None:
    """A key is used unchanged. A signature and a token are fetched again."""
    answers: list[Any] = []

    async def ask() -> Any:
        return answers[0]

    for answer, option in (
        (AzureAccountKey("k"), "account_key"),
        (AzureSasToken("sig=1"), "sas_token"),
        (AzureBearerToken("t", LATER), "credential"),
    ):
        answers[:] = [answer]
        ((name, value),) = (await AzureRefreshable(ask).storage_options()).items()
        assert name == option
        assert value == "k" if option == "account_key" else await cast("Any", value)() is answer
    answers[:] = [AzureAccountKey("other")]
    assert value is not None
    first: Any = value
    with pytest.raises(InvalidInputError, match="must answer AzureBearerToken"):
        await first()
    assert AzureBearerToken("t", LATER).expires_on == int(LATER.timestamp())


async def test_fixed_tokens_are_not_used_after_their_end() -> None:
    """They are refused when a repository is opened, and later."""
    for made in (GcsBearerToken("t", PAST), HttpBearerToken("t", PAST), HttpHeaders({}, PAST)):
        with pytest.raises(ExpiredCredentialsError):
            await made.storage_options()
    for token in (GcsBearerToken("t", LATER), AzureBearerToken("t", LATER)):
        (ask,) = (await token.storage_options()).values()
        assert await cast("Any", ask)() is token
        object.__setattr__(token, "expires_after", PAST)
        with pytest.raises(ExpiredCredentialsError):
            await cast("Any", ask)()
