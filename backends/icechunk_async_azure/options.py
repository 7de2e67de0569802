"""Options of Azure: from a URL, options and environment to one location and one credential.

Nothing here is sent, and no message repeats a secret.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import unquote, urlsplit

from icechunk_async.errors import InvalidInputError, InvalidURLError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Login", "Place", "check_number", "is_async", "login_of", "place_of"]

type Kind = Literal["key", "sas", "sas-callback", "token", "default", "anonymous"]

_CONTAINER: Final = re.compile(r"\$root|\$web|[a-z0-9](?:-?[a-z0-9]){2,62}")
_PROOFS: Final = ("connection_string", "account_key", "sas_token", "credential", "anonymous")
_HOST: Final = "blob.core.windows.net"
_PUBLIC: Final = re.compile(rf"https://[a-z0-9-]+\.{re.escape(_HOST)}")
_EMULATOR_ACCOUNT: Final = "devstoreaccount1"
# The well-known key of every emulator, which is no secret.
_EMULATOR_KEY: Final = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@dataclass(frozen=True, slots=True)
class Place:
    """The location of objects: a container and a prefix of their names."""

    container: str
    prefix: str
    """Empty, or ends with ``/``."""


@dataclass(frozen=True, slots=True)
class Login:
    """An account's address and the credential for it."""

    account_url: str
    account_name: str | None
    kind: Kind
    secret: object = field(default=None, repr=False)
    """By ``kind``: the account key, a SAS token, a callback, a credential or its factory."""

    @property
    def is_documented(self) -> bool:
        """Whether the account is at Azure's public address, encrypted."""
        return _PUBLIC.fullmatch(self.account_url) is not None


def place_of(url: str) -> Place:
    """Parse ``az://container/prefix``.

    Raises:
        InvalidURLError: it names no container, or carries more than a place.
    """
    rest = url.partition("://")[2]
    # The URL is not repeated in the message: what stands there may be a SAS token or a password.
    if "?" in rest or "#" in rest or "@" in rest:
        raise InvalidURLError(
            "The az:// URL has a '?', '#' or '@'. Use az://container/prefix, and give SAS tokens "
            "and account names as the options sas_token and account_name, not in the URL."
        )
    container, _, path = rest.partition("/")
    if not _CONTAINER.fullmatch(container) or len(container) > 63:
        raise InvalidURLError(
            f"{url!r} names no container: {container!r} is not 3 to 63 lower-case letters, digits "
            "and single hyphens. Use az://container/prefix.",
            url=url,
        )
    segments = unquote(path).strip("/").split("/")
    prefix = "/".join(segments)
    if not prefix:
        return Place(container, "")
    if not all(segments) or {".", ".."} & set(segments) or "\0" in prefix or "\\" in prefix:
        raise InvalidURLError(
            f"{url!r} has a prefix with an empty segment, '.', '..', a NUL or a backslash. Use "
            "az://container/prefix with plain segments.",
            url=url,
        )
    return Place(container, prefix + "/")


