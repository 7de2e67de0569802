"""Try the promises of a storage before anything depends on them.

Each trial returns a sentence about what it saw, or raises `BrokenPromiseError` with a sentence
about what is wrong. Independent requests run at the same time: far from the storage a trial takes
as long as its longest chain of requests.

A server may ignore the condition of a write and reply as if it had honoured it; commits are then
lost silently. A trial detects that.
"""

from __future__ import annotations

import base64
import os
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import Outlasting, bounded_map, gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import (
    IcechunkError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    StorageError,
    UnsafeStorageError,
)
from icechunk_async.storage.policies.retry import Retrying
from icechunk_async.storage.policies.values import RetryPolicy
from icechunk_async.storage.protocol import (
    ABSENT,
    Absent,
    ByteRange,
    ObjectInfo,
    SuffixRange,
    Version,
)
from icechunk_async.storage.registry import open_storage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from icechunk_async.storage.protocol import Capabilities, Expected, Storage

__all__ = [
    "PROBE_PREFIX",
    "BrokenPromiseError",
    "Finding",
    "ProbeResult",
    "Trial",
    "Verdict",
    "conditional_create",
    "conditional_update",
    "deletion",
    "list_after_write",
    "list_order",
    "probe_storage",
    "ranges",
    "read_after_write",
    "times",
    "try_what_commits_need",
]


_READ_KEYS: Final = 3
# A server that looks and then writes is found out if the first two writers to arrive both look
# before one of them writes. More writers in a race hardly help, further races do: decision 11.
_WRITERS: Final = 2
_ROUNDS: Final = 16
_JUDGED: Final = 4
_MOST_SKEW: Final = timedelta(seconds=60)
# Folders, punctuation around "/", upper case, and characters whose order in UTF-16 is another.
_NAMES: Final = ("B", "a-b", "a.b", "a/b", "a0", "b", "é", "\uff5e", "\U0001f600")


class BrokenPromiseError(Exception):
    """A storage broke a promise; the message says which and how."""


class Trial:
    """A storage under trial, and the keys that the trial wrote."""

    def __init__(self, storage: Storage, prefix: str) -> None:
        """Begin; nothing is written yet."""
        self.storage = storage
        self.prefix = prefix
        self._written: set[str] = set()
        self._writes = Outlasting()
        self.racing = anyio.Lock()
        """Held by the races of one kind: all of them at once would need twice the connections, and
        the writers of a race should not have to wait for one."""

    def key(self, name: str) -> str:
        """Return a key below the prefix, which will be removed."""
        key = self.prefix + name
        self._written.add(key)
        return key

    async def put(self, key: str, data: bytes, *, if_version: Expected = None) -> Version:
        """Write an object, to the end even if that is cancelled.

        The first broken promise ends the other trials, and a write that is cut off may still land
        after the objects were removed.
        """
        write = self.storage.put(key, data, if_version=if_version)
        return await self._writes.run(key, write)

    async def names(self, folder: str, *, start_after: str | None = None) -> list[str]:
        """List the names in a folder of the trial, relative to the folder."""
        base = self.prefix + folder
        after = None if start_after is None else base + start_after
        return [it.key.removeprefix(base) for it in await self.objects(folder, after)]

    async def objects(self, folder: str, start_after: str | None = None) -> list[ObjectInfo]:
        """List the objects in a folder of the trial."""
        entries = self.storage.list_prefix(self.prefix + folder, start_after=start_after)
        return [entry async for entry in entries if isinstance(entry, ObjectInfo)]

    @property
    def written(self) -> tuple[str, ...]:
        """Every key that was, or may have been, written."""
        return tuple(sorted(self._written))

    async def clean(self) -> tuple[str, ...]:
        """Remove everything; return the keys that could not be removed."""
        if not self._written:
            return ()
        # First: a write that lands after its deletion would stay for ever.
        late = await self._writes.settle(_SETTLE_SECONDS)
        try:
            failures = await self.storage.delete(self.written)
        except IcechunkError:  # the failure of the trial itself says more
            return self.written
        return tuple(sorted({*late, *(failure.key for failure in failures)}))


async def read_after_write(trial: Trial) -> str:
    """A write and an overwrite are visible to the next read."""
    await bounded_map(partial(_reads_what_it_wrote, trial), range(_READ_KEYS), limit=_READ_KEYS)
    return "writes and overwrites are read at once"


