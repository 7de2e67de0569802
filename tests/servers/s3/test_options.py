"""Options: an invalid one is named, none is shown, presets give way to what is said."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from icechunk_async.errors import (
    InvalidInputError,
    InvalidObjectKeyError,
    InvalidURLError,
    UnreachableError,
)
from icechunk_async.storage import open_storage
from icechunk_async_s3 import S3Credentials, open_s3
from icechunk_async_s3 import options as options_module
from icechunk_async_s3.connections import prepare, sent_always
from icechunk_async_s3.credentials import redact
from icechunk_async_s3.options import make_options, place_of

SECRET = "wJalrXUtnFEMI-not-a-secret"  # noqa: S105


async def no_credentials() -> S3Credentials:
    """Return credentials."""
    return S3Credentials("id", SECRET)


def test_every_option_has_a_default_a_check_and_a_row_in_the_how_to() -> None:
    """Without its check an option would be an error when it is first given."""
    named = {it.name for it in fields(options_module.Options)}
    assert set(inspect.signature(open_s3).parameters) - {"url", "preset"} == named
    assert set(options_module._CHECKS) == named
    page = Path(__file__).parents[3] / "docs" / "how-to" / "s3.md"
    rows = [it for it in page.read_text("utf-8").splitlines() if it.startswith("| `")]
    assert {it for it in named if not any(f"`{it}`" in row.split("|")[1] for row in rows)} == set()


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("preset", {"preset": "s4"}),
        ("endpoint_url", {"endpoint_url": "not a url"}),
        ("endpoint_url", {"endpoint_url": "ftp://host"}),
        ("endpoint_url", {"endpoint_url": "https://host:port"}),
        ("endpoint_url", {"endpoint_url": f"https://user:{SECRET}@host"}),
        ("endpoint_url", {"preset": "minio"}),
        ("allow_http", {"endpoint_url": "http://host"}),
        ("region", {"region": ""}),
        ("anonymous", {"anonymous": "yes"}),
        ("force_path_style", {"force_path_style": 1}),
        ("checksum_algorithm", {"checksum_algorithm": "md5"}),
        ("storage_class", {"storage_class": "a b"}),
        ("extra_headers", {"extra_headers": {"Host": "elsewhere"}}),
        ("extra_headers", {"extra_headers": {"x-a": f"{SECRET}\r\nx-b: c"}}),
        ("access_key_id", {"secret_access_key": SECRET}),
        ("secret_access_key", {"access_key_id": "id"}),
        ("secret_access_key", {"access_key_id": "id", "secret_access_key": f"{SECRET}\n"}),
        ("session_token", {"session_token": SECRET}),
        ("credentials", {"credentials": 3}),
        ("access_key_id", {"anonymous": True, "access_key_id": "i", "secret_access_key": SECRET}),
        ("connect_timeout_seconds", {"connect_timeout_seconds": -1}),
        ("network_stream_timeout_seconds", {"network_stream_timeout_seconds": float("nan")}),
        ("multipart_threshold_bytes", {"multipart_threshold_bytes": 1}),
        ("conditional_multipart", {"conditional_multipart": "yes"}),
        ("read_only", {"read_only": "no"}),
        ("user_agent", {"user_agent": ""}),
        ("user_agent", {"user_agent": "a\r\nx-b: c"}),
        ("user_agent", {"user_agent": "ü"}),
        ("extra_headers", {"extra_headers": {"User-Agent": "signed"}}),
    ],
)
async def test_an_invalid_option_is_named(option: str, options: dict[str, Any]) -> None:
    """In the message and in the context; its value only where it cannot be a secret."""
    with pytest.raises(InvalidInputError) as caught:
        async with open_storage("s3://bucket", **options):
            pass
    assert option in caught.value.message
    assert caught.value.context["option"] == option
    assert SECRET not in repr(caught.value) + str(caught.value.context)


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///key", "s3://a b/c", "s3://bucket//a", "s3://b/../a", "s3://buck--x-s3"]
)
async def test_a_url_without_a_bucket_is_refused(url: str) -> None:
    """An invalid prefix and a bucket with unordered listings are refused too."""
    with pytest.raises(InvalidURLError):
        async with open_storage(url):
            pass


async def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    """URLs end in logs."""
    with pytest.raises(InvalidURLError) as caught:
        async with open_storage(f"s3://id:{SECRET}@bucket/prefix"):
            pass
    assert SECRET not in repr(caught.value) + str(caught.value.context)


async def test_no_secret_is_shown_or_added_to_the_description() -> None:
    """A description carries what was given, and nothing that was found elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "id")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        async with open_storage("s3://bucket/prefix", region="eu-west-1") as storage:
            description = storage.description
            assert await storage._connections.here()  # type: ignore[attr-defined]
        assert dict(description.options) == {"region": "eu-west-1"}
        assert SECRET.encode() not in pickle.dumps(description)
    given = {"access_key_id": "id", "secret_access_key": SECRET, "session_token": SECRET}
    async with open_storage("s3://bucket", **given) as storage:
        assert dict(storage.description.options) == given
        shown = [storage, storage.description, storage._options]  # type: ignore[attr-defined]
        assert SECRET not in repr(shown)
    assert SECRET not in repr(S3Credentials("id", SECRET, SECRET))


