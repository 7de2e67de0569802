"""Files of a repository in another place than its own, which the reader has to trust."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.credentials._refresh import Credential
from icechunk_async.errors import StorageError, VirtualAccessError
from icechunk_async.format.config.secrets import veiled_url
from icechunk_async.storage import open_storage
from icechunk_async.storage.policies.wrapping import PassingStorage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable

    from icechunk_async.engine.virtual.chunks import VirtualAccess
    from icechunk_async.storage import (
        Capabilities,
        Data,
        DeleteFailure,
        Expected,
        ListEntry,
        RangeRequest,
        Retrieved,
        Storage,
        Version,
    )

__all__ = ["Elsewhere", "open_apart", "other_grants"]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A place other than the repository's, where some of its files are."""

    url: str
    """Without a slash at its end."""
    folders: tuple[str, ...]
    """How the keys of those files begin."""


class _Apart(PassingStorage):
    """Files whose keys begin as some folders are in a second storage; all others in the first."""

    def __init__(self, storage: Storage, files: Storage, folders: tuple[str, ...]) -> None:
        super().__init__(storage)
        self._files = files
        self._folders = folders

    def _of(self, key: str) -> Storage:
        return self._files if key.startswith(self._folders) else self.wrapped

    @property
    def capabilities(self) -> Capabilities:
        # Conditions are those of the first: only states are written under them, and files never.
        first, second = self.wrapped.capabilities, self._files.capabilities
        return replace(
            first,
            writable=first.writable and second.writable,
            shared=first.shared and second.shared,
            reasons={**second.reasons, **first.reasons},
        )

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        return await self._of(key).get(key, byte_range)

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        return await self._of(key).get_if_changed(key, version)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        target = self._of(key)
        if target is self.wrapped:  # what the object refers to must be durable before it
            await self._files.sync()
        return await target.put(key, data, if_version=if_version)

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        doomed = list(keys)
        failures: list[DeleteFailure] = []
        for place in (self._files, self.wrapped):
            mine = [key for key in doomed if self._of(key) is place]
            failures += await place.delete(mine) if mine else []
        return failures

    def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        return self._of(prefix).list_prefix(prefix, start_after=start_after, delimiter=delimiter)

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        place = self._of(source)
        if place is not self._of(target):
            raise StorageError(f"{source!r} and {target!r} are in two storages.", key=source)
        return await place.copy(source, target, if_version=if_version)

    async def sync(self) -> None:
        await self._files.sync()
        await self.wrapped.sync()


@asynccontextmanager
async def open_apart(
    storage: Storage, place: Elsewhere, authorized: Mapping[str, VirtualAccess]
) -> AsyncGenerator[Storage]:
    """Open the place of a repository's files, and return both places as one storage.

    Args:
        storage: where the repository is.
        place: where its files are.
        authorized: the places outside of repositories that the caller trusts, by URL.

    Raises:
        VirtualAccessError: the place is not among them.
    """
    grants = {url.rstrip("/"): access for url, access in authorized.items()}
    if place.url not in grants:
        shown = veiled_url(place.url)
        raise VirtualAccessError(
            f"The files of the repository at {storage.description.url!r} are at {shown!r}, as "
            "its state file says, and reading there is not authorised. If you trust it, open the "
            f"repository with authorize_virtual_chunk_access={{{shown!r}: None}}, or with "
            "credentials, options of the backend or an open storage in place of None.",
            url_prefix=shown,
            url_prefixes=(shown,),
        )
    access = grants[place.url]
    if access is None or isinstance(access, Mapping | Credential):
        given = await access.storage_options() if isinstance(access, Credential) else access
        async with open_storage(place.url, **(given or {})) as files:
            yield _Apart(storage, files, place.folders)
    else:
        yield _Apart(storage, access, place.folders)


def other_grants(
    authorized: Mapping[str, VirtualAccess], place: Elsewhere
) -> Mapping[str, VirtualAccess]:
    """Return the grants that are not for the place of a repository's own files."""
    return {url: it for url, it in authorized.items() if url.rstrip("/") != place.url}
