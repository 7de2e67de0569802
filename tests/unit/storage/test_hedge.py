"""A second request helps against a slow first one, and costs little."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from icechunk_async.errors import ThrottledError
from icechunk_async.storage import ByteRange
from icechunk_async.storage.policies.hedge import Hedged, HedgePolicy
from icechunk_async.storage.policies.wrapping import PassingStorage
from tests.unit.storage.scripted import in_virtual_time, with_memory

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from icechunk_async.storage import RangeRequest, Retrieved, Storage


class Slow(PassingStorage):
    """Takes a second per read, but ``seconds[n]`` for the n-th; notes what was cancelled."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.seconds: dict[int, float] = {}
        self.errors: dict[int, Exception] = {}
        self.reads = self.running = self.cancelled = 0

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read, slowly."""
        number = self.reads
        self.reads += 1
        self.running += 1
        try:
            await asyncio.sleep(self.seconds.get(number, 1 + number % 10 / 100))
            if number in self.errors:
                raise self.errors[number]
            return await self.wrapped.get(key, byte_range)
        except asyncio.CancelledError:
            self.cancelled += 1
            await asyncio.sleep(0)
            raise
        finally:
            self.running -= 1


def _hedged(
    use: Callable[[Hedged, Slow], Awaitable[None]], policy: HedgePolicy | None = None
) -> None:
    """Give ``use`` a storage that has learned from 200 reads."""

    async def scenario() -> None:
        async def inner(plain: Storage) -> None:
            await plain.put("chunks/a", b"body")
            await plain.put("refs/main", b"body")
            slow = Slow(plain)
            hedged = Hedged(slow, lambda key: key.startswith("chunks/"), policy)
            for _ in range(200):
                await hedged.get("chunks/a")
            assert slow.reads <= 210
            hedged.second_requests = hedged.second_answers = 0
            hedged._credit = 10.0 if policy is None else 0.0
            slow.reads, slow.cancelled = 1000, 0
            await use(hedged, slow)
            assert slow.running == 0

        await with_memory(inner)

    in_virtual_time(scenario)


def test_a_slow_read_is_hedged() -> None:
    """The second answers, the first is cancelled and gone by then."""

    async def use(hedged: Hedged, slow: Slow) -> None:
        slow.seconds[1000] = 60
        before = asyncio.get_running_loop().time()
        assert (await hedged.get("chunks/a")).data == b"body"
        assert 2 < asyncio.get_running_loop().time() - before < 2.2
        assert (slow.reads, slow.cancelled, slow.running) == (1002, 1, 0)
        assert (hedged.second_requests, hedged.second_answers) == (1, 1)

    _hedged(use)


def test_the_first_reply_wins_even_if_hedged() -> None:
    """Then the second is cancelled."""

    async def use(hedged: Hedged, slow: Slow) -> None:
        slow.seconds |= {1000: 1.5, 1001: 60}
        await hedged.get("chunks/a")
        assert (slow.reads, slow.cancelled, slow.running) == (1002, 1, 0)
        assert (hedged.second_requests, hedged.second_answers) == (1, 0)

    _hedged(use)


def test_mutable_objects_are_read_once() -> None:
    """A second answer could be older than the first."""

    async def use(hedged: Hedged, slow: Slow) -> None:
        slow.seconds[1000] = 60
        await hedged.get("refs/main")
        assert slow.reads == 1001

    _hedged(use)


def test_second_requests_stay_within_their_share() -> None:
    """The share holds even if all reads become slow after a long time without slow ones."""

    async def use(hedged: Hedged, slow: Slow) -> None:
        slow.seconds = {number: 1 - number / 10_000 for number in range(1000, 2000)}
        for _ in range(1000):
            await hedged.get("chunks/a")
        hedged.second_requests = 0
        slow.seconds = dict.fromkeys(range(2000, 5000), 5.0)

        async def read_many() -> None:
            for _ in range(50):
                await hedged.get("chunks/a")

        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(read_many())
        assert 10 <= hedged.second_requests <= 10 + 0.05 * 500

    _hedged(use)


def test_no_read_is_hedged_before_latencies_are_measured() -> None:
    """The first reads teach how long a read takes; small and large ones apart."""

    async def use(hedged: Hedged, slow: Slow) -> None:
        slow.seconds[1000] = 60
        await hedged.get("chunks/a", ByteRange(0, 1))  # the first small one
        assert slow.reads == 1001

    _hedged(use)


def test_a_share_of_zero_disables_hedging() -> None:
    """The policy can switch itself off."""

    async def use(hedged: Hedged, slow: Slow) -> None:
        slow.seconds[1000] = 60
        await hedged.get("chunks/a")
        assert slow.reads == 1001

    _hedged(use, HedgePolicy(max_share=0))


def test_a_hedged_read_fails_only_if_both_requests_fail() -> None:
    """It raises the error of the first request."""

    async def use(hedged: Hedged, slow: Slow) -> None:
        slow.seconds |= {1000: 1.5, 1001: 3}
        slow.errors[1000] = ThrottledError("first")
        assert (await hedged.get("chunks/a")).data == b"body"
        slow.seconds |= {1002: 3, 1003: 0.5}
        slow.errors |= {1002: ThrottledError("first"), 1003: ThrottledError("second")}
        with pytest.raises(ThrottledError, match="first"):
            await hedged.get("chunks/a")
        assert slow.reads == 1004

    _hedged(use)


def test_an_early_failure_is_not_hedged() -> None:
    """It is no slow read; trying again is the business of another policy."""

    async def use(hedged: Hedged, slow: Slow) -> None:
        slow.errors[1000] = ThrottledError("busy")
        with pytest.raises(ThrottledError):
            await hedged.get("chunks/a")
        assert slow.reads == 1001

    _hedged(use)


def test_cancelling_a_hedged_read_cancels_both_requests() -> None:
    """Both requests have ended when the read ends."""

    async def use(hedged: Hedged, slow: Slow) -> None:
        slow.seconds |= {1000: 60, 1001: 60}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await hedged.get("chunks/a")
        assert (slow.reads, slow.cancelled, slow.running) == (1002, 2, 0)

    _hedged(use)


@pytest.mark.parametrize(
    "wrong", [{"quantile": 1.0}, {"max_share": -0.1}, {"min_reads": 0}, {"after_seconds": -1.0}]
)
def test_a_policy_validates_its_values(wrong: dict[str, float]) -> None:
    """Out of range values raise when the policy is made."""
    with pytest.raises(ValueError, match=r"0 < quantile < 1|after_seconds"):
        HedgePolicy(**wrong)  # type: ignore[arg-type]