async def test_cephs_gateway_may_bring_back_what_was_deleted() -> None:
    """An update that races the deletion does; its preset says so."""
    place = {"endpoint_url": "https://rgw.example.com", "anonymous": True}
    async with open_storage("s3://bucket", preset="ceph", **place) as storage:
        found = storage.capabilities
        assert (found.conditional_update, found.final_deletion) == (True, False)
        assert "Ceph" in found.reasons["final_deletion"]
    async with open_storage("s3://bucket", preset="minio", **place) as storage:
        assert storage.capabilities.final_deletion


def test_headers_are_for_reads_for_writes_or_for_both() -> None:
    """By the method of the request; of equal names the narrower one counts."""
    options = make_options(
        None,
        {
            "extra_headers": {"X-All": "1", "x-both": "all"},
            "read_headers": {"X-Read": "2"},
            "write_headers": {"x-write": "3", "X-Both": "write"},
        },
    )
    reading = {"x-all": "1", "x-both": "all", "x-read": "2"}
    writing = {"x-all": "1", "x-both": "write", "x-write": "3"}
    assert all(sent_always(options, it) == reading for it in ("GET", "HEAD"))
    assert all(sent_always(options, it) == writing for it in ("PUT", "POST", "DELETE"))


def test_a_preset_gives_way_to_what_is_said() -> None:
    """Each preset differs in options only."""
    ceph = make_options("ceph", {"endpoint_url": "https://rgw.example.com", "region": "here"})
    assert (ceph.quote_etags, ceph.force_path_style, ceph.region) == (False, True, "here")
    tigris = make_options("tigris", {"extra_headers": {"X-Own": "1"}})
    assert dict(tigris.extra_headers) == {"x-tigris-consistent": "true", "x-own": "1"}
    assert tigris.endpoint_url == "https://t3.storage.dev"
    r2 = make_options("r2", {"endpoint_url": "https://a.r2.cloudflarestorage.com"})
    assert r2.region == "auto"
    assert make_options(None, {"quote_etags": None}).quote_etags


@pytest.mark.parametrize(
    ("bucket", "options", "base_url", "region"),
    [
        ("bucket", {}, "https://bucket.s3.amazonaws.com/", "us-east-1"),
        ("bucket", {"region": "eu-west-1"}, "https://bucket.s3.eu-west-1.amazonaws.com/", None),
        (
            "dot.ted",
            {"region": "cn-north-1"},
            "https://s3.cn-north-1.amazonaws.com.cn/dot.ted/",
            None,
        ),
        ("b", {"endpoint_url": "https://h:9000/base"}, "https://h:9000/base/b/", "us-east-1"),
        ("b", {"preset": "tigris"}, "https://t3.storage.dev/b/", "auto"),
    ],
)
def test_the_bucket_is_where_botocore_says(
    bucket: str, options: dict[str, Any], base_url: str, region: str | None
) -> None:
    """Partitions, dots in names, paths of endpoints: one place knows them."""
    preset = options.pop("preset", None)
    given = {"anonymous": True, **options}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        wiring = prepare(make_options(preset, given), bucket)
    assert (wiring.route.base_url, wiring.route.region) == (base_url, region or options["region"])


def test_the_prefix_counts_for_the_length_of_a_key() -> None:
    """Options that S3 would refuse are refused before anything is sent."""
    place = place_of("s3://bucket/a/prefix/")
    assert place.prefix == "a/prefix/"
    assert place.full("x" * 1000) == "a/prefix/" + "x" * 1000
    with pytest.raises(InvalidObjectKeyError, match="prefix"):
        place.full("x" * 1020)


@pytest.mark.filterwarnings("ignore::EncodingWarning")  # botocore reads files without one
@pytest.mark.parametrize("source", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "profile"])
async def test_a_plain_endpoint_is_allowed_wherever_it_comes_from(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option, the environment and the configuration of AWS have one rule."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    options: dict[str, Any] = {"region": "us-east-1", "anonymous": True}
    if source == "profile":
        config = tmp_path / "config"
        lines = (
            "[profile lab]",
            "endpoint_url = http://127.0.0.1:9",
            "aws_access_key_id = id",
            f"aws_secret_access_key = {SECRET}",
        )
        config.write_text("\n".join(lines), encoding="utf-8")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        options = {"region": "us-east-1", "profile": "lab"}
    else:
        monkeypatch.setenv(source, "http://127.0.0.1:9")
    with pytest.raises(InvalidInputError, match="allow_http=True") as caught:
        async with open_storage("s3://bucket", **options) as storage:
            await storage.get("key")
    assert caught.value.context["option"] == "allow_http"
    with pytest.raises(UnreachableError):  # nobody listens there, but it was asked
        async with open_storage("s3://bucket", allow_http=True, **options) as storage:
            await storage.get("key")


@pytest.mark.parametrize(
    ("secret", "shown"),
    [
        ("b", "no bucket b2 for ***, and ***."),
        ("bucket", "no *** b2 for b, and b."),
        ("longsecret", "no bucket b2 for b, and b."),
    ],
)
def test_short_secrets_do_not_mask_parts_of_words(secret: str, shown: str) -> None:
    """As test servers have them: 'no ***ucket' would help nobody."""
    assert redact("no bucket b2 for b, and b.", S3Credentials("id", secret)) == shown


def test_long_secrets_are_masked_anywhere() -> None:
    """Also if a server repeats them within other text."""
    text = redact("x=longsecret1y", S3Credentials("id", "longsecret1"))
    assert text == "x=***y"
