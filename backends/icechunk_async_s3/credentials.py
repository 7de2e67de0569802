"""Credentials: fixed, from a callback, from the usual chain, or none."""

from __future__ import annotations

import asyncio
import re
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
"""Credentials are renewed this long before they expire, so that no request carries expired ones."""

_LONG: Final = 8
"""Letters from which a secret is looked for inside of words as well."""


@dataclass(frozen=True, slots=True)
class S3Credentials:
    """Credentials for requests; the secret parts are left out of the repr."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    expires_at: datetime | None = None
    """When they expire (aware); None if unknown."""

    def __post_init__(self) -> None:
        """Validate that they can sign a request.

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
    """Any object with the attributes of `S3Credentials`."""

    @property
    def access_key_id(self) -> str: ...
    @property
    def secret_access_key(self) -> str: ...
    @property
    def session_token(self) -> str | None: ...
    @property
    def expires_at(self) -> datetime | None: ...


class KeySource(Protocol):
    """A source of credentials for requests. Belongs to one event loop."""

    last: S3Credentials | None
    """The credentials returned last, to redact them from messages."""

    async def current(self) -> S3Credentials | None:
        """Return the credentials to sign with; None for unsigned requests."""
        ...

    def reject(self, keys: S3Credentials | None) -> bool:
        """Note that the server calls ``keys`` expired; return whether others are available."""
        ...


class FixedKeys:
    """Always the same credentials, or none."""

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
    """Credentials of the environment, the files or the machine's role, renewed by aiobotocore."""

    def __init__(self, found: Any) -> None:
        """Take the result of a session's ``get_credentials``."""
        self.last: S3Credentials | None = None
        self._found = found

    async def current(self) -> S3Credentials | None:
        """Return the credentials, renewed shortly before they expire."""
        if self._found is None:
            raise PermissionDeniedError(
                "No credentials for S3 were found in the environment, in the AWS configuration "
                "files, or from the machine's role. Set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, pass access_key_id= and secret_access_key=, or pass "
                "anonymous=True for a public bucket."
            )
        # Asked for each request: from memory, unless the keys end soon.
        frozen = await self._found.get_frozen_credentials()
        last = self.last
        if (
            last is None
            or last.access_key_id != frozen.access_key
            or last.secret_access_key != frozen.secret_key
            or last.session_token != frozen.token
        ):
            # Made anew only where they differ, since each request comes here.
            self.last = S3Credentials(frozen.access_key, frozen.secret_key, frozen.token)
        return self.last

    def reject(self, keys: S3Credentials | None) -> bool:
        """Return False: the chain renews by itself and cannot be forced to."""
        del keys
        return False


class CallbackKeys(AioCredentials):
    """Credentials from an asynchronous function of the user, also for aiobotocore."""

    def __init__(self, callback: Callable[[], Awaitable[S3Credentials]]) -> None:
        """Call ``callback`` when the first credentials are needed."""
        # aiobotocore wants some keys when it is made; it asks `get_frozen_credentials` before it
        # signs.
        super().__init__("callback", "callback", method="icechunk-async-callback")
        self.last: S3Credentials | None = None
        self._callback = callback
        self._rejected = False
        self._asking: asyncio.Future[None] | None = None

    async def current(self) -> S3Credentials:
        """Return valid credentials; concurrent callers share one call of the callback.

        Raises:
            PermissionDeniedError: the callback failed.

        Cancellation: the next waiting caller calls the callback.
        """
        while True:
            if self.last is not None and not self._ends(self.last):
                return self.last
            if self._asking is not None:
                await asyncio.shield(self._asking)
                continue
            # No task for it: the callback runs in the first caller, under its deadlines. The others
            # wait for a future that says *look again*, and one of them calls it if the first was
            # cancelled.
            self._asking = asked = asyncio.get_running_loop().create_future()
            try:
                keys = await self._ask()
                self.last, self._rejected = keys, False
                return keys
            finally:
                self._asking = None
                asked.set_result(None)  # waiters check again, and call it themselves

    def reject(self, keys: S3Credentials | None) -> bool:
        """Renew the credentials for the next request, unless that happened in the meantime."""
        # By identity: another request may have had them renewed since these were used.
        if keys is self.last:
            self._rejected = True
        return True

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Return the credentials to aiobotocore."""
        keys = await self.current()
        return ReadOnlyCredentials(keys.access_key_id, keys.secret_access_key, keys.session_token)

    def _ends(self, keys: S3Credentials) -> bool:
        # Keys that live for less than `_RENEW_BEFORE` are asked for with each request, and used all
        # the same.
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
        # Any object with these attributes: callers need not import this module.
        if isinstance(keys, _Keys):
            return S3Credentials(
                keys.access_key_id, keys.secret_access_key, keys.session_token, keys.expires_at
            )
        raise InvalidInputError(
            f"The credentials callback for S3 returned {type(keys).__name__}. It must return "
            "icechunk_async_s3.S3Credentials."
        )


def redact(text: str, keys: S3Credentials | None) -> str:
    """Return ``text`` without the secrets in ``keys``, should a server repeat them.

    A short one, as test servers have, is only looked for as a whole word: else a bucket would
    be a ``***ucket``.
    """
    if keys is not None:
        for secret in (keys.secret_access_key, keys.session_token):
            if secret:
                anywhere = re.escape(secret)
                word = rf"(?<!\w){anywhere}(?!\w)"
                text = re.sub(anywhere if len(secret) >= _LONG else word, "***", text)
    return text
