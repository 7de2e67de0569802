"""The faults of a `FaultProxy`, and the plan that chooses them."""

from __future__ import annotations

import random
import re
from typing import Final

from icechunk_async._runtime.dataclasses import dataclass

__all__ = [
    "AZURE_BUSY",
    "GCS_BUSY",
    "S3_INTERNAL_ERROR",
    "S3_SLOW_DOWN",
    "Choice",
    "Chooser",
    "Delay",
    "Fault",
    "FaultPlan",
    "Hang",
    "Reset",
    "Respond",
    "Rule",
    "SlowBody",
    "Truncate",
]


@dataclass(frozen=True, slots=True)
class Respond:
    """The proxy answers in place of the server, which never sees the request."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    """Beside ``Content-Length``, such as ``("Retry-After", "1")``."""


@dataclass(frozen=True, slots=True)
class Reset:
    """The connection is reset instead of an answer."""

    applied: bool
    """True: the server carried the request out, and only the reply is lost. False: it never
    saw the request."""


@dataclass(frozen=True, slots=True)
class Hang:
    """No answer comes, and the connection stays open until the client or the proxy ends it."""

    applied: bool
    """As for `Reset`."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """The server carries the request out; the answer's body ends half-way, and the connection.

    Where the answer has no body, its headers end half-way.
    """


@dataclass(frozen=True, slots=True)
class SlowBody:
    """The answer's headers come at once and its body in eight parts over this time."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Delay:
    """The request waits this long before it is passed on."""

    seconds: float


type Fault = Respond | Reset | Hang | Truncate | SlowBody | Delay
"""The fault and the delay of one request."""

_XML: Final = ("Content-Type", "application/xml")

S3_SLOW_DOWN: Final = Respond(
    503,
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>SlowDown</Code>'
    b"<Message>Please reduce your request rate.</Message></Error>",
    (_XML, ("Retry-After", "0")),
)
"""How S3 turns a request away."""

S3_INTERNAL_ERROR: Final = Respond(
    500,
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>InternalError</Code>'
    b"<Message>We encountered an internal error. Please try again.</Message></Error>",
    (_XML,),
)
"""How S3 fails."""

GCS_BUSY: Final = Respond(
    429,
    b'{"error": {"code": 429, "message": "The object exceeded the rate limit.", '
    b'"errors": [{"domain": "usageLimits", "reason": "rateLimitExceeded"}]}}',
    (("Content-Type", "application/json; charset=UTF-8"), ("Retry-After", "0")),
)
"""How Google Cloud Storage turns a request away."""

AZURE_BUSY: Final = Respond(
    503,
    b'<?xml version="1.0" encoding="utf-8"?><Error><Code>ServerBusy</Code>'
    b"<Message>The server is busy.</Message></Error>",
    (_XML, ("x-ms-error-code", "ServerBusy"), ("Retry-After", "0")),
)
"""How Azure turns a request away."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A fault for the requests that match: for all, for the first of them, or by chance."""

    fault: Fault
    method: str = ""
    """Regular expression that is looked for in the method; empty for any."""
    path: str = ""
    """Regular expression that is looked for in path and query, as sent; empty for any."""
    first: int | None = None
    """At most this number of requests; None for no limit."""
    rate: float = 1.0
    """The share of the requests, from 0 to 1, at random."""

    def __post_init__(self) -> None:
        """Raise `ValueError` if the rate is out of range."""
        if not 0 <= self.rate <= 1:
            raise ValueError(f"a rate is from 0 to 1, not {self.rate}")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Rules and delays for requests; without arguments every request passes.

    A request gets the fault of the first rule that matches it and whose chance comes up.
    """

    rules: tuple[Rule, ...] = ()
    latency_seconds: float = 0.0
    """The additional duration of every request."""
    jitter_seconds: float = 0.0
    """Up to this much more, at random."""
    seed: int = 0
    """Equal seeds and equal requests in equal order have equal faults."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The fault and the delay of one request."""

    delay_seconds: float
    fault: Fault | None


class Chooser:
    """Follows a plan, request by request. Used by one thread."""

    def __init__(self, plan: FaultPlan) -> None:
        """Begin: no rule was followed yet."""
        self._plan = plan
        self._random = random.Random(plan.seed)  # noqa: S311 -- faults, not secrets
        self._followed = [0] * len(plan.rules)

    def choose(self, method: str, target: str) -> Choice:
        """Return the decision for the next request."""
        plan = self._plan
        delay = plan.latency_seconds + self._random.random() * plan.jitter_seconds
        for index, rule in enumerate(plan.rules):
            chance = self._random.random()  # drawn for every rule: equal requests, equal faults
            matches = re.search(rule.method, method) and re.search(rule.path, target)
            is_left = rule.first is None or self._followed[index] < rule.first
            if matches and is_left and chance < rule.rate:
                self._followed[index] += 1
                return Choice(delay, rule.fault)
        return Choice(delay, None)
