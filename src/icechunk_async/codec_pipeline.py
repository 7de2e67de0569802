"""Read and write many small chunks with one call to the store, instead of one call for each.

Zarr asks the store of an array for one chunk at a time. For chunks of some kilobytes that takes far
longer than reading or writing them. `IcechunkCodecPipeline` hands all chunks of a selection to the
store at once:

    zarr.config.set({"codec_pipeline.path": "icechunk_async.codec_pipeline.IcechunkCodecPipeline"})

Arrays use the pipeline that is set when they are opened. Zarr imports this module when it opens its
first array, so it imports nothing else of the library.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np
from zarr.codecs import BytesCodec
from zarr.core.chunk_utils import decode_and_scatter_chunk, merge_and_encode_chunk
from zarr.core.codec_pipeline import FusedCodecPipeline
from zarr.storage import StorePath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt
    from zarr.abc.codec import GetResult
    from zarr.abc.store import ByteGetter, ByteSetter
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer, NDBuffer
    from zarr.core.indexing import SelectorTuple

    type Part[P] = tuple[P, ArraySpec, SelectorTuple, SelectorTuple, bool]
    """Where a chunk is, its form, which part of it is wanted, where that goes, and whether it is
    all of the chunk."""

__all__ = ["HasManyChunks", "IcechunkCodecPipeline"]

_PLAIN_KINDS: Final = "biufc"
"""Truth values and numbers, which are stored as they are in memory but for the order of bytes."""


class HasManyChunks(Protocol):
    """The part of this library's stores that the pipeline uses; see `IcechunkStore`."""

    async def read_chunks(
        self,
        keys: Sequence[str],
        take: Callable[[int, bytes | memoryview | None], None],
        *,
        chunk_bytes: int,
    ) -> None:
        """Read chunks of one array, and hand each over as it comes."""
        ...

    async def write_chunks(
        self,
        keys: Sequence[str],
        make: Callable[[int], bytes | memoryview | None],
        *,
        chunk_bytes: int,
    ) -> None:
        """Write chunks of one array, each made when it is its turn."""
        ...


class IcechunkCodecPipeline(FusedCodecPipeline):
    """Zarr's fused pipeline, which reads or writes many chunks with one call to the store.

    Other stores, sharded arrays, codecs that only work on an event loop, and chunks of which only
    a part is written are left to `FusedCodecPipeline`.

    Memory: besides the array, 64 MB of chunks, or as many as ``async.concurrency`` allows.
    """

    async def read(
        self, batch_info: Iterable[Part[ByteGetter]], out: NDBuffer, drop_axes: tuple[int, ...] = ()
    ) -> tuple[GetResult, ...]:
        """Read, decode and select chunks into ``out``.

        Errors are those of the store and of the codecs; ``out`` is then partly filled.

        Cancellation: ``out`` is partly filled. Cost: see ``IcechunkStore.read_chunks``.
        """
        batch = list(batch_info)
        # Of shards Zarr reads parts. Read whole, a selection of one inner chunk would cost a whole
        # shard.
        store = None if self.supports_partial_decode else self._store_of(batch)
        if store is None:
            return await super().read(batch, out, drop_axes)
        reading = _Reading(self, batch, out, drop_axes)
        await store.read_chunks(_keys(batch), reading.take, chunk_bytes=reading.form.size)
        return tuple(cast("list[GetResult]", reading.results))

    async def write(
        self,
        batch_info: Iterable[Part[ByteSetter]],
        value: NDBuffer,
        drop_axes: tuple[int, ...] = (),
    ) -> None:
        """Encode and write the chunks of ``value``; those of fill values are deleted.

        Errors are those of the store and of the codecs; some chunks are then written.

        Cancellation: some chunks are written. Cost: see ``IcechunkStore.write_chunks``.
        """
        batch = list(batch_info)
        # A chunk of which a part is written has to be read first; Zarr does both for one chunk at a
        # time.
        whole = [part for part in batch if part[4]]
        store = None if self.supports_partial_encode else self._store_of(whole)
        if store is None:
            await super().write(batch, value, drop_axes)
            return
        writing = _Writing(self, whole, value, drop_axes)
        await store.write_chunks(_keys(whole), writing.make, chunk_bytes=writing.form.size)
        if len(whole) < len(batch):
            await super().write([part for part in batch if not part[4]], value, drop_axes)

    def _store_of(self, batch: Sequence[Part[Any]]) -> HasManyChunks | None:
        """Return the store if it can read and write these chunks with one call."""
        # For one chunk there is no call to save. Codecs without a synchronous form need Zarr's own
        # path.
        if len(batch) < 2 or self.sync_transform is None:
            return None
        place = batch[0][0]
        store = place.store if isinstance(place, StorePath) else None
        # By what it can do, not by its class, which this module must not import: Zarr imports it
        # for every program that sets the pipeline.
        return cast("HasManyChunks", store) if hasattr(store, "read_chunks") else None


def _keys(batch: Sequence[Part[Any]]) -> list[str]:
    return [cast("StorePath", part[0]).path for part in batch]


