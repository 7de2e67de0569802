"""The sidecars of manifests that keep the checksums of chunks.

The format of Icechunk has no place for checksums, so they are kept beside each manifest, in a
separate object (docs/reference/chunk-sums.md). A sum that is missing is unknown, which is never
an error: other writers know nothing of sums.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from struct import Struct
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError
from icechunk_async.format.crc import KNOWN
from icechunk_async.format.ids import ManifestId, NodeId
from icechunk_async.format.manifest import MAX_RANK
from icechunk_async.format.manifest.chunk import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.manifest.refs import ChunkRefs

    type Data = bytes | bytearray | memoryview

__all__ = [
    "ArraySums",
    "Codes",
    "ManifestSums",
    "SumsHead",
    "without_sum",
]

type Codes = npt.NDArray[np.uint64]
"""A code for each of some chunks, ``(n,)``."""

_MAGIC: Final = b"ICASUMS1"
_CRC32C: Final = 1
_HEAD: Final = Struct("<8s12sBB2s32sII")
"""Magic number, manifest, algorithm, whether it is complete, zeros, digest, arrays, zero."""
_ARRAY: Final = Struct("<8sIIQ")
_DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class SumsHead:
    """The beginning of a sidecar, which says what it is about."""

    manifest_id: ManifestId
    manifest_digest: bytes
    """SHA-256 of the object of the manifest."""
    is_complete: bool
    """Whether the sum of every native chunk is known. Such a sidecar never changes any more."""


@dataclass(frozen=True, slots=True, eq=False)
class ArraySums:
    """The checksums of one array's chunks in a manifest, in the order of its references.

    They are kept as in the sidecar, in 4 bytes for each that is known and a bit for each chunk: a
    hostile sidecar cannot make a reader allocate more than it sent.
    """

    count: int
    """The number of references."""
    bits: npt.NDArray[np.uint8]
    """Which are known, eight to a byte, the first in the lowest bit."""
    crcs: npt.NDArray[np.uint32]
    """The CRC-32C of each that is known."""

    @classmethod
    def of(cls, codes: Codes) -> Self:
        """Return sums given as codes, ``(n,)``."""
        known = codes != 0
        crcs = (codes[known] & np.uint64(KNOWN - 1)).astype("<u4")
        return cls(len(codes), np.packbits(known, bitorder="little"), crcs)

    def codes(self) -> Codes:
        """Return a code for each reference, ``(n,)``; 0 where the sum is unknown."""
        known = np.unpackbits(self.bits, count=self.count, bitorder="little").view(np.bool_)
        codes = np.zeros(self.count, np.uint64)
        # There are as many as bits that are set: `_read_array` took that number of them.
        codes[known] = self.crcs.astype(np.uint64) | np.uint64(KNOWN)
        return codes


@dataclass(frozen=True, slots=True, eq=False)
class ManifestSums:
    """The checksums of one manifest's chunks."""

    head: SumsHead
    arrays: Mapping[tuple[NodeId, int], ArraySums]
    """By the node id of an array and the number of axes of its references."""

    @classmethod
    def of(cls, manifest: Manifest, digest: bytes) -> Self:
        """Return the sums that the references of a manifest have.

        Args:
            manifest: its columns, which may have sums or not.
            digest: SHA-256 of its object.
        """
        columns = {(node_id, it.rank): it for node_id, it in manifest.arrays.items()}
        columns |= manifest.strays
        complete = not any(without_sum(it).any() for it in columns.values())
        head = SumsHead(manifest.id, digest, complete)
        return cls(head, {key: ArraySums.of(_codes(it)) for key, it in columns.items()})

    @property
    def weight(self) -> int:
        """The decoded references that take as much memory."""
        # Four bytes and a bit against some forty of a decoded reference.
        return 1 + sum(it.count for it in self.arrays.values()) // 8

    @property
    def known(self) -> int:
        """The number of chunks whose sums are known."""
        return sum(len(it.crcs) for it in self.arrays.values())

    def attached_to(self, manifest: Manifest) -> Manifest:
        """Return a manifest whose references have these sums; its other columns are shared.

        Raises:
            FormatError: these are the sums of another manifest.
        """
        if self.head.manifest_id != manifest.id:
            raise FormatError(
                f"The sums of manifest {self.head.manifest_id} cannot be those of {manifest.id}."
            )
        return replace(
            manifest,
            arrays={key: self._attached(key, refs) for key, refs in manifest.arrays.items()},
            strays={key: self._attached(key[0], refs) for key, refs in manifest.strays.items()},
        )

    def _attached(self, node_id: NodeId, refs: ChunkRefs) -> ChunkRefs:
        sums = self.arrays.get((node_id, refs.rank))
        if sums is None:
            return refs
        if sums.count != len(refs):
            raise _damaged(
                self.head.manifest_id,
                f"they are of {sums.count} chunks of an array, which has {len(refs)}",
            )
        return replace(refs, sums=sums.codes())

    def encode(self) -> bytes:
        """Return the sidecar. Equal sums give equal bytes."""
        # One order and no other, as `decode` checks: the digest of a sidecar is part of a content
        # root.
        order = sorted(self.arrays)
        head = self.head
        flags = (_CRC32C, int(head.is_complete), b"")
        about = (bytes(head.manifest_id), *flags, head.manifest_digest)
        parts = [_HEAD.pack(_MAGIC, *about, len(order), 0)]
        parts += [_ARRAY.pack(bytes(key[0]), key[1], 0, self.arrays[key].count) for key in order]
        for key in order:
            parts += [self.arrays[key].bits.tobytes(), self.arrays[key].crcs.tobytes()]
        data = b"".join(parts)
        return data + hashlib.sha256(data).digest()

    @classmethod
    def decode(cls, data: Data, manifest_id: ManifestId) -> Self:
        """Read a sidecar; its columns keep ``data`` alive.

        Args:
            data: the object.
            manifest_id: the manifest that it must be about.

        Raises:
            FormatError: it is damaged, hostile, about another manifest, or of a newer version.
        """
        view = memoryview(data)
        head, count = _head(view, manifest_id)
        end = len(view) - _DIGEST_BYTES
        at = _HEAD.size + count * _ARRAY.size
        if at > end:
            raise _damaged(manifest_id, "they list more arrays than there are bytes for")
        # Against damage, not against forgery: who can write here can compute it. A wrong sum would
        # call a sound chunk damaged.
        if hashlib.sha256(view[:end]).digest() != bytes(view[end:]):
            raise _damaged(manifest_id, "their own digest is another one")
        arrays: dict[tuple[NodeId, int], ArraySums] = {}
        last: tuple[NodeId, int] | None = None
        for number in range(count):
            node, rank, reserved, rows = _ARRAY.unpack_from(view, _HEAD.size + number * _ARRAY.size)
            key = (NodeId(node), rank)
            if reserved or rank > MAX_RANK or (last is not None and key <= last):
                raise _damaged(manifest_id, "their arrays are out of order, or cannot exist")
            arrays[key], at = _read_array(view[:end], at, rows, manifest_id)
            last = key
        # All bytes are accounted for, so that equal sums are equal files.
        if at != end:
            raise _damaged(manifest_id, "there are more bytes than sums")
        return cls(head, arrays)


