"""URLs, options and strings that the obstore backend takes, and what it keeps to itself."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from aiohttp import web

from icechunk_async.errors import (
    IcechunkError,
    InvalidInputError,
    InvalidObjectKeyError,
    InvalidURLError,
    PermissionDeniedError,
    PreconditionFailedError,
)
from icechunk_async.storage import Version, open_storage, reopen
from icechunk_async_obstore.options import Service, condition, is_possible
from icechunk_async_obstore.reading import first_offset, folder_of
from tests.unit.backends.loopback import serving

SECRETS: dict[str, dict[str, object]] = {
    "s3": {
        "region": "us-east-1",
        "access_key_id": "key-id",
        "secret_access_key": "hidden-key",
        "session_token": "hidden-token",
    },
    "gs": {"token": "hidden-token"},
    "az": {"account_name": "account", "sas_token": "sv=1&sig=hidden-signature"},
}


@pytest.mark.parametrize("service", list(SECRETS))
async def test_secrets_reach_only_the_server(service: str) -> None:
    """Not representations, not errors; the description carries them without showing them."""
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(f"{request.method} {request.path_qs} {dict(request.headers)}")
        return web.Response(status=403)

    async with serving(answer) as url:
        options = SECRETS[service] | {"endpoint_url": url, "allow_http": True}
        async with open_storage(f"obstore+{service}://bucket/a b", **options) as storage:
            description = pickle.loads(pickle.dumps(storage.description))
            assert description == storage.description
            assert dict(description.options) == options
            async with reopen(description) as other:
                for operation in (
                    lambda: other.get("key"),
                    lambda: other.put("key", b"body"),
                    lambda: other.copy("key", "other"),
                    lambda: anext(other.list_prefix()),
                    lambda: anext(other.list_prefix(delimiter="/")),
                ):
                    with pytest.raises(PermissionDeniedError) as caught:
                        await operation()
                    assert caught.value.__cause__ is None
                    assert "hidden" not in f"{caught.value!r} {caught.value.context}"
                failures = await other.delete(["key"])
                assert "hidden" not in repr(failures)
            assert "hidden" not in f"{storage!r} {description!r}"
    assert len(seen) >= 5
    if service != "s3":  # which signs with its secret, and does not send it
        assert all("hidden" in request for request in seen)


@pytest.mark.parametrize(
    ("url", "options", "word"),
    [
        ("obstore+s3://b", {"token": "hidden"}, "token"),
        ("obstore+gs://b", {"region": "hidden"}, "region"),
        ("obstore+az://b", {"session_token": "hidden"}, "session_token"),
        ("obstore+s3://b", {"secret_access_key": "hidden"}, "access_key_id"),
        ("obstore+s3://b", {"endpoint_url": "http://host"}, "allow_http"),
        ("obstore+s3://b", {"endpoint_url": "https://me:hidden@host"}, "endpoint_url"),
        ("obstore+s3://b", {"endpoint_url": "host:9000"}, "endpoint_url"),
        ("obstore+s3://b", {"timeout_seconds": 0}, "timeout_seconds"),
        ("obstore+s3://b", {"acess_key_id": "hidden"}, "acess_key_id"),
        ("obstore+az://b", {"account_name": "a", "account_key": "hidden!"}, "options"),
    ],
)
async def test_wrong_options_are_named(url: str, options: dict[str, Any], word: str) -> None:
    """Before anything is sent; their values are not shown."""
    with pytest.raises(InvalidInputError, match=word) as caught:
        async with open_storage(url, **options):
            pass
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("obstore+s3://bucket", "AWS_ENDPOINT"),
        ("obstore+s3://bucket", "AWS_ENDPOINT_URL"),
        ("obstore+az://bucket", "AZURE_STORAGE_ENDPOINT"),
    ],
)
async def test_a_plain_endpoint_of_the_environment_has_to_be_allowed(
    url: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that an option names; an option that names another goes first."""
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    options = SECRETS[url.partition("+")[2].partition(":")[0]]
    with pytest.raises(InvalidInputError, match="allow_http"):
        async with open_storage(url, **options):
            pass
    for allowed in ({"allow_http": True}, {"endpoint_url": "https://127.0.0.1:9"}):
        async with open_storage(url, **options | allowed) as storage:
            assert storage.description.url == url


