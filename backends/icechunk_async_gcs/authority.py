"""Credentials: the authorization header and its renewal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import anyio.to_thread
import google.auth.exceptions
import requests.exceptions
from gcsfs.core import GCSFileSystem  # type: ignore[import-untyped, unused-ignore]
from gcsfs.retry import HttpError, NonRetryableError  # type: ignore[import-untyped, unused-ignore]

from icechunk_async.errors import (
    ExpiredCredentialsError,
    IcechunkError,
    InvalidInputError,
    PermissionDeniedError,
    UnreachableError,
)
from icechunk_async_gcs.options import AccessToken

if TYPE_CHECKING:
    import os

    from icechunk_async_gcs.options import Options

__all__ = ["Authority", "authority_for"]

_AHEAD: Final = timedelta(seconds=60)
"""Tokens are renewed this long before they expire, because a request takes time, too."""


class Authority(Protocol):
    """The credential of one event loop."""

    async def headers(self) -> dict[str, str]:
        """Return the authorization headers; renew a token that is about to expire."""
        ...

    async def renew(self, refused: Mapping[str, str]) -> bool:
        """Return whether newer headers than ``refused``, which got a 401, may be available."""
        ...


@runtime_checkable
class _Token(Protocol):
    """Any object with the attributes of `AccessToken`."""

    @property
    def token(self) -> str: ...
    @property
    def expires_at(self) -> datetime | None: ...


class _Anonymous:
    """No credentials."""

    async def headers(self) -> dict[str, str]:
        return {}

    async def renew(self, refused: Mapping[str, str]) -> bool:
        del refused
        return False


class _Callback:
    """Tokens from a function of the caller; concurrent requests share one call."""

    def __init__(self, source: Callable[[], Awaitable[AccessToken]]) -> None:
        self._source = source
        self._current: AccessToken | None = None
        self._renewing = asyncio.Lock()

    async def headers(self) -> dict[str, str]:
        if not self._good():
            async with self._renewing:
                if not self._good():
                    self._current = await self._ask()
        assert self._current is not None
        return _bearer(self._current)

    async def renew(self, refused: Mapping[str, str]) -> bool:
        # Another request may have renewed it meanwhile.
        if self._current is not None and _bearer(self._current) == refused:
            self._current = None
        return True

    def _good(self) -> bool:
        if self._current is None:
            return False
        ends = self._current.expires_at
        return ends is None or ends - datetime.now(UTC) > _AHEAD

    async def _ask(self) -> AccessToken:
        try:
            token: object = await self._source()
        except IcechunkError:
            raise
        except Exception as error:
            raise PermissionDeniedError(
                f"The function given as token=... failed with {type(error).__name__}, so that "
                "nothing was sent. Its own error is the cause of this one."
            ) from error
        if isinstance(token, AccessToken):  # pyright: ignore[reportUnnecessaryIsInstance]
            return token
        if isinstance(token, _Token):
            return AccessToken(token.token, token.expires_at)
        raise InvalidInputError(
            f"The function given as token=... answered a {type(token).__name__}, not an "
            "AccessToken."
        )


class _Static:
    """A token that cannot be renewed."""

    def __init__(self, token: AccessToken) -> None:
        self._token = token

    async def headers(self) -> dict[str, str]:
        ends = self._token.expires_at
        if ends is not None and ends <= datetime.now(UTC):
            raise ExpiredCredentialsError(
                f"The AccessToken given as token=... ended at {ends.isoformat()}, so that nothing "
                "was sent. Give a new one, or a function that answers one."
            )
        return _bearer(self._token)

    async def renew(self, refused: Mapping[str, str]) -> bool:
        del refused
        return False


class _Google:
    """Google's own credentials, loaded and renewed by gcsfs on threads, since both block."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    async def headers(self) -> dict[str, str]:
        held = self._credentials.credentials
        if not held.valid or _ends_soon(held):
            # On a thread: Google's library makes the request with `requests`, which blocks.
            await anyio.to_thread.run_sync(self._refresh)
        found: dict[str, str] = {}
        held.apply(found)
        return found

    async def renew(self, refused: Mapping[str, str]) -> bool:
        held = self._credentials.credentials
        if refused.get("authorization") == f"Bearer {held.token}":
            held.token = None  # no longer valid: gcsfs renews it
        return True

    def _refresh(self) -> None:
        with _explaining("renew"):
            self._credentials.maybe_refresh(_AHEAD.total_seconds())


def _ends_soon(held: Any) -> bool:
    ends = held.expiry  # naive, UTC
    return ends is not None and ends.replace(tzinfo=UTC) - datetime.now(UTC) < _AHEAD


def _bearer(token: AccessToken) -> dict[str, str]:
    return {"authorization": f"Bearer {token.token}"}


class _explaining:  # noqa: N801 - used as a block
    """Translate errors of Google's libraries; their texts are not shown."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise the error of the library."""
        del kind, trace
        match error:
            case google.auth.exceptions.TransportError() | requests.exceptions.RequestException():
                raise UnreachableError(
                    f"Could not {self._doing} the credentials: Google's token service cannot be "
                    "reached. Check the network."
                ) from error
            case google.auth.exceptions.DefaultCredentialsError():
                raise PermissionDeniedError(
                    "There are no default credentials of Google here. Run 'gcloud auth "
                    "application-default login', set GOOGLE_APPLICATION_CREDENTIALS, or give "
                    "token=... ('anonymous' for public buckets and emulators)."
                ) from error
            case google.auth.exceptions.GoogleAuthError() | HttpError() | NonRetryableError():
                raise ExpiredCredentialsError(
                    f"Could not {self._doing} the credentials: Google's token service no longer "
                    "accepts them. Log in again, or give another token=..."
                ) from error
            case _:
                return


async def authority_for(options: Options) -> Callable[[], Authority]:
    """Load the credentials; return a factory of the credential of each event loop.

    Raises:
        InvalidInputError: the key file or its content is invalid.
        PermissionDeniedError: there are no default credentials.
    """
    token = options.token
    if isinstance(token, AccessToken):
        return lambda: _Static(token)
    if token == "anonymous":  # noqa: S105 - means no token
        return _Anonymous
    if callable(token):
        return lambda: _Callback(token)
    credentials = await anyio.to_thread.run_sync(_load, token)
    return lambda: _Google(credentials)


def _load(token: str | os.PathLike[str] | Mapping[str, Any] | None) -> Any:
    """Let gcsfs load credentials. Blocks."""
    if token is None:
        what: object = "google_default"
    elif isinstance(token, Mapping):
        what = dict(token)
    else:
        path = Path(token).expanduser()
        if not path.is_file():  # the value is not shown: it may be a token, by mistake
            raise InvalidInputError(
                "token=... is the path of no file. For a bearer token use AccessToken('...'); for "
                "no credentials use 'anonymous'."
            )
        what = str(path)
    with _explaining("load"):
        try:
            system = GCSFileSystem(
                project="", token=what, asynchronous=True, skip_instance_cache=True
            )
        except (ValueError, KeyError, TypeError) as error:
            shape = "the file" if isinstance(what, str) else "the dictionary"
            raise InvalidInputError(
                f"token=...: {shape} holds no credentials of Google ({type(error).__name__}). Use "
                "a key file of a service account, or one of 'gcloud auth application-default "
                "login'."
            ) from None  # the cause may quote the key
    return system.credentials
