"""Where a bucket is and how to get there: asked of botocore once, and then remembered.

What botocore answers depends on options, environment and configuration files. The answers of this
process are kept by all of these, so that opening a storage again costs a look at two files.
"""

from __future__ import annotations

import os
import ssl
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

if TYPE_CHECKING:
    from icechunk_async_s3.options import Options
    from icechunk_async_s3.stock import Stock

__all__ = ["Route", "find_route"]

_AWS_DOMAINS: Final = (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu")
_KEPT: Final = 64
_SETTINGS: Final = ("AWS_", "BOTO", "HOME")
"""With what the names of settings begin that may change an answer."""
_KEYS: Final = frozenset({"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"})
"""They do not change where a bucket is, and are not to be kept."""
_FILES: Final = (
    ("AWS_CONFIG_FILE", "~/.aws/config"),
    ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
)


@dataclass(frozen=True, slots=True)
class Route:
    """The way to a bucket; plain data but for the TLS context, and the same for all loops."""

    base_url: str
    """The bucket's URL, ending in ``/``; keys follow."""
    path: str
    """Of ``base_url``."""
    host: str
    """As it stands in the ``Host`` header."""
    region: str
    is_aws: bool
    """Whether the bucket is at AWS, and not at a server that speaks the protocol."""
    tls: ssl.SSLContext | None
    proxy: str | None


_Where = tuple[str, str, str | None]
_places: OrderedDict[object, _Where] = OrderedDict()
_contexts: dict[object, ssl.SSLContext] = {}


def find_route(options: Options, bucket: str, stock: Stock) -> Route:
    """Return the way to a bucket; reads files, so not on an event loop.

    Args:
        options: of the storage.
        bucket: its name.
        stock: asked where no answer is remembered, which takes tens of milliseconds.

    Raises:
        InvalidInputError: botocore cannot make sense of an option or of the configuration.
    """
    known_by = _decisive(options, bucket)
    found = _places.get(known_by)
    if found is None:
        found = stock.where()
        _places[known_by] = found
        while len(_places) > _KEPT:
            _places.popitem(last=False)
    base_url, region, authorities = found
    parts = urlsplit(base_url)
    secure = parts.scheme == "https"
    name = parts.hostname or ""
    shown = f"[{name}]" if ":" in name else name
    return Route(
        base_url,
        "/" + base_url.split("/", 3)[3],
        shown if parts.port in (None, 443 if secure else 80) else f"{shown}:{parts.port}",
        region,
        name.endswith(_AWS_DOMAINS),
        _tls(authorities or get_cert_path(True)) if secure else None,  # noqa: FBT003
        get_environ_proxies(base_url).get("https" if secure else "http"),
    )


def _decisive(options: Options, bucket: str) -> object:
    """Return all that botocore's answer depends on."""
    settings = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_SETTINGS) and name not in _KEYS
    }
    files = [_state(Path(settings.get(name, default)).expanduser()) for name, default in _FILES]
    return (
        bucket,
        options.endpoint_url,
        options.region,
        options.force_path_style,
        options.anonymous,
        options.profile,
        frozenset(settings.items()),
        *files,
    )


def _state(path: Path) -> object:
    """Return what changes when a file does."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _tls(authorities: Any) -> ssl.SSLContext:
    """Return what trusts the authorities in a file; reading them takes 20 milliseconds."""
    known_by = (authorities, _state(Path(authorities)))
    context = _contexts.get(known_by)
    if context is None:
        context = ssl.create_default_context(cafile=authorities)
        if len(_contexts) >= _KEPT:
            _contexts.clear()
        _contexts[known_by] = context
    return context
