"""Run the server as a process until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import pickle
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from tests.servers.gcs.json_api.server import Server
from tests.servers.gcs.json_api.state import State

if TYPE_CHECKING:
    from typing import BinaryIO


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--journal", type=Path, help="keep all changes here, also over a restart")
    parser.add_argument("--rewrite-bytes", type=int, help="bytes that one rewrite call copies")
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments.port, arguments.journal, arguments.rewrite_bytes))


async def _serve(port: int, journal: Path | None, rewrite_bytes: int | None) -> None:
    state = State()
    if journal is not None:
        state = _restore(journal)
    server = web.ServerRunner(web.Server(Server(state, rewrite_bytes).handle), access_log=None)
    await server.setup()
    site = web.TCPSite(server, "127.0.0.1", port, backlog=1024, reuse_address=True)
    await site.start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await server.cleanup()


def _restore(journal: Path) -> State:
    """Return the state recorded in a journal. Later changes are added to the same journal."""
    changes: list[tuple[object, ...]] = []
    journal.touch()
    whole = 0
    with journal.open("rb") as source:
        while True:
            try:
                changes.append(pickle.load(source))
            except (EOFError, pickle.UnpicklingError):
                break  # a kill cut the last change off, which was never answered
            whole = source.tell()
    stream = journal.open("r+b")
    stream.truncate(whole)
    stream.seek(whole)
    state = State(lambda change: _append(stream, change))
    for change in changes:
        state.replay(change)
    return state


def _append(stream: BinaryIO, change: object) -> None:
    pickle.dump(change, stream)
    stream.flush()


if __name__ == "__main__":
    main()
