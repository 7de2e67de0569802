"""Access: bearer tokens, each for some refs and paths. Pure."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, cast

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.paths import check_path, is_within
from icechunk_async.gateway.requests import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from icechunk_async.gateway.requests import Target

__all__ = ["ANONYMOUS", "Grant", "Grants", "read_grants"]

ANONYMOUS: Final = "anonymous"
# Of the letters that HTTP carries 16 random ones are 96 bits and more, which nobody guesses.
_SHORTEST: Final = 16
"""Letters of a token."""
_FIELDS: Final = {"principal", "token", "paths", "refs"}
_CHALLENGE: Final = {"WWW-Authenticate": 'Bearer realm="icechunk"'}


@dataclass(frozen=True, slots=True)
class Grant:
    """Lets the holder of a token read some refs and paths.

    Args:
        principal: who it is, for the access log.
        token: the secret; None: everybody, without a token.
        paths: groups and arrays, each with all below it.
        refs: patterns of refs as in URLs, without `@`: ``branch.main``, ``tag.*``, the id of a
            snapshot, or ``*`` for all. A pattern for a branch says nothing of the ids of its
            snapshots.

    Raises:
        InvalidInputError: a text is empty or no path, or the token has other letters than those of
            HTTP.
    """

    principal: str
    token: str | None = field(repr=False)
    paths: Sequence[str] = ("/",)
    refs: Sequence[str] = ("*",)

    def __post_init__(self) -> None:
        """Check it, and make its paths absolute."""
        for name, value in (("paths", self.paths), ("refs", self.refs)):
            if isinstance(value, str) or not value or not all(value):
                raise InvalidInputError(
                    f"A grant's {name} are a list of texts that are not empty, not {value!r}."
                )
        if not self.principal:
            raise InvalidInputError("A grant needs a principal, the name in the access log.")
        token = self.token
        if token is not None and (not token.isascii() or not token.isprintable() or " " in token):
            raise InvalidInputError(
                f"The token of {self.principal!r} has letters that HTTP cannot carry: use letters, "
                "digits and -._~+/= only."
            )
        if token is not None and len(token) < _SHORTEST:
            raise InvalidInputError(
                f"The token of {self.principal!r} has fewer than {_SHORTEST} letters, which can be "
                "guessed. Make one with: python -c 'import secrets; print(secrets.token_urlsafe())'"
            )
        object.__setattr__(self, "paths", tuple(check_path(it) for it in self.paths))
        object.__setattr__(self, "refs", tuple(self.refs))

    def allows(self, target: Target) -> bool:
        """Return whether it lets somebody read a target."""
        if not any(is_within(target.path, top) for top in self.paths):
            return False
        # The list of refs shows all names, so that only a grant for all refs opens it.
        if target.ref is None:
            return "*" in self.refs
        # Not `fnmatch`, which ignores case on some systems, where a branch `Main` would pass for
        # `main`.
        return any(fnmatchcase(str(target.ref), pattern) for pattern in self.refs)


class Grants:
    """All grants of a gateway; none means that everybody may read everything."""

    def __init__(self, grants: Sequence[Grant]) -> None:
        """Decide by ``grants``.

        Raises:
            InvalidInputError: two principals share a token.
        """
        self.are_public = not grants
        self._public = [it for it in grants if it.token is None]
        # By digest: how long looking for a token takes says nothing of those that there are.
        self._by_token: dict[bytes, list[Grant]] = {}
        for it in grants:
            if it.token is not None:
                known = self._by_token.setdefault(_digest(it.token), [])
                if known and known[0].principal != it.principal:
                    raise InvalidInputError(
                        f"{known[0].principal!r} and {it.principal!r} have the same token, so that "
                        "the access log could not tell them apart. Give each a separate one."
                    )
                known.append(it)

    def name_of(self, authorization: str | None) -> str | None:
        """Return whose token a request sent, for the access log, whatever it may read."""
        known = self._known(authorization)
        return known[0].principal if known else None

    def _known(self, authorization: str | None) -> list[Grant]:
        scheme, _, token = (authorization or "").partition(" ")
        return self._by_token.get(_digest(token.strip()), []) if scheme.lower() == "bearer" else []

    def principal(self, authorization: str | None, target: Target) -> str:
        """Return the principal of a request that may read a target.

        Raises:
            BadRequest: nobody who sent this header may (401, 403).
        """
        if self.are_public:
            return ANONYMOUS
        mine, name = self._public, ANONYMOUS
        if authorization is not None:
            known = self._known(authorization)
            if not known:
                raise BadRequest(
                    401, "The header Authorization names no token that is known here.", _CHALLENGE
                )
            # A token must not take away what everybody may read.
            mine, name = [*known, *self._public], known[0].principal
        if any(it.allows(target) for it in mine):
            return name
        # 401 asks for a token, 403 says that another request with this one is of no use.
        if authorization is None:
            raise BadRequest(
                401,
                "This needs a token: send the header 'Authorization: Bearer TOKEN'.",
                _CHALLENGE,
            )
        raise BadRequest(403, "The token does not allow to read this path of this ref.")


def _digest(token: str) -> bytes:
    # Without salt and rounds, which guard passwords: tokens are random and too long to be guessed.
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def read_grants(text: str, where: str) -> list[Grant]:
    """Read a TOML document with tables ``[[grant]]``.

    Raises:
        InvalidInputError: it is not TOML, or a grant has unknown or wrong fields. The message holds
            no token.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{where!r} is not a TOML document: {error}.") from error
    tables = document.get("grant")
    # Strict: a misspelt table that is skipped would leave a grant out, or none, which means
    # everybody.
    if set(document) != {"grant"} or not isinstance(tables, list) or not tables:
        raise InvalidInputError(
            f"{where!r} has no grants, or more than these. It is made of tables [[grant]], each "
            "with principal, token, paths and refs."
        )
    return [_read_grant(table, where) for table in cast("list[object]", tables)]


def _read_grant(table: object, where: str) -> Grant:
    fields: Mapping[str, Any] = cast("Mapping[str, Any]", table) if isinstance(table, dict) else {}
    unknown = sorted(set(fields) - _FIELDS)
    if unknown or not isinstance(fields.get("principal"), str):
        wrong = f"the unknown field {unknown[0]!r}" if unknown else "no principal"
        raise InvalidInputError(f"A grant of {where!r} has {wrong}.")
    if not isinstance(fields.get("token"), str | None):
        raise InvalidInputError(f"The token of {fields['principal']!r} in {where!r} is no text.")
    lists: dict[str, Any] = {name: fields[name] for name in ("paths", "refs") if name in fields}
    for name, value in lists.items():
        if not isinstance(value, list) or not all(
            isinstance(it, str) for it in cast("list[object]", value)
        ):
            raise InvalidInputError(
                f"{name} of {fields['principal']!r} in {where!r} is not a list of texts."
            )
    return Grant(fields["principal"], fields.get("token"), **lists)
