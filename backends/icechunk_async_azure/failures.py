"""Translate errors of service, network and credentials to errors of the storage contract.

Foreign errors quote URLs, and a URL may carry a SAS token. So they never become the cause of ours:
a `Detail` with their redacted text does.
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    ServiceRequestError,
)

from icechunk_async.errors import (
    BucketNotFoundError,
    ClockSkewError,
    ExpiredCredentialsError,
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
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from icechunk_async.errors import IcechunkError

__all__ = ["FOREIGN", "Detail", "code_of", "explain", "redact", "status_of", "was_not_applied"]

FOREIGN: Final = (
    *(AzureError, aiohttp.ClientError, OSError, ValueError),
    *(ArithmeticError, AttributeError, LookupError, TypeError),
)
"""The exceptions of the driver; TimeoutError is an OSError.

It raises those of the second line on headers and documents that have another form than it expects:
a year of 20 digits, a list without blobs.
"""

_SECRETS: Final = re.compile(
    r"(?i)((?:sig|accountkey|sharedaccesssignature)=|sharedkey [^:\s]+:|bearer )[^&;\s'\")\]]+"
)
_DATE_PRECISION: Final = timedelta(seconds=1)
"""The header `Date` has whole seconds: what ended within this one has ended."""
_PAUSE: Final = re.compile(r"[0-9]{1,12}")
"""A pause in a header: a number that a float can hold."""
_MAX_SKEW: Final = timedelta(minutes=10)
"""Less than the 15 minutes that the service allows, because its reply took time, too."""


class Detail(Exception):  # noqa: N818 - it is raised by nobody, only shown as a cause
    """The redacted text of a foreign error."""


def redact(text: str) -> str:
    """Return ``text`` without signatures, keys and tokens."""
    return _SECRETS.sub(r"\1REDACTED", text)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status, if the service answered at all."""
    if isinstance(error, HttpResponseError) and error.response is not None:
        return error.status_code
    return None


def code_of(error: BaseException) -> str:
    """Return the service's name for the failure, or nothing."""
    if not isinstance(error, HttpResponseError) or error.response is None:
        return ""
    told: Any = error  # the driver adds the name to errors that it has understood
    code: object = getattr(told, "error_code", None) or _headers(error).get("x-ms-error-code", "")
    return str(getattr(code, "value", code))


