"""Translate errors of service and network to the errors of the library."""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, cast

import aiohttp

from icechunk_async.errors import (
    BucketNotFoundError,
    ExpiredCredentialsError,
    NameResolutionError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    StorageUnavailableError,
    ThrottledError,
    TLSError,
    UnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NETWORK_ERRORS", "Refused", "never_sent", "not_reached", "refusal"]

NETWORK_ERRORS: Final = (aiohttp.ClientError, TimeoutError, OSError, ssl.SSLError)
"""The exceptions of a request without a reply."""

# Some quotas answer 403, where 429 would say it.
_BUSY_REASONS: Final = {
    *("rateLimitExceeded", "userRateLimitExceeded", "quotaExceeded", "slowDown"),
}


@dataclass(frozen=True, slots=True)
class Refused:
    """An error reply, as far as it can be parsed."""

    status: int
    headers: Mapping[str, str]
    reason: str
    message: str

    @classmethod
    def read(cls, status: int, headers: Mapping[str, str], body: bytes) -> Refused:
        """Parse the error document, or the bare message that media downloads get."""
        text = body.decode(errors="replace").strip()
        reason, message = "", text
        try:
            document: Any = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        whole = cast("dict[str, Any]", document) if isinstance(document, dict) else {}
        error: Any = whole.get("error")
        if isinstance(error, dict):
            found = cast("dict[str, Any]", error)
            message = str(found.get("message", ""))
            details = found.get("errors")
            if isinstance(details, list) and details and isinstance(details[0], dict):
                reason = str(cast("dict[str, Any]", details[0]).get("reason", ""))
        return cls(status, headers, reason, " ".join(message.split())[:300])

    @property
    def bucket_missing(self) -> bool:
        """Return whether the bucket is missing rather than the object."""
        # A missing bucket and a missing object are both 404: only the words differ.
        text = self.message.lower()
        return self.status == 404 and "bucket" in text and "does not exist" in text


def refusal(refused: Refused, what: str, bucket: str, key: str | None) -> StorageError:
    """Return the error for a request that was answered with one.

    Args:
        refused: the reply.
        what: the operation, such as ``read 'repo'``.
        bucket: where.
        key: of the object, where it is about one.
    """
    said = f"{refused.status} {refused.message}".strip()
    asked = f"Could not {what} in gs://{bucket}"
    context: dict[str, object] = {"bucket": bucket}
    if key is not None:
        context["key"] = key
    match refused.status:
        case 401:
            return _unauthorized(asked, said, context)
        case 403 if refused.reason in _BUSY_REASONS:
            return _throttled(asked, said, refused.headers, context)
        case 403:
            return PermissionDeniedError(
                f"{asked}: the service denies it ({said}). Give the account the role 'Storage "
                "Object User' on the bucket, or use another account.",
                **context,
            )
        # Requests without a key, such as listings, are about the bucket.
        case 404 if refused.bucket_missing or key is None:
            return BucketNotFoundError(
                f"{asked}: the bucket {bucket!r} does not exist. Check its name, or create it.",
                **context,
            )
        case 404:
            return ObjectNotFoundError(f"There is no object {key!r} in gs://{bucket}.", **context)
        # Of writes a 503 leaves doubt, which is settled before this is asked (`Reply.in_doubt`).
        case 429 | 503:
            return _throttled(asked, said, refused.headers, context)
        case status if status >= 500 or status == 408:
            return StorageUnavailableError(
                f"{asked}: the service failed with {said}. Try again later.",
                status=status,
                **context,
            )
        case status:
            return StorageError(
                f"{asked}: the service answered {said}. Check the options and the bucket.",
                status=status,
                **context,
            )


def _unauthorized(asked: str, said: str, context: dict[str, object]) -> StorageError:
    # The service names its anonymous caller, and has no code for it.
    if "anonymous" in said.lower():
        return PermissionDeniedError(
            f"{asked}: the service wants to know who asks ({said}). Give credentials with "
            "token=..., instead of 'anonymous'.",
            **context,
        )
    return ExpiredCredentialsError(
        f"{asked}: the service no longer accepts the credentials ({said}). Renew them; a function "
        "as token=... is asked for new ones by itself.",
        **context,
    )


def _throttled(
    asked: str, said: str, headers: Mapping[str, str], context: dict[str, object]
) -> StorageError:
    seconds = _retry_after(headers.get("Retry-After"))
    if seconds is not None:
        context["retry_after_seconds"] = seconds
    return ThrottledError(
        f"{asked}: the service asks to slow down ({said}). Send fewer requests at a time.",
        **context,
    )


def _retry_after(value: str | None) -> float | None:
    """Return the pause in seconds, given as a number or as a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(value)
        if when.utcoffset() is None:
            when = when.replace(tzinfo=UTC)
        return max(0.0, (when - datetime.now(UTC)).total_seconds())
    except (ValueError, OverflowError):  # a year that no clock has
        return None


def never_sent(error: BaseException) -> bool:
    """Return whether a request failed before any of it was sent."""
    return isinstance(
        error,
        aiohttp.ClientConnectorError
        | aiohttp.ClientConnectorCertificateError
        | aiohttp.ConnectionTimeoutError,
    )


def not_reached(error: BaseException, what: str, bucket: str, host: str) -> StorageError:
    """Return the error for a request without a reply.

    Args:
        error: the exception of the HTTP client.
        what: the operation, such as ``read 'repo'``.
        bucket: where.
        host: scheme, host and port of the request.
    """
    asked = f"Could not {what} in gs://{bucket}"
    match error:
        case aiohttp.ClientConnectorDNSError():
            return NameResolutionError(
                f"{asked}: the host of {host} has no address. Check endpoint_url and the network.",
                bucket=bucket,
                host=host,
            )
        case (
            aiohttp.ClientConnectorCertificateError()
            | aiohttp.ClientConnectorSSLError()
            | ssl.SSLError()
        ):
            problem = str(getattr(error, "certificate_error", None) or error)[:300]
            return TLSError(
                f"{asked}: no secure connection to {host} ({problem}). Check that it is the right "
                "host, that it speaks TLS, and that its certificate is trusted here "
                "(SSL_CERT_FILE).",
                bucket=bucket,
                host=host,
            )
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            problem = "no connection in time" if isinstance(error, TimeoutError) else "refused"
            return UnreachableError(
                f"{asked}: {host} cannot be reached ({problem}). Check endpoint_url, the network "
                "and whether the service runs.",
                bucket=bucket,
                host=host,
            )
        case TimeoutError() | asyncio.TimeoutError():
            return UnreachableError(
                f"{asked}: {host} did not answer in time. Try again, or allow more with "
                "read_timeout_seconds.",
                bucket=bucket,
                host=host,
            )
        case _:
            return StorageUnavailableError(
                f"{asked}: the connection to {host} broke ({type(error).__name__}). Try again.",
                bucket=bucket,
                host=host,
            )
