"""Who asks: keys, SAS tokens and tokens, fixed or fetched again when they run out."""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Self, cast
from urllib.parse import parse_qs

from azure.core.credentials import AccessToken, AzureNamedKeyCredential, AzureSasCredential

from icechunk_async.errors import InvalidInputError
from icechunk_async_azure.options import is_async

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from icechunk_async_azure.options import Login

__all__ = ["Proof"]

_EARLY: Final = timedelta(minutes=2)
"""How long before its end a SAS token is fetched again."""
_RECENT: Final = 16
"""SAS tokens that may still stand in requests that are under way."""
_SCOPE: Final = "https://storage.azure.com/.default"
_LATER: Final = datetime.max.replace(tzinfo=UTC)


class Proof:
    """The credential that one client sends, and how it is kept fresh."""

    def __init__(self, login: Login) -> None:
        """Make the credential; may read files, so call it off the loop."""
        self.credential: Any = None
        self.expires: datetime | None = None
        """When the SAS token or token in use ends."""
        self._login = login
        self._owned: Any = None
        self._fetch: Callable[[], Awaitable[str]] | None = None
        self._recent: deque[str] = deque(maxlen=_RECENT)
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
                self.credential = AzureSasCredential("sig=none")  # replaced before anything is sent
            case "token" | "default":
                self.credential = _Tokens(self._token_source(), self)
            case "anonymous":
                pass

    def _token_source(self) -> Callable[..., Awaitable[AccessToken]]:
        secret: Any = self._login.secret
        if self._login.kind == "default":
            from azure.identity.aio import DefaultAzureCredential  # noqa: PLC0415 - slow

            self._owned = DefaultAzureCredential()
        elif is_async(secret):
            return lambda *_, **__: secret()
        elif isinstance(secret, type) or not hasattr(secret, "get_token"):
            self._owned = secret()
        source: Any = secret if self._owned is None else self._owned
        fetch: Callable[..., Awaitable[AccessToken]] = source.get_token
        return fetch

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
                await self._renew(self._fetch)

    async def renewed(self, url: str) -> str | None:
        """Return a URL that the service refused with a newer SAS token; None if there is none.

        Requests that were refused with the same token share one call of the function.
        """
        used = next((token for token in self._recent if url.endswith(token)), None)
        if self._fetch is None or used is None:
            return None
        async with self._turn:
            if self.credential.signature == used:
                await self._renew(self._fetch)
            newest: str = self.credential.signature
        return url.removesuffix(used) + newest if newest != used else None

    async def _renew(self, fetch: Callable[[], Awaitable[str]]) -> None:
        answer: object = await fetch()
        token = getattr(answer, "token", answer)
        if not isinstance(token, str) or "sig=" not in token:
            raise InvalidInputError(
                "The function given as sas_token answered no SAS token. It must answer "
                "what follows the '?' of a SAS URL.",
                option="sas_token",
            )
        token = token.strip().removeprefix("?")
        self.credential.update(token)
        told: datetime | None = getattr(answer, "expires_at", None)
        self.expires = told or _end_of(token) or _LATER
        self._recent.append(token)

    def _is_ending(self) -> bool:
        return self.expires is None or self.expires - _EARLY <= datetime.now(UTC)

    async def bearer(self) -> str | None:
        """Return an ``Authorization`` for the source of a copy, if tokens are in use."""
        if self._login.kind not in ("token", "default"):
            return None
        return f"Bearer {(await self.credential.get_token(_SCOPE)).token}"

    async def close(self) -> None:
        """Close a credential that was made here."""
        owned, self._owned = self._owned, None
        close = getattr(owned, "close", None)
        if close is not None:
            await close()


class _Tokens:
    """What the driver asks for tokens; it keeps one until it ends.

    The end is noted, since a refusal that has no body does not tell that it was the reason.
    """

    def __init__(self, fetch: Callable[..., Awaitable[AccessToken]], proof: Proof) -> None:
        """Remember whom to ask."""
        self._fetch = fetch
        self._proof = proof

    async def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        """Return a fresh token."""
        token = await self._fetch(*scopes, **options)
        if not hasattr(cast("object", token), "expires_on"):
            raise InvalidInputError(
                "The function given as credential answered no AccessToken(token, expires_on).",
                option="credential",
            )
        seconds = min(token.expires_on, _LATER.timestamp() - 1)
        self._proof.expires = datetime.fromtimestamp(seconds, UTC)
        return token

    async def close(self) -> None:
        """Do nothing: what it asks is closed by who made it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _end_of(token: str) -> datetime | None:
    """Return when a SAS token ends, where it says so."""
    try:
        end = datetime.fromisoformat(parse_qs(token)["se"][0])
    except (KeyError, ValueError):
        return None
    return end.replace(tzinfo=UTC) if end.tzinfo is None else end
