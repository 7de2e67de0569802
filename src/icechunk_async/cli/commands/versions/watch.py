"""`watch`: commits as they come, printed, and sent to a web server as CloudEvents.

Events are those of specification 1.0, in structured mode over HTTP.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator  # noqa: TC003 -- Typer evaluates annotations
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urljoin

import anyio
import typer
from rich.text import Text

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.completing import complete_branch, complete_ref
from icechunk_async.cli.console import SNAPSHOT, plain
from icechunk_async.cli.declaring import streaming_command
from icechunk_async.errors import InvalidInputError, MissingDriverError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from rich.console import Console

    from icechunk_async import Repository
    from icechunk_async.format.json.metadata import JSON

__all__ = ["Webhook", "register"]


_log = logging.getLogger(__name__)


_TYPE: Final = "io.icechunk.commit"
_CONTENT_TYPE: Final = "application/cloudevents+json; charset=utf-8"
_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 60.0
_TIMEOUT_SECONDS: Final = 30.0
_TOO_MANY_REQUESTS: Final = 429
_SHOWN_LETTERS: Final = 500


_Branch = Annotated[
    str,
    typer.Argument(metavar="BRANCH", autocompletion=complete_branch, help="The branch to follow."),
]

_Since = Annotated[
    str | None,
    typer.Option(
        "--since",
        metavar="REF",
        autocompletion=complete_ref,
        help="The last commit that is known. By default the tip.",
    ),
]

_Post = Annotated[
    str | None,
    typer.Option(
        "--post",
        metavar="URL",
        help="Send each commit there as a CloudEvent, again until it is taken. Needs the extra "
        "http.",
    ),
]

_Poll = Annotated[
    float, typer.Option("--poll", metavar="SECONDS", min=0.01, help="Time between two looks.")
]

_Count = Annotated[
    int | None, typer.Option("--count", min=1, help="End after this number of commits.")
]


@dataclass(frozen=True, slots=True)
class CommitLine:
    """The document of `watch`: one commit."""

    branch: str
    snapshot_id: str
    parent_id: str | None
    written_at: datetime
    message: str
    metadata: dict[str, JSON]


async def watch(
    repository: Repository,
    branch: _Branch = "main",
    *,
    since: _Since = None,
    post: _Post = None,
    poll: _Poll = 1.0,
    count: _Count = None,
) -> AsyncIterator[CommitLine]:
    """Print the commits of a branch as they come, until interrupted; oldest first.

    To continue after a restart, pass the id of the last commit as --since. With --post each commit
    is sent at least once, in order; the event's id is that of the snapshot, so that receivers
    can tell repetitions.

    JSON keys, one document a line: branch, snapshot_id, parent_id, written_at, message, metadata.
    """
    url = repository.storage.description.url
    webhook = None if post is None else Webhook(post, source=url)
    left = count
    async for info in repository.watch(
        branch, since=since, poll_seconds=poll, max_poll_seconds=max(poll, 30.0)
    ):
        parent = None if info.parent_id is None else str(info.parent_id)
        line = CommitLine(
            branch, str(info.id), parent, info.written_at, info.message, info.metadata
        )
        if webhook is not None:
            data = {**asdict(line), "written_at": line.written_at.isoformat()}
            await webhook.send(line.snapshot_id, line.written_at, branch, data)
        # Printed once it was taken, so that the last line tells where to continue.
        yield line
        if left is not None and (left := left - 1) == 0:
            return


class Webhook:
    """A receiver of events."""

    def __init__(self, url: str, *, source: str) -> None:
        """Send to ``url``, in the name of the repository at ``source``.

        Raises:
            InvalidInputError: it is no web address.
        """
        if not url.startswith(("http://", "https://")):
            raise InvalidInputError(
                f"--post takes an address that begins with http:// or https://, not {url!r}."
            )
        self._url = url
        self._source = source

    async def send(
        self, event_id: str, when: datetime, subject: str, data: Mapping[str, JSON]
    ) -> None:
        """Send one event, again and again until the server takes it.

        Raises:
            MissingDriverError: the extra ``http`` is not installed.
            InvalidInputError: the server refuses the event as such (status 300 to 499, but 429).

        Cancellation: the event may have been taken.
        """
        try:
            import aiohttp  # noqa: PLC0415 -- an extra
        except ImportError as error:
            raise MissingDriverError(
                "--post needs aiohttp: pip install 'icechunk-async[http]'."
            ) from error
        event = {
            "specversion": "1.0",
            # The snapshot's id and the repository's URL: CloudEvents takes equal pairs for one
            # event, so that a receiver drops what is sent again after a lost reply.
            "id": event_id,
            "source": self._source,
            "type": _TYPE,
            "subject": subject,
            "time": when.isoformat(),
            "datacontenttype": "application/json",
            "data": dict(data),
        }
        body = json.dumps(event, ensure_ascii=False).encode()
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        pause = _FIRST_PAUSE_SECONDS
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                try:
                    # Redirects are not followed: aiohttp would send a GET without the event, as
                    # HTTP has it for 301 and 302, and take the page that comes for a receipt.
                    async with session.post(
                        self._url,
                        data=body,
                        headers={"Content-Type": _CONTENT_TYPE},
                        allow_redirects=False,
                    ) as reply:
                        status = reply.status
                        target = reply.headers.get("Location", "") if status < 400 else ""
                except (aiohttp.ClientError, TimeoutError) as error:
                    status, target, found = 0, "", f"{type(error).__name__}: {error}"
                else:
                    found = f"status {status}"
                if 200 <= status < 300:
                    return
                # The same event would be refused, or sent elsewhere, again and for ever.
                if 300 <= status < 500 and status != _TOO_MANY_REQUESTS:
                    raise self._refusal(event_id, found, target)
                _log.warning("sending %s failed (%s); again in %.1f s", event_id, found, pause)
                await anyio.sleep(pause)
                # For ever, and never to the next event: receivers get all commits in order, or none
                # after a gap.
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _refusal(self, event_id: str, found: str, target: str) -> InvalidInputError:
        if not target:
            return InvalidInputError(
                f"The server at {self._url!r} refuses the event of snapshot {event_id} ({found}). "
                "It was not sent again; use --since with the commit before it."
            )
        with suppress(ValueError):  # anything may come from a server
            target = urljoin(self._url, target)
        return InvalidInputError(
            f"The server at {self._url!r} redirects the event of snapshot {event_id} ({found}), "
            "and redirects are not followed. If you trust the target, give --post its address, "
            f"{target[:_SHOWN_LETTERS]!r}, and --since the commit before this one."
        )


def _show_commit(document: CommitLine, console: Console) -> None:
    console.print(
        Text.assemble(
            (document.snapshot_id, SNAPSHOT),
            "  ",
            # Not the age: the line stays on the screen.
            f"{document.written_at:%Y-%m-%d %H:%M:%S}",
            "  ",
            plain(document.message.split("\n", 1)[0]),
        ),
        soft_wrap=True,
    )


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(streaming_command(watch, _show_commit))
