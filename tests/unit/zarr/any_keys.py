"""A store for any key and any bytes, made of the Icechunk store: for suites that need one.

Zarr's suite for stores writes keys such as ``foo`` and values such as nothing at all, which no
Icechunk store can hold: it holds metadata documents and chunks. Here the value of key ``k`` is
the one chunk of an array without axes at path ``k``, behind a byte that makes it longer than
nothing. Every operation is one of the store under test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, override

from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import default_buffer_prototype

from icechunk_async import IcechunkStore
from tests.helpers import array_document

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from zarr.core.buffer import Buffer, BufferPrototype

    from icechunk_async.session import AnySession

__all__ = ["AnyKeyStore"]

_SCALAR = array_document((), ())


class AnyKeyStore(Store):
    """Translates keys and ranges; all else is the wrapped store's."""

    def __init__(self, session: AnySession, *, read_only: bool = False) -> None:
        super().__init__(read_only=read_only)
        self.inner = IcechunkStore(session, read_only=read_only)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyKeyStore) and self.inner == other.inner

    def __hash__(self) -> int:
        return hash(self.inner)

    def __repr__(self) -> str:
        return f"AnyKeyStore({self.inner!r})"

    @override
    def with_read_only(self, read_only: bool = False) -> AnyKeyStore:
        return AnyKeyStore(self.inner.session, read_only=read_only)

    @property
    @override
    def supports_writes(self) -> bool:
        return self.inner.supports_writes

    @property
    @override
    def supports_deletes(self) -> bool:
        return self.inner.supports_deletes

    @property
    @override
    def supports_listing(self) -> bool:
        return self.inner.supports_listing

    @override
    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        await self._ensure_open()
        size = len(await self.inner.get(f"{key}/c", prototype) or b"") - 1
        return await self.inner.get(f"{key}/c", prototype, _shift(byte_range, size))

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """As `get`, without a loop."""
        size = len(self.inner.get_sync(f"{key}/c") or b"") - 1
        return self.inner.get_sync(
            f"{key}/c", prototype=prototype, byte_range=_shift(byte_range, size)
        )

    @override
    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        shifted = []
        for key, byte_range in key_ranges:
            size = await self.inner.getsize(f"{key}/c") - 1
            shifted.append((f"{key}/c", _shift(byte_range, size)))
        return await self.inner.get_partial_values(prototype, iter(shifted))

    @override
    async def exists(self, key: str) -> bool:
        return await self.inner.exists(f"{key}/c")

    @override
    async def getsize(self, key: str) -> int:
        return await self.inner.getsize(f"{key}/c") - 1

    @override
    async def set(self, key: str, value: Buffer) -> None:
        await self._ensure_open()
        self._check_writable()
        await self.inner.set(f"{key}/zarr.json", _buffer(_SCALAR))
        await self.inner.set(f"{key}/c", _buffer(b"\0" + value.to_bytes()))

    def set_sync(self, key: str, value: Buffer) -> None:
        """As `set`, without a loop."""
        self._check_writable()
        self.inner.set_sync(f"{key}/zarr.json", _buffer(_SCALAR))
        self.inner.set_sync(f"{key}/c", _buffer(b"\0" + value.to_bytes()))

    @override
    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        await self.inner.set_if_not_exists(f"{key}/zarr.json", _buffer(_SCALAR))
        await self.inner.set_if_not_exists(f"{key}/c", _buffer(b"\0" + value.to_bytes()))

    @override
    async def delete(self, key: str) -> None:
        self._check_writable()
        await self.inner.delete(f"{key}/zarr.json")

    def delete_sync(self, key: str) -> None:
        """As `delete`, without a loop."""
        self.inner.delete_sync(f"{key}/zarr.json")

    @override
    async def delete_dir(self, prefix: str) -> None:
        await self.inner.delete_dir(prefix)

    @override
    async def clear(self) -> None:
        await self.inner.clear()

    @override
    async def list(self) -> AsyncIterator[str]:
        async for key in self.list_prefix(""):
            yield key

    @override
    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        async for key in self.inner.list_prefix(prefix):
            if key.endswith("/c"):
                yield key.removesuffix("/c")

    @override
    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        is_key = await self.inner.exists(f"{prefix.strip('/')}/zarr.json")
        async for name in self.inner.list_dir(prefix):
            if not (is_key and name in {"zarr.json", "c"}):
                yield name


def _shift(byte_range: Any, size: int) -> ByteRequest | None:
    """Leave out the byte before the value."""
    match byte_range:
        case None:
            return OffsetByteRequest(1)
        case RangeByteRequest(start, end):
            return RangeByteRequest(start + 1, end + 1)
        case OffsetByteRequest(offset):
            return OffsetByteRequest(offset + 1)
        case SuffixByteRequest(suffix):
            return SuffixByteRequest(min(suffix, size))
        case other:
            unknown: ByteRequest = other
            return unknown  # for the store under test to refuse


def _buffer(data: bytes) -> Buffer:
    return default_buffer_prototype().buffer.from_bytes(data)
