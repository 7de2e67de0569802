"""Whose requests these are: fixed keys, those of a callback, those of the usual chain, or none."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from aiobotocore.credentials import AioCredentials
from botocore.credentials import ReadOnlyCredentials

from icechunk_async.errors import IcechunkError, InvalidInputError, PermissionDeniedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = [
    "CallbackKeys",
    "ChainKeys",
    "FixedKeys",
    "KeySource",
    "S3Credentials",
    "redact",
]

_RENEW_BEFORE: Final = timedelta(minutes=5)
"""Keys are asked for anew this long before they end, so that no request carries ended ones."""


@dataclass(frozen=True, slots=True)
class S3Credentials:
    """Keys for requests; the secret parts are left out of the repr."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    expires_at: datetime | None = None
    """When they end (aware); None where that is not known."""

    def __post_init__(self) -> None:
        """Refuse what cannot sign a request.

        Raises:
            InvalidInputError: a part is missing, or the time has no zone.
        """
        if not self.access_key_id or not self.secret_access_key:
            raise InvalidInputError(
                "S3Credentials need an access_key_id and a secret_access_key; one of them is empty."
            )
        if self.expires_at is not None and self.expires_at.tzinfo is None:
            raise InvalidInputError(
                "expires_at of S3Credentials has no time zone. Use an aware time, such as "
                "datetime.now(UTC) + timedelta(hours=1)."
            )


@runtime_checkable
class _Keys(Protocol):
    """Keys of somebody else's making."""

    @property
    def access_key_id(self) -> str: ...
    @property
    def secret_access_key(self) -> str: ...
    @property
    def session_token(self) -> str | None: ...
    @property
    def expires_at(self) -> datetime | None: ...


class KeySource(Protocol):
    """Answers the keys for the next request. Belongs to one event loop."""

    last: S3Credentials | None
    """The keys that were answered last, to keep them out of messages."""

    async def current(self) -> S3Credentials | None:
        """Return the keys to sign with; None for requests that are not signed."""
        ...

    def reject(self, keys: S3Credentials | None) -> bool:
        """Take note that the server calls ``keys`` expired; tell whether others can be had."""
        ...


class FixedKeys:
    """Always the same keys, or none."""

    def __init__(self, keys: S3Credentials | None) -> None:
        """Return ``keys``."""
        self.last = keys

    async def current(self) -> S3Credentials | None:
        """Return the keys."""
        return self.last

    def reject(self, keys: S3Credentials | None) -> bool:
        """There are no others."""
        del keys
        return False


class ChainKeys:
    """What the environment, the files, or the machine's role say, renewed by aiobotocore."""

    def __init__(self, found: Any) -> None:
        """Take the result of a session's ``get_credentials``."""
        self.last: S3Credentials | None = None
        self._found = found

    async def current(self) -> S3Credentials | None:
        """Return the keys, renewed when their end is near."""
        if self._found is None:
            raise PermissionDeniedError(
                "No credentials for S3 were found in the environment, in the AWS configuration "
                "files, or from the machine's role. Set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, pass access_key_id= and secret_access_key=, or pass "
                "anonymous=True for a public bucket."
            )
        frozen = await self._found.get_frozen_credentials()
        last = self.last
        if (
            last is None
            or last.access_key_id != frozen.access_key
            or last.secret_access_key != frozen.secret_key
            or last.session_token != frozen.token
        ):
            self.last = S3Credentials(frozen.access_key, frozen.secret_key, frozen.token)
        return self.last

    def reject(self, keys: S3Credentials | None) -> bool:
        """The chain renews by itself before the end; it cannot be asked to hurry."""
        del keys
        return False


class CallbackKeys(AioCredentials):
    """Keys that an asynchronous function of the user answers, to aiobotocore as well."""

    def __init__(self, callback: Callable[[], Awaitable[S3Credentials]]) -> None:
        """Ask ``callback`` when the first keys are needed."""
        super().__init__("callback", "callback", method="icechunk-async-callback")
        self.last: S3Credentials | None = None
        self._callback = callback
        self._rejected = False
        self._asking: asyncio.Future[None] | None = None

    async def current(self) -> S3Credentials:
        """Return keys that have not ended; however many ask, the callback is called once.

        Raises:
            PermissionDeniedError: the callback failed.

        Cancellation: the next who waits calls the callback.
        """
        while True:
            if self.last is not None and not self._ends(self.last):
                return self.last
            if self._asking is not None:
                await asyncio.shield(self._asking)
                continue
            self._asking = asked = asyncio.get_running_loop().create_future()
            try:
                keys = await self._ask()
                self.last, self._rejected = keys, False
                return keys
            finally:
                self._asking = None
                asked.set_result(None)  # others look again, and ask themselves if this failed

    def reject(self, keys: S3Credentials | None) -> bool:
        """Call the callback for the next request, unless that happened since."""
        if keys is self.last:
            self._rejected = True
        return True

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Return the keys to aiobotocore."""
        keys = await self.current()
        return ReadOnlyCredentials(keys.access_key_id, keys.secret_access_key, keys.session_token)

    def _ends(self, keys: S3Credentials) -> bool:
        if self._rejected:
            return True
        return keys.expires_at is not None and datetime.now(UTC) > keys.expires_at - _RENEW_BEFORE

    async def _ask(self) -> S3Credentials:
        try:
            keys: object = await self._callback()
        except IcechunkError:
            raise
        except Exception as error:
            raise PermissionDeniedError(
                f"The credentials callback for S3 failed with {type(error).__name__}. Look at that "
                "error, which caused this one."
            ) from error
        if isinstance(keys, S3Credentials):  # pyright: ignore[reportUnnecessaryIsInstance]
            return keys
        if isinstance(keys, _Keys):
            return S3Credentials(
                keys.access_key_id, keys.secret_access_key, keys.session_token, keys.expires_at
            )
        raise InvalidInputError(
            f"The credentials callback for S3 answered {type(keys).__name__}. It must answer "
            "icechunk_async_s3.S3Credentials."
        )


def redact(text: str, keys: S3Credentials | None) -> str:
    """Return ``text`` without the secrets in ``keys``, should a server repeat them."""
    if keys is not None:
        for secret in (keys.secret_access_key, keys.session_token):
            if secret:
                text = text.replace(secret, "***")
    return text
