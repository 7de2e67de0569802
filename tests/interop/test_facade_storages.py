"""Storages of the blocking facade beside the official ones, and what the engine opens for each."""

from __future__ import annotations

import asyncio
import gc
import pickle
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar, override

import pytest

import icechunk_async
import icechunk_async.sync as facade
import icechunk_async_memory
from icechunk_async.errors import StorageError
from icechunk_async.storage import open_storage
from icechunk_async.storage.redirects import read_location
from tests.helpers import memory_url
from tests.interop.facade_pair import alike, both, failing_alike
from tests.interop.theirs import icechunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KEYS = {"access_key_id": "A", "secret_access_key": "SECRET"}
TOKEN = {"bearer_token": "SECRET"}
S3 = {"bucket": "b", "prefix": "p"}
STORAGES: dict[str, Callable[[Any], object]] = {
    "memory": lambda it: it.in_memory_storage(),
    "s3": lambda it: it.s3_storage(**S3, region="eu", **KEYS),
    "s3 root": lambda it: it.s3_storage(bucket="b", prefix=None, anonymous=True),
    "s3 options": lambda it: it.s3_storage(
        **S3,
        force_path_style=True,
        requester_pays=True,
        allow_http=True,
        checksum_algorithm=it.ChecksumAlgorithm.Sha1,
    ),
    "s3 object store": lambda it: it.storage.s3_object_store_storage(**S3, region="eu"),
    "tigris": lambda it: it.tigris_storage(**S3, region="auto"),
    "tigris, weak": lambda it: it.tigris_storage(**S3, use_weak_consistency=True),
    "r2": lambda it: it.r2_storage(**S3, account_id="acc"),
    "r2 prefix": lambda it: it.r2_storage(prefix="b/c/d", endpoint_url="https://x.y", region="e"),
    "hugging face": lambda it: it.hf_storage(**S3, namespace="n"),
    "gcs": lambda it: it.gcs_storage(**S3, **TOKEN),
    "azure": lambda it: it.azure_storage(account="a", container="c", prefix="p"),
    "http": lambda it: it.http_storage("http://host/path", headers={"a": "SECRET"}),
    "redirect": lambda it: it.redirect_storage("https://host/path"),
}


@pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)
def test_storages_are_displayed_alike(make: Callable[[Any], object]) -> None:
    """Without their secrets; ours pickle, which the official ones do not."""
    storage: Any = alike(make)
    assert "SECRET" not in storage._repr_html_() + repr(storage)
    assert pickle.loads(pickle.dumps(storage)) == storage


@pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)
def test_storages_have_the_settings_of_the_official_ones(make: Callable[[Any], Any]) -> None:
    """As far as they can be told without a request."""
    theirs, ours = both(make)
    if "redirect" in repr(ours):
        assert ours.default_settings() == facade.StorageSettings()
    else:
        assert repr(ours.default_settings()) == repr(theirs.default_settings()).replace(
            "icechunk.", "icechunk_async.sync."
        )


def test_wrong_storages_are_refused_alike() -> None:
    """With the official classes of errors."""
    failing_alike(lambda it: it.tigris_storage(**S3))
    failing_alike(lambda it: it.r2_storage(**S3))
    failing_alike(lambda it: it.r2_storage(account_id="a"))
    failing_alike(lambda it: it.http_storage("nonsense"))
    failing_alike(lambda it: it.redirect_storage("nonsense"))
    failing_alike(lambda it: it.local_filesystem_storage(5))
    failing_alike(lambda it: it.s3_storage(**S3, access_key_id="a"))


