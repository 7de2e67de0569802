"""The trial of a storage's promises: what it finds out, what it costs, what it leaves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

import anyio
import pytest

from icechunk_async import Repository
from icechunk_async.errors import (
    OutcomeUnknownError,
    PermissionDeniedError,
    StorageError,
    UnsafeStorageError,
)
from icechunk_async.storage import (
    ABSENT,
    Capabilities,
    Data,
    DeleteFailure,
    Expected,
    ObjectInfo,
    RangeRequest,
    Retrieved,
    Storage,
    Version,
    open_storage,
)
from icechunk_async.storage.probe import (
    PROBE_PREFIX,
    Finding,
    ProbeResult,
    Verdict,
    probe_storage,
    try_what_commits_need,
)
from icechunk_async.testing.cancellation import at_every_wait
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from icechunk_async.testing.wrapping import WrappedStorage
from tests.conformance import flawed_changes, flawed_listings, flawed_objects
from tests.conformance.flawed import Delimiter, Flawed, opened
from tests.helpers import memory_url, objects

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from icechunk_async.storage import ListEntry, Storage

PROMISES = [
    *("conditional create", "conditional update", "read after write", "ranges"),
    *("list after write", "list order", "delete", "clock"),
]
NEEDED = PROMISES[:3]


class IgnoresConditions(Flawed):
    """Ignores conditions of writes, as some S3 compatible servers do."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write."""
        del if_version
        return await self.inner.put(key, data)


class IgnoresUpdateConditions(Flawed):
    """Creates on condition, and updates without."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write."""
        expected = if_version if if_version is ABSENT else None
        return await self.inner.put(key, data, if_version=expected)


class LooksOnlyWhetherSomethingIsThere(Flawed):
    """Takes a version for one of any object."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write over what is there."""
        if isinstance(if_version, Version) and key in await objects(self.inner):
            if_version = None
        return await self.inner.put(key, data, if_version=if_version)


class RefusesEveryUpdate(Flawed):
    """Never finds the version that it answered itself."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write."""
        if isinstance(if_version, Version):
            if_version = Version(f'"{if_version.token}"')
        return await self.inner.put(key, data, if_version=if_version)


class KnowsNoConditions(Flawed):
    """Raises an unrelated error."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write."""
        if if_version is not None:
            raise StorageError("501 Not Implemented")
        return await self.inner.put(key, data)


class LosesReplies(Flawed):
    """Loses the reply of every conditional write."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write."""
        version = await self.inner.put(key, data, if_version=if_version)
        if if_version is not None:
            raise OutcomeUnknownError("no answer came")
        return version


class LetsTheLastWriterStay(Flawed):
    """One creator is told that it landed, and another's bytes stay."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write."""
        try:
            return await self.inner.put(key, data, if_version=if_version)
        except StorageError:
            if "race" in key:
                await self.inner.put(key, data)
            raise


class TellsEveryCreatorThatItLanded(Flawed):
    """The first one's bytes stay, and all others are lost without a word."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write."""
        try:
            return await self.inner.put(key, data, if_version=if_version)
        except StorageError:
            if "race" not in key:
                raise
            return (await self.inner.get(key)).version


class IsAnHourBehind(Flawed):
    """Tells wrong times."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read."""
        found = await self.inner.get(key, byte_range)
        assert found.last_modified is not None
        return replace(found, last_modified=found.last_modified - timedelta(hours=1))


class TellsTimesOnlyInListings(Flawed):
    """And they are a day ahead."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read."""
        return replace(await self.inner.get(key, byte_range), last_modified=None)

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """List."""
        async for entry in self.inner.list_prefix(
            prefix, start_after=start_after, delimiter=delimiter
        ):
            assert isinstance(entry, ObjectInfo)
            yield replace(entry, last_modified=entry.last_modified + timedelta(days=1))


