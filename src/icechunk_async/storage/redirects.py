"""Repositories behind redirects: a web server that says in which storage they are."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import parse_qsl, urljoin, urlsplit

from icechunk_async.errors import MissingDriverError, StorageError

__all__ = ["follow", "read_location"]

_MOST_HOPS: Final = 10
_SECONDS: Final = 30.0
_S3: Final[dict[str, dict[str, Any]]] = {
    "s3": {},
    "tigris": {"endpoint_url": "https://t3.storage.dev", "region": "auto"},
    "r2": {"region": "auto", "force_path_style": True},
}


async def follow(url: str) -> tuple[str, dict[str, object]]:
    """Follow the redirects of web servers to the place of a repository.

    Returns: a location and options for reading it without credentials.

    Raises:
        StorageError: a server does not redirect, or redirects to an unknown kind of place.
        MissingDriverError: aiohttp is not installed.

    Cost: one request for each redirect, ten at most.
    """
    try:
        import aiohttp  # noqa: PLC0415 - of the extra "http"
    except ModuleNotFoundError as error:
        raise MissingDriverError(
            "redirect_storage needs the Python module 'aiohttp', which is not installed. Install "
            "it with: pip install 'icechunk-async[http]'",
            module="aiohttp",
        ) from error
    timeout = aiohttp.ClientTimeout(total=_SECONDS)
    here = url
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
        for _ in range(_MOST_HOPS):
            try:
                # Followed by hand: aiohttp knows no ``s3://``.
                async with session.get(here, allow_redirects=False) as reply:
                    # Only the head is read; the body may have any length.
                    status, target = reply.status, reply.headers.get("Location")
            except (aiohttp.ClientError, TimeoutError) as error:
                raise _lost(url, f"{here!r} does not respond ({error})") from error
            if not 300 <= status < 400 or not target:
                raise _lost(url, f"{here!r} returned status {status} and no place to go to")
            try:
                there = urljoin(here, target)
                found = read_location(there)
            except ValueError as error:
                why = f"{here!r} redirects to {target[:200]!r}, which is no URL"
                raise _lost(url, why) from error
            if found is not None:
                return found
            here = there
    raise _lost(url, f"there are more than {_MOST_HOPS} redirects")


def read_location(target: str) -> tuple[str, dict[str, object]] | None:
    """Return the storage that the target of a redirect names; None for another server.

    Raises:
        StorageError: this library has no such scheme.
    """
    parts = urlsplit(target)
    query = dict(parse_qsl(parts.query))
    place = f"{parts.netloc}{parts.path}"
    match parts.scheme:
        case "http" | "https":
            return None
        case "s3" | "tigris" | "r2":
            # Without credentials, and for reading: a web server must not choose where the caller's
            # keys are sent. It may name a region and an endpoint, and nothing else.
            options: dict[str, Any] = {**_S3[parts.scheme], "anonymous": True, "read_only": True}
            options |= {name: query[name] for name in ("region", "endpoint_url") if name in query}
            if parts.scheme == "r2" and "account_id" in query:
                account = query["account_id"]
                options["endpoint_url"] = f"https://{account}.r2.cloudflarestorage.com"
            return f"s3://{place}", options
        case "gs" | "gcs":
            return f"gs://{place}", {"token": "anonymous", "read_only": True}
        case "http+icechunk" | "https+icechunk":
            return f"{parts.scheme.partition('+')[0]}://{place}", {}
        case _:
            raise _lost(target, f"this library knows no storage with the scheme {parts.scheme!r}")


def _lost(url: str, why: str) -> StorageError:
    return StorageError(
        f"redirect_storage({url!r}) leads to no storage: {why}. Give the URL of a server that "
        "redirects to s3://, gs://, tigris://, r2:// or http+icechunk://.",
        code="bad-redirect",
    )
