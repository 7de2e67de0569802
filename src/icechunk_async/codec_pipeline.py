"""Read many small chunks with one call to the store, instead of one call for each.

Zarr asks the store of an array for one chunk at a time. For chunks of some kilobytes that takes far
longer than reading them. `IcechunkCodecPipeline` hands all chunks of a selection to this library's
stores at once:

    zarr.config.set({"codec_pipeline.path": "icechunk_async.codec_pipeline.IcechunkCodecPipeline"})

Arrays use the pipeline that is set when they are opened. Zarr imports this module when it opens its
first array, so it imports nothing else of the library.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np
from zarr.codecs import BytesCodec
from zarr.core.chunk_utils import decode_and_scatter_chunk
from zarr.core.codec_pipeline import FusedCodecPipeline
from zarr.storage import StorePath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt
    from zarr.abc.codec import GetResult
    from zarr.abc.store import ByteGetter
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import NDBuffer
    from zarr.core.indexing import SelectorTuple

    type Part = tuple[ByteGetter, ArraySpec, SelectorTuple, SelectorTuple, bool]
    """Where a chunk is, its form, which part of it is wanted, where that goes, and whether it is
    all of the chunk."""

__all__ = ["IcechunkCodecPipeline", "ReadsManyChunks"]

_PLAIN_KINDS: Final = "biufc"
"""Truth values and numbers, which are stored as they are in memory but for the order of bytes."""


class ReadsManyChunks(Protocol):
    """The part of this library's stores that the pipeline uses."""

    async def read_chunks(
        self,
        keys: Sequence[str],
        take: Callable[[int, bytes | memoryview | None], None],
        *,
        chunk_bytes: int,
    ) -> None:
        """Read chunks of one array, several at a time.

        Args:
            keys: of chunks, all of one array.
            take: called for each with its index and its bytes, None if there is no such chunk; in
                any order, on any thread, also at the same time.
            chunk_bytes: what a decoded chunk takes, which bounds the memory in use.
        """
        ...


class IcechunkCodecPipeline(FusedCodecPipeline):
    """Zarr's fused pipeline, which reads all chunks of a selection with one call to the store.

    Other stores, sharded arrays, and codecs that only work on an event loop are read as by
    `FusedCodecPipeline`, and so is everything written.

    Memory: besides the result, 64 MB of chunks or as many as ``async.concurrency`` allows.
    """

    async def read(
        self, batch_info: Iterable[Part], out: NDBuffer, drop_axes: tuple[int, ...] = ()
    ) -> tuple[GetResult, ...]:
        """Read, decode and select chunks into ``out``.

        Raises:
            What the store and the codecs raise; ``out`` is then partly filled.

        Cancellation: ``out`` is partly filled. Cost: see ``IcechunkStore.read_chunks``.
        """
        batch = list(batch_info)
        store = self._store_of_many(batch)
        if store is None:
            return await super().read(batch, out, drop_axes)
        target = _Target(self, batch, out, drop_axes)
        keys = [cast("StorePath", part[0]).path for part in batch]
        await store.read_chunks(keys, target.take, chunk_bytes=_size_of(batch[0][1]))
        return tuple(cast("list[GetResult]", target.results))

    def _store_of_many(self, batch: list[Part]) -> ReadsManyChunks | None:
        """Return the store if it can read these chunks with one call."""
        if len(batch) < 2 or self.sync_transform is None or self.supports_partial_decode:
            return None
        getter = batch[0][0]
        store = getter.store if isinstance(getter, StorePath) else None
        return cast("ReadsManyChunks", store) if hasattr(store, "read_chunks") else None


class _Target:
    """Where the chunks of one selection go. Usable from any thread."""

    def __init__(
        self,
        pipeline: IcechunkCodecPipeline,
        batch: list[Part],
        out: NDBuffer,
        drop_axes: tuple[int, ...],
    ) -> None:
        assert pipeline.sync_transform is not None
        self.results: list[GetResult | None] = [None] * len(batch)
        self._batch = batch
        self._out = out
        self._drop_axes = drop_axes
        self._decode = pipeline.sync_transform.decode_chunk
        self._compressors = cast("tuple[Any, ...]", pipeline.bytes_bytes_codecs)[::-1]
        self._spec = batch[0][1]
        array = out.as_ndarray_like()
        self._array = cast("npt.NDArray[Any]", array)
        self._stored = _stored_as(pipeline, self._spec, array)
        """The data type of stored numbers, if chunks are nothing but numbers; else None."""
        self._shape = self._spec.shape
        self._size = _size_of(self._spec)

    def take(self, index: int, data: bytes | memoryview | None) -> None:
        """Decode a chunk, and copy the part of it that is wanted."""
        _, spec, selection, target, _ = self._batch[index]
        if data is not None and self._stored is not None and spec is self._spec:
            raw = self._decompress(data) if self._compressors else data
            if len(raw) == self._size:
                values = np.frombuffer(raw, self._stored).reshape(self._shape)[selection]
                if self._drop_axes:
                    values = values.squeeze(self._drop_axes)
                self._array[target] = values
                self.results[index] = {"status": "present"}
                return  # else Zarr says what is wrong
        buffer = None if data is None else spec.prototype.buffer.from_bytes(data)
        self.results[index] = decode_and_scatter_chunk(
            buffer,
            self._out,
            chunk_spec=spec,
            chunk_selection=selection,
            out_selection=target,
            drop_axes=self._drop_axes,
            decode=self._decode,
        )

    def _decompress(self, data: bytes | memoryview) -> memoryview:
        buffer = self._spec.prototype.buffer.from_bytes(cast("bytes", data))
        for codec in self._compressors:
            buffer = codec._decode_sync(buffer, self._spec)  # noqa: SLF001 -- the only one that waits for nothing
        return memoryview(buffer.as_numpy_array())


def _size_of(spec: ArraySpec) -> int:
    """Return the bytes of a decoded chunk, as far as its data type tells."""
    return prod(spec.shape) * spec.dtype.to_native_dtype().itemsize


def _stored_as(
    pipeline: IcechunkCodecPipeline, spec: ArraySpec, array: object
) -> np.dtype[Any] | None:
    """Return the data type of stored numbers; None if chunks hold or become something else."""
    dtype = spec.dtype.to_native_dtype()
    codec = pipeline.array_bytes_codec
    if (
        pipeline.array_array_codecs
        or type(codec) is not BytesCodec
        or dtype.kind not in _PLAIN_KINDS
        or type(array) is not np.ndarray
        or array.dtype != dtype
    ):
        return None
    endian = getattr(codec.endian, "value", codec.endian)
    return dtype if endian is None else dtype.newbyteorder(cast("Any", endian))
