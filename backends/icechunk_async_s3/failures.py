"""Translate errors of servers and drivers to the errors of the library."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import unescape
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from botocore import exceptions as botocore_errors

from icechunk_async.errors import (
    BucketNotFoundError,
    ClockSkewError,
    ExpiredCredentialsError,
    IcechunkError,
    InvalidInputError,
    InvalidObjectKeyError,
    NameResolutionError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
    ThrottledError,
    TLSError,
    UnreachableError,
    WrongRegionError,
)
from icechunk_async_s3.credentials import redact

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async_s3.credentials import S3Credentials
    from icechunk_async_s3.options import Place

__all__ = ["LostReplyError", "Refusal", "explain", "lost", "not_sent", "of_driver"]

# With a bound: a hostile server cannot fill messages and logs.
_ELEMENT: Final = re.compile(r"<(Code|Message|Region|Endpoint|ServerTime)>([^<]{0,600})</")
# A server, or one that replies in its place, must not stop a client for days.
_LONGEST_PAUSE_SECONDS: Final = 3600.0

EXPIRED: Final = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
_THROTTLED: Final = frozenset(
    {
        *("SlowDown", "SlowDownRead", "SlowDownWrite", "TooManyRequests", "ServiceUnavailable"),
        *("RequestLimitExceeded", "BandwidthLimitExceeded", "Throttling", "ThrottlingException"),
        *("RequestThrottled", "ProvisionedThroughputExceededException", "Busy"),
    }
)
# BadDigest and IncompleteBody: bytes were damaged or lost on the way, and another try sends them
# again.
_PASSING: Final = frozenset(
    {
        *("InternalError", "RequestTimeout", "OperationAborted", "ConditionalRequestConflict"),
        *("XMinioServerNotInitialized", "BadDigest", "IncompleteBody"),
    }
)
_REGION: Final = frozenset(
    {
        *("PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed"),
        *("IllegalLocationConstraintException", "IncorrectEndpoint"),
    }
)
_FULL: Final = frozenset(
    {
        *("QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "StorageFull"),
        *("XMinioAdminBucketQuotaExceeded", "EntityTooLargeForQuota"),
    }
)
_ADVICE: Final = {
    "InvalidAccessKeyId": "The server does not know this access key: correct access_key_id, and "
    "check that endpoint_url is the right server.",
    "SignatureDoesNotMatch": "The secret does not belong to the access key: correct "
    "secret_access_key.",
    "InvalidToken": "The session token is malformed or not of these keys: correct session_token.",
    "AccessDenied": "Allow the user this operation in the policy of the bucket or of the user; "
    "without permission to list, S3 also refuses to say that an object is missing.",
    "InvalidObjectState": "The object is archived. Restore it, and keep repositories in a storage "
    "class that can be read at once.",
}
_UNSIGNED: Final = (
    "The request was not signed, since the storage was opened with anonymous=True, and the bucket "
    "does not allow everybody this operation: leave anonymous out, and give credentials."
)


class LostReplyError(Exception):
    """A request was sent and no complete reply came. Never leaves the backend."""

    def __init__(self, what: str, *, timed_out: bool = False) -> None:
        """Store a description without secrets."""
        super().__init__(what)
        self.timed_out = timed_out

    def as_read(self, asked: str, place: Place) -> StorageUnavailableError:
        """Return the error for a request that changes nothing."""
        kind = UnreachableError if self.timed_out else StorageUnavailableError
        return kind(
            f"{asked} {place.url!r}: the connection broke before the answer was complete ({self}). "
            "Try again.",
            url=place.url,
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """A complete reply that refuses the request."""

    status: int
    code: str
    message: str
    region: str | None = None
    retry_after_seconds: float | None = None
    server_time: str | None = None

    @classmethod
    def of_reply(
        cls,
        status: int,
        headers: Mapping[str, str],
        body: bytes | memoryview,
        keys: S3Credentials | None,
    ) -> Refusal:
        """Parse a reply of the hot path; the body may be empty or not XML."""
        # Error documents are short; a body of gigabytes must not be decoded for one.
        text = bytes(body[:8192]).decode("utf-8", "replace")
        found = {match[1]: unescape(match[2]) for match in _ELEMENT.finditer(text)}
        return cls(
            status,
            found.get("Code", ""),
            redact(found.get("Message", ""), keys)[:300],
            headers.get("x-amz-bucket-region") or found.get("Region"),
            _seconds(headers.get("retry-after")),
            found.get("ServerTime") or headers.get("date"),
        )

    @classmethod
    def of_client_error(
        cls, error: botocore_errors.ClientError, keys: S3Credentials | None
    ) -> Refusal:
        """Convert a reply that aiobotocore has parsed."""
        details: dict[str, Any] = error.response.get("Error", {})
        metadata: dict[str, Any] = error.response.get("ResponseMetadata", {})
        headers: dict[str, str] = metadata.get("HTTPHeaders", {})
        code = str(details.get("Code", ""))
        return cls(
            int(metadata.get("HTTPStatusCode", 0)) or (int(code) if code.isdecimal() else 0),
            "" if code.isdecimal() else code,
            redact(str(details.get("Message", "")), keys)[:300],
            headers.get("x-amz-bucket-region") or details.get("Region"),
            _seconds(headers.get("retry-after")),
            details.get("ServerTime") or headers.get("date"),
        )

    @property
    def is_expired(self) -> bool:
        """Return whether other credentials would be accepted."""
        return self.code in EXPIRED

    @property
    def is_full(self) -> bool:
        """Return whether the server is full; then it has not written anything."""
        return self.code in _FULL or self.status == 507

    @property
    def is_doubtful(self) -> bool:
        """Return whether the change may have been applied all the same.

        An error inside a 200, which botocore reports as a 500, came after the work started: then
        even throttling leaves doubt.
        """
        if self.is_full:
            return False
        return self.status in (200, 500) or (self.status > 500 and not self.is_throttling)

    @property
    def is_throttling(self) -> bool:
        """Return whether the server rejected the request unread; a bare 503 does not say so."""
        return self.status == 429 or self.code in _THROTTLED

    @property
    def said(self) -> str:
        """The server's words, for a message."""
        words = " ".join(filter(None, (self.code, self.message and f"({self.message})")))
        return f"{self.status} {words}".strip()


