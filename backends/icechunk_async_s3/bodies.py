"""The bytes of a request and of its answer, copied as seldom as aiohttp allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import ClientResponse

    from icechunk_async.storage import Data

    type Body = bytes | memoryview

__all__ = ["as_bytes", "body_to_send", "receive"]

_PIECE_BYTES: Final = 256 * 1024


def as_bytes(data: Data) -> Body:
    """Return what is to be written, item by item a byte; not copied where that is safe.

    Of an array, which is what zarr writes, the bytes are copied as they are sent, see
    :func:`body_to_send`. What could be resized by its owner, who must not be hindered once a write
    was cancelled, is copied here.
    """
    if isinstance(data, bytes):
        return data
    if (
        isinstance(data, memoryview)
        and isinstance(data.obj, bytes | np.ndarray)
        and data.c_contiguous
    ):
        return data.cast("B") if data.nbytes else b""
    return bytes(data)


def body_to_send(body: Body) -> bytes | AsyncIterator[Body]:
    """Return a body for aiohttp; a large one in pieces, between which the loop does other things.

    A connection that is given up still sends what it was given. That must not change any more, so
    it is given copies of what its owner may change after a cancellation: of a large body one piece,
    which the processor has at hand when it is sent.
    """
    return bytes(body) if len(body) <= _PIECE_BYTES else _pieces(memoryview(body))


async def _pieces(view: memoryview) -> AsyncIterator[Body]:
    fixed = isinstance(view.obj, bytes)
    for start in range(0, len(view), _PIECE_BYTES):
        piece = view[start : start + _PIECE_BYTES]
        yield piece if fixed else bytes(piece)


async def receive(response: ClientResponse, into: memoryview | None) -> Body:
    """Return the body of an answer: ``into``, filled, if it is a part of exactly that length."""
    if into is None or response.status != 206 or response.content_length != len(into):
        return await response.read()
    filled = 0
    async for piece, _ in response.content.iter_chunks():
        into[filled : filled + len(piece)] = piece
        filled += len(piece)
    # A connection that ends early is an error of aiohttp's, and it takes no more than was told.
    assert filled == len(into)
    return into