def was_not_applied(error: BaseException, *, conditional: bool) -> bool:
    """Return whether a write that failed with ``error`` certainly changed nothing, now or later.

    It was refused with a reason, or never sent. A busy server rejects a request before it acts;
    that is verified first if a second attempt could do harm.
    """
    status = status_of(error)
    if status is None:
        return isinstance(error, ClientAuthenticationError) or any(
            isinstance(one, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            for one in _chain(error)
        )
    return status < 500 or (not conditional and _is_throttling(status, code_of(error)))


def explain(
    error: BaseException,
    action: str,
    where: str,
    *,
    container: str,
    key: str | None = None,
    expires: datetime | None = None,
) -> IcechunkError:
    """Return the contract's error for what the driver raised; its cause is set.

    Args:
        error: the exception.
        action: the operation, such as ``"read"``.
        where: the object or listing concerned.
        container: the container.
        key: of the object, where there is one.
        expires: when the token in use expires, if there is one.
    """
    context: dict[str, object] = {"bucket": container}
    if key is not None:
        context["key"] = key
    if status_of(error) is None:
        kind, found = _of_connection(error)
    else:
        kind, found = _of_answer(error, container, expires, context)
    failure = kind(f"Could not {action} {where}: {found}", **context)
    # Cut, because the driver quotes replies, and a server may send any amount.
    failure.__cause__ = Detail(redact(f"{type(error).__name__}: {error}")[:2000])
    return failure


def _of_connection(error: BaseException) -> tuple[type[IcechunkError], str]:
    # The driver wraps errors of aiohttp, and these wrap those of the system: the first that says
    # most decides.
    chain = list(_chain(error))
    for one in chain:
        match one:
            case aiohttp.ClientConnectorDNSError():
                return NameResolutionError, (
                    f"the host {one.host!r} has no address. Check account_name and endpoint_url, "
                    "and the name servers of this machine."
                )
            case aiohttp.ClientSSLError() | ssl.SSLError():
                return TLSError, (
                    "no secure connection: the certificate is not trusted, or the server speaks "
                    "no TLS. Check endpoint_url, and set SSL_CERT_FILE for a private authority."
                )
            case aiohttp.ClientConnectorError():
                return UnreachableError, (
                    f"no connection to {one.host}:{one.port}: {one.strerror}. Check endpoint_url, "
                    "the network, and that the server runs."
                )
            case _:
                continue
    if any(isinstance(one, TimeoutError) for one in chain):
        return UnreachableError, (
            "no answer in time. Try again, or raise timeout_seconds or connect_timeout_seconds."
        )
    if isinstance(error, ClientAuthenticationError):
        return PermissionDeniedError, (
            "no credentials were found, or none were accepted by the identity service. Give "
            "account_key, sas_token, credential or anonymous=True, or log in."
        )
    if isinstance(error, ServiceRequestError | aiohttp.ClientError | OSError | AzureError):
        return StorageUnavailableError, "the connection broke. Try again."
    return StorageError, "the driver failed. Its own words are the cause of this error."


def _of_answer(
    error: BaseException, container: str, expires: datetime | None, context: dict[str, object]
) -> tuple[type[IcechunkError], str]:
    assert isinstance(error, HttpResponseError)  # the caller found a status
    status, code = error.status_code or 0, code_of(error)
    found = f"the service answered {status} {code}".rstrip()
    context["status"] = status
    context["code"] = code
    # Before the statuses: a busy service answers 503 with a code that says so, and retries should
    # wait.
    if _is_throttling(status, code):
        pause = _retry_after(error)
        if pause is not None:
            context["retry_after_seconds"] = pause
        return ThrottledError, f"{found}: too many requests. Try again more slowly."
    if code in ("ContainerNotFound", "ContainerBeingDeleted", "ContainerDisabled"):
        return BucketNotFoundError, (
            f"there is no container {container!r}. Create it, or correct the URL or the account."
        )
    if status == 404:
        return ObjectNotFoundError, "there is no such object."
    if status in (401, 403):
        return _of_refusal(error, code, found, expires)
    if code in ("OutOfRangeInput", "InvalidUri", "InvalidResourceName"):
        return InvalidObjectKeyError, f"{found}: it cannot name a blob. Use another name."
    if status == 507:
        return StorageFullError, f"{found}: there is no room left. Look at the account's quota."
    if status >= 500 or status == 408:
        return StorageUnavailableError, f"{found}. Try again."
    return StorageError, f"{found}. The service's own words are the cause of this error."


def _of_refusal(
    error: HttpResponseError, code: str, found: str, expires: datetime | None
) -> tuple[type[IcechunkError], str]:
    now = _time_of_service(error)
    said = str(error)
    latest = datetime.now(UTC) if now is None else now + _DATE_PRECISION
    if (expires is not None and expires <= latest) or (
        "expired" in said and "token" in said.lower()
    ):
        ended = f" at {expires:%Y-%m-%d %H:%M:%SZ}" if expires is not None else ""
        return ExpiredCredentialsError, (
            f"{found}: the credentials expired{ended}. Give fresh ones, or an async function that "
            "answers them."
        )
    if now is not None and abs(now - datetime.now(UTC)) > _MAX_SKEW:
        return ClockSkewError, (
            f"{found}, and its clock says {now:%Y-%m-%d %H:%M:%SZ} where this machine says "
            f"{datetime.now(UTC):%H:%M:%SZ}. Set this machine's clock."
        )
    if code in ("AuthenticationFailed", "InvalidAuthenticationInfo", "NoAuthenticationInformation"):
        return PermissionDeniedError, (
            f"{found}: the account key, SAS token or token is wrong or of another account. Check "
            "it, and account_name."
        )
    return PermissionDeniedError, (
        f"{found}: these credentials may not do this. Check the permissions of the SAS token or "
        "the role, and the account's firewall."
    )


def _is_throttling(status: int, code: str) -> bool:
    return status == 429 or code in ("ServerBusy", "AccountBandwidthLimitExceeded")


def _retry_after(error: HttpResponseError) -> float | None:
    headers = _headers(error)
    for name, unit in (("x-ms-retry-after-ms", 0.001), ("retry-after-ms", 0.001)):
        if _PAUSE.fullmatch(headers.get(name, "")):
            return int(headers[name]) * unit
    text = headers.get("retry-after", "")
    if _PAUSE.fullmatch(text):
        return float(text)
    moment = _moment(text)
    return None if moment is None else max(0.0, (moment - datetime.now(UTC)).total_seconds())


def _time_of_service(error: HttpResponseError) -> datetime | None:
    return _moment(_headers(error).get("date", ""))


def _moment(text: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):  # a year, or a zone, that no clock has
        return None


def _headers(error: HttpResponseError) -> Mapping[str, str]:
    response: Any = error.response
    headers: Mapping[str, str] = response.headers  # names in any case
    return headers


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the chain of its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        inner = getattr(error, "inner_exception", None)
        cause = error.__cause__ or error.__context__
        # The driver keeps the reason in an attribute where it raises without ``from``.
        following = inner if isinstance(inner, BaseException) else cause
        if isinstance(error, aiohttp.ClientConnectorError):
            following = error.os_error
        error = following
