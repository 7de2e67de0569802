"""Send commits to a web server as CloudEvents (specification 1.0, structured mode over HTTP)."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Final

import anyio

from icechunk_async.errors import InvalidInputError, MissingDriverError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from icechunk_async.format.json.metadata import JSON

__all__ = ["Webhook"]

_log = logging.getLogger(__name__)

_TYPE: Final = "io.icechunk.commit"
_CONTENT_TYPE: Final = "application/cloudevents+json; charset=utf-8"
_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 60.0
_TIMEOUT_SECONDS: Final = 30.0
_TOO_MANY_REQUESTS: Final = 429


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
            InvalidInputError: the server refuses the event as such (status 400 to 499, but 429).

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
                    async with session.post(
                        self._url, data=body, headers={"Content-Type": _CONTENT_TYPE}
                    ) as reply:
                        status = reply.status
                except (aiohttp.ClientError, TimeoutError) as error:
                    status, found = 0, f"{type(error).__name__}: {error}"
                else:
                    found = f"status {status}"
                if 200 <= status < 300:
                    return
                if 400 <= status < 500 and status != _TOO_MANY_REQUESTS:
                    raise InvalidInputError(
                        f"The server at {self._url!r} refuses the event of snapshot {event_id} "
                        f"({found}). It was not sent again; use --since with the commit "
                        "before it."
                    )
                _log.warning("sending %s failed (%s); again in %.1f s", event_id, found, pause)
                await anyio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