def check_number(name: str, value: object, least: float) -> None:
    """Validate a number of at least ``least``.

    Raises:
        InvalidInputError: it names the option.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
        raise InvalidInputError(
            f"{name}={value!r} is no number of at least {least}. Use one.", option=name
        )


def login_of(options: Mapping[str, object]) -> Login:
    """Return account and credential; the environment fills in missing options.

    Raises:
        InvalidInputError: options contradict each other, have a wrong type, or name no account.
    """
    _check_types(options)
    given = [name for name in _PROOFS if options.get(name)]
    if len(given) > 1:
        raise InvalidInputError(
            f"The options {' and '.join(given)} each say who asks. Give one of them.",
            options=given,
        )
    proof = given[0] if given else _proof_of_environment()
    if proof == "connection_string":
        return _from_connection_string(options)
    name = _text(options, "account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    url = _account_url(options, name)
    match proof:
        case "account_key":
            if not name:
                raise InvalidInputError(
                    "account_key needs the account that it is of. Give account_name as well."
                )
            key = _text(options, proof) or os.environ["AZURE_STORAGE_ACCOUNT_KEY"]
            return Login(url, name, "key", _checked_key(key))
        case "sas_token":
            token = options.get(proof) or os.environ["AZURE_STORAGE_SAS_TOKEN"]
            if callable(token):
                return Login(url, name, "sas-callback", token)
            return Login(url, name, "sas", _checked_sas(str(token)))
        # azure-core sends bearer tokens over TLS only; said here, it is said before anything is
        # opened.
        case "credential":
            _check_secure(url)
            return Login(url, name, "token", options[proof])
        case "anonymous":
            return Login(url, name, "anonymous")
        case _:
            _check_secure(url)
            return Login(url, name, "default")


def _check_types(options: Mapping[str, object]) -> None:
    for name in ("account_name", "account_key", "connection_string", "endpoint_url"):
        value = options.get(name)
        if value is not None and not (isinstance(value, str) and value.strip()):
            raise InvalidInputError(f"{name} is no text, or empty. Give a text.", option=name)
    for name in ("anonymous", "allow_http"):
        if not isinstance(options.get(name, False), bool):
            raise InvalidInputError(f"{name} is neither True nor False.", option=name)
    token = options.get("sas_token")
    if token is not None and not isinstance(token, str) and not is_async(token):
        raise InvalidInputError(
            "sas_token is neither a text nor an async function that answers one.",
            option="sas_token",
        )
    credential = options.get("credential")
    if credential is not None and not callable(credential) and not _has_tokens(credential):
        raise InvalidInputError(
            "credential has no get_token and cannot be called. Give a credential of "
            "azure.identity.aio, a function that makes one, or an async function that answers an "
            "AccessToken. Account keys and SAS tokens have separate options.",
            option="credential",
        )


def is_async(function: object) -> bool:
    """Return whether calling it returns an awaitable: an async function, or an object like one."""
    return iscoroutinefunction(function) or iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _has_tokens(credential: object) -> bool:
    return hasattr(credential, "get_token")


def _text(options: Mapping[str, object], name: str) -> str | None:
    value = options.get(name)
    return value if isinstance(value, str) else None


def _proof_of_environment() -> str:
    for proof in ("connection_string", "account_key", "sas_token"):
        if os.environ.get(f"AZURE_STORAGE_{proof.upper()}"):
            return proof
    return "default"


def _account_url(options: Mapping[str, object], name: str | None) -> str:
    endpoint = _text(options, "endpoint_url")
    if endpoint is None:
        if not name:
            raise InvalidInputError(
                "No storage account is named. Give account_name, endpoint_url or "
                "connection_string, or set AZURE_STORAGE_ACCOUNT_NAME."
            )
        # Wider than names of accounts are: ``name-secondary`` is the address of a copy in another
        # region. It becomes a part of the host, so nothing else may be in it.
        if not re.fullmatch(r"[a-z0-9-]{3,63}", name):
            raise InvalidInputError(
                f"account_name={name!r} is not 3 to 24 lower-case letters and digits.",
                option="account_name",
            )
        return f"https://{name}.{_HOST}"
    return _checked_endpoint("endpoint_url", endpoint, allow_http=options.get("allow_http") is True)


def _checked_endpoint(option: str, endpoint: str, *, allow_http: bool) -> str:
    try:
        parts = urlsplit(endpoint)
        _ = parts.port  # raises where it is no number
    except ValueError:
        parts = None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidInputError(
            f"{option} is no address. Use one such as 'https://account.blob.core.windows.net'.",
            option=option,
        )
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise InvalidInputError(
            f"{option} carries a '?', '#' or '@'. Give only the address; a SAS token goes into "
            "the option sas_token.",
            option=option,
        )
    if parts.scheme == "http" and not allow_http:
        raise InvalidInputError(
            f"{option} is plain http, which shows data and SAS tokens to the network. Use https, "
            "or allow_http=True for an emulator.",
            option=option,
        )
    return endpoint.rstrip("/")


def _check_secure(url: str) -> None:
    if not url.startswith("https://"):
        raise InvalidInputError(
            "Tokens are sent over https only, and endpoint_url is plain http. Use https, or an "
            "account key or SAS token.",
            option="endpoint_url",
        )


def _checked_key(key: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", key.strip()) or len(key.strip()) % 4:
        raise InvalidInputError(
            "account_key is not the base64 text that the portal shows. Copy it again, whole.",
            option="account_key",
        )
    return key.strip()


def _checked_sas(token: str) -> str:
    token = token.strip().removeprefix("?")
    if "sig=" not in token or "://" in token.partition("=")[0]:
        raise InvalidInputError(
            "sas_token is no SAS token, which has a part 'sig='. Give what follows the '?' of a "
            "SAS URL.",
            option="sas_token",
        )
    return token


def _from_connection_string(options: Mapping[str, object]) -> Login:
    text = _text(options, "connection_string") or os.environ["AZURE_STORAGE_CONNECTION_STRING"]
    for name in ("account_name", "endpoint_url"):
        if options.get(name) is not None:
            raise InvalidInputError(
                f"The options connection_string and {name} both name the account. Give one.",
                option=name,
            )
    pairs = [part.partition("=") for part in text.strip().strip(";").split(";")]
    # Values keep their case, and the ``=`` that base64 ends with.
    fields = {key.strip().lower(): value for key, _, value in pairs}
    allow_http = options.get("allow_http") is True
    if fields.get("usedevelopmentstorage") == "true":
        fields = {
            "accountname": _EMULATOR_ACCOUNT,
            "accountkey": _EMULATOR_KEY,
            "blobendpoint": f"http://127.0.0.1:10000/{_EMULATOR_ACCOUNT}",
        }
    account = fields.get("accountname")
    endpoint = fields.get("blobendpoint") or (
        f"{fields.get('defaultendpointsprotocol', 'https')}://{account}.blob."
        f"{fields.get('endpointsuffix', _HOST.partition('.')[2])}"
        if account
        else None
    )
    if endpoint is None:
        raise InvalidInputError(
            "connection_string names neither AccountName nor BlobEndpoint. Copy it again, whole.",
            option="connection_string",
        )
    url = _checked_endpoint("connection_string's endpoint", endpoint, allow_http=allow_http)
    if "accountkey" in fields and account:
        return Login(url, account, "key", _checked_key(fields["accountkey"]))
    if "sharedaccesssignature" in fields:
        return Login(url, account, "sas", _checked_sas(fields["sharedaccesssignature"]))
    raise InvalidInputError(
        "connection_string has neither AccountKey, with AccountName, nor SharedAccessSignature. "
        "Copy it again, whole.",
        option="connection_string",
    )
