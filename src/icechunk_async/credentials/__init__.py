"""Credentials for the sources of virtual chunks, as plain values.

Given to ``Repository.open(authorize_virtual_chunk_access={url_prefix: credential})``. Values
pickle with what they hold, since workers need it; no repr shows a secret.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from icechunk_async.credentials._refresh import Callback, Credential
    from icechunk_async.credentials.azure import (
        AzureAccountKey,
        AzureAnonymous,
        AzureBearerToken,
        AzureFromEnvironment,
        AzureRefreshable,
        AzureSasToken,
    )
    from icechunk_async.credentials.gcs import (
        GcsAnonymous,
        GcsBearerToken,
        GcsFromEnvironment,
        GcsRefreshable,
        GcsServiceAccountFile,
        GcsServiceAccountKey,
    )
    from icechunk_async.credentials.s3 import (
        S3Anonymous,
        S3FromEnvironment,
        S3Refreshable,
        S3StaticCredentials,
    )
    from icechunk_async.credentials.web import (
        HttpAccess,
        HttpBearerToken,
        HttpHeaders,
        HttpRefreshable,
        LocalFileSystemAccess,
    )

__all__ = [
    "AzureAccountKey",
    "AzureAnonymous",
    "AzureBearerToken",
    "AzureFromEnvironment",
    "AzureRefreshable",
    "AzureSasToken",
    "Callback",
    "Credential",
    "GcsAnonymous",
    "GcsBearerToken",
    "GcsFromEnvironment",
    "GcsRefreshable",
    "GcsServiceAccountFile",
    "GcsServiceAccountKey",
    "HttpAccess",
    "HttpBearerToken",
    "HttpHeaders",
    "HttpRefreshable",
    "LocalFileSystemAccess",
    "S3Anonymous",
    "S3FromEnvironment",
    "S3Refreshable",
    "S3StaticCredentials",
]

# Imported at first use: most repositories have no virtual chunks, or those of one kind of store.
_NAMES: Final = {
    "_refresh": ("Callback", "Credential"),
    "azure": (
        "AzureAccountKey",
        "AzureAnonymous",
        "AzureBearerToken",
        "AzureFromEnvironment",
        "AzureRefreshable",
        "AzureSasToken",
    ),
    "gcs": (
        "GcsAnonymous",
        "GcsBearerToken",
        "GcsFromEnvironment",
        "GcsRefreshable",
        "GcsServiceAccountFile",
        "GcsServiceAccountKey",
    ),
    "s3": ("S3Anonymous", "S3FromEnvironment", "S3Refreshable", "S3StaticCredentials"),
    "web": (
        "HttpAccess",
        "HttpBearerToken",
        "HttpHeaders",
        "HttpRefreshable",
        "LocalFileSystemAccess",
    ),
}
_HOMES: Final = {name: home for home, names in _NAMES.items() for name in names}

if not TYPE_CHECKING:  # else every misspelt name would have a type

    def __getattr__(name: str) -> object:
        """Import a public name."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

    def __dir__() -> list[str]:
        """List the public names, imported or not."""
        return sorted({*globals(), *__all__})
