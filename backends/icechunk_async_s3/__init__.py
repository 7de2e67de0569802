"""Objects in a bucket of S3, or of a server that speaks its protocol: ``s3://bucket/prefix``.

aiobotocore provides sessions, credentials, endpoints and uploads in parts. All other requests are
sent through aiohttp directly, with the signer in `signing`, because the stock client needs several
times the processor time of the HTTP library below it. See `open_s3` for the options.
"""

from icechunk_async_s3.credentials import S3Credentials
from icechunk_async_s3.storage import S3Storage, open_s3

__all__ = ["S3Credentials", "S3Storage", "open_s3"]
