"""The codec of Zarr that undoes TileDB's filters: a chunk is a tile of a dense array.

Zarr finds it by the entry point ``icechunk_async.tiledb``. Chunks that Zarr writes have another
form, since there are no encoders here for all filters: eight bytes 0xFF, and a Zstandard frame. A
tile begins with the number of its chunks, which is never so large.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, cast

import numpy as np
import zstandard
from zarr.abc.codec import ArrayBytesCodec

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.tiledb.arrays.tiles import on_a_thread
from icechunk_async.tiledb.format.filters.compression import decompress_zstd
from icechunk_async.tiledb.format.filters.pipeline import filters_from_json, filters_to_json
from icechunk_async.tiledb.format.schema import VERSIONS
from icechunk_async.tiledb.format.tiles import TileForm
from icechunk_async.tiledb.format.types import Datatype, stored_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer, NDBuffer
    from zarr.core.common import JSON
    from zarr.core.dtype.wrapper import TBaseDType, TBaseScalar, ZDType
    from zarr.core.metadata.v3 import ChunkGridMetadata

__all__ = ["CODEC_NAME", "TileDBCodec", "zarr_dtype"]

CODEC_NAME: Final = "icechunk_async.tiledb"
_WRITTEN_BY_ZARR: Final = b"\xff" * 8
"""In place of the number of chunks of a tile."""
_MAX_VALUES: Final = 1 << 31


def zarr_dtype(datatype: Datatype) -> np.dtype[Any]:
    """Return the NumPy type of single values in Zarr; moments and times of day are numbers."""
    return np.dtype(np.bool_) if datatype is Datatype.BOOL else stored_dtype(datatype)


@dataclass(frozen=True)
class TileDBCodec(ArrayBytesCodec):
    """Decodes tiles of TileDB as chunks of Zarr.

    Its configuration in a document has ``filters``, a list of objects with a ``name``; the
    ``datatype`` by TileDB's name; ``values``, the number of values of a cell; and ``version``, the
    format version of the fragments.
    """

    is_fixed_size: ClassVar[bool] = False  # type: ignore[misc]  # a plain attribute in Zarr
    form: TileForm

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """Make a codec from its document in the metadata of an array.

        Raises:
            FormatError: the document does not describe one.
            UnsupportedFeatureError: a filter is not supported.
        """
        given = data.get("configuration")
        try:
            options = cast("Mapping[str, Any]", given)
            datatype = Datatype[str(options["datatype"]).upper()]
            values, version = options["values"], options["version"]
            filters = filters_from_json(options["filters"])
        except (KeyError, TypeError) as error:
            raise FormatError(
                f"{given!r:.200} does not configure the codec {CODEC_NAME!r}: {error!r:.100}."
            ) from error
        # Metadata of arrays is untrusted as well: a codec is made of it before any chunk is read.
        if version not in VERSIONS or not isinstance(values, int) or not 0 < values < _MAX_VALUES:
            raise FormatError(
                f"The codec {CODEC_NAME!r} has the version {version!r:.50} and {values!r:.50} "
                f"values a cell. Versions {VERSIONS[0]} to {VERSIONS[-1]} are supported."
            )
        return cls(TileForm(filters, datatype, stored_dtype(datatype).itemsize * values, version))

    def to_dict(self) -> dict[str, JSON]:
        """Return its document."""
        form = self.form
        options: dict[str, JSON] = {
            "filters": cast("JSON", filters_to_json(form.filters)),
            "datatype": form.datatype.name.lower(),
            "values": form.cell_bytes // stored_dtype(form.datatype).itemsize,
            "version": form.version,
        }
        return {"name": CODEC_NAME, "configuration": options}

    def validate(
        self,
        *,
        shape: tuple[int, ...],
        dtype: ZDType[TBaseDType, TBaseScalar],
        chunk_grid: ChunkGridMetadata,
    ) -> None:
        """Raise `InvalidInputError` if the array has another data type than the tiles."""
        del shape, chunk_grid
        native, wanted = dtype.to_native_dtype(), zarr_dtype(self.form.datatype)
        if native != wanted:
            raise InvalidInputError(
                f"The codec {CODEC_NAME!r} for {self.form.datatype.name} makes arrays of "
                f"{wanted}, and the array has {native}."
            )

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Raise `NotImplementedError`: the size depends on the values."""
        raise NotImplementedError

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        size = math.prod(chunk_spec.shape) * self._dtype.itemsize
        return await on_a_thread(lambda: self._decode_sync(chunk_data, chunk_spec), size)

    async def _encode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer | None:
        size = math.prod(chunk_spec.shape) * self._dtype.itemsize
        return await on_a_thread(lambda: self._encode_sync(chunk_data, chunk_spec), size)

    @property
    def _dtype(self) -> np.dtype[Any]:
        return stored_dtype(self.form.datatype)

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        """Return the values of a chunk.

        Raises:
            FormatError: it is damaged.
        """
        # Zarr's buffers need not be of one piece.
        data = memoryview(np.ascontiguousarray(chunk_bytes.as_numpy_array())).cast("B")
        found = self._plain(data, math.prod(chunk_spec.shape) * self._dtype.itemsize)
        values: npt.NDArray[Any] = found.view(self._dtype).reshape(chunk_spec.shape)
        if self.form.datatype is Datatype.BOOL:
            values = values != 0
        return chunk_spec.prototype.nd_buffer.from_numpy_array(values)

    def _plain(self, data: memoryview, size: int) -> npt.NDArray[np.uint8]:
        if bytes(data[:8]) == _WRITTEN_BY_ZARR:
            return np.frombuffer(decompress_zstd(data[8:], size), np.uint8)
        return self.form.decode(data, size)

    def _encode_sync(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> Buffer | None:
        """Return the bytes of a chunk in the form that is not a tile."""
        values: npt.NDArray[Any] = np.asarray(chunk_array.as_numpy_array())
        plain = np.ascontiguousarray(values, self._dtype).tobytes()
        data = _WRITTEN_BY_ZARR + zstandard.compress(plain)
        return chunk_spec.prototype.buffer.from_bytes(data)