def _seconds(value: str | None) -> float | None:
    """Read ``Retry-After``; a date in it is left out, since clocks differ."""
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds <= _LONGEST_PAUSE_SECONDS else None


def explain(refusal: Refusal, asked: str, place: Place, *, key: str | None = None) -> IcechunkError:
    """Return the error for a refusal of anything but a condition.

    Args:
        refusal: the server's reply.
        asked: beginning of the sentence, such as ``"reading 'key' in"``.
        place: where it was asked.
        key: of the object that it was about.
    """
    code, status, said = refusal.code, refusal.status, refusal.said
    head = f"{asked} {place.url!r}: the server answered {said}."
    context: dict[str, object] = {"url": place.url, "code": code, "status": status}
    if key is not None:
        context["key"] = key
    # Codes come before statuses, in which servers that speak the protocol differ more.
    if code == "NoSuchBucket":
        return BucketNotFoundError(
            f"{head} There is no bucket {place.bucket!r}; create it, or correct the URL.",
            bucket=place.bucket,
            **context,
        )
    # S3 redirects to another region without saying where, and nothing here follows redirects: the
    # signature is for one host.
    if code in _REGION or status in (301, 307, 308):
        advice = f"Pass region={refusal.region!r}." if refusal.region else "Pass region=."
        return WrongRegionError(
            f"{head} The bucket {place.bucket!r} is elsewhere. {advice}",
            region=refusal.region,
            **context,
        )
    if code == "KeyTooLongError":
        return InvalidObjectKeyError(f"{head} Use shorter names.", **context)
    if refusal.is_full:
        return StorageFullError(f"{head} Make room, or raise the quota.", **context)
    if code in _THROTTLED or status in (429, 503):
        if refusal.retry_after_seconds is not None:
            context["retry_after_seconds"] = refusal.retry_after_seconds
        return ThrottledError(f"{head} Send fewer requests at a time, or wait.", **context)
    if code in _PASSING or status >= 500:
        return StorageUnavailableError(f"{head} Try again.", **context)
    if status == 404:
        return ObjectNotFoundError(f"{head} There is no object {key!r}.", **context)
    return _explain_denial(refusal, head, context, is_signed=place.is_signed)


