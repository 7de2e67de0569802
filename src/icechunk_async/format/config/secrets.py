"""Veil the secrets of a configuration wherever people see it.

Options and headers of a container's store may be passwords, tokens or keys of service accounts, and
nobody can list the names of those that are. So values are shown only under names known to be
harmless; the others are replaced by `VEIL`, which cannot be stored by mistake: see `is_veiled`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.format.json.values import JSON

__all__ = ["VEIL", "is_veiled", "veiled_document", "veiled_options", "veiled_url"]

VEIL: Final = "****"
"""The text shown in place of a secret."""

# A list of what may be shown, not of what must not: a new option of a client would be missing from
# the latter, and be shown.
_HARMLESS: Final = frozenset(
    {"account", "account_name", "allow_http", "bucket", "endpoint", "region", "timeout"}
)
_USER_IN_URL: Final = re.compile(r"(?<=//)[^/?#]*@")


def veiled_url(url: str) -> str:
    """Return a URL with its user and password veiled, if it has them."""
    return _USER_IN_URL.sub(f"{VEIL}@", url)


def veiled_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return options or headers with all values veiled that may be secrets."""
    return {
        key: veiled_url(value) if key.lower() in _HARMLESS else VEIL
        for key, value in options.items()
    }


def veiled_document(document: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return a configuration as `config_to_json` makes it, with its secrets veiled."""
    containers = document.get("virtual_chunk_containers")
    if not isinstance(containers, dict):
        return dict(document)
    shown: dict[str, JSON] = {}
    for position, (prefix, container) in enumerate(containers.items()):
        key = veiled_url(prefix)
        # Two users at one host are two containers, though they look alike.
        shown[key if key not in shown else f"{key}#{position}"] = _veiled_container(container)
    return {**document, "virtual_chunk_containers": shown}


def is_veiled(value: JSON) -> bool:
    """Return whether there is a veil in what is about to be stored."""
    match value:
        case str():
            # A document that was copied from what a command shows must not replace secrets by
            # asterisks.
            return value == VEIL or f"//{VEIL}@" in value
        case dict():
            return any(is_veiled(key) or is_veiled(it) for key, it in value.items())
        case list():
            return any(is_veiled(it) for it in value)
        case _:
            return False


def _veiled_container(container: JSON) -> JSON:
    if not isinstance(container, dict):
        return container
    shown = {key: veiled_url(it) if isinstance(it, str) else it for key, it in container.items()}
    store = container.get("store")
    if isinstance(store, dict):
        shown["store"] = {kind: _veiled_store(kind, value) for kind, value in store.items()}
    return shown


def _veiled_store(kind: str, value: JSON) -> JSON:
    if not isinstance(value, dict):
        return value
    if kind in {"s3", "s3_compatible", "tigris"}:  # these have no secrets but in their URL
        return {key: veiled_url(it) if isinstance(it, str) else it for key, it in value.items()}
    texts = veiled_options({key: it for key, it in value.items() if isinstance(it, str)})
    headers = value.get("headers")
    inner = {"headers": dict.fromkeys(headers, VEIL)} if isinstance(headers, dict) else {}
    return {**texts, **inner}
