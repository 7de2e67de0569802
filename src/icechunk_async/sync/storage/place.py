"""The place of a repository: one constructor for each kind of store."""

from __future__ import annotations

import os
import sys
import weakref
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, override
from urllib.parse import quote

from icechunk_async._runtime.blocking.portal import run
from icechunk_async._runtime.clock import random_bytes
from icechunk_async.storage import ObjectInfo, normalize_url, open_storage
from icechunk_async.storage.redirects import follow
from icechunk_async.sync.errors import InvalidInputError, StorageError, translated
from icechunk_async.sync.official.display import Displayed, public
from icechunk_async.sync.official.mirrors import to_native
from icechunk_async.sync.official.sections import (
    S3Options,
    StorageConcurrencySettings,
    StorageRetriesSettings,
    StorageSettings,
)
from icechunk_async.sync.official.states import StorageObjectInfo
from icechunk_async.sync.storage.options import (
    azure_options,
    check_web_url,
    gcs_options,
    s3_options,
    s3_rows,
    sets_of_headers,
    web_options,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from icechunk_async.storage import Storage as AsyncStorage
    from icechunk_async.sync.credentials import (
        AnyAzureCredential,
        AnyGcsCredential,
        AnyS3Credential,
    )

    type Headers = dict[str, str] | None

__all__ = ["MemoryObjects", "Storage"]


class MemoryObjects:
    """The objects of an in-memory storage, which all its users share; dropped with the last."""

    def __init__(self) -> None:
        """Choose a new name."""
        self.url = f"memory://icechunk-async-{random_bytes(12).hex()}"
        _living[self.url] = self
        weakref.finalize(self, _forget, self.url).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a name, which only this process knows."""
        return _found, (self.url,)


_living: Final[weakref.WeakValueDictionary[str, MemoryObjects]] = weakref.WeakValueDictionary()
if hasattr(os, "register_at_fork"):  # the parent would not see a child's changes
    os.register_at_fork(after_in_child=_living.clear)


def _forget(url: str) -> None:
    backend: Any = sys.modules.get("icechunk_async_memory")
    if backend is not None:
        backend.forget(url)


def _found(url: str) -> MemoryObjects:
    objects = _living.get(url)
    if objects is None:
        raise StorageError(
            "An in-memory storage was unpickled in another process than the one that made it, or "
            "after that had dropped it. Use local_filesystem_storage() or an object store for "
            "data that several processes share.",
            "storage-config",
        )
    return objects


@public("")
class Storage(Displayed):
    """The place of a repository. Made by the functions of this module, or by `from_url`.

    It is a description: nothing is opened or sent before a repository is. It pickles with its
    credentials; no repr shows them.

    Attributes:
        location: a URL, objects in memory, or an open storage.
    """

    def __init__(
        self,
        location: str | MemoryObjects | AsyncStorage,
        options: Mapping[str, object] | None = None,
        *,
        credentials: object = None,
        rows: Mapping[str, object] | None = None,
        redirects: bool = False,
    ) -> None:
        """Use the functions of this module."""
        self.location = location
        self._options = dict(options or {})
        self._credentials = credentials
        self._shown = dict(rows or {})
        self._redirects = redirects

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Storage) and self.__dict__ == other.__dict__

    @override
    def __hash__(self) -> int:
        return hash(self.location)

    @override
    def _rows(self) -> list[tuple[str, object]]:
        return [(name, value) for name, value in self._shown.items() if value is not None]

    async def place(self) -> tuple[str | AsyncStorage, dict[str, object]]:
        """Return the arguments for the engine's `Repository.open` and `open_storage`.

        Returns: a location, and options (`storage_options`) with the credentials.

        Raises:
            StorageError: a redirect leads to no storage.
            IcechunkError: there are no credentials.
        """
        # Known in this process alone, so the URL is enough.
        if isinstance(self.location, MemoryObjects):
            return self.location.url, {}
        if not isinstance(self.location, str):
            return self.location, {}
        # Followed at each opening, as officially: the web server may name another place next time.
        if self._redirects:
            with translated():
                return await follow(self.location)
        options = dict(self._options)
        if self._credentials is not None and not options.get("anonymous"):
            # What the caller gave beside the credentials wins.
            options = {**await to_native(self._credentials).storage_options(), **options}
        return self.location, options

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[AsyncStorage]:
        """Open the engine's storage for the length of a block."""
        location, options = await self.place()
        if not isinstance(location, str):
            yield location
            return
        async with open_storage(location, **options) as storage:
            yield storage

    def default_settings(self) -> StorageSettings:
        """Return the default settings for this kind of storage."""
        if self._shown.get("type") not in ("in-memory", "local filesystem"):
            return StorageSettings()
        local = self._shown["type"] == "local filesystem"
        return StorageSettings(
            concurrency=StorageConcurrencySettings(5, 4096 if local else 1),
            retries=StorageRetriesSettings(1, 0, 0),
            unsafe_use_conditional_update=False if local else None,
            unsafe_use_metadata=False if local else None,
        )

    def list_objects(
        self, settings: StorageSettings | None = None, prefix: str | None = None
    ) -> list[tuple[str, int]]:
        """Return the key and size of every object; see `list_objects_metadata`."""
        return [(it.key, it.size_bytes) for it in self.list_objects_metadata(settings, prefix)]

    def list_objects_metadata(
        self, settings: StorageSettings | None = None, prefix: str | None = None
    ) -> list[StorageObjectInfo]:
        """Return the key, size and time of every object, in the order of the keys.

        Args:
            settings: only their retries are used.
            prefix: the beginning of the keys.

        Raises:
            StorageError: the storage failed.

        Cost: a request for each page of the listing; the whole listing is in memory.
        """
        return run(self._listed(settings or self.default_settings(), prefix or ""))

    async def _listed(self, settings: StorageSettings, prefix: str) -> list[StorageObjectInfo]:
        from icechunk_async.engine.policies import policies_of  # noqa: PLC0415 - needs NumPy
        from icechunk_async.storage.policies.stack import with_retries  # noqa: PLC0415 - needs NumPy

        with translated():
            async with self.opened() as storage:
                retry = policies_of(settings.to_native()).retry
                entries = with_retries(storage, retry).list_prefix(prefix)
                return [
                    StorageObjectInfo(it.key, it.size_bytes, it.last_modified)
                    async for it in entries
                    if isinstance(it, ObjectInfo)
                ]

    @classmethod
    def from_url(cls, url: str | os.PathLike[str], /, **options: object) -> Self:
        """Describe a path or URL of any installed backend, with the options of that backend.

        An addition to the official class; see `icechunk_async.storage.open_storage`.

        Raises:
            StorageError: the URL is empty, or has one slash after its scheme, such as
                ``dbfs:/data``; or it names a part of a repository.
        """
        with translated():
            if isinstance(url, str) and "|" in url:
                from icechunk_async.urls import plain_location  # noqa: PLC0415 -- loaded when it is used

                url = plain_location(url)
            location = normalize_url(url)
        return cls(location, options, rows={"type": "url", "url": location})

    @classmethod
    def from_storage(cls, storage: AsyncStorage) -> Self:
        """Use an open asynchronous storage, which does not pickle.

        An addition to the official class. The caller keeps the storage open, and it must work on
        the facade's event loop.
        """
        return cls(storage, rows={"type": "object", "url": storage.description.url})

    @classmethod
    def new_in_memory(cls) -> Self:
        """Describe objects in the memory of this process; see `in_memory_storage`."""
        return cls(MemoryObjects(), rows={"type": "in-memory"})

    @classmethod
    def new_local_filesystem(cls, path: str) -> Self:
        """Describe a directory; see `local_filesystem_storage`."""
        place = Path(path)
        rows = {"type": "local filesystem", "path": str(place)}
        return cls(place.absolute().as_uri(), rows=rows)

    @classmethod
    def new_s3(
        cls,
        config: S3Options,
        bucket: str,
        prefix: str | None,
        credentials: AnyS3Credential | None = None,
        legacy_rooted_keys: bool | None = None,  # noqa: FBT001
        *,
        read_headers: Headers = None,
        write_headers: Headers = None,
        headers: Headers = None,
    ) -> Self:
        """Describe a place in S3; see `s3_storage`."""
        _check_layout(legacy_rooted_keys)
        options = s3_options(config, sets_of_headers(headers, read_headers, write_headers))
        url, rows = _s3_place(bucket, prefix, config)
        return cls(url, options, credentials=credentials, rows=rows)

    @classmethod
    def new_s3_object_store(
        cls,
        config: S3Options,
        bucket: str,
        prefix: str | None,
        credentials: AnyS3Credential | None = None,
        *,
        read_headers: Headers = None,
        write_headers: Headers = None,
        headers: Headers = None,
    ) -> Self:
        """Describe a place in S3; the same as `new_s3`: this library has one client."""
        options = s3_options(config, sets_of_headers(headers, read_headers, write_headers))
        url, rows = _s3_place(bucket, prefix, config)
        return cls(url, options, credentials=credentials, rows={**rows, "type": "S3"})

    @classmethod
    def new_tigris(  # noqa: PLR0917 - the official order
        cls,
        config: S3Options,
        bucket: str,
        prefix: str | None,
        use_weak_consistency: bool,  # noqa: FBT001
        credentials: AnyS3Credential | None = None,
        legacy_rooted_keys: bool | None = None,  # noqa: FBT001
        *,
        read_headers: Headers = None,
        write_headers: Headers = None,
        headers: Headers = None,
    ) -> Self:
        """Describe a place in Tigris; see `tigris_storage`."""
        if config.region is None and not use_weak_consistency:
            raise StorageError(
                "Tigris storage needs a region for full consistency. Pass region=, or "
                "use_weak_consistency=True to read data that may be old.",
                "storage-config",
            )
        _check_layout(legacy_rooted_keys)
        config = _with(config, endpoint_url=config.endpoint_url or "https://t3.storage.dev")
        options = s3_options(config, sets_of_headers(headers, read_headers, write_headers))
        if use_weak_consistency:
            # Copies may be old, and a commit that compares with an old state would lose the newer
            # one.
            options |= {"read_only": True, "region": config.region or "auto"}
        else:
            # Without this header a read may come from a copy without the last write.
            asked = {"x-tigris-consistent": "true"}
            options["extra_headers"] = {**asked, **options.get("extra_headers", {})}
        url, rows = _s3_place(bucket, prefix, config)
        return cls(url, options, credentials=credentials, rows=rows)

    @classmethod
    def new_r2(  # noqa: PLR0917 - the official order
        cls,
        config: S3Options,
        bucket: str | None = None,
        prefix: str | None = None,
        account_id: str | None = None,
        credentials: AnyS3Credential | None = None,
        legacy_rooted_keys: bool | None = None,  # noqa: FBT001
        *,
        read_headers: Headers = None,
        write_headers: Headers = None,
        headers: Headers = None,
    ) -> Self:
        """Describe a place in Cloudflare's R2; see `r2_storage`."""
        if config.endpoint_url is None and account_id is None:
            raise StorageError("r2_storage needs endpoint_url or account_id.", "storage-config")
        if bucket is None:
            if prefix is None:
                raise StorageError("r2_storage needs bucket or prefix.", "storage-config")
            bucket, _, rest = prefix.partition("/")
            prefix = rest or None
        endpoint = config.endpoint_url or f"https://{account_id}.r2.cloudflarestorage.com"
        config = _with(
            config, endpoint_url=endpoint, region=config.region or "auto", force_path_style=True
        )
        return cls.new_s3(
            config,
            bucket,
            prefix,
            credentials,
            legacy_rooted_keys,
            read_headers=read_headers,
            write_headers=write_headers,
            headers=headers,
        )

    @classmethod
    def new_hf(  # noqa: PLR0917 - the official order
        cls,
        config: S3Options,
        bucket: str,
        prefix: str | None,
        namespace: str,
        credentials: AnyS3Credential | None = None,
        legacy_rooted_keys: bool | None = None,  # noqa: FBT001
        *,
        read_headers: Headers = None,
        write_headers: Headers = None,
        headers: Headers = None,
    ) -> Self:
        """Describe a place in a Hugging Face storage bucket; see `hf_storage`."""
        endpoint = config.endpoint_url or f"https://s3.hf.co/{namespace}"
        region = config.region or "us-east-1"
        config = _with(config, endpoint_url=endpoint, region=region, force_path_style=True)
        return cls.new_s3(
            config,
            bucket,
            prefix,
            credentials,
            legacy_rooted_keys,
            read_headers=read_headers,
            write_headers=write_headers,
            headers=headers,
        )

    @classmethod
    def new_gcs(
        cls,
        bucket: str,
        prefix: str | None,
        credentials: AnyGcsCredential | None = None,
        *,
        config: dict[str, str] | None = None,
        read_headers: Headers = None,
        write_headers: Headers = None,
        headers: Headers = None,
    ) -> Self:
        """Describe a place in Google Cloud Storage; see `gcs_storage`."""
        if read_headers or write_headers or headers:
            raise InvalidInputError(
                "gcs_storage(headers=...) is not possible: this library adds no headers to "
                "requests to Google Cloud Storage. Leave them out.",
                "invalid-credentials",
            )
        rows = {"type": "GCS", "bucket": bucket, "prefix": prefix}
        url = f"gs://{bucket}/{prefix or ''}"
        return cls(url, gcs_options(config or {}), credentials=credentials, rows=rows)

    @classmethod
    def new_azure_blob(
        cls,
        account: str,
        container: str,
        prefix: str,
        credentials: AnyAzureCredential | None = None,
        *,
        config: dict[str, str] | None = None,
    ) -> Self:
        """Describe a place in Azure Blob Storage; see `azure_storage`."""
        rows = {"type": "Azure", "account": account, "container": container, "prefix": prefix}
        options = {"account_name": account, **azure_options(config or {})}
        url = f"az://{container}/{quote(prefix)}"
        return cls(url, options, credentials=credentials, rows=rows)

    @classmethod
    def new_http(
        cls, base_url: str, config: dict[str, str] | None = None, headers: Headers = None
    ) -> Self:
        """Describe a place on a web server; see `http_storage`."""
        check_web_url(base_url)
        options = web_options(base_url, config or {}, headers)
        return cls(base_url, options, rows={"type": "HTTP", "url": base_url})

    @classmethod
    def new_redirect(cls, base_url: str) -> Self:
        """Describe the place that a web server redirects to; see `redirect_storage`."""
        check_web_url(base_url)
        return cls(base_url, rows={"type": "redirect", "url": base_url}, redirects=True)


def _check_layout(legacy_rooted_keys: bool | None) -> None:  # noqa: FBT001
    if legacy_rooted_keys:
        raise InvalidInputError(
            "legacy_rooted_keys=True is not possible: this library cannot read a repository whose "
            "keys begin with a slash. Copy it to a prefix with the official package first.",
            "bad-prefix",
        )


def _with(config: S3Options, **changes: Any) -> S3Options:
    return S3Options(**{**vars(config), **changes})


def _s3_place(bucket: str, prefix: str | None, config: S3Options) -> tuple[str, dict[str, object]]:
    rows = {"type": "S3 (native)", "bucket": bucket, "prefix": prefix, **s3_rows(config)}
    return f"s3://{bucket}/{prefix or ''}", rows
