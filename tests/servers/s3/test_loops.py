"""Connections of several event loops, of which some have stopped."""

from __future__ import annotations

import asyncio
import gc
import warnings
from typing import TYPE_CHECKING

from icechunk_async_s3.connections import Connections
from icechunk_async_s3.options import make_options, place_of

if TYPE_CHECKING:
    from icechunk_async_s3.connections import Connection

OPTIONS = {"anonymous": True, "region": "us-east-1"}


def connections() -> Connections:
    """Return those of a bucket that nobody asks anything."""
    return Connections(place_of("s3://bucket/prefix"), make_options(None, OPTIONS))


def is_closed(connection: Connection) -> bool:
    """Return whether a connection can send nothing any more."""
    return connection.http.closed


def test_a_loop_that_goes_on_closes_its_own() -> None:
    """Nobody waits for it."""
    kept, other = connections(), asyncio.new_event_loop()
    connection = other.run_until_complete(kept.here())
    asyncio.run(kept.close())
    assert not is_closed(connection)
    other.run_until_complete(asyncio.sleep(0.01))
    assert is_closed(connection)
    other.close()


def test_calls_of_a_stopped_loop_are_dropped() -> None:
    """As zarr's own has when the interpreter exits, which would complain of work undone."""
    kept, other = connections(), asyncio.new_event_loop()
    connection = other.run_until_complete(kept.here())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        asyncio.run(kept.close())
        other.close()
        gc.collect()
    assert [it for it in said if "never awaited" in str(it.message)] == []
    asyncio.run(connection.http.close())
