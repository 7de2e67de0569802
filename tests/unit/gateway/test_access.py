"""Access by tokens; a denied request reads no byte."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from icechunk_async.errors import InvalidInputError
from icechunk_async.gateway import Grant, app, read_grants
from tests.unit.gateway.client import ask

if TYPE_CHECKING:
    from tests.unit.gateway.conftest import Served

ANNA, BEN, OPERATOR = "anna-0123456789abcdef", "ben-0123456789abcdef", "op-0123456789abcdef"
GRANTS = [
    Grant("anna", ANNA, paths=["/g"], refs=["branch.main", "tag.*"]),
    Grant("ben", BEN, paths=["air", "/v/"], refs=["branch.*"]),
    Grant("operator", OPERATOR),
]


async def test_a_token_opens_paths_and_refs(served: Served) -> None:
    """Each with all below it; nothing beside it, and no snapshot by its id through a branch."""
    gateway = app(served.repository, grants=GRANTS)
    first = str(served.first)
    for token, target, status in [
        (ANNA, "/@branch.main/g/zarr.json", 200),
        (ANNA, "/@branch.main/g/small/c/0", 200),
        (ANNA, "/@tag.v1/g/small/c/0", 200),
        (ANNA, f"/@{first}/g/small/c/0", 403),
        (ANNA, "/@branch.main/zarr.json", 403),
        (ANNA, "/@branch.main/air/c/0", 403),
        (ANNA, "/@branch.other/g/zarr.json", 403),
        (ANNA, "/", 403),
        (BEN, "/@branch.main/air/c/0", 200),
        (BEN, "/@branch.main/v/zarr.json", 200),
        (BEN, "/@branch.main/airport/zarr.json", 403),
        (BEN, "/@tag.v1/air/c/0", 403),
        (OPERATOR, f"/@{first}/zarr.json", 200),
        (OPERATOR, "/@branch.main/v/c/0", 200),
    ]:
        answer = await ask(gateway, target, authorization=f"Bearer {token}")
        assert answer.status == status, (token, target)


async def test_what_is_denied_reads_no_byte(served: Served) -> None:
    """Neither the ref nor the snapshot is looked up, also for HEAD and ranges."""
    gateway = app(served.repository, grants=GRANTS)
    target = "/@branch.main/air/c/0"
    for method in ("GET", "HEAD"):
        for given, status in [
            ([], 401),
            (["Bearer wrong"], 401),
            ([f"Basic {OPERATOR}"], 401),
            ([OPERATOR], 401),
            ([f"Bearer {ANNA}"], 403),
        ]:
            headers = [("authorization", it) for it in given]
            answer = await ask(gateway, target, method, headers=headers, range="bytes=0-1")
            assert answer.status == status
            assert (status == 401) == ("www-authenticate" in answer.headers)
    assert served.storage.requests == {}
    allowed = await ask(gateway, target, authorization=f"bearer {BEN}")
    assert allowed.status == 200
    assert served.storage.requests["get"] > 0


async def test_replies_to_tokens_are_private(served: Served) -> None:
    """No shared cache gives them to others."""
    gateway = app(served.repository, grants=GRANTS, cors=["https://maps.example"])
    answer = await ask(
        gateway,
        "/@tag.v1/air/c/0",
        authorization=f"Bearer {OPERATOR}",
        origin="https://maps.example",
    )
    assert answer.headers["cache-control"] == "private, max-age=31536000, immutable"
    assert answer.headers["vary"] == "Authorization, Origin"


async def test_a_part_can_be_public(served: Served) -> None:
    """A grant without a token is everybody's, also of those who have one."""
    gateway = app(served.repository, grants=[*GRANTS, Grant("public", None, paths=["/v"])])
    assert (await ask(gateway, "/@branch.main/v/c/0")).status == 200
    assert (await ask(gateway, "/@branch.main/air/c/0")).status == 401
    answer = await ask(gateway, "/@branch.main/v/c/0", authorization=f"Bearer {ANNA}")
    assert answer.status == 200


async def test_the_access_log_tells_who_read_what(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """A line for each request, also for those that were denied; never a token."""
    gateway = app(served.repository, grants=GRANTS)
    with caplog.at_level(logging.INFO, "icechunk_async.gateway.access"):
        await ask(gateway, "/@branch.main/g/small/c/0", authorization=f"Bearer {ANNA}")
        await ask(gateway, "/@branch.main/air/c/0%0a", authorization=f"Bearer {ANNA}x")
        await ask(gateway, "/@branch.main/air/c/0", authorization=f"Bearer {ANNA}")
    allowed, denied, forbidden = caplog.records
    assert denied.getMessage().startswith("- GET ")
    assert forbidden.getMessage().startswith("anna GET /@branch.main/air/c/0 403 ")
    assert vars(allowed) | {
        "principal": "anna",
        "target": "/@branch.main/g/small/c/0",
        "status": 200,
        "sent_bytes": 4,
        "snapshot": str(served.tip),
    } == vars(allowed)
    assert allowed.getMessage().startswith("anna GET /@branch.main/g/small/c/0 200 4 B ")
    assert "\n" not in denied.getMessage()
    assert ANNA not in caplog.text


def test_grants_are_read_from_a_document() -> None:
    """Fields have the defaults of `Grant`."""
    text = f"""
[[grant]]
principal = "a"
token = "{ANNA}"
paths = ["x/"]

[[grant]]
principal = "b"
"""
    first, second = read_grants(text, "file")
    assert (first.principal, first.token, first.paths, first.refs) == ("a", ANNA, ("/x",), ("*",))
    assert second.token is None
    assert ANNA not in repr(first)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no grants"),
        ("x", "not a TOML document"),
        ("grant = 3", "no grants"),
        ("[[grant]]\ntoken = 'abc'", "no principal"),
        ("[[grant]]\nprincipal = 'a'\npath = ['/']", "unknown field 'path'"),
        ("[[grant]]\nprincipal = 'a'\npaths = '/'", "not a list of texts"),
        ("[[grant]]\nprincipal = 'a'\npaths = ['a//b']", "not a node path"),
        ("[[grant]]\nprincipal = 'a'\nrefs = []", "not empty"),
        ("[[grant]]\nprincipal = 'a'\ntoken = 'short'", "fewer than 16"),
        ("[[grant]]\nprincipal = 'a'\ntoken = 'sixteen letters and blanks'", "HTTP cannot carry"),
        ("[[grant]]\nprincipal = 'a'\ntoken = 3", "no text"),
        ("other = 1\n[[grant]]\nprincipal = 'a'", "more than these"),
    ],
)
def test_a_bad_document_is_refused_in_a_sentence(text: str, words: str) -> None:
    """It says what is wrong, and no token."""
    with pytest.raises(InvalidInputError, match=words):
        read_grants(text, "file")


async def test_two_principals_cannot_share_a_token(served: Served) -> None:
    """The access log could not tell them apart; one may have several grants."""
    with pytest.raises(InvalidInputError, match="the same token"):
        app(served.repository, grants=[Grant("a", ANNA), Grant("b", ANNA)])
    app(served.repository, grants=[Grant("a", ANNA, ["/g"]), Grant("a", ANNA, ["/v"], ["tag.*"])])
