"""Checksums of bodies, in the headers by which S3 checks what it received."""

from __future__ import annotations

import base64
import hashlib
import zlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    type Buffer = bytes | memoryview

__all__ = ["CHECKSUMS", "checksum_header", "content_sha256"]


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
