"""The places of chunks: of one chunk, of all of an array in batches, and of virtual ones.

Batches are columns, and their memory is bounded however many chunks the array has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.tree.workspace import InManifests
from icechunk_async.errors import InvalidInputError, NodeNotFoundError
from icechunk_async.format.ids import ALPHABET
from icechunk_async.format.manifest.chunk import InlineChunk, Kind, NativeChunk, VirtualChunk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from icechunk_async.engine.tree.array_state import ArrayState
    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.engine.virtual.chunks import VirtualLocations
    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.manifest.chunk import ChunkRef
    from icechunk_async.format.manifest.refs import ChunkRefs

__all__ = [
    "Batches",
    "ChunkBatch",
    "ChunkType",
    "chunk_coordinates",
    "chunk_type",
    "known_chunk_type",
    "node_id",
    "virtual_locations",
]

_MIN_RUN: Final = 8
"""Average length of runs from which a list of paths is built run by run."""
# Each may read many manifests at once by itself.
_ARRAYS_AT_ONCE: Final = 4


class ChunkType(IntEnum):
    """Where a chunk's bytes are; the numbers are the official engine's."""

    UNINITIALIZED = 0
    """Nowhere: it was never written, or was deleted, and reads as fill values."""
    NATIVE = 1
    """In an object of the repository."""
    VIRTUAL = 2
    """In an object outside of the repository."""
    INLINE = 3
    """In the manifest."""


_TYPES: Final = np.zeros(4, np.uint8)
_TYPES[[Kind.NATIVE, Kind.VIRTUAL, Kind.INLINE]] = (
    ChunkType.NATIVE,
    ChunkType.VIRTUAL,
    ChunkType.INLINE,
)


class Batches[T](AsyncIterator[T]):
    """Parts of at most ``batch_size`` references of an array, each made into something.

    This is not a generator: asyncio closes abandoned generators all at once when their loop ends,
    which fails if one waits for another.
    """

    def __init__(
        self, workspace: Workspace, path: str, batch_size: int, make: Callable[[ChunkRefs], T]
    ) -> None:
        """Begin with the array as of now; what the session changes later does not count.

        Raises:
            NodeNotFoundError: there is no array.
            InvalidInputError: the batch size is not positive.
        """
        if batch_size < 1:
            raise InvalidInputError(f"batch_size must be at least 1, not {batch_size}.")
        self._workspace = workspace
        self._batch_size = batch_size
        self._make = make
        state = workspace.array_state(path)
        self._state: ArrayState | None = state
        """None once nothing is left to load."""
        self._manifests = iter(state.manifests)
        self._loaded: deque[tuple[ChunkRefs, int]] = deque()
        """References, and the first row that was not returned yet."""

    async def __anext__(self) -> T:
        """Return the next batch."""
        while not self._loaded:
            state = self._state
            if state is None:
                raise StopAsyncIteration
            manifest = next(self._manifests, None)
            if manifest is None:
                self._state = None
                # Last, and without overlap: `counting` left out of the manifests what the session
                # set.
                refs = state.set_chunks()
            else:
                refs = await self._workspace.manifest_refs(state, manifest)
            if len(refs):
                self._loaded.append((refs, 0))
        refs, start = self._loaded.popleft()
        stop = min(start + self._batch_size, len(refs))
        if stop < len(refs):
            self._loaded.appendleft((refs, stop))
        return self._make(refs.take(slice(start, stop)))

    async def aclose(self) -> None:
        """End the iteration."""
        self._state = None
        self._loaded.clear()


def chunk_coordinates(
    workspace: Workspace, path: str, batch_size: int = 1000
) -> Batches[npt.NDArray[np.uint32]]:
    """Iterate over the coordinates of the chunks of an array; see `Session.chunk_coordinates`."""
    return Batches(workspace, path, batch_size, lambda refs: refs.coords.copy())


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Chunks of an array as columns; row ``i`` of each is about the same chunk."""

    _refs: ChunkRefs
    _locations: VirtualLocations

    def __len__(self) -> int:
        """Count the chunks."""
        return len(self._refs)

    @property
    def coords(self) -> npt.NDArray[np.uint32]:
        """Where they are in the array's grid; ``(n, rank)``, the caller's own."""
        return self._refs.coords.copy()

    @property
    def kinds(self) -> npt.NDArray[np.uint8]:
        """The `ChunkType` of each; ``(n,)``. Chunks that do not exist are not listed."""
        return _TYPES[self._refs.kinds]

    @property
    def offsets(self) -> npt.NDArray[np.uint64]:
        """First byte of each in its object; 0 for inline chunks. ``(n,)``."""
        return np.where(self._refs.kinds == Kind.INLINE, np.uint64(0), self._refs.offsets)

    @property
    def lengths(self) -> npt.NDArray[np.uint64]:
        """Bytes of each; ``(n,)``."""
        return self._refs.lengths.copy()

    @property
    def paths(self) -> npt.NDArray[Any]:
        """Text, ``(n,)``: a native chunk's id, a virtual one's absolute URL, else empty.

        Names of containers (``vcc://``) are replaced by the containers' URLs.

        Raises:
            VirtualContainerError: there is no container of such a name.
        """
        different, codes = self.path_table()
        found: npt.NDArray[Any] = np.array(different, "T")[codes]
        return found

    def path_list(self) -> list[str]:
        """Return ``paths`` as a list, in which equal locations are one object.

        Raises:
            VirtualContainerError: there is no container of such a name.
        """
        different, codes = self.path_table()
        first = np.flatnonzero(codes[1:] != codes[:-1]) + 1
        if _MIN_RUN * len(first) < len(codes):  # repeating a list is faster than gathering it
            runs: list[str] = []
            starts = np.concatenate(([0], first))
            counts = np.diff(starts, append=len(codes)).tolist()
            for code, count in zip(codes[starts].tolist(), counts, strict=True):
                runs += [different[code]] * count
            return runs
        table = np.empty(len(different), object)
        table[:] = different
        found: list[str] = table[codes].tolist()
        return found

    def path_table(self) -> tuple[list[str], npt.NDArray[np.uint32]]:
        """Return the different ``paths``, and for each chunk the index of its path; ``(n,)``.

        The form for chunks that share files: one text is made for each file.

        Raises:
            VirtualContainerError: there is no container of such a name.
        """
        refs = self._refs
        native, virtual = refs.kinds == Kind.NATIVE, refs.kinds == Kind.VIRTUAL
        if len(refs) and virtual.all():
            return self._urls(refs.objects)
        texts = [""]
        codes = np.zeros(len(refs), np.uint32)
        if native.any():
            ids, codes[native] = _distinct(refs.objects[native])
            codes[native] += np.uint32(len(texts))
            texts += _texts(refs.chunk_ids[ids])
        if virtual.any():
            urls, codes[virtual] = self._urls(refs.objects[virtual])
            codes[virtual] += np.uint32(len(texts))
            texts += urls
        return texts, codes

    def _urls(self, objects: npt.NDArray[np.uint32]) -> tuple[list[str], npt.NDArray[np.uint32]]:
        """Return the different URLs among some locations, and the index of each one's."""
        used, codes = _distinct(objects)
        again, pool = self._refs.locations.take(used).distinct()
        return [self._locations.absolute(location) for location in pool.strings], again[codes]

    @property
    def inlined(self) -> dict[int, memoryview]:
        """The bytes of the inline chunks, by row."""
        rows = np.flatnonzero(self._refs.kinds == Kind.INLINE)
        starts = self._refs.offsets[rows].tolist()
        sizes = self._refs.lengths[rows].tolist()
        return {
            row: self._refs.inline[start : start + size]
            for row, start, size in zip(rows.tolist(), starts, sizes, strict=True)
        }