def _head(view: memoryview, manifest_id: ManifestId) -> tuple[SumsHead, int]:
    if len(view) < _HEAD.size + _DIGEST_BYTES:
        raise _damaged(manifest_id, "they are cut off")
    magic, about, algorithm, complete, zero, digest, count, reserved = _HEAD.unpack_from(view)
    if magic[:-1] != _MAGIC[:-1]:
        raise _damaged(manifest_id, "the object is something else")
    if magic != _MAGIC or algorithm != _CRC32C:
        raise FormatError(
            f"The sums of manifest {manifest_id} were written by a newer version of "
            "icechunk-async, and cannot be read by this one. Upgrade it."
        )
    if complete > 1 or reserved or zero != b"\0\0":
        raise _damaged(manifest_id, "their head cannot be")
    if about != bytes(manifest_id):
        raise _damaged(manifest_id, f"they are about manifest {ManifestId(about)}")
    return SumsHead(manifest_id, digest, bool(complete)), count


def _read_array(
    view: memoryview, at: int, rows: int, manifest_id: ManifestId
) -> tuple[ArraySums, int]:
    """Read the sums of one array; return them, and where those of the next array begin."""
    middle = at + -(-rows // 8)
    if middle > len(view):
        raise _damaged(manifest_id, "they list more chunks than there are bytes for")
    bits = np.frombuffer(view[at:middle], np.uint8)
    # The last byte may have bits beyond the last chunk, which would count as sums.
    if rows % 8 and int(bits[-1]) >> rows % 8:
        raise _damaged(manifest_id, "they mark chunks that they do not list")
    # The number of sums is the number of bits: no count of its size can contradict them.
    end = middle + 4 * int(np.bitwise_count(bits).sum(dtype=np.int64))
    if end > len(view):
        raise _damaged(manifest_id, "they mark more chunks than there are bytes for")
    return ArraySums(rows, bits, np.frombuffer(view[middle:end], "<u4")), end


def _codes(refs: ChunkRefs) -> Codes:
    if refs.sums is None:
        return np.zeros(len(refs), np.uint64)
    # Inline chunks lie in the manifest, which has a digest itself, and virtual ones are others'
    # objects.
    return np.where(refs.kinds == Kind.NATIVE, refs.sums, np.uint64(0))


def without_sum(refs: ChunkRefs) -> npt.NDArray[np.bool_]:
    """Return which native chunks have no sum."""
    missing: npt.NDArray[np.bool_] = refs.kinds == Kind.NATIVE
    if refs.sums is not None:
        missing &= refs.sums == 0
    return missing


def _damaged(manifest_id: ManifestId, why: str) -> FormatError:
    return FormatError(
        f"The sums of manifest {manifest_id} are damaged: {why}. No data is lost: delete "
        f"'sums/{manifest_id}', and make the sums anew with Repository.add_sums."
    )
