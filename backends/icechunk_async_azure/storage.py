"""The storage: one method for each operation, which `reading` and `writing` implement."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

from icechunk_async.storage import Capabilities, StorageDescription, check_user_agent
from icechunk_async_azure.clients import Clients, Tuning
from icechunk_async_azure.copying import copy, copy_from
from icechunk_async_azure.options import check_number, login_of, place_of
from icechunk_async_azure.reading import list_entries, read, read_if_changed
from icechunk_async_azure.requests import Requests
from icechunk_async_azure.writing import delete, owned, write

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable

    from azure.core.credentials import AccessToken
    from azure.core.credentials_async import AsyncTokenCredential

    from icechunk_async.storage import (
        Data,
        DeleteFailure,
        Expected,
        ListEntry,
        RangeRequest,
        Retrieved,
        Storage,
        Version,
    )

    type Credential = (
        AsyncTokenCredential
        | Callable[[], AsyncTokenCredential]
        | Callable[[], Awaitable[AccessToken]]
    )

__all__ = ["AzureStorage", "open_azure"]

_TIMEOUT_SECONDS: Final = 60.0
_CONNECT_TIMEOUT_SECONDS: Final = 20.0


@asynccontextmanager
async def open_azure(
    url: str,
    *,
    account_name: str | None = None,
    account_key: str | None = None,
    sas_token: str | Callable[[], Awaitable[str]] | None = None,
    connection_string: str | None = None,
    credential: Credential | None = None,
    anonymous: bool = False,
    endpoint_url: str | None = None,
    allow_http: bool = False,
    timeout_seconds: float = _TIMEOUT_SECONDS,
    connect_timeout_seconds: float = _CONNECT_TIMEOUT_SECONDS,
    user_agent: str | None = None,
) -> AsyncGenerator[AzureStorage]:
    """Open the container and prefix that ``az://container/prefix`` names; nothing is sent yet.

    At most one of ``account_key``, ``sas_token``, ``connection_string``, ``credential`` and
    ``anonymous`` authenticates. Without any, the environment does
    (``AZURE_STORAGE_CONNECTION_STRING``, ``AZURE_STORAGE_ACCOUNT_KEY``,
    ``AZURE_STORAGE_SAS_TOKEN``), and otherwise the default credential
    (``azure.identity.aio.DefaultAzureCredential``).

    Args:
        url: the container must exist. A prefix is the beginning of all keys, with a ``/``.
        account_name: the storage account; by default ``AZURE_STORAGE_ACCOUNT_NAME``.
        account_key: one of the account's keys, in base64.
        sas_token: a shared access signature, or an async function that returns one; it is called
            again two minutes before that token expires.
        connection_string: as the portal shows it; it also names the account.
        credential: a credential of ``azure.identity.aio``, which works on one event loop; a
            function that makes one, called for each event loop; or an async function that returns
            an ``AccessToken``.
        anonymous: send no credentials, for public containers.
        endpoint_url: address of the account where it is not the public one, such as
            ``http://127.0.0.1:10000/devstoreaccount1``.
        allow_http: accept an address without encryption, for emulators.
        timeout_seconds: how long the service may be silent during a request.
        connect_timeout_seconds: how long a connection may take.
        user_agent: comes before the driver's name in the header ``User-Agent`` of each request.

    Raises:
        InvalidURLError: the URL names no container.
        InvalidInputError: an option has a value that it cannot have, or two contradict each other.

    Cancellation: requests in flight are aborted. Connections of blocked event loops are closed once
        those run again.
    """
    options: dict[str, Any] = {
        "account_name": account_name,
        "account_key": account_key,
        "sas_token": sas_token,
        "connection_string": connection_string,
        "credential": credential,
        "anonymous": anonymous or None,
        "endpoint_url": endpoint_url,
        "allow_http": allow_http or None,
        "timeout_seconds": None if timeout_seconds == _TIMEOUT_SECONDS else timeout_seconds,
        "connect_timeout_seconds": (
            None if connect_timeout_seconds == _CONNECT_TIMEOUT_SECONDS else connect_timeout_seconds
        ),
        "user_agent": user_agent,
    }
    # Options that have their defaults do not travel: equal storages have equal descriptions.
    given = {name: value for name, value in options.items() if value is not None}
    check_number("timeout_seconds", timeout_seconds, 0.001)
    check_number("connect_timeout_seconds", connect_timeout_seconds, 0.001)
    check_user_agent(user_agent)
    place, login = place_of(url), login_of(given)
    tuning = Tuning(timeout_seconds, connect_timeout_seconds, user_agent)
    clients = Clients(login, place, tuning)
    try:
        capabilities = Capabilities(documented=login.is_documented)
        yield AzureStorage(StorageDescription(url, given), Requests(clients, place), capabilities)
    finally:
        await clients.close()


class AzureStorage:
    """A `Storage` in a container; made by `open_azure`."""

    def __init__(
        self, description: StorageDescription, requests: Requests, capabilities: Capabilities
    ) -> None:
        """Make a handle; use `open_azure`."""
        self._capabilities = capabilities
        self._description = description
        self._requests = requests

    def __repr__(self) -> str:
        """Show the URL, which holds no secret."""
        return f"AzureStorage({self._description.url!r})"

    @property
    def capabilities(self) -> Capabilities:
        """Every promise."""
        return self._capabilities

    @property
    def description(self) -> StorageDescription:
        """The URL and the options that were given."""
        return self._description

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it; a suffix costs two requests."""
        return await read(self._requests, key, byte_range)

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read a whole object unless it is still at ``version``."""
        return await read_if_changed(self._requests, key, version)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object; one request, or one for each 16 MiB and one more."""
        return await write(self._requests, key, owned(data), if_version)

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete objects; one request each, 16 at a time."""
        return await delete(self._requests, keys)

    def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List objects, 500 a request."""
        return list_entries(self._requests, prefix, start_after, grouped=delimiter is not None)

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object; one request up to 256 MiB, in blocks beyond."""
        return await copy(self._requests, source, target, if_version)

    @property
    def requests(self) -> Requests:
        """How blobs are reached, for copies to another container."""
        return self._requests

    def copies_from(self, source: Storage) -> bool:
        """Return whether the source is a container of the same account."""
        if not isinstance(source, AzureStorage):
            return False
        ours, theirs = self._requests.clients.login, source.requests.clients.login
        return ours.account_url == theirs.account_url

    async def copy_from(self, source: Storage, key: str) -> None:
        """Copy an object of another container, by the service; above 256 MiB in blocks."""
        assert isinstance(source, AzureStorage)
        await copy_from(self._requests, source.requests, key)

    async def sync(self) -> None:
        """Return at once: an acknowledged write is durable."""
        self._requests.clients.check_open()