async def _reads_what_it_wrote(trial: Trial, number: int) -> None:
    key = trial.key(f"read/{number}")
    # The second write replaces an object, which a cache on the way may hold.
    for state in range(2):
        body = b"state %d" % state * 20
        version = await trial.put(key, body)
        found, changed = await gather(
            trial.storage.get(key), trial.storage.get_if_changed(key, version)
        )
        if bytes(found.data) != body:
            raise BrokenPromiseError("a read after a write returned other bytes")
        if found.version != version:
            raise BrokenPromiseError("a read after a write returned another version")
        if changed is not None:
            raise BrokenPromiseError("an object that did not change was said to have changed")


async def ranges(trial: Trial) -> str:
    """Ranges behave like slices."""
    key, body = trial.key("ranges"), bytes(range(100))
    await trial.put(key, body)
    asked: dict[ByteRange | SuffixRange, bytes] = {
        ByteRange(10, 20): body[10:20],
        ByteRange(90): body[90:],
        ByteRange(95, 200): body[95:],
        ByteRange(100, 200): b"",
        SuffixRange(7): body[-7:],
        SuffixRange(500): body,
    }

    async def ask(request: ByteRange | SuffixRange) -> None:
        found = await trial.storage.get(key, request)
        if bytes(found.data) != asked[request] or found.size_bytes != len(body):
            raise BrokenPromiseError(f"{request} of 100 bytes was answered wrongly")

    await bounded_map(ask, asked, limit=len(asked))
    return f"{len(asked)} kinds of ranges are answered like slices"


async def conditional_create(trial: Trial) -> str:
    """Of several creators exactly one lands."""
    key = trial.key("create/alone")
    await trial.put(key, b"first", if_version=ABSENT)

    races = {trial.key(f"create/race-{number}"): ABSENT for number in range(_ROUNDS)}
    await gather(
        _refused(trial, key, ABSENT, b"first", "a creation where an object is"),
        _race(trial, races),
    )
    return f"of {_WRITERS} creators at once one landed, {_ROUNDS} times"


async def conditional_update(trial: Trial) -> str:
    """Of several updaters of one version exactly one lands."""

    async def race() -> None:
        keys = [trial.key(f"update/race-{number}") for number in range(_ROUNDS)]
        before = await bounded_map(lambda key: trial.put(key, b"before"), keys, limit=len(keys))
        await _race(trial, dict(zip(keys, before, strict=True)))

    await gather(_updates(trial), race())
    return f"of {_WRITERS} updaters at once one landed, {_ROUNDS} times"


async def _updates(trial: Trial) -> None:
    """An update without competitors lands, and is refused if the object is in another state."""
    key, again = trial.key("update/alone"), trial.key("update/again")
    old, other = await gather(trial.put(key, b"old"), trial.put(again, b"other"))
    missing = trial.key("update/never")

    async def land_twice() -> None:
        newer = await trial.put(again, b"newer", if_version=other)
        await trial.put(again, b"newest", if_version=newer)

    async def come_late() -> None:
        await trial.put(key, b"newer", if_version=old)
        await _refused(trial, key, old, b"newer", "an update of an older version")

    await gather(
        land_twice(),
        come_late(),
        _refused(trial, missing, old, None, "an update of a missing object"),
    )


async def _refused(
    trial: Trial, key: str, expected: Expected, there: bytes | None, what: str
) -> None:
    """Try a write that must be refused and leave ``there`` unchanged."""
    await _turned_away(trial, key, expected, what)
    if await _read(trial, key) != there:
        raise BrokenPromiseError(f"{what} was refused and changed the object")


async def _turned_away(trial: Trial, key: str, expected: Expected, what: str) -> None:
    """Try a write that must be refused."""
    try:
        await trial.put(key, b"must not land", if_version=expected)
    except PreconditionFailedError:
        return
    raise BrokenPromiseError(f"{what} was not refused: the condition is ignored")


async def _read(trial: Trial, key: str) -> bytes | None:
    try:
        return bytes((await trial.storage.get(key)).data)
    except ObjectNotFoundError:
        return None


