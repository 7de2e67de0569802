"""Objects in a container of Azure Blob Storage: ``az://container/prefix``.

A key ``a/b`` is the block blob ``prefix/a/b``. See `open_azure` for accounts, credentials and
endpoints, and for the promises.
"""

from icechunk_async_azure.storage import AzureStorage, open_azure

__all__ = ["AzureStorage", "open_azure"]
