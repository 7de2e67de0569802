"""Redirects of web servers to storages: what they say is not trusted."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from aiohttp import web

from icechunk_async.errors import StorageError
from icechunk_async.storage.redirects import follow, read_location
from tests.unit.backends.loopback import serving

pytestmark = pytest.mark.skipif(
    tuple(map(int, version("aiohttp").split(".")[:2])) < (3, 14),
    reason="aiohttp before 3.14 reads ~/.netrc on the event loop, which tests refuse",
)


@pytest.mark.parametrize("target", ["http://[", "http://[::1", "//[", "s3://[", "ftp://host", ""])
async def test_a_redirect_to_no_place_is_refused(target: str) -> None:
    """Also one whose target is no URL."""

    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(status=302, headers={"Location": target})

    async with serving(answer) as url:
        with pytest.raises(StorageError, match="leads to no storage"):
            await follow(url)


async def test_redirects_are_followed_to_a_bucket() -> None:
    """Over relative ones, to a storage that is read without credentials."""

    async def answer(request: web.BaseRequest) -> web.Response:
        target = "s3://bucket/at?region=eu-west-3&access_key_id=theirs"
        here = "/there?from=https://host/path"
        return web.Response(
            status=307, headers={"Location": target if request.path == "/there" else here}
        )

    async with serving(answer) as url:
        place, options = await follow(url)
    assert (place, options) == (
        "s3://bucket/at",
        {"anonymous": True, "read_only": True, "region": "eu-west-3"},
    )


def test_a_web_server_is_asked_further() -> None:
    """Its URL names no storage by itself."""
    assert read_location("https://host/path") is None