async def _race(trial: Trial, races: Mapping[str, Version | Absent]) -> None:
    """Run several races at once; in each, writers expect the same state and one must win.

    Args:
        trial: the trial in progress.
        races: by key, the state that is expected.
    """
    async with trial.racing:
        answers = await bounded_map(partial(_compete, trial, races), races, limit=len(races))
    told = dict(zip(races, answers, strict=True))
    winners = {key: _winner(key, outcomes) for key, outcomes in told.items()}
    # A server that keeps the bytes of one who lost does so each time, or by the same accident that
    # makes two win, which the outcomes show.
    read = tuple(winners)[:_JUDGED]
    await bounded_map(lambda key: _judge(trial, key, winners[key]), read, limit=_JUDGED)


async def _compete(trial: Trial, races: Mapping[str, Version | Absent], key: str) -> list[str]:
    """Let writers write at once; return the outcome each one saw."""

    async def write(number: int) -> str:
        try:
            await trial.put(key, b"writer %d" % number, if_version=races[key])
        except PreconditionFailedError:
            return "refused"
        except OutcomeUnknownError:
            return "unknown"
        return "landed"

    return await bounded_map(write, range(_WRITERS), limit=_WRITERS)


def _winner(key: str, told: list[str]) -> int:
    """Return the only writer that was told that it landed."""
    winners = [number for number, outcome in enumerate(told) if outcome == "landed"]
    if len(winners) > 1:
        raise BrokenPromiseError(
            f"{len(winners)} of {_WRITERS} writers that expected the same state were told that "
            "they landed: the look and the write are not one step"
        )
    # A lost reply is no evidence: the finding is UNKNOWN, not BROKEN.
    if not winners and "unknown" in told:
        raise OutcomeUnknownError(f"no writer of {key!r} was told that it landed", key=key)
    if not winners:
        raise BrokenPromiseError("of several writers at once none landed")
    return winners[0]


async def _judge(trial: Trial, key: str, winner: int) -> None:
    """Check that the bytes of the winner are stored."""
    if await _read(trial, key) != b"writer %d" % winner:
        raise BrokenPromiseError("a writer was told that it landed, and another one's bytes stay")


async def list_after_write(trial: Trial) -> str:
    """A listing shows what was just written, and not what was just deleted."""
    names = [f"{number}" for number in range(5)]
    await _fill(trial, "listed", names[:-1])
    await trial.put(trial.key(f"listed/{names[-1]}"), b"x")
    if await trial.names("listed/") != names:
        raise BrokenPromiseError("a listing does not show objects that were just written")
    await _delete(trial, ["listed/0"])
    if await trial.names("listed/") != names[1:]:
        raise BrokenPromiseError("a listing shows an object that was just deleted")
    return "writes and deletions are listed at once"


async def list_order(trial: Trial) -> str:
    """Listings are in the order of UTF-8 bytes, and can be continued anywhere."""
    names = sorted(_NAMES, key=str.encode)
    await _fill(trial, "order", names[::-1])
    found, rest = await gather(trial.names("order/"), trial.names("order/", start_after=names[3]))
    if found != names:
        if sorted(found, key=str.encode) != names:
            raise BrokenPromiseError(f"of {names} a listing shows {found}")
        ascii_only = [name for name in found if name.isascii()]
        scope = "keys" if ascii_only != sorted(ascii_only) else "keys that are not ASCII"
        raise BrokenPromiseError(f"{scope} are not listed in the order of UTF-8 bytes: {found}")
    if rest != names[4:]:
        raise BrokenPromiseError("a listing that is to start after a key does not")
    return "in the order of UTF-8 bytes, also from the middle on"


async def deletion(trial: Trial) -> str:
    """Deleted objects are gone, others stay, and deleting a missing one is no failure."""
    names = ["a", "b", "c"]
    await _fill(trial, "deleted", names)
    await _delete(trial, ["deleted/a", "deleted/b", "deleted/never"])
    found = await bounded_map(
        lambda name: _read(trial, trial.key(f"deleted/{name}")), names, limit=len(names)
    )
    left = [name for name, body in zip(names, found, strict=True) if body is not None]
    if left != ["c"]:
        raise BrokenPromiseError(f"of three objects two were deleted, and {left} are left")
    return "deleted objects are gone, the others stay"


async def _fill(trial: Trial, folder: str, names: Sequence[str]) -> None:
    await bounded_map(
        lambda name: trial.put(trial.key(f"{folder}/{name}"), b"x"), names, limit=len(names)
    )


