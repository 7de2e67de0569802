"""Chunks through the gateway, beside reads of the same chunks from the storage itself.

The storage is a server of S3's protocol behind a wire, as for most gateways; the gateway is a
process that a client asks over loopback, 64 requests at a time.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import aiohttp
import numpy as np
from zarr.api.asynchronous import create_array
from zarr.core.buffer import default_buffer_prototype

from benchmarks.s3_peers import BUCKET, s3_options
from icechunk_async import Repository
from icechunk_async._runtime.concurrency import bounded_map

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.contest import Contest
    from benchmarks.s3_server import S3Server

AT_ONCE = 64
_OURS = "ours"
_DIRECT = "ours, without a gateway"
_PROTOTYPE = default_buffer_prototype()


@contextmanager
def _serving(url: str, options: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Serve a repository in a process; yield the URL of its branch main, and the process."""
    program = Path(sys.executable).with_name("icechunk-async")
    given = [f"--option={name}={json.dumps(value)}" for name, value in options.items()]
    command = [str(program), "serve", url, *given, "--port", "0", "--json", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield f"{json.loads(process.stdout.readline())['url']}/@branch.main", process.pid
        finally:
            process.terminate()


def _cpu_seconds(process: int) -> float:
    """Return the processor time of a process, as exactly as Linux keeps it."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return sum(int((it / "schedstat").read_text("ascii").split()[0]) for it in tasks) / 1e9


async def _fill(url: str, options: dict[str, Any], count: int, cells: int) -> None:
    async with Repository.create(url, storage_options=options) as repository:
        session = await repository.writable_session("main")
        array = await create_array(
            store=session.store,
            name="a",
            shape=(count * cells,),
            chunks=(cells,),
            dtype="float32",
            compressors=None,
        )
        await array.setitem(slice(None), np.arange(count * cells, dtype="float32"))
        await session.commit("filled")


def test_served(contest: Contest, s3: S3Server) -> None:
    """256 chunks of 256 KiB, 64 at a time."""
    count, cells = contest.pick((8, 1024), (256, 64 * 1024))
    url, keys = f"s3://{BUCKET}/{uuid4().hex}", [f"a/c/{number}" for number in range(count)]
    wire = contest.pick("near", "50 ms")
    options = s3_options(s3.endpoint(wire))
    asyncio.run(_fill(url, s3_options(s3.endpoint()), count, cells))
    stack = AsyncExitStack()
    with asyncio.Runner() as runner, _serving(url, options) as (served, gateway):

        async def opened() -> tuple[aiohttp.ClientSession, Any]:
            connector = aiohttp.TCPConnector(limit=AT_ONCE)
            client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            repository = Repository.open(url, storage_options=options)
            session = await (await stack.enter_async_context(repository)).readonly_session("main")
            return client, session.store

        client, store = runner.run(opened())

        async def through_gateway(key: str) -> int:
            async with client.get(f"{served}/{key}") as reply:
                return len(await reply.read())

        async def direct(key: str) -> int:
            value = await store.get(key, _PROTOTYPE)
            return 0 if value is None else len(value)

        async def read(one: Any) -> None:
            sizes = await bounded_map(one, keys, limit=AT_ONCE)
            assert sizes == [4 * cells] * count

        cpu_of: dict[str, list[float]] = {_OURS: [], _DIRECT: []}

        def serve() -> None:
            began = _cpu_seconds(gateway)
            runner.run(read(through_gateway))
            cpu_of[_OURS].append((_cpu_seconds(gateway) - began) / count)

        def read_directly() -> None:
            began = time.process_time()
            runner.run(read(direct))
            cpu_of[_DIRECT].append((time.process_time() - began) / count)

        try:
            contest.race(
                f"S3 50 ms away: GET 256 KB through the gateway, {AT_ONCE} at a time",
                {_OURS: serve, _DIRECT: read_directly},
                operations=count,
                rounds=9,
                targets={_DIRECT: 0.7},
            )
            contest.add(
                f"S3 50 ms away: processor time of the gateway for 256 KB, {AT_ONCE} at a time",
                cpu_of,
                metric="cpu seconds",
                targets={_DIRECT: 0.65},  # a slow minute of the machine is not a fault
                note="without that of its client, which is another machine's",
            )
        finally:
            runner.run(stack.aclose())
