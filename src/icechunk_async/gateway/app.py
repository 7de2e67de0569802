"""The gateway as an ASGI application: plain Zarr v3 over HTTP, read-only."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Self

import anyio

from icechunk_async._display.cards import POLICY
from icechunk_async._runtime import clock
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.text import printable
from icechunk_async.errors import IcechunkError, InvalidInputError
from icechunk_async.gateway.access import Grants
from icechunk_async.gateway.contents import PAGE_TYPE, Contents
from icechunk_async.gateway.requests import (
    FOREVER,
    METHODS,
    PAGE,
    BadRequest,
    Cors,
    Reply,
    headers_of,
    is_unchanged,
    joined,
    parse_range,
    parse_target,
    path_of,
    sentence_reply,
    status_of,
)
from icechunk_async.storage import slice_range

if TYPE_CHECKING:
    from collections.abc import (
        Awaitable,
        Callable,
        Mapping,
        MutableMapping,
        Sequence,
    )

    from icechunk_async import Repository
    from icechunk_async.engine.open import Location
    from icechunk_async.gateway.access import Grant
    from icechunk_async.gateway.contents import Found
    from icechunk_async.gateway.requests import Target

    type Scope = MutableMapping[str, Any]
    type Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    type Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

__all__ = ["Gateway", "app"]

_log = logging.getLogger("icechunk_async.gateway")
_access_log = logging.getLogger("icechunk_async.gateway.access")

_PIECE_BYTES: Final = 256 << 10
"""The most that is sent at once, so that a slow client is noticed."""


def app(
    repository: Repository | Location,
    *,
    grants: Sequence[Grant] = (),
    consolidated: bool = True,
    refresh_seconds: float = 1.0,
    max_concurrent_requests: int = 128,
    max_waiting_requests: int = 1024,
    deadline_seconds: float = 30.0,
    cors: Sequence[str] = ("*",),
    **opening: Any,
) -> Gateway:
    """Return an ASGI application that serves a repository as plain Zarr v3, read-only.

    Arrays are below ``/@branch.NAME/``, ``/@tag.NAME/`` and ``/@SNAPSHOT_ID/``. Given an open
    repository, it can be used at once. Given a location, it opens the repository when the server
    starts it (the lifespan protocol of ASGI), or with ``async with``, which is how an application
    that mounts it does.

    Args:
        repository: an open repository, which is left open; or a path, a URL or an open storage.
        grants: who may read what. Empty: everybody may read everything.
        consolidated: give the document of a group those of all nodes below it, in the form that
            Zarr calls consolidated metadata, so that a hierarchy opens with one request. Arrays
            keep the bytes of their documents.
        refresh_seconds: for how long the snapshot of a branch or tag is used before it is looked
            up again. 0: for each request.
        max_concurrent_requests: served at the same time; more wait.
        max_waiting_requests: waiting; more are refused with 503.
        deadline_seconds: for waiting and reading, and then for sending each 256 KiB.
        cors: origins whose pages may read; ``*`` for all, empty for none.
        **opening: arguments of `Repository.open`, if ``repository`` is a location.

    Raises:
        InvalidInputError: a number is out of range, ``opening`` goes with an open repository, or
            two grants contradict each other.
    """
    limits = Limits(max_concurrent_requests, max_waiting_requests, deadline_seconds)
    if refresh_seconds < 0:
        raise InvalidInputError(f"refresh_seconds must be 0 or more, not {refresh_seconds}.")
    return Gateway(
        repository,
        Grants(grants),
        limits,
        Cors(cors),
        consolidated=consolidated,
        refresh_seconds=refresh_seconds,
        opening=opening,
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the requests at one time, and of the time for each."""

    concurrent: int
    waiting: int
    deadline_seconds: float

    def __post_init__(self) -> None:
        """Check them."""
        if self.concurrent < 1:
            raise InvalidInputError(
                f"max_concurrent_requests must be at least 1, not {self.concurrent}."
            )
        if self.waiting < 0:
            raise InvalidInputError(f"max_waiting_requests must be 0 or more, not {self.waiting}.")
        if not self.deadline_seconds > 0:
            raise InvalidInputError(
                f"deadline_seconds must be above 0, not {self.deadline_seconds}."
            )


