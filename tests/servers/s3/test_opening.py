"""Opening on S3: botocore is asked once where a bucket is, and its client is made where it is used.

Building the client takes tens of milliseconds, each time and for each event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, UserDict
from typing import TYPE_CHECKING, Any, cast

import pytest

from icechunk_async.errors import InvalidInputError, StorageError
from icechunk_async.storage import open_storage
from icechunk_async_s3.connections import Connections, Stock, _decisive, prepare
from icechunk_async_s3.options import make_options, place_of

if TYPE_CHECKING:
    from pathlib import Path

NOWHERE: dict[str, Any] = {
    "endpoint_url": "http://127.0.0.1:9",
    "allow_http": True,
    "region": "us-east-1",
    "access_key_id": "id",
    "secret_access_key": "secret",
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Stock]:
    """Note where a client is made; nothing is configured."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setattr("icechunk_async_s3.connections._places", OrderedDict())
    stocks: list[Stock] = []
    make = Stock._make

    def noted(self: Stock) -> Any:
        if self not in stocks:
            stocks.append(self)
        return make(self)

    monkeypatch.setattr(Stock, "_make", noted)
    return stocks


def connections(**options: Any) -> Connections:
    """Return those of a bucket that nobody asks anything."""
    return Connections(place_of("s3://bucket/prefix"), make_options(None, {**NOWHERE, **options}))


def test_loops_and_openings_share_what_was_found_out(made: list[Stock]) -> None:
    """One client is made for all of them; TLS and keys stay apart where they have to."""
    first, second = connections(), connections()
    found = [asyncio.run(it.here()).wiring for it in (first, first, second)]
    assert len(made) == 1
    assert found[0].route == found[1].route == found[2].route
    assert len({id(it.keys) for it in found}) == 3
    assert len({id(it.stock) for it in found}) == 3


def test_authorities_are_read_once(made: list[Stock]) -> None:
    """Another bucket reuses them, since they are some hundred certificates."""
    options = {"endpoint_url": "https://127.0.0.1:9"}
    contexts = [
        prepare(make_options(None, {**NOWHERE, **options}), bucket).route.tls
        for bucket in ("one", "two")
    ]
    assert contexts[0] is contexts[1] is not None
    assert len(made) == 2


async def test_reading_and_writing_make_no_client(made: list[Stock]) -> None:
    """An upload in parts does, once however many ask at the same time."""
    await connections().here()
    assert len(made) == 1
    async with open_storage("s3://bucket", **NOWHERE) as storage:
        for request in (storage.get("a"), storage.put("a", b"")):
            with pytest.raises(StorageError):
                await request
        assert len(made) == 1
        stock = (await storage._connections.here()).wiring.stock  # type: ignore[attr-defined]
        clients = [await it for it in (stock.client(), stock.client())]
        assert clients[0] is clients[1]
        assert made[1:] == [stock]


@pytest.mark.parametrize("settings", ["environment", "files"])
def test_changed_settings_are_seen_by_the_next_opening(
    made: list[Stock], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: str
) -> None:
    """Nothing is remembered beyond the settings that it was found out with."""
    options = make_options(None, {"access_key_id": "id", "secret_access_key": "secret"})
    assert prepare(options, "bucket").route.base_url == "https://bucket.s3.amazonaws.com/"
    if settings == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://elsewhere.example.com")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    else:
        text = "[default]\nregion = eu-west-1\nendpoint_url = https://elsewhere.example.com\n"
        (tmp_path / "config").write_text(text)
    route = prepare(options, "bucket").route
    assert (route.base_url, route.region) == ("https://elsewhere.example.com/bucket/", "eu-west-1")
    assert not route.is_aws
    assert len(made) == 2


def test_keys_of_one_opening_are_not_anothers(
    made: list[Stock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for given keys and for those that the chain finds each time."""

    def prepared(**options: Any) -> Any:
        return prepare(make_options(None, {"region": "us-east-1", **options}), "bucket")

    given = [prepared(access_key_id=name, secret_access_key="s") for name in "ab"]  # noqa: S106
    assert [it.keys.last.access_key_id for it in given] == ["a", "b"]
    for name in "cd":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", name)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        assert asyncio.run(prepared().keys.current()).access_key_id == name
    assert len(made) == 1


async def test_a_client_that_cannot_be_made_is_tried_again(
    made: list[Stock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When somebody next asks for it; the storage can be read meanwhile."""
    async with open_storage("s3://bucket", **NOWHERE) as storage:
        first = (await storage._connections.here()).wiring  # type: ignore[attr-defined]
        stock = Stock(make_options(None, NOWHERE), "bucket", first.keys)
        with monkeypatch.context() as patch:
            patch.setattr("icechunk_async_s3.connections._config", _fails)
            with pytest.raises(InvalidInputError, match="'bucket'"):
                await stock.client()
        assert await stock.client()
        await stock.close()
    assert made == [first.stock, stock]


def _fails(_: object) -> Any:
    raise ValueError("on purpose")


@pytest.mark.parametrize(
    ("options", "is_documented"),
    [
        ({}, True),
        ({"region": "cn-north-1"}, True),
        ({"endpoint_url": "https://s3.dualstack.eu-west-1.amazonaws.com"}, True),
        ({"endpoint_url": "http://s3.eu-west-1.amazonaws.com"}, False),
        ({"endpoint_url": "https://s3.eu-west-1.amazonaws.com:8443"}, False),
        ({"endpoint_url": "https://s3.eu-west-1.amazonaws.com.example"}, False),
        ({"endpoint_url": "https://not-s3.amazonaws.com"}, False),
        ({"endpoint_url": "https://x.s3-outposts.eu-west-1.amazonaws.com"}, False),
        ({"endpoint_url": "https://127.0.0.1:9000"}, False),
    ],
)
async def test_s3_itself_is_known_by_its_address(
    options: dict[str, Any], made: list[Stock], *, is_documented: bool
) -> None:
    """Only there AWS documents what conditional writes do; nothing is known before a request."""
    del made
    given = {"region": "us-east-1", "anonymous": True, "allow_http": True, **options}
    async with open_storage("s3://bucket", **given) as storage:
        assert not storage.capabilities.documented
        await cast("Any", storage)._connections.here()
        assert storage.capabilities.documented is is_documented
    async with open_storage("s3://bucket", **given, quote_etags=False) as storage:
        await cast("Any", storage)._connections.here()
        assert not storage.capabilities.documented


def test_of_the_environment_only_settings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding all of it takes as long as a request, each time that a storage is opened."""
    read: list[str] = []

    class Environment(UserDict[str, str]):
        def __getitem__(self, name: str) -> str:
            read.append(name)
            return super().__getitem__(name)

    monkeypatch.setattr(
        "icechunk_async_s3.connections.os.environ",
        Environment({"AWS_REGION": "there", "AWS_SECRET_ACCESS_KEY": "secret", "PATH": "/bin"}),
    )
    monkeypatch.setattr("icechunk_async_s3.connections._FILES", ())
    assert _decisive(make_options(None, NOWHERE), "bucket")
    assert read == ["AWS_REGION"]
