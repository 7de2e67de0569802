"""Requests to the service: names of blobs, and translated errors."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final

from icechunk_async.errors import (
    IcechunkError,
    InvalidObjectKeyError,
    StorageClosedError,
    StorageError,
)
from icechunk_async.storage import Version, check_key
from icechunk_async_azure.clients import released
from icechunk_async_azure.failures import FOREIGN, explain

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from azure.storage.blob import BlobProperties

    from icechunk_async_azure.clients import Client, Clients
    from icechunk_async_azure.options import Place

__all__ = ["Requests", "is_etag"]

_MAX_NAME: Final = 1024
_ETAG: Final = re.compile(r'(?:W/)?"[\x21\x23-\x7e]*"')


def is_etag(version: Version) -> bool:
    """Return whether the service can have issued ``version``; ``*`` would match any."""
    return _ETAG.fullmatch(version.token) is not None


class Requests:
    """The state that all operations of one storage share."""

    def __init__(self, clients: Clients, place: Place) -> None:
        """Send through ``clients`` for blobs of ``place``."""
        self.clients = clients
        self.place = place

    def name(self, key: str) -> str:
        """Return the blob's name for a key.

        Raises:
            InvalidObjectKeyError: it can be none.
        """
        name = self.place.prefix + check_key(key)
        if "\\" in key:
            raise InvalidObjectKeyError(
                f"{key[:200]!r} cannot name a blob: Azure takes a backslash for a slash. Use "
                "another character.",
                key=key,
            )
        if len(name) > _MAX_NAME:
            raise InvalidObjectKeyError(
                f"{key[:200]!r} cannot name a blob: with the prefix it has {len(name)} characters, "
                f"and Azure allows {_MAX_NAME}. Use a shorter prefix or key.",
                key=key,
            )
        return name

    async def client(self, action: str, key: str) -> Client:
        """Return the running loop's client.

        Raises:
            IcechunkError: there are no credentials, or the storage was closed.
        """
        return await self.ask(self.clients.here(), action, key=key)

    async def properties(self, client: Client, key: str, *, action: str = "read") -> BlobProperties:
        """Return size, version and metadata of a blob."""
        name = self.name(key)
        found = await self.ask(client.blob(name).get_blob_properties(), action, key=key)
        self.version(found, key)
        return found

    def version(self, found: BlobProperties, key: str) -> Version:
        """Return the version of a blob.

        Raises:
            StorageError: the reply does not tell it.
        """
        etag: str | None = found.etag
        if not etag:
            raise StorageError(
                f"The reply about {key!r} has no ETag, without which no version is known. Let the "
                "service, and proxies before it, send that header.",
                key=key,
            )
        return Version(etag)

    async def ask[T](self, request: Awaitable[T], action: str, *, key: str | None = None) -> T:
        """Await a request and translate its errors.

        Raises:
            IcechunkError: the request failed.
        """
        try:
            with released():
                return await request
        except IcechunkError:
            raise  # ours already, such as that of the caller's function for tokens
        except FOREIGN as error:
            failure = self.explain(error, action, key=key)
        except RuntimeError as error:
            # The driver fails with it when its connections are closed under it.
            if not self.clients.closed:
                raise
            failure = self.explain(error, action, key=key)
        raise failure  # outside the handler, so that no exception with a secret becomes its context

    def explain(self, error: BaseException, action: str, *, key: str | None = None) -> Any:
        """Return the contract's error for ``error``, as `failures.explain` does."""
        if self.clients.closed:
            # What broke then broke because its connection was closed.
            return StorageClosedError(
                f"The storage was closed while {action!r} was under way. Open it again."
            )
        what = f"{key!r} in" if key is not None else "from"
        container = self.place.container
        where = f"{what} container {container!r}"
        expires = self.clients.expires(asyncio.get_running_loop())
        return explain(error, action, where, container=container, key=key, expires=expires)