def test_what_this_library_cannot_do_is_refused_when_it_is_asked_for() -> None:
    """Options that would be ignored otherwise; the message says what to do."""
    refused: list[Callable[[], object]] = [
        lambda: facade.s3_storage(bucket="b", prefix="p", read_headers={"a b": "c"}),
        lambda: facade.s3_storage(bucket="b", prefix="p", write_headers={"": "c"}),
        lambda: facade.r2_storage(
            bucket="b", prefix="p", account_id="a", headers={"a": "SECRET\n"}
        ),
        lambda: facade.s3_storage(bucket="b", prefix="p", legacy_rooted_keys=True),
        lambda: facade.s3_storage(
            bucket="b", prefix="p", checksum_algorithm=facade.ChecksumAlgorithm.Crc64Nvme
        ),
        lambda: facade.gcs_storage(bucket="b", prefix="p", headers={"a": "b"}),
        lambda: facade.gcs_storage(bucket="b", prefix="p", config={"proxy_url": "x"}),
        lambda: facade.azure_storage(
            account="a", container="c", prefix="p", config={"x": "SECRET"}
        ),
    ]
    for make in refused:
        with pytest.raises(facade.InvalidInputError) as caught:
            make()
        assert "SECRET" not in str(caught.value)


def placed(storage: facade.Storage) -> tuple[object, dict[str, object]]:
    """Return the location and the options that the engine gets."""
    return asyncio.run(storage.place())


def test_storages_become_locations_and_options_of_the_engine() -> None:
    """Options at their default are left to the backend."""
    assert placed(
        facade.s3_storage(
            bucket="b",
            prefix="p/q",
            region="eu",
            requester_pays=True,
            headers={"a": "b"},
            anonymous=True,
        )
    ) == (
        "s3://b/p/q",
        {
            "region": "eu",
            "requester_pays": True,
            "anonymous": True,
            "extra_headers": {"a": "b"},
            "network_stream_timeout_seconds": 60,
        },
    )
    _, options = placed(
        facade.s3_storage(bucket="b", prefix="p", anonymous=True, write_headers={"x-w": "1"})
    )
    assert options["write_headers"] == {"x-w": "1"}
    assert "extra_headers" not in options
    _, options = placed(
        facade.r2_storage(
            bucket="b",
            prefix="p",
            account_id="a",
            anonymous=True,
            headers={"x-a": "1"},
            read_headers={"x-r": "2"},
        )
    )
    assert (options["extra_headers"], options["read_headers"]) == ({"x-a": "1"}, {"x-r": "2"})
    url, options = placed(
        facade.tigris_storage(bucket="b", prefix="p/q", region="auto", anonymous=True)
    )
    assert (url, options["endpoint_url"]) == ("s3://b/p/q", "https://t3.storage.dev")
    assert options["extra_headers"] == {"x-tigris-consistent": "true"}
    _, options = placed(
        facade.tigris_storage(bucket="b", prefix="p", use_weak_consistency=True, anonymous=True)
    )
    assert options["read_only"] is True
    assert "extra_headers" not in options
    plain = facade.http_storage("http://h/p", {"allow_http": "true"}, {"a": "b"})
    assert placed(plain) == ("http://h/p", {"headers": {"a": "b"}, "allow_http": True})
    assert placed(facade.http_storage("https://h/p")) == ("https://h/p", {})


def test_a_directory_is_listed_as_the_official_storage_lists_it(tmp_path: Path) -> None:
    """Keys and sizes, all or below a prefix, with times of the same second."""
    theirs, ours = both(lambda it: it.local_filesystem_storage(str(tmp_path)))
    icechunk.Repository.create(theirs)
    wanted = sorted((it.key, it.size_bytes) for it in theirs.list_objects_metadata())
    found = ours.list_objects_metadata()
    assert [(it.key, it.size_bytes) for it in found] == wanted == ours.list_objects()
    times = {it.key: it.created_at for it in theirs.list_objects_metadata()}
    assert all(abs(it.created_at - times[it.key]).total_seconds() < 1 for it in found)
    prefix = ours.list_objects(prefix="snapshots/")
    assert prefix == [it for it in wanted if it[0].startswith("snapshots/")] != []
    assert repr(ours).replace("icechunk_async.sync.", "icechunk.") == repr(theirs)
    assert "key" in str(found[0])


