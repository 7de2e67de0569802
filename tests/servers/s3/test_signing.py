"""Our signatures equal those of botocore for any request."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from unittest.mock import patch

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async_s3 import S3Credentials
from icechunk_async_s3.signing import content_sha256, encode_key, encode_query, sign

KEYS = st.text(
    st.sampled_from("ab/ %+~.-_*'()!@$&=:;,?#[]\\\"<>|^`{}é日😀\x7f")
    | st.characters(codec="utf-8"),
    min_size=1,
).filter(lambda key: "\0" not in key)
WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40).map(str.strip)
NAMES = st.from_regex(r"x-amz-(meta-)?[a-z0-9]{1,12}", fullmatch=True) | st.sampled_from(
    ["range", "if-match", "if-none-match", "x-amz-request-payer", "x-amz-storage-class"]
)
NOT_HEADERS = {"x-amz-date", "x-amz-content-sha256", "x-amz-security-token"}


@given(
    method=st.sampled_from(["GET", "PUT", "HEAD"]),
    key=KEYS,
    query=st.lists(st.tuples(WORDS | KEYS, st.text(st.characters(codec="utf-8"))), max_size=4),
    headers=st.dictionaries(NAMES.filter(lambda it: it not in NOT_HEADERS), VALUES, max_size=5),
    body=st.binary(max_size=200),
    keys=st.tuples(WORDS, WORDS, st.none() | WORDS),
    region=st.sampled_from(["us-east-1", "eu-central-1", "auto"]),
    now=st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),
)
def test_signatures_are_those_of_botocore(
    *,
    method: str,
    key: str,
    query: list[tuple[str, str]],
    headers: dict[str, str],
    body: bytes,
    keys: tuple[str, str, str | None],
    region: str,
    now: datetime,
) -> None:
    """On random keys, queries, headers, bodies, credentials, regions and times."""
    path, text = f"/bucket/{encode_key(key)}", encode_query(query)
    theirs: Any = AWSRequest(
        method, f"https://host.example:9000{path}{'?' if text else ''}{text}", dict(headers), body
    )
    with patch("botocore.auth.get_current_datetime", return_value=now.replace(tzinfo=None)):
        S3SigV4Auth(ReadOnlyCredentials(*keys), "s3", region).add_auth(theirs)
    ours = sign(
        method,
        path,
        text,
        {"host": "host.example:9000", **headers},
        payload=content_sha256(body),
        credentials=S3Credentials(*keys),
        region=region,
        now=now,
    )
    assert ours["authorization"] == theirs.headers["Authorization"]
    assert ours["x-amz-date"] == theirs.headers["X-Amz-Date"]
