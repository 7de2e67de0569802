"""A client that calls an ASGI application as a server would, without a network."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping

    from icechunk_async.gateway import Gateway

__all__ = ["Answer", "ask"]


@dataclass
class Answer:
    """A reply as it was sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)

    @property
    def sentence(self) -> str:
        """The body of a refusal: one line, of one sentence."""
        text = self.body.decode()
        assert text.count("\n") == 1
        assert text.endswith(".\n")
        assert "Traceback" not in text
        return text[:-1]


async def ask(
    gateway: Gateway,
    target: str,
    method: str = "GET",
    *,
    headers: Iterable[tuple[str, str]] = (),
    root_path: str = "",
    **named: str,
) -> Answer:
    """Send one request; ``named`` are headers with ``_`` for ``-``."""
    raw = (root_path + target).encode("latin-1")
    lines = [*headers, *((name.replace("_", "-"), value) for name, value in named.items())]
    scope: MutableMapping[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote((root_path + target).partition("?")[0], errors="replace"),
        "raw_path": raw,
        "root_path": root_path,
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in lines],
    }
    answer = Answer()

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.body += message["body"]
            answer.complete = not message.get("more_body", False)

    await gateway(scope, receive, send)
    if method != "HEAD" and answer.complete and answer.status not in {204, 304}:
        assert int(answer.headers["content-length"]) == len(answer.body)
    return answer
