"""Open a storage by URL, through the entry points of installed backends.

A backend registers itself in the entry point group ``icechunk_async.backends``, under its URL
scheme, as a callable ``open(url, **options)`` that returns an asynchronous context manager of a
`Storage`. A name that ends with ``+`` serves every scheme that begins with it and has no backend
registered for itself; of several backends for a scheme, one of this distribution is taken. A
callable that writes when it opens a storage, even only to try what can be promised, must take an
option ``read_only`` that prevents it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from icechunk_async.errors import (
    InvalidInputError,
    InvalidURLError,
    MissingDriverError,
    UnknownSchemeError,
    WrongTypeError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping
    from contextlib import AbstractAsyncContextManager
    from importlib.metadata import EntryPoint

    from icechunk_async.storage.protocol import Storage, StorageDescription

__all__ = ["GROUP", "OpenBackend", "installed_schemes", "normalize_url", "open_storage", "reopen"]

GROUP: Final = "icechunk_async.backends"
"""The entry point group in which backends register."""

_DISTRIBUTION: Final = "icechunk-async"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/(?!/).*)", re.DOTALL)
"""A URL without a host, as Hadoop and Spark write some. A drive letter is no scheme."""
_AZURE = re.compile(r"[a-z]+://([^@/]+)@([^./]+)\.[^/]*(/.*)?", re.IGNORECASE | re.DOTALL)
_HADOOP: Final = {
    **dict.fromkeys(("s3a", "s3n"), "s3"),
    **dict.fromkeys(("abfs", "abfss", "wasb", "wasbs", "azure"), "az"),
    **dict.fromkeys(("gcs",), "gs"),
    **dict.fromkeys(("hdfs", "viewfs", "webhdfs", "dbfs"), "fsspec+{}"),
}
"""The schemes here for what Hadoop, Spark and Databricks name otherwise."""
_WITHOUT_DRIVER: Final = {
    "file": "icechunk_async_local:open_local",
    "memory": "icechunk_async_memory:open_memory",
}
"""The entry points of backends that always can be imported.

To look for entry points takes longer than to import and open the one for files.
"""
_EXTRAS: Final = {
    "s3": "s3",
    "gs": "gcs",
    "az": "azure",
    "http": "http",
    "https": "http",
    "obstore+s3": "obstore",
    "obstore+gs": "obstore",
    "obstore+az": "obstore",
    "fsspec+": "fsspec",
}
"""The extra of this distribution that installs the driver of a scheme."""
_loaded: Final[dict[str, OpenBackend]] = {}
_parameters: Final[dict[OpenBackend, Mapping[str, inspect.Parameter]]] = {}


class OpenBackend(Protocol):
    """The signature of a backend's entry point."""

    def __call__(self, url: str, **options: object) -> AbstractAsyncContextManager[Storage]:
        """Return a context manager that opens ``url``; nothing is opened before it is entered."""
        ...


