"""Retries: which errors, how often, and how long."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING

import pytest

from icechunk_async.errors import (
    BucketNotFoundError,
    IcechunkError,
    InvalidObjectKeyError,
    NameResolutionError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageClosedError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
    ThrottledError,
    TLSError,
    UnreachableError,
    WrongRegionError,
)
from icechunk_async.storage import (
    ABSENT,
    CommonPrefix,
    DeleteFailure,
    ObjectInfo,
    Version,
    open_storage,
)
from icechunk_async.storage.policies.retry import Retrying
from icechunk_async.storage.policies.values import RetryPolicy
from tests.helpers import memory_url
from tests.unit.storage.scripted import Scripted, in_virtual_time, with_memory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from icechunk_async.storage import Storage

AT_ONCE = RetryPolicy(max_tries=4, initial_seconds=0)
PASSING = [StorageUnavailableError, ThrottledError, UnreachableError, NameResolutionError]
LASTING = [
    TLSError,
    PermissionDeniedError,
    WrongRegionError,
    BucketNotFoundError,
    InvalidObjectKeyError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StorageFullError,
    StorageClosedError,
    StorageError,
    OutcomeUnknownError,
]


@pytest.fixture
async def scripted() -> AsyncIterator[Scripted]:
    """Open a storage with one object and scripted failures."""
    async with open_storage(memory_url()) as plain:
        await plain.put("key", b"body")
        yield Scripted(plain)


@pytest.mark.parametrize("kind", PASSING)
async def test_transient_errors_are_retried(scripted: Scripted, kind: type[IcechunkError]) -> None:
    """In every operation, conditional writes included: nothing had changed."""
    storage = Retrying(scripted, AT_ONCE)
    version = (await scripted.get("key")).version
    operations: list[Callable[[], Awaitable[object]]] = [
        lambda: storage.get("key"),
        lambda: storage.get_if_changed("key", version),
        lambda: storage.put("key", b"new", if_version=version),
        lambda: storage.put("other", b"new", if_version=ABSENT),
        lambda: storage.copy("key", "copy"),
        lambda: storage.delete(["copy"]),
        storage.sync,
    ]
    for operation in operations:
        scripted.asked.clear()
        scripted.script = [kind("busy"), kind("still busy")]
        result = await operation()
        assert not isinstance(result, list) or result == []
        assert len(scripted.asked) == 3


@pytest.mark.parametrize("kind", LASTING)
async def test_other_errors_are_raised_at_once(
    scripted: Scripted, kind: type[IcechunkError]
) -> None:
    """The same error object: asking again would not get another answer."""
    storage = Retrying(scripted, AT_ONCE)
    operations: list[Callable[[], Awaitable[object]]] = [
        lambda: storage.get("key"),
        lambda: storage.get_if_changed("key", Version("other")),
        lambda: storage.put("other", b"new"),
        lambda: storage.put("other", b"new", if_version=ABSENT),
        lambda: storage.copy("key", "copy"),
        lambda: storage.delete(["copy"]),
        storage.sync,
    ]
    for operation in operations:
        scripted.asked.clear()
        error = kind("no", key="key")
        scripted.script = [error]
        with pytest.raises(kind) as caught:
            await operation()
        assert caught.value is error
        assert len(scripted.asked) == 1


async def test_the_last_error_says_how_often_it_was_tried(scripted: Scripted) -> None:
    """In its message and its context, which travel; its kind and context stay."""
    scripted.script = [ThrottledError(f"Busy {n}.", key="key") for n in range(9)]
    with pytest.raises(ThrottledError, match=r"^Busy 3\. It was tried 4 times within") as caught:
        await Retrying(scripted, AT_ONCE).get("key")
    assert isinstance(caught.value.__cause__, ThrottledError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.context["key"], copy.context["tries"]) == ("key", 4)
    assert len(scripted.asked) == 4


async def test_a_single_try_raises_the_plain_error(scripted: Scripted) -> None:
    """The error has no notes about retries."""
    error = ThrottledError("busy")
    scripted.script = [error]
    with pytest.raises(ThrottledError) as caught:
        await Retrying(scripted, RetryPolicy(max_tries=1)).get("key")
    assert caught.value is error
    assert len(scripted.asked) == 1


async def test_name_resolution_is_tried_three_times(scripted: Scripted) -> None:
    """A resolver may stumble, but a wrong name stays wrong."""
    scripted.script = [NameResolutionError("no such host") for _ in range(9)]
    with pytest.raises(NameResolutionError, match="3 times"):
        await Retrying(scripted, RetryPolicy(max_tries=9, initial_seconds=0)).get("key")
    assert len(scripted.asked) == 3


async def test_an_unknown_write_is_not_repeated_where_that_could_harm(scripted: Scripted) -> None:
    """Conditional, or to a key that others write otherwise; a copy never."""
    storage = Retrying(scripted, AT_ONCE, immutable=lambda key: key.startswith("chunks/"))
    operations: list[Callable[[], Awaitable[object]]] = [
        lambda: storage.put("key", b"x"),
        lambda: storage.put("chunks/a", b"x", if_version=ABSENT),
        lambda: storage.put("chunks/a", b"x", if_version=Version("1")),
        lambda: storage.copy("key", "chunks/b"),
        lambda: storage.delete(["chunks/c"]),
    ]
    busy, unknown = ThrottledError("busy"), OutcomeUnknownError("no answer")
    for operation in operations:
        for script in ([unknown], [busy, unknown]):
            scripted.asked.clear()
            scripted.script = [*script, None]
            with pytest.raises(OutcomeUnknownError):
                await operation()
            assert len(scripted.asked) == len(script)


async def test_an_unknown_write_of_an_immutable_object_is_repeated(scripted: Scripted) -> None:
    """Its bytes are the same, no matter which write lands last."""
    storage = Retrying(scripted, AT_ONCE, immutable=lambda _: True)
    scripted.script = [OutcomeUnknownError("no answer"), ThrottledError("busy"), None]
    await storage.put("chunks/a", b"x")
    assert len(scripted.asked) == 3


@pytest.mark.parametrize(
    "last",
    [
        [ThrottledError("busy")] * 3,
        [PermissionDeniedError("expired")],
        [StorageFullError("full")],
        [OutcomeUnknownError("no answer")] * 3,
    ],
    ids=["busy", "denied", "full", "unknown"],
)
async def test_an_unknown_outcome_stays_unknown_after_retries(
    scripted: Scripted, last: list[IcechunkError]
) -> None:
    """A later refusal says that nothing changed, but only by the later try."""
    scripted.script = [OutcomeUnknownError("No answer.", key="chunks/a"), *last]
    storage = Retrying(scripted, AT_ONCE, immutable=lambda _: True)
    with pytest.raises(OutcomeUnknownError) as caught:
        await storage.put("chunks/a", b"x")
    assert len(scripted.asked) == 1 + len(last)
    assert caught.value.__cause__ is not None


def test_pauses_grow_and_are_random() -> None:
    """The n-th is anything up to twice as long as the one before, to the longest."""
    policy = RetryPolicy(max_tries=8, initial_seconds=1, max_seconds=16)

    async def pauses() -> list[float]:
        async def use(plain: Storage) -> list[float]:
            scripted = Scripted(plain, [ThrottledError("busy")] * 7)
            await plain.put("key", b"x")
            await Retrying(scripted, policy).get("key")
            return [b - a for a, b in zip(scripted.times, scripted.times[1:], strict=False)]

        return await with_memory(use)

    runs = [in_virtual_time(pauses)[0] for _ in range(60)]
    for number, limit in enumerate([1, 2, 4, 8, 16, 16, 16]):
        seen = [run[number] for run in runs]
        assert 0 <= min(seen) < limit / 4
        assert limit * 3 / 4 < max(seen) <= limit


def test_a_requested_pause_is_respected() -> None:
    """The pause is a little longer, so that clients do not all return at the same moment."""

    async def scenario() -> list[float]:
        async def use(plain: Storage) -> list[float]:
            busy = ThrottledError("busy", retry_after_seconds=30)
            scripted = Scripted(plain, [busy])
            await plain.put("key", b"x")
            await Retrying(scripted, RetryPolicy(initial_seconds=1)).get("key")
            return scripted.times

        return await with_memory(use)

    (first, second), _ = in_virtual_time(scenario)
    assert 30 <= second - first <= 31


async def test_a_too_long_requested_pause_ends_the_retries(
    scripted: Scripted,
) -> None:
    """Asking earlier than it wants would only be refused again."""
    scripted.script = [ThrottledError("busy", retry_after_seconds=30)]
    with pytest.raises(ThrottledError):
        await Retrying(scripted, RetryPolicy(max_seconds=20)).get("key")
    assert len(scripted.asked) == 1


def test_a_deadline_of_the_caller_ends_a_pause_at_once() -> None:
    """Though the store asked for more."""

    async def scenario() -> int:
        async def use(plain: Storage) -> int:
            scripted = Scripted(plain, [ThrottledError("busy", retry_after_seconds=100)])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3):
                    await Retrying(scripted).get("key")
            return len(scripted.asked)

        return await with_memory(use)

    assert in_virtual_time(scenario) == (1, 3.0)


def test_no_try_begins_after_the_total_time() -> None:
    """The error comes when the next pause would end too late, not after it."""

    async def scenario() -> None:
        async def use(plain: Storage) -> None:
            busy = [ThrottledError("busy", retry_after_seconds=4) for _ in range(9)]
            policy = RetryPolicy(initial_seconds=0, total_seconds=10)
            with pytest.raises(ThrottledError, match=r"3 times within 8\.0 s"):
                await Retrying(Scripted(plain, busy), policy).get("key")

        await with_memory(use)

    assert in_virtual_time(scenario)[1] == 8.0


async def test_a_listing_resumes_where_it_failed(scripted: Scripted) -> None:
    """Each key is listed once, groups as well, and progress counts the tries from zero."""
    for name in ("a/1", "a/2", "b", "c/1", "d"):
        await scripted.wrapped.put(name, b"")
    busy = ThrottledError("busy")
    scripted.script = [None, busy, busy, None, busy, busy, None, busy, busy]
    storage = Retrying(scripted, RetryPolicy(max_tries=3, initial_seconds=0))
    found = [
        entry.prefix if isinstance(entry, CommonPrefix) else entry.key
        async for entry in storage.list_prefix(delimiter="/")
    ]
    assert found == ["a/", "b", "c/", "d", "key"]
    assert [what[1] for what in scripted.asked] == [None, "a/", "a/", "b", "b", "c/", "c/"]
    scripted.script = [None, busy, busy, busy]
    seen: list[str] = []

    async def list_all() -> None:
        async for entry in storage.list_prefix():
            assert isinstance(entry, ObjectInfo)
            seen.append(entry.key)

    with pytest.raises(ThrottledError, match="3 times"):
        await list_all()
    assert seen == ["a/1"]


async def test_a_deletion_resumes_with_the_remaining_keys(scripted: Scripted) -> None:
    """Keys that were deleted, or cannot be deleted, are not requested again."""
    denied, busy, unknown = (
        PermissionDeniedError("no"),
        ThrottledError("busy"),
        OutcomeUnknownError("no answer"),
    )
    answers = [
        [DeleteFailure("a", denied), DeleteFailure("b", busy), DeleteFailure("c", unknown)],
        [DeleteFailure("b", busy)],
        [],
    ]
    asked: list[list[str]] = []

    class Partly(Scripted):
        async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
            """Return as planned."""
            asked.append(list(keys))
            return answers.pop(0)

    storage = Retrying(Partly(scripted), AT_ONCE)
    failures = await storage.delete(key for key in "abcd")
    assert asked == [["a", "b", "c", "d"], ["b"], ["b"]]
    assert failures == [DeleteFailure("a", denied), DeleteFailure("c", unknown)]


async def test_a_deletion_that_stays_busy_reports_every_key(scripted: Scripted) -> None:
    """This holds even if the store refused the request as a whole."""
    scripted.script = [ThrottledError("busy") for _ in range(9)]
    failures = await Retrying(scripted, AT_ONCE).delete(["a", "b"])
    assert [failure.key for failure in failures] == ["a", "b"]
    assert all("4 times" in str(failure.error) for failure in failures)
