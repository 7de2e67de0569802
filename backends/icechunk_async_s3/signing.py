"""The signer: signature version 4 of AWS, digests and checksums of request bodies. Pure.

The library signs requests itself because the stock client spends several times the processor time
of the HTTP library below it on each request, most of it in signing and serialising; see
`transport`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime

    from icechunk_async_s3.credentials import S3Credentials

    type Buffer = bytes | memoryview

__all__ = [
    "CHECKSUMS",
    "EMPTY_SHA256",
    "UNSIGNED_PAYLOAD",
    "checksum_header",
    "content_sha256",
    "encode_key",
    "encode_query",
    "sign",
]

EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()
UNSIGNED_PAYLOAD: Final = "UNSIGNED-PAYLOAD"
"""Stands for the body's digest where TLS and a checksum protect the body."""

_ALGORITHM: Final = "AWS4-HMAC-SHA256"


@lru_cache(maxsize=4096)
def encode_key(key: str) -> str:
    """Return a key as it stands in the path of a URL."""
    # Encoded once, also in the signature: S3 differs here from other services of AWS, which encode
    # the path twice.
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
    """Return ``headers`` with the headers of the signature added.

    Args:
        method: the verb, in capitals.
        path: path of the URL as it is sent, see `encode_key`.
        query: see `encode_query`.
        headers: all that are to be signed, ``host`` among them; names in lower case.
        payload: hexadecimal SHA-256 of the body, or `UNSIGNED_PAYLOAD`.
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
    # Signed with single spaces, as the service folds them before it compares.
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
    """Format a time for the signature; formatting takes as long as the signature itself."""
    return second.strftime("%Y%m%dT%H%M%SZ")


@lru_cache(maxsize=16)
def _key_of_day(secret: str, day: str, region: str) -> bytes:
    """Derive the signing key of one day; a few are kept, because credentials change."""
    key = f"AWS4{secret}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def _crc32(body: Buffer) -> bytes:
    return zlib.crc32(body).to_bytes(4, "big")


def _crc32c(body: Buffer) -> bytes:
    from google_crc32c import value  # noqa: PLC0415 - a driver's, needed by few

    return value(bytes(body)).to_bytes(4, "big")


CHECKSUMS: Final[Mapping[str, Callable[[Buffer], bytes]]] = {
    "crc32": _crc32,
    "crc32c": _crc32c,
    "sha1": lambda body: hashlib.sha1(body, usedforsecurity=False).digest(),
    "sha256": lambda body: hashlib.sha256(body).digest(),
}
"""By the name of the option: the digest of a body."""


def checksum_header(algorithm: str, body: Buffer) -> tuple[str, str]:
    """Return name and value of the header that carries a checksum."""
    return f"x-amz-checksum-{algorithm}", base64.b64encode(CHECKSUMS[algorithm](body)).decode()


def content_sha256(body: Buffer) -> str:
    """Return the digest that a signature covers."""
    return hashlib.sha256(body).hexdigest()
