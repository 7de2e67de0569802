"""The file system of fsspec: the keys of a hierarchy as files, read-only.

``icechunk://s3://bucket/repo/|icechunk:@branch.main/group/zarr.json`` is a file of it. Where
another package uses the scheme ``icechunk``, ``icechunk-async://`` does the same, but for Zarr,
which knows no scheme with a hyphen. It is for programs that know fsspec and not Zarr's stores;
others are quicker with `open_url`.
"""

# fsspec has no types.
# pyright: basic

from __future__ import annotations

import errno
import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype

from icechunk_async._runtime.blocking.portal import run
from icechunk_async.errors import InvalidStoreKeyError
from icechunk_async.sync.urls import repository_at, session_at
from icechunk_async.urls import SCHEMES, IcechunkURL

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from zarr.abc.store import ByteRequest

    from icechunk_async.session import AnySession
    from icechunk_async.sync.session import Session

__all__ = ["IcechunkFileSystem"]


class IcechunkFileSystem(AbstractFileSystem):  # type: ignore[misc]  # without types
    """The hierarchy of one session; paths are the keys of Zarr, such as ``group/zarr.json``.

    It opens the repository at its first use, and reads a branch at its tip of that moment.
    """

    protocol: ClassVar[tuple[str, ...]] = SCHEMES
    # fsspec would keep instances by their arguments, and a branch would stay at an old tip for the
    # life of the process.
    cachable = False
    root_marker = ""

    def __init__(
        self, url: str = "", *, target_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Open nothing yet.

        Args:
            url: of the repository and the ref; fsspec takes it from the path.
            target_options: the options of the storage backend, credentials among them.
            kwargs: of every file system.
        """
        super().__init__(**kwargs)
        self._url = IcechunkURL.parse(url)
        self._options = target_options
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        """The session that is read; the first use blocks to open it."""
        if self._session is None:
            repository = repository_at(self._url, storage_options=self._options)
            self._session = session_at(repository, self._url)
        return self._session

    def _ask[T](self, question: Callable[[AnySession], Coroutine[Any, Any, T]]) -> T | None:
        """Ask the session; return None only for a path that is no key.

        Programs take a missing key for a chunk that was never written, and show fill values. So
        nothing else may look like one: no chunk that cannot be read, and no wrong ref.
        """
        try:
            return run(self.session.handle.ask(question))
        except InvalidStoreKeyError:
            return None
        except KeyError as error:  # what is not found here is no key
            raise OSError(errno.EIO, str(error)) from error

    @classmethod
    def _inner(cls, path: str) -> IcechunkURL | None:
        """Return the URL in a path, if there is one."""
        for scheme in SCHEMES:
            start = f"{scheme}://"
            if path.startswith(start):
                return IcechunkURL.parse(path.removeprefix(start))
        return None

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(it) for it in path]
        url = cls._inner(str(path))
        return str(path).strip("/") if url is None else url.group

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        url = IcechunkFileSystem._inner(path)
        return {} if url is None else {"url": str(replace(url, path="/"))}

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
        """List what is directly below a path."""
        del kwargs
        path = self._strip_protocol(path)

        async def found(session: AnySession) -> list[str]:
            return [it async for it in session.store.list_dir(path)]

        names = self._ask(found) or []
        # A key has nothing below it, and is listed by fsspec as itself.
        if not names:
            info = self.info(path)  # raises if there is no such key
            if info["type"] == "file":
                return [info] if detail else [path]
        paths = sorted(f"{path}/{name}" if path else name for name in names)
        return [self.info(it) for it in paths] if detail else paths

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Return the size of a key, or that a path has keys below it."""
        del kwargs
        path = self._strip_protocol(path)

        async def look(session: AnySession) -> dict[str, Any] | None:
            store = session.store
            if path and await store.exists(path):
                size = await store.getsize(path)
                return {"name": path, "size": size, "type": "file"}
            # The first entry decides; a folder may have millions of chunks.
            async for _ in store.list_dir(path):
                return {"name": path, "size": 0, "type": "directory"}
            return {"name": path, "size": 0, "type": "directory"} if not path else None

        found = self._ask(look)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "There is no such key", path)
        return found

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Return whether there is a key or keys below it; errors are not taken for no."""
        try:
            self.info(path, **kwargs)
        except FileNotFoundError:
            return False
        return True

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """Return the bytes of a key, or a part of them, as a slice does; reads that part alone."""
        del kwargs
        path = self._strip_protocol(path)
        wanted = _request(start, end)

        async def read(session: AnySession) -> bytes | None:
            value = await session.store.get(path, default_buffer_prototype(), wanted)
            return None if value is None else value.to_bytes()

        data = self._ask(read)
        if data is None:
            raise FileNotFoundError(errno.ENOENT, "There is no such key", path)
        return data if wanted is not None else data[start:end]

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> io.BytesIO:
        del kwargs
        if mode != "rb":
            raise OSError(
                errno.EROFS, "Files of a snapshot cannot be written; commit with a session"
            )
        return io.BytesIO(self.cat_file(path))


def _request(start: int | None, end: int | None) -> ByteRequest | None:
    """Return the byte request for a slice; None for all of the bytes, to be sliced."""
    first = start or 0
    if end is not None:
        # Counted from the end, places are not known before the number of bytes is.
        return RangeByteRequest(first, end) if min(first, end) >= 0 else None
    if not first:
        return None
    return OffsetByteRequest(first) if first > 0 else SuffixByteRequest(-first)