class DeletesNothingOfItsOwn(Flawed):
    """Allows writes but no deletions."""

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Refuse."""
        error = StorageError("deleting is not allowed")
        return [DeleteFailure(key, error) for key in keys]


class IsUnverified(WrappedStorage):
    """A backend that has not made sure of its promises."""

    @property
    def capabilities(self) -> Capabilities:
        """Promise, without having looked."""
        return replace(self.wrapped.capabilities, verified=False)


def verdicts(result: ProbeResult) -> dict[str, Verdict]:
    """Return the verdicts by promise."""
    return {finding.promise: finding.verdict for finding in result.findings}


async def test_a_storage_that_keeps_its_promises_passes() -> None:
    """Each promise is kept, with a sentence, and nothing stays."""
    async with open_storage(memory_url()) as storage:
        await storage.put("mine", b"body")
        result = await probe_storage(storage)
        assert verdicts(result) == dict.fromkeys(PROMISES, Verdict.KEPT)
        assert [it.promise for it in result.findings if it.needed] == NEEDED
        assert all(len(it.detail.split()) > 3 for it in result.findings)
        assert result.is_safe
        assert result.left_behind == ()
        assert result.url == storage.description.url
        assert await objects(storage) == {"mine": b"body"}
        result.check()


async def test_a_url_with_options_is_opened_and_closed(tmp_path: Path) -> None:
    """The options are those of ``open_storage``."""
    result = await probe_storage(tmp_path, durability="none")
    assert set(verdicts(result).values()) == {Verdict.KEPT}
    async with open_storage(tmp_path) as storage:
        assert await objects(storage) == {}


@pytest.mark.parametrize(
    ("flaw", "promise", "verdict"),
    [
        (IgnoresConditions, "conditional create", "broken"),
        (IgnoresConditions, "conditional update", "broken"),
        (IgnoresUpdateConditions, "conditional update", "broken"),
        (RefusesEveryUpdate, "conditional update", "broken"),
        (KnowsNoConditions, "conditional create", "broken"),
        (KnowsNoConditions, "conditional update", "broken"),
        (LosesReplies, "conditional create", "unknown"),
        (LetsTheLastWriterStay, "conditional create", "broken"),
        (TellsEveryCreatorThatItLanded, "conditional create", "broken"),
        (flawed_changes.RefusesToCreate, "conditional create", "broken"),
        (flawed_changes.CreatesOverWhatIsThere, "conditional create", "broken"),
        (flawed_changes.ChangesWhatItRefuses, "conditional create", "broken"),
        (flawed_changes.LooksThenCreates, "conditional create", "broken"),
        (flawed_changes.UpdatesAnyVersion, "conditional update", "broken"),
        (flawed_changes.UpdatesWhatIsNotThere, "conditional update", "broken"),
        (flawed_changes.LooksThenUpdates, "conditional update", "broken"),
        (flawed_objects.ReadsFromAStaleCache, "read after write", "broken"),
        (flawed_objects.MakesVersionsFromSizes, "read after write", "broken"),
        (flawed_objects.SendsEverythingAgain, "read after write", "broken"),
        (flawed_objects.LosesTheLastByte, "ranges", "broken"),
        (flawed_objects.CountsTheStopIn, "ranges", "broken"),
        (flawed_objects.RefusesRangesBeyondTheEnd, "ranges", "broken"),
        (flawed_objects.CountsSuffixesFromTheStart, "ranges", "broken"),
        (flawed_objects.TellsTheSizeOfThePart, "ranges", "broken"),
        (flawed_listings.ListsWithDelay, "list after write", "broken"),
        (flawed_listings.ListsDeletedObjects, "list after write", "broken"),
        (flawed_listings.OrdersByUtf16, "list order", "broken"),
        (flawed_listings.OrdersByFolder, "list order", "broken"),
        (flawed_listings.StartsAtTheKey, "list order", "broken"),
        (flawed_changes.DeletesNothing, "delete", "broken"),
        (flawed_changes.ReportsMissingObjects, "delete", "broken"),
        (DeletesNothingOfItsOwn, "delete", "broken"),
        (IsAnHourBehind, "clock", "broken"),
        (TellsTimesOnlyInListings, "clock", "broken"),
    ],
)
async def test_a_broken_promise_is_found(flaw: type[Flawed], promise: str, verdict: str) -> None:
    """A storage is unsafe if it breaks a promise that commits need."""
    async with opened(flaw, f"memory://{uuid4()}") as storage:
        result = await probe_storage(storage)
    assert verdicts(result)[promise] == verdict, result.findings
    if promise in NEEDED:
        with pytest.raises(UnsafeStorageError, match=promise) as caught:
            result.check()
        assert "probe=False" in caught.value.message
        assert promise in str(caught.value.context["broken"])


async def test_the_clock_skew_is_reported() -> None:
    """Its size and its direction."""
    for flaw, words in ((IsAnHourBehind, "3599 s behind"), (TellsTimesOnlyInListings, "86400 s")):
        async with opened(flaw, f"memory://{uuid4()}") as storage:
            detail = (await probe_storage(storage)).findings[-1].detail
        assert words in detail, detail


async def test_keys_that_could_not_be_removed_are_named() -> None:
    """They are there, and the result says so."""
    async with opened(DeletesNothingOfItsOwn, f"memory://{uuid4()}") as storage:
        result = await probe_storage(storage)
        there = {entry.key for entry in await storage.everything() if isinstance(entry, ObjectInfo)}
    assert there <= set(result.left_behind)
    assert all(key.startswith(PROBE_PREFIX) for key in result.left_behind)


async def test_missing_promises_are_not_tried() -> None:
    """The storage's own reason is told; a storage that only reads is not written to."""

    class Promises(LatencyStorage):
        promises = Capabilities(conditional_update=False, reasons={"conditional_update": "no CAS"})

        @property
        def capabilities(self) -> Capabilities:
            return self.promises

    async with open_storage(memory_url()) as plain:
        storage = Promises(plain, seconds=0)
        result = await probe_storage(storage)
        assert verdicts(result)["conditional update"] is Verdict.NOT_PROMISED
        assert result.findings[1].detail == "no CAS"
        assert not result.is_safe
        storage.promises = Capabilities(writable=False, reasons={"writable": "it only reads"})
        storage.forget()
        result = await probe_storage(storage)
        assert set(verdicts(result).values()) == {Verdict.NOT_PROMISED}
        assert not storage.requests


