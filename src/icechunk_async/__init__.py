"""Versioned, transactional Zarr on object storage, asyncio to the bottom."""
