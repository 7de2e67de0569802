"""Arrays of TensorStore on the local disk, of the same shape as those of the others."""

from __future__ import annotations

from typing import Any

import tensorstore

__all__ = ["tensorstore_array"]


def tensorstore_array(
    driver: str, directory: str, count: int, chunk_bytes: int, *, is_new: bool = True
) -> Any:
    """Open an array of ``count`` chunks: ``zarr3`` in plain files, or in ``ocdbt``."""
    length = chunk_bytes // 8
    base = {"driver": "file", "path": f"{directory}/"}
    kvstore = base if driver == "zarr3" else {"driver": "ocdbt", "base": f"file://{directory}/"}
    spec: dict[str, Any] = {"driver": "zarr3", "kvstore": kvstore}
    if is_new:
        spec["metadata"] = {
            "data_type": "float64",
            "shape": [count * length],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [length]}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        }
    # As every contender: read from the operating system each time.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
    opened: Any = tensorstore.open(spec, context=context, create=is_new, open=not is_new)
    return opened.result()
