"""Damaging files, and looking at everything that is left of them.

Reading any bytes succeeds or raises ``FormatError``, within bounds of time and memory that follow
from their size.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.format.envelope import Envelope, FileType, unpack
from icechunk_async.format.flatbuffers import splicing
from icechunk_async.format.ids import NodeId, SnapshotId
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.manifest.writing import encode_manifest
from icechunk_async.format.operations_log import NewCommit, Update
from icechunk_async.format.repo_info import (
    OperationsLog,
    SnapshotInfo,
    decode_repo_info,
    encode_repo_info,
    log_writing,
    snapshot_writing,
)
from icechunk_async.format.repo_info.snapshots import Snapshots
from icechunk_async.format.snapshot import Node, decode_snapshot, writing
from icechunk_async.format.snapshot.writing import encode_snapshot
from icechunk_async.format.transaction_log import decode_transaction_log, encode_transaction_log
from tests.unit.format.samples import reading_repo_infos

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from icechunk_async.format.manifest.reading import Manifest

__all__ = ["BoundsExceededError", "damaged", "look_at", "look_at_file", "within_bounds"]

_EXTREMES = (
    0, 1, 2, 3, 4, 7, 8, 12, 255, 256, 0x7FFF, 0xFFFF, 0x10000, 0x7FFFFFFC, 0x7FFFFFFF,
    0x80000000, 0xFFFFFFF0, 0xFFFFFFFC, 0xFFFFFFFE, 0xFFFFFFFF,
)  # fmt: skip
_LOOKUPS = 6
"""Nodes that are looked for in a file that was not looked at."""
_ROWS = 40
"""References of each array that are looked at one by one."""


class BoundsExceededError(AssertionError):
    """Reading took more time or memory than the size of the file warrants."""


def within_bounds[T](work: Callable[[], T], size: int, *, base_bytes: int = 2 << 20) -> T:
    """Run ``work`` on a file of ``size`` bytes, and return its result; tracemalloc must run.

    Raises:
        BoundsExceededError: it took too long, or too much memory.
    """
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    # Of this thread: on a busy machine, time of the wall says nothing about the file.
    began = time.thread_time()
    found = work()
    seconds = time.thread_time() - began
    _, peak = tracemalloc.get_traced_memory()
    # Far above what honest files take: only what is quadratic or unbounded exceeds it.
    if seconds > 2 + 1e-4 * size:
        raise BoundsExceededError(f"{size} bytes took {seconds:.1f} s")
    if peak - before > base_bytes + 150 * size:
        raise BoundsExceededError(f"{size} bytes took {(peak - before) / 1e6:.1f} MB")
    return found


def look_at_file(data: bytes, file_type: FileType) -> bool:
    """Read a file and all its contents. Return whether it could be opened."""
    try:
        envelope = unpack(data, file_type)
    except FormatError:
        return False
    return look_at(envelope, file_type)


def look_at(envelope: Envelope, file_type: FileType) -> bool:
    """Read a payload and all its contents. Return whether it could be opened."""
    try:
        match file_type:
            case FileType.SNAPSHOT:
                _look_at_snapshot(envelope)
            case FileType.MANIFEST:
                _look_at_manifest(decode_manifest(envelope.payload))
            case FileType.TRANSACTION_LOG:
                _look_at_log(envelope)
            case FileType.REPO_INFO:
                _look_at_repo_info(envelope)
    except FormatError:
        return False
    return True


def _look_at_snapshot(envelope: Envelope) -> None:
    snapshot = decode_snapshot(envelope)
    nodes = snapshot.nodes
    # UTF-8 bytes, in which the format sorts paths; Python's text sorts alike but for surrogates.
    assert list(nodes) == sorted(set(nodes), key=str.encode)
    readable = True
    for path in nodes:
        assert path in nodes
        try:
            node = nodes[path]
        except FormatError:
            readable = False
            continue
        assert node.path == path
        assert nodes.path_of(node.id) is not None
        if node.array is not None:
            assert all(len(ref.extents) == len(node.array.grid) for ref in node.array.manifests)
    assert list(nodes.below("/")) == [path for path in nodes if path != "/"]
    _look_at_lookups(envelope, list(nodes)[:_LOOKUPS])
    _look_at_splices(envelope, list(nodes))
    files = snapshot.manifests
    assert all(files[it].id == it for it in files)
    if not readable:
        raise FormatError("A node is damaged.")
    assert list(nodes.values()) == [nodes[path] for path in nodes]
    for spec in (1, 2):
        with suppress(InvalidInputError):  # neither can express all that the other can
            encode_snapshot(snapshot, spec)


def _look_at_lookups(envelope: Envelope, paths: list[str]) -> None:
    """Find nodes in a file whose list of paths is not decoded, and manifests."""
    found: list[Node] = []
    for path in paths:
        with suppress(FormatError):
            snapshot = decode_snapshot(envelope)
            node = snapshot.nodes.get(path)
            assert node is not None
            found.append(node)
            for ref in node.array.manifests if node.array is not None else ():
                snapshot.manifests.get(ref.manifest_id)
    with suppress(FormatError):
        nodes = decode_snapshot(envelope).nodes
        assert all(nodes[node.path] == node for node in found)


def _look_at_splices(envelope: Envelope, paths: list[str]) -> None:
    """Change nodes, and copy the others into a new file, which reads as they do."""
    spec = envelope.spec_version
    # 0 copies however few there are, so that small files go through the code for large ones.
    for copied in (0, splicing.FEWEST_COPIED):
        with pytest.MonkeyPatch.context() as patch, suppress(FormatError, InvalidInputError):
            patch.setattr(writing, "FEWEST_COPIED", copied)
            snapshot = decode_snapshot(envelope)
            new = [Node(NodeId.random(), path, b"new") for path in (*paths[1:2], "/a new one")]
            edited = snapshot.nodes.edited(new, paths[2:3])
            payload = encode_snapshot(replace(snapshot, nodes=edited), spec)
            again = decode_snapshot(Envelope(spec, payload)).nodes
            assert list(again) == list(edited)
            assert list(again.values()) == list(edited.values())


def _look_at_manifest(manifest: Manifest) -> None:
    assert len(manifest) == sum(map(len, manifest.arrays.values()))
    for refs in [*manifest.arrays.values(), *manifest.strays.values()]:
        step = max(1, len(refs) // _ROWS)
        for row in range(0, len(refs), step):
            assert refs.find(tuple(refs.coords[row].tolist())) == row
            with suppress(FormatError):
                refs.ref(row)
        if len(refs) > 0:
            assert refs.inside(refs.extents()).all()
        some = refs.take((refs.lengths % 2 == 1).nonzero()[0])
        with suppress(FormatError):
            ChunkRefs.concat([refs, some]).sort()
        with suppress(FormatError):
            refs.etag_pool.distinct()
    with suppress(FormatError, InvalidInputError):
        again = decode_manifest(encode_manifest(manifest.id, manifest.arrays))
        assert len(again) == len(manifest)


def _look_at_log(envelope: Envelope) -> None:
    log = decode_transaction_log(envelope.payload)
    log.is_empty()
    assert log.merge(log).updated_chunks.keys() == log.updated_chunks.keys()
    again = decode_transaction_log(encode_transaction_log(log, envelope.spec_version))
    assert again.id == log.id


def _look_at_repo_info(envelope: Envelope) -> None:
    """Read it by columns, and table by table: different code reads each way."""
    errors: list[FormatError] = []
    for by_columns in (True, False):
        with reading_repo_infos(by_columns=by_columns):
            try:
                _look_at_history(envelope)
            except FormatError as error:
                errors.append(error)
    if errors:
        raise errors[0]
    _look_at_spliced_histories(envelope)


def _look_at_history(envelope: Envelope) -> None:
    info = decode_repo_info(envelope)
    for snapshot in info.snapshots.values():
        assert snapshot.written_at.tzinfo is not None
        with suppress(FormatError):
            _ = snapshot.metadata
        with suppress(FormatError):
            assert len(list(info.ancestry(snapshot.id))) <= len(info.snapshots)
    with suppress(FormatError):
        _ = info.metadata
    assert decode_repo_info(Envelope(2, encode_repo_info(info))).snapshots == info.snapshots


def _look_at_spliced_histories(envelope: Envelope) -> None:
    """Commit, and copy all other entries into a new file, which reads as they do."""
    for copied in (0, splicing.FEWEST_COPIED):
        with pytest.MonkeyPatch.context() as patch, suppress(FormatError, InvalidInputError):
            for module in (log_writing, snapshot_writing):
                patch.setattr(module, "FEWEST_COPIED", copied)
            info = decode_repo_info(envelope)
            new = SnapshotInfo(SnapshotId.random(), next(iter(info.snapshots), None), 5, "new")
            infos = Snapshots.of(info.snapshots).edited([new])
            newest = Update(NewCommit("main", new.id), info.updated_at)
            updates = OperationsLog.of(info.updates).with_newest(newest, instead=1)
            payload = encode_repo_info(replace(info, snapshots=infos, updates=updates))
            again = decode_repo_info(Envelope(2, payload))
            assert again.snapshots == infos
            assert again.updates == updates
            found = decode_repo_info(envelope)  # nothing of which was looked at before
            for snapshot_id in [*info.snapshots][:_LOOKUPS]:
                assert found.snapshots[snapshot_id] == info.snapshots[snapshot_id]


def damaged(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Damage bytes in one to four ways; ``others`` are files to take pieces from."""
    buffer = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        # Up to four: the second damage may hide the first from a check that comes early.
        rng.choice(_WAYS)(rng, buffer, others)
    return bytes(buffer)


