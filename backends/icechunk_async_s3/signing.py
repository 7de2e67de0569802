"""Signature version 4 of AWS for requests to S3: pure, and with the day's key remembered."""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from icechunk_async_s3.keys import S3Credentials

__all__ = ["EMPTY_SHA256", "UNSIGNED_PAYLOAD", "encode_key", "encode_query", "sign"]

EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()
UNSIGNED_PAYLOAD: Final = "UNSIGNED-PAYLOAD"
"""Stands for the body's digest where TLS and a checksum protect the body."""

_ALGORITHM: Final = "AWS4-HMAC-SHA256"


@lru_cache(maxsize=4096)
def encode_key(key: str) -> str:
    """Return a key as it stands in the path of a URL."""
    return quote(key, safe="/~")


def encode_query(parameters: Iterable[tuple[str, str]]) -> str:
    """Return a query string in the order and form in which it is signed."""
    pairs = sorted((quote(name, safe="~"), quote(value, safe="~")) for name, value in parameters)
    return "&".join(f"{name}={value}" for name, value in pairs)


def sign(
    method: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    *,
    payload: str,
    credentials: S3Credentials,
    region: str,
    now: datetime,
) -> dict[str, str]:
    """Return ``headers`` with those added that prove who sends the request.

    Args:
        method: the verb, in capitals.
        path: path of the URL as it is sent, see :func:`encode_key`.
        query: see :func:`encode_query`.
        headers: all that are to be signed, ``host`` among them; names in lower case.
        payload: hexadecimal SHA-256 of the body, or :data:`UNSIGNED_PAYLOAD`.
        credentials: whose request it is.
        region: where the bucket is.
        now: time of the request, aware, UTC.
    """
    moment = _shown(now.replace(microsecond=0))
    signed = {**headers, "x-amz-content-sha256": payload, "x-amz-date": moment}
    if credentials.session_token is not None:
        signed["x-amz-security-token"] = credentials.session_token
    names = sorted(signed)
    listed = ";".join(names)
    lines = "".join([f"{name}:{' '.join(signed[name].split())}\n" for name in names])
    request = f"{method}\n{path}\n{query}\n{lines}\n{listed}\n{payload}"
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = f"{_ALGORITHM}\n{moment}\n{scope}\n{digest}"
    key = _key_of_day(credentials.secret_access_key, moment[:8], region)
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    signed["authorization"] = (
        f"{_ALGORITHM} Credential={credentials.access_key_id}/{scope}, "
        f"SignedHeaders={listed}, Signature={signature}"
    )
    return signed


@lru_cache(maxsize=4)
def _shown(second: datetime) -> str:
    """Return a time as it is signed; formatting it takes as long as the signature itself."""
    return second.strftime("%Y%m%dT%H%M%SZ")


@lru_cache(maxsize=16)
def _key_of_day(secret: str, day: str, region: str) -> bytes:
    """Derive what signs all requests of one day; a few keys, since credentials change."""
    key = f"AWS4{secret}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key