class _Form:
    """How the chunks of one array are stored."""

    def __init__(self, pipeline: IcechunkCodecPipeline, spec: ArraySpec, array: NDBuffer) -> None:
        """Look at the codecs of an array, and at what is read into, or written from."""
        assert pipeline.sync_transform is not None
        self.codecs = pipeline.sync_transform
        self.spec = spec
        dtype = spec.dtype.to_native_dtype()
        self.size = prod(spec.shape) * dtype.itemsize
        """Bytes of a chunk that is not compressed, as far as the data type tells."""
        self._compressors = cast("tuple[Any, ...]", pipeline.bytes_bytes_codecs)
        values: Any = array.as_ndarray_like()
        self.array: npt.NDArray[Any] = values
        self.stored: np.dtype[Any] | None = None
        """The data type of stored numbers, if chunks are nothing but numbers."""
        codec = pipeline.array_bytes_codec
        # Then decoding is one look at the bytes. All else (other kinds, array codecs, memory of a
        # device) takes Zarr's functions, which decide the same cases in general.
        if (
            not pipeline.array_array_codecs
            and type(codec) is BytesCodec
            and dtype.kind in _PLAIN_KINDS
            and type(values) is np.ndarray
            and values.dtype == dtype
        ):
            endian = getattr(codec.endian, "value", codec.endian)
            self.stored = dtype if endian is None else dtype.newbyteorder(cast("Any", endian))

    def decompress(self, data: bytes | memoryview) -> bytes | memoryview:
        """Return the bytes of numbers."""
        if not self._compressors:
            return data
        buffer = self.buffer(data)
        # Encoding applied them in their order.
        for codec in reversed(self._compressors):
            buffer = codec._decode_sync(buffer, self.spec)  # noqa: SLF001 -- waits for nothing
        return memoryview(buffer.as_numpy_array())

    def compress(self, numbers: npt.NDArray[Any]) -> memoryview | None:
        """Return the bytes to store for numbers that follow one another in memory."""
        if not self._compressors:
            return memoryview(numbers.reshape(-1).view("u1"))
        found: Any = self.spec.prototype.buffer.from_array_like(
            cast("Any", numbers.reshape(-1).view("u1"))
        )
        for codec in self._compressors:
            found = codec._encode_sync(found, self.spec)  # noqa: SLF001 -- waits for nothing
            if found is None:
                return None
        return _view(found)

    def buffer(self, data: bytes | memoryview) -> Buffer:
        """Return bytes as the array's codecs take them."""
        return self.spec.prototype.buffer.from_bytes(cast("bytes", data))


def _view(buffer: Buffer) -> memoryview:
    return memoryview(buffer.as_numpy_array()).cast("B")


class _Reading:
    """Decodes the chunks of one selection into an array. Usable from any thread."""

    def __init__(
        self,
        pipeline: IcechunkCodecPipeline,
        batch: Sequence[Part[Any]],
        out: NDBuffer,
        drop_axes: tuple[int, ...],
    ) -> None:
        self.form = _Form(pipeline, batch[0][1], out)
        self.results: list[GetResult | None] = [None] * len(batch)
        self._batch = batch
        self._out = out
        self._drop_axes = drop_axes

    def take(self, index: int, data: bytes | memoryview | None) -> None:
        """Decode a chunk, and copy the part of it that is wanted."""
        _, spec, selection, target, _ = self._batch[index]
        form = self.form
        # The spec by identity: edge chunks of other grids come with another one, and another shape.
        if data is not None and form.stored is not None and spec is form.spec:
            raw = form.decompress(data)
            # Bytes from storage may be too few or too many.
            if len(raw) == form.size:
                values = np.frombuffer(raw, form.stored).reshape(spec.shape)[selection]
                if self._drop_axes:
                    values = values.squeeze(self._drop_axes)
                form.array[target] = values
                self.results[index] = {"status": "present"}
                return  # else Zarr says what is wrong
        self.results[index] = decode_and_scatter_chunk(
            None if data is None else form.buffer(data),
            self._out,
            chunk_spec=spec,
            chunk_selection=selection,
            out_selection=target,
            drop_axes=self._drop_axes,
            decode=form.codecs.decode_chunk,
        )


class _Writing:
    """Encodes whole chunks from the parts of an array. Usable from any thread."""

    def __init__(
        self,
        pipeline: IcechunkCodecPipeline,
        batch: Sequence[Part[Any]],
        value: NDBuffer,
        drop_axes: tuple[int, ...],
    ) -> None:
        self.form = _Form(pipeline, batch[0][1], value)
        self._batch = batch
        self._value = value
        self._drop_axes = drop_axes

    def make(self, index: int) -> memoryview | None:
        """Return the bytes of a chunk, or None if it has nothing but fill values."""
        _, spec, selection, target, _ = self._batch[index]
        form = self.form
        if form.stored is not None and spec is form.spec and form.array.shape:
            part = form.array[target]
            # A scalar, or a value that is broadcast, has another shape; so has a part that lost an
            # axis.
            if part.shape == spec.shape and _differs(part, spec):
                return form.compress(np.ascontiguousarray(part, form.stored))
        # This looks at every value, and returns None for a chunk of fill values.
        encoded = merge_and_encode_chunk(
            None,
            self._value,
            chunk_spec=spec,
            chunk_selection=selection,
            out_selection=target,
            is_complete=True,
            drop_axes=self._drop_axes,
            decode=form.codecs.decode_chunk,
            encode=form.codecs.encode_chunk,
        )
        return None if encoded is None else _view(encoded)


def _differs(part: npt.NDArray[Any], spec: ArraySpec) -> bool:
    """Return whether the first number shows that a chunk has not only fill values.

    False also where Zarr has to look at all of them: NaN may be the fill value.
    """
    if spec.config.write_empty_chunks:
        return True
    # One number instead of all: most chunks that are written are not empty, and show it at once.
    first = part.item(0)
    return bool(first == first and first != spec.fill_value)  # noqa: PLR0124 -- NaN is not