async def test_an_unusable_storage_raises() -> None:
    """It says nothing about promises."""

    class Denied(WrappedStorage):
        async def before(self, operation: str, key: str) -> None:
            del key
            if operation == "put":
                raise PermissionDeniedError("you may not write here")

    async with open_storage(memory_url()) as plain:
        with pytest.raises(PermissionDeniedError):
            await probe_storage(Denied(plain))


def test_a_storage_that_hangs_is_given_up() -> None:
    """After the time that was given; what was not found out is unknown."""

    class Hangs(WrappedStorage):
        async def before(self, operation: str, key: str) -> None:
            if operation == "put" and "create" in key:
                await anyio.sleep_forever()

    async def scenario() -> None:
        async with open_storage(memory_url()) as plain:
            result = await probe_storage(Hangs(plain), timeout_seconds=0.5)
            assert verdicts(result)["conditional create"] is Verdict.UNKNOWN
            assert not result.is_safe
            assert await objects(plain) == {}
            # Writes that may still land are told.
            assert {key.rpartition("/")[2] for key in result.left_behind} == {"alone"}

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(scenario())


def test_a_write_that_was_cut_off_is_over_before_the_objects_are_removed() -> None:
    """A server carries it out although its client is gone."""

    class Careless(WrappedStorage):
        def __init__(self, storage: Storage) -> None:
            super().__init__(storage)
            self.running = 0

        async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
            self.running += 1
            carried_out = asyncio.create_task(self.carry_out(key, data))
            return await asyncio.shield(carried_out)

        async def carry_out(self, key: str, data: Data) -> Version:
            await anyio.sleep(2 if "race" in key else 1)
            self.running -= 1
            return await super().put(key, data)

    async def scenario() -> None:
        async with open_storage(memory_url()) as plain:
            storage = Careless(plain)
            result = await probe_storage(storage)
            assert verdicts(result)["conditional create"] is Verdict.BROKEN
            assert storage.running == 0
            with anyio.move_on_after(1.5) as scope:
                await probe_storage(storage)
            assert scope.cancelled_caught
            await anyio.sleep(10)
            assert await objects(plain) == {}

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(scenario())


async def test_a_cancelled_trial_leaves_nothing() -> None:
    """It may be cancelled at any request."""
    async with open_storage(memory_url()) as plain:

        async def probe(_: int) -> None:
            await probe_storage(LatencyStorage(plain, seconds=0))

        runs = 0
        async for n in at_every_wait(probe):
            assert await objects(plain) == {}, n
            runs += 1
        assert runs > 0


def test_a_probe_needs_few_requests_in_few_rounds() -> None:
    """Bounded in number, and in how many follow one another."""

    async def scenario() -> tuple[float, int]:
        async with open_storage(memory_url()) as plain:
            storage = LatencyStorage(plain, seconds=1)
            result = await probe_storage(storage)
            assert result.is_safe
            return result.seconds, sum(storage.requests.values())

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        seconds, requests = runner.run(scenario())
    assert seconds <= 7  # the last of them removes what was written
    assert requests <= 155


def test_a_probe_opens_few_connections() -> None:
    """Those of one kind of races, and some beside; writers of a race find them open."""
    at_once, most = 0, 0

    class Counts(WrappedStorage):
        async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            try:
                await anyio.sleep(1)
                return await super().put(key, data, if_version=if_version)
            finally:
                at_once -= 1

    async def scenario() -> None:
        async with open_storage(memory_url()) as plain:
            assert (await probe_storage(Counts(plain))).is_safe

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(scenario())
    assert 32 <= most <= 48