async def _delete(trial: Trial, names: list[str]) -> None:
    failures = await trial.storage.delete([trial.key(name) for name in names])
    if failures:
        raise failures[0].error


async def times(trial: Trial) -> str:
    """The store's clock is that of this machine."""
    key = trial.key("times/now")
    before = clock.from_us(clock.now_us())
    await trial.put(key, b"x")
    after = clock.from_us(clock.now_us())
    written = (await trial.storage.get(key)).last_modified
    if written is None:  # a store may tell only in listings
        written = next((it.last_modified for it in await trial.objects("times/")), None)
    if written is None:
        raise BrokenPromiseError("a listing does not show an object that was just written")
    # Stores tell whole seconds.
    early, late = before - timedelta(seconds=1) - written, written - after
    skew = max(early, late)
    if skew > _MOST_SKEW:
        word = "behind" if early > late else "ahead of"
        raise BrokenPromiseError(
            f"the store's clock is {skew.total_seconds():.0f} s {word} this machine's; expiry and "
            "'as of' go by writers' clocks"
        )
    return "the store's clock and this machine's differ by less than a minute"


_SECONDS: Final = 60.0
_LEAST_SECONDS: Final = 10.0
_CLEANUP_SECONDS: Final = 15.0
_SETTLE_SECONDS: Final = 5.0
"""The part of it to wait for writes that were cut off, before the objects are removed."""
PROBE_PREFIX: Final = ".icechunk-probe-"
"""The prefix of the keys of every trial."""
_RETRIES: Final = RetryPolicy(max_tries=5, initial_seconds=0.1, max_seconds=5.0)


_CREATE: Final = "conditional create"
_UPDATE: Final = "conditional update"
_READ: Final = "read after write"
_LIST: Final = "list after write"
_ORDER: Final = "list order"
_NUMBERED: Final = frozenset({_CREATE, _READ, _LIST, _ORDER})
"""The promises that numbered references need."""


