"""URLs that name a repository, a ref and a node in one text, as people write them down. Pure.

They are URL pipelines of Zarr: the URL of the repository, a bar, and what is read in it::

    s3://bucket/climate/|icechunk:
    s3://bucket/climate/|icechunk:@branch.main/surface/rain
    s3://bucket/climate/|icechunk:@tag.v1.0
    s3://bucket/climate/|icechunk:@1CECHNKREP0F1RSTCMT0/surface
    s3://bucket/climate/|icechunk:@branch.dev@as-of.2026-01-31T12:00Z/surface

Without a ref it is the branch ``main``. ``@as-of.2026-01-31`` alone is ``main`` at that time, in
UTC unless it has an offset. Characters with a meaning (``/``, ``@`` in names, ``|``, ``?``, ``#``,
``%``) are percent-encoded after the bar. ``icechunk://branch.main/surface``, the form of later
drafts of URL pipelines, is read as well, and so is a last step ``|zarr3:surface/rain``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, Self
from urllib.parse import quote, unquote

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError, InvalidURLError
from icechunk_async.format.config.secrets import veiled_url
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.paths import check_path

__all__ = ["SCHEMES", "IcechunkURL", "is_icechunk_url", "plain_location"]

SCHEMES: Final = ("icechunk", "icechunk-async")
"""Both read the same; the second is nobody else's."""
# With the name: a plain path may hold a bar, which `plain_location` leaves alone.
_STEP: Final = re.compile(rf"\|({'|'.join(SCHEMES)})(?=[:|]|$)", re.IGNORECASE)
_AS_OF: Final = "@as-of."
# Those that URLs allow in a segment (RFC 3986, pchar), without "@", which marks a ref here.
_SAFE: Final = "!$&'()*+,;=:~"
"""Characters that are not encoded in names, beside letters, digits and ``-._~``."""
_FORMS: Final = (
    "'@branch.NAME', '@tag.NAME', '@as-of.TIME' or '@' and the 20 letters of a snapshot id"
)


def is_icechunk_url(text: object) -> bool:
    """Return whether something is text with a step ``|icechunk:``; it may have faults."""
    return isinstance(text, str) and _STEP.search(text) is not None


def plain_location(text: str) -> str:
    """Return the path or URL of a repository, without a step ``|icechunk:`` that adds nothing.

    Raises:
        InvalidURLError: the step names a ref or a node, and the repository is opened whole.
    """
    if not is_icechunk_url(text):
        return text
    url = IcechunkURL.parse(text)
    if not url.is_plain:
        raise InvalidURLError(
            f"{veiled(text)!r} names a state or a node, and a repository is opened whole. Leave "
            "out what follows 'icechunk:', or call open_url of icechunk_async, or that of "
            "icechunk_async.sync.urls in code that blocks."
        )
    return url.location


