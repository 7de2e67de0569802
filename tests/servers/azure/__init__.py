"""Azure Blob Storage, as Azurite serves it."""