class Verdict(StrEnum):
    """The result of the trial of one promise."""

    KEPT = "kept"
    BROKEN = "broken"
    NOT_PROMISED = "not promised"
    """The storage itself says that it does not make it; nothing was tried."""
    UNKNOWN = "unknown"
    """No reply settled it, or time ran out."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise and the result of its trial."""

    promise: str
    needed: bool
    """Whether commits could be lost without it."""
    verdict: Verdict
    detail: str
    """A sentence: what was seen, or the storage's own reason."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The table of promises."""

    url: str
    findings: tuple[Finding, ...]
    seconds: float
    left_behind: tuple[str, ...] = ()
    """Keys of the trial that could not be removed."""

    @property
    def is_safe(self) -> bool:
        """Whether every promise that commits need was kept."""
        return not self.problems

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The promises that commits need and that were not kept."""
        return tuple(it for it in self.findings if it.needed and it.verdict is not Verdict.KEPT)

    @property
    def numbered_problems(self) -> tuple[Finding, ...]:
        """The promises that commits with numbered references need and that were not kept.

        Such repositories create each state of a reference as a new object, and need no updates.
        """
        return tuple(
            it for it in self.findings if it.promise in _NUMBERED and it.verdict is not Verdict.KEPT
        )

    @property
    def is_safe_numbered(self) -> bool:
        """Whether every promise was kept that commits with numbered references need."""
        return not self.numbered_problems

    def _hint(self) -> str:
        hint = ""
        if self.url.startswith("s3://") and any(it.promise == _UPDATE for it in self.problems):
            hint = " For Ceph's gateway (radosgw) give the option preset='ceph'."
        if self.is_safe_numbered:
            hint += " Or create a repository that replaces no object: layout='format-2-numbered'."
        return hint

    def check(self, *, numbered: bool = False) -> None:
        """Raise an error if commits could be lost on this storage.

        Args:
            numbered: check it for repositories with numbered references.

        Raises:
            UnsafeStorageError: it says which promises failed, how, and what to do.
        """
        problems = self.numbered_problems if numbered else self.problems
        if not problems:
            return
        names = ", ".join(it.promise for it in problems)
        details = "; ".join(f"{it.promise}: {it.detail}" for it in problems)
        raise UnsafeStorageError(
            f"Commits could be lost on {self.url!r}, so nothing was created there: {names} "
            f"cannot be relied on ({details}). Use another service or backend.{self._hint()} If "
            "one writer at a time is all there will ever be, create with probe=False to accept the "
            "risk.",
            url=self.url,
            broken=[it.promise for it in problems],
        )


@dataclass(frozen=True, slots=True)
class _Promise:
    name: str
    test: Callable[[Trial], Awaitable[str]]
    needed: bool = False
    also: str | None = None
    """A capability needed, beside ``writable``, to try it at all."""


async def _creates_on_condition(trial: Trial) -> str:
    """A creation where an object is, is refused."""
    key = trial.key("created")
    await trial.put(key, b"first", if_version=ABSENT)
    await _turned_away(trial, key, ABSENT, "a creation where an object is")
    return "a creation where an object is, is refused"


async def _updates_on_condition(trial: Trial) -> str:
    """An update lands on its version, and neither on another one nor where nothing is."""
    put = trial.put
    key, other, missing = trial.key("updated"), trial.key("kept"), trial.key("never")
    # Of one length: versions made of lengths would be equal.
    version, _ = await gather(put(key, b"first"), put(other, b"other"))
    await gather(
        put(key, b"second", if_version=version),
        _turned_away(trial, other, version, "an update of another version"),
        _turned_away(trial, missing, version, "an update of a missing object"),
    )
    return "an update of another version is refused"


_PROMISES: Final = (
    _Promise(_CREATE, conditional_create, needed=True, also="conditional_create"),
    _Promise(_UPDATE, conditional_update, needed=True, also="conditional_update"),
    _Promise(_READ, read_after_write, needed=True),
    _Promise("ranges", ranges),
    _Promise(_LIST, list_after_write, also="listing"),
    _Promise(_ORDER, list_order, also="listing"),
    _Promise("delete", deletion),
    _Promise("clock", times, also="listing"),
)
_DOCUMENTED: Final = (
    _Promise(_CREATE, _creates_on_condition, needed=True, also="conditional_create"),
    _Promise(_UPDATE, _updates_on_condition, needed=True, also="conditional_update"),
)
"""The promises to try where the service documents that a condition and its write are one step."""


async def probe_storage(
    location: str | os.PathLike[str] | Storage,
    *,
    timeout_seconds: float = _SECONDS,
    **options: object,
) -> ProbeResult:
    """Try the promises of a storage with temporary objects, which are removed at the end.

    They are below a fresh prefix ``.icechunk-probe-<random>/``; nothing else is read or written.
    A race that a server loses only once in a thousand times may go unnoticed: a kept promise is
    evidence, a broken one is proof.

    Args:
        location: a path, a URL, or an open storage (which is left open).
        timeout_seconds: promises not settled by then are ``Verdict.UNKNOWN``.
        options: the backend's options, where ``location`` is a path or URL.

    Raises:
        StorageError: the storage cannot be used at all: denied, unreachable, no such bucket.
        InvalidInputError: the location or an option is wrong.

    Cancellation: the objects are removed first, for up to 15 seconds. Where that fails, or the
    process is killed, some of them stay.

    Cost: about 155 small requests, seven of them in a row and up to 48 at the same time; some
    backends need two for a write that is refused. Passing trouble is retried.
    """
    async with _opened(location, options) as storage:
        return await _probe(storage, timeout_seconds)


@asynccontextmanager
async def _opened(
    location: str | os.PathLike[str] | Storage, options: dict[str, object]
) -> AsyncGenerator[Storage]:
    if not isinstance(location, (str, os.PathLike)):
        yield location
        return
    async with open_storage(location, **options) as storage:
        yield storage


async def _probe(storage: Storage, timeout_seconds: float) -> ProbeResult:
    trial = _begin(storage)
    result = await _try(trial, storage, _PROMISES, timeout_seconds)
    return replace(result, left_behind=await _clean(trial))


async def try_what_commits_need(
    storage: Storage, *, numbered: bool
) -> Callable[[], Awaitable[tuple[str, ...]]]:
    """Try the promises that commits need, before a repository is created.

    Args:
        storage: where it is to be.
        numbered: try what repositories with numbered references need.

    Returns:
        The removal of the trial's objects, which must be called. It is separate so that it can run
        at the same time as the first writes of the repository.

    Raises:
        UnsafeStorageError: commits could be lost; the whole table was tried then, to say how and
            what would help.
        StorageError: the storage cannot be used at all.

    Cancellation: as `probe_storage`.

    Cost: three requests in a row and 7 in all where the service documents that a condition and its
    write are one step (`Capabilities.documented`); elsewhere about 120, five of them in a row. Some
    backends need two for each write that is refused. The removal is one more.
    """
    needed: tuple[_Promise, ...]
    if numbered:
        needed = tuple(it for it in _PROMISES if it.name in _NUMBERED)
    elif storage.capabilities.documented:
        needed = _DOCUMENTED
    else:
        needed = tuple(it for it in _PROMISES if it.needed)
    trial = _begin(storage)
    result = await _try(trial, storage, needed, _SECONDS)
    problems = result.numbered_problems if numbered else result.problems
    if not problems:
        return partial(_clean, trial)
    await _clean(trial)
    left_seconds = max(_LEAST_SECONDS, _SECONDS - result.seconds)
    whole = await probe_storage(storage, timeout_seconds=left_seconds)
    whole.check(numbered=numbered)
    # What failed once is not to be relied on, though it did not fail again.
    failed = {it.promise: it for it in problems}
    told = tuple(failed.get(it.promise, it) for it in whole.findings)
    replace(whole, findings=told).check(numbered=numbered)
    raise AssertionError  # the problems are in the table


def _begin(storage: Storage) -> Trial:
    random = base64.b32encode(clock.random_bytes(10)).decode().lower()
    return Trial(Retrying(storage, _RETRIES), f"{PROBE_PREFIX}{random}/")


async def _try(
    trial: Trial, storage: Storage, promises: Sequence[_Promise], timeout_seconds: float
) -> ProbeResult:
    """Try some promises; the objects are left there, unless it fails."""
    began = anyio.current_time()
    capabilities = storage.capabilities

    async def find(promise: _Promise) -> Finding:
        return await _find(promise, trial, capabilities, began + timeout_seconds)

    try:
        findings = await bounded_map(find, promises, limit=len(promises))
    except BaseException as error:
        await _clean_after(error, trial)
        raise
    seconds = anyio.current_time() - began
    return ProbeResult(storage.description.url, tuple(findings), seconds)


async def _clean(trial: Trial) -> tuple[str, ...]:
    """Remove the objects of a trial, again if that is cancelled.

    Return the keys that may still be there.
    """
    try:
        return await _remove(trial)
    except BaseException as error:
        await _clean_after(error, trial)
        raise


async def _clean_after(error: BaseException, trial: Trial) -> None:
    """Remove the objects of a trial that failed; the error names those that may still be there."""
    if left := await _remove(trial):
        error.add_note(f"Keys of the probe that may still be there: {', '.join(left)}")


async def _remove(trial: Trial) -> tuple[str, ...]:
    # Also while the caller is cancelled, but not for ever: a store that hangs must not hold it.
    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _CLEANUP_SECONDS):
        return await trial.clean()
    return trial.written


async def _find(
    promise: _Promise, trial: Trial, capabilities: Capabilities, deadline: float
) -> Finding:
    def answer(verdict: Verdict, detail: str) -> Finding:
        return Finding(promise.name, promise.needed, verdict, detail)

    for name in filter(None, ("writable", promise.also)):
        if not getattr(capabilities, name):
            reason = capabilities.reasons.get(name, "no reason given")
            return answer(Verdict.NOT_PROMISED, reason)
    try:
        with anyio.CancelScope(deadline=deadline):
            return answer(Verdict.KEPT, await promise.test(trial))
        return answer(Verdict.UNKNOWN, "time ran out")
    except BrokenPromiseError as broken:
        return answer(Verdict.BROKEN, str(broken))
    except OutcomeUnknownError as error:
        return answer(Verdict.UNKNOWN, f"no answer told ({error.message})")
    except (ObjectNotFoundError, PreconditionFailedError, UnsafeStorageError) as error:
        return answer(Verdict.BROKEN, f"it was refused without reason ({error.message})")
    except StorageError as error:
        if type(error) is not StorageError:
            raise  # about the storage as a whole: no access, no bucket, no connection
        return answer(Verdict.BROKEN, f"it failed ({error.message})")