@dataclass(frozen=True, slots=True)
class IcechunkURL:
    """A repository, a state of it, and a node. ``str`` is the URL; ``repr`` shows no secrets.

    At most one of ``branch``, ``tag`` and ``snapshot_id`` is given; without any it is ``main``.
    """

    location: str
    """Path or URL of the repository."""
    branch: str | None = None
    tag: str | None = None
    snapshot_id: str | None = None
    as_of: datetime | None = None
    """With a branch: what was its tip at this time (aware)."""
    path: str = "/"
    """Path of a group or array, such as ``/surface/rain``."""

    def __post_init__(self) -> None:
        """Check the parts.

        Raises:
            InvalidURLError: the location is empty or has a step itself, several refs are named, a
                name is empty, or a time goes with something other than a branch.
            InvalidInputError: the path or the snapshot id is not valid.
        """
        if not self.location or "|" in self.location:
            raise InvalidURLError(
                "An Icechunk URL begins with the URL of a repository, in which '|' is written "
                f"'%7C'; found {veiled(self.location)!r}."
            )
        named = [it for it in (self.branch, self.tag, self.snapshot_id) if it is not None]
        if len(named) > 1 or "" in named:
            raise InvalidURLError("An Icechunk URL names one branch, one tag or one snapshot id.")
        if self.as_of is not None and (self.tag is not None or self.snapshot_id is not None):
            raise InvalidURLError(
                "A time goes with a branch; a tag or a snapshot id names one moment already."
            )
        # Naive times become UTC here, and ids get one spelling, so that equal URLs compare equal.
        if self.as_of is not None and self.as_of.tzinfo is None:
            object.__setattr__(self, "as_of", self.as_of.replace(tzinfo=UTC))
        if self.snapshot_id is not None:
            object.__setattr__(self, "snapshot_id", str(SnapshotId.parse(self.snapshot_id)))
        object.__setattr__(self, "path", check_path(self.path))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a URL with a step ``|icechunk:``, or the plain path or URL of a repository.

        Raises:
            InvalidURLError: it cannot be understood; the message says what to write.
            InvalidInputError: the path has a segment that no node can have.
        """
        found = _STEP.search(text)
        if found is None:
            return cls(_trimmed(text))
        location = text[: found.start()]
        # Split before anything is decoded: an encoded bar, slash or @ is part of a name.
        rest, *more = text[found.end() :].split("|")
        path, *refs = reversed(_body(rest.removeprefix(":"), text))
        url = cls(_trimmed(location), path=path)
        if refs:
            url = url._with_ref(refs[0], text)
        for step in more:
            scheme, _, inner = step.partition(":")
            # Zarr's own step names a node below the one that is named here: |icechunk:a|zarr3:b is
            # a/b.
            if scheme.lower() != "zarr3" or step is not more[-1]:
                raise InvalidURLError(
                    f"{veiled(text)!r} has a step {step!r} after 'icechunk:'. Only '|zarr3:PATH' "
                    "can follow, once."
                )
            url = replace(url, path=f"{url.group}/{_path(inner, text).strip('/')}")
        return url

    def _with_ref(self, ref: str, text: str) -> Self:
        """Return the URL at a ref such as ``branch.main``, still percent-encoded."""
        # branch.dev@as-of.2026-01-31: "branch.dev" and the time; as-of.2026-01-31: "" and the time
        named, at, moment = f"@{ref}".partition(_AS_OF)
        named = named.removeprefix("@")
        as_of = _time(_decoded(moment, text), text) if at else None
        kind, dot, name = named.partition(".")
        name = _decoded(name, text)
        if not named and at:
            return replace(self, as_of=as_of)
        if kind == "branch" and name:
            return replace(self, branch=name, as_of=as_of)
        if kind == "tag" and name:
            return replace(self, tag=name, as_of=as_of)
        # A ref without a dot is an id or a mistake, which is found before any request.
        if not dot:
            try:
                return replace(self, snapshot_id=str(SnapshotId.parse(named)), as_of=as_of)
            except InvalidInputError as error:
                if isinstance(error, InvalidURLError):  # a time beside it
                    raise
        raise InvalidURLError(
            f"{veiled(text)!r} names the ref {('@' + ref)!r}, whose kind is not clear. Write "
            f"{_FORMS}."
        )

    @property
    def ref(self) -> str:
        """The branch, tag or snapshot id; ``main`` without any."""
        return self.branch or self.tag or self.snapshot_id or "main"

    @property
    def read_branch(self) -> str | None:
        """The branch to read, ``main`` without any ref; None with a tag or a snapshot id."""
        return None if self.tag or self.snapshot_id else self.ref

    def written_branch(self) -> str:
        """Return the branch on which a session that writes begins.

        Raises:
            InvalidInputError: a tag, a snapshot id or a time is named, which nobody changes.
        """
        branch = self.read_branch
        if branch is None or self.as_of is not None:
            raise InvalidInputError(
                f"{self!r} names a state that nobody changes. Sessions that write begin at the tip "
                "of a branch: give a URL with @branch.NAME, or without a ref for main."
            )
        return branch

    @property
    def group(self) -> str:
        """The path without ``/`` at its ends; empty for the root."""
        return self.path.strip("/")

    @property
    def is_plain(self) -> bool:
        """Whether it names the repository alone, without a ref, a time or a node."""
        return self == type(self)(self.location)

    def __str__(self) -> str:
        """Return the URL, with secrets that the location may hold."""
        ref = ""
        for kind, name in (("branch", self.branch), ("tag", self.tag)):
            if name is not None:
                ref = f"@{kind}.{_encoded(name)}"
        if self.snapshot_id is not None:
            ref = f"@{self.snapshot_id}"
        if self.as_of is not None:
            ref += _AS_OF + self.as_of.isoformat()
        path = "/".join(map(_encoded, self.group.split("/")))
        slash = "/" if ref and path else ""
        end = "" if "?" in self.location or self.location.endswith("/") else "/"
        return f"{self.location}{end}|icechunk:{ref}{slash}{path}"

    def __repr__(self) -> str:
        """Show the URL without a user, a password or a query, which may be secret."""
        return f"IcechunkURL({str(replace(self, location=veiled(self.location)))!r})"


def veiled(text: str) -> str:
    """Return a URL without what may be secret in the part before its first bar."""
    location, bar, rest = text.partition("|")
    if "://" in location:
        # A query may be a signature (SAS of Azure, signed URLs), and so is as good as a password.
        location = veiled_url(location.partition("?")[0])
    return location + bar + rest


def _trimmed(location: str) -> str:
    """Return a location without the slashes at its end, but for those that are its root."""
    # A slash after a question mark is part of the query.
    if "?" in location:
        return location
    trimmed = location.rstrip("/")
    # "/" and "memory://" stay: without slashes they would name something else
    return location if not trimmed or trimmed.endswith(":") else trimmed


def _body(body: str, text: str) -> list[str]:
    """Split what follows ``icechunk:`` into a ref, if there is one, and a decoded path."""
    for mark in "?#":
        if mark in body:
            raise InvalidURLError(
                f"{veiled(text)!r} has {mark!r} after 'icechunk:'. In a name it is written "
                f"'%{ord(mark):X}'."
            )
    if body.startswith("//"):
        ref, _, path = body[2:].partition("/")
        if not ref:
            raise InvalidURLError(f"{veiled(text)!r} names no ref after 'icechunk://'.")
        return [ref, _path(path, text)]
    if body.startswith("@"):
        ref, _, path = body[1:].partition("/")
        return [ref, _path(path, text)]
    return [_path(body, text)]


def _decoded(text: str, url: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise InvalidURLError(
            f"{veiled(url)!r} is percent-encoded, and not in UTF-8; encode its names in UTF-8."
        ) from None


def _path(text: str, url: str) -> str:
    """Decode each segment of a path."""
    segments = [_decoded(it, url) for it in text.split("/")]
    # After decoding a%2Fb is one segment with a slash, and joined again it would name another node.
    if any("/" in it for it in segments):
        raise InvalidURLError(f"{veiled(url)!r} has '%2F' in a path; no node has '/' in its name.")
    return "/".join(segments)


def _encoded(name: str) -> str:
    return quote(name, safe=_SAFE)


def _time(text: str, url: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidURLError(
            f"{veiled(url)!r} has a time {text!r} that is not ISO 8601, such as 2026-01-31 or "
            "2026-01-31T12:00:00+01:00."
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
