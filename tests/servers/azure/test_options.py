"""URLs and options of the Azure backend: what is accepted, and how mistakes are named."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from icechunk_async.credentials import AzureBearerToken, AzureSasToken
from icechunk_async.errors import IcechunkError, InvalidInputError, InvalidURLError
from icechunk_async.storage import open_storage
from icechunk_async_azure.clients import Proof
from icechunk_async_azure.options import Place, login_of, place_of
from tests.unit.backends.loopback import serving

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY = "c2VjcmV0LWtleQ=="
SAS = "sv=2024-01-01&sr=c&sig=c2VjcmV0LXNhcw%3D%3D"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCOUNT_NAME", "ACCOUNT_KEY", "SAS_TOKEN", "CONNECTION_STRING"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("az://box", Place("box", "")),
        ("az://box/", Place("box", "")),
        ("az://box/a/b/", Place("box", "a/b/")),
        ("az://box/a%20b", Place("box", "a b/")),
        ("az://$root/a", Place("$root", "a/")),
    ],
)
def test_a_url_names_container_and_prefix(url: str, place: Place) -> None:
    """A prefix ends with a slash, so that it hides what only begins alike."""
    assert place_of(url) == place


@pytest.mark.parametrize(
    "url",
    ["az://", "az:///a", "az://Box", "az://b", "az://a--b", "az://box/a//b", "az://box/../b"],
)
def test_a_url_without_a_place_is_refused(url: str) -> None:
    """The message repeats it and shows how one looks."""
    with pytest.raises(InvalidURLError, match="az://container/prefix") as caught:
        place_of(url)
    assert url in str(caught.value)


@pytest.mark.parametrize("url", [f"az://box/a?{SAS}", "az://user:secret-word@box/a", "az://b#sig"])
def test_a_url_that_may_carry_a_secret_is_not_repeated(url: str) -> None:
    """Errors end in logs."""
    with pytest.raises(InvalidURLError) as caught:
        place_of(url)
    assert "secret" not in str(caught.value)
    assert "c2Vj" not in repr(caught.value.context) + str(caught.value)


_BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "account_name"),
    ({"account_key": KEY}, "account_name"),
    ({"account_name": "acc", "account_key": "not base64!"}, "account_key"),
    ({"account_name": "acc", "account_key": KEY, "sas_token": SAS}, "account_key and sas_token"),
    ({"account_name": "acc", "anonymous": True, "credential": object()}, "credential"),
    ({"account_name": "acc", "sas_token": "sv=1&c2VjcmV0"}, "sas_token"),
    ({"account_name": "acc", "sas_token": f"https://acc/?{SAS}"}, "sas_token"),
    ({"account_name": "acc", "sas_token": 7}, "sas_token"),
    ({"account_name": "acc", "credential": "c2VjcmV0"}, "credential"),
    ({"account_name": "Acc!"}, "account_name"),
    ({"account_name": 7}, "account_name"),
    ({"account_name": "acc", "anonymous": "yes"}, "anonymous"),
    ({"endpoint_url": "http://127.0.0.1:1/acc", "anonymous": True}, "allow_http"),
    ({"endpoint_url": f"https://acc/?{SAS}", "anonymous": True}, "endpoint_url"),
    ({"endpoint_url": "acc.example", "anonymous": True}, "endpoint_url"),
    ({"endpoint_url": "https://acc:99999999", "anonymous": True}, "endpoint_url"),
    ({"endpoint_url": "http://acc:1", "allow_http": True, "credential": dict}, "https"),
    ({"connection_string": "c2VjcmV0"}, "connection_string"),
    ({"connection_string": "AccountName=acc"}, "AccountKey"),
    ({"connection_string": f"AccountName=a;AccountKey={KEY}", "account_name": "a"}, "account_name"),
    ({"connection_string": "UseDevelopmentStorage=true"}, "allow_http"),
]


@pytest.mark.parametrize(("options", "named"), _BAD, ids=[str(n) for n in range(len(_BAD))])
def test_a_bad_option_is_named_and_not_repeated(options: dict[str, Any], named: str) -> None:
    """The option's name, not its value, which may be a secret."""
    with pytest.raises(InvalidInputError, match=named) as caught:
        login_of(options)
    assert "c2Vj" not in f"{caught.value} {caught.value.context!r}"


@pytest.mark.parametrize(
    ("options", "kind", "url"),
    [
        ({"account_name": "acc", "account_key": KEY}, "key", "https://acc.blob.core.windows.net"),
        ({"account_name": "acc", "sas_token": f"?{SAS}"}, "sas", "https://acc.blob.core."),
        ({"account_name": "acc"}, "default", "https://acc.blob.core.windows.net"),
        ({"account_name": "acc", "anonymous": True}, "anonymous", "https://acc.blob."),
        ({"account_name": "acc", "credential": dict}, "token", "https://acc.blob."),
        ({"connection_string": f"AccountName=acc;AccountKey={KEY}"}, "key", "https://acc.blob."),
        (
            {"connection_string": f"BlobEndpoint=https://x.example/;SharedAccessSignature={SAS}"},
            "sas",
            "https://x.example",
        ),
        (
            {"connection_string": "UseDevelopmentStorage=true", "allow_http": True},
            "key",
            "http://127.0.0.1:10000/devstoreaccount1",
        ),
    ],
)
def test_credentials_come_from_options_and_environment(
    options: Mapping[str, object], kind: str, url: str
) -> None:
    """Each way of saying it."""
    login = login_of(options)
    assert login.kind == kind
    assert login.account_url.startswith(url)
    assert "c2Vj" not in repr(login)


