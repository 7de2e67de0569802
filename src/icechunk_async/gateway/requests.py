"""HTTP as the gateway speaks it: targets, ranges and conditions of requests; replies. Pure.

Everything in a request was written by a stranger. Sizes are bounded before anything is decoded, and
a wrong request is a `BadRequest`. A reply to a stranger tells what the stranger can do, and nothing
of where the repository is: the log has the rest.
"""

from __future__ import annotations

import re
from dataclasses import field
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote_to_bytes

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import (
    FormatError,
    IcechunkError,
    InvalidInputError,
    InvalidStoreKeyError,
    StorageUnavailableError,
    VirtualAccessError,
    VirtualContainerError,
    VirtualSourceChangedError,
)
from icechunk_async.format.ids import SnapshotId
from icechunk_async.storage import ByteRange, SuffixRange
from icechunk_async.zarr.keys import ForeignKey, parse_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from icechunk_async.storage import RangeRequest

__all__ = [
    "FOREVER",
    "METHODS",
    "PAGE",
    "BadRequest",
    "Cors",
    "Ref",
    "Reply",
    "Target",
    "headers_of",
    "is_unchanged",
    "joined",
    "parse_range",
    "parse_ref",
    "parse_target",
    "path_of",
    "sentence_reply",
    "status_of",
]

METHODS: Final = ("GET", "HEAD", "OPTIONS")
PAGE: Final = "index.html"
"""The page for people, of a snapshot and above all refs."""
_LONGEST_TARGET: Final = 4096
"""Bytes."""
_LONGEST_HEADERS: Final = 32 << 10
"""Bytes, names included."""
# A header may list thousands of overlapping ranges, which has brought servers down (CVE-2011-3192).
_MOST_RANGES: Final = 16
# Servers in front may read the first of two, and this one the last: who may read must not depend on
# it.
_SINGLE: Final = frozenset({"authorization", "range", "if-range"})
_USED: Final = {it.encode(): it for it in (*_SINGLE, "if-none-match", "origin")}
_ODD: Final = frozenset({"", ".", ".."})
"""Segments that no path of a node has."""
_PLAIN: Final = re.compile(rb"[!-$&-~]*")
"""Letters that stand for themselves."""
_ESCAPE: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_RANGE: Final = re.compile(r"(\d{0,20})-(\d{0,20})")
_ETAG: Final = re.compile(r'(?:W/)?("[^"]*")')
_LITERAL: Final = "!$&'()*+,;=:@"
"""Characters that are literal in a segment of a path, besides letters, digits and ``-._~``."""
FOREVER: Final = "max-age=31536000, immutable"
"""Directives for what never changes."""
_ALLOWED_HEADERS: Final = "Authorization, Range, If-Range, If-None-Match, Cache-Control, Pragma"
_EXPOSED: Final = "ETag, Content-Range, Content-Length, Accept-Ranges, Icechunk-Snapshot"


class BadRequest(Exception):  # noqa: N818 -- an outcome, not a failure of this program
    """A request that is answered with an error status and one sentence."""

    def __init__(
        self, status: int, sentence: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """Keep the ``status`` and the rest of the reply."""
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True)
class Ref:
    """A branch, a tag or a snapshot: the first segment of a target."""

    kind: str
    """``branch``, ``tag`` or ``snapshot``."""
    name: str

    def __str__(self) -> str:
        """Return it as in a target, without ``@`` and not quoted."""
        return self.name if self.kind == "snapshot" else f"{self.kind}.{self.name}"

    @property
    def segment(self) -> str:
        """The first segment of its targets, quoted."""
        return f"@{quote(str(self), safe=_LITERAL)}"

    @property
    def is_fixed(self) -> bool:
        """Whether it names the same snapshot for ever."""
        # A tag cannot be moved, and the name of a deleted one cannot be given again.
        return self.kind != "branch"


@dataclass(frozen=True, slots=True)
class Target:
    """The subject of a request: a ref, and a key below it."""

    ref: Ref | None
    """None for the root, above all refs."""
    key: str
    """The key below the ref, decoded; empty for the ref itself."""
    has_slash: bool = True
    """Whether a ref alone has a slash after it."""

    @property
    def path(self) -> str:
        """The node whose document or chunk it is: what decides who may read it."""
        if self.key in {"", PAGE}:
            return "/"
        try:
            parsed = parse_key(self.key)  # as the store will, so that the two never disagree
        except InvalidStoreKeyError:
            return f"/{self.key.rstrip('/')}"
        return f"/{self.key}" if isinstance(parsed, ForeignKey) else parsed.path

    @property
    def canonical(self) -> str:
        """The target, quoted."""
        if self.ref is None:
            return f"/{self.key}"
        if not self.has_slash:
            return f"/{self.ref.segment}"
        return f"/{self.ref.segment}/{quote(self.key, safe=_LITERAL + '/')}"


