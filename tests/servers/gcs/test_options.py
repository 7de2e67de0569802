"""Options and URLs: what is wrong is named, what is secret is not shown."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from aiohttp import web

from icechunk_async.errors import (
    IcechunkError,
    InvalidInputError,
    InvalidURLError,
    UnreachableError,
)
from icechunk_async.storage import open_storage
from tests.servers.gcs.running import ANONYMOUS
from tests.unit.backends.loopback import serving

if TYPE_CHECKING:
    from pathlib import Path

_SECRET = "ya29.a-very-secret-token"  # noqa: S105 - for the test only


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"token": 5}, "token"),
        ({"token": ""}, "token"),
        ({"token": b"bytes"}, "token"),
        ({"token": _SECRET}, "token"),
        ({"token": {"private_key": _SECRET}}, "token"),
        ({"project": ""}, "project"),
        ({"project": 5}, "project"),
        ({"endpoint_url": "localhost:4443"}, "endpoint_url"),
        ({"endpoint_url": "http://localhost:port"}, "endpoint_url"),
        ({"endpoint_url": f"http://me:{_SECRET}@localhost"}, "endpoint_url"),
        ({"endpoint_url": "http://localhost/path"}, "endpoint_url"),
        ({"connect_timeout_seconds": 0}, "connect_timeout_seconds"),
        ({"read_timeout_seconds": "1"}, "read_timeout_seconds"),
        ({"read_timeout_seconds": float("nan")}, "read_timeout_seconds"),
        ({"read_only": "no"}, "read_only"),
        ({"user_agent": "a\r\nx-b: c"}, "user_agent"),
        ({"user_agent": " "}, "user_agent"),
        ({"tokn": "anonymous"}, "tokn"),
    ],
)
async def test_an_option_that_is_wrong_is_named(options: dict[str, Any], named: str) -> None:
    """The error hides values that may be secret."""
    with pytest.raises(InvalidInputError, match=named) as caught:
        async with open_storage("gs://bucket", **{"token": ANONYMOUS, **options}):
            pass
    assert _SECRET not in caught.value.message + repr(caught.value.context)


async def test_a_key_file_without_credentials_is_refused(tmp_path: Path) -> None:
    """Its contents are not shown."""
    path = tmp_path / "key.json"
    for content in ("no json", "[]", json.dumps({"private_key": _SECRET})):
        await anyio.Path(path).write_text(content, encoding="utf-8")
        with pytest.raises(InvalidInputError, match="token") as caught:
            async with open_storage("gs://bucket", token=path):
                pass
        assert _SECRET not in caught.value.message


@pytest.mark.parametrize(
    "url",
    [
        *("gs://", "gs:///prefix", "gs://B", "gs://ab cd/x", f"gs://me:{_SECRET}@bucket/x"),
        *("gs://bucket/a//b", "gs://bucket/../x", "gs://bucket/a?b=c", "gs://bucket/a#b"),
        *("gs://bucket/" + "x" * 1024, "gs://bucket/\0"),
    ],
)
async def test_a_url_that_names_no_bucket_is_refused(url: str) -> None:
    """Before anything is asked."""
    with pytest.raises(InvalidURLError) as caught:
        async with open_storage(url, token=ANONYMOUS):
            pass
    assert _SECRET not in caught.value.message + repr(caught.value.context)


async def test_every_request_names_the_client() -> None:
    """For the access logs of the bucket."""
    agents = []

    async def nothing(request: web.Request) -> web.Response:
        agents.append(request.headers["User-Agent"])
        return web.Response(status=404)

    async with serving(nothing) as url:
        place: dict[str, Any] = {
            "token": ANONYMOUS,
            "endpoint_url": url,
            "allow_http": True,
            "user_agent": "app/1 (workload=x)",
        }
        async with open_storage("gs://bucket", **place) as storage:
            for request in (storage.get("key"), storage.put("key", b"x"), storage.delete(["key"])):
                with suppress(IcechunkError):
                    await request
            assert storage.description.options["user_agent"] == "app/1 (workload=x)"
    assert len(agents) >= 3
    assert set(agents) == {"app/1 (workload=x)"}


async def test_a_plain_server_is_allowed_wherever_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The option and the variable for emulators have one rule."""
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    with pytest.raises(InvalidInputError, match="allow_http=True"):
        async with open_storage("gs://bucket", endpoint_url="http://127.0.0.1:9", token=ANONYMOUS):
            pass
    for named in ("127.0.0.1:9", "http://127.0.0.1:9"):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", named)
        with pytest.raises(InvalidInputError, match="allow_http=True") as caught:
            async with open_storage("gs://bucket", token=ANONYMOUS) as storage:
                await storage.get("key")
        assert caught.value.context["option"] == "allow_http"
        options: dict[str, Any] = {"token": ANONYMOUS, "allow_http": True}
        async with open_storage("gs://bucket", **options) as storage:
            assert storage.description.options["allow_http"] is True
            with pytest.raises(UnreachableError):  # nobody listens there, but it was asked
                await storage.get("key")


@pytest.mark.parametrize(
    ("options", "is_documented"),
    [({}, True), ({"endpoint_url": "https://127.0.0.1:9"}, False), ({"read_only": True}, False)],
)
async def test_the_service_itself_is_known_by_its_address(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, is_documented: bool
) -> None:
    """Only there Google documents what preconditions do."""
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    async with open_storage("gs://bucket", token=ANONYMOUS, **options) as storage:
        assert storage.capabilities.documented is is_documented