def test_the_refusal_names_the_preset_for_cephs_gateway() -> None:
    """It takes versions without quotes only, so that every update is refused without it."""
    finding = Finding("conditional update", needed=True, verdict=Verdict.BROKEN, detail="refused")
    with pytest.raises(UnsafeStorageError, match="preset='ceph'"):
        ProbeResult("s3://bucket", (finding,), 1.0).check()
    with pytest.raises(UnsafeStorageError) as caught:
        ProbeResult("file:///d", (finding,), 1.0).check()
    assert "ceph" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://bucket", "file:///d"])
def test_the_refusal_names_numbered_states_where_they_are_safe(url: str) -> None:
    """On S3 as elsewhere: old clones of it create on condition, and replace without."""
    kept = Finding("conditional create", needed=True, verdict=Verdict.KEPT, detail="")
    broken = replace(kept, promise="conditional update", verdict=Verdict.BROKEN, detail="ignored")
    with pytest.raises(UnsafeStorageError, match="layout='format-2-numbered'"):
        ProbeResult(url, (kept, broken), 1.0).check()
    neither = replace(kept, verdict=Verdict.BROKEN)
    with pytest.raises(UnsafeStorageError) as caught:
        ProbeResult(url, (neither, broken), 1.0).check()
    assert "numbered" not in str(caught.value)


class IsDocumented(WrappedStorage):
    """A service that documents what it promises."""

    @property
    def capabilities(self) -> Capabilities:
        """Promise, in writing."""
        return replace(self.wrapped.capabilities, verified=False, documented=True)


IGNORING = [
    (IgnoresConditions, "conditional create"),
    (IgnoresUpdateConditions, "conditional update"),
    (LooksOnlyWhetherSomethingIsThere, "conditional update"),
    (RefusesEveryUpdate, "conditional update"),
    (KnowsNoConditions, "conditional create"),
    (flawed_changes.RefusesToCreate, "conditional create"),
    (flawed_changes.CreatesOverWhatIsThere, "conditional create"),
    (flawed_changes.UpdatesAnyVersion, "conditional update"),
    (flawed_changes.UpdatesWhatIsNotThere, "conditional update"),
    (flawed_objects.MakesVersionsFromSizes, "conditional update"),
]


