"""The path, parameters and preconditions of a request, read strictly.

An unknown parameter is refused, never ignored: a test must not pass because the server overlooked
a part of the request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote

from tests.servers.gcs.json_api.replies import Refusal
from tests.servers.gcs.json_api.state import Conditions

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CONDITIONS", "SOURCE_CONDITIONS", "Ask"]

_EVERYWHERE: Final = {
    *("alt", "fields", "prettyPrint", "projection", "userProject", "quotaUser", "key"),
}
CONDITIONS: Final = (
    *("ifGenerationMatch", "ifGenerationNotMatch"),
    *("ifMetagenerationMatch", "ifMetagenerationNotMatch"),
)
SOURCE_CONDITIONS: Final = (
    *("ifSourceGenerationMatch", "ifSourceGenerationNotMatch"),
    *("ifSourceMetagenerationMatch", "ifSourceMetagenerationNotMatch"),
)


@dataclass(slots=True)
class Ask:
    """Method, path and parameters of one request."""

    method: str
    segments: list[str]
    """The path, split at its slashes, then decoded: names may hold slashes."""
    parameters: dict[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def parse(cls, method: str, target: str) -> Ask:
        """Read the first line of a request."""
        path, _, query = target.partition("?")
        try:
            segments = [unquote(part, errors="strict") for part in path.split("/")[1:]]
            pairs = parse_qsl(query, keep_blank_values=True, errors="strict")
        except UnicodeDecodeError:
            raise Refusal(400, "invalid", "The request is not valid UTF-8.") from None
        if len({name for name, _ in pairs}) != len(pairs):
            raise Refusal(400, "invalidParameter", "A parameter is given twice.")
        return cls(method, segments, dict(pairs))

    @property
    def media(self) -> bool:
        """Return whether bytes are asked for, not a document."""
        return self.parameters.get("alt") == "media"

    def allow(self, *names: str) -> None:
        """Refuse every parameter that this operation does not know."""
        unknown = sorted(set(self.parameters) - _EVERYWHERE - set(names))
        if unknown:
            raise Refusal(
                501, "notImplemented", f"This server does not know {', '.join(unknown)} here."
            )
        if self.parameters.get("alt", "json") not in ("json", "media"):
            raise Refusal(400, "invalidParameter", "Invalid value for alt.")

    def text(self, name: str) -> str:
        """Return a parameter, empty if it is not there."""
        return self.parameters.get(name, "")

    def number(self, name: str) -> int | None:
        """Return a whole number. Raise `Refusal` for any other value."""
        value = self.parameters.get(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdigit()) or int(value) >= 1 << 63:
            raise Refusal(400, "invalidParameter", f"Invalid value for {name}: {value}")
        return int(value)

    def conditions(self, names: Iterable[str] = CONDITIONS) -> Conditions:
        """Return the preconditions."""
        return Conditions(*(self.number(name) for name in names))


def check_name(name: str) -> str:
    """Return ``name`` if an object may have it."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise Refusal(400, "invalid", "The object name is not valid Unicode.") from None
    if not 0 < size <= 1024 or "\r" in name or "\n" in name or name in (".", ".."):
        raise Refusal(400, "invalid", f"Invalid object name of {size} bytes.")
    return name
