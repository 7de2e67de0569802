"""Objects in Google Cloud Storage: ``gs://bucket/prefix``.

Sessions and credentials are those of gcsfs. Requests are built here, one for each operation,
because gcsfs neither updates on a generation nor returns the new one. See `open_gcs`.
"""

from icechunk_async_gcs.options import AccessToken
from icechunk_async_gcs.storage import GCSStorage, open_gcs

__all__ = ["AccessToken", "GCSStorage", "open_gcs"]