def _distinct(
    numbers: npt.NDArray[np.uint32],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """Return the different numbers, and of each one its index in them.

    Quick for runs of equal or consecutive numbers, which is the rule unless single chunks were
    moved or written.
    """
    # The numbers are unsigned, so that a step down wraps round to a large one: a single comparison
    # finds both steps down and gaps.
    if len(numbers) and (numbers[1:] - numbers[:-1]).max(initial=0) <= 1:
        low, high = int(numbers[0]), int(numbers[-1])
        return np.arange(low, high + 1, dtype=np.int64), numbers - np.uint32(low)
    first = np.ones(len(numbers), bool)
    first[1:] = numbers[1:] != numbers[:-1]
    different, codes = np.unique(numbers[first], return_inverse=True)
    runs = np.cumsum(first) - 1
    return different.astype(np.int64), codes.astype(np.uint32)[runs]


def _texts(ids: npt.NDArray[np.uint8]) -> list[str]:
    """Return the text form of ``(n, 12)`` chunk ids, five bits a letter."""
    # Highest bit first, and zeros on the right up to a multiple of five (spec, "Object ids"): 96
    # bits are 20 letters.
    bits = np.unpackbits(ids, axis=1)
    letters = -(-bits.shape[1] // 5)
    padded = np.zeros((len(ids), letters * 5), np.uint8)
    padded[:, : bits.shape[1]] = bits
    values = padded.reshape(len(ids), letters, 5) @ np.array([16, 8, 4, 2, 1], np.uint8)
    texts = np.frombuffer(ALPHABET.encode(), np.uint8)[values]
    decoded: list[str] = texts.view(f"S{letters}")[:, 0].astype(f"U{letters}").tolist()
    return decoded


def node_id(workspace: Workspace, path: str) -> NodeId:
    """Return the id of the node at an absolute path.

    Raises:
        NodeNotFoundError: nothing is there.
    """
    node = workspace.node(path)
    if node is None:
        raise NodeNotFoundError(f"There is no array or group at {path!r}.", path=path)
    return node.id


async def chunk_type(workspace: Workspace, path: str, coords: Sequence[int]) -> ChunkType:
    """Return where the bytes of a chunk are; see ``Session.chunk_type``."""
    workspace.array(path)
    handle = await workspace.find_chunk(path, tuple(coords))
    return _type_of(None if handle is None else handle.ref)


def known_chunk_type(workspace: Workspace, path: str, coords: Sequence[int]) -> ChunkType | None:
    """Return as `chunk_type`, without an event loop; None if that would take a request."""
    workspace.array(path)
    found = workspace.find_in_memory(path, tuple(coords))
    return None if isinstance(found, InManifests) else _type_of(found)


def _type_of(ref: ChunkRef | None) -> ChunkType:
    match ref:
        case None:
            return ChunkType.UNINITIALIZED
        case NativeChunk():
            return ChunkType.NATIVE
        case VirtualChunk():
            return ChunkType.VIRTUAL
        case InlineChunk():
            return ChunkType.INLINE


async def virtual_locations(workspace: Workspace) -> list[str]:
    """Return the location of every virtual chunk, as ``Session.all_virtual_chunk_locations``."""
    with workspace.lock:
        # Only the paths under the lock, which writers wait for: references take requests.
        paths = [node.path for node in workspace.tree.nodes() if node.array is not None]

    async def of_array(path: str) -> list[str]:
        return _locations(await workspace.all_refs(path), workspace.virtual.locations)

    parts = await bounded_map(of_array, sorted(paths), limit=_ARRAYS_AT_ONCE)
    return [location for part in parts for location in part]


def _locations(refs: ChunkRefs, locations: VirtualLocations) -> list[str]:
    """Return absolute locations of the virtual rows; equal ones are one object."""
    used, rows = np.unique(refs.objects[refs.kinds == Kind.VIRTUAL], return_inverse=True)
    codes, distinct = refs.locations.take(used.astype(np.int64)).distinct()
    absolute = [locations.expand(location) for location in distinct.strings]
    return [absolute[code] for code in codes[rows].tolist()]
