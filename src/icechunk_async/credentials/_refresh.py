"""The protocol of credentials, and the calls of the caller's functions for new ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from inspect import isawaitable, iscoroutinefunction
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, cast, runtime_checkable

import anyio.to_thread

from icechunk_async._runtime import clock
from icechunk_async.errors import ExpiredCredentialsError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Callback", "Credential", "Expiring", "Newest", "Refresher", "check_end", "check_fresh"]

type Callback[T] = Callable[[], T] | Callable[[], Awaitable[T]]
"""Returns a credential, or an awaitable of one. A plain function runs on a thread, so it may block.
A function that is to be pickled with its credential must pickle."""

# Long enough for requests that are under way, and for clocks that differ: servers judge by theirs.
_EARLY: Final = timedelta(minutes=5)
"""The time before its expiry from which a credential is not used any more."""


@runtime_checkable
class Credential(Protocol):
    """A way to be let in by one kind of store."""

    backend: ClassVar[str]
    """URL scheme of the storage backend that it is for, such as ``s3``."""

    async def storage_options(self) -> Mapping[str, object]:
        """Return the backend's options that say who asks.

        Raises:
            ExpiredCredentialsError: it has expired.
            InvalidInputError: it is not a credential.
        """
        ...


class Expiring(Protocol):
    """Something that is good until a time, or for good."""

    @property
    def expires_after(self) -> datetime | None:
        """When it ends (aware); None where that is not known."""
        ...


def check_end(name: str, expires_after: datetime | None) -> None:
    """Refuse a time without a zone, which could mean any time."""
    # Taken for UTC, it would be used for hours after its end, or thrown away hours before.
    if expires_after is not None and expires_after.utcoffset() is None:
        raise InvalidInputError(
            f"{name}(expires_after=...) has no time zone. Use an aware time, such as "
            "datetime.now(UTC) + timedelta(hours=1).",
            option="expires_after",
        )


def check_fresh(credential: Expiring) -> None:
    """Refuse a credential that ended.

    Raises:
        ExpiredCredentialsError: it did.
    """
    ends = credential.expires_after
    if ends is not None and ends <= _now():
        raise ExpiredCredentialsError(
            f"The {type(credential).__name__} given for virtual chunks ended at "
            f"{ends.isoformat()}, so that nothing was sent. Give a new one, or a refreshable one."
        )


def _now() -> datetime:
    return datetime.fromtimestamp(clock.now_us() / 1_000_000, UTC)


class Newest:
    """The newest answer to a credential in this process; it does not travel to others."""

    __slots__ = ("answer",)

    def __init__(self) -> None:
        """Begin without one."""
        self.answer: Expiring | None = None

    def __reduce__(self) -> tuple[type[Newest], tuple[()]]:
        """Travel without the answer."""
        # An answer is a secret that was asked for here: workers get the function, or `initial`, and
        # not more than the caller chose to send.
        return Newest, ()


class Refresher[T: Expiring]:
    """Asks a function of the caller, once for all handles until its answer is about to end.

    What it answered to one handle serves others, which begin with it. A handle that comes back was
    refused or has waited to the end: it gets an answer that it did not have yet.
    """

    def __init__(
        self,
        owner: str,
        ask: Callback[T],
        initial: T | None,
        kinds: tuple[type, ...],
        newest: Newest | None = None,
    ) -> None:
        """Begin with the newest answer, or with ``initial``, where that is still good."""
        self._owner = owner
        self._ask = ask
        self._initial = initial
        self._kinds = kinds
        self._newest = newest or Newest()
        self._given: object = None

    async def __call__(self) -> T:
        """Return a credential that was not answered before.

        Raises:
            InvalidInputError: the function answered something else.
            Exception: what the function raised.
        """
        # Given once: a store that refuses it is to hear of another.
        initial, self._initial = self._initial, None
        newest = self._newest.answer
        # The one that this handle had is what it comes back with: it ended or was refused. One of
        # another kind cannot be used either, since a client of Azure stays with the kind that it
        # began with.
        if newest is None or newest is self._given or not isinstance(newest, self._kinds):
            newest = initial
        if newest is not None and is_good(newest):
            self._given = newest
            return cast("T", newest)
        ask = self._ask
        answer: object
        if iscoroutinefunction(ask) or iscoroutinefunction(getattr(ask, "__call__", None)):  # noqa: B004 - is it asynchronous?
            answer = ask()
        else:
            # It may ask a server, or read a file on a slow disk, and the loop serves all other
            # requests.
            answer = await anyio.to_thread.run_sync(cast("Callable[[], object]", ask))
        # A plain function may return a coroutine, such as that of a `functools.partial`.
        if isawaitable(answer):
            answer = cast("object", await answer)
        if not isinstance(answer, self._kinds):
            wanted = " or ".join(kind.__name__ for kind in self._kinds)
            raise InvalidInputError(
                f"The function given to {self._owner} answered a {type(answer).__name__}. It must "
                f"answer {wanted}."
            )
        given = cast("T", answer)
        self._given = given
        # No lock: two handles that ask at the same time both get good answers, and the later one is
        # kept.
        self._newest.answer = given
        return given


def is_good(credential: Expiring) -> bool:
    """Return whether a credential will still be good for a while."""
    ends = credential.expires_after
    return ends is None or ends - _EARLY > _now()
