"""Virtual chunks: write many references to bytes in files outside of the repository."""

from icechunk_async.zarr.virtual.datasets import write_virtual_dataset
from icechunk_async.zarr.virtual.kerchunk import write_kerchunk_references
from icechunk_async.zarr.virtual.references import VirtualChunkSpec

__all__ = ["VirtualChunkSpec", "write_kerchunk_references", "write_virtual_dataset"]