async def test_the_engine_opens_what_a_storage_describes(tmp_path: Path) -> None:
    """A local directory, a URL with options, and a storage that the caller opened."""
    local = facade.local_filesystem_storage(str(tmp_path / "repo"))
    async with local.opened() as storage:
        await storage.put("key", b"value")
    url = facade.Storage.from_url((tmp_path / "repo").as_uri(), single_machine=True)
    location, options = await url.place()
    assert (location, options) == ((tmp_path / "repo").as_uri(), {"single_machine": True})
    async with url.opened() as storage:
        assert (await storage.get("key")).data == b"value"
    async with open_storage(memory_url()) as memory:
        own = facade.Storage.from_storage(memory)
        location, options = await own.place()
        assert isinstance(location, type(memory))
        async with icechunk_async.Repository.create(location, storage_options=options) as repo:
            assert await repo.list_branches() == {"main"}
        async with own.opened() as storage:  # and is left open
            await storage.put("other", b"value")


async def test_uses_of_one_in_memory_storage_share_its_objects() -> None:
    """Pickles in the same process included; with the last use the objects are dropped."""
    spaces: dict[str, object] = vars(icechunk_async_memory)["_spaces"]
    first = facade.in_memory_storage()
    location, _ = await first.place()
    assert isinstance(location, str)
    copy = pickle.loads(pickle.dumps(first))
    async with first.opened() as storage:
        await storage.put("key", b"value")
    del first
    gc.collect()
    async with copy.opened() as storage:
        assert (await storage.get("key")).data == b"value"
    name = location.removeprefix("memory://")
    assert name in spaces
    async with facade.in_memory_storage().opened() as other:
        assert [entry async for entry in other.list_prefix("")] == []
    del copy, storage
    gc.collect()
    assert name not in spaces


def test_an_in_memory_storage_says_that_it_cannot_travel(tmp_path: Path) -> None:
    """Instead of being empty elsewhere."""
    (tmp_path / "pickled").write_bytes(pickle.dumps(facade.in_memory_storage()))
    script = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "pickled")],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert "in another process than the one that made it" in done.stderr


def test_redirects_name_storages() -> None:
    """By the schemes that the official package knows."""
    anonymous = {"anonymous": True, "read_only": True}
    assert read_location("s3://b/p?region=eu") == ("s3://b/p", {**anonymous, "region": "eu"})
    url, options = read_location("r2://b/p?account_id=x") or ("", {})
    assert (url, options["endpoint_url"]) == ("s3://b/p", "https://x.r2.cloudflarestorage.com")
    assert read_location("gs://b/p") == ("gs://b/p", {"token": "anonymous", "read_only": True})
    assert read_location("http+icechunk://host/p") == ("http://host/p", {})
    assert read_location("https://host/p") is None
    with pytest.raises(StorageError, match="knows no storage with the scheme 'ftp'"):
        read_location("ftp://host/p")


class _Redirecting(BaseHTTPRequestHandler):
    """Points from /first to /second, from there to a bucket, and from /lost to nowhere."""

    targets: ClassVar = {
        "/first": "/second",
        "/second": "s3://bucket/prefix?region=eu",
        "/loop": "/loop",
    }

    def do_GET(self) -> None:
        target = self.targets.get(self.path)
        self.send_response(302 if target else 404)
        if target:
            self.send_header("Location", target)
        self.send_header("Content-Length", "0")
        self.end_headers()

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    """Return the URL of a server that redirects."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Redirecting) as served:
        thread = Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()


async def test_redirects_are_followed_to_the_storage(server: str) -> None:
    """Over several servers; what leads nowhere is refused."""
    location, options = await facade.redirect_storage(f"{server}/first").place()
    assert (location, options["region"]) == ("s3://bucket/prefix", "eu")
    for path, why in (("lost", "status 404"), ("loop", "more than 10 redirects")):
        with pytest.raises(facade.StorageError, match=why) as caught:
            await facade.redirect_storage(f"{server}/{path}").place()
        assert caught.value.kind == facade.ErrorKind.BAD_REDIRECT