type _Way = Callable[[random.Random, bytearray, Sequence[bytes]], None]


def _place(rng: random.Random, buffer: bytearray, align: int = 1) -> int:
    """Choose a place, more often one near an end, where most tables are."""
    size = max(len(buffer) - align, 1)
    at = rng.randrange(size)
    if rng.random() < 0.3:
        at = min(int(rng.expovariate(1 / 60)), size - 1)
    elif rng.random() < 0.2:
        at = max(size - 1 - int(rng.expovariate(1 / 60)), 0)
    return at - at % align


def _flip(rng: random.Random, buffer: bytearray, _: Sequence[bytes]) -> None:
    if buffer:
        buffer[_place(rng, buffer)] ^= 1 << rng.randrange(8)


def _set_word(rng: random.Random, buffer: bytearray, _: Sequence[bytes]) -> None:
    width = rng.choice((1, 2, 4, 4, 4, 8))
    at = _place(rng, buffer, width)
    # Sizes and distances that are off by little, or by all: where checks of bounds go wrong.
    value = rng.choice((*_EXTREMES, len(buffer), len(buffer) - at, rng.getrandbits(32)))
    buffer[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")


def _nudge(rng: random.Random, buffer: bytearray, _: Sequence[bytes]) -> None:
    at = _place(rng, buffer, 4)
    value = int.from_bytes(buffer[at : at + 4], "little") + rng.choice((-8, -4, -1, 1, 2, 4, 8, 64))
    buffer[at : at + 4] = (value % (1 << 32)).to_bytes(4, "little")


def _redirect(rng: random.Random, buffer: bytearray, _: Sequence[bytes]) -> None:
    """Let an offset lead somewhere else: onwards, backwards, into a string, to itself."""
    at, target = _place(rng, buffer, 4), _place(rng, buffer, rng.choice((1, 4)))
    buffer[at : at + 4] = ((target - at) % (1 << 32)).to_bytes(4, "little")


def _cut(rng: random.Random, buffer: bytearray, _: Sequence[bytes]) -> None:
    del buffer[_place(rng, buffer) :]


def _drop(rng: random.Random, buffer: bytearray, _: Sequence[bytes]) -> None:
    at = _place(rng, buffer)
    del buffer[at : at + rng.choice((1, 4, 8, 100))]


def _extend(rng: random.Random, buffer: bytearray, others: Sequence[bytes]) -> None:
    buffer += rng.choice((b"\0", b"\0" * 64, rng.randbytes(20), rng.choice(others)[:1000]))


def _swap(rng: random.Random, buffer: bytearray, _: Sequence[bytes]) -> None:
    size = rng.choice((4, 8, 16, 64))
    one, two = sorted((_place(rng, buffer, 4), _place(rng, buffer, 4)))
    size = min(size, two - one)
    buffer[one : one + size], buffer[two : two + size] = (
        buffer[two : two + size], buffer[one : one + size],
    )  # fmt: skip


def _copy(rng: random.Random, buffer: bytearray, _: Sequence[bytes]) -> None:
    size, source, at = rng.choice((4, 4, 8, 12, 64)), _place(rng, buffer, 4), _place(rng, buffer, 4)
    buffer[at : at + size] = buffer[source : source + size]


def _fill(rng: random.Random, buffer: bytearray, _: Sequence[bytes]) -> None:
    at, size = _place(rng, buffer), rng.choice((4, 16, 64, 256))
    buffer[at : at + size] = bytes([rng.choice((0, 1, 0x20, 0x7F, 0x80, 0xFF))]) * size


def _splice(rng: random.Random, buffer: bytearray, others: Sequence[bytes]) -> None:
    other, at = rng.choice(others), _place(rng, buffer, 4)
    size = rng.choice((8, 40, 400))
    buffer[at : at + size] = other[at : at + size]


_WAYS: tuple[_Way, ...] = (
    _flip, _set_word, _set_word, _set_word, _nudge, _redirect, _redirect, _cut, _drop, _extend,
    _swap, _copy, _fill, _splice,
)  # fmt: skip
