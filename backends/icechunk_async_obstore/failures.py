"""Translate errors of the Rust client to errors of the contract.

The client reports the HTTP status, the service's error code and the kind of transport failure only
as text. That text is never passed on, because it holds URLs, and those of Azure carry signatures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import (
    BucketNotFoundError,
    ClockSkewError,
    ExpiredCredentialsError,
    InvalidObjectKeyError,
    NameResolutionError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PermissionDeniedError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
    ThrottledError,
    TLSError,
    UnreachableError,
    WrongRegionError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.errors import IcechunkError

__all__ = ["Reason", "Report", "read_report", "translate"]

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_OF_ONE_KEY: Final = re.compile(r"\(code: ([A-Za-z0-9]{1,64})\)")
"""The failure of one key in a bulk deletion: a status on Azure, a code on S3."""
_METADATA_HOSTS: Final = ("169.254.169.254", "metadata.google.internal")
_TLS_WORDS: Final = ("certificate", "InvalidContentType", "TLS", "Tls", "tls", "SSL")


class Reason(Enum):
    """The stage at which a request failed."""

    ANSWERED = auto()
    """The service refused it with a status."""
    NOT_SENT = auto()
    """There was no connection, or no credentials to sign it."""
    NO_ANSWER = auto()
    """The request may have been received."""


@dataclass(frozen=True, slots=True)
class Report:
    """The parsed description of a failure."""

    reason: Reason
    status: int | None
    code: str | None
    advice: type[IcechunkError] | None = None
    """The error class for a transport failure."""

    @property
    def refused(self) -> bool:
        """Return whether a condition did not hold, or another write was in progress."""
        return self.status in (409, 412) or (self.status == 404 and self.code == "NoSuchKey")

    @property
    def found(self) -> str:
        """The service's reply, without secrets."""
        if self.reason is Reason.ANSWERED:
            return f"HTTP status {self.status}" + (f" ({self.code})" if self.code else "")
        return "no connection" if self.reason is Reason.NOT_SENT else "no complete answer"


_BY_CODE: Final[Mapping[str, type[IcechunkError]]] = {
    "NoSuchBucket": BucketNotFoundError,
    "ContainerNotFound": BucketNotFoundError,
    "PermanentRedirect": WrongRegionError,
    "AuthorizationHeaderMalformed": WrongRegionError,
    "ExpiredToken": ExpiredCredentialsError,
    "TokenRefreshRequired": ExpiredCredentialsError,
    "RequestTimeTooSkewed": ClockSkewError,
    "SlowDown": ThrottledError,
    "ServerBusy": ThrottledError,
    "TooManyRequests": ThrottledError,
    "KeyTooLongError": InvalidObjectKeyError,
    "QuotaExceeded": StorageFullError,
    "XMinioStorageFull": StorageFullError,
}
_BY_STATUS: Final[Mapping[int, type[IcechunkError]]] = {
    301: WrongRegionError,
    307: WrongRegionError,
    308: WrongRegionError,
    401: PermissionDeniedError,
    403: PermissionDeniedError,
    429: ThrottledError,
    507: StorageFullError,
}
_ADVICE: Final[Mapping[type[IcechunkError], str]] = {
    BucketNotFoundError: "Create the bucket or container, or correct the URL.",
    WrongRegionError: "Give the bucket's own region in the option 'region'.",
    ExpiredCredentialsError: "Fetch new credentials and open the storage again.",
    ClockSkewError: "Set this machine's clock.",
    ThrottledError: "Try again later, with fewer requests at once.",
    InvalidObjectKeyError: "Use a shorter prefix in the URL.",
    StorageFullError: "Make room, or ask for a larger quota.",
    PermissionDeniedError: "Check the credentials, and what they allow.",
    NameResolutionError: "Check the endpoint's name and this machine's DNS.",
    UnreachableError: "Check the endpoint, and the network between.",
    TLSError: "Check that the endpoint speaks TLS and that its certificate is trusted.",
    StorageUnavailableError: "Try again later.",
    OutcomeUnknownError: "The write may have landed: read it back before writing again.",
}


def read_report(error: BaseException) -> Report:
    """Parse an exception of the client."""
    text = str(error)
    # What follows are the client's own structures: they quote URLs and headers, in which anything
    # may match.
    head = text.partition("\n\nDebug source:")[0]
    if any(host in text for host in _METADATA_HOSTS):  # its last source of credentials
        return Report(Reason.NOT_SENT, None, None, PermissionDeniedError)
    status = _STATUS.search(head)
    if status is not None:
        code = _CODE.search(head)
        return Report(Reason.ANSWERED, int(status[1]), code[1] if code else None)
    single = _OF_ONE_KEY.search(head)
    if single is not None:
        told = single[1]
        if told.isdecimal():
            return Report(Reason.ANSWERED, int(told), None)
        return Report(Reason.ANSWERED, 403 if told == "AccessDenied" else 400, told)
    if "redirect" in head:  # S3 redirects requests to another region without a location
        return Report(Reason.ANSWERED, 301, "PermanentRedirect")
    # Only the structures tell at which step a request failed.
    if "kind: Connect" in text or "builder error" in head:
        if "dns error" in text:
            return Report(Reason.NOT_SENT, None, None, NameResolutionError)
        if any(word in text for word in _TLS_WORDS):
            return Report(Reason.NOT_SENT, None, None, TLSError)
        return Report(Reason.NOT_SENT, None, None, UnreachableError)
    return Report(Reason.NO_ANSWER, None, None)


def translate(
    error: BaseException, operation: str, key: str, bucket: str, *, writes: bool = False
) -> IcechunkError:
    """Translate a failure.

    If ``writes``, a failure that may hide a success is an ``OutcomeUnknownError``.
    """
    report = read_report(error)
    kind = _kind(report, writes=writes)
    context: dict[str, object] = {"key": key, "bucket": bucket}
    if report.status is not None:
        context |= {"status": report.status, "code": report.code}
    if kind is ObjectNotFoundError:
        return ObjectNotFoundError(f"There is no object {key!r} in {bucket!r}.", **context)
    advice = _ADVICE.get(kind, "")
    if report.advice is PermissionDeniedError:
        return PermissionDeniedError(
            f"Could not {operation} {key!r} in {bucket!r}: no credentials were found. Give them "
            "as options or in the environment, or 'anonymous=True' for a public bucket.",
            **context,
        )
    return kind(
        f"Could not {operation} {key!r} in {bucket!r}: {report.found}. {advice}".rstrip(),
        **context,
    )


def _kind(report: Report, *, writes: bool) -> type[IcechunkError]:
    if report.reason is Reason.NOT_SENT and report.advice is not None:
        return report.advice
    if report.reason is not Reason.ANSWERED:
        return OutcomeUnknownError if writes else StorageUnavailableError
    if report.code is not None and report.code in _BY_CODE:
        return _BY_CODE[report.code]
    status = report.status or 0
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    # A write needs no object to be there, so that it is the bucket that is missing.
    if status == 404:
        return BucketNotFoundError if writes else ObjectNotFoundError
    if status >= 500:
        return OutcomeUnknownError if writes else StorageUnavailableError
    return StorageError
