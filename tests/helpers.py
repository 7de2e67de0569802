"""Small pieces that several tests share."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from hypothesis import settings
from zarr.core.buffer import default_buffer_prototype

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from icechunk_async import Session
    from icechunk_async.session import AnySession
    from icechunk_async.storage import Storage

__all__ = [
    "NO_ARRAY_DOCUMENTS",
    "array_document",
    "cancelled_when",
    "counted_calls",
    "examples",
    "group_document",
    "make_array",
    "memory_url",
    "objects",
    "read",
    "set_document",
    "until",
    "write",
]


NO_ARRAY_DOCUMENTS: list[bytes | dict[str, Any]] = [
    b"{",
    b"[]",
    b"{}",
    b"[" * 100_000,
    {"shape": [3, 3]},
    {"shape": None},
    {"node_type": "group"},
    {"chunk_grid": 5},
]
"""For `set_document`: what is not the document of an array of one axis with a regular grid."""


def examples(count: int) -> settings:
    """Return Hypothesis settings for ``count`` examples, of which most runs try an eighth.

    Each run tries others. ``EXAMPLES=all`` in the environment, as in tox's thorough, means all.
    """
    share = 1 if os.environ.get("EXAMPLES") == "all" else 8
    return settings(max_examples=max(count // share, 12), deadline=None)


def memory_url() -> str:
    """Return a URL of memory that nobody else uses."""
    return f"memory://{uuid4()}"


def group_document(**attributes: object) -> bytes:
    """Return a ``zarr.json`` of a group."""
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes}).encode()


def array_document(shape: tuple[int, ...], chunks: tuple[int, ...], **more: Any) -> bytes:
    """Return a ``zarr.json`` of an array of bytes, without compression."""
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": [{"name": "bytes"}],
            "attributes": {},
            **more,
        }
    ).encode()


async def write(session: AnySession, key: str, data: bytes) -> None:
    """Write a value through the session's store."""
    await session.store.set(key, default_buffer_prototype().buffer.from_bytes(data))


async def read(session: AnySession, key: str) -> bytes | None:
    """Read a value through the session's store."""
    value = await session.store.get(key, default_buffer_prototype())
    return None if value is None else value.to_bytes()


async def make_array(
    session: AnySession, path: str, shape: tuple[int, ...], chunks: tuple[int, ...], **more: Any
) -> None:
    """Create an array."""
    await write(session, f"{path}/zarr.json", array_document(shape, chunks, **more))


async def objects(storage: Storage) -> dict[str, bytes]:
    """Return every object of a storage."""
    found: dict[str, bytes] = {}
    async for entry in storage.list_prefix():
        key = getattr(entry, "key")  # noqa: B009 -- without a delimiter there are no prefixes
        found[key] = bytes((await storage.get(key)).data)
    return found


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that no event of this loop tells."""
    # Long, for a busy machine: a test that waits in vain fails by it, and none depends on it.
    async with asyncio.timeout(240):
        while not condition():  # noqa: ASYNC110 -- see above
            await asyncio.sleep(0.001)


async def cancelled_when(doing: Coroutine[Any, Any, object], condition: Callable[[], bool]) -> None:
    """Begin something, cancel it once the condition holds, and wait for its end."""
    task = asyncio.create_task(doing)
    await until(condition)
    # The condition held a moment ago, on this loop: nothing else has run since.
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@contextmanager
def counted_calls() -> Generator[list[str]]:
    """Note the Python functions that are called, resumed coroutines included."""
    calls: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def set_document(session: Session, path: str, document: bytes | dict[str, Any]) -> None:
    """Give an array a document that no store takes; of a mapping, what differs from its own."""
    node = session.workspace.base.nodes[path]
    if isinstance(document, dict):
        document = json.dumps(json.loads(node.user_data) | document).encode()
    session.workspace.set_node(node.path, document, node.array)