@pytest.mark.parametrize("url", ["obstore+s3://", "obstore+gs:///x", "obstore+az://me:hidden@b/x"])
async def test_urls_without_a_bucket_are_refused(url: str) -> None:
    """Or with a password, which is not repeated."""
    with pytest.raises(InvalidURLError) as caught:
        async with open_storage(url):
            pass
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("force_path_style", [None, True, False])
async def test_the_bucket_is_in_the_path_or_in_the_host(*, force_path_style: bool | None) -> None:
    """With a custom endpoint it is in the path, unless an option says otherwise."""
    seen: list[tuple[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.host.partition(":")[0], request.path))
        return web.Response(status=404)

    async with serving(answer) as url:
        host = url.replace("127.0.0.1", "localhost")
        options = SECRETS["s3"] | {"endpoint_url": host, "allow_http": True}
        if force_path_style is not None:
            options["force_path_style"] = force_path_style
        async with open_storage("obstore+s3://bucket/x", **options) as storage:
            try:
                await storage.get("key")
            except IcechunkError as error:  # names below localhost resolve on some systems only
                if not seen:
                    pytest.skip(f"this system does not resolve bucket.localhost: {error.kind}")
    in_host = force_path_style is False
    assert seen == [("bucket.localhost", "/x/key") if in_host else ("localhost", "/bucket/x/key")]


async def test_control_characters_are_no_part_of_a_key() -> None:
    """The client refuses to send them; that is said before."""
    async with open_storage("obstore+s3://bucket", anonymous=True, region="r") as storage:
        for key in ("a\nb", "a\x7f", "\x01"):
            with pytest.raises(InvalidObjectKeyError, match="control character"):
                await storage.get(key)


async def test_versions_with_a_meaning_of_their_own_are_never_sent() -> None:
    """``*`` matches every object, and generation 0 none."""
    async with open_storage("obstore+gs://bucket", token="t") as storage:  # noqa: S106
        for token in ("0", "", "*", '"x"', "1 OR 2"):
            with pytest.raises(PreconditionFailedError):
                await storage.put("key", b"body", if_version=Version(token))
    assert [is_possible(Service.S3, Version(it)) for it in ("*", "", '"a", "b"')] == [False] * 3
    assert is_possible(Service.AZ, Version('"0x8D"'))
    assert condition(Service.S3, Version('"x"')) == {"e_tag": '"x"'}
    assert condition(Service.GS, Version("12")) == {"version": "12"}


def test_offsets_skip_only_what_is_not_wanted() -> None:
    """They are never greater than what is wanted, and always something that can be sent."""
    assert first_offset("", None) is None
    assert first_offset("", "a/b") == "a/b"
    assert first_offset("", "a/") == "a"
    assert first_offset("", "a//b") == "a"
    assert first_offset("", "a\nb") == "a"
    assert first_offset("", "\ud800") is None
    assert first_offset("b/cd", None) == "b/cc"
    assert first_offset("b/cd", "b/cda") == "b/cda"
    assert first_offset("b/cd", "a") == "b/cc"
    assert first_offset("b/", None) is None


def test_folders_of_prefixes_hold_all_their_keys() -> None:
    """A prefix that no key can have has no folder."""
    assert [folder_of(it) for it in ("", "a", "a/", "a/b", "a/b/")] == ["", "", "a", "a", "a/b"]
    assert [folder_of(it) for it in ("/", "/a", "a//", "../a", "a\n/b")] == [None] * 5