def test_the_environment_fills_in_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option takes precedence over every variable."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acc")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", SAS)
    assert login_of({}).kind == "sas"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=other;AccountKey={KEY}")
    assert login_of({}).account_name == "other"
    assert login_of({"anonymous": True}).kind == "anonymous"
    assert login_of({"anonymous": True}).account_name == "acc"


async def test_options_travel_in_the_description_and_stay_out_of_its_repr() -> None:
    """The description has the given options and no others."""
    given = {"account_name": "acc", "account_key": KEY, "timeout_seconds": 5}
    async with open_storage("az://box/a", **given) as storage:
        assert storage.description.options == given
        assert KEY not in repr(storage) + repr(storage.description)


@pytest.mark.parametrize("name", ["timeout_seconds", "connect_timeout_seconds"])
@pytest.mark.parametrize("value", [0, -1, "5", True, float("nan")])
async def test_a_timeout_is_a_positive_number(name: str, value: object) -> None:
    """Zero would mean something else to the driver."""
    with pytest.raises(InvalidInputError, match=name):
        async with open_storage("az://box", account_name="acc", **{name: value}):
            pass


async def test_functions_may_be_objects_and_tell_when_their_answer_ends() -> None:
    """A SAS token need not say so itself; one that lasts is not asked for again."""
    asked: list[timedelta] = [timedelta(seconds=30), timedelta(hours=1)]

    class Asking:
        async def __call__(self) -> AzureSasToken:
            return AzureSasToken(f"sig=part-{len(asked)}", datetime.now(UTC) + asked.pop(0))

    proof = Proof(login_of({"account_name": "acct", "sas_token": Asking()}))
    for expected in ("sig=part-2", "sig=part-1", "sig=part-1"):
        await proof.refresh()
        assert proof.credential.signature == expected


async def test_an_object_may_answer_access_tokens() -> None:
    """It is asked, not taken for a credential or for what makes one."""
    later = datetime.now(UTC) + timedelta(hours=1)
    options = await AzureBearerToken("token", later).storage_options()
    proof = Proof(login_of({"account_name": "acct", **options}))
    found = await proof.credential.get_token("scope")
    assert (found.token, found.expires_on) == ("token", int(later.timestamp()))
    await proof.close()


async def test_every_request_names_the_client() -> None:
    """For the access logs of the account; the driver's name follows."""
    agents = []

    async def nothing(request: web.Request) -> web.Response:
        agents.append(request.headers["User-Agent"])
        return web.Response(status=404)

    async with serving(nothing) as url:
        place: dict[str, Any] = {"endpoint_url": f"{url}/account", "allow_http": True}
        place |= {"anonymous": True, "user_agent": "app/1 (workload=x)"}
        async with open_storage("az://box", **place) as storage:
            for request in (storage.get("key"), storage.put("key", b"x"), storage.delete(["key"])):
                with suppress(IcechunkError):
                    await request
    assert len(agents) >= 3
    assert {agent.partition(" azsdk")[0] for agent in agents} == {"app/1 (workload=x)"}


@pytest.mark.parametrize("agent", ["", "a\r\nx: y", "ü", "a" * 1025, 3])
async def test_a_name_that_no_header_carries_is_refused(agent: Any) -> None:
    """Before anything is sent."""
    with pytest.raises(InvalidInputError, match="user_agent"):
        async with open_storage("az://box", account_name="a", anonymous=True, user_agent=agent):
            pass


@pytest.mark.parametrize(
    ("options", "is_documented"),
    [
        ({"account_name": "account"}, True),
        ({"endpoint_url": "https://account.blob.core.windows.net"}, True),
        ({"endpoint_url": "https://account.blob.core.windows.net:8443"}, False),
        ({"endpoint_url": "https://blob.core.windows.net.example"}, False),
        ({"endpoint_url": "http://account.blob.core.windows.net", "allow_http": True}, False),
        ({"connection_string": "UseDevelopmentStorage=true", "allow_http": True}, False),
    ],
)
async def test_the_service_itself_is_known_by_its_address(
    options: dict[str, Any], *, is_documented: bool
) -> None:
    """Only there Azure documents what conditional writes do."""
    anonymous = {} if "connection_string" in options else {"anonymous": True}
    async with open_storage("az://container", **options, **anonymous) as storage:
        assert storage.capabilities.documented is is_documented
