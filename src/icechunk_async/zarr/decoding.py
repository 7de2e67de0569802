"""Decode single chunks with Zarr's codecs, to see whether that is possible."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zarr.core.array import create_codec_pipeline
from zarr.core.array_spec import ArrayConfig, ArraySpec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.metadata.v3 import ArrayV3Metadata

from icechunk_async.engine.upkeep.integrity.contents import Undecided

if TYPE_CHECKING:
    from zarr.abc.codec import CodecPipeline

__all__ = ["ZarrDecoder"]


@dataclass(frozen=True, slots=True)
class _Form:
    """How the chunks of an array are encoded."""

    pipeline: CodecPipeline
    spec: ArraySpec


class ZarrDecoder:
    """Decodes chunks of any arrays; see `ChunkDecoder`."""

    def __init__(self) -> None:
        """Begin without codecs; those of each array are made once."""
        self._forms: dict[bytes, _Form | str] = {}

    async def decode(self, document: bytes, data: bytes | memoryview) -> str | None:
        """Return a sentence about an undecodable chunk, or None.

        Raises:
            Undecided: the array uses a codec, a data type or a grid that is not supported here.
        """
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
        if decoded is None or tuple(decoded.shape) != form.spec.shape:
            found = None if decoded is None else tuple(decoded.shape)
            return f"It decodes to the shape {found}, and chunks have {form.spec.shape}."
        return None


def _form_of(document: bytes) -> _Form | str:
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
            config=ArrayConfig.from_dict({}),
            prototype=default_buffer_prototype(),
        )
    except Exception as error:  # noqa: BLE001 -- an unknown codec, or a damaged document
        return f"their array cannot be opened ({type(error).__name__}: {str(error)[:200]})"
    return _Form(pipeline, spec)
