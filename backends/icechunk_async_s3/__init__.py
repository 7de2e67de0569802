"""Objects in a bucket of S3, or of a server that speaks its protocol: ``s3://bucket/prefix``.

aiobotocore brings sessions, credentials, endpoints and whatever is rare. Reading, writing and
looking at one object go through aiohttp directly, with a signer of our own, because the stock
client needs several times the processor time of its own HTTP library. See `open_s3` for
the options.
"""

from icechunk_async_s3.keys import S3Credentials
from icechunk_async_s3.storage import S3Storage, open_s3

__all__ = ["S3Credentials", "S3Storage", "open_s3"]