def headers_of(scope: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers that a gateway reads by lower-case name; several with one name joined.

    Raises:
        BadRequest: they are too long, or one that must be single is there twice.
    """
    given: Sequence[tuple[bytes, bytes]] = scope["headers"]
    # Servers bound heads too, but a gateway may be mounted in one that does not.
    if sum(len(name) + len(value) for name, value in given) > _LONGEST_HEADERS:
        raise BadRequest(431, f"The headers of the request exceed {_LONGEST_HEADERS} bytes.")
    found: dict[str, str] = {}
    for raw_name, raw_value in given:
        name = _USED.get(raw_name.lower())
        if name is None:
            continue
        value = raw_value.decode("latin-1").strip()
        if name in found and name in _SINGLE:
            raise BadRequest(400, f"The request has the header {name} more than once.")
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def path_of(scope: Mapping[str, Any]) -> bytes:
    """Return the path of a request below where the application is mounted, still quoted.

    Raises:
        BadRequest: it is too long.
    """
    path: str = scope["path"]
    raw: bytes = scope.get("raw_path") or quote(path, safe=_LITERAL + "/").encode()
    raw = raw.partition(b"?")[0]
    if len(raw) > _LONGEST_TARGET:
        raise BadRequest(414, f"The path of the request exceeds {_LONGEST_TARGET} bytes.")
    root = str(scope.get("root_path") or "").rstrip("/")
    if root and (path == root or path.startswith(f"{root}/")):
        # A prefix of servers has no quoted slash, so that its number of segments is left out.
        raw = b"/" + b"/".join(raw.split(b"/")[root.count("/") + 1 :])
    return raw


def parse_target(raw: bytes) -> Target:
    """Read the quoted path of a request, such as ``/@branch.main/air/c/0/0``.

    Segments are split before they are decoded, so that ``%2F`` never makes one.

    Raises:
        BadRequest: a segment is empty, ``.``, ``..``, or not valid; or there is no ref.
    """
    if not raw.startswith(b"/"):
        raise BadRequest(400, "The path of the request does not begin with a slash.")
    if _PLAIN.fullmatch(raw):  # most are, and this takes a fifth of the time
        segments = raw[1:].decode().split("/")
    else:
        segments = [_decoded(it) for it in raw[1:].split(b"/")]
    if segments == [""]:
        return Target(None, "")
    if segments == [PAGE]:
        return Target(None, PAGE)
    if not segments[0].startswith("@"):
        raise BadRequest(
            404,
            "There is nothing here. Paths begin with '/@branch.main/', '/@tag.v1/' or the id of a "
            "snapshot, such as '/@1CECHNKREP0F1RSTCMT0/'.",
        )
    ref = parse_ref(segments[0][1:])
    if ref is None:
        raise BadRequest(
            404,
            f"{segments[0][:100]!r} names no ref. Write {_kinds_of(segments[0][1:])}, or '@' and "
            "the 20 letters of a snapshot's id.",
        )
    below = segments[1:]
    if below and below[-1] == "":  # a slash at the end
        below = below[:-1]
        if below:
            return Target(ref, "/".join(_checked(below)) + "/")
        return Target(ref, "")
    return Target(ref, "/".join(_checked(below)), has_slash=bool(below))


def _kinds_of(name: str) -> str:
    """Return the forms of a branch and a tag, of a name that was given without its kind."""
    shown = name[:100] if name and "." not in name else "NAME"
    return f"'@branch.{shown}', '@tag.{shown}'"


@lru_cache(maxsize=256)
def parse_ref(text: str) -> Ref | None:
    """Read a ref without its ``@``; None if it is not one."""
    kind, dot, name = text.partition(".")
    if dot and kind in {"branch", "tag"} and name:
        return Ref(kind, name)
    try:
        # The alphabet of ids is Crockford's, in capitals. Paths are often typed.
        return Ref("snapshot", str(SnapshotId.parse(text.upper())))
    except InvalidInputError:
        return None


def _decoded(segment: bytes) -> str:
    if _ESCAPE.search(segment):
        raise BadRequest(400, "The path of the request has a '%' without two hexadecimal digits.")
    try:
        text = unquote_to_bytes(segment).decode()
    except UnicodeDecodeError:
        raise BadRequest(400, "The path of the request is not valid UTF-8.") from None
    if any(it < " " or it == "\x7f" for it in text):
        raise BadRequest(400, "The path of the request has a control character.")
    return text


def _checked(segments: list[str]) -> list[str]:
    if "/" in "".join(segments):
        raise BadRequest(400, "A segment of the request's path has a quoted slash in it.")
    if not _ODD.isdisjoint(segments):
        raise BadRequest(
            400, "A segment of the request's path is empty, '.' or '..'; write it without those."
        )
    return segments


def parse_range(headers: Mapping[str, str], etag: str | None) -> RangeRequest:
    """Return the part of a representation that a request asks for; None: all of it.

    A range in a unit other than bytes, with an ``If-Range`` that does not hold, and several ranges
    count as none, which HTTP allows.

    Args:
        headers: of the request.
        etag: of the representation, strong; None if it has none.

    Raises:
        BadRequest: it is no range, or a list of very many.
    """
    text = headers.get("range")
    if text is None:
        return None
    unit, _, ranges = text.partition("=")
    if unit.strip().lower() != "bytes":
        return None
    if "if-range" in headers and (etag is None or headers["if-range"] != etag):
        return None
    parts = ranges.split(",")
    if len(parts) > _MOST_RANGES:
        raise BadRequest(400, f"The request asks for more than {_MOST_RANGES} ranges; ask for one.")
    matches = [_RANGE.fullmatch(part.strip()) for part in parts]
    found = [_range(match[1], match[2]) for match in matches if match is not None]
    if len(found) != len(parts):
        raise BadRequest(
            400, "The header Range is not of the form bytes=0-99, bytes=100- or bytes=-100."
        )
    return found[0] if len(found) == 1 else None


def _range(first: str, last: str) -> RangeRequest:
    if first and last and int(last) >= int(first):
        return ByteRange(int(first), int(last) + 1)
    if first and not last:
        return ByteRange(int(first))
    if last and not first:
        return SuffixRange(int(last))
    raise BadRequest(400, "The header Range names no byte, or one after the last.")


def is_unchanged(headers: Mapping[str, str], etag: str | None) -> bool:
    """Return whether a client has what it asks for (``If-None-Match``)."""
    given = headers.get("if-none-match")
    if given is None or etag is None:
        return False
    # By the weak comparison, which `If-None-Match` has: `W/` before a tag does not count.
    return given.strip() == "*" or etag in _ETAG.findall(given)


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply without its body, unless that is at hand."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    size_bytes: int = 0
    """Of the body."""
    body: bytes = b""


def sentence_reply(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Reply:
    """Return a reply that is one sentence of plain text, which no cache keeps."""
    body = f"{sentence}\n".encode()
    # A sentence may repeat text of the request, which no browser may take for HTML.
    common = {
        "Content-Type": "text/plain; charset=utf-8",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }
    return Reply(status, common | dict(headers or {}), len(body), body)


def joined(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of both; what replies vary by adds up."""
    vary = ", ".join(it["Vary"] for it in (first, second) if "Vary" in it)
    return {**first, **second, **({"Vary": vary} if vary else {})}


def status_of(error: IcechunkError) -> tuple[int, str]:
    """Return the status and the sentence that a client gets for an error of the engine."""
    match error:
        case VirtualSourceChangedError():
            return 502, "The source of this virtual chunk changed since it was referenced."
        case VirtualAccessError() | VirtualContainerError():
            return 502, "The gateway is not authorised to read the source of this virtual chunk."
        case StorageUnavailableError():
            return 503, "The storage of the repository does not reply at present; try again later."
        case FormatError():
            return 502, "The repository is damaged here; its operator finds the reason in the log."
        case _:
            return (
                502,
                "The storage of the repository refused; its operator finds the reason in the log.",
            )


class Cors:
    """Lets pages of other origins read, as browsers ask."""

    def __init__(self, origins: Sequence[str]) -> None:
        """Allow ``origins``; ``*`` allows all."""
        self._all = "*" in origins
        self._origins = frozenset(origins)

    def headers(self, origin: str | None) -> dict[str, str]:
        """Return the headers of a reply to a page of ``origin``."""
        if self._all:
            # Safe with a star: browsers send tokens of pages only by scripts that have them, and
            # never cookies.
            allowed = {"Access-Control-Allow-Origin": "*"}
        elif origin in self._origins:
            allowed = {"Access-Control-Allow-Origin": str(origin), "Vary": "Origin"}
        else:
            # Else a cache would give a page of an allowed origin this reply, and the reverse.
            return {"Vary": "Origin"} if self._origins else {}
        return {**allowed, "Access-Control-Expose-Headers": _EXPOSED}

    def preflight(self, origin: str | None) -> Reply:
        """Return the reply to ``OPTIONS``."""
        headers = {"Allow": ", ".join(METHODS), **self.headers(origin)}
        if "Access-Control-Allow-Origin" in headers:
            headers |= {
                "Access-Control-Allow-Methods": ", ".join(METHODS),
                "Access-Control-Allow-Headers": _ALLOWED_HEADERS,
                "Access-Control-Max-Age": "86400",
            }
        return Reply(HTTPStatus.NO_CONTENT, headers)