def _explain_denial(
    refusal: Refusal, head: str, context: dict[str, object], *, is_signed: bool
) -> IcechunkError:
    code = refusal.code
    if refusal.is_expired:
        return ExpiredCredentialsError(
            f"{head} The credentials have expired: get new ones, or pass credentials= a function "
            "that does.",
            **context,
        )
    if code in ("RequestTimeTooSkewed", "RequestExpired"):
        clock = f" (it is {refusal.server_time} there)" if refusal.server_time else ""
        return ClockSkewError(
            f"{head} The clock of this machine is too far from the server's{clock}: correct it.",
            **context,
        )
    if code in _ADVICE or refusal.status in (401, 403):
        advice = _ADVICE.get(code, _ADVICE["AccessDenied"])
        if not is_signed and advice is _ADVICE["AccessDenied"]:
            advice = _UNSIGNED
        return PermissionDeniedError(f"{head} {advice}", **context)
    return StorageError(f"{head} See the server's documentation of that answer.", **context)


def not_sent(error: BaseException, asked: str, place: Place) -> IcechunkError | None:
    """Return the error for a request that was never sent, or None if it may have been."""
    head = f"{asked} {place.url!r}"
    host = getattr(error, "host", None) or "the server"
    # The order counts: in aiohttp errors of TLS and of names are kinds of connector errors.
    match error:
        case aiohttp.ClientSSLError() | aiohttp.ClientConnectorCertificateError():
            return TLSError(
                f"{head}: no secure connection to {host} ({_cause(error)}). Check the host's "
                "certificate and endpoint_url; name your own authority in AWS_CA_BUNDLE.",
                url=place.url,
            )
        case aiohttp.ClientConnectorDNSError():
            return NameResolutionError(
                f"{head}: the name {host!r} could not be resolved. Check endpoint_url, region and "
                "the network.",
                url=place.url,
                host=host,
            )
        case aiohttp.ClientConnectorError() | aiohttp.ClientProxyConnectionError():
            return UnreachableError(
                f"{head}: no connection to {host}:{error.port} ({_cause(error)}). Check that the "
                "server runs, and endpoint_url.",
                url=place.url,
                host=host,
            )
        case aiohttp.ConnectionTimeoutError():
            return UnreachableError(
                f"{head}: the server did not accept a connection in time. Check the network, or "
                "raise connect_timeout_seconds.",
                url=place.url,
            )
        case _:
            return None


def lost(error: BaseException) -> LostReplyError:
    """Return the error for a reply that is missing or incomplete."""
    timed_out = isinstance(error, TimeoutError)
    return LostReplyError("no answer in time" if timed_out else _cause(error), timed_out=timed_out)


def of_driver(
    error: Exception, asked: str, place: Place, keys: S3Credentials | None
) -> IcechunkError | LostReplyError | Refusal:
    """Sort an error of aiobotocore: it was not sent, its reply was lost, or it was refused."""
    if isinstance(error, botocore_errors.ClientError):
        return Refusal.of_client_error(error, keys)
    if isinstance(
        error, botocore_errors.NoCredentialsError | botocore_errors.PartialCredentialsError
    ):
        return PermissionDeniedError(
            f"{asked} {place.url!r}: no complete credentials were found. Set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, pass them as options, or pass anonymous=True.",
            url=place.url,
        )
    if isinstance(
        error, botocore_errors.CredentialRetrievalError | botocore_errors.TokenRetrievalError
    ):
        return PermissionDeniedError(
            f"{asked} {place.url!r}: credentials could not be fetched ({type(error).__name__}). "
            "Look at that error, which caused this one.",
            url=place.url,
        )
    if isinstance(error, botocore_errors.ParamValidationError | botocore_errors.InvalidRegionError):
        return InvalidInputError(f"{asked} {place.url!r}: {error}. Correct the options.")
    # botocore keeps the error of the HTTP library among the arguments of its message.
    inner = getattr(error, "kwargs", {}).get("error")
    if isinstance(inner, BaseException):
        sent = not_sent(inner, asked, place)
        return lost(inner) if sent is None else sent
    return LostReplyError(type(error).__name__)


def _cause(error: BaseException) -> str:
    """Describe a network error; its text is kept only if it comes from the system."""
    inner = getattr(error, "os_error", None) or getattr(error, "certificate_error", None) or error
    reason = getattr(inner, "verify_message", None) or getattr(inner, "strerror", None)
    return f"{type(error).__name__}: {reason}" if isinstance(reason, str) else type(error).__name__
