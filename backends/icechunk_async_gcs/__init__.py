"""Objects in Google Cloud Storage: ``gs://bucket/prefix``.

Sessions and credentials are those of gcsfs; requests are made here, one for each operation, so that
every precondition, generation and answer is seen. See `open_gcs`.
"""

from icechunk_async_gcs.options import AccessToken
from icechunk_async_gcs.storage import GCSStorage, open_gcs

__all__ = ["AccessToken", "GCSStorage", "open_gcs"]