def normalize_url(location: str | os.PathLike[str]) -> str:
    """Return a URL for ``location``, its scheme in lower case; a path becomes a ``file://`` URL.

    ``file:/data``, as Spark writes it, is ``file:///data``.

    Raises:
        InvalidURLError: it is empty, or has one slash after another scheme, such as ``dbfs:/data``.
        WrongTypeError: it is neither text nor a path object.
    """
    if not isinstance(location, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise WrongTypeError(
            f"A storage is named by a text, which is a URL or path, or by a path object, not by a "
            f"{type(location).__name__}."
        )
    text = os.fspath(location)
    if not text:
        raise InvalidURLError(
            "The storage URL is empty. Give a path or a URL such as 'file:///data/repo' or "
            "'memory://name'."
        )
    match = _SCHEME.match(text)
    if match is not None:
        return match[1].lower() + text[match.end(1) :]
    match = _ONE_SLASH.match(text)
    if match is not None:
        return _with_one_slash(text, match[1].lower(), match[2])
    return Path(text).expanduser().absolute().as_uri()


def _with_one_slash(text: str, scheme: str, path: str) -> str:
    if scheme == "file":
        return f"file://{path}"
    # As a path it would be a directory below the working directory, on each machine another.
    advice = (
        "On Databricks give the URL of the bucket (s3://, az:// or gs://), or a path that every "
        f"machine sees, such as '/dbfs{path}' or '/Volumes/...'."
        if scheme == "dbfs"
        else f"Write {scheme}:// with two slashes, or './{text}' for a directory of that name."
    )
    raise InvalidURLError(f"{text!r} has one slash after its scheme. {advice}", url=text)


def installed_schemes() -> list[str]:
    """Return the URL schemes that installed backends serve, sorted."""
    from importlib.metadata import entry_points  # noqa: PLC0415 -- slow to import

    return sorted({point.name for point in entry_points(group=GROUP)})


@asynccontextmanager
async def open_storage(
    location: str | os.PathLike[str], **options: object
) -> AsyncGenerator[Storage]:
    """Open the storage at a path or URL for the length of an ``async with`` block.

    Args:
        location: a path, or a URL whose scheme an installed backend serves.
        options: the backend's own keyword arguments; its documentation lists them. Every backend
            accepts ``read_only=True``: nothing is written, not even to try what the storage can
            promise.

    Raises:
        InvalidURLError: the URL cannot be understood.
        UnknownSchemeError: no installed backend serves its scheme.
        MissingDriverError: the backend's driver package is not installed.
        InvalidInputError: the backend has no such option.
    """
    if isinstance(location, str) and _SCHEME.match(location):
        url = normalize_url(location)
    else:  # expanding a path asks the file system
        url = await asyncio.to_thread(normalize_url, location)
    scheme = url.partition("://")[0]
    backend = _loaded.get(scheme)
    if backend is None:  # looking for entry points and importing reads many files
        backend = await asyncio.to_thread(_load, scheme, url)
        # Of two tasks that load it at the same time both get the same callable.
        _loaded[scheme] = backend
    parameters = _parameters.get(backend)
    if parameters is None:  # finding them takes longer than all that follows
        parameters = _parameters[backend] = inspect.signature(backend).parameters
    if "read_only" not in parameters:  # opening such a storage writes nothing anyway
        options.pop("read_only", None)
    _check_options(parameters, scheme, options)
    async with backend(url, **options) as storage:
        yield storage


def reopen(description: StorageDescription) -> AbstractAsyncContextManager[Storage]:
    """Open the storage that ``description`` was taken from.

    Raises:
        IcechunkError: as `open_storage`.
    """
    return open_storage(description.url, **description.options)


def _points(name: str) -> Iterator[EntryPoint]:
    """Yield the entry points of a name, those of this distribution first.

    To look for others reads a file of every installed distribution.
    """
    # Slow to import.
    from importlib.metadata import (  # noqa: PLC0415
        PackageNotFoundError,
        distribution,
        entry_points,
    )

    with suppress(PackageNotFoundError):  # copied to where it runs
        yield from distribution(_DISTRIBUTION).entry_points.select(group=GROUP, name=name)
    yield from entry_points(group=GROUP, name=name)


def _find(scheme: str, url: str) -> EntryPoint:
    family, plus, _ = scheme.partition("+")
    # A backend of the very scheme goes before one of its family: ``obstore+s3`` before
    # ``obstore+``.
    for name in (scheme, f"{family}+") if plus else (scheme,):
        for point in _points(name):
            return point
    raise UnknownSchemeError(
        f"No backend serves {scheme}:// (asked for {_plain(url)!r}). {_translated(scheme, url)}"
        f"Installed schemes: {', '.join(installed_schemes()) or 'none'}. Install a backend for "
        f"{scheme!r}, or use one of these.",
        scheme=scheme,
        installed=installed_schemes(),
    )


def _plain(url: str) -> str:
    """Return a URL without a user, a password or a query, which may be secret."""
    return re.sub(r"//[^/]*@", "//", url.partition("?")[0])


def _translated(scheme: str, url: str) -> str:
    """Return advice on a URL of Hadoop; empty for others."""
    ours = _HADOOP.get(scheme)
    if ours is None:
        return ""
    azure = _AZURE.fullmatch(url) if ours == "az" else None
    if azure is not None:
        container, account, path = azure.groups()
        here = f"az://{container}{path or ''}"
        return f"Write {here!r}, with the option account_name={account!r}. "
    return f"Write {ours.format(scheme) + url[len(scheme) :]!r}. "


def _load(scheme: str, url: str) -> OpenBackend:
    backend: OpenBackend
    if scheme in _WITHOUT_DRIVER:
        module, _, name = _WITHOUT_DRIVER[scheme].partition(":")
        with suppress(ModuleNotFoundError):  # the entry point says what is missing
            backend = getattr(import_module(module), name)
            return backend
    point = _find(scheme, url)
    try:
        backend = point.load()
    except ModuleNotFoundError as error:
        distribution = point.dist.name if point.dist else "the backend's distribution"
        extra = f"[{_EXTRAS[point.name]}]" if point.name in _EXTRAS else ""
        raise MissingDriverError(
            f"The backend for {scheme}:// needs the Python module {error.name!r}, which is not "
            f"installed. Install it with: pip install '{distribution}{extra}'",
            scheme=scheme,
            module=error.name,
        ) from error
    return backend


def _check_options(
    parameters: Mapping[str, inspect.Parameter], scheme: str, options: dict[str, object]
) -> None:
    """Raise the same error for an unknown option of any backend."""
    unknown = sorted(
        it
        for it in options
        if it not in parameters or parameters[it].kind is not inspect.Parameter.KEYWORD_ONLY
    )
    if unknown:
        kinds = {it.kind for it in parameters.values()}
        if inspect.Parameter.VAR_KEYWORD in kinds:
            return
        known = sorted(p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY)
        raise InvalidInputError(
            f"{scheme}:// storages have no option {', '.join(map(repr, unknown))}. "
            f"Options: {', '.join(known) or 'none'}.",
            scheme=scheme,
            unknown=unknown,
            known=known,
        )
