"""Secrets of a configuration are veiled wherever people see it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from icechunk_async import RepositoryConfig, sync
from icechunk_async.engine.virtual.chunks import VirtualLocations, settle_grants
from icechunk_async.errors import FormatError, IcechunkError, InvalidConfigError
from icechunk_async.format.config import (
    AzureStore,
    GcsStore,
    HttpStore,
    S3Options,
    S3Store,
    VirtualChunkContainer,
)
from icechunk_async.format.config.codec import config_from_json, config_to_json, decode_config
from icechunk_async.format.config.secrets import is_veiled, veiled_document, veiled_url

HTTP = HttpStore({"token": "hush", "timeout": "3s"}, {"Authorization": "hush"})
CONTAINERS = (
    VirtualChunkContainer("https://me:hush@host/", HTTP),
    VirtualChunkContainer("https://you:hush@host/", HTTP),
    VirtualChunkContainer("gs://bucket/", GcsStore({"service_account_key": "hush"})),
    VirtualChunkContainer("az://b/", AzureStore({"account": "mine", "account_key": "hush"})),
    VirtualChunkContainer("s3://b/", S3Store(S3Options(endpoint_url="http://me:hush@host"))),
)
CONFIG = RepositoryConfig(virtual_chunk_containers=CONTAINERS)


def test_displays_show_names_and_a_marker_in_place_of_secrets() -> None:
    """That a secret is set can be seen; so can what is no secret."""
    facade = sync.RepositoryConfig.from_native(CONFIG)
    native = repr(CONFIG)
    assert (
        "HttpStore({'token': '****', 'timeout': '3s'}, headers={'Authorization': '****'})" in native
    )
    assert "AzureStore({'account': 'mine', 'account_key': '****'})" in native
    html: Any = getattr(facade, "_repr_html_")  # noqa: B009 - as notebooks ask
    shown = [native, repr(facade), str(facade), html(), str(config_shown())]
    for text in shown:
        assert "hush" not in text
        assert "****" in text
    assert [text for text in shown if "mine" not in text] == []


def config_shown() -> object:
    """Return the document that the command prints."""
    return veiled_document(config_to_json(CONFIG))


def test_veiled_document_shows_all_containers() -> None:
    """Those that differ only in what is veiled are told apart."""
    shown = veiled_document(config_to_json(CONFIG))["virtual_chunk_containers"]
    assert isinstance(shown, dict)
    assert len(shown) == len(CONTAINERS)
    assert is_veiled(shown)
    assert not is_veiled(config_to_json(CONFIG))
    assert veiled_document(config_to_json(RepositoryConfig())) == config_to_json(RepositoryConfig())


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:hush@host/a@b/", "https://****@host/a@b/"),
        ("https://me:hu@sh@host/", "https://****@host/"),
        ("s3://bucket/a@b/", "s3://bucket/a@b/"),
        ("file:///a/b@c/", "file:///a/b@c/"),
        ("plain", "plain"),
    ],
)
def test_only_users_and_passwords_of_urls_are_veiled(url: str, shown: str) -> None:
    """An ``@`` in a path is part of a name."""
    assert veiled_url(url) == shown


def test_errors_and_logs_hold_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    """Neither in the message nor in the context."""
    raised: list[IcechunkError] = []
    twice = config_to_json(CONFIG)
    for attempt in (
        lambda: VirtualLocations(CONTAINERS).resolve("https://me:hush@other/x"),
        lambda: VirtualLocations(CONTAINERS).normalize("file://me:hush@host/x"),
        lambda: settle_grants([it.url_prefix for it in CONTAINERS], {"https://me:hush@no": None}),
        lambda: RepositoryConfig(virtual_chunk_containers=CONTAINERS[:1] * 2),
        lambda: VirtualChunkContainer("https://me:hush@host", HTTP),
        lambda: config_from_json({"virtual_chunk_containers": "hush"}),
        lambda: decode_config(b"? https://me:hush@h\n: 1\n? https://me:hush@h\n: 2\n", 1),
    ):
        with pytest.raises(IcechunkError) as caught:
            attempt()
        raised.append(caught.value)
    assert {type(it) for it in raised} > {FormatError, InvalidConfigError}
    assert isinstance(twice["virtual_chunk_containers"], dict)
    for it in twice["virtual_chunk_containers"].values():
        assert isinstance(it, dict)
        it["store"] = {"http": {"headers": {"Authorization": ["hush"]}, "key": ["hush"]}}
    with caplog.at_level(logging.DEBUG):
        config_from_json(twice)
    assert "skipped entry" in caplog.text
    assert "hush" not in caplog.text
    assert "hush" not in "".join(f"{it} {it.context}" for it in raised)
