"""Fewer requests for many small reads, and several at once for a large one.

Reads of one object that are requested in the same turn of an event loop are sent together. None is
sent before that turn ends, and none joins a request that is already in flight. So each read starts
after it was requested, and sees every write that had returned by then.
"""

from __future__ import annotations

import asyncio
from dataclasses import field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from icechunk_async._runtime.concurrency import SingleFlight, bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.storage.extensions import PlacedRange, room
from icechunk_async.storage.policies.values import CoalescePolicy
from icechunk_async.storage.policies.wrapping import PassingStorage
from icechunk_async.storage.protocol import ByteRange, Retrieved

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async.storage.protocol import RangeRequest, Storage

__all__ = ["Coalescing", "join_ranges", "split_range"]


@dataclass(slots=True, eq=False)
class _Turn:
    """The reads of one object requested in one turn of one event loop."""

    asked: list[RangeRequest] = field(default_factory=list["RangeRequest"])
    sent: dict[RangeRequest, RangeRequest] | None = None
    """The request that serves each read, once the turn has ended."""
    shared: frozenset[RangeRequest] = frozenset()
    """The requests that serve several reads."""


class Coalescing(PassingStorage):
    """A storage whose reads of one object are joined and split.

    Contracts are those of `Storage`. All bytes of an answer are from one version: joined reads are
    cut from one answer, and the parts of a split one are read again as a whole where the object was
    replaced between them. One reader's cancellation does not disturb the others. Each event loop is
    served by itself.

    Joined: ranges with a known end, by `CoalescePolicy`; other reads only with their like.
    Split: ranges longer than ``part_bytes``. A read of a whole object is not split, since nobody
    knows its size.

    Cost: a turn of the loop per read. Memory: a joined reply, at most ``part_bytes``, until its
        reads are served; each read gets a copy of its bytes. The parts of a split read are put in
        place as they come, by storages that know `PlacedRange` without another copy.
    """

    def __init__(self, storage: Storage, policy: CoalescePolicy | None = None) -> None:
        """Wrap ``storage``."""
        super().__init__(storage)
        self._policy = policy or CoalescePolicy()
        self._turns: dict[tuple[asyncio.AbstractEventLoop, str], _Turn] = {}
        self._flights: SingleFlight[tuple[_Turn, RangeRequest], Retrieved] = SingleFlight()

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it."""
        place = (asyncio.get_running_loop(), key)
        turn = self._turns.get(place)
        if turn is None:
            turn = self._turns[place] = _Turn()
        turn.asked.append(byte_range)
        try:
            # All reads of this turn are asked for when the loop comes back. Nothing of another loop
            # can be among them: turns are kept by loop.
            await asyncio.sleep(0)
        except BaseException:
            turn.asked.remove(byte_range)
            if not turn.asked and self._turns.get(place) is turn:
                del self._turns[place]
            raise
        if turn.sent is None:  # the first to come back ends the turn for all
            del self._turns[place]
            self._plan(turn)
            assert turn.sent is not None
        request = turn.sent[byte_range]
        if request not in turn.shared:
            return await self._read(key, request)
        answer = await self._flights.run((turn, request), lambda: self._read(key, request))
        return answer if request == byte_range else _cut(answer, request, byte_range)

    def _plan(self, turn: _Turn) -> None:
        if len(turn.asked) == 1:  # most reads are alone
            turn.sent = {turn.asked[0]: turn.asked[0]}
            return
        policy = self._policy
        ranges = [it for it in turn.asked if isinstance(it, ByteRange) and it.stop is not None]
        turn.sent = {it: it for it in turn.asked}
        joined = join_ranges(ranges, gap_bytes=policy.gap_bytes, max_bytes=policy.part_bytes)
        for one, whole in joined.items():
            turn.sent[one] = whole
        # Requests that serve one read are sent by it; only those that serve several need a task
        # that outlives each of them.
        seen: set[RangeRequest] = set()
        shared: set[RangeRequest] = set()
        for asked in turn.asked:
            request = turn.sent[asked]
            (shared if request in seen else seen).add(request)
        turn.shared = frozenset(shared)

    async def _read(self, key: str, request: RangeRequest) -> Retrieved:
        """Send one request, in parts if it is long."""
        if not isinstance(request, ByteRange) or request.stop is None:
            return await self.wrapped.get(key, request)
        length = request.stop - request.start
        if length <= self._policy.part_bytes or self._policy.max_parts == 1:
            return await self.wrapped.get(key, request)
        return await self._read_parts(key, request)

    async def _read_parts(self, key: str, whole: ByteRange) -> Retrieved:
        policy = self._policy
        parts = split_range(whole, part_bytes=policy.part_bytes, max_parts=policy.max_parts)
        assert whole.stop is not None
        # The length comes from an untrusted file: for a very long one bytes are joined as they
        # come.
        memory = room(whole.stop - whole.start)

        async def read(part: ByteRange) -> Retrieved:
            if memory is None:
                return await self.wrapped.get(key, part)
            assert part.stop is not None
            place = memory[part.start - whole.start : part.stop - whole.start]
            return await self._read_into(place, key, part)

        answers = await bounded_map(read, parts, limit=len(parts))
        first = answers[0]
        if any(it.version != first.version for it in answers):
            return await self.wrapped.get(key, whole)  # in one piece it is of one version
        if memory is None or sum(len(it.data) for it in answers) != len(memory):
            return replace(first, data=b"".join(it.data for it in answers))
        return replace(first, data=memory.toreadonly())

    async def _read_into(self, place: memoryview, key: str, part: ByteRange) -> Retrieved:
        answer = await self.wrapped.get(key, PlacedRange(part.start, part.stop, into=place))
        if answer.data is place or len(answer.data) != len(place):
            return answer
        place[:] = answer.data
        return replace(answer, data=place)


def _cut(answer: Retrieved, request: RangeRequest, byte_range: RangeRequest) -> Retrieved:
    """Cut a read out of the longer one that it was joined to."""
    assert isinstance(request, ByteRange)
    assert isinstance(byte_range, ByteRange)
    assert byte_range.stop is not None
    start, stop = byte_range.start - request.start, byte_range.stop - request.start
    # A view would keep the whole reply in memory for as long as one reader keeps its part.
    data = bytes(memoryview(answer.data)[start:stop])
    return replace(answer, data=data)


def join_ranges(
    ranges: Iterable[ByteRange], *, gap_bytes: int, max_bytes: int
) -> dict[ByteRange, ByteRange]:
    """Return for each range, all with known ends, the joined one to read in its place.

    Joined are ranges that overlap or are at most ``gap_bytes`` apart, to ``max_bytes`` at most.
    Empty ranges, and single ranges longer than that, are unchanged.
    """
    joined: dict[ByteRange, ByteRange] = {}
    group: list[ByteRange] = []
    start = stop = 0

    def close() -> None:
        whole = ByteRange(start, stop)
        joined.update((it, whole) for it in group)

    for it in sorted(set(ranges), key=lambda it: (it.start, it.stop or 0)):
        end = it.stop or 0
        if end - it.start > max_bytes or end == it.start:
            joined[it] = it
            continue
        # In order of their starts, so that only the last group can take one more. ``[0, 10)``,
        # ``[20, 30)`` and ``[90, 95)`` with gaps of 16 become ``[0, 30)`` and ``[90, 95)``.
        if group and it.start - stop <= gap_bytes and max(stop, end) - start <= max_bytes:
            stop = max(stop, end)
        else:
            close()
            group, start, stop = [], it.start, end
        group.append(it)
    close()
    return joined


def split_range(whole: ByteRange, *, part_bytes: int, max_parts: int) -> list[ByteRange]:
    """Return parts of nearly equal length, about ``part_bytes``, at most ``max_parts`` of them."""
    assert whole.stop is not None
    length = whole.stop - whole.start
    count = max(1, min(max_parts, -(-length // part_bytes), length))
    bounds = [whole.start + length * number // count for number in range(count + 1)]
    return [ByteRange(a, b) for a, b in pairwise(bounds)]