@dataclass(slots=True)
class _Entry:
    """The fields of a line of the access log."""

    method: str
    target: str
    principal: str = "-"
    snapshot: str = "-"
    status: int = 0
    sent_bytes: int = 0
    began_us: int = 0


class Gateway:
    """An ASGI application that serves a repository as plain Zarr v3; see `app`.

    ``async with`` opens the repository, if it was given as a location, and at the end closes it
    after the requests that are being served, for which it waits as long as their deadline.
    """

    def __init__(
        self,
        repository: Repository | Location,
        grants: Grants,
        limits: Limits,
        cors: Cors,
        *,
        consolidated: bool,
        refresh_seconds: float,
        opening: Mapping[str, Any],
    ) -> None:
        """Use `app`."""
        from icechunk_async import Repository  # noqa: PLC0415 -- slow to import

        self._grants, self._limits, self._cors = grants, limits, cors
        readers = "public" if grants.are_public else "private"
        vary = {} if grants.are_public else {"Vary": "Authorization"}
        self._scope: Mapping[str, str] = {"Cache-Control": f"{readers}, no-cache", **vary}
        """Headers about caches, of what may change."""
        self._lasting: Mapping[str, str] = {"Cache-Control": f"{readers}, {FOREVER}", **vary}
        """The same, of what never changes."""
        self._consolidated, self._refresh_seconds = consolidated, refresh_seconds
        self._contents: Contents | None = None
        self._location: Location | None = None
        self._opening = dict(opening)
        if isinstance(repository, Repository):
            if opening:
                raise InvalidInputError(
                    f"{next(iter(opening))} is an argument for opening a repository, and this one "
                    "is open already: give it to Repository.open."
                )
            self._contents = self._look_into(repository)
        else:
            self._location = repository
        self._stack: AsyncExitStack | None = None
        # It binds to a loop at its first wait, so that a gateway may be made before the server's
        # loop runs.
        self._slots = asyncio.Semaphore(limits.concurrent)
        # Changed between awaits only, by one loop: no lock is needed.
        self._waiting = self._running = 0
        self._closing = False
        self._idle = asyncio.Event()

    def _look_into(self, repository: Repository) -> Contents:
        return Contents(
            repository, refresh_seconds=self._refresh_seconds, consolidated=self._consolidated
        )

    async def __aenter__(self) -> Self:
        """Open the repository, unless it was given open. Errors as `Repository.open`."""
        from icechunk_async import Repository  # noqa: PLC0415 -- slow to import

        self._closing = False
        if self._location is not None and self._contents is None:
            async with AsyncExitStack() as stack:
                opened = Repository.open(self._location, **self._opening)
                self._contents = self._look_into(await stack.enter_async_context(opened))
                # If opening fails or is cancelled, the stack closes what is open. From here on
                # `__aexit__` does.
                self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *failure: object) -> None:
        """Refuse new requests, wait for those that run, and close what was opened here."""
        self._closing = True
        with anyio.move_on_after(self._limits.deadline_seconds):
            while self._running:
                # No await since the look at `_running`: the last request sets the event after this,
                # or has ended.
                self._idle.clear()
                await self._idle.wait()
        # Taken before the await, so that closing twice closes once.
        stack, self._stack = self._stack, None
        if stack is not None:
            self._contents = None
            await stack.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or start and stop with the server; ASGI's signature."""
        match scope["type"]:
            case "http":
                await self._serve(scope, send)
            case "lifespan":
                await self._live(receive, send)
            case "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1003})
            case other:
                raise InvalidInputError(f"A gateway knows no ASGI scope of type {other!r}.")

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.__aenter__()
        except IcechunkError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.__aexit__()
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve(self, scope: Scope, send: Send) -> None:
        raw = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
        # Cut: both are text of strangers, and go into the log.
        entry = _Entry(
            str(scope["method"])[:20], raw[:200].decode("latin-1"), began_us=clock.elapsed_us()
        )
        # Counted before the first wait, so that closing knows of requests that have only arrived.
        self._running += 1
        try:
            await self._within_limits(scope, send, entry)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
            self._note(entry)

    async def _within_limits(self, scope: Scope, send: Send, entry: _Entry) -> None:
        """Serve a request once there is room for it."""
        seconds = self._limits.deadline_seconds
        origin: str | None = None
        holds = False
        try:
            try:
                # A fifth of the processor time of anyio's, and there are two in each request.
                async with asyncio.timeout(seconds):
                    try:
                        headers = headers_of(scope)
                        origin = headers.get("origin")
                        target = self._admit(scope, headers, entry)
                        if target is None:
                            reply, body = self._cors.preflight(origin), b""
                        else:
                            await self._take_slot()
                            # Set right after the wait, without an await between: a deadline cannot
                            # come in between and lose the slot.
                            holds = True
                            reply, body = await self._reply(target, headers, entry)
                    except Exception as error:  # noqa: BLE001 -- every error gets a reply
                        reply = _reply_to(error, entry)
                        body = reply.body
            except TimeoutError:
                reply = sentence_reply(504, f"This took longer than {seconds:g} seconds.")
                body = reply.body
            headers = joined(reply.headers, self._cors.headers(origin))
            if reply.status not in {204, 304}:
                headers["Content-Length"] = str(reply.size_bytes)
            entry.status = reply.status
            # Sent while holding the slot: memory is bounded by the replies that are under way.
            await self._send(send, headers, b"" if entry.method == "HEAD" else body, entry)
        finally:
            if holds:
                self._slots.release()

    def _admit(self, scope: Scope, headers: Mapping[str, str], entry: _Entry) -> Target | None:
        """Return the target of a request, once it is known that the client may read it.

        Nothing was read from the storage by then.
        """
        if entry.method not in METHODS:
            raise BadRequest(
                405,
                f"This only reads: use one of {', '.join(METHODS)}.",
                {"Allow": ", ".join(METHODS)},
            )
        if entry.method == "OPTIONS":  # browsers send no token with it, and it tells nothing
            return None
        target = parse_target(path_of(scope))
        sent = headers.get("authorization")
        entry.principal = self._grants.name_of(sent) or entry.principal  # of a denied request, too
        entry.principal = self._grants.principal(sent, target)
        return target

    async def _take_slot(self) -> None:
        if self._closing or (self._slots.locked() and self._waiting >= self._limits.waiting):
            raise BadRequest(
                503, "The gateway has too much to do; try again later.", {"Retry-After": "1"}
            )
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1

    async def _reply(
        self, target: Target, headers: Mapping[str, str], entry: _Entry
    ) -> tuple[Reply, bytes]:
        """Return the reply to an admitted request, and its body, which is empty for HEAD."""
        contents = self._contents
        if contents is None:
            raise BadRequest(503, "The repository is not open.", {"Retry-After": "1"})
        if target.ref is None:
            return await _representation(await contents.index(), headers, self._scope, entry)
        # Once for a request, so that its document, its headers and its log are of one snapshot.
        session = await contents.session(target.ref)
        if session is None:
            raise BadRequest(404, f"There is no {target.ref.kind} {target.ref.name[:100]!r}.")
        entry.snapshot = str(session.snapshot_id)
        common = self._common_headers(target, entry.snapshot)
        if target.key == "" and not target.has_slash:
            place = {"Location": f"./{target.ref.segment}/"}  # links of the page are relative
            return Reply(307, common | place), b""
        is_page = target.key in {"", PAGE}
        found = (
            await contents.page(session, target.ref)
            if is_page
            else await contents.find(session, target.key)
        )
        if found is None:
            reply = sentence_reply(404, f"There is nothing at this path of {str(target.ref)!r}.")
            return replace(reply, headers={**reply.headers, **common}), reply.body
        return await _representation(found, headers, common, entry)

    def _common_headers(self, target: Target, snapshot: str) -> dict[str, str]:
        """Return the headers of all replies about a snapshot."""
        assert target.ref is not None
        is_lasting = target.ref.is_fixed and target.key not in {"", PAGE}
        return {**(self._lasting if is_lasting else self._scope), "Icechunk-Snapshot": snapshot}

    async def _send(
        self, send: Send, headers: Mapping[str, str], body: bytes, entry: _Entry
    ) -> None:
        """Send a reply; one whose client takes too long is given up half-way.

        The server closes the connection of a reply that is not complete.
        """
        seconds = self._limits.deadline_seconds
        lines = [_line(name, value) for name, value in headers.items()]
        head = {"type": "http.response.start", "status": entry.status, "headers": lines}
        try:
            async with asyncio.timeout(seconds) as deadline:
                await send(head)
                start = 0
                while True:
                    piece = (
                        body if len(body) <= _PIECE_BYTES else body[start : start + _PIECE_BYTES]
                    )
                    start += len(piece)
                    more = start < len(body)
                    await send({"type": "http.response.body", "body": piece, "more_body": more})
                    entry.sent_bytes = start
                    if not more:
                        return
                    # For each piece anew: a slow client may take long, and a stalled one may not.
                    deadline.reschedule(asyncio.get_running_loop().time() + seconds)
        except TimeoutError:
            _log.warning(
                "%s takes too long to receive %s", printable(entry.principal), _safe(entry)
            )

    def _note(self, entry: _Entry) -> None:
        """Write a line of the access log."""
        if not _access_log.isEnabledFor(logging.INFO):
            return
        milliseconds = (clock.elapsed_us() - entry.began_us) / 1000
        _access_log.info(
            "%s %s %s %d %d B %.1f ms snapshot=%s",
            printable(entry.principal),
            printable(entry.method),
            _safe(entry),
            entry.status,
            entry.sent_bytes,
            milliseconds,
            entry.snapshot,
            extra={
                "principal": entry.principal,
                "method": entry.method,
                "target": entry.target,
                "status": entry.status,
                "sent_bytes": entry.sent_bytes,
                "milliseconds": milliseconds,
                "snapshot": entry.snapshot,
            },
        )


