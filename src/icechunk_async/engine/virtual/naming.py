"""Name the place of a repository as a container of virtual chunks: the inverse of `sources`.

Nothing that proves who asks goes into a container: it is stored, and readers bring their own.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

from icechunk_async.errors import InvalidInputError
from icechunk_async.format.config import (
    AzureStore,
    GcsStore,
    HttpStore,
    LocalFileSystemStore,
    S3CompatibleStore,
    S3Options,
    S3Store,
    TigrisStore,
    VirtualChunkContainer,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.format.config import ObjectStoreConfig
    from icechunk_async.storage import StorageDescription

__all__ = ["container_at"]

_OTHER_CLIENTS: Final = "obstore+"
_LITERAL: Final = "/!$&'()*+,;=:@~"
"""Characters that are literal in the path of a URL, besides letters, digits and ``-._``."""


def container_at(description: StorageDescription) -> VirtualChunkContainer:
    """Return the container of the place where a storage is, with a name.

    The same place has the same name at all times.

    Raises:
        InvalidInputError: no container can name the place.
    """
    scheme, _, rest = description.url.removeprefix(_OTHER_CLIENTS).partition("://")
    host, _, path = rest.partition("/")
    options = description.options
    store: ObjectStoreConfig
    match scheme:
        case "file":
            path = unquote(path)
            store = LocalFileSystemStore(f"/{path}")
        case "s3":
            store = _s3_store(options)  # here and for "gs" the path is taken literally
        case "gs":
            store = GcsStore()
        case "az" if account := _account(options):
            store, path = AzureStore({"account": account}), unquote(path)
        case "http" | "https":
            store, path = HttpStore(), unquote(path)
        case _:
            raise InvalidInputError(
                f"{description.url!r} cannot be the origin of a shallow copy: virtual chunk "
                "containers name places of S3, Google Cloud Storage, Azure (give account_name=), "
                "web servers and local disks. Copy the chunks as well."
            )
    path = _as_prefix(path.strip("/"))
    prefix = f"{scheme}://{host}/{path}/" if path else f"{scheme}://{host}/"
    # References of shallow copies name it, and copies of one origin made years apart must agree.
    name = f"origin-{hashlib.sha256(prefix.encode()).hexdigest()[:8]}"
    return VirtualChunkContainer(prefix, store, name)


def _as_prefix(path: str) -> str:
    """Return a path as it stands in a container.

    The official engine compares prefixes as they are with locations that are decoded, so a path is
    encoded only if it would mean something else otherwise. Then only this library finds it.
    """
    plain = unquote(path) == path and path.isprintable() and not {"?", "#"} & set(path)
    return path if plain else quote(path, safe=_LITERAL)


def _account(options: Mapping[str, Any]) -> str | None:
    """Return the storage account of Azure; an address alone does not name it."""
    pairs = [it.partition("=") for it in str(options.get("connection_string") or "").split(";")]
    named = {key.strip().lower(): value for key, _, value in pairs}
    found: str | None = options.get("account_name") or named.get("accountname")
    return found or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")


def _s3_store(options: Mapping[str, Any]) -> ObjectStoreConfig:
    endpoint = options.get("endpoint_url")
    known = S3Options(
        region=options.get("region"),
        endpoint_url=endpoint,
        allow_http=bool(options.get("allow_http")),
        anonymous=bool(options.get("anonymous")),
        # Servers that are named get the bucket in the path in any case.
        force_path_style=bool(options.get("force_path_style")) or endpoint is not None,
        requester_pays=bool(options.get("requester_pays")),
    )
    if options.get("preset") == "tigris":
        return TigrisStore(known)
    return S3Store(known) if endpoint is None else S3CompatibleStore(known)
