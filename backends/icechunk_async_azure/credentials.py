"""Who asks: keys, SAS tokens and tokens, fixed or fetched again when they run out."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final, Self, cast
from urllib.parse import parse_qs

from azure.core.credentials import AccessToken, AzureNamedKeyCredential, AzureSasCredential

from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from icechunk_async_azure.options import Login

__all__ = ["Proof"]

_EARLY: Final = timedelta(minutes=2)
"""How long before its end a SAS token is fetched again."""
_SCOPE: Final = "https://storage.azure.com/.default"
_LATER: Final = datetime.max.replace(tzinfo=UTC)


class Proof:
    """The credential that one client sends, and how it is kept fresh."""

    def __init__(self, login: Login) -> None:
        """Make the credential; may read files, so call it off the loop."""
        self.credential: Any = None
        self.expires: datetime | None = None
        """When the SAS token in use ends."""
        self._login = login
        self._owned = False
        self._fetch: Callable[[], Awaitable[str]] | None = None
        self._turn = asyncio.Lock()
        secret: Any = login.secret
        match login.kind:
            case "key":
                self.credential = AzureNamedKeyCredential(login.account_name or "", secret)
            case "sas":
                self.credential = AzureSasCredential(secret)
                self.expires = _end_of(secret)
            case "sas-callback":
                self._fetch = secret
            case "token" if iscoroutinefunction(secret):
                self.credential = _Callback(secret)
            case "token" if not hasattr(secret, "get_token") or isinstance(secret, type):
                self.credential, self._owned = secret(), True
            case "token":
                self.credential = secret
            case "default":
                from azure.identity.aio import DefaultAzureCredential  # noqa: PLC0415 - slow

                self.credential, self._owned = DefaultAzureCredential(), True
            case "anonymous":
                pass
        if self._fetch is not None:
            self.credential = AzureSasCredential("sig=none")  # replaced before anything is sent

    async def refresh(self) -> None:
        """Fetch a new SAS token where one is to be fetched and is about to end.

        Raises:
            InvalidInputError: the callback answered no SAS token.
            Exception: what the callback raised.
        """
        if self._fetch is None or not self._is_ending():
            return
        async with self._turn:
            if self._is_ending():
                token = await self._fetch()
                if not isinstance(cast("object", token), str) or "sig=" not in token:
                    raise InvalidInputError(
                        "The function given as sas_token answered no SAS token. It must answer "
                        "what follows the '?' of a SAS URL.",
                        option="sas_token",
                    )
                token = token.strip().removeprefix("?")
                self.credential.update(token)
                self.expires = _end_of(token) or _LATER

    def _is_ending(self) -> bool:
        return self.expires is None or self.expires - _EARLY <= datetime.now(UTC)

    async def bearer(self) -> str | None:
        """Answer an ``Authorization`` for the source of a copy, if tokens are in use."""
        if self._login.kind not in ("token", "default"):
            return None
        return f"Bearer {(await self.credential.get_token(_SCOPE)).token}"

    async def close(self) -> None:
        """Close a credential that was made here."""
        if self._owned:
            self._owned = False
            close = getattr(self.credential, "close", None)
            if close is not None:
                await close()


class _Callback:
    """A token credential around an async function; the driver keeps a token until it ends."""

    def __init__(self, fetch: Callable[[], Awaitable[AccessToken]]) -> None:
        """Remember the function."""
        self._fetch = fetch

    async def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        """Answer a fresh token."""
        del scopes, options
        token = await self._fetch()
        if not hasattr(cast("object", token), "expires_on"):
            raise InvalidInputError(
                "The function given as credential answered no AccessToken(token, expires_on).",
                option="credential",
            )
        return token

    async def close(self) -> None:
        """Do nothing: the function is the caller's."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _end_of(token: str) -> datetime | None:
    """Answer when a SAS token ends, where it says so."""
    try:
        end = datetime.fromisoformat(parse_qs(token)["se"][0])
    except (KeyError, ValueError):
        return None
    return end.replace(tzinfo=UTC) if end.tzinfo is None else end