@lru_cache(maxsize=4096)
def _line(name: str, value: str) -> tuple[bytes, bytes]:
    """Return a header as ASGI has it; most are the same in many replies."""
    return name.lower().encode("latin-1"), value.encode("latin-1")


def _safe(entry: _Entry) -> str:
    return printable(entry.target)


async def _representation(
    found: Found, headers: Mapping[str, str], common: Mapping[str, str], entry: _Entry
) -> tuple[Reply, bytes]:
    """Return the reply about a document or chunk, and its body; nothing is read for HEAD."""
    size = found.size_bytes
    # Documents and chunks were written by others; a browser is to take them for nothing else.
    given = {**common, "Accept-Ranges": "bytes", "X-Content-Type-Options": "nosniff"}
    if found.etag is None:  # nothing tells whether the bytes are still the same
        given["Cache-Control"] = "no-store"
    else:
        given["ETag"] = found.etag
    # Before ranges, as RFC 9110 orders it (section 13.2.2).
    if is_unchanged(headers, found.etag):
        return Reply(304, given), b""
    given["Content-Type"] = found.media_type
    if found.media_type == PAGE_TYPE:
        given["Content-Security-Policy"] = POLICY
    # Ranges are defined for GET alone (RFC 9110, section 14.2).
    wanted = parse_range(headers, found.etag) if entry.method == "GET" else None
    start, stop = slice_range(wanted, size)
    if wanted is not None and start == stop:
        sentence = f"The range is outside of the {size} bytes that there are."
        reply = sentence_reply(416, sentence, {"Content-Range": f"bytes */{size}"})
        return reply, reply.body
    if wanted is not None:
        given["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    reply = Reply(200 if wanted is None else 206, given, stop - start)
    empty = entry.method == "HEAD" or start == stop
    return reply, b"" if empty else await found.read(start, stop)


def _reply_to(error: Exception, entry: _Entry) -> Reply:
    """Return the reply to a request that failed, and log what its client is not told."""
    match error:
        case BadRequest():
            return sentence_reply(error.status, error.sentence, error.headers)
        case IcechunkError():
            status, sentence = status_of(error)
            _log.warning("%s failed: %s: %s", _safe(entry), error.kind, printable(str(error)))
            return sentence_reply(status, sentence, {"Retry-After": "1"} if status == 503 else None)
        case _:
            _log.error("%s failed", _safe(entry), exc_info=error)
            return sentence_reply(
                500, "The gateway failed; its operator finds the reason in the log."
            )
