"""Any fsspec file system: ``fsspec+<protocol>://path``, such as ``fsspec+sftp://host/data``.

It reads from any file system, and writes to those that create objects in one exclusive step.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread
import fsspec  # type: ignore[import-untyped, unused-ignore]

from icechunk_async.errors import InvalidInputError, InvalidURLError, MissingDriverError
from icechunk_async.storage import StorageDescription
from icechunk_async_fsspec.probe import why_not_exclusive
from icechunk_async_fsspec.storage import Folder, FsspecStorage, capabilities

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

__all__ = ["FsspecStorage", "open_filesystem", "open_fsspec"]

_SCHEME: Final = "fsspec+"
_READ_ONLY: Final = "it was opened with read_only=True; open it without to write"
# fsspec shares instances with equal arguments, and keeps listings: what other processes write would
# not be seen.
_FRESH: Final[Mapping[str, object]] = {"skip_instance_cache": True, "use_listings_cache": False}


@asynccontextmanager
async def open_fsspec(
    url: str, *, filesystem_options: Mapping[str, object] | None = None, read_only: bool = False
) -> AsyncGenerator[FsspecStorage]:
    """Open a folder of the file system that fsspec has for a protocol.

    Unless ``read_only``, a temporary object is written and removed, to find out whether creation is
    exclusive. The capabilities of the storage hold the result.

    Args:
        url: ``fsspec+`` and a URL that fsspec understands.
        filesystem_options: keyword arguments of the file system; its documentation lists them.
        read_only: write nothing.

    Raises:
        InvalidURLError: the URL has no protocol, or fsspec knows none of this name.
        InvalidInputError: the file system does not take these options.
        MissingDriverError: the file system's package is not installed.
    """
    protocol, separator, rest = url.removeprefix(_SCHEME).partition("://")
    if not url.startswith(_SCHEME) or not separator or not protocol:
        raise InvalidURLError(
            "The URL names no fsspec file system. Use 'fsspec+<protocol>://path', such as "
            "'fsspec+sftp://host/data'."
        )
    user, at, _ = rest.partition("/")[0].rpartition("@")
    if at and ":" in user:
        raise InvalidURLError(
            f"A {protocol}:// URL with a password would show it in logs. Give it in "
            "'filesystem_options' instead.",
            protocol=protocol,
        )
    options = dict(filesystem_options or {})
    plain = url.removeprefix(_SCHEME)
    make = partial(_make, protocol, plain, options)
    filesystem, path = await anyio.to_thread.run_sync(make)
    given: dict[str, object] = {"filesystem_options": options} if options else {}
    if read_only:
        given["read_only"] = True
    description = StorageDescription(url, given)
    storage = await _open(filesystem, path, lambda: make()[0], description, read_only=read_only)
    async with storage:
        yield storage


@asynccontextmanager
async def open_filesystem(
    filesystem: Any, path: str, *, read_only: bool = False
) -> AsyncGenerator[FsspecStorage]:
    """Open a folder of a file system that the caller has created.

    Its description opens an equal file system by its protocol and options, and so do workers.

    Args:
        filesystem: an instance of ``fsspec.AbstractFileSystem`` that is not ``asynchronous``.
        path: the folder, as the file system names it.
        read_only: write nothing, as for `open_fsspec`.

    Raises:
        InvalidInputError: the instance belongs to one event loop.
    """
    if getattr(filesystem, "asynchronous", False):
        raise InvalidInputError(
            "This file system was made with asynchronous=True, so it belongs to one event loop. "
            "Make it without; it is used on threads."
        )
    protocol = filesystem.protocol
    protocol = protocol if isinstance(protocol, str) else protocol[0]
    options = dict(filesystem.storage_options)
    given: dict[str, object] = {"filesystem_options": options} if options else {}
    if read_only:
        given["read_only"] = True
    url = f"{_SCHEME}{protocol}://{path}"

    def again() -> Any:
        return type(filesystem)(*filesystem.storage_args, **options, **_FRESH)

    folder = path.rstrip("/")
    description = StorageDescription(url, given)
    storage = await _open(filesystem, folder, again, description, read_only=read_only)
    async with storage:
        yield storage


async def _open(
    filesystem: Any,
    path: str,
    again: Callable[[], Any],
    description: StorageDescription,
    *,
    read_only: bool,
) -> FsspecStorage:
    why: str | None = _READ_ONLY
    if not read_only:
        why = await anyio.to_thread.run_sync(why_not_exclusive, again, path)
    # A text, or several in a tuple.
    shared = "memory" not in filesystem.protocol
    return FsspecStorage(Folder(filesystem, path), capabilities(why, shared=shared), description)


def _make(protocol: str, url: str, options: Mapping[str, object]) -> tuple[Any, str]:
    """Create a file system, and return it with the folder within it. Blocks."""
    try:
        kind: Any = fsspec.get_filesystem_class(protocol)  # pyright: ignore[reportUnknownMemberType]
    except ValueError:
        raise InvalidURLError(
            f"fsspec knows no file system for {protocol!r}. Protocols that it knows are listed by "
            "fsspec.available_protocols().",
            protocol=protocol,
        ) from None
    except ImportError as error:
        raise MissingDriverError(
            f"fsspec's file system for {protocol!r} needs a package that is not installed "
            f"({error.name or 'see its documentation'}). Install that.",
            protocol=protocol,
        ) from None
    try:
        from_url: dict[str, object] = kind._get_kwargs_from_urls(url)  # noqa: SLF001 - fsspec's way
        path = str(kind._strip_protocol(url))  # noqa: SLF001 - as above
        filesystem = kind(**(from_url | dict(options) | dict(_FRESH)))
    except Exception as error:  # noqa: BLE001 - texts may hold secrets
        name = type(error).__name__
    else:
        return filesystem, path.rstrip("/")
    raise InvalidInputError(
        f"fsspec's file system for {protocol!r} could not be made from the URL and the "
        f"'filesystem_options' ({name}). Check them.",
        protocol=protocol,
    )
