"""Who may read the sources of virtual chunks: credentials, as plain values.

Given to ``Repository.open(authorize_virtual_chunk_access={url_prefix: credential})``. Values
pickle with what they hold, since workers need it; no repr shows a secret.
"""

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
