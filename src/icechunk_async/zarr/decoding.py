"""Decode and encode single chunks with Zarr's codecs."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from zarr.core.array import create_codec_pipeline
from zarr.core.array_spec import ArrayConfig, ArraySpec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.metadata.v3 import ArrayV3Metadata

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.upkeep.integrity.objects import Undecided
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    import numpy.typing as npt
    from zarr.abc.codec import CodecPipeline

__all__ = ["ChunkCodec", "ZarrDecoder"]


@dataclass(frozen=True, slots=True)
class ChunkCodec:
    """How the chunks of an array are encoded."""

    pipeline: CodecPipeline
    spec: ArraySpec

    @classmethod
    def of(cls, document: bytes) -> Self:
        """Return the codec of an array of a regular grid, from its metadata document.

        Raises:
            InvalidInputError: it has another grid, or codecs that are not supported here.
        """
        found = _form_of(document)
        if isinstance(found, str):
            raise InvalidInputError(f"Chunks cannot be decoded: {found}.")
        return cls(found.pipeline, found.spec)

    async def decode(self, data: bytes | memoryview | None) -> npt.NDArray[Any]:
        """Return the values of a chunk, of the full shape of chunks; None is fill values."""
        spec = self.spec
        if data is not None:
            buffer = spec.prototype.buffer.from_bytes(bytes(data))
            (decoded,) = await self.pipeline.decode([(buffer, spec)])
            if decoded is not None:
                values: npt.NDArray[Any] = np.asarray(decoded.as_numpy_array())
                return values.reshape(spec.shape)
        return np.full(spec.shape, spec.fill_value, spec.dtype.to_native_dtype())

    async def encode(self, values: npt.NDArray[Any]) -> bytes:
        """Return the bytes of a chunk; ``values`` has the full shape of chunks."""
        buffer = self.spec.prototype.nd_buffer.from_numpy_array(values)
        (encoded,) = await self.pipeline.encode([(buffer, self.spec)])
        assert encoded is not None  # chunks of fill values are encoded as well
        return encoded.to_bytes()


class ZarrDecoder:
    """Decodes chunks of any arrays; see `ChunkDecoder`."""

    def __init__(self) -> None:
        """Begin without codecs; those of each array are made once."""
        self._forms: dict[bytes, ChunkCodec | str] = {}

    async def decode(self, document: bytes, data: bytes | memoryview) -> str | None:
        """Return a sentence about an undecodable chunk, or None.

        Raises:
            Undecided: the array uses a codec, a data type or a grid that is not supported here.
        """
        # By document, not by array: versions of an array may be encoded differently, and many
        # arrays alike. As many as the repository has different documents.
        form = self._forms.get(document)
        if form is None:
            form = self._forms[document] = _form_of(document)
        if isinstance(form, str):
            raise Undecided(form)
        buffer = form.spec.prototype.buffer.from_bytes(bytes(data))
        try:
            (decoded,) = await form.pipeline.decode([(buffer, form.spec)])
        except Exception as error:  # noqa: BLE001 -- codecs raise anything
            return f"It cannot be decoded: {type(error).__name__}: {str(error)[:200]}"
        # A codec may decode fewer or more cells than a chunk has, and raise nothing.
        if decoded is None or tuple(decoded.shape) != form.spec.shape:
            found = None if decoded is None else tuple(decoded.shape)
            return f"It decodes to the shape {found}, and chunks have {form.spec.shape}."
        return None


def _form_of(document: bytes) -> ChunkCodec | str:
    """Return how the chunks of an array are encoded, or why that cannot be told."""
    try:
        values: Any = json.loads(document)
        if values["chunk_grid"]["name"] != "regular":
            return f"their chunk grid is {values['chunk_grid']['name']!r}"
        with warnings.catch_warnings():  # about data types without a specification
            warnings.simplefilter("ignore")
            metadata = ArrayV3Metadata.from_dict(values)
            pipeline = create_codec_pipeline(metadata)
        shape = tuple(values["chunk_grid"]["configuration"]["chunk_shape"])
        spec = ArraySpec(
            shape=shape,
            dtype=metadata.data_type,
            fill_value=metadata.fill_value,
            # Else Zarr encodes a chunk of fill values as nothing, and callers need its bytes.
            config=ArrayConfig.from_dict({"write_empty_chunks": True}),
            prototype=default_buffer_prototype(),
        )
    except Exception as error:  # noqa: BLE001 -- an unknown codec, or a damaged document
        return f"their array cannot be opened ({type(error).__name__}: {str(error)[:200]})"
    return ChunkCodec(pipeline, spec)