class TestWhatCommitsNeed:
    """The trial before a repository is created."""

    @pytest.mark.parametrize(
        ("flaw", "promise"),
        [
            *IGNORING,
            (LetsTheLastWriterStay, "conditional create"),
            (TellsEveryCreatorThatItLanded, "conditional create"),
            (flawed_changes.ChangesWhatItRefuses, "conditional create"),
            (flawed_changes.LooksThenCreates, "conditional create"),
            (flawed_changes.LooksThenUpdates, "conditional update"),
            (flawed_objects.ReadsFromAStaleCache, "read after write"),
        ],
    )
    async def test_a_broken_promise_is_found(self, flaw: type[Flawed], promise: str) -> None:
        """As by the whole table, and nothing stays."""
        async with opened(flaw, f"memory://{uuid4()}") as storage:
            with pytest.raises(UnsafeStorageError, match=promise):
                await try_what_commits_need(storage, numbered=False)
            assert await storage.everything() == []

    @pytest.mark.parametrize(("flaw", "promise"), IGNORING)
    async def test_a_documented_service_must_honour_conditions(
        self, flaw: type[Flawed], promise: str
    ) -> None:
        """Its address may be another service's after all; the refusal names every promise."""
        async with opened(flaw, f"memory://{uuid4()}") as storage:
            with pytest.raises(UnsafeStorageError, match=promise):
                await try_what_commits_need(IsDocumented(storage), numbered=False)
            assert await storage.everything() == []

    @pytest.mark.parametrize(
        ("flaw", "promise"),
        [
            (flawed_changes.LooksThenCreates, "conditional create"),
            (flawed_listings.ListsWithDelay, "list after write"),
            (flawed_listings.OrdersByFolder, "list order"),
        ],
    )
    async def test_numbered_references_need_listings(
        self, flaw: type[Flawed], promise: str
    ) -> None:
        """They are tried whatever the service documents; updates are not."""
        async with opened(flaw, f"memory://{uuid4()}") as storage:
            with pytest.raises(UnsafeStorageError, match=promise):
                await try_what_commits_need(IsDocumented(storage), numbered=True)
        async with opened(IgnoresUpdateConditions, f"memory://{uuid4()}") as storage:
            await (await try_what_commits_need(storage, numbered=True))()
            assert await storage.everything() == []

    async def test_what_failed_once_is_refused(self) -> None:
        """Even if the whole table, tried for the message, finds nothing."""

        class FailsOnce(IgnoresConditions):
            failed = False

            async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
                if not self.failed and b"must not land" in bytes(data):
                    self.failed = True
                    return await super().put(key, data)
                return await self.inner.put(key, data, if_version=if_version)

        async with opened(FailsOnce, f"memory://{uuid4()}") as storage:
            with pytest.raises(UnsafeStorageError, match="the condition is ignored"):
                await try_what_commits_need(storage, numbered=False)

    def test_a_documented_service_is_tried_in_few_requests(self) -> None:
        """The objects of the trial are removed while the repository is written."""

        async def scenario() -> tuple[float, int]:
            loop = asyncio.get_running_loop()
            async with open_storage(memory_url()) as plain:
                storage = LatencyStorage(plain, seconds=1)
                began = loop.time()
                async with Repository.create(IsDocumented(storage)):
                    found = loop.time() - began, storage.requests.total()
                keys = await objects(plain)
                assert not any(key.startswith(PROBE_PREFIX) for key in keys)
                return found

        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            seconds, requests = runner.run(scenario())
        assert seconds == 5  # to look, twice to try, the first snapshot, and what makes it one
        assert requests == 15

    def test_another_service_is_tried_in_few_requests(self) -> None:
        """Only what commits need."""

        async def scenario() -> tuple[float, int]:
            async with open_storage(memory_url()) as plain:
                storage = LatencyStorage(plain, seconds=1)
                began = asyncio.get_running_loop().time()
                remove = await try_what_commits_need(storage, numbered=False)
                found = asyncio.get_running_loop().time() - began, storage.requests.total()
                await remove()
                assert await objects(plain) == {}
                return found

        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            seconds, requests = runner.run(scenario())
        assert seconds <= 5
        assert requests <= 120

    @pytest.mark.parametrize("wrapper", [IsUnverified, IsDocumented])
    async def test_a_cancelled_creation_leaves_nothing_of_the_trial(
        self, wrapper: type[WrappedStorage]
    ) -> None:
        """It may be cancelled at any request."""
        runs = 0
        async with open_storage(memory_url()) as plain:

            async def create(number: int) -> None:
                del number
                async with Repository.create(
                    wrapper(LatencyStorage(plain, seconds=0)), check_clean_root=False
                ):
                    pass

            async for n in at_every_wait(create):
                keys = await objects(plain)
                assert not any(key.startswith(PROBE_PREFIX) for key in keys), n
                await plain.delete(keys)
                runs += 1
        assert runs > 0


class TestCreate:
    """The use of the probe in ``Repository.create``."""

    @pytest.mark.parametrize("spec", [1, 2])
    async def test_creation_is_refused_where_commits_could_be_lost(self, spec: int) -> None:
        """With the promise and the way out; nothing is written."""
        async with opened(IgnoresConditions, f"memory://{uuid4()}") as flawed:
            storage: Storage = IsUnverified(flawed)
            for create in (Repository.create, Repository.open_or_create):
                with pytest.raises(UnsafeStorageError, match="conditional create"):
                    async with create(storage, spec_version=spec):
                        pass
            assert await flawed.everything() == []
            async with Repository.create(storage, spec_version=spec, probe=False) as repository:
                assert await repository.list_branches() == {"main"}

    async def test_a_verified_backend_is_not_probed(self) -> None:
        """Unless asked for."""
        async with open_storage(memory_url()) as plain:
            storage = LatencyStorage(plain, seconds=0)
            async with Repository.create(storage):
                pass
            assert not any(key.startswith(PROBE_PREFIX) for _, key in storage.log)
        async with open_storage(memory_url()) as plain:
            storage = LatencyStorage(plain, seconds=0)
            async with Repository.create(storage, probe=True):
                pass
            assert any(key.startswith(PROBE_PREFIX) for _, key in storage.log)

    async def test_opening_does_not_probe(self) -> None:
        """This holds even for a backend whose promises are unverified."""
        async with open_storage(memory_url()) as plain:
            async with Repository.create(plain):
                pass
            counted = LatencyStorage(plain, seconds=0)
            async with Repository.open_or_create(IsUnverified(counted)):
                pass
            assert not counted.requests["put"]

    async def test_a_concurrent_probe_is_not_in_the_way(self) -> None:
        """Of several that create at once one must succeed."""
        async with open_storage(memory_url()) as storage:
            await storage.put(f"{PROBE_PREFIX}abc/create/alone", b"x")
            async with Repository.create(storage) as repository:
                assert await repository.list_branches() == {"main"}
